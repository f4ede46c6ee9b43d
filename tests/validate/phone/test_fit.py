"""The fit finds what runs were made with, keeps lanes plausible, and equals the shipped profile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moetier.sim.hardware import Profile, load_profile
from moetier.sim.plan import LayerPlan
from moetier.traces.errors import InputError
from moetier.traces.schema import Header
from moetier.validate.phone.fit import chosen, descend, fit, management, plausible, scaled
from moetier.validate.phone.model import batch_of, read_link, with_lanes
from moetier.validate.phone.predict import misses_of, open_routing, read_machine
from moetier.validate.phone.runs import Run, read_run, read_runs

READ = 3 * (1 << 20) + 3 * 4096
BYTES = [READ * n for n in (1, 4, 2, 3, 1, 2, 4, 3, 2)]
MADE_WITH = {1: 0.9, 2: 0.8, 4: 0.7}
CELLS = {"k2_c9_l1": 1, "k2_c9_l2": 2, "k2_c9_l4": 4, "k2_stream": 4}


@pytest.fixture
def runs(folder: Path, header: Header, phone: Profile, write_run: Callable[..., Path]) -> list[Run]:
    """Runs of a machine whose link is slower than *phone* says, by `MADE_WITH`.

    Compute takes 40 ms and 0.5 ms per MiB where there is a cache.
    """
    link = scaled(read_link(phone), MADE_WITH)
    slower = phone.model_copy(update={"links": [link]})
    for name, lanes in CELLS.items():
        nbytes = [4 * READ] * len(BYTES) if "stream" in name else BYTES
        path = write_run(name, rows_of(nbytes, [0.0] * len(BYTES), "stream" not in name))
        machine = read_machine(header, with_lanes(slower, lanes), False, 3)
        counts = misses_of(read_run(path), header)
        for step, row in enumerate(counts.tolist()):
            for layer, n in enumerate(row):
                machine.execute(plan_of(step, layer, n))
        io = [token.copy / 1e6 for token in machine.tokens]
        write_run(name, rows_of(nbytes, io, "stream" not in name))
    return read_runs(folder)


def rows_of(nbytes: list[int], io: list[float], cache: bool) -> list[tuple[float, ...]]:
    return [(99.0, t, 40.0 + cache * 0.5 * n / (1 << 20), n, 0.0, 0.0)
            for n, t in zip(nbytes, io, strict=True)]  # fmt: skip


def plan_of(step: int, layer: int, misses: int) -> LayerPlan:
    needed = [layer * 4, layer * 4 + 1]
    return LayerPlan(batch_of(step, layer, 8, 2), needed, needed[:misses])


def test_it_finds_what_the_runs_were_made_with(
    runs: list[Run], header: Header, phone: Profile
) -> None:
    found = fit(chosen(runs, 2), header, phone, "mine")

    assert found.factors == pytest.approx(MADE_WITH, abs=0.015)
    assert found.compute_ms == pytest.approx(40.0)
    assert found.ms_per_mib == pytest.approx(0.5)
    for measured, fitted in found.io_ms.values():
        assert fitted == pytest.approx(measured, rel=0.03)


def test_a_fitted_profile_says_on_what(runs: list[Run], header: Header, phone: Profile) -> None:
    found = fit(chosen(runs, 2), header, phone, "mine")

    profile = found.profile
    assert profile.name == "mine"
    assert profile.tiers == phone.tiers
    for block in (read_link(profile), profile.main_compute):
        assert "fitted on k2_c9_l1, k2_c9_l2, k2_c9_l4" in block.source
    assert "k2_stream" in read_link(profile).source
    # 0.5 ms per MiB on the median bytes of the warm tokens, in halves over 2 layers
    assert profile.main_compute.overhead == pytest.approx(0.5 * 2.5 * 3.012 / 4 * 1e6, rel=0.01)


def test_management_is_what_grows_with_bytes(runs: list[Run]) -> None:
    by_name = {run.name: run for run in runs}

    assert management(by_name["k2_c9_l2"]) == pytest.approx((40.0, 0.5))
    assert management(by_name["k2_stream"]) == (40.0, 0.0)


def test_factors_move_rates_by_lanes_in_whole_mib(phone: Profile) -> None:
    link = scaled(read_link(phone), {1: 0.5, 4: 0.999})

    assert [point.rate >> 20 for point in link.bandwidth.points] == [50, 160, 200]


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ({}, True),
        ({1: 0.8}, True),  # 80 MiB/s for one lane, 80 for each of two
        ({1: 0.7}, False),  # one lane slower than each of two
        ({1: 1.7}, False),  # one lane faster than two together
        ({4: 1.6}, True),
        ({4: 1.7}, False),
        ({4: 0.7}, False),
    ],
)
def test_more_lanes_may_not_make_each_faster_nor_all_slower(
    phone: Profile, factors: dict[int, float], expected: bool
) -> None:
    assert plausible(scaled(read_link(phone), factors)) is expected


def test_a_fit_stays_plausible(runs: list[Run], header: Header, phone: Profile) -> None:
    """Runs on two lanes twice as fast as on four together ask for what no link does."""
    odd = [
        Run(**{**vars(run), "columns": {**run.columns, "io_ms": run.columns["io_ms"] / 9}})
        if run.lanes == 2
        else run
        for run in runs
    ]

    assert plausible(read_link(fit(chosen(odd, 2), header, phone, "mine").profile))


def test_the_descent_ends_where_no_step_helps() -> None:
    found = descend(lambda f: abs(f[1] - 0.37) + abs(f[2] - 1.11), {1: 1.0, 2: 1.0})

    assert found == pytest.approx({1: 0.37, 2: 1.11}, abs=0.011)


def test_overlapped_runs_and_other_top_k_are_not_fitted_on(
    runs: list[Run], write_run: Callable[..., Path], folder: Path
) -> None:
    for name in ("k2_c9_l4_ov", "k1_c9_l2"):
        write_run(name)

    assert [run.name for run in chosen(read_runs(folder), 2)] == [run.name for run in runs]
    with pytest.raises(InputError, match="1 runs without overlap and with 1 experts"):
        chosen(read_runs(folder), 1)


@pytest.mark.slow
def test_the_shipped_profile_is_what_the_recorded_runs_give(data: Path) -> None:
    folder = data / "phone-qwen3-30b-a3b"
    runs = chosen(read_runs(folder), 8)

    found = fit(runs, open_routing(folder).header, load_profile("phone-ufs4"), "phone-oneplus15r")

    names = [run.name for run in runs]
    assert names == ["k8_c2000_l2", "k8_c2000_l4", "k8_c4000_l2", "k8_c4000_l4", "k8_stream"]
    assert found.profile == load_profile("phone-oneplus15r")
    assert all(abs(fitted / measured - 1) < 0.13 for measured, fitted in found.io_ms.values())
