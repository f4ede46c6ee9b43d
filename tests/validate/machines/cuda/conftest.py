"""Fake devices that show what was not given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moetier.validate.machines.cuda.fake import FakeDevice
from moetier.validate.machines.pacing import Pace

PACE = Pace(100_000_000, 50_000)  # as the link of the profile


@pytest.fixture
def device() -> Iterator[Callable[..., FakeDevice]]:
    """Make fake devices, all of whose memory must have come back before they are closed."""
    made: list[FakeDevice] = []

    def make(**given: Any) -> FakeDevice:
        data: dict[str, Any] = {"pace": PACE}
        made.append(FakeDevice(**(data | given)))
        return made[-1]

    yield make
    left = [one.lent for one in made]
    for one in made:
        one.close()

    assert left == [0] * len(made)
