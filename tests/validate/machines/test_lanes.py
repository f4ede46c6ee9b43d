"""Lanes serve by the rules of a link, with errors that arrive and threads that end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from threading import Event

import pytest

from moetier.traces.errors import InputError
from moetier.validate.machines import lanes as module
from moetier.validate.machines.clock import Clock
from moetier.validate.machines.direct import PAGE
from moetier.validate.machines.lanes import UNSTARTED, LaneSet, Transfer
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.slots import Slot, SlotPool

SIZE = 1000


class Gated:
    """A reader that waits until it may go on, and remembers what it was asked for."""

    def __init__(self) -> None:
        """Wait from the first read on."""
        self.nbytes = [SIZE] * 10
        self.asked: list[int] = []
        self.began, self.go_on = Event(), Event()
        self.error: BaseException | None = None

    def read(self, slice_id: int, slot: Slot) -> None:
        """Write the number of the slice, or raise `error`."""
        self.asked.append(slice_id)
        self.began.set()
        assert self.go_on.wait(30)
        if self.error is not None:
            raise self.error
        slot.memory[:1] = bytes([slice_id])


@pytest.fixture
def reader() -> Gated:
    return Gated()


@pytest.fixture
def one(reader: Gated) -> Iterator[LaneSet]:
    """One lane, in which slice 9 is in flight as a prefetch until `go_on`."""
    with LaneSet(reader) as lanes:
        lanes.in_flight = lanes.ask((), (), [9]).prefetched[0]  # type: ignore[attr-defined]
        assert reader.began.wait(30)
        yield lanes
        reader.go_on.set()


def in_flight(lanes: LaneSet) -> Transfer:
    found: Transfer = lanes.in_flight  # type: ignore[attr-defined]
    return found


def test_demands_go_ahead_of_queued_prefetches_and_promoted_ones_first(
    one: LaneSet, reader: Gated
) -> None:
    waiting = one.ask((), (), [1, 2, 3]).prefetched
    asked = one.ask([in_flight(one), waiting[2]], [5, 4], [6])

    assert asked.late == [in_flight(one), waiting[2]]
    assert asked.promoted == [waiting[2]]
    assert [t.slice_id for t in asked.fetched] == [5, 4]

    reader.go_on.set()
    one.quiet()

    assert reader.asked == [9, 3, 5, 4, 1, 2, 6]
    assert [t.demanded for t in [*waiting, *asked.fetched]] == [False, False, True, True, True]


def test_what_has_landed_is_not_late(one: LaneSet, reader: Gated) -> None:
    reader.go_on.set()
    one.quiet()
    asked = one.ask([in_flight(one)], [])

    assert (asked.late, asked.promoted) == ([], [])


def test_only_what_has_not_started_is_withdrawn(one: LaneSet, reader: Gated) -> None:
    waiting = one.ask((), (), [1, 2]).prefetched
    withdrawn = one.withdraw([in_flight(one), waiting[0]])
    reader.go_on.set()
    one.quiet()

    assert withdrawn == [waiting[0]]
    assert reader.asked == [9, 2]
    assert waiting[0].start == UNSTARTED


def test_released_slots_come_back_also_from_what_is_in_flight(one: LaneSet, reader: Gated) -> None:
    waiting = one.ask((), (), [1]).prefetched
    dropped = one.release([in_flight(one), *waiting])

    assert dropped == SIZE  # the queued one; the other lands, for nobody
    assert one.slots.lent == PAGE

    reader.go_on.set()
    one.quiet()

    assert one.slots.lent == 0
    assert in_flight(one).slot is None

    here = one.ask((), [4]).fetched
    one.wait(here)

    assert one.slots.lent == PAGE
    assert one.release(here) == 0
    assert one.slots.lent == 0


def test_each_transfer_fills_the_slot_it_hands_over(reader: Gated) -> None:
    reader.go_on.set()
    with LaneSet(reader, 3) as lanes:
        fetched = lanes.ask((), range(9)).fetched
        lanes.wait(fetched)

        assert [t.slot.memory[0] for t in fetched if t.slot] == list(range(9))
        assert {t.lane for t in fetched} <= {0, 1, 2}
        assert lanes.served == 9


def test_lanes_work_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=30)  # breaks unless all three read at once

    class Meeting(Gated):
        def read(self, slice_id: int, slot: Slot) -> None:
            together.wait()

    with LaneSet(Meeting(), 3) as lanes:
        lanes.wait(lanes.ask((), [0, 1, 2]).fetched)

    assert not together.broken


def test_somebody_may_wait_for_the_first_of_several(one: LaneSet, reader: Gated) -> None:
    fetched = one.ask((), [1, 2]).fetched
    reader.go_on.set()
    one.until(lambda: any(t.landed for t in fetched))

    assert fetched[0].landed


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_pace_is_a_lower_bound_on_the_time_of_many(lanes: int, reader: Gated) -> None:
    reader.go_on.set()
    pace = Pace(1_000_000_000, 300_000)
    with LaneSet(reader, lanes, pace) as found:
        asked = found.ask((), range(8))
        found.wait(asked.fetched)
        ends = sorted(t.done for t in asked.fetched)

    # the n-th transfer of a lane ends no sooner than n times what one takes
    for nth, end in enumerate(ends):
        assert end >= asked.at + (nth // lanes + 1) * pace.ns(SIZE)
    for t in asked.fetched:
        assert asked.at <= t.start <= t.done


def test_a_lane_makes_up_for_its_own_delays(reader: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer counts from when it was ready and the lane free, not from when a thread woke."""
    deadlines: list[int] = []
    monkeypatch.setattr(module, "wait_until", lambda deadline, *_: deadlines.append(deadline))
    reader.go_on.set()
    pace = Pace(1, 0)  # 1000 s for each, so no read outlasts it
    with LaneSet(reader, 1, pace) as lanes:
        asked = lanes.ask((), [1, 2, 3])
        lanes.wait(asked.fetched)

    assert deadlines == [asked.at + n * pace.ns(SIZE) for n in (1, 2, 3)]


