"""This module packs an expert into an MSB slice and an LSB slice, and unpacks it again.

Codes and zero-points of *high* bits are split: the *low* highest bits of each go into the MSB
slice, the rest into the LSB slice. The MSB slice alone is the expert at *low* bits (AMAT in
SliceMoE, arXiv:2512.12990); both together are the expert at *high* bits, exactly.

The bytes of a slice, in this order, for `up` (the rows of gate, then those of up) and then `down`:

| slice | section | values | bits each |
|-------|---------|--------|-----------|
| MSB | codes >> d | rows x columns | low |
| | zero-points >> d | rows x groups | low |
| | scales of the high codes | rows x groups | 16 (float16) |
| | biases, where there are any | rows | 16 (bfloat16) |
| LSB | low d bits of the codes | rows x columns | d |
| | low d bits of the zero-points | rows x groups | d |

with d = high - low and groups = columns / group. Matrices are row by row, numbers little-endian. A
section of b-bit values is one stream in which bit j of value i is bit i * b + j, and bit k is bit
k % 8 of byte k // 8; its last byte is filled up with zeros.
`traces.formats.bit_slice_bytes` counts the same bytes from a geometry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moetier.traces.errors import InputError
from moetier.traces.formats import check_group, check_slice_bits
from moetier.validate.numerics.experts import ExpertMatrices, require_finite
from moetier.validate.numerics.groupwise import GROUP, Quantised, dequantised, quantise
from moetier.validate.numerics.torch_bits import unpack_bits_anywhere


@dataclass(frozen=True, slots=True)
class SliceFormat:
    """What one must know to read a slice; *gated* says whether `up` begins with gate's rows."""

    high: int
    low: int
    group: int
    hidden: int
    inner: int
    gated: bool
    biased: bool

    def __post_init__(self) -> None:
        """Refuse bits that make no slices, and groups that do not divide a row."""
        check_slice_bits(self.high, self.low)
        for _, columns in self.shapes:
            check_group(columns, self.group)

    @classmethod
    def of(cls, expert: ExpertMatrices, high: int, low: int, group: int = GROUP) -> SliceFormat:
        """Return the format of *expert*'s slices, or of a stack of experts'."""
        inner, hidden = expert.up.shape[-2:]
        gated, biased = expert.gate is not None, expert.down_bias is not None
        return cls(high, low, group, hidden, inner, gated, biased)

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the rows and columns of `up` and of `down`."""
        return (self.inner * (1 + self.gated), self.hidden), (self.hidden, self.inner)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Return the bytes of an MSB slice and of an LSB slice."""
        msb = lsb = 0
        for rows, columns in self.shapes:
            groups = rows * (columns // self.group)
            streams = (rows * columns, groups)
            msb += sum(_stream_bytes(n, self.low) for n in streams) + 2 * groups
            msb += 2 * rows * self.biased
            lsb += sum(_stream_bytes(n, self.high - self.low) for n in streams)
        return msb, lsb

    @property
    def scales(self) -> list[tuple[int, int]]:
        """Return where the scales of `up` and of `down` are in the MSB slice: (byte, count)."""
        return [(at, groups) for at, groups, _ in self._places()]

    @property
    def bias_places(self) -> list[tuple[int, int]]:
        """Return where the biases of `up` and of `down` are in the MSB slice: (byte, count)."""
        return [(at + 2 * groups, rows) for at, groups, rows in self._places() if self.biased]

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first byte of the scales, the groups and the rows of `up`, then of `down`."""
        at = 0
        for rows, columns in self.shapes:
            groups = rows * (columns // self.group)
            at += _stream_bytes(rows * columns, self.low) + _stream_bytes(groups, self.low)
            yield at, groups, rows
            at += 2 * groups + 2 * rows * self.biased


class Slices(NamedTuple):
    """The two slices of an expert, uint8."""

    msb: Tensor
    lsb: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SlicedExpert:
    """An expert in codes: `up` with gate's rows first, and the biases of both (None: none)."""

    up: Quantised
    down: Quantised
    up_bias: Tensor | None
    down_bias: Tensor | None

    def tensors(self, gated: bool) -> dict[str, Tensor]:
        """Return the weights and biases, float32, by the names of `ExpertMatrices`."""
        found = {"up": self.up.weights(), "down": self.down.weights()}
        if self.up_bias is not None and self.down_bias is not None:
            found |= {"up_bias": self.up_bias.float(), "down_bias": self.down_bias.float()}
        if gated:
            for name in [name for name in found if name.startswith("up")]:
                gate, found[name] = found[name].chunk(2)
                found[name.replace("up", "gate")] = gate
        return found


def sliced(
    expert: ExpertMatrices, high: int, group: int = GROUP, name: str = "expert"
) -> SlicedExpert:
    """Quantise *expert* to codes of *high* bits whose scales fit into 16; biases to bfloat16.

    Raises:
        InputError: Naming the tensor (by *name* and its own), if a weight is NaN or infinite, or
            too large for a 16-bit scale; if *group* does not divide a row.
    """
    for part, value in {**expert.matrices(), **expert.biases()}.items():
        require_finite(f"{name}.{part}", value)
    up = expert.up if expert.gate is None else torch.cat([expert.gate, expert.up])
    up_bias = expert.up_bias
    if up_bias is not None and expert.gate_bias is not None:
        up_bias = torch.cat([expert.gate_bias, up_bias])
    return SlicedExpert(
        _codes(f"{name}.up", up, high, group),
        _codes(f"{name}.down", expert.down, high, group),
        _bfloat16(up_bias),
        _bfloat16(expert.down_bias),
    )


def pack(expert: SlicedExpert, how: SliceFormat) -> Slices:
    """Return the slices of *expert*, whose codes have *how*.high bits, as the module describes."""
    drop = how.high - how.low
    msb: list[Tensor] = []
    lsb: list[Tensor] = []
    for part, bias in ((expert.up, expert.up_bias), (expert.down, expert.down_bias)):
        for values in (part.codes, part.zeros):
            flat = values.reshape(-1).to(torch.uint8)
            msb.append(pack_bits(flat >> drop, how.low))
            lsb.append(pack_bits(flat & (2**drop - 1), drop))
        msb.append(part.scales.to(torch.float16).reshape(-1).view(torch.uint8))
        if bias is not None:
            msb.append(bias.view(torch.uint8))
    return Slices(torch.cat(msb), torch.cat(lsb))


def unpack(how: SliceFormat, msb: Tensor, lsb: Tensor | None = None) -> SlicedExpert:
    """Return the expert at *how*.high bits from both slices, at *how*.low from the MSB alone.

    Raises:
        InputError: If a slice has not the bytes of *how*.
    """
    parts: list[Quantised] = []
    biases: list[Tensor | None] = []
    bits = how.low if lsb is None else how.high
    for codes, scales, zeros, bias in _sections(how, msb, lsb):
        parts.append(Quantised(codes.to(torch.int32), scales, zeros.to(torch.int32), bits))
        biases.append(bias)
    return SlicedExpert(parts[0], parts[1], biases[0], biases[1])


def unpack_weights(
    how: SliceFormat, msb: Tensor, lsb: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return `up`, `down` and their biases, float32, with the weights of `unpack`, but faster.

    Raises `InputError` as `unpack` does.
    """
    made: list[Tensor] = []
    biases: list[Tensor | None] = []
    for codes, scales, zeros, bias in _sections(how, msb, lsb):
        made.append(dequantised(codes, scales, zeros).flatten(-2))
        biases.append(None if bias is None else bias.float())
    return made[0], made[1], biases[0], biases[1]


def _sections(
    how: SliceFormat, msb: Tensor, lsb: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Yield codes and zero-points (uint8), scales (float32) and bias of `up`, then of `down`."""
    for name, value, expected in zip(("MSB", "LSB"), (msb, lsb), how.nbytes, strict=True):
        if value is not None and len(value) != expected:
            raise InputError(f"the {name} slice has {len(value)} bytes, its format {expected}")
    drop = how.high - how.low
    fine, coarse = _Reader(msb), None if lsb is None else _Reader(lsb)
    for rows, columns in how.shapes:
        groups = columns // how.group
        values = []
        for shape in ((rows, groups, how.group), (rows, groups, 1)):
            value = fine.stream(shape, how.low)
            values.append(value if coarse is None else value << drop | coarse.stream(shape, drop))
        scales = fine.sixteen((rows, groups, 1), torch.float16).float()
        if coarse is None:
            scales = scales * 2**drop
        bias = fine.sixteen((rows,), torch.bfloat16) if how.biased else None
        yield values[0], scales, values[1], bias


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack *values*, uint8 below 2**bits, (n), into a stream of ceil(n * bits / 8) bytes.

    Eight values take *bits* whole bytes, so they meet in one 64-bit word.
    """
    count = len(values)
    padded = np.zeros(-(-count // 8) * 8, dtype=np.uint8)
    padded[:count] = values.numpy()
    eights = padded.reshape(-1, 8)
    words = np.zeros(len(eights), dtype="<u8")
    for at in range(8):
        words |= eights[:, at].astype("<u8") << np.uint64(at * bits)
    stream = words.view(np.uint8).reshape(-1, 8)[:, :bits].reshape(-1)
    return torch.from_numpy(stream[: _stream_bytes(count, bits)].copy())


def unpack_bits(stream: Tensor, count: int, bits: int) -> Tensor:
    """Return the *count* values of *bits* bits in *stream*, uint8: what `pack_bits` took.

    Where values are narrow, several at once are looked up, which takes half the time.
    """
    if bits == 8:
        return stream[:count]
    if stream.device.type != "cpu":
        return unpack_bits_anywhere(stream, count, bits)
    data: npt.NDArray[np.uint8] = stream.numpy()
    if bits in (1, 2, 4):
        return torch.from_numpy(_table(bits, 8 // bits)[data].view(np.uint8)[:count])
    n_words = -(-count // 8)
    padded = np.zeros(n_words * bits, dtype=np.uint8)
    padded[: len(data)] = data
    eights = np.zeros((n_words, 8), dtype=np.uint8)
    eights[:, :bits] = padded.reshape(-1, bits)
    words = eights.view("<u8").reshape(-1)
    at_once = 4 if bits == 3 else 2
    table, width = _table(bits, at_once), at_once * bits
    values = np.empty((n_words, 8 // at_once), dtype=table.dtype)
    for at in range(8 // at_once):
        index = words >> np.uint64(at * width) & np.uint64(2**width - 1)
        values[:, at] = table[index.astype(np.uint16)]
    return torch.from_numpy(values.view(np.uint8).reshape(-1)[:count])


@lru_cache
def _table(bits: int, at_once: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return, by their bits, *at_once* values of *bits* bits as so many bytes of a number."""
    index = np.arange(2 ** (bits * at_once), dtype=np.uint32)
    values = [index >> bits * at & 2**bits - 1 for at in range(at_once)]
    return np.stack(values, -1).astype(np.uint8).view(f"<u{at_once}").reshape(-1)


class _Reader:
    """Takes one section of a slice after the other."""

    def __init__(self, data: Tensor) -> None:
        self._data, self._at = data, 0

    def stream(self, shape: tuple[int, ...], bits: int) -> Tensor:
        count = int(np.prod(shape))
        packed = self._take(_stream_bytes(count, bits))
        return unpack_bits(packed, count, bits).view(shape)

    def sixteen(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # cloned, as a section may begin at an odd byte
        return self._take(2 * int(np.prod(shape))).clone().view(dtype).view(shape)

    def _take(self, nbytes: int) -> Tensor:
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]


def _stream_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def _codes(name: str, matrix: Tensor, bits: int, group: int) -> Quantised:
    check_group(matrix.shape[-1], group, name)
    try:
        return quantise(matrix.float(), bits, group, half_scales=True)
    except ValueError as error:
        raise InputError(str(error), where=name) from None


def _bfloat16(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.bfloat16).contiguous()
