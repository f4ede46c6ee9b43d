"""A machine whose every time is a formula, and a clock that only its work moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from moetier.validate.calibrate.device import DensePoint, Memory

LATENCY, RATE = 50_000, 100  # ns; bytes per microsecond of a lane
OVERHEAD, EXPERT, TOKEN = 7_000, 100_000, 1_000  # ns: of a batch, an expert, each of its tokens
IDLE, BUSY = 5, 9  # watts


class FakeDevice:
    """A `Device` that works in no time and says how long it took."""

    tiers = (Memory("dram", 1 << 34, "made up"), Memory("disk", 1 << 40, "made up"))
    lanes = 3
    kernels: Mapping[str, int] = {"whole": 1_000_000}
    expert_ops = 1_000_000
    energy_window = 50_000_000  # ns
    writes_back = False
    identity: Mapping[str, str] = {"cpu": "a formula", "date": "2000-01-02"}

    def __init__(self, counts_energy: bool = True) -> None:
        """Begin at time 0."""
        self.now, self._joules, self._counts = 0, 0, counts_energy
        self.is_copying = self.is_computing = False

    def dense_bytes(self, head: bool) -> int | None:
        """Two layers' worth."""
        return 9_000_000 if head else 2_000_000

    def copy(self, nbytes: int, lanes: int) -> int:
        """A tenth longer beside compute."""
        alone = LATENCY + nbytes * 1000 // RATE
        return self._took(alone + alone // 10 if self.is_computing else alone)

    def copy_back(self, nbytes: int, lanes: int) -> int:
        """Half as fast."""
        return 2 * self.copy(nbytes, lanes)

    def experts(self, kernel: str, count: int, tokens: int) -> int:
        """A quarter longer beside copies."""
        alone = OVERHEAD + count * (EXPERT + TOKEN * tokens)
        return self._took(alone + alone // 4 if self.is_copying else alone)

    def dense(self, point: DensePoint) -> int:
        """By bytes, tokens and context."""
        return self._took((self.dense_bytes(point.head) or 0) + 10 * point.tokens + point.context)

    def host(self) -> int:
        """Always the same."""
        return self._took(33_000)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Slow compute down."""
        self.is_copying = True
        yield
        self.is_copying = False

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Slow copies down, and use power."""
        self.is_computing = True
        yield
        self.is_computing = False

    def energy(self) -> int | None:
        """Joules so far, in microjoules."""
        return self._joules if self._counts else None

    def remarks(self) -> Sequence[str]:
        """A word for the source."""
        return ["read by nobody"]

    def rest(self, seconds: float) -> None:
        """Let time pass."""
        self._took(round(seconds * 1e9))

    def _took(self, ns: int) -> int:
        self.now += ns
        self._joules += ns * (BUSY if self.is_computing else IDLE) // 1000  # W x ns = nJ
        return ns


@pytest.fixture
def fake() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def silent() -> FakeDevice:
    """A machine without an energy counter."""
    return FakeDevice(counts_energy=False)
