"""Tests of made-up routing: its shape, its statistics and its repeatability."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import groupby
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetier.traces.batch import DECODE, PREFILL, LayerBatch
from moetier.traces.columns import concat
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.info import describe
from moetier.traces.io import TraceReader
from moetier.traces.synthetic import Synthetic, shuffled

GEOMETRY = Geometry(name="small", n_experts=16, top_k=4, moe_layers=list(range(2, 8)))


def plain(batch: LayerBatch) -> tuple[Any, ...]:
    return (batch.step, batch.phase, batch.layer, batch.context, batch.experts, batch.requests)


@settings(max_examples=40)
@given(
    prompt=st.integers(0, 5),
    tokens=st.integers(0, 5),
    requests=st.integers(1, 3),
    skew=st.sampled_from([0.0, 1.0]),
    reuse=st.sampled_from([0.0, 0.5, 1.0]),
    layer_correlation=st.sampled_from([0.0, 0.5, 1.0]),
    scores=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_shape_is_what_was_asked_for(**arguments: Any) -> None:
    prompt, tokens, requests = (arguments[key] for key in ("prompt", "tokens", "requests"))
    if prompt + tokens == 0:
        return
    source = Synthetic(GEOMETRY, **arguments)
    batches = list(source.batches())

    steps = [list(group) for _, group in groupby(batches, key=lambda batch: batch.step)]
    assert len(steps) == (prompt > 0) + tokens
    for number, step in enumerate(steps):
        prefill = number == 0 and prompt > 0
        position = prompt + number - (prompt > 0)
        assert [batch.layer for batch in step] == list(range(6))
        assert {batch.step for batch in step} == {number}
        for batch in step:
            assert batch.phase == (PREFILL if prefill else DECODE)
            assert batch.n_tokens == requests * (prompt if prefill else 1)
            each = prompt * (prompt + 1) // 2 if prefill else position + 1
            assert batch.context == requests * each
            in_order = [r for r in range(requests) for _ in range(prompt if prefill else 1)]
            assert batch.requests == in_order
            ids = np.reshape(batch.experts, (-1, 4))
            assert all(len(set(row)) == 4 for row in ids.tolist())
            assert batch.weights is not None
            weights = batch.weights.reshape(-1, 4)
            assert (np.diff(weights, axis=1) <= 0).all()
            assert weights.sum(axis=1) == pytest.approx(np.ones(len(weights)), abs=1e-5)


def test_the_largest_scores_are_the_experts_in_order() -> None:
    source = Synthetic(GEOMETRY, prompt=3, tokens=50, reuse=0.6, layer_correlation=0.3, scores=True)
    for batch in source.batches():
        assert batch.scores is not None
        order = np.argsort(-batch.scores, axis=1, kind="stable")[:, :4]

        assert order.reshape(-1).tolist() == batch.experts


def test_the_same_seed_gives_the_same_rows_and_another_seed_others() -> None:
    one = Synthetic(GEOMETRY, prompt=4, tokens=20, seed=1)
    first, again = ([plain(b) for b in one.batches()] for _ in range(2))
    other = [plain(b) for b in Synthetic(GEOMETRY, prompt=4, tokens=20, seed=2).batches()]

    assert first == again
    assert first != other


@pytest.mark.slow
def test_another_process_gives_the_same_file(tmp_path: Path) -> None:
    code = (
        "from moetier.traces.synthetic import Synthetic\n"
        "from moetier.traces.geometry import Geometry\n"
        f"g = Geometry.model_validate_json({GEOMETRY.model_dump_json()!r})\n"
        f"Synthetic(g, prompt=4, tokens=20).write({str(tmp_path / 'b')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    Synthetic(GEOMETRY, prompt=4, tokens=20).write(tmp_path / "a")

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_rows_do_not_depend_on_where_chunks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Synthetic(GEOMETRY, prompt=7, tokens=30, requests=2, reuse=1.0, skew=0.5)
    monkeypatch.setattr("moetier.traces.synthetic.CHUNK_SCORES", 3 * 2 * 6 * 16)
    assert sum(1 for _ in source.columns()) == 11  # the prefill, ten times three tokens
    last: dict[tuple[int, int], set[int]] = {}
    for batch in source.batches():
        assert batch.requests is not None
        for i, request in enumerate(batch.requests):
            ids = set(batch.experts[4 * i : 4 * i + 4])
            assert last.setdefault((request, batch.layer), ids) == ids  # reuse 1: for ever


def test_without_skew_and_reuse_routing_is_uniform_and_has_no_memory() -> None:
    info = describe(Synthetic(GEOMETRY, tokens=2000, skew=0, reuse=0))

    assert info.dispersion == pytest.approx(1, abs=0.35)
    assert info.reuse == pytest.approx(4 / 16, abs=0.01)
    assert info.entropy == pytest.approx(1, abs=0.002)


def test_popularity_follows_zipf_in_another_order_in_each_layer() -> None:
    source = Synthetic(GEOMETRY, tokens=3000, skew=1.0, reuse=0)
    counts = np.zeros((6, 16))
    for batch in source.batches():
        counts[batch.layer, batch.experts[0]] += 1  # the first choice: chances p exactly
    share = -np.sort(-counts / 3000, axis=1).mean(axis=0)
    zipf = 1 / np.arange(1, 17) / np.sum(1 / np.arange(1, 17))

    assert share == pytest.approx(zipf, abs=0.015)
    assert len({tuple(np.argsort(-row)[:4]) for row in counts}) > 3


@pytest.mark.parametrize("reuse", [0.2, 0.5, 0.8])
def test_reuse_keeps_that_share_and_chance_adds_the_rest(reuse: float) -> None:
    info = describe(Synthetic(GEOMETRY, tokens=2000, skew=0, reuse=reuse))
    # k of the 4 are kept, and the 4 - k drawn afresh from the other 16 - k may be old ones too
    expected = sum(
        comb(4, k) * reuse**k * (1 - reuse) ** (4 - k) * (k + (4 - k) ** 2 / (16 - k)) / 4
        for k in range(5)
    )

    assert info.reuse == pytest.approx(expected, abs=0.01)


def test_reuse_belongs_to_each_request() -> None:
    source = Synthetic(GEOMETRY, tokens=300, requests=2, skew=0, reuse=1.0)
    first = next(iter(source.batches()))

    assert set(first.experts[:4]) != set(first.experts[4:])
    assert describe(source).reuse == 1.0


def ranks_in_common(source: Synthetic, distance: int) -> float:
    """Return how often the first choices of layers *distance* apart have the same rank."""
    firsts = np.array([batch.experts[0] for batch in source.batches()]).reshape(-1, 6)
    ranked = np.empty_like(firsts)
    for layer in range(6):
        ranks = {e: r for r, (e, _) in enumerate(Counter(firsts[:, layer].tolist()).most_common())}
        ranked[:, layer] = [ranks[e] for e in firsts[:, layer].tolist()]
    return float((ranked[:, :-distance] == ranked[:, distance:]).mean())


def test_layers_go_together_as_asked_the_more_the_nearer() -> None:
    made = {
        c: Synthetic(GEOMETRY, tokens=2000, skew=1.2, reuse=0, layer_correlation=c)
        for c in (0.0, 0.7, 1.0)
    }

    independent = ranks_in_common(made[0.0], 1)
    assert independent + 0.2 < ranks_in_common(made[0.7], 1) < 0.99
    assert ranks_in_common(made[0.7], 3) < ranks_in_common(made[0.7], 1)
    assert ranks_in_common(made[1.0], 1) > 0.95


def test_writing_gives_the_same_batches(tmp_path: Path) -> None:
    source = Synthetic(GEOMETRY, prompt=5, tokens=10, requests=2, scores=True)
    reader = TraceReader(source.write(tmp_path / "t.parquet"), with_scores=True)
    reader.validate()

    assert reader.header == source.header
    assert reader.header.provenance.seed == 0
    for a, b in zip(reader.batches(), source.batches(), strict=True):
        assert plain(a) == plain(b)
        assert np.array_equal(a.weights, b.weights)  # type: ignore[arg-type]  # both are there
        assert np.array_equal(a.scores, b.scores)  # type: ignore[arg-type]  # both are there


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prompt": -1}, "prompt is -1; at least 0"),
        ({"tokens": -1}, "tokens is -1; at least 0"),
        ({"requests": 0}, "requests is 0; at least 1"),
        ({"skew": -0.1}, "skew is -0.1; at least 0"),
        ({"skew": float("inf")}, "skew is inf"),
        ({"reuse": 1.1}, "reuse is 1.1; 0 to 1"),
        ({"layer_correlation": -1}, "layer_correlation is -1; 0 to 1"),
        ({"tokens": 0}, "prompt and tokens are both 0"),
    ],
)
def test_impossible_numbers_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"synthetic: {words}"):
        Synthetic(GEOMETRY, **arguments)


def test_shuffling_keeps_what_is_asked_and_loses_the_order() -> None:
    source = Synthetic(GEOMETRY, prompt=30, tokens=400, skew=0.8, reuse=0.7)
    control = shuffled(source, seed=3)
    before, after = describe(source), describe(control)
    rows, moved = concat(list(source.columns())), concat(list(control.columns()))

    for phase in (PREFILL, DECODE):
        for layer in range(6):
            was = rows.experts[(rows.phase == phase) & (rows.moe_layer == layer)]
            now = moved.experts[(moved.phase == phase) & (moved.moe_layer == layer)]
            assert sorted(was.tolist()) == sorted(now.tolist())
            assert was.tolist() != now.tolist()
    assert after.hot_share == before.hot_share
    assert before.reuse is not None
    assert after.reuse is not None
    assert after.reuse < before.reuse - 0.2
    assert control.header.provenance.note == "the tokens of a trace, shuffled"


def test_shuffling_moves_a_token_through_all_layers_together() -> None:
    source = Synthetic(GEOMETRY, tokens=40, reuse=0)

    def tokens(chunks: Any) -> list[Any]:
        return concat(list(chunks)).experts.reshape(40, 6 * 4).tolist()

    was, now = tokens(source.columns()), tokens(shuffled(source).columns())

    assert sorted(was) == sorted(now)
    assert was != now


def test_shuffling_copes_with_layers_that_see_fewer_tokens(data: Path, tmp_path: Path) -> None:
    from moetier.traces.importers import IMPORTERS

    source = data / "phone-qwen3-30b-a3b" / "route.csv"
    IMPORTERS.create("bigmoeonedge", {"source": source, "out": tmp_path / "t.parquet"})
    reader = TraceReader(tmp_path / "t.parquet")
    control = shuffled(reader)

    assert not control.header.recorded_residency
    assert next(iter(control.batches())).recorded is None
    assert [b.n_tokens for b in control.batches()] == [b.n_tokens for b in reader.batches()]
    assert describe(control).hot_share == describe(reader).hot_share


@pytest.mark.benchmark
def test_a_thousand_tokens_of_a_large_model_take_less_than_two_seconds() -> None:
    import time

    geometry = Geometry(name="large", n_experts=128, top_k=8, moe_layers=list(range(48)))
    start = time.perf_counter()
    n = sum(len(chunk) for chunk in Synthetic(geometry, tokens=1000).columns())

    assert n == 48_000
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(("n_experts", "top_k"), [(1, 1), (2, 1), (4, 4)])
def test_the_smallest_models_work(n_experts: int, top_k: int) -> None:
    geometry = Geometry(name="least", n_experts=n_experts, top_k=top_k, moe_layers=[0])
    source = Synthetic(geometry, prompt=2, tokens=5, reuse=0.5, layer_correlation=0.5)

    assert {len(set(batch.experts[:top_k])) for batch in source.batches()} == {top_k}
    assert describe(source).decode_tokens == 5


def test_context_shifts_positions_and_nothing_else() -> None:
    short = Synthetic(GEOMETRY, prompt=3, tokens=4, seed=5)
    long = Synthetic(GEOMETRY, prompt=3, tokens=4, seed=5, context=100)

    pairs = list(zip(short.batches(), long.batches(), strict=True))

    assert [b.experts for b, _ in pairs] == [b.experts for _, b in pairs]
    assert all(b.context == a.context + 100 * a.n_tokens for a, b in pairs)
