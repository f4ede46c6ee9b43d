"""Tests of opening the routing source of a run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.experiments import sources
from moetier.experiments.config import RunConfig, SyntheticConfig, check_run
from moetier.experiments.sources import complete, open_source, open_trace_file
from moetier.traces.errors import InputError
from moetier.traces.geometry import load_geometry
from moetier.traces.importers import IMPORTERS
from moetier.traces.io import ArrayTrace, TraceReader, write_trace
from moetier.traces.schema import Header
from moetier.traces.synthetic import Synthetic
from moetier.traces.testing import small_header, small_rows

TINY = load_geometry("moe-tiny")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(Synthetic(TINY, prompt=2, tokens=5), tmp_path / "t.parquet")


def of(trace: Path, **keys: Any) -> RunConfig:
    return check_run({"trace": str(trace), "hardware": "phone-ufs4", **keys}, "test")


def test_a_trace_is_read_once(trace: Path) -> None:
    first, second = open_source(of(trace)), open_source(of(trace))

    assert first.source is second.source
    assert isinstance(first.source, ArrayTrace)


def test_an_edited_trace_is_read_again(trace: Path) -> None:
    first = open_source(of(trace))
    write_trace(Synthetic(TINY, prompt=2, tokens=9), trace)

    second = open_source(of(trace))

    assert first.fingerprint != second.fingerprint


def test_a_large_trace_is_streamed(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "HELD_BYTES", 1)

    assert isinstance(open_source(of(trace)).source, TraceReader)


def test_the_fingerprint_is_that_of_the_content(trace: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved.parquet"
    moved.write_bytes(trace.read_bytes())

    assert open_source(of(moved)).fingerprint == TraceReader(trace).fingerprint


def test_a_synthetic_source_is_drawn_once(make_run: Callable[..., RunConfig]) -> None:
    config = make_run()

    assert open_source(config).source is open_source(config).source


def test_a_large_synthetic_source_is_not_held(
    make_run: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "HELD_BYTES", 1)

    assert isinstance(open_source(make_run(synthetic__seed=77)).source, Synthetic)


@pytest.mark.parametrize("change", [{"seed": 1}, {"skew": 0.5}, {"tokens": 13}, {"context": 9}])
def test_every_number_of_a_synthetic_source_counts(
    change: dict[str, Any], make_run: Callable[..., RunConfig]
) -> None:
    before = open_source(make_run()).fingerprint
    after = open_source(make_run(**{f"synthetic__{k}": v for k, v in change.items()})).fingerprint

    assert before != after


def test_a_model_may_end_early(make_run: Callable[..., RunConfig]) -> None:
    whole, cut = open_source(make_run()), open_source(make_run(synthetic__layers=2))
    geometry, short = whole.source.header.geometry, cut.source.header.geometry

    assert short.moe_layers == geometry.moe_layers[:2]
    assert short.n_layers == geometry.moe_layers[1] + 1 < (geometry.n_layers or 0)
    assert cut.fingerprint != whole.fingerprint
    same = open_source(make_run(synthetic__layers=geometry.n_moe_layers))
    assert same.fingerprint == whole.fingerprint


def test_every_parameter_of_synthetic_routing_is_a_key_with_the_same_default() -> None:
    parameters = inspect.signature(Synthetic).parameters
    fields = SyntheticConfig.model_fields

    assert set(parameters) - set(fields) == {"scores"}
    of_the_model = ("geometry", "layers")
    assert {name: fields[name].default for name in fields if name not in of_the_model} == {
        name: item.default
        for name, item in parameters.items()
        if name not in ("geometry", "scores")
    }


def test_a_live_model_is_refused_with_a_way_out() -> None:
    config = check_run({"live": "some/model", "hardware": "phone-ufs4"}, "test")

    with pytest.raises(InputError, match="live: a live model is not simulated but run; use `moet"):
        open_source(config)


def test_a_file_that_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_text("hello")

    with pytest.raises(InputError, match=rf"trace: .*{path.name}: not a Parquet file"):
        open_source(of(path))


@pytest.mark.parametrize(
    ("policy", "wide"), [("on-demand", False), ({"prefetch": "oracle"}, True), ("belady", False)]
)
def test_scores_are_read_only_for_parts_that_may_look(
    policy: Any, wide: bool, tmp_path: Path
) -> None:
    header = small_header()
    path = write_trace(ArrayTrace(header, [small_rows(header)]), tmp_path / "s.parquet")
    source = open_source(of(path, policy=policy)).source

    rows = next(iter(source.columns()))

    assert (rows.scores is not None) is wide


def imported(tmp_path: Path, layers: int = 8, largest: int = 20, k: int = 4) -> Path:
    """Write a trace whose model is not known."""
    text, path = tmp_path / "t.jsonl", tmp_path / "imported.parquet"
    ids = [list(range(largest + 1 - k, largest + 1)) for _ in range(layers)]
    text.write_text("".join(json.dumps({"tok": i, "layers": ids}) + "\n" for i in range(3)))
    IMPORTERS.create("jsonl-layers", {"source": text, "out": path})
    return path


def test_a_published_model_completes_a_trace(tmp_path: Path) -> None:
    path = imported(tmp_path)

    header = open_source(of(path, model="moe-tiny")).source.header

    assert header.geometry == TINY
    assert not {"model", "n_experts", "geometry.hidden"} & set(header.unknown)
    assert "weights" in header.unknown


def test_a_streamed_trace_is_completed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = imported(tmp_path)
    monkeypatch.setattr(sources, "HELD_BYTES", 1)

    source = open_source(of(path, model="moe-tiny")).source

    assert isinstance(source, TraceReader)
    assert source.header.geometry == TINY
    assert len(list(source.batches())) == 3 * 8


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ({"layers": 7}, "the trace has n_moe_layers 7, 'moe-tiny' 8"),
        ({"largest": 40}, "the trace has n_experts 41, 'moe-tiny' 32"),
        ({"k": 2}, "the trace has top_k 2, 'moe-tiny' 4"),
    ],
)
def test_another_model_than_the_traced_one_is_refused(
    shape: dict[str, int], problem: str, tmp_path: Path
) -> None:
    config = of(imported(tmp_path, **shape), model="moe-tiny")

    with pytest.raises(InputError) as caught:
        open_source(config)

    assert str(caught.value) == f"model: {problem}; name the model that was traced"


def test_a_size_that_the_trace_knows_must_agree() -> None:
    known = TINY.model_copy(update={"hidden": 64})
    header = Synthetic(TINY, tokens=1).header.model_copy(update={"geometry": known})

    with pytest.raises(InputError, match="the trace has hidden 64, 'moe-tiny' 128"):
        complete(header, TINY)


def test_what_is_not_known_does_not_have_to_agree() -> None:
    sparse = TINY.model_copy(update={"hidden": None, "moe_intermediate": None})
    header: Header = Synthetic(sparse, tokens=1).header

    assert complete(header, TINY) == TINY


def test_a_popularity_trace_opens_by_itself(trace: Path) -> None:
    assert open_trace_file(str(trace)).source.header.geometry.name == "moe-tiny"


def test_made_up_routing_has_scores_for_a_policy_that_needs_them() -> None:
    synthetic = SyntheticConfig(geometry="moe-tiny", tokens=3)
    plain, routed = (
        open_source(RunConfig(synthetic=synthetic, hardware="rtx-4090", policy=policy))
        for policy in ("on-demand", "cache-prior")
    )

    assert plain.source.header.score_kind == "none"
    assert routed.source.header.score_kind == "logits"
    assert plain.fingerprint == routed.fingerprint  # they route alike
    assert [b.experts for b in plain.source.batches()] == [
        b.experts for b in routed.source.batches()
    ]
