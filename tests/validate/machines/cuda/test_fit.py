"""As many layers are used as fit, judged by numbers that are made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moetier.sim.memory import extent_of
from moetier.sim.run import Setting, Stage, set_up
from moetier.traces.errors import InputError
from moetier.traces.synthetic import Synthetic
from moetier.validate.machines.cuda.fake import FakeDevice
from moetier.validate.machines.cuda.fit import Need, layers_that_fit, need_of
from moetier.validate.machines.cuda.run import CudaRuns
from moetier.validate.machines.tier import slots_for

SLICES = {"precision": {"kind": "bit-sliced", "bits": [8, 4]}}


def per_layer(count: int) -> Need:
    return Need(pinned=10 * count, device=5 + count)


@pytest.mark.parametrize(
    ("pinned", "device", "layers"),
    [
        (480, 53, 48), (479, 53, 47), (480, 52, 47), (10, 1000, 1), (19, 1000, 1), (20, 1000, 2),
        (1000, 6, 1), (None, None, 48), (None, 30, 25), (305, None, 30),
    ],
)  # fmt: skip
def test_the_smaller_of_both_memories_decides(
    pinned: int | None, device: int | None, layers: int
) -> None:
    assert layers_that_fit(48, per_layer, pinned, device) == layers


@pytest.mark.parametrize(("pinned", "device"), [(9, 1000), (1000, 5)])
def test_where_not_one_layer_fits_the_bytes_are_named(pinned: int, device: int) -> None:
    free = rf"and {pinned} B \({pinned} bytes\) and {device} B \({device} bytes\) are free"
    with pytest.raises(InputError, match=rf"takes 10 B .* of pinned memory and 6 B .*{free}"):
        layers_that_fit(48, per_layer, pinned, device)


def test_what_runs_need_is_what_they_take(
    source: Synthetic, setting: Callable[..., Setting]
) -> None:
    """A device with exactly as much runs them all; with a page less of either it does not.

    Dense weights are torch's own, and a fake device does not lend them: its need is the slots.
    """
    settings = [setting("on-demand", 50), setting({"eviction": "lfu"}, 25), setting(SLICES, 50)]

    def stage(one: Setting) -> Stage:
        return set_up(source.header, one, extent_of(source))

    need = need_of([stage(one) for one in settings], 1)
    whole = need_of([stage(settings[0])], 1)
    device = FakeDevice(device_bytes=need.device, pinned_bytes=need.pinned)
    with CudaRuns(device, lanes=1) as runs:
        for one in settings:
            runs.run(source, one)
        lent = device.free_pinned()
    device.close()
    short = FakeDevice(pinned_bytes=need.pinned - 4096)
    with CudaRuns(short, lanes=1) as runs:
        runs.run(source, settings[0])
        with pytest.raises(InputError, match="on the host"):
            runs.run(source, settings[2])
    short.close()
    slots = {slots_for((s := stage(one)).layout, s.capacities[0], 1): one for one in settings}
    small = FakeDevice(device_bytes=max(slots) - 4096)
    with CudaRuns(small, lanes=1) as runs, pytest.raises(InputError, match="on the device"):
        runs.run(source, slots[max(slots)])
    small.close()

    assert lent == 0
    assert max(slots) < need.device
    assert whole.pinned == 24 * 12_288 < need.pinned
