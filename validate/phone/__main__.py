"""This module is `python -m moetier.validate.phone`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from moetier.sim.hardware import Profile, load_profile
from moetier.traces.errors import InputError
from moetier.traces.files import replacing
from moetier.validate.phone.fit import Fit, chosen, fit
from moetier.validate.phone.predict import (
    Comparison,
    above,
    as_dict,
    open_routing,
    predict,
    summary,
)
from moetier.validate.phone.reads import READS
from moetier.validate.phone.runs import read_runs

BASE, PROFILE, TOP_K, BAR = "phone-ufs4", "phone-oneplus15r", 8, 0.12

_WIDTH = 90  # where lines are folded; a line goes on to the end of its word
_WRITTEN = "# Written by `python -m moetier.validate.phone fit DIR --out FILE`.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, fit or predict; return 1 for a missed bar, 2 for bad input."""
    options = _parser().parse_args(argv)
    try:
        return int(options.do(options))
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _fit(options: argparse.Namespace) -> int:
    header = open_routing(options.folder).header
    runs = chosen(read_runs(options.folder), options.top_k)
    found = fit(runs, header, load_profile(options.base), options.name)
    if options.out is not None:
        with replacing(options.out) as temporary:
            temporary.write_text(as_yaml(found.profile), encoding="utf-8")
    told = {
        "factors": found.factors,
        "io_ms": {name: {"measured": m, "fitted": f} for name, (m, f) in found.io_ms.items()},
        "compute_ms": found.compute_ms,
        "mgmt_ms_per_mib": found.ms_per_mib,
        "mgmt_ms": found.mgmt_ms,
        "profile": found.profile.model_dump(mode="json", exclude_none=True),
    }
    _say(json.dumps(told, indent=2) if options.json else _show_fit(found))
    return 0


def _predict(options: argparse.Namespace) -> int:
    profile = load_profile(options.profile)
    found = predict(options.folder, profile, options.reads, options.seed)
    told = as_dict(found, profile, options.bar)
    _say(json.dumps(told, indent=2) if options.json else _show(found, options.bar))
    return 0 if told["met"] else 1


def as_yaml(profile: Profile) -> str:
    """Return *profile* as the text of its file, its defaults left out."""
    data = profile.model_dump(mode="json", exclude_defaults=True)
    return _WRITTEN + yaml.safe_dump(data, sort_keys=False, width=_WIDTH, allow_unicode=True)


def _show_fit(found: Fit) -> str:
    lines = [f"{'run':<14}{'I/O measured':>14}{'fitted':>9}{'error':>8}"]
    lines += [
        f"{name:<14}{m:11.1f} ms{f:6.1f} ms{f / m - 1:+8.1%}"
        for name, (m, f) in found.io_ms.items()
    ]
    lines += [
        "factors on the flash table, by lanes: "
        + ", ".join(f"{n}: {f:.2f}" for n, f in found.factors.items()),
        f"compute {found.compute_ms:.1f} ms per token, cache management {found.ms_per_mib:.3f} ms "
        f"per MiB read, {found.mgmt_ms:.1f} ms per token in the profile",
    ]
    return "\n".join(lines)


def _show(found: Sequence[Comparison], bar: float) -> str:
    lines = [
        f"{'run':<21} {'bytes':<6} {'MiB/token':>13} {'compute':>8} {'mgmt':>6} "
        f"{'io, ms':>16} {'error':>6} {'stall, ms':>14} {'error':>6} {'wall, ms':>14} {'error':>6} "
        f"{'tokens':>7} {'own wall':>9} {'error':>6}"
    ]
    for c in found:
        pairs = [
            f"{getattr(c.measured, q):.1f} {getattr(c.predicted, q):.1f}"
            for q in ("io", "stall", "wall")
        ]
        mib = f"{c.read_mib['measured']:.1f} {c.read_mib['predicted']:.1f}"
        lines.append(
            f"{c.run:<21} {c.bytes_from:<6} {mib:>13} {c.given.compute_ms:8.1f} "
            f"{c.given.mgmt_ms:6.1f} {pairs[0]:>16} {_share(c.error['io'])} {pairs[1]:>14} "
            f"{_share(c.error['stall'])} {pairs[2]:>14} {_share(c.error['wall'])} "
            f"{c.token_error:7.1%} {c.own.wall:9.1f} {_share(c.own_error)}"
        )
    lines += [
        "pairs are measured and predicted, medians over the last two thirds of a run; tokens: "
        "median error of single tokens, their bytes given; own: without the run's compute and mgmt",
        "",
        f"{'what is left':<21} {'levels alone':>12} {'compute 90/10 %':>15} "
        f"{'wall, bytes given':>18} {'page faults':>11} {'CPU time':>9}",
    ]
    for c in found:
        faults = "-" if c.major_faults is None else f"{c.major_faults:.0f}"
        cpu = "-" if c.cpu_correlation is None else f"{c.cpu_correlation:.2f}"
        given = _share(c.given_bytes.wall / c.measured.wall - 1)
        lines.append(
            f"{c.run:<21} {_share(c.level_error):>12} {c.compute_spread:15.2f} {given:>18} "
            f"{faults:>11} {cpu:>9}"
        )
    named = ", ".join(
        f"{name.replace('_', ' ')} {x:.1%}" for name, x in summary(found).items() if x is not None
    )
    lines += [
        "levels alone: error on wall if stall were exact; page faults: per token, those "
        "that read flash; CPU time: its correlation with compute",
        "",
        f"over {len(found)} runs: {named}",
        f"error on wall above {bar:.0%}: {', '.join(above(found, bar)) or 'none'}",
    ]
    return "\n".join(lines)


def _share(error: float | None) -> str:
    return f"{error:+6.0%}" if error is not None else f"{'-':>6}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moetier.validate.phone", description="Compare with a phone's recorded runs."
    )
    commands = parser.add_subparsers(required=True)
    fitting = commands.add_parser("fit", help="fit a profile to the runs without overlap")
    fitting.add_argument("--base", default=BASE, help="profile with the flash tables")
    fitting.add_argument("--name", default=PROFILE, help="of the fitted profile")
    fitting.add_argument("--top-k", type=int, default=TOP_K, help="experts per token of the runs")
    fitting.add_argument("--out", type=Path, help="write the profile to this file")
    fitting.set_defaults(do=_fit)
    predicting = commands.add_parser("predict", help="predict overlapped and traced runs")
    predicting.add_argument("--profile", default=PROFILE, help="name, or path of a YAML file")
    predicting.add_argument("--reads", type=int, default=READS, help="reads per expert")
    predicting.add_argument("--seed", type=int, default=0, help="of drawn misses")
    predicting.add_argument("--bar", type=float, default=BAR, help="median error on wall, a share")
    predicting.set_defaults(do=_predict)
    for command in (fitting, predicting):
        command.add_argument("folder", type=Path, help="holds runs/*.csv and route.csv")
        command.add_argument("--json", action="store_true", help="print JSON to stdout")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
