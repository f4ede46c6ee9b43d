"""This module says what the CUDA machine asks of a GPU, and all that it asks.

Order, waiting, slots and records are the same whatever stands behind it, so they are tested on a
device that is made of threads (`fake`). What knows CUDA is `torch_cuda`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from moetier.sim.units import format_bytes
from moetier.traces.errors import InputError
from moetier.validate.identity import CUDA

FACTS = tuple(name for name in CUDA if name not in ("file system", "device", "threads"))
"""Of an identity: those that a machine without a disk and without compute on the CPU has."""


class Event(Protocol):
    """A place in the work of a stream."""

    def done(self) -> bool:
        """Return whether the stream has come to it."""
        ...

    def wait(self) -> None:
        """Let the calling thread wait until the stream has come to it.

        Raises:
            BaseException: What went wrong in the stream before.
        """
        ...

    def since(self, earlier: Event) -> int:
        """Return the ns from *earlier* to this one; both must be done."""
        ...


class Stream(Protocol):
    """Work that is done in the order in which it was given; what is given returns at once."""

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy *source*, in pinned memory, *to* memory of the device; both (nbytes,) uint8."""
        ...

    def copy_back(self, to: Tensor, source: Tensor) -> None:
        """Copy *source*, in memory of the device, *to* pinned memory; both (nbytes,) uint8."""
        ...

    def record(self) -> Event:
        """Return an event behind all that was given so far."""
        ...

    def running(self) -> AbstractContextManager[None]:
        """Give what torch computes on the device meanwhile, in this thread, to the stream."""
        ...

    def synchronise(self) -> None:
        """Wait until all that was given is done; raises as `Event.wait` does."""
        ...

    def close(self) -> None:
        """Wait until what is under way is done, and end; closing twice does nothing."""
        ...


class Device(Protocol):
    """A GPU. Memory and streams may be asked for by any thread."""

    @property
    def name(self) -> str:
        """Its name, as its maker has it."""
        ...

    @property
    def torch(self) -> torch.device:
        """Where its tensors are."""
        ...

    @property
    def energy_window(self) -> int:
        """The shortest time, in ns, over which a difference of `energy` means something."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Return what tells it from others: names to values, as `validate.identity` has them."""
        ...

    def memory(self, nbytes: int) -> Tensor:
        """Return memory of the device, (nbytes,) uint8.

        Raises:
            InputError: If it has none left, with the bytes needed and those that are free.
        """
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Return memory of the host that the device copies from, (nbytes,) uint8; raises alike."""
        ...

    def release(self, memory: Tensor) -> None:
        """Take back what `memory` or `pinned` returned; nothing may use it any more."""
        ...

    def free(self) -> int | None:
        """Return the bytes of the device that can be had; None where nothing says so."""
        ...

    def free_pinned(self) -> int | None:
        """Return the bytes of the host that can be pinned; None where nothing says so."""
        ...

    def stream(self) -> Stream:
        """Return a new stream."""
        ...

    def energy(self) -> int | None:
        """Return the microjoules that the device has used so far; None where nothing counts."""
        ...

    def synchronise(self) -> None:
        """Wait until all that any stream was given is done."""
        ...

    def close(self) -> None:
        """Give all memory back; closing twice does nothing."""
        ...


def require(nbytes: int, free: int | None, what: str, where: str = "the device") -> None:
    """Raise `InputError` if *nbytes* for *what* are more than the bytes that are *free*."""
    if free is not None and nbytes > free:
        raise InputError(
            f"{format_bytes(nbytes)} ({nbytes} bytes) are needed on {where}, and "
            f"{format_bytes(free)} are free",
            where=what,
            way_out="lower the capacity, or use fewer layers",
        )
