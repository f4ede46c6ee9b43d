"""This module holds a simulation against real runs: what to run and tolerate, and what came out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moetier.experiments.config import check_run, load_hardware, policy_label, read_mapping
from moetier.experiments.files import inside
from moetier.experiments.runs import setting_of
from moetier.experiments.sources import open_source
from moetier.experiments.timeline import TimelineWriter
from moetier.sim.hardware import Profile
from moetier.sim.policy.compose import compose
from moetier.sim.run import Setting, simulate
from moetier.sim.units import parse_rate, parse_time
from moetier.sim.yaml_input import check

if TYPE_CHECKING:
    from moetier.validate.compare.grid import Point, Summary
    from moetier.validate.compare.observe import Case
    from moetier.validate.machines.pacing import Pace

CALIBRATE = "calibrate"
"""As hardware: measure this machine just before."""

RAW = "raw"
TIERS = ("dram", "disk")  # of a disk machine
Progress = Callable[[int, int], None]
Open = Callable[[str], Any]  # a progress bar, by its title


class Tolerances(BaseModel):
    """What is wrong by more fails. With *beyond_spread* what repeats differ by is no error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    median_error: float = Field(default=0.1, ge=0)
    p90_error: float = Field(default=0.2, ge=0)
    kendall_tau: float = Field(default=0.9, ge=-1, le=1)
    equal: bool = True
    beyond_spread: bool = False


