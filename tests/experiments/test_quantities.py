"""Tests of what is known about columns."""

from __future__ import annotations

import pytest

from moetier.experiments.quantities import QUANTITIES, quantity
from moetier.sim.metrics import Metrics

# Counts say how much was looked at, and parts are drawn as columns of their own.
NEITHER = {
    "tokens", "decode_steps", "prefill_tokens", "lookups", "misses", "compulsory_misses",
    "warmup_bytes", "prefetch_issued", "cpu_share", "time_breakdown_ms", "energy_breakdown",
}  # fmt: skip


def test_every_metric_that_can_be_drawn_has_a_direction() -> None:
    undirected = {name for name in Metrics().summary() if quantity(name).better is None}

    assert undirected == NEITHER


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("tpot_ms", "lower"),
        ("energy_mj_per_token", "lower"),
        ("miss_rate", "lower"),
        ("byte_miss_rate", "lower"),
        ("bytes_per_token", "lower"),
        ("peak_bytes", "lower"),
        ("oracle_gap", "lower"),
        ("hit_rate_decode", "higher"),
        ("hit_rate_cumulative", "higher"),
        ("accuracy", "higher"),
        ("tokens_per_s", "higher"),
        ("prefetch_precision", "higher"),
        ("capacity.hbm", "lower"),
        ("tokens", None),
        ("something_else", None),
    ],
)
def test_directions(name: str, better: str | None) -> None:
    assert quantity(name).better == better


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("tpot_ms", "time per output token (ms)"),
        ("bytes_per_token", "bytes read per token (MB)"),
        ("capacity.dram", "expert cache in dram"),
        ("synthetic.reuse", "synthetic.reuse"),
        ("decode_steps", "decode steps"),
    ],
)
def test_titles_carry_units(name: str, title: str) -> None:
    assert quantity(name).title == title


def test_shares_name_their_denominator() -> None:
    shares = {name: about for name, about in QUANTITIES.items() if about.unit == "share"}

    assert [name for name, about in shares.items() if not about.per] == []
