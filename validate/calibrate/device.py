"""This module says what calibration asks of a machine, and all that it asks.

One call is one repeat and returns nanoseconds. Arithmetic, points, repeats and the profile are the
same for every machine and know nothing else about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol


class DensePoint(NamedTuple):
    """A dense part to time: of a layer within the model, or of the last with the output head."""

    phase: Literal["decode", "prefill"]
    head: bool
    tokens: int
    context: int  # key/value entries, summed over the tokens


@dataclass(frozen=True, slots=True)
class Memory:
    """A tier: its *capacity* in bytes, and how that is known."""

    name: str
    capacity: int
    source: str


class Device(Protocol):
    """A machine with two tiers: one that computes, and one below it."""

    @property
    def tiers(self) -> tuple[Memory, Memory]:
        """The tier that computes, and the one below it."""
        ...

    @property
    def lanes(self) -> int:
        """How many copies can be under way at once."""
        ...

    @property
    def kernels(self) -> Mapping[str, int]:
        """What computes experts: name to bytes of one expert as it stores them."""
        ...

    @property
    def expert_ops(self) -> int:
        """Operations of one expert on one token."""
        ...

    @property
    def identity(self) -> Mapping[str, str]:
        """Which machine this is."""
        ...

    def dense_bytes(self, head: bool) -> int | None:
        """Return the weights of the dense part that a point with *head* times; None for no such."""
        ...

    def copy(self, nbytes: int, lanes: int) -> int:
        """Copy *nbytes* on each of *lanes* lanes at once, some times over; return ns per copy."""
        ...

    @property
    def writes_back(self) -> bool:
        """Whether copies the other way are measured, with `copy_back`."""
        ...

    def copy_back(self, nbytes: int, lanes: int) -> int:
        """Do as `copy` does, from the tier that computes to the one below it."""
        ...

    def experts(self, kernel: str, count: int, tokens: int) -> int:
        """Compute a batch of *count* different experts, each on *tokens* tokens."""
        ...

    def dense(self, point: DensePoint) -> int:
        """Compute the dense part of one layer."""
        ...

    def host(self) -> int:
        """Return what the host program spent on one layer of a run that waits for nothing."""
        ...

    def copying(self) -> AbstractContextManager[None]:
        """Keep all lanes busy meanwhile."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Keep the processor busy with experts meanwhile."""
        ...

    @property
    def energy_window(self) -> int:
        """The shortest time, in ns, over which a difference of `energy` means something."""
        ...

    def energy(self) -> int | None:
        """Return a counter of the machine's energy in microjoules; None where there is none."""
        ...

    def remarks(self) -> Sequence[str]:
        """Return what a reader of the profile must know about how copies were made.

        Raises:
            InputError: If they were not made as they should have been.
        """
        ...
