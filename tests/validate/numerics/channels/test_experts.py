"""Check the reader's experts against plain arithmetic, and inside models against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from moetier.traces.capture.find import find_moe_layers
from moetier.traces.capture.rebuild import rebuild
from moetier.traces.errors import InputError
from moetier.validate.numerics.channels import experts as module
from moetier.validate.numerics.channels.experts import ChannelExperts
from moetier.validate.numerics.channels.gating import Gating
from moetier.validate.numerics.channels.keep import Threshold, TokenTopK, TopK
from moetier.validate.numerics.channels.sketch import ChannelSettings
from moetier.validate.numerics.channels.ternary import unpack
from moetier.validate.numerics.experts import ExpertMatrices

Make = Callable[..., ExpertMatrices]
Draw = Callable[..., tuple[Tensor, Tensor, Tensor]]
Dense = Callable[..., Tensor]

CLAMPED = Gating("swish-plus-one", 1.702, 2.0)
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("gating", [Gating(), Gating("gelu"), Gating("gelu-tanh"), CLAMPED])
def test_all_channels_are_the_dense_experts(
    make: Make, draw: Draw, dense: Dense, gating: Gating, biases: bool
) -> None:
    m = make(gating=gating, biases=biases)
    batch = draw()
    out, kept = ChannelExperts.build(m, ChannelSettings()).forward(*batch, TopK(24))

    assert bool(kept.all())
    torch.testing.assert_close(out, dense(m, *batch), atol=1e-5, rtol=1e-5)


def test_without_recovery_the_kept_channels_are_all_there_is(
    make: Make, draw: Draw, dense: Dense
) -> None:
    m = make(biases=True)
    batch = draw()
    out, kept = ChannelExperts.build(m, ChannelSettings()).forward(*batch, TopK(5))

    assert kept.sum(-1).tolist() == [[5] * 3] * 9
    torch.testing.assert_close(out, dense(m, *batch, kept), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("group", [None, 16])
def test_screening_is_the_arithmetic_of_the_unpacked_trits(
    make: Make, draw: Draw, group: int | None
) -> None:
    m = make(biases=True, gating=CLAMPED)
    c = ChannelExperts.build(m, ChannelSettings(group=group))
    x, ids, weights = draw()
    scores = c.scores(x, ids, weights)
    assert m.gate_bias is not None
    assert m.up_bias is not None
    for t, slot in ((0, 0), (3, 2), (8, 1)):
        e = int(ids[t, slot])
        turned = c.rotation.apply(x[t])
        both = []
        for packed, scales in (
            (c.sketch.gate[e], c.sketch.gate_scales[e]),
            (c.sketch.up[e], c.sketch.up_scales[e]),
        ):
            terms = unpack(packed, 40, group).float() * turned
            sums = torch.stack([part.sum(-1) for part in torch.split(terms, group or 40, -1)], -1)
            both.append((scales.float() * sums).sum(-1))
        act = CLAMPED(both[0] + m.gate_bias[e], both[1] + m.up_bias[e])
        expected = weights[t, slot] * act.abs() * m.down[e].norm(dim=0)

        torch.testing.assert_close(scores[t, slot], expected, atol=1e-4, rtol=5e-3)


def test_full_rank_recovery_applies_the_down_projection_to_the_estimates(
    make: Make, draw: Draw, dense: Dense
) -> None:
    m = make()
    batch = draw()
    c = ChannelExperts.build(m, ChannelSettings(rank=24))
    rotated = torch.eye(40)
    sketched = c.sketch.estimator(torch.arange(6), 40, None)
    gate, up = (sketched @ c.rotation.apply(rotated).T).chunk(2, 1)
    estimated = dense(replace(m, gate=gate, up=up), *batch)
    out, kept = c.forward(*batch, TopK(0))

    assert not kept.any()
    torch.testing.assert_close(out, estimated, atol=0.03, rtol=0.03)  # the maps have 8 bits


def test_more_channels_and_higher_rank_come_closer(make: Make, draw: Draw, dense: Dense) -> None:
    m = make(4, 96, 64)
    batch = draw(40, 4, 64)
    exact = dense(m, *batch)

    def error(rank: int, k: int) -> float:
        c = ChannelExperts.build(m, ChannelSettings(rank=rank))
        return float((c.forward(*batch, TopK(k)).out - exact).norm() / exact.norm())

    by_k = [error(0, k) for k in (0, 8, 24, 48, 96)]

    assert by_k == sorted(by_k, reverse=True)
    assert error(24, 8) < error(8, 8) < error(0, 8)


def test_the_sketch_finds_channels_that_matter(make: Make, draw: Draw, dense: Dense) -> None:
    m = make(4, 96, 64)
    batch = draw(40, 4, 64)
    exact = dense(m, *batch)
    c = ChannelExperts.build(m, ChannelSettings())
    chosen = c.forward(*batch, TopK(24))
    blind = dense(m, *batch, (torch.arange(96) < 24).expand_as(chosen.kept))

    assert float((chosen.out - exact).norm()) < 0.7 * float((blind - exact).norm())


def test_a_union_computes_for_all_what_one_keeps(make: Make, draw: Draw, dense: Dense) -> None:
    m = make()
    x, ids, weights = draw()
    c = ChannelExperts.build(m, ChannelSettings())
    alone = c.forward(x, ids, weights, TopK(4)).kept
    out, kept = c.forward(x, ids, weights, TopK(4), union=True)
    for e in range(6):
        mine = ids == e

        assert kept[mine].equal(alone[mine].any(0).expand_as(kept[mine]))
    torch.testing.assert_close(out, dense(m, x, ids, weights, kept), atol=1e-5, rtol=1e-5)


def test_a_threshold_keeps_by_score(make: Make, draw: Draw) -> None:
    c = ChannelExperts.build(make(), ChannelSettings())
    x, ids, weights = draw()
    kept = c.forward(x, ids, weights, Threshold(0.1)).kept

    assert kept.equal(c.scores(x, ids, weights) >= 0.1)
    assert len(set(kept.sum(-1).flatten().tolist())) > 1


def test_channels_may_be_chosen_over_a_token_s_experts_together(
    make: Make, draw: Draw, dense: Dense
) -> None:
    m = make()
    x, ids, _ = draw()
    weights = torch.tensor([[0.9, 0.09, 0.01]]).expand(9, 3)
    c = ChannelExperts.build(m, ChannelSettings())
    exact = dense(m, x, ids, weights)
    out, kept = c.forward(x, ids, weights, TokenTopK(6))
    apart = c.forward(x, ids, weights, TopK(6)).out

    assert kept.sum((1, 2)).tolist() == [18] * 9
    assert bool((kept[:, 0].sum(-1) > kept[:, 2].sum(-1)).all())
    assert float((out - exact).norm()) < float((apart - exact).norm())


def test_chunks_and_a_sketch_unpacked_on_the_way_change_nothing(
    make: Make, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = make(biases=True)
    batch = draw()
    settings = ChannelSettings(rank=3)
    whole = ChannelExperts.build(m, settings)
    monkeypatch.setattr(module, "RESIDENT", 0)
    monkeypatch.setattr(module, "CHUNK", 2 * 3 * 4 * 24 * 40)  # two experts
    parts = ChannelExperts.build(m, settings)

    assert whole.estimator is not None
    assert parts.estimator is None
    for one, two in zip(
        whole.forward(*batch, TopK(6)), parts.forward(*batch, TopK(6)), strict=True
    ):
        torch.testing.assert_close(one, two)


def test_the_cost_is_that_of_the_stored_type(make: Make) -> None:
    c = ChannelExperts.build(make(biases=True), ChannelSettings(rank=2))

    assert c.cost().full_bytes == 3 * 24 * 40 * 4
    assert c.cost(2).full_bytes == 3 * 24 * 40 * 2
    assert c.cost().sketch_bytes == 2 * 24 * 8 + 96 + 64 + 96 + 96  # whole sectors of each part


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("GptOssConfig", {"num_local_experts": 8, "intermediate_size": 16}),
        ("Qwen3MoeConfig", {"num_experts": 8, "moe_intermediate_size": 16}),
    ],
)
def test_a_model_s_experts(config: str, sizes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    built = getattr(transformers, config)(**SMALL, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(built).eval()
    for value in model.parameters():
        value.data.normal_(std=0.3)
    where = find_moe_layers(model)[0]
    x, ids = torch.randn(7, 32), torch.rand(7, 8).argsort(-1)[:, :2]
    weights = torch.rand(7, 2)
    out, _ = ChannelExperts.build(where, ChannelSettings(rank=4)).forward(x, ids, weights, TopK(16))

    torch.testing.assert_close(
        out, rebuild(where.experts, x, ids, weights).detach(), atol=1e-5, rtol=1e-5
    )


def test_a_norm_after_the_experts_is_applied(make: Make, draw: Draw) -> None:
    norm = torch.nn.RMSNorm(40)
    m = make()
    x, ids, _ = draw()
    first = torch.zeros(9, 3)
    first[:, 0] = 1  # one expert at a time
    plain = ChannelExperts.build(m, ChannelSettings()).forward(x, ids, first, TopK(9)).out
    normed = ChannelExperts.build(replace(m, post_norm=norm), ChannelSettings())

    torch.testing.assert_close(normed.forward(x, ids, first, TopK(9)).out, norm(plain))


def test_bfloat16_experts_compute_in_their_type(make: Make, draw: Draw) -> None:
    m = make(dtype=torch.bfloat16)
    x, ids, weights = draw()
    out = (
        ChannelExperts.build(m, ChannelSettings()).forward(x.bfloat16(), ids, weights, TopK(8)).out
    )

    assert out.dtype == torch.bfloat16


def test_no_token_makes_nothing(make: Make) -> None:
    c = ChannelExperts.build(make(), ChannelSettings())
    ids = torch.empty(0, 3, dtype=torch.int64)
    out, kept = c.forward(torch.empty(0, 40), ids, torch.empty(0, 3), TopK(8))

    assert (out.shape, kept.shape) == ((0, 40), (0, 3, 24))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ChannelSettings(rank=25), "rank 25 does not fit 24 channels"),
        (ChannelSettings(rank=-1), "rank -1"),
        (ChannelSettings(group=0), "group of 0"),
    ],
)
def test_settings_must_fit(make: Make, settings: ChannelSettings, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ChannelExperts.build(make(), settings)


def test_experts_without_a_gate_are_refused(make: Make) -> None:
    with pytest.raises(InputError, match="no gate"):
        ChannelExperts.build(replace(make(), gate=None), ChannelSettings())


@pytest.mark.parametrize("name", ["gate", "up", "down", "up_bias"])
def test_nan_weights_name_the_expert(make: Make, name: str) -> None:
    m = make(biases=True)
    getattr(m, name)[2].view(-1)[0] = float("nan")

    with pytest.raises(InputError, match=r"expert 2: a weight is NaN"):
        ChannelExperts.build(m, ChannelSettings(rank=2))
