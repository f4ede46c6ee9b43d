"""This module turns rows of weights into trits with scales, and packs five trits into a byte.

In every group of a row, a weight above a threshold in magnitude becomes its sign and the rest 0;
the scale is the mean magnitude of the weights that became a sign, which is the least-squares fit.
The default threshold, 0.7 times the mean magnitude, is that of ternary weight networks (Li et al.,
arXiv:1605.04711).

A packed byte is ceil(256 c / 243) for the five digits c (base 3, a digit is a trit plus one, the
first the highest). Multiplying by 3 then pushes the digits out at the top one by one, which takes
vector instructions and no division. Digit n of byte j belongs to input n * B + j of a group that
takes B bytes, so that equal digits of neighbouring bytes are neighbouring inputs; inputs beyond
the group's end are 0.

Shapes: (..., R, H) rows of H inputs, G groups of g inputs, P bytes per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moetier.traces.channels import TRITS_PER_BYTE
from moetier.traces.errors import InputError

THRESHOLD = 0.7
_PLACES = torch.tensor([81, 27, 9, 3, 1])


def groups_of(hidden: int, group: int | None) -> list[int]:
    """Return the widths of the groups of a row of *hidden* inputs; the last may be short."""
    width = min(group or hidden, hidden)
    whole, rest = divmod(hidden, width)
    return [width] * whole + ([rest] if rest else [])


def ternarise(
    rows: Tensor, group: int | None = None, threshold: float = THRESHOLD
) -> tuple[Tensor, Tensor]:
    """Return trits, (..., R, H) in int8, and scales, (..., R, G) in bfloat16, of *rows*.

    A group without a weight above the threshold, such as one of zeros, has scale 0.

    Raises:
        InputError: If a weight is not finite.
    """
    require_finite(rows)
    trits, scales = [], []
    for part in torch.split(rows.float(), groups_of(rows.shape[-1], group), -1):
        size = part.abs()
        above = size > threshold * size.mean(-1, keepdim=True)
        trits.append((part.sign() * above).to(torch.int8))
        scales.append((size * above).sum(-1) / above.sum(-1).clamp(min=1))
    return torch.cat(trits, -1), torch.stack(scales, -1).to(torch.bfloat16)


def require_finite(weights: Tensor) -> None:
    """Raise `InputError` if one of *weights* is NaN or infinite."""
    if not bool(torch.isfinite(weights).all()):
        raise InputError(
            "a weight is NaN or infinite", way_out="repair the checkpoint; it has no sketch"
        )


def pack(trits: Tensor, group: int | None = None) -> Tensor:
    """Return *trits*, (..., H) in int8, as bytes, (..., P) in uint8."""
    packed = []
    for part in torch.split(trits, groups_of(trits.shape[-1], group), -1):
        n = -(-part.shape[-1] // TRITS_PER_BYTE)
        spare = n * TRITS_PER_BYTE - part.shape[-1]
        digits = torch.nn.functional.pad(part.to(torch.int16) + 1, (0, spare), value=1)
        places = _PLACES.to(torch.int16)[:, None]
        codes = (digits.reshape(*digits.shape[:-1], TRITS_PER_BYTE, n) * places).sum(-2)
        packed.append(((codes * 256 + 242) // 243).to(torch.uint8))
    return torch.cat(packed, -1)


def unpack(packed: Tensor, hidden: int, group: int | None = None) -> Tensor:
    """Return the trits, (..., *hidden*) in int8, that `pack` made into *packed*.

    Raises:
        InputError: If the bytes are not those of a row of *hidden* trits.
    """
    widths = groups_of(hidden, group)
    sizes = [-(-width // TRITS_PER_BYTE) for width in widths]
    if packed.shape[-1] != sum(sizes):
        raise InputError(f"{packed.shape[-1]} bytes are no row of {hidden} trits ({sum(sizes)})")
    trits = []
    for part, width in zip(torch.split(packed, sizes, -1), widths, strict=True):
        rest, digits = part.to(torch.int16), []
        for _ in range(TRITS_PER_BYTE):
            rest = rest * 3
            digits.append((rest >> 8).to(torch.int8) - 1)
            rest = rest & 255
        trits.append(torch.stack(digits, -2).flatten(-2)[..., :width])
    return torch.cat(trits, -1)
