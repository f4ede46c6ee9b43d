"""This module is the list of what is measured, and the arithmetic from repeats to figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from statistics import median
from time import perf_counter_ns, sleep

from moetier.sim.units import ceil_div
from moetier.validate.calibrate.device import DensePoint, Device
from moetier.validate.calibrate.samples import Sample, alternate, repeat

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)  # of one expert
TOGETHER = 8  # experts of a batch, where nobody says how many a token uses
CONTEXTS = (1, 512, 2048)  # of one token in decode
IN_LOCKSTEP = 4  # tokens of a larger decode batch
PROMPTS = (1, 16, 128, 512)
SIZES = (1 << 16, 1 << 19)  # bytes of a copy, beside those of experts and halves of them

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Copies:
    """What copies in one direction took, by (bytes, lanes)."""

    samples: Mapping[tuple[int, int], Sample]

    @property
    def latency(self) -> int:
        """Return what a copy on one lane takes beyond its bytes, in ns.

        It is where the line through the smallest and the largest size meets no bytes at all.
        """
        one = sorted((n, s.ns) for (n, lanes), s in self.samples.items() if lanes == 1)
        (small, quick), (large, slow) = one[0], one[-1]
        if small == large:
            return 0
        slope = Fraction(max(slow - quick, 0), large - small)
        least = min(s.ns for s in self.samples.values())
        return max(0, min(int(quick - slope * small), least // 2))

    def rate(self, nbytes: int, lanes: int) -> int:
        """Return bytes/s, all lanes together, so that latency and rate give the time measured."""
        ns = self.samples[nbytes, lanes].ns - self.latency
        return max(nbytes * lanes * 1_000_000_000 // ns, 1)


@dataclass(frozen=True)
class Figures:
    """What was measured. Keys: (bytes, lanes); (kernel, tokens, experts); a dense point."""

    copies: dict[tuple[int, int], Sample]
    experts: dict[tuple[str, int, int], Sample]
    dense: dict[DensePoint, Sample]
    host: Sample
    compute_alone: Sample
    compute_beside: Sample
    copy_alone: Sample
    copy_beside: Sample
    idle_uw: int | None  # microwatts
    busy_uw: int | None
    together: int = TOGETHER  # experts of a batch, against one alone
    back: dict[tuple[int, int], Sample] = field(default_factory=dict)  # the other way; often none

    @property
    def latency(self) -> int:
        """Return what a copy on one lane takes beyond its bytes, in ns: see `Copies`."""
        return Copies(self.copies).latency

    def rate(self, nbytes: int, lanes: int) -> int:
        """Return bytes/s, all lanes together: see `Copies`."""
        return Copies(self.copies).rate(nbytes, lanes)

    @property
    def overhead(self) -> int:
        """Return what a batch costs beside its experts, in ns, as the first kernel shows it.

        A batch of k experts takes overhead + k * expert, and so does one of one. What another
        kernel's batch costs beside that is in its experts.
        """
        kernel, n = next(iter(self.experts))[0], self.together
        alone, together = (self.experts[kernel, 1, count].ns for count in (1, n))
        return max(0, (n * alone - together) // (n - 1))

    def expert(self, kernel: str, tokens: int) -> int:
        """Return what one expert takes of a batch, in ns."""
        took = self.experts[kernel, tokens, self.together].ns - self.overhead
        return max(ceil_div(took, self.together), 1)

    @property
    def compute_slowdown(self) -> Fraction:
        """Return how much longer compute takes beside copies: 1/5 is a fifth longer."""
        return _longer(self.compute_alone, self.compute_beside)

    @property
    def copy_slowdown(self) -> Fraction:
        """Return how much longer copies take beside compute."""
        return _longer(self.copy_alone, self.copy_beside)


def _longer(alone: Sample, beside: Sample) -> Fraction:
    """Return the median over pairs of repeats, which ran one after the other, to 0.1 %."""
    ratio = median(b / max(a, 1) for a, b in zip(alone.values, beside.values, strict=True))
    return max(Fraction(0), Fraction(round(1000 * ratio), 1000) - 1)


def lane_counts(lanes: int) -> list[int]:
    """Return 1, 2, 4, ... and *lanes*."""
    return sorted({1 << n for n in range(lanes.bit_length())} | {lanes})


def measure(
    device: Device,
    seconds: float,
    on_progress: OnProgress | None = None,
    now: Callable[[], int] = perf_counter_ns,
    rest: Callable[[float], None] = sleep,
    together: int = TOGETHER,
) -> Figures:
    """Measure *device* in about *seconds*; *on_progress* hears of (points done, points in all).

    Experts are timed in batches of *together*, two or more: best as many as a token uses, for what
    a batch costs by itself is not the same for every kernel.
    """
    largest = max(device.kernels.values())
    sizes = sorted({*SIZES, *device.kernels.values(), *(n // 2 for n in device.kernels.values())})
    copies = [(n, lanes) for n in sizes for lanes in lane_counts(device.lanes)]
    experts = [(k, t, together) for k in device.kernels for t in TOKENS]
    experts += [(k, 1, 1) for k in device.kernels]
    dense = [point for point in dense_points() if device.dense_bytes(point.head) is not None]
    back = copies if device.writes_back else []
    total = len(copies) + len(back) + len(experts) + len(dense)
    total += 5  # host, contention twice, power twice
    each, done = seconds / total, 0

    def told(sample: Sample) -> Sample:
        nonlocal done
        done += 1
        if on_progress is not None:
            on_progress(done, total)
        return sample

    def of(once: Callable[[], int]) -> Sample:
        return told(repeat(once, each, now))

    kernel = next(iter(device.kernels))
    copied = {key: of(partial(device.copy, *key)) for key in copies}
    returned = {key: of(partial(device.copy_back, *key)) for key in back}
    computed = {(k, t, n): of(partial(device.experts, k, n, t)) for k, t, n in experts}
    timed = {point: of(partial(device.dense, point)) for point in dense}
    host = of(device.host)

    def compute() -> int:
        return device.experts(kernel, together, 1)

    def copy() -> int:
        return device.copy(largest, device.lanes)

    def beside_copies() -> int:
        with device.copying():
            return compute()

    def beside_compute() -> int:
        with device.computing():
            return copy()

    compute_alone, compute_beside = alternate(compute, beside_copies, each, now)
    told(compute_beside)
    copy_alone, copy_beside = alternate(copy, beside_compute, each, now)
    told(copy_beside)
    watched = max(each, device.energy_window * 1.1e-9)  # seconds
    idle = power(device, lambda: rest(watched), now)
    told(compute_alone)
    with device.computing():
        busy = power(device, lambda: rest(watched), now)
    told(compute_alone)
    return Figures(
        copies=copied, experts=computed, dense=timed, host=host,
        compute_alone=compute_alone, compute_beside=compute_beside,
        copy_alone=copy_alone, copy_beside=copy_beside, idle_uw=idle, busy_uw=busy,
        together=together, back=returned,
    )  # fmt: skip


def dense_points() -> list[DensePoint]:
    """Return the dense parts to time; the output head sees one token of a prompt."""
    found = [
        DensePoint("decode", head, tokens, tokens * context)
        for head in (False, True)
        for tokens in (1, IN_LOCKSTEP)
        for context in CONTEXTS
    ]
    found += [DensePoint("prefill", False, n, n * (n + 1) // 2) for n in PROMPTS]
    return [*found, DensePoint("prefill", True, 1, 1)]


def power(device: Device, wait: Callable[[], None], now: Callable[[], int]) -> int | None:
    """Return the mean power in microwatts while *wait* waits.

    None where nothing counts energy, or the counter is too slow for so short a time.
    """
    before, begin = device.energy(), now()
    wait()
    after, end = device.energy(), now()
    if before is None or after is None or after < before:
        return None
    if end - begin < max(device.energy_window, 1):
        return None
    return (after - before) * 1_000_000_000 // (end - begin)
