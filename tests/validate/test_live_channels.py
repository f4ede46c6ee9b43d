"""Experts read by channels inside a running model: exactly what was said to be kept."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="a live model needs the extra 'models'")
transformers = pytest.importorskip("transformers", reason="a live model needs the extra 'models'")

from moetier.sim.hardware import load_profile  # noqa: E402  # needs torch
from moetier.sim.policy.precision.channels import Channels  # noqa: E402
from moetier.sim.run import Setting  # noqa: E402
from moetier.traces.batch import DECODE, LayerBatch  # noqa: E402
from moetier.traces.capture.find import find_moe_layers  # noqa: E402
from moetier.traces.capture.hook import ExpertsCall  # noqa: E402
from moetier.traces.capture.load import load_model  # noqa: E402
from moetier.traces.channels import channel_cost  # noqa: E402
from moetier.traces.errors import InputError  # noqa: E402
from moetier.traces.samples import moe_tiny_path  # noqa: E402
from moetier.traces.samples.tasks import split_of  # noqa: E402
from moetier.validate import live_channels as module  # noqa: E402
from moetier.validate.evaluate import Evaluation, Loaded, evaluate  # noqa: E402
from moetier.validate.evaluate_arms import Extras  # noqa: E402
from moetier.validate.evaluate_questions import tiny_calibration, tiny_questions  # noqa: E402
from moetier.validate.live_channels import (  # noqa: E402
    ChannelReader,
    reading_channels,
    settings_of,
    sketched,
)
from moetier.validate.numerics.channels.keep import Keep, TopK  # noqa: E402
from moetier.validate.numerics.channels.reads import Reads, batch_reads  # noqa: E402

PHONE = load_profile("phone-ufs4")
PLAIN = {"kind": "channels", "recovery": "none"}
NONE = Extras(long_prompts=0)


class Numbers:
    """A tokenizer of texts that are numbers."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Return the ids in *text*."""
        return {"input_ids": [int(word) for word in text.split()]}


def small(family: str, **sizes: Any) -> Any:
    kind = f"{family}TextConfig" if family == "Gemma4" else f"{family}Config"
    config = getattr(transformers, kind)(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        **sizes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        for name, value in model.named_parameters():
            if ".experts." in name and value.dim() > 1:
                value.data.normal_(std=0.3)
    return model.eval()


FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma4": {
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "intermediate_size": 24,
        "enable_moe_block": True,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 16},
}


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return Loaded(*load_model(str(moe_tiny_path())))


def setting(precision: Any, share: Fraction = Fraction(1, 4), **policy: Any) -> Setting:
    return Setting(PHONE, {"precision": precision} | policy, {"dram": share})


def run(tiny: Loaded, precision: Any, n: int = 4, extras: Extras = NONE, **more: Any) -> Evaluation:
    policy = more.pop("policy", {})
    return evaluate(tiny, setting(precision, **policy), tiny_questions(n), extras, **more)


