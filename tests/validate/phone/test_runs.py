"""Recorded runs are read as they were set, and what cannot be read says where and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moetier.traces.errors import InputError
from moetier.validate.phone.runs import last_two_thirds, middle, read_run, read_runs

PREAMBLE = (
    "# bmoe_metrics v1\n"
    "# model=Tiny-Q4_0.gguf arch=tiny n_layer=2 n_expert=4 n_expert_used=2 threads=4 n_ctx=64\n"
    "# moe_stream=1 cache_mb=9 io_threads=3 o_direct=1 overlap=1 prefetch=0 cache_policy=lfu\n"
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k8_c4000_l2", (8, 4000, 2, False)),
        ("k6_c3000_l4_ov_a", (6, 3000, 4, True)),
        ("k8_c4000_l4_ov_0714", (8, 4000, 4, True)),
        ("k8_stream", (8, 0, 4, False)),
        ("k8_stream_ov", (8, 0, 4, True)),
    ],
)
def test_a_name_says_how_a_run_was_set(
    write_run: Callable[..., Path], name: str, expected: tuple[int, int, int, bool]
) -> None:
    run = read_run(write_run(name))

    assert (run.top_k, run.cache_mib, run.lanes, run.overlap) == expected
    assert run.eviction == "lru"
    assert run.prompt == 7


def test_the_lines_of_a_file_come_before_its_name(write_run: Callable[..., Path]) -> None:
    run = read_run(write_run("k8_c4000_l4", preamble=PREAMBLE))

    assert (run.top_k, run.cache_mib, run.lanes, run.overlap) == (2, 9, 3, True)
    assert run.eviction == "lfu"


def test_levels_are_medians_over_the_last_two_thirds(write_run: Callable[..., Path]) -> None:
    rows = [(99.0, 1.0, value, 0) for value in (900.0, 800.0, 3.0, 1.0, 2.0, 7.0)]
    run = read_run(write_run("k2_c9_l4_ov", rows, "wall_ms,io_ms,compute_ms,read_bytes"))

    assert run.level("compute_ms") == 2.5
    assert run.level("mgmt_ms") == 0.0  # not in the file
    assert run.warm("compute_ms").tolist() == [3.0, 1.0, 2.0, 7.0]


def test_the_first_third_is_left_out_rounded_down() -> None:
    assert last_two_thirds(np.arange(8.0)).tolist() == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_a_run_that_does_not_say_how_it_was_set_is_refused(write_run: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=r"mine\.csv: does not say how it was run; add its"):
        read_run(write_run("mine"))


def test_a_value_that_cannot_be_names_its_line_and_column(write_run: Callable[..., Path]) -> None:
    rows = [(20.0, 8.0, 10.0, 5), (20.0, -8.0, 10.0, 5), (20.0, 8.0, 10.0, 5)]
    path = write_run("k2_c9_l4", rows, "wall_ms,io_ms,compute_ms,read_bytes")

    with pytest.raises(InputError, match=r"line 3, column 'io_ms': -8\.0; expected 0 or more"):
        read_run(path)


def test_a_missing_column_is_named(write_run: Callable[..., Path]) -> None:
    path = write_run("k2_c9_l4", [(1.0, 2.0)] * 3, "wall_ms,io_ms")

    with pytest.raises(InputError, match="no column"):
        read_run(path)


def test_a_short_run_is_refused(write_run: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="fewer than 3 decoded tokens"):
        read_run(write_run("k2_c9_l4", [(20.0, 8.0, 10.0, 5, 1.0, 1.0)] * 2))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [("io_threads=3", "io_threads=0", "2 experts, 0 lanes"), ("cache_mb=9", "cache_mb=x", "cache")],
)
def test_a_setting_that_cannot_be_is_refused(
    write_run: Callable[..., Path], old: str, new: str, problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        read_run(write_run("mine", preamble=PREAMBLE.replace(old, new)))


def test_a_run_without_a_prompt_length_begins_at_none(write_run: Callable[..., Path]) -> None:
    path = write_run("k2_c9_l4")
    path.write_text(path.read_text().replace("n_prompt=7", ""))

    assert read_run(path).prompt == 0
    assert middle(read_run(path)) == 4  # of 6 tokens


def test_the_middle_of_the_warm_tokens_counts_the_prompt(write_run: Callable[..., Path]) -> None:
    assert middle(read_run(write_run("k2_c9_l4"))) == 11


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no runs/\*\.csv"):
        read_runs(tmp_path)


def test_runs_come_by_name(folder: Path, write_run: Callable[..., Path]) -> None:
    write_run("k8_c20_l4")
    write_run("k2_c10_l2")

    assert [run.name for run in read_runs(folder)] == ["k2_c10_l2", "k8_c20_l4"]
