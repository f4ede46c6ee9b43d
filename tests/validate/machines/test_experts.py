"""Experts are computed from their bytes, and added up in one order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.validate.machines.direct import page_memory
from moetier.validate.machines.experts import (
    Experts,
    Levels,
    RandomHidden,
    Which,
    WholeKernel,
    as_tensor,
)
from moetier.validate.machines.random_weights import Bytes, random_weights
from moetier.validate.machines.slots import Slot

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def slot_of(data: bytes) -> Slot:
    memory = page_memory(len(data))
    memory[: len(data)] = data
    return Slot(memory, len(data))


@pytest.mark.parametrize("matrices", [2, 3])
@pytest.mark.parametrize("weights", ["bf16", "f32"])
def test_a_whole_expert_is_the_formula(weights: str, matrices: int, geometry: Geometry) -> None:
    geometry = geometry.model_copy(update={"expert_matrices": matrices})
    kernel = WholeKernel(geometry, weights)
    data = torch.from_numpy(random_weights(kernel.nbytes, weights, 64, 1))
    x = torch.randn(3, 64, dtype=DTYPES[weights])
    flat, size = data.view(DTYPES[weights]), 32 * 64
    *gates, down = flat[: (matrices - 1) * size].view(-1, 32, 64), flat[-size:].view(64, 32)
    up = gates[0]
    inner = F.silu(x @ up[0].T) * (x @ up[1].T) if matrices == 3 else F.silu(x @ up[0].T)

    torch.testing.assert_close(kernel.run([data], x), inner @ down.T, rtol=2e-2, atol=2e-2)


def test_a_format_without_a_type_is_refused(geometry: Geometry) -> None:
    with pytest.raises(InputError, match="experts stored as q4_0 need a kernel of their own"):
        WholeKernel(geometry, "q4_0")


@pytest.mark.parametrize("nbytes", [0, 12_287, 12_289])
def test_a_slice_of_another_size_is_refused(nbytes: int, geometry: Geometry) -> None:
    kernel = WholeKernel(geometry, "bf16")
    buffer = torch.zeros(nbytes, dtype=torch.uint8) if nbytes else None
    with pytest.raises(InputError, match="its matrices 12 KiB"):
        kernel.run([buffer], torch.zeros(1, 64, dtype=torch.bfloat16))


def test_a_slot_is_seen_without_copying() -> None:
    slot = slot_of(b"abc")
    seen = as_tensor(slot)
    slot.memory[:1] = b"z"

    assert seen is not None
    assert bytes(seen.numpy()) == b"zbc"
    assert as_tensor(None) is None


class Scale:
    """A kernel whose experts multiply by the number in their slice, and note what they were."""

    name = "scale"
    dtype = torch.float32
    levels: Levels = ((0,),)

    def run(
        self, buffers: Sequence[torch.Tensor | None], x: torch.Tensor, which: Which | None = None
    ) -> torch.Tensor:
        """Multiply."""
        (buffer,) = buffers
        assert buffer is not None
        return x * float(buffer[0])

    def made_up(self, part: int, *seed: int) -> Bytes:
        """Make nothing."""
        raise NotImplementedError


def batch(weights: list[float] | None) -> LayerBatch:
    given = None if weights is None else np.array(weights, np.float32)
    return LayerBatch(0, DECODE, 0, 2, 2, [4, 1, 4, 2], given)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [(None, [[2.5, 2.5], [30.0, 30.0]]), ([0.75, 0.25, 1.0, 0.5], [[3.25, 3.25], [50.0, 50.0]])],
)
def test_outputs_are_weighed_and_added_up(
    weights: list[float] | None, expected: list[list[float]]
) -> None:
    experts = Experts(Scale())
    x = torch.tensor([[1.0, 1.0], [10.0, 10.0]])
    routed = experts.routed(batch(weights), [1, 2, 4])
    outputs = {e: experts.run([slot_of(bytes([e]))], routed[e], x) for e in (4, 2, 1)}

    assert experts.add_up(outputs, routed, x).tolist() == expected


def test_only_what_is_computed_is_routed() -> None:
    routed = Experts(Scale()).routed(batch(None), [4])

    assert list(routed) == [4]
    assert routed[4].tokens.tolist() == [0, 1]


def test_the_sum_does_not_depend_on_who_came_first() -> None:
    experts = Experts(Scale())
    x = torch.zeros(1, 1)
    one = LayerBatch(0, DECODE, 0, 1, 1, [0, 1, 2])
    routed = experts.routed(one, [0, 1, 2])
    parts = {0: 1e8, 1: 1.0, 2: -1e8}  # in float32 the order decides whether the 1 survives
    found = [
        experts.add_up({e: torch.full((1, 1), parts[e]) for e in order}, routed, x).item()
        for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0])
    ]

    assert found == [0.0] * 3


def test_hidden_states_are_random_and_the_same_every_time() -> None:
    made = [RandomHidden(256, torch.float32, seed)(batch(None)) for seed in (1, 1, 2)]

    assert made[0].shape == (2, 256)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert 0.8 < made[0].std() < 1.2