def test_reads_that_outlast_the_pace_are_counted(one: LaneSet) -> None:
    pace, slow = Pace(1_000_000_000, 0), Gated()
    with LaneSet(slow, 1, pace) as lanes:
        fetched = lanes.ask((), [1]).fetched
        assert slow.began.wait(30)
        while lanes.clock.now() <= fetched[0].ready + pace.ns(SIZE):
            pass
        slow.go_on.set()
        lanes.wait(fetched)

        assert lanes.overdue == 1


@pytest.mark.parametrize("error", [InputError("gone", where="file"), RuntimeError("a bug")])
def test_an_error_in_a_lane_is_raised_where_somebody_waits(error: Exception, reader: Gated) -> None:
    reader.error = error
    with LaneSet(reader, 2) as lanes:
        fetched = lanes.ask((), [1]).fetched
        reader.go_on.set()
        with pytest.raises(type(error), match=r"gone|a bug"):
            lanes.wait(fetched)
        for again in (lanes.quiet, lambda: lanes.ask((), [2])):
            with pytest.raises(type(error)):
                again()


def test_no_room_for_a_slice_is_raised_where_somebody_waits(reader: Gated) -> None:
    reader.go_on.set()
    with LaneSet(reader, slots=SlotPool(PAGE)) as lanes:
        lanes.wait(lanes.ask((), [1]).fetched)
        with pytest.raises(InputError, match="8 KiB are needed for slices"):
            lanes.wait(lanes.ask((), [2]).fetched)


def test_closing_leaves_what_is_queued_and_cuts_a_long_wait_short(reader: Gated) -> None:
    reader.go_on.set()
    lanes = LaneSet(reader, 2, Pace(1, 0))  # 1000 s for each transfer
    asked = lanes.ask((), [1, 2, 3])
    assert reader.began.wait(30)
    lanes.close()
    lanes.close()

    assert not asked.fetched[2].landed
    assert not any(t.name.startswith("moetier") for t in threading.enumerate())


def test_all_see_one_clock_and_hear_of_what_landed(reader: Gated) -> None:
    heard: list[Transfer] = []
    clock = Clock()
    reader.go_on.set()
    with LaneSet(reader, clock=clock, on_landed=heard.append) as lanes:
        before = clock.now()
        fetched = lanes.ask((), [1, 2]).fetched
        lanes.wait(fetched)

        assert heard == fetched
        assert before <= fetched[0].start <= fetched[1].done <= clock.now()
