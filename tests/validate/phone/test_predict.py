"""Runs that the machine itself made are predicted exactly; the phone's within the stated bar."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moetier.sim.hardware import Profile, load_profile
from moetier.traces.errors import InputError
from moetier.validate.phone.model import MIB
from moetier.validate.phone.predict import (
    Comparison,
    above,
    as_dict,
    compare,
    figures,
    met,
    misses_of,
    open_routing,
    predict,
    summary,
)
from moetier.validate.phone.reads import Token
from moetier.validate.phone.runs import read_run, read_runs

READ = 3 * (1 << 20) + 3 * 4096
Write = Callable[..., Path]


def find(found: list[Comparison], name: str) -> Comparison:
    return next(c for c in found if c.run == name)


def test_a_run_that_the_machine_made_is_predicted_exactly(
    folder: Path, write_run: Write, phone: Profile
) -> None:
    """Bytes given: first predict, write that down as measured, predict again."""
    name = "k1_c9_l4_ov"
    rows = [(20.0, 8.0, 10.0, READ * (1 + i % 2), 4.0, 6.0) for i in range(9)]
    write_run(name, rows)
    first = compare(read_run(folder / "runs" / f"{name}.csv"), open_routing(folder), phone)
    made = first.predicted
    rows = [(made.wall, made.io, 10.0, row[3], made.stall, 6.0) for row in rows]
    write_run(name, rows)

    (again,) = predict(folder, phone)

    assert again.predicted == made
    assert again.error == pytest.approx({"io": 0.0, "stall": 0.0, "wall": 0.0}, abs=1e-6)
    assert met([again], 1e-6)
    assert made.wall == pytest.approx(16.0 + made.stall, rel=1e-3)
    assert made.stall > 0


def test_bytes_come_from_the_routing_where_it_has_as_many_experts_per_token(
    folder: Path, write_run: Write, phone: Profile
) -> None:
    for name in ("k2_c12_l4_ov", "k1_c12_l4_ov", "k2_stream_ov"):
        write_run(name)

    found = predict(folder, phone)

    assert [(c.run, c.bytes_from) for c in found] == [
        ("k1_c12_l4_ov", "run"),
        ("k2_c12_l4_ov", "trace"),
        ("k2_stream_ov", "run"),
    ]


def test_a_replay_reads_what_an_lru_of_that_size_misses(
    folder: Path, write_run: Write, phone: Profile
) -> None:
    """Token t uses t and t + 1 of 4 experts in each of 2 layers: a cyclic walk.

    Room for all 8 misses nothing once the first round is over; room for 4 keeps t + 1 for the next
    token, so that one expert per layer is missing.
    """
    write_run("k2_c24_l4_ov")
    write_run("k2_c12_l4_ov")

    found = predict(folder, phone)

    assert find(found, "k2_c24_l4_ov").read_mib["predicted"] == 0.0
    assert find(found, "k2_c24_l4_ov").predicted.stall == 0.0
    assert find(found, "k2_c12_l4_ov").read_mib["predicted"] == pytest.approx(2 * READ / MIB)


def test_levels_and_lanes_of_the_run_are_used(
    folder: Path, write_run: Write, phone: Profile
) -> None:
    row = (20.0, 8.0, 10.0, 2 * READ, 4.0, 6.0)
    write_run("k1_c9_l4_ov", [row] * 6)
    write_run("k1_c9_l4_ov_hot", [(*row[:2], 40.0, *row[3:])] * 6)
    write_run("k1_c9_l2_ov", [row] * 6)

    found = predict(folder, phone)

    cool, hot = find(found, "k1_c9_l4_ov"), find(found, "k1_c9_l4_ov_hot")
    assert hot.predicted.wall > cool.predicted.wall + 25
    assert hot.own == cool.own  # without the levels both are one machine
    assert find(found, "k1_c9_l2_ov").predicted.io < cool.predicted.io
    assert find(found, "k1_c9_l2_ov").predicted.stall > cool.predicted.stall
    assert cool.own_error == pytest.approx(cool.own.wall / 20.0 - 1)


def test_without_overlap_reading_is_wall_time_and_nothing_stalls(
    folder: Path, write_run: Write, phone: Profile
) -> None:
    write_run("k2_c12_l4", [(20.0, 8.0, 12.0, 2 * READ, 0.0, 0.0)] * 6)

    (found,) = predict(folder, phone)

    assert found.predicted.stall == 0.0
    assert found.error["stall"] is None
    assert found.predicted.wall == pytest.approx(12.0 + found.predicted.io, rel=1e-3)
    assert found.level_error == pytest.approx(0.0)


def test_what_a_run_says_beside_its_times_is_passed_on(
    folder: Path, write_run: Write, phone: Profile
) -> None:
    preamble = (
        "# model=Tiny-Q4_0.gguf arch=tiny n_layer=2 n_expert=4 n_expert_used=2 threads=4 n_ctx=64\n"
        "# cache_mb=12 io_threads=4 overlap=1\n"
    )
    columns = "wall_ms,io_ms,compute_ms,read_bytes,stall_ms,mgmt_ms,majflt,cpu_ms"
    computes = (5.0, 5.0, 10.0, 20.0, 10.0, 10.0)
    rows = [(20.0, 8.0, c, READ, 4.0, 6.0, 3, 90.0 - 2 * c) for c in computes]
    write_run("mine", rows, columns, preamble)
    write_run("k2_c12_l4_ov", rows, columns.replace("majflt,cpu_ms", "a,b"))

    found = predict(folder, phone)

    assert find(found, "mine").major_faults == 3
    assert find(found, "mine").cpu_correlation == pytest.approx(-1.0)
    assert find(found, "mine").compute_spread == pytest.approx(1.7)
    assert find(found, "mine").level_error == pytest.approx(0.0)
    assert find(found, "k2_c12_l4_ov").major_faults is None
    assert find(found, "k2_c12_l4_ov").cpu_correlation is None


def test_a_column_that_never_changes_has_no_correlation(
    folder: Path, write_run: Write, phone: Profile
) -> None:
    columns = "wall_ms,io_ms,compute_ms,read_bytes,cpu_ms"
    write_run("k1_c9_l4_ov", [(20.0, 8.0, 10.0, READ, c) for c in (1.0, 2.0, 3.0, 4.0)], columns)

    assert predict(folder, phone)[0].cpu_correlation is None


def test_figures_are_medians_over_the_last_two_thirds(folder: Path, write_run: Write) -> None:
    ov, plain = (read_run(write_run(name)) for name in ("k2_c9_l4_ov", "k2_c9_l4"))
    tokens = [Token(9_000_000, 8_000_000, 7_000_000, 6_000_000, 1)] * 2
    tokens += [Token(w * 1_000_000, 2_000_000, 1_000_000, 500_000, 1) for w in (3, 5, 4, 4)]

    assert figures(ov, tokens) == figures(ov, tokens[2:] + tokens[2:])
    assert (figures(ov, tokens).io, figures(ov, tokens).stall) == (2.0, 0.5)
    assert (figures(plain, tokens).io, figures(plain, tokens).stall) == (1.0, 0.0)
    assert figures(ov, tokens).wall == 4.0


def test_a_missed_bar_names_the_runs(folder: Path, write_run: Write, phone: Profile) -> None:
    write_run("k1_c9_l4_ov")
    write_run("k1_c9_l4_ov_slow", [(999.0, 8.0, 10.0, READ, 4.0, 6.0)] * 6)
    found = predict(folder, phone)

    told = as_dict(found, phone, 0.12)

    assert told["above"] == above(found, 0.12)
    assert "k1_c9_l4_ov_slow" in above(found, 0.12)
    assert told["met"] is met(found, 0.12) is False
    assert met(found, 1.0)
    total = summary(found)
    assert total["worst_wall_error"] == max(abs(c.error["wall"] or 0) for c in found)
    assert total["median_wall_error"] == np.median([abs(c.error["wall"] or 0) for c in found])


def test_a_folder_with_nothing_to_predict_is_refused(
    folder: Path, write_run: Write, phone: Profile
) -> None:
    write_run("k1_c9_l4")

    with pytest.raises(InputError, match="no run overlaps"):
        predict(folder, phone)


def test_more_bytes_than_look_ups_can_miss_are_what_they_can(
    folder: Path, write_run: Write
) -> None:
    run = read_run(write_run("k1_c9_l4_ov", [(9.0, 9.0, 9.0, 90 * READ, 1.0, 1.0)] * 3))

    assert misses_of(run, open_routing(folder).header).tolist() == [[1, 1]] * 3


@pytest.mark.slow
def test_the_phone_is_predicted_within_the_bar(data: Path) -> None:
    """Fitted on runs without overlap, and not on these; the figures are in docs/validation.md."""
    found = predict(data / "phone-qwen3-30b-a3b", load_profile("phone-oneplus15r"))

    total = summary(found)
    assert len(found) == 9
    assert met(found, 0.12)
    assert (total["median_wall_error"] or 1) < 0.06
    assert (total["median_stall_error"] or 1) < 0.12
    assert (total["median_io_error"] or 0) > 0.15  # known, and said: what it counts differs
    # The one run above it takes most of that from levels that do not add up: its compute swings,
    # and so does its CPU time.
    assert above(found, 0.12) == ["k6_c4000_l4_ov_0717"]
    worst = find(found, "k6_c4000_l4_ov_0717")
    assert worst.level_error < -0.08
    assert worst.compute_spread > 3
    assert (worst.cpu_correlation or 0) > 0.95


@pytest.mark.slow
def test_drawn_misses_stand_in_for_recorded_routing(data: Path) -> None:
    """The same run with bytes from the replay and with its own: equal within the bytes' error."""
    folder = data / "phone-qwen3-30b-a3b"
    routing, profile = open_routing(folder), load_profile("phone-oneplus15r")
    traced = [run for run in read_runs(folder) if run.top_k == 6]

    for run in traced:
        found = compare(run, routing, profile)
        ratio = found.read_mib["predicted"] / found.read_mib["measured"]
        assert ratio == pytest.approx(1.0, abs=0.06)
        assert found.given_bytes.wall == pytest.approx(found.predicted.wall, rel=0.05)
