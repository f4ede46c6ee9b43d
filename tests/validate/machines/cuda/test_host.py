"""Slices lie in pinned memory as they were made, and come to the device as they lie."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import numpy as np
import pytest
import torch

from moetier.sim.layout import Layout
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.machines.cuda.fake import FakeDevice
from moetier.validate.machines.cuda.host import (
    DeviceReader,
    DeviceSlots,
    DeviceStore,
    HostSlices,
    host_bytes,
)
from moetier.validate.machines.direct import PAGE
from moetier.validate.machines.random_weights import Bytes

Devices = Callable[..., FakeDevice]
SIZES = [5000, 3000, 10_000]  # by layer; `layout` has two of each


def content(slice_id: int) -> Bytes:
    return np.full(SIZES[slice_id // 2], slice_id + 1, np.uint8)


@pytest.fixture
def pinned(layout: Layout, geometry: Geometry) -> Callable[..., HostSlices]:
    def make(
        device: FakeDevice, made: Callable[[int], Bytes] = content, **more: object
    ) -> HostSlices:
        return HostSlices(
            device,
            layout,
            made,
            geometry=geometry,
            weights="bf16",
            source="a test",
            **more,  # type: ignore[arg-type]
        )

    return make


def test_every_slice_lies_on_pages_of_its_own(
    device: Devices, pinned: Callable[..., HostSlices], layout: Layout
) -> None:
    mine, told = device(), []
    with pinned(mine, on_progress=lambda *at: told.append(at)) as host:
        for s, nbytes in enumerate(layout.nbytes):
            assert host.data(s).tolist() == content(s).tolist()
            assert host.data(s).numel() == nbytes
        whole = host_bytes(layout)

        assert mine.lent == whole == 2 * (2 + 1 + 3) * PAGE
        assert told == [(4 * PAGE, whole), (6 * PAGE, whole), (12 * PAGE, whole)]

    host.close()
    assert mine.lent == 0


def test_what_goes_wrong_while_it_is_filled_gives_all_memory_back(
    device: Devices, pinned: Callable[..., HostSlices]
) -> None:
    def fails(slice_id: int) -> Bytes:
        if slice_id == 3:
            raise KeyboardInterrupt
        return content(slice_id)

    mine = device()
    with pytest.raises(KeyboardInterrupt):
        pinned(mine, fails)

    assert mine.lent == 0


def test_bytes_of_another_number_are_refused(
    device: Devices, pinned: Callable[..., HostSlices]
) -> None:
    with pytest.raises(RuntimeError, match="size"):
        pinned(device(), lambda s: content(s)[:-1])


def test_another_layout_is_refused(device: Devices, pinned: Callable[..., HostSlices]) -> None:
    with pinned(device()) as host:
        with pytest.raises(
            InputError, match=r"6 slices of 35\.2 KiB are in pinned memory, and the"
        ):
            host.check_layout(Layout([[5000], [3000]], 2))
        with pytest.raises(InputError, match="pin the slices of this model"):
            host.check_layout(Layout([[5000, 5000], [3000, 3000], [10_000, 10_000]], 1))


def test_each_thread_that_reads_has_a_stream_of_its_own(
    device: Devices, pinned: Callable[..., HostSlices], layout: Layout
) -> None:
    mine = device(pace=None)
    slots = DeviceSlots(4 * PAGE, mine)
    with pinned(mine) as host:
        reader = DeviceReader(host, mine, 2)
        seen: list[list[int]] = []

        def read(slice_id: int) -> None:
            slot = slots.take(layout.nbytes[slice_id])
            reader.read(slice_id, slot)
            reader.read(slice_id, slot)  # by the same stream
            seen.append(slot.memory[: slot.nbytes].tolist())

        threads = [Thread(target=read, args=(s,)) for s in (0, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        reader.close()
        reader.close()
    slots.close()

    assert sorted(seen) == [content(0).tolist(), content(2).tolist()]
    assert len(mine._streams) == 2


def test_a_slice_read_aside_takes_no_slot(
    device: Devices, pinned: Callable[..., HostSlices]
) -> None:
    mine = device()
    with pinned(mine) as host:
        store, lent = DeviceStore(host, mine, 1), mine.lent
        slot = store.read_aside(4)
        slot.memory[0] = 99  # a copy, so that the original stays

        assert slot.nbytes == 10_000
        assert slot.memory[1:].tolist() == content(4)[1:].tolist()
        assert host.data(4)[0] == 5
        assert mine.lent == lent
        store.close()


def test_slots_that_make_room_for_others_give_memory_back(device: Devices) -> None:
    mine = device()
    slots = DeviceSlots(3 * PAGE, mine)
    slots.give(slots.take(PAGE))
    slots.give(slots.take(2 * PAGE))
    large = slots.take(3 * PAGE)

    assert mine.lent == slots.held == 3 * PAGE
    assert isinstance(large.memory, torch.Tensor)
    with pytest.raises(InputError, match="are needed for slices, and 12 KiB are set aside"):
        slots.take(1)

    slots.close()
    slots.close()

    assert mine.lent == 0
