"""Tests of measuring the simulator's speed; how fast it is guards tests/bench."""

from __future__ import annotations

import json
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import pytest

from moetier.experiments import bench as module
from moetier.experiments.bench import bench, made, peer, row, timed_run
from moetier.experiments.store import dump_json
from moetier.sim.policy.eviction.lru import LRU
from moetier.traces.geometry import load_geometry

QWEN = load_geometry("qwen3-30b-a3b")
SMALL = QWEN.model_copy(update={"moe_layers": [0, 1], "n_layers": 2})


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """One repeat over a few tokens."""
    return bench(tokens=8, repeats=1)


@pytest.mark.slow
def test_every_row_has_the_keys_of_the_contract(rows: list[dict[str, Any]]) -> None:
    models = all(find_spec(name) for name in ("torch", "transformers"))
    assert [item["name"] for item in rows] == [
        "lru",
        "previous-token",
        "previous-token-saturated",
        "window-aware",
        "bit-sliced",
        "tokens-linear",
        "experts-independent",
        "startup",
        *(["evaluate-overhead", "evaluate-bit-sliced"] if models else []),
    ]
    for item in rows:
        assert {"name", "rate", "peer_rate", "ratio", "repeats", "unit"} <= set(item)
        assert item["rate"] > 0
        assert len(item["repeats"]) == 1
    json.loads(dump_json(rows))


@pytest.mark.slow
def test_prefetching_is_measured_where_there_is_something_to_prefetch(
    rows: list[dict[str, Any]],
) -> None:
    found = {item["name"]: item for item in rows}

    saturated = found["previous-token-saturated"]
    assert saturated["prefetch_issued"] > 0
    assert "5 %" in saturated["note"]


def test_a_row_compares_medians() -> None:
    found = row("x", [1.0, 4.0, 2.0], [4.0, 1.0, 3.0], unit="u")

    assert found["rate"] == 2.0
    assert found["peer_rate"] == 3.0
    assert found["ratio"] == pytest.approx(2 / 3)
    assert found["spread"] == 1.5
    assert found["repeats"] == [1.0, 4.0, 2.0]


def test_without_a_peer_there_is_no_ratio() -> None:
    found = row("x", [1.0])

    assert found["peer_rate"] is None
    assert found["ratio"] is None


def test_the_peer_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", gone)

    assert peer(made(SMALL, 2)) is None


def test_the_peer_counts_the_hits_of_a_cache_per_layer() -> None:
    pytest.importorskip("moe_policylang")
    source = made(SMALL, 60)
    run = peer(source)
    assert run is not None

    _, hits, lookups = run()

    expected = 0
    for layer in range(2):
        resident: dict[int, None] = {}
        for batch in source.batches():
            if batch.layer != layer:
                continue
            expected += sum(expert in resident for expert in batch.experts)
            for expert in batch.experts:
                resident.pop(expert, None)
                resident[expert] = None
            for expert in list(resident)[: max(0, len(resident) - 32)]:
                del resident[expert]
    assert lookups == 60 * 2 * 8
    assert hits == pytest.approx(expected, abs=lookups // 50)  # it may evict within a token


def test_a_timed_run_is_a_whole_run() -> None:
    took, metrics = timed_run(made(QWEN, 3), share=Fraction(1, 2))

    assert took > 0
    assert metrics["lookups"] == 3 * 48 * 8
    assert metrics["energy_mj_per_token"] > 0


@pytest.mark.slow
def test_a_long_run_goes_from_file_to_file(monkeypatch: pytest.MonkeyPatch) -> None:
    found = module._long_run(tokens=20)

    assert found["name"] == "long-run"
    assert found["within_limit"] is True
    assert 20 < found["peak_mb"] < module.LONG_MB
    assert found["rate"] > 0


def test_the_benchmarked_policy_is_lru() -> None:
    from moetier.sim.policy.compose import compose

    assert type(compose("on-demand").eviction[0]) is LRU
