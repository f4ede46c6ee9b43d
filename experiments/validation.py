"""This module holds a simulation against real runs, and says whether it was close enough."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from moetier.experiments.config import check_run, load_hardware, policy_label
from moetier.experiments.files import inside
from moetier.experiments.runs import popularity_of, setting_of
from moetier.experiments.sources import open_source
from moetier.experiments.timeline import TimelineWriter
from moetier.experiments.validation_config import RAW, ValidateConfig
from moetier.experiments.verdict import Validation, unnoticed
from moetier.sim.hardware import Profile
from moetier.sim.policy.base import Precision
from moetier.sim.policy.compose import compose
from moetier.sim.run import simulate
from moetier.sim.units import parse_rate, parse_time
from moetier.traces.errors import InputError

if TYPE_CHECKING:
    from moetier.experiments.real_machines import Open, RealMachine
    from moetier.sim.machine.base import Span
    from moetier.validate.compare.grid import Point
    from moetier.validate.compare.observe import Case, Run
    from moetier.validate.machines.cuda.device import Device
    from moetier.validate.machines.pacing import Pace

CALIBRATE = "calibrate"
"""As hardware: measure this machine just before."""

Believe = Callable[[Profile], Profile]
"""From the profile of a machine to what the simulation takes it for."""


def validate(
    config: ValidateConfig,
    out: Path,
    *,
    bar: Open,
    timeline: Path | None = None,
    simulated_profile: Believe = lambda profile: profile,
    device: Device | None = None,
) -> Validation:
    """Run *config*, whose files go to the folder *out*.

    Whatever can be refused is refused before anything is measured. *bar* opens a progress bar.
    *timeline* is a file for what occupied each lane in the first point, simulated and measured, one
    below the other. *simulated_profile* changes what the simulation believes about the machine, to
    see whether the comparison notices. *device* stands in for the CUDA device of `machine: cuda`.

    Raises:
        InputError: If the config makes no runs, or its profile is of another machine.
    """
    from moetier.experiments.real_machines import open_machine
    from moetier.validate.compare.grid import run_grid, summarise
    from moetier.validate.compare.load import watch_load
    from moetier.validate.identity import check_identity

    pace = _pace(config)
    if timeline is not None and not timeline.parent.is_dir():
        raise InputError(
            f"directory '{timeline.parent}' does not exist", where=timeline, way_out="create it"
        )
    with ExitStack() as stack:
        folder = stack.enter_context(_own_folder(config))
        lanes, threads = config.lanes, config.threads
        machine = stack.enter_context(
            open_machine(
                config.machine, folder, lanes=lanes, pace=pace, threads=threads, device=device
            )
        )
        hardware = str(config.base.get("hardware", CALIBRATE))
        measures = hardware == CALIBRATE
        if measures:
            hardware = _stand_in(folder, machine)
        else:
            check_identity(load_hardware(hardware), folder, machine.facts)
        cases = _cases(config, hardware)
        said: list[str] = []
        fewer = machine.layers(cases)
        if fewer < (whole := cases[0].source.header.geometry.n_moe_layers):
            config = _ending_early(config, fewer)
            cases = _cases(config, hardware)
            said.append(f"only the first {fewer} of {whole} MoE layers: more do not fit here")
        _check(config, cases, bar)
        machine.prepare(cases, bar)
        if measures:
            hardware = str(_calibrate(config, cases[0], out, folder, machine, bar))
            cases = _cases(config, hardware)
        profile = load_hardware(hardware)
        simulated = _simulated(simulated_profile)

        def measured(case: Case, around: Any, **observers: Any) -> Any:
            found = machine.run(case, around, **observers)
            said.extend(found.known_limitations)
            return found

        with bar("measure") as progress, watch_load() as load:
            points = run_grid(
                cases,
                simulated,
                measured,
                repeats=config.repeats,
                seed=config.seed,
                on_progress=progress,
            )
        if timeline is not None:
            _draw(timeline, profile.name, cases[0], simulated, measured)
    summary, wanted = summarise(points), config.tolerances
    noticed = _would_notice(config, cases, points, simulated_profile)
    return Validation(
        config.name, wanted, profile, points, summary, noticed, load,
        missed=[*wanted.missed(summary), *unnoticed(wanted.must_notice, noticed)],
        known_limitations=_once(said),
    )  # fmt: skip


def _simulated(believe: Believe) -> Run:
    """Return how a case is simulated on the machine that *believe* makes of its profile."""
    from moetier.sim.machine.simulated import SimMachine

    def run(case: Case, around: Any, **observers: Any) -> Any:
        setting = replace(case.setting, profile=believe(case.setting.profile))
        machine, popularity = around(SimMachine), case.popularity
        return simulate(case.source, setting, machine=machine, popularity=popularity, **observers)

    return run


def _would_notice(
    config: ValidateConfig, cases: Sequence[Case], points: Sequence[Point], believe: Believe
) -> dict[str, bool]:
    """Hold the measurements against simulations of wrong machines; return which miss a tolerance.

    What is missed all the same, such as a ranking that cannot be tested, does not count. What makes
    no difference to this machine is left out.
    """
    from moetier.validate.compare.grid import summarise
    from moetier.validate.compare.observe import observe
    from moetier.validate.compare.wrong import WRONG

    found, wanted = {}, config.tolerances
    usual = set(wanted.missed(summarise(points)))
    for name, spoil in WRONG.items():
        profile = believe(cases[0].setting.profile)
        if spoil(profile) == profile:
            continue
        run = _simulated(_one_after(believe, spoil))
        others = [
            replace(point, tpot_sim_ms=observe(run, case).result.metrics["tpot_ms"])
            for case, point in zip(cases, points, strict=True)
        ]
        found[name] = bool(set(wanted.missed(summarise(others))) - usual)
    return found


def _one_after(first: Believe, second: Believe) -> Believe:
    return lambda profile: second(first(profile))


def _draw(path: Path, name: str, case: Case, simulated: Run, measured: Run) -> None:
    """Write what occupied each lane; nothing is written while a run goes on, which takes time."""
    from moetier.validate.compare.observe import observe

    seen: dict[str, list[Span]] = {"simulated": [], "measured": []}
    for (_, spans), run in zip(seen.items(), (simulated, measured), strict=True):
        observe(run, case, spans.append)
    with TimelineWriter(path, f"{name} (simulated)") as write:
        for span in seen["simulated"]:
            write(span)
        write.process(f"{name} (measured)")
        for span in seen["measured"]:
            write(span)


def _once(said: Sequence[str]) -> list[str]:
    """Return *said* without what was said before but for its numbers."""
    return list({re.sub(r"\d+", "", text): text for text in reversed(said)}.values())[::-1]


def _pace(config: ValidateConfig) -> Pace | None:
    from moetier.validate.machines.pacing import Pace

    if config.pace == RAW:
        return None
    with inside("pace"):
        return Pace(parse_rate(config.pace), parse_time(config.latency))


@contextmanager
def _own_folder(config: ValidateConfig) -> Iterator[Path]:
    """Yield a folder for expert files, gone at the end."""
    try:
        made = TemporaryDirectory(dir=config.folder, prefix="moetier-validate-")
    except OSError as error:
        raise InputError(
            f"cannot be used: {error.strerror}",
            where=f"{config.name}: folder: {config.folder}",
            way_out="name a folder that is there and can be written to",
        ) from None
    with made as name:
        yield Path(name)


def _ending_early(config: ValidateConfig, layers: int) -> ValidateConfig:
    """Return *config* with its model cut to *layers* MoE layers."""
    made = config.base.get("synthetic")
    if made is None:
        raise InputError(
            f"only {layers} layers of the trace's model fit into memory",
            where=config.name,
            way_out="use `synthetic` routing, whose model may end early, or another machine",
        )
    return config.model_copy(
        update={"base": {**config.base, "synthetic": {**made, "layers": layers}}}
    )


def _stand_in(folder: Path, machine: RealMachine) -> str:
    """Return where the profile of a machine is whose times mean nothing, to check runs with."""
    from moetier.validate.calibrate.profile import write_profile
    from moetier.validate.calibrate.stand_in import stand_in

    path = folder / "stand-in.yaml"
    write_profile(path, stand_in(machine.capacities()))
    return str(path)


def _calibrate(
    config: ValidateConfig, case: Case, out: Path, folder: Path, machine: RealMachine, bar: Open
) -> Path:
    """Measure the machine for the model of *case* and all policies; return where its profile is."""
    from moetier.experiments.real_machines import layout_key
    from moetier.validate.calibrate.run import calibrate

    header = case.source.header
    precisions = [compose(policy, machine.tiers[:1]).precision for policy in config.policies]
    by_layout = {layout_key(p): p for p in precisions if p.kernel != Precision.kernel}
    with bar("calibrate") as progress:
        calibrate(
            config.machine,
            out / "profile.yaml",
            header.geometry,
            case.setting.weights or header.weights or "bf16",
            folder,
            seconds=config.calibrate_seconds,
            on_progress=progress,
            precisions=list(by_layout.values()),
            **machine.calibration,
        )
    return out / "profile.yaml"


def _cases(config: ValidateConfig, hardware: str) -> list[Case]:
    from moetier.validate.compare.observe import Case

    ((tier, sizes),) = config.capacity.items()
    found = []
    for policy, size in product(config.policies, sizes):
        data = {**config.base, "hardware": hardware, "policy": policy, "capacity": {tier: size}}
        label = policy_label(policy)
        where = _where(config, label, {tier: size})
        run = check_run(data, where)
        with inside(where):
            source = open_source(run).source
            setting = setting_of(run, load_hardware(hardware))
            popularity = popularity_of(run, source)
        found.append(Case(label, {tier: size}, source, setting, popularity))
    return found


def _where(config: ValidateConfig, policy: str, capacity: Mapping[str, str]) -> str:
    sizes = ", ".join(f"capacity.{tier}={size}" for tier, size in capacity.items())
    return f"{config.name}, policy={policy}, {sizes}"


def _check(config: ValidateConfig, cases: Sequence[Case], bar: Open) -> None:
    """Simulate every case, to refuse what cannot be run or compared before minutes are spent."""
    from moetier.validate.compare.observe import observe

    run = _simulated(lambda profile: profile)
    with bar("check") as progress:
        for done, case in enumerate(cases, 1):
            with inside(_where(config, case.policy, case.capacity)):
                if observe(run, case).result.metrics["tpot_ms"] is None:
                    raise InputError(
                        "no time per output token: it leaves out the first decode step, and "
                        f"{case.setting.warmup_steps} of warm-up",
                        way_out="decode two tokens or more after the warm-up",
                    )
            progress(done, len(cases))
