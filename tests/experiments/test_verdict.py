"""Tests of what is missed, and of how a comparison is told."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import fields
from typing import Any

import pytest

from moetier.experiments.verdict import Tolerances, Validation, unnoticed
from moetier.sim.testing import toy_profile
from moetier.sim.yaml_input import check
from moetier.traces.errors import InputError
from moetier.validate.compare.grid import Point, Summary, summarise
from moetier.validate.compare.load import Load
from moetier.validate.compare.ranking import Ranking
from moetier.validate.compare.wrong import WRONG


def summary(**given: Any) -> Summary:
    about: dict[str, Any] = {
        "median_error": 0.05, "p90_error": 0.1, "ranking": Ranking(concordant=9),
        "median_error_beyond_spread": 0.01, "p90_error_beyond_spread": 0.02,
        "stalled": 1, "equal": True,
    }  # fmt: skip
    return Summary(**(about | given))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"median_error": 0.11}, "median_error is 11.0%, above 10.0%"),
        ({"p90_error": 0.21}, "p90_error is 21.0%, above 20.0%"),
        ({"ranking": Ranking(9, 1)}, "kendall_tau is 0.800, below 0.9"),
        ({"equal": False}, "decisions or bytes differ"),
    ],
)
def test_what_is_missed_is_named(wrong: dict[str, Any], text: str) -> None:
    assert Tolerances().missed(summary()) == []
    (found,) = Tolerances().missed(summary(**wrong))
    assert found.startswith(text)


def test_with_beyond_spread_errors_beyond_it_are_judged() -> None:
    wanted = Tolerances(beyond_spread=True)
    large = summary(median_error=0.9, p90_error=0.9)

    assert wanted.missed(large) == []
    assert len(Tolerances().missed(large)) == 2
    beyond = summary(median_error_beyond_spread=0.11, p90_error_beyond_spread=0.21)
    assert wanted.missed(beyond) == [
        "median_error_beyond_spread is 11.0%, above 10.0%",
        "p90_error_beyond_spread is 21.0%, above 20.0%",
    ]
    assert Tolerances().missed(beyond) == []


@pytest.mark.parametrize(
    ("ranking", "why"),
    [
        (Ranking(ties=3), "repeats tell none of 3 pairs apart"),
        (Ranking(), "no capacity has two policies"),
    ],
)
def test_a_ranking_that_cannot_be_tested_is_missed(ranking: Ranking, why: str) -> None:
    (found,) = Tolerances(kendall_tau=-1).missed(summary(ranking=ranking))

    assert found.startswith(f"kendall_tau cannot be tested against -1.0: {why}")
    assert Tolerances(kendall_tau=None).missed(summary(ranking=ranking)) == []
    assert Tolerances(kendall_tau=None).missed(summary(ranking=Ranking(0, 9))) == []


def test_what_equality_does_not_ask_for_is_not_missed() -> None:
    assert Tolerances(equal=False).missed(summary(equal=False)) == []


def test_what_would_not_be_noticed_is_said() -> None:
    wanted = ["bandwidth doubled", "contention off"]

    assert unnoticed(wanted, dict.fromkeys(wanted, True)) == []
    assert unnoticed([], {"bandwidth doubled": False}) == []
    assert unnoticed(wanted, {"bandwidth doubled": False}) == [
        "'bandwidth doubled' would not be noticed: a wrong simulation passes too",
        "'contention off' would not be noticed: it changes nothing here",
    ]


def test_only_what_there_is_can_be_asked_for() -> None:
    assert check(Tolerances, {"must_notice": list(WRONG)}, "x").must_notice == list(WRONG)
    with pytest.raises(InputError, match="must_notice"):
        check(Tolerances, {"must_notice": ["everything"]}, "x")


def a_point(**given: Any) -> Point:
    about: dict[str, Any] = {
        "policy": "a, b", "capacity": {"dram": "10 %"}, "asks_lateness": False,
        "decision_log_equal": True, "bytes_equal": False, "first_difference": None,
        "miss_rate": 0.5, "bytes_read_total": 7, "tpot_sim_ms": 11.0,
        "tpot_measured_ms": [10.0, 9.0, 10.5], "stall_share_sim": 0.5,
        "stall_share_measured": [0.4, 0.5, 0.6], "stall_sim_ms": 5.5,
        "stall_measured_ms": [4.0, None, 6.0], "attribution_ms": {"link": -1.5},
    }  # fmt: skip
    return Point(**(about | given))


def validation(*points: Point, missed: list[str]) -> Validation:
    return Validation(
        "made up", Tolerances(median_error=0.3), toy_profile(), list(points), summarise(points),
        {"bandwidth doubled": True}, Load(2, 0.5, 0.75, 0.25), missed, ["nothing is real"],
    )  # fmt: skip


def test_json_holds_the_verdict_and_every_figure() -> None:
    found = validation(a_point(), missed=["kendall_tau is 0"])
    told = json.loads(json.dumps(found.as_dict()))

    assert (told["passed"], told["missed"]) == (False, ["kendall_tau is 0"])
    assert validation(a_point(), missed=[]).as_dict()["passed"] is True
    assert told["median_error"] == pytest.approx(0.1)  # the plain one
    assert told["median_error_beyond_spread"] == 0
    assert {f.name for f in fields(Point)} <= set(told["points"][0])
    assert told["points"][0]["stall_measured_ms"] == [4.0, None, 6.0]
    assert told["load"] == {
        "cores": 2, "load_average_before": 0.5, "load_average_after": 0.75, "others_share": 0.25,
    }  # fmt: skip
    assert told["would_notice"] == {"bandwidth doubled": True}
    assert told["tolerances"]["median_error"] == 0.3


def test_csv_has_a_row_per_point() -> None:
    other = a_point(policy="c", attribution_ms=None, stall_measured_ms=[None], stall_sim_ms=None)
    text = validation(a_point(), other, missed=[]).as_csv()
    rows = list(csv.DictReader(io.StringIO(text)))

    assert [row["policy"] for row in rows] == ["a, b", "c"]
    assert rows[0]["capacity.dram"] == "10 %"
    assert (rows[0]["decision_log_equal"], rows[0]["bytes_equal"]) == ("True", "False")
    assert float(rows[0]["tpot_measured_ms"]) == 10
    assert (float(rows[0]["tpot_measured_min_ms"]), float(rows[0]["tpot_measured_max_ms"])) == (
        9,
        10.5,
    )
    assert float(rows[0]["error"]) == pytest.approx(0.1)
    assert float(rows[0]["stall_measured_ms"]) == 5
    assert float(rows[0]["attribution_link_ms"]) == -1.5
    assert (rows[1]["attribution_link_ms"], rows[1]["stall_measured_ms"]) == ("", "")
