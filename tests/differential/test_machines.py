"""The fast machine and the one made of SimPy processes say the same, to the byte.

They share the rules written in `sim/machine/links.py`, the costs of compute, and no line of code
that keeps the time of a copy.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetier.sim.machine.processes import ProcessMachine
from moetier.sim.policy.seams import SEAMS
from moetier.sim.testing import (
    BITS,
    Case,
    Run,
    busy_choices,
    make_case,
    misses,
    prefetches,
    sliced_evictions,
    whole_evictions,
)


def compare(case: Case) -> None:
    fast, unwatched = case.run(), case.run(watch=False)
    slow = case.run(machine=ProcessMachine)

    assert table(unwatched) == table(slow)
    assert table(fast) == table(slow)
    assert fast.result.elapsed_ns == unwatched.result.elapsed_ns == slow.result.elapsed_ns
    assert shown(fast) == shown(slow)


def table(run: Run) -> dict[str, list[int]]:
    return {name: values.tolist() for name, values in run.records.items()}


def shown(run: Run) -> Sequence[object]:
    """What occupied lanes and processors; names of transfers are a matter of taste."""
    return sorted(
        (s.lane, s.start, s.end, sorted(s.info.items()), "" if "link" in s.lane else s.name)
        for s in run.spans
    )


@st.composite
def cases(draw: st.DrawFn, /, **fixed: Any) -> Case:
    return make_case(lambda options: draw(st.sampled_from(options)), **fixed)


@given(st.one_of(cases(), *[cases(**choices) for choices in busy_choices()]))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_both_machines_give_the_same_records(case: Case) -> None:
    compare(case)


@given(st.sampled_from(BITS).flatmap(lambda bits: cases(bits=bits, layers=3, tokens=9)))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_both_machines_give_the_same_records_of_bit_slices(case: Case) -> None:
    compare(case)


@pytest.mark.slow
@pytest.mark.parametrize("eviction", [*whole_evictions(), *sliced_evictions()[-2:]], ids=str)
@pytest.mark.parametrize("miss", misses(sliced=True)[2:], ids=str)
def test_every_combination_of_bit_slices_gives_the_same_records(eviction: Any, miss: Any) -> None:
    """With every prefetch, warm-up and number of tiers; inclusive and exclusive in turn."""
    lot = random.Random(f"{eviction} {miss}")
    for prefetch in ("none", "oracle", {"kind": "previous-token", "depth": 2, "cancel": True}):
        for warmup in SEAMS["warmup"].names():
            for tiers in (2, 3):
                compare(
                    make_case(
                        lot.choice,
                        bits=lot.choice(BITS),
                        tiers=tiers,
                        eviction=eviction,
                        miss=miss,
                        prefetch=prefetch,
                        warmup=warmup,
                        prompt=4,
                    )
                )


@pytest.mark.slow
@pytest.mark.parametrize("eviction", whole_evictions())
@pytest.mark.parametrize("prefetch", prefetches(), ids=str)
@pytest.mark.parametrize("miss", ["fetch", "cpu", "skip"])
def test_every_combination_gives_the_same_records(
    eviction: str, prefetch: object, miss: str
) -> None:
    lot = random.Random(f"{eviction} {prefetch} {miss}")
    for _ in range(10):
        more = lot.choice([{}, *busy_choices()]) | {"eviction": eviction, "prefetch": prefetch}
        compare(make_case(lot.choice, **more, miss=miss))
