"""This module numbers slices: one part of one expert of one MoE layer is one integer.

    slice = (layer * n_experts + expert) * n_parts + part

The whole expert is one part, a bit slice is one of two, a block of channels one of many.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

MSB, LSB = 0, 1
"""The parts of an expert in bit slices: what a low precision needs, and what a high one adds."""


class Layout:
    """The slices of a model and their sizes in bytes.

    `nbytes[slice]` is a slice's size; `layer_slices` is the number of slices of one layer, so the
    first slice of MoE layer `l` is `l * layer_slices`. With `bit_sliced` the parts are `MSB` and
    `LSB`; with `blocks` they are blocks of channels, none of which matters more than another.
    """

    __slots__ = (
        "bit_sliced",
        "blocks",
        "each",
        "layer_slices",
        "n_experts",
        "n_layers",
        "n_parts",
        "nbytes",
        "total_bytes",
    )

    def __init__(
        self,
        part_bytes: Sequence[Sequence[int]],
        n_experts: int,
        *,
        bit_sliced: bool = False,
        blocks: bool = False,
    ) -> None:
        """Lay out *n_experts* per layer; *part_bytes* has the bytes of each part, per MoE layer."""
        parts = {len(row) for row in part_bytes}
        if len(parts) != 1 or min(parts) < 1:
            raise ValueError(f"every layer needs the same number of parts, got {sorted(parts)}")
        self.n_layers, self.n_experts, self.n_parts = len(part_bytes), n_experts, parts.pop()
        self.bit_sliced, self.blocks = bit_sliced, blocks
        self.layer_slices = n_experts * self.n_parts
        self.nbytes = [size for row in part_bytes for _ in range(n_experts) for size in row]
        self.total_bytes = sum(self.nbytes)
        self.each = self.nbytes[0] if len(set(self.nbytes)) == 1 else 0

    def slice_id(self, layer: int, expert: int, part: int = 0) -> int:
        """Return the slice of *part* of *expert* in MoE layer *layer*."""
        return (layer * self.n_experts + expert) * self.n_parts + part

    def layer_of(self, slice_id: int) -> int:
        """Return the MoE layer of a slice."""
        return slice_id // self.layer_slices

    def expert_of(self, slice_id: int) -> int:
        """Return the expert of a slice, within its layer."""
        return slice_id // self.n_parts % self.n_experts

    def part_of(self, slice_id: int) -> int:
        """Return which part of its expert a slice is."""
        return slice_id % self.n_parts

    def size(self, slices: Collection[int]) -> int:
        """Return the bytes of *slices* together."""
        if self.each:
            return self.each * len(slices)
        return sum(map(self.nbytes.__getitem__, slices))

    def layer_size(self, slices: Sequence[int]) -> int:
        """Return the bytes of *slices* of one layer, which for whole experts all have one size."""
        if self.n_parts == 1:
            return len(slices) * self.nbytes[slices[0]] if slices else 0
        return self.size(slices)
