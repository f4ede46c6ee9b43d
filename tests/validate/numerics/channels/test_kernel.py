"""Check the compiled kernel against the reference in torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba", reason="the kernel needs the extra 'kernels'")

import numpy as np

from moetier.traces.errors import InputError
from moetier.validate.numerics.channels import kernel_code
from moetier.validate.numerics.channels.experts import ChannelExperts
from moetier.validate.numerics.channels.gating import KINDS, Gating
from moetier.validate.numerics.channels.keep import Threshold, TokenTopK, TopK
from moetier.validate.numerics.channels.kernel import ChannelKernel
from moetier.validate.numerics.channels.rotation import rotation
from moetier.validate.numerics.channels.sketch import ChannelSettings
from moetier.validate.numerics.channels.ternary import pack, unpack

Make = Callable[..., Any]
Draw = Callable[..., tuple[Tensor, Tensor, Tensor]]
GATINGS = [Gating(kind, 1.702, 1.0 if kind == "swish-plus-one" else None) for kind in KINDS]
KEEPS: list[TopK | Threshold] = [TopK(0), TopK(6), TopK(999), Threshold(0.3)]


@pytest.mark.slow
@pytest.mark.parametrize("union", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gating", GATINGS, ids=lambda gating: gating.kind)
@pytest.mark.parametrize("sizes", [(6, 24, 40), (5, 33, 45), (4, 64, 128)])
def test_kernel_and_reference_agree(
    make: Make,
    draw: Draw,
    sizes: tuple[int, int, int],
    gating: Gating,
    dtype: torch.dtype,
    union: bool,
) -> None:
    for biases in (False, True):
        m = make(*sizes, gating=gating, biases=biases, dtype=dtype)
        c = ChannelExperts.build(m, ChannelSettings(rank=5))
        kernel = ChannelKernel.of(c, gating)
        batch = draw(9, sizes[0], sizes[2])
        for keep in KEEPS:
            a = c.forward(*batch, keep, union=union)
            b = kernel.forward(*batch, keep, union=union)
            # a score beside the border may fall on its other side in another rounding
            alike = (a.kept == b.kept).all(-1).all(-1)
            error = (a.out - b.out)[alike].norm() / a.out[alike].norm().clamp(min=1e-9)

            assert float(alike.float().mean()) > 0.8
            assert float(error) < (0.02 if dtype == torch.bfloat16 else 1e-3)


def test_one_batch_agrees(make: Make, draw: Draw) -> None:
    m, batch = make(biases=True), draw()
    c = ChannelExperts.build(m, ChannelSettings(rank=4))
    expected = c.forward(*batch, TopK(6))
    out, kept = ChannelKernel.of(c, Gating()).forward(*batch, TopK(6))

    assert kept.equal(expected.kept)
    torch.testing.assert_close(out, expected.out, atol=1e-3, rtol=1e-3)


def test_the_dense_block_is_all_channels(
    make: Make, draw: Draw, dense: Callable[..., Tensor]
) -> None:
    m, batch = make(), draw()
    kernel = ChannelKernel.of(ChannelExperts.build(m, ChannelSettings()), Gating())

    torch.testing.assert_close(kernel.dense(*batch), dense(m, *batch), atol=1e-4, rtol=1e-4)


@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_digit_sums_are_products_with_trits(data: st.DataObject) -> None:
    hidden = data.draw(st.integers(1, 200))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    trits = torch.from_numpy(rng.integers(-1, 2, (3, hidden)).astype(np.int8))
    packed = pack(trits)
    x = rng.standard_normal(hidden).astype(np.float32)
    inputs = np.full((5, packed.shape[1]), 77, np.int16)
    step, total = kernel_code.integers(x, inputs)
    sums = np.empty(3, np.int32)
    kernel_code.digit_sums(packed.numpy(), inputs, sums)
    whole = inputs.reshape(-1)[:hidden].astype(np.int64)

    assert (sums - total).tolist() == (unpack(packed, hidden).numpy().astype(int) @ whole).tolist()
    assert float(np.abs(whole * step - x).max()) <= 0.51 * step


@given(
    values=st.lists(st.floats(0, 4, width=32).map(lambda v: round(v, 1)), min_size=1, max_size=40),
    k=st.integers(0, 45),
)
@example(values=[1.0, 0.5, 1.0, 1.0], k=2)
@example(values=[0.0, 0.0, 0.0], k=1)
@settings(deadline=None)
def test_marking_is_top_k(values: list[float], k: int) -> None:
    scores = np.array(values, np.float32)
    out = np.ones(len(values), np.bool_)
    kernel_code.mark(scores, k, 0.0, out)

    assert out.tolist() == TopK(k)(torch.from_numpy(scores)).tolist()


@pytest.mark.parametrize("hidden", [1, 12, 64])
def test_the_compiled_rotation_is_the_rotation(hidden: int) -> None:
    turn = rotation(hidden, 5)
    x = torch.randn(hidden)
    out = np.empty(hidden, np.float32)
    kernel_code.rotate(x.numpy(), turn.signs.numpy(), turn.block, out)

    torch.testing.assert_close(torch.from_numpy(out), turn.apply(x))


@pytest.mark.parametrize(
    ("change", "settings_", "message"),
    [
        ({"post_norm": torch.nn.RMSNorm(40)}, ChannelSettings(), "no norm after experts"),
        ({}, ChannelSettings(group=8), "one scale per row, not 5"),
    ],
)
def test_what_the_kernel_lacks_is_refused(
    make: Make, change: dict[str, Any], settings_: ChannelSettings, message: str
) -> None:
    c = ChannelExperts.build(replace(make(), **change), settings_)

    with pytest.raises(InputError, match=message):
        ChannelKernel.of(c, Gating())


def test_other_types_and_dense_biases_are_refused(make: Make, draw: Draw) -> None:
    half = ChannelExperts.build(make(dtype=torch.float16), ChannelSettings())
    biased = ChannelExperts.build(make(biases=True), ChannelSettings())

    with pytest.raises(InputError, match=r"no weights of torch\.float16"):
        ChannelKernel.of(half, Gating())
    with pytest.raises(InputError, match="cannot keep by TokenTopK"):
        ChannelKernel.of(biased, Gating()).forward(*draw(), TokenTopK(2))
    with pytest.raises(InputError, match="no biases"):
        ChannelKernel.of(biased, Gating()).dense(*draw())


def test_without_numba_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from moetier.validate.channel_bench import main\n"
        "sys.exit(main(['--experts', '8', '--batch', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert "needs numba" in done.stderr
    assert "pip install 'moetier[kernels]'" in done.stderr