class ValidateConfig(BaseModel):
    """A grid of *policies* and capacities on a real machine, of which *base* is a run's config."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    base: dict[str, Any]
    policies: list[str | dict[str, Any]] = Field(min_length=1)
    capacity: dict[str, list[str]] = Field(min_length=1, max_length=1)
    machine: Literal["disk"] = "disk"
    lanes: int = Field(default=2, ge=1)
    pace: str = RAW  # of each lane, such as "100 MB/s"
    latency: str = "0 ns"
    threads: int = Field(default=1, ge=1)
    folder: str | None = None  # where the expert file lies; default: a temporary one
    calibrate_seconds: float = Field(default=60, gt=0)
    repeats: int = Field(default=3, ge=1)
    seed: int = 0
    tolerances: Tolerances = Tolerances()


@dataclass(frozen=True)
class Validation:
    """What came of it; *missed* says which tolerances were."""

    config: ValidateConfig
    profile: Profile
    points: list[Point]
    summary: Summary
    missed: list[str]
    known_limitations: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "name": self.config.name,
            "points": [point.as_dict() for point in self.points],
            "median_error": self.summary.median_error,
            "p90_error": self.summary.p90_error,
            "kendall_tau": self.summary.kendall_tau,
            "pairs": asdict(self.summary.ranking),
            "equal": self.summary.equal,
            "stalled_points": self.summary.stalled,
            "tolerances": self.config.tolerances.model_dump(),
            "missed": self.missed,
            "hardware": self.profile.name,
            "identity": self.profile.identity,
            "known_limitations": self.known_limitations,
        }


def load_validation(path: str | Path, overrides: list[str] | None = None) -> ValidateConfig:
    """Return the validation that the YAML file *path* describes."""
    return check(ValidateConfig, read_mapping(path, overrides), str(path))


def validate(
    config: ValidateConfig,
    out: Path,
    *,
    bar: Open,
    timeline: Path | None = None,
    simulated_profile: Callable[[Profile], Profile] = lambda profile: profile,
) -> Validation:
    """Run *config*, whose files go to the folder *out*.

    *bar* opens a progress bar. *timeline* is a file for what occupied each lane in the first point,
    simulated and measured, one below the other. *simulated_profile* changes what the simulation
    believes about the machine, to see whether the comparison notices.

    Raises:
        InputError: If the config makes no runs, or its profile is of another machine.
    """
    from moetier.validate.compare.grid import run_grid, summarise
    from moetier.validate.compare.observe import observe
    from moetier.validate.identity import check_identity

    pace = _pace(config)
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(TemporaryDirectory(dir=config.folder, prefix="moetier-validate-"))
        )
        profile_path = _profile(config, out, folder, pace, bar)
        profile = load_hardware(str(profile_path))
        check_identity(profile, folder, {"threads": str(config.threads)})
        cases = _cases(config, str(profile_path))
        files = _pack(cases, folder, bar)
        said: list[str] = []

        def simulated(case: Case, around: Any, **observers: Any) -> Any:
            from moetier.sim.machine.simulated import SimMachine

            believed = simulated_profile(case.setting.profile)
            setting = Setting(**{**vars(case.setting), "profile": believed})
            return simulate(
                case.source,
                setting,
                machine=around(SimMachine),
                popularity=case.popularity,
                **observers,
            )

        def measured(case: Case, around: Any, **observers: Any) -> Any:
            from moetier.validate.machines.run import run_on_disk

            found = run_on_disk(
                case.source,
                case.setting,
                files[_layout_of(case)],
                lanes=config.lanes,
                pace=pace,
                threads=config.threads,
                around=around,
                popularity=case.popularity,
                **observers,
            )
            said.extend(found.known_limitations)
            return found

        with bar("measure") as progress:
            points = run_grid(
                cases,
                simulated,
                measured,
                repeats=config.repeats,
                seed=config.seed,
                on_progress=progress,
            )
        if timeline is not None:
            with TimelineWriter(timeline, f"{profile.name} (simulated)") as spans:
                observe(simulated, cases[0], spans)
                spans.process(f"{profile.name} (measured)")
                observe(measured, cases[0], spans)
    summary = summarise(points, beyond_spread=config.tolerances.beyond_spread)
    return Validation(config, profile, points, summary, missed(config, summary), _once(said))


def missed(config: ValidateConfig, summary: Summary) -> list[str]:
    """Return which tolerances *summary* misses, in words."""
    wanted, tau = config.tolerances, summary.kendall_tau
    found = []
    for name, error, most in (
        ("median_error", summary.median_error, wanted.median_error),
        ("p90_error", summary.p90_error, wanted.p90_error),
    ):
        if error > most:
            found.append(f"{name} is {error:.1%}, above {most:.1%}")
    if tau is not None and tau < wanted.kendall_tau:
        found.append(f"kendall_tau is {tau:.3f}, below {wanted.kendall_tau}")
    if wanted.equal and not summary.equal:
        found.append("decisions or bytes differ though the policy asks no lateness")
    return found


def _once(said: Sequence[str]) -> list[str]:
    """Return *said* without what was said before but for its numbers."""
    return list({re.sub(r"\d+", "", text): text for text in reversed(said)}.values())[::-1]


def _pace(config: ValidateConfig) -> Pace | None:
    from moetier.validate.machines.pacing import Pace

    if config.pace == RAW:
        return None
    with inside("pace"):
        return Pace(parse_rate(config.pace), parse_time(config.latency))


def _profile(
    config: ValidateConfig, out: Path, folder: Path, pace: Pace | None, bar: Open
) -> str | Path:
    """Return where the profile is; measure it first if that is asked for."""
    hardware = config.base.get("hardware", CALIBRATE)
    if hardware != CALIBRATE:
        return str(hardware)
    from moetier.validate.calibrate.run import calibrate

    stand_in = check_run({**config.base, "hardware": "desktop-nvme"}, f"{config.name}: base")
    header = open_source(stand_in).source.header
    precisions = [compose(policy, TIERS[:1]).precision for policy in config.policies]
    by_kernel = {precision.kernel: precision for precision in precisions}
    by_kernel.pop("whole", None)
    with bar("calibrate") as progress:
        calibrate(
            config.machine,
            out / "profile.yaml",
            header.geometry,
            stand_in.weights or header.weights or "bf16",
            folder,
            seconds=config.calibrate_seconds,
            on_progress=progress,
            lanes=config.lanes,
            pace=pace,
            threads=config.threads,
            precisions=list(by_kernel.values()),
        )
    return out / "profile.yaml"


def _cases(config: ValidateConfig, hardware: str) -> list[Case]:
    from moetier.validate.compare.observe import Case

    ((tier, sizes),) = config.capacity.items()
    found = []
    for policy, size in product(config.policies, sizes):
        data = {**config.base, "hardware": hardware, "policy": policy, "capacity": {tier: size}}
        where = f"{config.name}, policy={policy_label(policy)}, capacity.{tier}={size}"
        run = check_run(data, where)
        with inside(where):
            profile = load_hardware(hardware)
            found.append(
                Case(
                    policy_label(policy),
                    {tier: size},
                    open_source(run).source,
                    setting_of(run, profile),
                )
            )
    return found


def _pack(cases: Sequence[Case], folder: Path, bar: Open) -> Mapping[str, Path]:
    """Write a file of slices for every layout that the cases need; return where each is."""
    from moetier.validate.machines.run import pack_synthetic

    found: dict[str, Path] = {}
    with bar("pack") as progress:
        for case in cases:
            key = _layout_of(case)
            if key not in found:
                found[key] = folder / f"{key}.slices"
                pack_synthetic(found[key], case.source, case.setting, on_progress=progress)
    return found


def _layout_of(case: Case) -> str:
    """Return a name for how the slices of *case* are laid out."""
    precision = compose(case.setting.policy, TIERS[:1]).precision
    shown = json.dumps([precision.kernel, {k: str(v) for k, v in vars(precision).items()}])
    return hashlib.sha256(shown.encode()).hexdigest()[:12]
