"""Fake devices that show what was not given back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moetier.sim.plan import LayerPlan
from moetier.validate.machines.cuda.fake import FakeDevice
from moetier.validate.machines.pacing import Pace

PACE = Pace(100_000_000, 50_000)  # as the link of the profile


@pytest.fixture
def device() -> Iterator[Callable[..., FakeDevice]]:
    """Make fake devices, whose memory and streams must all be given back before they are closed."""
    before, made = set(threading.enumerate()), list[FakeDevice]()

    def make(**given: Any) -> FakeDevice:
        data: dict[str, Any] = {"pace": PACE}
        made.append(FakeDevice(**(data | given)))
        return made[-1]

    yield make
    lent = [one.lent for one in made]
    streams = [t for t in threading.enumerate() if t not in before and "stream" in t.name]
    for one in made:
        one.close()

    assert lent == [0] * len(made)
    assert streams == []


@pytest.fixture
def keep() -> Callable[[list[torch.Tensor]], Callable[[Any], Any]]:
    """Make an `around` that puts the output of every batch, on the CPU, into a list."""

    def keep_in(into: list[torch.Tensor]) -> Callable[[Any], Any]:
        def around(factory: Any) -> Any:
            def make(*given: Any) -> Any:
                machine = factory(*given)
                execute = machine.execute

                def performed(plan: LayerPlan) -> Any:
                    timing = execute(plan)
                    into.append(machine.output.to("cpu", copy=True))
                    return timing

                machine.execute = performed
                return machine

            return make

        return around

    return keep_in
