"""Tests of `moetier list`, `reproduce`, `bench`, and of the whole: help, version, start."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import moetier as package
from moetier.experiments.catalogue import KINDS
from moetier.experiments.papers import Row

Invoke = Callable[..., Any]

COMMANDS = (
    "bench", "calibrate", "capture", "evaluate", "list", "plot", "report", "reproduce", "search",
    "simulate", "sweep", "trace", "train-predictor", "validate",
)  # fmt: skip
HEAVY = ("numpy", "pandas", "pyarrow", "torch", "matplotlib", "pydantic", "yaml", "simpy", "joblib")

ROW = {
    "name": "lru", "rate": 2e6, "unit": "lookups/s", "peer_rate": 1e6, "ratio": 2.0, "spread": 0.1,
    "repeats": [2e6], "hit_rate": 0.7, "note": "a note",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_list_prints_every_name(kind: str, moetier: Invoke) -> None:
    text = moetier("list", kind).stdout

    assert all(entry["name"] in text for entry in KINDS[kind]())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_list_as_json(kind: str, moetier: Invoke) -> None:
    assert json.loads(moetier("list", kind, "--json").stdout) == KINDS[kind]()


def test_nothing_to_list_is_said(moetier: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "predictors", list)

    assert moetier("list", "predictors").stdout == "no predictors yet\n"


def test_defaults_and_parameters_are_shown(moetier: Invoke) -> None:
    text = moetier("list", "policies").stdout

    assert "lru (default)" in text
    assert "remember: bool = True" in text


def test_an_unknown_kind_is_status_2(moetier: Invoke) -> None:
    assert "'policies'" in moetier("list", "polices", status=2).stderr


@pytest.fixture
def one_row(monkeypatch: pytest.MonkeyPatch) -> Row:
    found = Row(
        name="a", published=2.0, ours=3.0, ratio=1.5, kind="prediction", what="what it is",
        source="S", assumptions=["an assumption"],
    )  # fmt: skip
    other = Row(
        name="b", published=2.0, ours=None, ratio=None, kind="not-testable", what="the other",
        source="S", reason="no data",
    )  # fmt: skip
    monkeypatch.setattr("moetier.experiments.papers.reproduce", lambda name: [found, other])
    return found


def test_reproduce_prints_a_table(moetier: Invoke, one_row: Row) -> None:
    text = moetier("reproduce", "speculating-experts").stdout

    assert "not-testable" in text
    assert "a: what it is" in text
    assert "b: the other: no data" in text
    assert "assumed: an assumption" in text


@pytest.mark.parametrize("name", ["speculating-experts", "all"])
def test_reproduce_as_json(name: str, moetier: Invoke, one_row: Row) -> None:
    rows = json.loads(moetier("reproduce", name, "--json").stdout)

    assert {"name", "published", "ours", "low", "high", "ratio", "kind"} <= set(rows[0])
    assert {**rows[0], "paper": "any"} == {"paper": "any", **one_row.model_dump()}
    assert rows[1]["ours"] is None


def test_an_unknown_paper_is_bad_input(moetier: Invoke) -> None:
    result = moetier("reproduce", "speculating-expert", status=2)

    assert "unknown paper 'speculating-expert'; did you mean 'speculating-experts'?" in (
        result.stderr
    )
    assert result.stdout == ""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the measurement; what it was asked for and what it returns."""
    asked: dict[str, Any] = {"rows": [dict(ROW)]}

    def bench(**options: Any) -> list[dict[str, Any]]:
        asked.update(options)
        rows: list[dict[str, Any]] = asked["rows"]
        return rows

    monkeypatch.setattr("moetier.experiments.bench.bench", bench)
    return asked


def test_bench_prints_a_table(moetier: Invoke, measured: dict[str, Any]) -> None:
    text = moetier("bench", "--tokens", 50, "--repeats", 2, "--long").stdout

    assert "lookups/s" in text
    assert "lru: a note" in text
    assert (measured["tokens"], measured["repeats"], measured["long"]) == (50, 2, True)


def test_bench_as_json(moetier: Invoke, measured: dict[str, Any]) -> None:
    assert json.loads(moetier("bench", "--json").stdout) == [ROW]
    assert (measured["tokens"], measured["repeats"], measured["long"]) == (1000, 5, False)


def test_bench_fails_above_the_memory_limit(moetier: Invoke, measured: dict[str, Any]) -> None:
    measured["rows"] = [{**ROW, "within_limit": False, "peak_mb": 900}]

    assert "peak_mb 900" in moetier("bench", status=1).stdout


def test_help_names_every_command(moetier: Invoke) -> None:
    text = moetier("--help").stdout

    assert all(f" {name} " in text for name in COMMANDS)


@pytest.mark.parametrize(
    "command", [*COMMANDS, "trace info", "trace validate", "trace convert", "trace export"]
)
def test_every_command_has_help(command: str, moetier: Invoke) -> None:
    assert "Usage:" in moetier(*command.split(), "--help").stdout


def test_what_is_not_there_is_not_offered(moetier: Invoke) -> None:
    assert "No such command 'optimise'" in moetier("optimise", status=2).stderr


def test_the_version_is_printed(moetier: Invoke) -> None:
    assert moetier("--version").stdout == f"{package.__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom moetier.experiments.cli import main\n"
        "try:\n    main()\nfinally:\n    print('\\n' + ' '.join(sys.modules))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True
    )

    loaded = set(done.stdout.splitlines()[-1].split())
    assert "typer" in loaded
    assert not loaded & set(HEAVY)


def test_a_sweep_imports_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys\nimport moetier.experiments.sweep, moetier.experiments.plots\n"
        "print(' '.join(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert not set(done.stdout.split()) & {"torch", "transformers", "matplotlib"}


@pytest.mark.benchmark
def test_help_starts_in_less_than_0_4_seconds() -> None:
    """Processor time, as other work on the machine must not decide."""
    code = "from moetier.experiments.cli import main; main()"

    def used() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(used() for _ in range(5)) < 0.4


def test_the_script_runs_main(monkeypatch: pytest.MonkeyPatch) -> None:
    from moetier.experiments import cli

    monkeypatch.setattr(sys, "argv", ["moetier", "--version"])

    with pytest.raises(SystemExit) as caught:
        cli.main()

    assert caught.value.code == 0
