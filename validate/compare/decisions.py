"""This module fingerprints every decision of a run, so that two runs can be compared exactly.

A plan is a decision: what a batch needs, fetches, brings early, does without, evicts. Per batch and
field eight bytes of a hash are kept, so memory stays small and the first difference has a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b, sha256

import numpy as np
import numpy.typing as npt

from moetier.sim.plan import LayerPlan

FIELDS = (
    "needed", "missing", "fetch", "prefetch", "evicted", "replaced", "cpu", "skip", "degrade",
    "demoted", "cancelled", "fetch_hops", "cpu_hops", "prefetch_hops", "cancelled_hops",
    "compulsory", "prefetch_used", "prefetch_wasted", "cpu_assignments", "skip_assignments",
    "spared", "lower_lookups", "lower_hits", "warmup_bytes", "resident", "peak",
)  # fmt: skip
"""All of a plan; what it routes to is in the batch, and comes first."""

ROUTED = "experts"


@dataclass(frozen=True)
class Decisions:
    """The decisions of a run: a row of hashes per batch."""

    places: list[tuple[int, int]]  # step and layer of each batch
    hashes: npt.NDArray[np.uint64]  # (batches, 1 + fields)

    @classmethod
    def of(cls, plans: Iterable[LayerPlan]) -> Decisions:
        """Return the decisions that *plans* are."""
        places, rows = [], []
        for plan in plans:
            places.append((plan.batch.step, plan.batch.layer))
            rows.append([_hash(plan.batch.experts), *(_hash(getattr(plan, f)) for f in FIELDS)])
        return cls(places, np.array(rows, np.uint64).reshape(len(rows), 1 + len(FIELDS)))

    @property
    def digest(self) -> str:
        """Return a fingerprint of all decisions together."""
        text = ";".join(f"{step},{layer}" for step, layer in self.places)
        return sha256(text.encode() + self.hashes.tobytes()).hexdigest()

    def first_difference(self, other: Decisions) -> str | None:
        """Return where *other* decides differently for the first time, in words; None if never."""
        both = min(len(self.places), len(other.places))
        for at in range(both):
            if self.places[at] != other.places[at]:
                return f"batch {at} is {_where(self.places[at])}, and {_where(other.places[at])}"
            differs = np.flatnonzero(self.hashes[at] != other.hashes[at])
            if len(differs):
                return f"{_where(self.places[at])}: {(ROUTED, *FIELDS)[differs[0]]}"
        if len(self.places) != len(other.places):
            return f"{len(self.places)} batches, and {len(other.places)}"
        return None


def _hash(value: object) -> int:
    """Return a hash of a number, a sequence of numbers or None; lists and tuples are alike."""
    text = str(value if value is None or isinstance(value, int) else list(value))  # type: ignore[call-overload]
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _where(place: tuple[int, int]) -> str:
    return f"step {place[0]}, layer {place[1]}"
