"""This module tests runs whose batches carry predictions that no model made."""

from __future__ import annotations

from typing import Any

import pytest

from moetier.experiments.config import RunConfig
from moetier.experiments.runs import run
from moetier.traces.errors import InputError

RECALL = {"kind": "recall-model", "recall": [0.9, 0.8]}


def config(**changes: Any) -> RunConfig:
    keys: dict[str, Any] = {
        "synthetic": {"geometry": "olmoe-1b-7b", "tokens": 6},
        "hardware": "rtx-4090",
        "capacity": {"hbm": "25 %"},
    }
    return RunConfig.model_validate(keys | changes)


def test_a_run_says_that_its_predictions_were_drawn() -> None:
    found = run(config(predictor=RECALL, policy={"prefetch": "predicted"}))

    assert found["prefetch_issued"] > 0
    assert any("drawn, not made" in text for text in found["known_limitations"])


def test_the_same_seed_draws_the_same_and_another_seed_does_not() -> None:
    policy = {"prefetch": "predicted"}
    one, same, other = (
        run(config(predictor=RECALL | {"seed": seed}, policy=policy)) for seed in (1, 1, 2)
    )

    assert one["tpot_ms"] == same["tpot_ms"]
    assert one["tpot_ms"] != other["tpot_ms"]


def test_a_policy_that_reads_predictions_is_refused_without_them() -> None:
    with pytest.raises(InputError, match="reads the scores that low-rank predicts 1 layers ahead"):
        run(config(policy="specprefetch"))


def test_a_horizon_that_nobody_predicts_is_refused() -> None:
    policy = {"prefetch": {"kind": "predicted", "depth": 3}}

    with pytest.raises(InputError, match="3 layers ahead; the source has: recall-model 1 ahead"):
        run(config(predictor=RECALL, policy=policy))


def test_better_recall_hides_more_when_the_link_has_time() -> None:
    policy = {"prefetch": {"kind": "window-aware", "depth": 1}}
    slow_host = {"synthetic": {"geometry": "olmoe-1b-7b", "tokens": 24, "context": 60000}}
    good, bad = (
        run(config(predictor={"kind": "recall-model", "recall": [r]}, policy=policy, **slow_host))
        for r in (0.95, 0.2)
    )

    assert good["prefetch_precision"] > bad["prefetch_precision"]
    assert good["tpot_ms"] < bad["tpot_ms"]
