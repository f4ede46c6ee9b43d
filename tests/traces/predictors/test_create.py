"""Predictors are made from what a config says, and what it gets wrong is named."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from moetier.traces.errors import InputError
from moetier.traces.predictors import PREDICTORS, create
from moetier.traces.predictors.low_rank import LowRank

KINDS = [
    "default-vector", "estimator", "hybrid", "linear", "low-rank", "mlp", "popularity",
    "previous-token", "recall-model", "router-reuse",
]  # fmt: skip


def test_all_kinds_are_there() -> None:
    assert PREDICTORS.names() == KINDS


def test_a_name_or_a_mapping_will_do() -> None:
    plain, other = create("low-rank"), create({"kind": "low-rank", "rank": 8, "horizons": [2, 1]})

    assert isinstance(plain, LowRank)
    assert isinstance(other, LowRank)
    assert (plain.kind, plain.rank, plain.horizons, dict(plain.arguments)) == (
        "low-rank", 64, (1, 2), {},
    )  # fmt: skip
    assert (other.rank, other.horizons) == (8, (1, 2))
    assert other.arguments == {"rank": 8, "horizons": [2, 1]}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("low-rnk", "did you mean 'low-rank'"),
        ({"rank": 3}, "a predictor without a kind"),
        ({"kind": "low-rank", "rnk": 3}, "its parameters are: rank, horizons"),
        ({"kind": "low-rank", "rank": 0}, "rank 0"),
        ({"kind": "estimator", "width": 0}, "width 0"),
        ({"kind": "hybrid", "layers": [-1]}, r"layers \[-1\]"),
        ({"kind": "router-reuse", "horizons": []}, "at least 1"),
        ({"kind": "router-reuse", "horizons": [0]}, r"horizons \[0\]"),
        ({"kind": "linear", "horizons": [1, 1]}, "different numbers"),
        ({"kind": "recall-model"}, "recall"),
        ({"kind": "recall-model", "recall": [88.6]}, "fraction from 0 to 1"),
        ({"kind": "recall-model", "recall": []}, "at least 1"),
    ],
)
def test_what_cannot_be_is_named(spec: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        create(spec, "predictor")


def test_listing_them_imports_no_torch() -> None:
    code = (
        "import sys; from moetier.traces.predictors import PREDICTORS; PREDICTORS.names(); "
        "sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