def bits(model: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_bits(model: Any, before: dict[str, Any]) -> bool:
    pairs = [(value, before[name]) for name, value in model.state_dict().items()]
    return all(torch.equal(value, old) for value, old in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("unit", [{}, {"unit": "block", "blocks": 8}], ids=str)
def test_all_channels_answer_as_the_model_does(tiny: Loaded, unit: dict[str, Any]) -> None:
    before = bits(tiny.model)
    found = run(tiny, PLAIN | {"reads": "110 %"} | unit, 6)
    plain = run(tiny, "full", 6)

    assert [output.tokens for output in found.outputs] == [o.tokens for o in plain.outputs]
    assert found.metrics["nll"] == pytest.approx(plain.metrics["nll"], rel=1e-3, abs=1e-6)
    assert found.metrics["weight_read_share"] == pytest.approx(1.0755, abs=1e-4)
    assert found.metrics["miss_rate"] == pytest.approx(plain.metrics["miss_rate"], abs=0.01)
    assert same_bits(tiny.model, before)
    assert all("forward" not in where.experts.__dict__ for where in find_moe_layers(tiny.model))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("rule", ["top-k", "token-top-k"])
def test_reads_in_the_records_are_those_counted_in_the_layers(
    tiny: Loaded, rule: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[LayerBatch, Any]] = []
    screen = ChannelReader.screen

    def noting(reader: ChannelReader, call: Any, valid: Any, batch: LayerBatch) -> Any:
        mask = screen(reader, call, valid, batch)
        seen.append((batch, mask))
        return mask

    monkeypatch.setattr(ChannelReader, "screen", noting)
    precision = PLAIN | {"reads": "30 %", "rule": rule}
    found = run(tiny, precision, 4, Extras(batch_size=size, long_prompts=0))
    end = found.metrics["decode_steps"] + sum(batch.phase != DECODE for batch, _ in seen) // 8
    cost = channel_cost(found.header.geometry)
    total = Reads()
    for batch, mask in seen:
        kept = torch.from_numpy(mask).view(batch.n_tokens, -1, mask.shape[1])
        ids = torch.tensor(batch.experts).view(batch.n_tokens, -1)
        if batch.phase == DECODE and batch.step < end:
            total += batch_reads(cost, ids, kept)
        if rule == "top-k":
            assert set(kept.sum(2).flatten().tolist()) == {28}
        else:
            assert set(kept.sum((1, 2)).tolist()) == {4 * 28}

    assert found.metrics["weight_read_share"] == total.share
    if size == 1:
        assert total.share == float(cost.share(28))
        assert cost.share(28) <= 0.3
    else:
        assert total.share is not None
        assert total.share > cost.share(28)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_compute_what_was_kept_and_come_back(family: str) -> None:
    """Half of the channels, on the rows that were asked about; the others keep none."""
    model = small(family, **FAMILIES[family])
    layers, before = find_moe_layers(model), bits(model)
    part = precision_of(model, {"reads": "60 %", "recovery": "none"})
    with reading_channels(model, layers, part) as readers:
        assert readers is not None
        reader, where = readers.readers[1], layers[1]
        hidden, ids = torch.randn(5, 32), torch.rand(5, 8).argsort(-1)[:, :2]
        weights = torch.rand(5, 2)
        call = ExpertsCall(0, where, hidden, ids, weights, None, None)
        valid = torch.tensor([0, 2, 3])
        chosen = torch.tensor([[7, 1], [0, 5], [6, 2]])  # not what the router wanted
        share = torch.rand(3, 2)
        batch = LayerBatch(0, DECODE, 1, 3, 3, chosen.flatten().tolist(), share.flatten().numpy())
        mask = torch.from_numpy(readers.screen(call, valid, batch)).view(3, 2, 16)
        ids[valid], weights[valid] = chosen.flip(1), share.flip(1)
        with torch.no_grad():
            out = where.experts(hidden, ids, weights)
        expected = reader.channels.forward(hidden[valid], chosen, share, lambda scores: mask).out

    assert mask.sum(2).tolist() == [[part.kept[1]] * 2] * 3
    assert 0 < part.kept[1] < 16
    torch.testing.assert_close(out[valid], expected)
    torch.testing.assert_close(
        expected,
        reader.channels.forward(hidden[valid], chosen, share, TopK(part.kept[1])).out,
    )
    assert same_bits(model, before)
    assert all("forward" not in where.experts.__dict__ for where in layers)


def precision_of(model: Any, arguments: dict[str, Any]) -> Any:
    """Return the precision as a run sets it up."""
    from moetier.traces.capture.header import build_header
    from moetier.traces.capture.probe import probe

    header = build_header(model, Numbers(), ["3 4"], probe(model), 0)
    part = Channels(**arguments)
    size = 2 * header.geometry.expert_weights
    part.layout([size] * header.geometry.n_moe_layers, header.geometry)
    return part


def test_the_experts_come_back_after_an_error() -> None:
    model = small("Qwen3Moe", **FAMILIES["Qwen3Moe"])
    layers = find_moe_layers(model)
    part = precision_of(model, {"reads": "60 %", "recovery": "none"})

    def fail() -> None:
        with reading_channels(model, layers, part):
            assert all("forward" in where.experts.__dict__ for where in layers)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()

    assert all("forward" not in where.experts.__dict__ for where in layers)


def test_a_batch_of_unequal_tokens_is_refused() -> None:
    model = small("Qwen3Moe", **FAMILIES["Qwen3Moe"])
    part = precision_of(model, {"reads": "60 %", "recovery": "none"})
    with reading_channels(model, find_moe_layers(model), part) as readers:
        assert readers is not None
        batch = LayerBatch(0, DECODE, 0, 2, 2, [1, 2, 3], None, [0, 0, 1])
        call: Any = None
        with pytest.raises(InputError, match="unequally many experts, or no weights"):
            readers.readers[0].screen(call, torch.tensor([0, 1]), batch)


def test_sketches_are_made_once_per_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("Qwen3Moe", **FAMILIES["Qwen3Moe"])
    layers, settings = find_moe_layers(model), settings_of(Channels(rank=2))
    told: list[tuple[int, int]] = []
    first = sketched(model, layers, settings, tmp_path / "new", lambda *done: told.append(done))
    monkeypatch.setattr(module, "store_sketches", None)  # calling it would be an error
    second = sketched(model, layers, settings, tmp_path / "new")
    third = sketched(model, layers, settings, None, lambda *done: told.append(done))

    assert told == [(1, 2), (2, 2)] * 2
    assert len(list((tmp_path / "new").iterdir())) == 1
    for made in (second, third):
        assert torch.equal(made[1].sketch.gate, first[1].sketch.gate)
        assert torch.equal(made[1].sketch.left, first[1].sketch.left)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file/x: sketches cannot be kept here: Not a directory"):
        sketched(model, layers, settings, tmp_path / "file" / "x")
    with pytest.raises(TypeError):  # other settings are another file
        sketched(model, layers, settings_of(Channels(rank=3)), tmp_path / "new")


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_a_damaged_sketch_is_made_again(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    model = small("Qwen3Moe", **FAMILIES["Qwen3Moe"])
    layers, settings = find_moe_layers(model), settings_of(Channels(rank=2))
    sketched(model, layers, settings, tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    told: list[tuple[int, int]] = []
    sketched(model, layers, settings, tmp_path, lambda *done: told.append(done))

    assert told == [(1, 2), (2, 2)]
    assert file.read_bytes() == whole


def test_a_threshold_needs_texts_of_its_own() -> None:
    asked = tiny_questions(44)
    texts = tiny_calibration(asked, 3, seed=1)

    assert len(texts) == len(set(texts)) == 33
    assert not set(texts) & {question.prompt for question in asked}
    known = {question.task for question in asked}
    assert {text.split(" ")[0] for text in texts} <= known
    assert sum(split_of(text) == "train" for text in texts) >= 25  # the tables are in both splits
    model = small("Qwen3Moe", **FAMILIES["Qwen3Moe"])
    part = Channels(rule="threshold")
    with (
        pytest.raises(InputError, match=r"policy\.precision\.rule: a threshold is calibrated on"),
        reading_channels(model, find_moe_layers(model), part),
    ):
        pass


def test_a_threshold_keeps_k_on_average_of_its_texts() -> None:
    model = small("Qwen3Moe", **FAMILIES["Qwen3Moe"])
    layers = find_moe_layers(model)
    texts = [[3 + (7 * i + 5 * j) % 60 for j in range(9)] for i in range(4)]
    arguments = {"reads": "60 %", "recovery": "none", "rule": "threshold"}
    part = precision_of(model, arguments)
    channels = sketched(model, layers, settings_of(part))
    keeps: list[Keep] = module._keeps(model, channels, part, texts)
    scores = module._scores(model, channels, texts)
    for k, keep, parts in zip(part.kept, keeps, scores, strict=True):
        kept = torch.cat([keep(score).flatten(0, 1) for score in parts]).sum(1)

        assert [tuple(score.shape) for score in parts] == [(9, 2, 16)] * 4
        assert kept.double().mean().item() == pytest.approx(k, abs=0.02)
        assert len(set(kept.tolist())) > 1  # more for one token than for another


@pytest.mark.slow
def test_a_calibrated_threshold_reads_about_what_it_was_set_to(tiny: Loaded) -> None:
    asked = tiny_questions(11)
    precision = PLAIN | {"reads": "30 %", "rule": "threshold"}
    found = run(tiny, precision, 11, calibration=tiny_calibration(asked, 4))

    assert found.metrics["weight_read_share"] == pytest.approx(0.3, abs=0.06)
    assert found.metrics["lossless"] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "predictor"),
    [
        ({"routing": "speculative"}, "router-reuse"),
        ({"prefetch": "predicted"}, "router-reuse"),
        ({"prefetch": "previous-token"}, None),
        ({"routing": "cache-prior"}, None),
        ({"miss": {"kind": "skip", "keep": 1}}, None),
    ],
    ids=str,
)
def test_it_composes_with_the_other_seams(
    tiny: Loaded, policy: dict[str, Any], predictor: str | None
) -> None:
    precision = PLAIN | {"reads": "50 %", "unit": "block", "blocks": 16}
    found = run(
        tiny, precision, 3, Extras(batch_size=3, long_prompts=0), policy=policy, predictor=predictor
    )

    assert found.metrics["accuracy"] is not None
    assert 0.2 < found.metrics["weight_read_share"] < 1
    assert not any("channels matter" in text for text in found.known_limitations)
    if "prefetch" in policy:
        assert found.metrics["prefetch_issued"] > 0


@pytest.mark.slow
def test_fewer_reads_cost_likelihood_and_only_then_answers(tiny: Loaded) -> None:
    runs = [run(tiny, PLAIN | {"reads": f"{reads} %"}, 11).metrics for reads in (13, 25, 60)]
    lost = [metrics["nll_difference"]["mean"] for metrics in runs]

    assert lost == sorted(lost, reverse=True)
    assert lost[0] > 0.1
    assert abs(lost[2]) < 0.01
    assert runs[2]["accuracy"] == 1
