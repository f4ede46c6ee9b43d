"""Tests of the one error of bad input."""

from __future__ import annotations

import pickle

from moetier.traces.errors import InputError


def test_the_message_has_place_problem_and_way_out() -> None:
    error = InputError("3 is odd", where="a.yaml", way_out="use an even number")

    assert str(error) == "a.yaml: 3 is odd; use an even number"
    assert str(InputError("3 is odd")) == "3 is odd"


def test_it_survives_a_trip_between_processes() -> None:
    error = pickle.loads(pickle.dumps(InputError("bad", where="f", way_out="fix")))

    assert (error.problem, error.where, error.way_out) == ("bad", "f", "fix")
    assert str(error) == "f: bad; fix"
