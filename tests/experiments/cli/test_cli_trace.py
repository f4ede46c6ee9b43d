"""Tests of `moetier trace` and `moetier capture`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.traces.geometry import load_geometry
from moetier.traces.io import TraceReader, write_trace
from moetier.traces.synthetic import Synthetic

Invoke = Callable[..., Any]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(
        Synthetic(load_geometry("moe-tiny"), prompt=2, tokens=5), tmp_path / "t.parquet"
    )


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f'{{"tok": {i}, "layers": [[0, 1], [2, {i}]]}}\n' for i in (3, 4)))
    return path


def test_info_describes(moetier: Invoke, trace: Path) -> None:
    text = moetier("trace", "info", trace).stdout

    assert "n experts" in text
    assert "decode tokens" in text
    assert "24 MiB (25165824 bytes)" in text
    assert "bytes_mean 3 MiB" in text


def test_info_as_json(moetier: Invoke, trace: Path) -> None:
    found = json.loads(moetier("trace", "info", trace, "--json", "--weights", "q4_0").stdout)

    assert (found["decode_tokens"], found["prefill_tokens"]) == (5, 2)
    assert found["weights"] == "q4_0"
    assert found["all_bytes"] == 8 * 32 * 3 * 128 * 128 // 32 * 18


def test_info_shows_warnings(moetier: Invoke, tmp_path: Path) -> None:
    flat = Synthetic(load_geometry("moe-tiny"), tokens=400, skew=0.0, reuse=0.0)
    path = write_trace(flat, tmp_path / "flat.parquet")

    assert "warning: looks uniform" in moetier("trace", "info", path).stdout


def test_validate_counts_rows(moetier: Invoke, trace: Path) -> None:
    assert "56 rows, all good" in moetier("trace", "validate", trace).stdout


@pytest.mark.parametrize("command", ["info", "validate"])
def test_a_damaged_trace_is_status_2(command: str, moetier: Invoke, trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-9])

    result = moetier("trace", command, trace, status=2)

    assert "truncated after" in result.stderr
    assert result.stdout == ""


def test_convert_imports(moetier: Invoke, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"

    result = moetier("trace", "convert", "--from", "jsonl-layers", lines, out)

    assert result.stdout.strip() == str(out)
    assert "the source does not say: weights, scores" in result.stderr
    assert TraceReader(out).validate() == 4


def test_convert_takes_options(moetier: Invoke, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"

    moetier("trace", "convert", "--from", "jsonl-layers", "--option", "n_experts=64", lines, out)

    assert TraceReader(out).header.geometry.n_experts == 64


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--from", "jsonl-layer"), "--from: unknown importer 'jsonl-layer'; did you mean"),
        (("--from", "jsonl-layers", "--option", "x=1"), "importer 'jsonl-layers', parameter 'x'"),
        (("--from", "jsonl-layers", "--model", "gpt-9"), "unknown model 'gpt-9'"),
        (("--from", "jsonl-layers", "--option", "x"), "'x' has no value"),
    ],
)
def test_a_bad_conversion_is_status_2_and_no_file(
    words: tuple[str, ...], problem: str, moetier: Invoke, lines: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.parquet"

    result = moetier("trace", "convert", *words, lines, out, status=2)

    assert problem in result.stderr
    assert not out.exists()


def test_export_writes_csv(moetier: Invoke, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.csv"

    result = moetier("trace", "export", trace, out)

    assert result.stdout.strip() == f"{out}: {56 * 4} lines"
    with out.open() as file:
        assert len(list(csv.DictReader(file))) == 56 * 4


def test_export_writes_json_lines(moetier: Invoke, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.txt"

    moetier("trace", "export", trace, out, "--format", "jsonl")

    assert "header" in json.loads(out.read_text().splitlines()[0])


def test_an_unknown_format_is_status_2(moetier: Invoke, trace: Path, tmp_path: Path) -> None:
    result = moetier("trace", "export", trace, tmp_path / "t.xml", status=2)

    assert "unknown export format 'xml'; known: csv, jsonl" in result.stderr


def test_capture_passes_everything_on(
    moetier: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def capture_model(model: str, prompts: Path, out: Path, **more: Any) -> Path:
        seen.update(more, model=model, prompts=prompts, out=out)
        more["progress"](1, 2)
        return out

    monkeypatch.setattr("moetier.traces.capture.capture_model", capture_model)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    words = ("--model", "m", "--prompts", "p.txt", "--out", tmp_path / "t.parquet", "--hidden")

    result = moetier(
        "capture", *words, "--max-new-tokens", 3, "--device-map", "auto", "--batch-size", 2,
        "--predictor", "router-reuse",
    )  # fmt: skip

    assert result.stdout.strip() == str(tmp_path / "t.parquet")
    seen.pop("progress")
    assert seen == {
        "model": "m", "prompts": Path("p.txt"), "out": tmp_path / "t.parquet", "hidden": True,
        "max_new_tokens": 3, "device_map": "auto", "batch_size": 2, "seed": 0,
        "predictor": "router-reuse",
    }  # fmt: skip


def test_capture_without_torch_names_the_way_out(
    moetier: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    result = moetier("capture", "--model", "m", "--prompts", "p", "--out", "o", status=2)

    assert "capture needs torch, which is not installed; `pip install moetier[models]`" in (
        result.stderr
    )


def test_capture_needs_a_model(moetier: Invoke) -> None:
    assert "--model" in moetier("capture", "--out", "o", status=2).stderr


def test_export_writes_requests_for_libcachesim(
    moetier: Invoke, trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "t.bin"
    result = moetier("trace", "export", trace, out, "--to", "oracle-general", "--weights", "bf16")

    assert out.stat().st_size % 24 == 0
    assert result.stdout == f"{out}: {out.stat().st_size // 24} requests\n"
