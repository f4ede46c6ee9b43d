"""What a phone did, replayed exactly: hits, bytes and residency of a recorded run.

The trace and the figures are others' (BigMoeOnEdge, see `data/README.md` beside them).
"""

import csv
from pathlib import Path

import pytest

from moetier.sim.hardware import load_profile
from moetier.sim.machine.processes import ProcessMachine
from moetier.sim.plan import LayerPlan
from moetier.sim.run import Setting, simulate
from moetier.sim.testing import run
from moetier.traces.importers.bigmoeonedge import import_bigmoeonedge
from moetier.traces.importers.jsonl_layers import import_jsonl_layers
from moetier.traces.io import ArrayTrace, TraceReader

MIB = 1 << 20


@pytest.fixture(scope="module")
def phone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> ArrayTrace:
    out = tmp_path_factory.mktemp("phone") / "phone.parquet"
    import_bigmoeonedge(data / "phone-qwen3-30b-a3b" / "route.csv", out)
    return ArrayTrace.of(TraceReader(out))


def published(data: Path) -> list[dict[str, str]]:
    with (data / "phone-qwen3-30b-a3b" / "replay_curve.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["policy"] in ("lru", "belady")]


@pytest.mark.slow
def test_every_published_figure_to_its_last_digit(data: Path, phone: ArrayTrace) -> None:
    rows = published(data)
    profile = load_profile("phone-ufs4")
    ours = []
    for row in rows:
        room = {"dram": int(row["budget_mib"]) * MIB}
        metrics = simulate(phone, Setting(profile, {"eviction": row["policy"]}, room)).metrics
        figures = {
            "hit_pct_cum": f"{100 * metrics['hit_rate_cumulative']:.3f}",
            "hit_pct_decode": f"{100 * metrics['hit_rate_decode']:.3f}",
            "read_mib": f"{metrics['bytes_read_total'] / MIB:.1f}",
        }
        ours.append({"budget_mib": row["budget_mib"], "policy": row["policy"], **figures})

    assert ours == rows
    assert len(rows) == 22
    assert len({row["budget_mib"] for row in rows}) == 11


def test_every_expert_was_where_the_phone_had_it(phone: ArrayTrace) -> None:
    """At 4000 MiB, of every first occurrence in a batch: 0 is a miss, 1 a hit."""
    wrong: list[tuple[int, int, int]] = []
    seen = 0

    def compare(plan: LayerPlan) -> None:
        nonlocal seen
        recorded = dict(
            zip(reversed(plan.batch.experts), reversed(plan.batch.recorded or []), strict=True)
        )
        base = plan.batch.layer * 128
        missing = {s - base for s in plan.missing}
        seen += len(plan.needed)
        wrong.extend(
            (plan.batch.step, plan.batch.layer, s - base)
            for s in plan.needed
            if recorded[s - base] != int(s - base not in missing)
        )

    room = {"dram": 4000 * MIB}
    simulate(phone, Setting(load_profile("phone-ufs4"), "on-demand", room), on_plan=compare)

    assert not wrong
    assert seen > 128 * 48 * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["on-demand", {"prefetch": {"kind": "previous-token", "depth": 2, "cancel": True}}],
    ids=str,
)
@pytest.mark.parametrize("overlap", [False, True])
def test_both_machines_agree_on_the_phone(phone: ArrayTrace, policy: str, overlap: bool) -> None:
    profile, room = load_profile("phone-ufs4"), {"dram": 2000 * MIB}
    fast = run(phone, profile, policy, capacity=room, overlap=overlap, watch=False)
    slow = run(
        phone, profile, policy, capacity=room, overlap=overlap, watch=False, machine=ProcessMachine
    )

    assert slow.digest == fast.digest


def test_a_trace_of_another_model_reads_and_replays(data: Path, tmp_path: Path) -> None:
    """OLMoE: 299 tokens, 16 layers, 8 of 64 experts; a cache of a quarter hits most of the time."""
    out = tmp_path / "olmoe.parquet"
    header = import_jsonl_layers(data / "olmoe-1b-7b" / "trace.jsonl", out, model="olmoe-1b-7b")
    seen = run(
        ArrayTrace.of(TraceReader(out)),
        load_profile("rtx-4090"),
        capacity={"hbm": 16 * 16 * 3 * 2048 * 1024 * 2},
        watch=False,
    )

    assert header.geometry.n_moe_layers == 16
    assert seen.metrics["tokens"] == 299
    assert seen.metrics["lookups"] == 299 * 16 * 8
    assert 0.3 < seen.metrics["hit_rate_decode"] < 0.9
