"""Kernels compute what their slices say: the weights, the level, and the channels kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moetier.sim.layout import LSB, MSB
from moetier.sim.policy.base import Precision
from moetier.sim.policy.precision.bit_sliced import BitSliced
from moetier.sim.policy.precision.channels import Channels
from moetier.sim.policy.precision.full import Full
from moetier.sim.policy.precision.hobbit import Hobbit
from moetier.sim.policy.precision.uniform import Uniform
from moetier.sim.run import Setting
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.formats import expert_bytes
from moetier.traces.geometry import Geometry
from moetier.validate.machines.direct import page_memory
from moetier.validate.machines.experts import Experts, Kernel, Which
from moetier.validate.machines.kernels.code_stream import CodeFormat
from moetier.validate.machines.kernels.of_policy import kernel_of
from moetier.validate.machines.run import pack_synthetic
from moetier.validate.machines.slots import Slot
from moetier.validate.numerics.experts import ExpertMatrices
from moetier.validate.numerics.groupwise import quantise
from moetier.validate.numerics.slices import SlicedExpert, SliceFormat, pack, sliced, unpack

PRECISIONS: list[Precision] = [
    Full(),
    Uniform(4),
    Uniform(3, group=16),
    Uniform(8),
    BitSliced((8, 4)),
    BitSliced((6, 3), group=16),
    Hobbit(),
    Hobbit(high=8, low=3),
    Channels(reads="70 %", rank=2),
    Channels(reads="60 %", recovery="none", unit="block", blocks=4),
]


def name_of(precision: Precision) -> str:
    return f"{type(precision).__name__}-{'-'.join(str(f.bits) for f in precision.formats)}"


def needs_numba(precision: object) -> None:
    if isinstance(precision, Channels):
        pytest.importorskip("numba", reason="channels are computed by the extra 'kernels'")


def buffers_of(kernel: Kernel, precision: Precision, geometry: Geometry) -> list[torch.Tensor]:
    layout = precision.layout(expert_bytes(geometry, "bf16"), geometry)
    made = [kernel.made_up(part, 7, part) for part in range(layout.n_parts)]

    assert [len(data) for data in made] == layout.nbytes[: layout.n_parts]
    return [torch.from_numpy(data) for data in made]


@pytest.mark.parametrize(
    ("precision", "biases"),
    [(p, False) for p in PRECISIONS]
    + [(BitSliced((6, 3), group=16), True)],  # they alone store them
    ids=lambda p: name_of(p) if isinstance(p, Precision) else str(p),
)
def test_made_up_slices_have_the_bytes_of_the_layout_and_give_sane_numbers(
    precision: Precision, biases: bool, geometry: Geometry
) -> None:
    needs_numba(precision)
    geometry = geometry.model_copy(update={"expert_biases": biases})
    kernel = kernel_of(precision, geometry, "bf16")
    buffers = buffers_of(kernel, precision, geometry)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(kernel.dtype)
    for parts in kernel.levels:
        out = kernel.run([b if at in parts else None for at, b in enumerate(buffers)], x)

        assert out.shape == (64, 64)
        assert out.dtype == kernel.dtype
        assert 0.05 < float(out.float().std()) < 5

    again = kernel.made_up(0, 7, 0)
    other = kernel.made_up(0, 7, 1)

    assert (again == buffers[0].numpy()).all()
    assert (other != again).any()


def plain() -> ExpertMatrices:
    generator = torch.Generator().manual_seed(3)
    gate, up, down = (
        torch.randn(*shape, generator=generator) / 8 for shape in ((32, 64), (32, 64), (64, 32))
    )
    return ExpertMatrices(gate, up, down, None, None, None, lambda g, u: u)


def sliced_at(bits: int, group: int) -> SlicedExpert:
    return sliced(plain(), bits, group)


def by_formula(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, straight = (x @ up.T).chunk(2, -1)
    return (F.silu(gate) * straight) @ down.T


@pytest.mark.parametrize(("bits", "group"), [(1, 32), (2, 32), (3, 16), (5, 8), (8, 32), (7, 4)])
def test_codes_come_back_as_they_were_packed(bits: int, group: int, geometry: Geometry) -> None:
    expert = sliced_at(bits, group)
    how = CodeFormat.of(geometry, bits, group)
    packed = how.pack(expert)
    up, down = how.weights(packed)

    assert len(packed) == how.nbytes
    assert torch.equal(up, expert.up.weights())
    assert torch.equal(down, expert.down.weights())
    exact = quantise(plain().down, bits, group, half_scales=True)
    assert torch.equal(down, exact.weights())

    x = torch.randn(3, 64)
    kernel = kernel_of(Uniform(bits, group), geometry, "bf16")
    torch.testing.assert_close(kernel.run([packed], x), by_formula(x, up, down))


@pytest.mark.parametrize("bits", [(8, 4), (6, 3), (4, 2), (8, 7)])
def test_bit_slices_are_computed_at_the_level_that_is_there(
    bits: tuple[int, int], geometry: Geometry
) -> None:
    how = SliceFormat(*bits, 32, 64, 32, True, False)
    both = pack(sliced_at(bits[0], 32), how)
    kernel = kernel_of(BitSliced(bits), geometry, "bf16")
    x = torch.randn(3, 64)
    for lsb in (both.lsb, None):
        expected = unpack(how, both.msb, lsb)

        torch.testing.assert_close(
            kernel.run([both.msb, lsb], x),
            by_formula(x, expected.up.weights(), expected.down.weights()),
        )

    with pytest.raises(InputError, match="without its MSB slice"):
        kernel.run([None, both.lsb], x)


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        (Uniform(4), "has 11 bytes, its format"),
        (BitSliced(), "slice has 11 bytes, its format"),
        (Hobbit(), "has 11 B, its matrices"),
        (Channels("70 %", rank=2), "has 11 bytes, its format"),
    ],
    ids=["uniform", "bit-sliced", "hobbit", "channels"],
)
def test_slices_of_another_size_are_refused(
    precision: Precision, said: str, geometry: Geometry
) -> None:
    needs_numba(precision)
    kernel = kernel_of(precision, geometry, "bf16")
    buffers = [torch.zeros(11, dtype=torch.uint8)] + [None] * (len(kernel.levels[-1]) == 2)
    if isinstance(precision, (BitSliced, Hobbit)):
        buffers = [buffers[0], None]
    with pytest.raises(InputError, match=said):
        kernel.run(buffers, torch.zeros(1, 64, dtype=kernel.dtype))


def test_what_has_no_kernel_is_refused(geometry: Geometry) -> None:
    class Odd(Precision):
        formats = Hobbit().formats

    with pytest.raises(InputError, match="no kernel computes precision 'Odd'"):
        kernel_of(Odd(), geometry, "bf16")
    with pytest.raises(InputError, match="codes of 12 bits have no kernel"):
        kernel_of(Uniform(12), geometry, "bf16")
    with pytest.raises(InputError, match="no whole number of groups of 24"):
        kernel_of(Uniform(4, group=24), geometry, "bf16")
    with pytest.raises(InputError, match="experts stored as int8 need a kernel"):
        kernel_of(Hobbit(), geometry, "int8")


def test_hobbit_computes_the_one_copy_there_is(geometry: Geometry) -> None:
    kernel = kernel_of(Hobbit(low=4), geometry, "bf16")
    high, low = buffers_of(kernel, Hobbit(low=4), geometry)
    x = torch.randn(2, 64).bfloat16()

    assert torch.equal(
        kernel.run([high, None], x), kernel_of(Full(), geometry, "bf16").run([high], x)
    )
    coarse = kernel_of(Uniform(4), geometry, "bf16").run([low], x.float())
    assert torch.equal(kernel.run([None, low], x), coarse.bfloat16())
    for buffers in ([high, low], [None, None]):
        with pytest.raises(InputError, match="copies of an expert, and one is needed"):
            kernel.run(buffers, x)


class Levelled(Precision):
    """Compute the entries of a batch at the levels given."""

    def __init__(self, found: list[int]) -> None:
        """Give entry by entry what is *found*."""
        self.found = found

    def levels(self, batch: LayerBatch, degraded: Any) -> list[int]:
        """Return them, 1 for experts whose LSB slice is degraded."""
        low = {s // 2 for s in degraded}
        return [1 if e in low else v for e, v in zip(batch.experts, self.found, strict=True)]


def slot_of(data: torch.Tensor) -> Slot:
    memory = page_memory(len(data))
    memory[: len(data)] = data.numpy().tobytes()
    return Slot(memory, len(data))


def test_each_token_is_computed_at_its_own_level(geometry: Geometry) -> None:
    kernel = kernel_of(BitSliced(), geometry, "bf16")
    msb, lsb = buffers_of(kernel, BitSliced(), geometry)
    slots = [slot_of(msb), slot_of(lsb)]
    weights = np.array([0.5, 0.5, 0.25, 0.75, 1, 1], np.float32)
    batch = LayerBatch(0, DECODE, 0, 3, 3, [4, 5, 4, 5, 4, 5], weights)
    x = torch.randn(3, 64)

    def computed(levels: list[int], degraded: tuple[int, ...] = ()) -> torch.Tensor:
        experts = Experts(kernel, Levelled(levels))
        routed = experts.routed(batch, [4], degraded)[4]

        assert routed.tokens.tolist() == [0, 1, 2]
        return experts.run(slots, routed, x)

    fine = kernel.run([msb, lsb], x) * torch.tensor([[0.5], [0.25], [1]])
    coarse = kernel.run([msb, None], x) * torch.tensor([[0.5], [0.25], [1]])

    torch.testing.assert_close(
        computed([0, 0, 1, 1, 0, 0]), torch.stack([fine[0], coarse[1], fine[2]])
    )
    torch.testing.assert_close(computed([0] * 6), fine)
    torch.testing.assert_close(computed([0] * 6, (4 * 2 + LSB,)), coarse)
    torch.testing.assert_close(computed([1] * 6), coarse)
    assert not torch.allclose(fine, coarse)
    assert kernel.levels == ((MSB, LSB), (MSB,))


@pytest.mark.parametrize("rank", [0, 3])
def test_channels_are_the_formula_over_those_kept(rank: int, geometry: Geometry) -> None:
    pytest.importorskip("numba", reason="channels are computed by the extra 'kernels'")
    made: dict[str, Any] = {"rank": rank} if rank else {"recovery": "none"}
    whole = Channels("90 %", **made)
    blocks = Channels("90 %", unit="block", blocks=4, **made)
    for precision in (whole, blocks):
        precision.layout(expert_bytes(geometry, "bf16"), geometry)
    kernel = kernel_of(blocks, geometry, "bf16")
    buffers = buffers_of(kernel, blocks, geometry)
    x = torch.randn(3, 64)
    kept = np.random.default_rng(0).random((3, 32)) < 0.5
    kept[:, 8:16] = False
    records = torch.cat(buffers).view(torch.bfloat16).view(32, 3, 64).float()
    inner = F.silu(x @ records[:, 0].T) * (x @ records[:, 1].T)
    exact = (inner * torch.from_numpy(kept)) @ records[:, 2]

    out = kernel.run([buffers[0], None, *buffers[2:]], x, Which(2, 5, kept))

    if not rank:
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)
    else:
        other = kernel.run([buffers[0], None, *buffers[2:]], x, Which(2, 6, kept))
        assert not torch.allclose(out, exact)
        assert not torch.allclose(out, other)  # every expert has maps of its own
    together = kernel_of(whole, geometry, "bf16").run([torch.cat(buffers)], x, Which(2, 5, kept))
    torch.testing.assert_close(together, out)
    with pytest.raises(InputError, match="a slice has 0 bytes"):
        kernel.run([None, *buffers[1:]], x, Which(2, 5, kept))


def test_channels_refuse_what_they_cannot_read(geometry: Geometry) -> None:
    pytest.importorskip("numba", reason="channels are computed by the extra 'kernels'")
    for weights, precision in (("f32", Channels("70 %")), ("bf16", Channels("70 %", group=8))):
        with pytest.raises(InputError, match="bf16 experts without biases, one scale per row"):
            kernel_of(precision, geometry, weights)


def test_without_numba_the_error_says_what_to_install(
    geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in ("machines.kernels.channels", "machines.kernels.channel_code",
                 "numerics.channels.compiled", "numerics.channels.kernel_code"):  # fmt: skip
        monkeypatch.delitem(sys.modules, f"moetier.validate.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(InputError, match="needs numba"):
        kernel_of(Channels("70 %"), geometry, "bf16")


def test_packing_needs_a_kernel(
    tmp_path: Path, source: Any, setting: Callable[..., Setting]
) -> None:
    policy = {"eviction": "lru", "precision": {"kind": "uniform", "bits": 12}}
    with pytest.raises(InputError, match="codes of 12 bits have no kernel"):
        pack_synthetic(tmp_path / "x.slices", source, setting(policy))

    assert list(tmp_path.iterdir()) == []
