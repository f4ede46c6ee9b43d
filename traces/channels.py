"""This module counts what a channel reader reads of an expert, in whole bytes.

A channel reader (Kim & Hwang, "Channel Selection for MoE Decoding Needs No Calibration Data") looks
at a small sketch of every channel of an expert, reads the exact weights of the channels that matter
and replaces the rest by a low-rank map. Memory is read in sectors of 32 bytes, so every row, column
and table is stored at the start of a sector and takes up whole ones.

- sketch: the trits of the gate and up rows, 5 to a byte; a 16-bit scale per row and group; a 16-bit
  norm of every down column; and, where experts have biases, those of all three projections;
- recovery: U (hidden x rank) and V (channels x rank), 16 bit;
- a channel: a gate row, an up row and a down column (stored as a row), `hidden` weights each.

For a batch, the channels that are read are the union over its tokens; the sketch is read once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry

SECTOR = 32
TRITS_PER_BYTE = 5  # 3**5 = 243 codes
HALF = 2  # bytes of a scale, a norm, a bias and a number of a recovery map

Reads = Fraction | float


def sectors(nbytes: int) -> int:
    """Return *nbytes* rounded up to whole sectors."""
    return -(-nbytes // SECTOR) * SECTOR


def row_trit_bytes(hidden: int, group: int | None) -> int:
    """Return the bytes of one packed row of *hidden* trits; every group starts a byte."""
    width = min(group or hidden, hidden)
    whole, rest = divmod(hidden, width)
    return whole * -(-width // TRITS_PER_BYTE) + -(-rest // TRITS_PER_BYTE)


@dataclass(frozen=True)
class ChannelCost:
    """What one expert's channels cost to read; all but *channels* in bytes."""

    sketch_bytes: int  # read whenever the expert is routed to
    recovery_bytes: int  # likewise
    channel_bytes: int  # of one kept channel
    channels: int
    full_bytes: int  # of the plain expert, the denominator of every share

    @property
    def smallest(self) -> Fraction:
        """Return the share of `full_bytes` that is read with no channel kept."""
        return self.share(0)

    def kept(self, reads: Reads) -> int:
        """Return how many channels fit into *reads*, a share of `full_bytes`; at most all.

        A float stands for the decimal it prints as, so that .178 is exactly 178/1000.

        Raises:
            InputError: If *reads* is no positive number, or does not pay for sketch and recovery.
        """
        if not (isinstance(reads, Fraction) or math.isfinite(reads)) or reads < 0:
            raise InputError(
                f"reads are a share of an expert's bytes, got {reads}", way_out="such as 0.178"
            )
        budget = (reads if isinstance(reads, Fraction) else Fraction(str(reads))) * self.full_bytes
        left = budget - self.sketch_bytes - self.recovery_bytes
        if left < 0:
            raise InputError(
                f"reads of {float(reads):.2%} do not pay for the sketch "
                f"({self.sketch_bytes / self.full_bytes:.2%}) and the recovery maps "
                f"({self.recovery_bytes / self.full_bytes:.2%})",
                way_out=f"the smallest possible reads are {math.ceil(self.smallest * 10000) / 100} "
                "%; ask for more, or lower the rank",
            )
        return min(self.channels, left // self.channel_bytes)

    def read_bytes(self, kept: int) -> int:
        """Return the bytes read of an expert of which *kept* channels are computed exactly.

        For a batch, *kept* counts the union of its tokens' channels.
        """
        if not 0 <= kept <= self.channels:
            raise InputError(f"cannot keep {kept} of {self.channels} channels")
        return self.sketch_bytes + self.recovery_bytes + kept * self.channel_bytes

    def share(self, kept: int) -> Fraction:
        """Return `read_bytes` as a share of `full_bytes`."""
        return Fraction(self.read_bytes(kept), self.full_bytes)


def channel_cost(
    geometry: Geometry,
    *,
    rank: int = 0,
    group: int | None = None,
    bytes_per_weight: Fraction | int = 2,
) -> ChannelCost:
    """Return what the channels of one routed expert of *geometry* cost.

    Args:
        geometry: Gives the hidden size, the number of channels (`moe_intermediate`) and whether
            the projections have biases.
        rank: Of the recovery map; 0 for none.
        group: Inputs that share a scale of the sketch; None for one scale per row.
        bytes_per_weight: Of the exact weights; a fraction for formats below a byte.

    Raises:
        InputError: If the geometry has no gated experts of a known size, or a number is senseless.
    """
    if geometry.hidden is None or geometry.moe_intermediate is None:
        raise InputError(
            f"the size of an expert of '{geometry.name}' is unknown",
            way_out="name a published geometry with `model:`",
        )
    if geometry.expert_matrices != 3:
        raise InputError(
            f"the experts of '{geometry.name}' have no gate",
            way_out="channels are screened by gate and up projection; use another precision",
        )
    return cost_of_sizes(
        geometry.hidden,
        geometry.moe_intermediate,
        rank=rank,
        group=group,
        bytes_per_weight=bytes_per_weight,
        biases=geometry.expert_biases,
    )


def cost_of_sizes(
    hidden: int,
    channels: int,
    *,
    rank: int = 0,
    group: int | None = None,
    bytes_per_weight: Fraction | int = 2,
    biases: bool = False,
) -> ChannelCost:
    """Return what `channel_cost` does, for experts of *channels* channels of *hidden* inputs."""
    if not 0 <= rank <= min(hidden, channels):
        raise InputError(
            f"a recovery map of rank {rank} does not fit {channels} channels of {hidden}",
            way_out=f"choose 0 to {min(hidden, channels)}",
        )
    if group is not None and group < 1:
        raise InputError(f"a group of {group} inputs", way_out="choose at least 1, or none")
    if bytes_per_weight <= 0:
        raise InputError(f"weights of {bytes_per_weight} bytes")
    rows = 2 * channels
    groups = -(-hidden // min(group or hidden, hidden))
    sketch = sectors(rows * row_trit_bytes(hidden, group)) + sectors(rows * groups * HALF)
    sketch += sectors(channels * HALF)  # norms
    if biases:
        sketch += sectors(rows * HALF) + sectors(hidden * HALF)
    return ChannelCost(
        sketch_bytes=sketch,
        recovery_bytes=sectors(rank * hidden * HALF) + sectors(rank * channels * HALF),
        channel_bytes=3 * sectors(math.ceil(hidden * bytes_per_weight)),
        channels=channels,
        full_bytes=sectors(math.ceil(3 * hidden * channels * bytes_per_weight)),
    )


def k_for(
    reads: Reads,
    geometry: Geometry,
    *,
    rank: int = 0,
    group: int | None = None,
    bytes_per_weight: Fraction | int = 2,
) -> int:
    """Return how many channels per expert the target *reads* leave room for; see `kept`."""
    cost = channel_cost(geometry, rank=rank, group=group, bytes_per_weight=bytes_per_weight)
    return cost.kept(reads)
