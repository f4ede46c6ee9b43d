"""A capture is a trace: its rows, its header, and the model it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.columns import Columns, concat
from moetier.traces.errors import InputError
from moetier.traces.io import TraceReader

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from moetier.traces.capture.hook import ExpertsCall, attach  # noqa: E402  # needs torch
from moetier.traces.capture.run import capture  # noqa: E402

Build = Callable[..., Any]
PROMPTS = ["one two three four five", "six seven", "eight nine ten"]


def rows_of(path: Path) -> Columns:
    reader = TraceReader(path, with_scores=True)
    reader.validate()
    return concat(list(reader.columns()))


def tokens_of(model: Any, tokenizer: Any, prompt: str, n: int) -> list[int]:
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False
    )
    result: list[int] = made[0].tolist()
    return result


def test_prefill_and_decode_of_one_request(tmp_path: Path, build: Build, tokenizer: Any) -> None:
    model = build("Qwen3Moe")
    out = capture(model, tokenizer, PROMPTS[:1], tmp_path / "t.parquet", max_new_tokens=4)
    rows = rows_of(out)
    reader = TraceReader(out)

    assert len(rows) == 2 * (len(tokens_of(model, tokenizer, PROMPTS[0], 4)) - 1)
    assert rows.valid.all()
    assert [(b.step, b.phase, b.layer, b.n_tokens) for b in reader.batches()] == [
        (0, PREFILL, 0, 5),
        (0, PREFILL, 1, 5),
        *((step, DECODE, layer, 1) for step in (1, 2, 3) for layer in (0, 1)),
    ]
    assert rows.position.tolist() == [0, 1, 2, 3, 4] * 2 + [5, 5, 6, 6, 7, 7]


def test_every_family_is_captured(
    family: str, tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    model = build(family)
    out = capture(model, tokenizer, PROMPTS, tmp_path / "t.parquet", max_new_tokens=3, batch_size=2)
    reader = TraceReader(out, with_scores=True)
    rows = rows_of(out)

    layers = reader.header.geometry.n_moe_layers
    generated = [len(tokens_of(model, tokenizer, prompt, 3)) - 1 for prompt in PROMPTS]
    assert [int((rows.valid & (rows.request == r)).sum()) for r in range(3)] == [
        n * layers for n in generated
    ]
    assert reader.header.score_kind in ("logits", "probabilities", "sigmoid")
    assert reader.header.provenance.kind == "captured"


def test_ids_weights_and_scores_are_those_of_the_model(
    tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    model = build("Olmoe")
    rows = rows_of(capture(model, tokenizer, PROMPTS, tmp_path / "t.parquet", max_new_tokens=4))
    sequence = tokens_of(model, tokenizer, PROMPTS[0], 4)
    calls: list[ExpertsCall] = []
    with torch.no_grad(), attach(model, calls.append):
        model(input_ids=torch.tensor([sequence[:-1]]))  # all at once: the same up to rounding

    for call in calls:
        mine = rows.take((rows.request == 0) & (rows.moe_layer == call.moe_layer))
        assert mine.experts.tolist() == call.ids.tolist()
        assert mine.weights is not None
        assert mine.scores is not None
        assert call.scores is not None
        np.testing.assert_allclose(mine.weights, call.weights, rtol=1e-4)
        np.testing.assert_allclose(mine.scores, call.scores, rtol=1e-4, atol=1e-5)


def test_a_padded_batch_routes_like_single_requests(
    tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    model = build("Mixtral")
    single = rows_of(capture(model, tokenizer, PROMPTS, tmp_path / "1.parquet", max_new_tokens=4))
    batch = rows_of(
        capture(model, tokenizer, PROMPTS, tmp_path / "3.parquet", max_new_tokens=4, batch_size=3)
    )

    assert single.valid.all()
    assert int((~batch.valid).sum()) >= 2 * (3 + 2)  # 2 layers, prompts 3 and 2 words shorter
    assert batch.weights is not None
    assert np.isnan(batch.weights[~batch.valid]).all()
    for request in range(3):
        one = single.take(single.request == request)
        among = batch.take((batch.request == request) & batch.valid)
        assert one.experts.tolist() == among.experts.tolist()
        assert one.position.tolist() == among.position.tolist()
        assert one.phase.tolist() == among.phase.tolist()


def test_steps_count_over_the_whole_trace(tmp_path: Path, build: Build, tokenizer: Any) -> None:
    rows = rows_of(
        capture(build("Mixtral"), tokenizer, PROMPTS, tmp_path / "t.parquet", max_new_tokens=3)
    )

    prefills = rows.step[rows.phase == PREFILL]
    assert len(np.unique(prefills)) == 3
    assert np.unique(rows.step).tolist() == list(range(int(rows.step.max()) + 1))


def test_an_end_of_sequence_ends_a_request_but_not_its_batch(
    tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    model = build("Mixtral")
    kept = model.generation_config
    sequences = [tokens_of(model, tokenizer, prompt, 6) for prompt in PROMPTS[:2]]
    ends = sequences[1][-4]  # the third token that the second request generates
    first_cut = sequences[0][5:].index(ends) + 1 if ends in sequences[0][5:] else 6
    second_cut = sequences[1][2:].index(ends) + 1
    kept.eos_token_id = [ends]
    rows = rows_of(
        capture(
            model, tokenizer, PROMPTS[:2], tmp_path / "t.parquet", max_new_tokens=6, batch_size=2
        )
    )

    assert second_cut < 6
    assert model.generation_config is kept
    valid = [int((rows.valid & (rows.request == r)).sum()) for r in (0, 1)]
    assert valid == [2 * (5 + first_cut - 1), 2 * (2 + second_cut - 1)]


def test_sampling_advice_of_the_checkpoint_is_not_followed(
    tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    model = build("Mixtral")
    plain = rows_of(capture(model, tokenizer, PROMPTS, tmp_path / "a.parquet", max_new_tokens=4))
    model.generation_config.do_sample = True
    model.generation_config.temperature = 5.0
    model.generation_config.repetition_penalty = 9.0
    model.train()
    advised = rows_of(capture(model, tokenizer, PROMPTS, tmp_path / "b.parquet", max_new_tokens=4))

    assert advised.experts.tolist() == plain.experts.tolist()
    assert model.generation_config.temperature == 5.0
    assert model.training


def test_the_same_capture_gives_the_same_file_and_leaves_the_generator(
    tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    model = build("Gemma4")
    state = torch.random.get_rng_state()
    files = [
        capture(model, tokenizer, PROMPTS, tmp_path / name, max_new_tokens=3, seed=5).read_bytes()
        for name in ("a.parquet", "b.parquet")
    ]

    assert files[0] == files[1]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_header_of_a_model_with_shared_experts_and_dense_layers(
    tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    model = build("Qwen2Moe")
    prompts = ["xylophone quagmire", "zeppelin"]
    out = capture(model, tokenizer, prompts, tmp_path / "t.parquet", max_new_tokens=2, seed=3)
    header = TraceReader(out).header
    geometry, provenance = header.geometry, header.provenance

    assert geometry.moe_layers == [0, 2]
    assert (geometry.n_experts, geometry.top_k, geometry.n_layers) == (8, 3, 3)
    assert (geometry.hidden, geometry.moe_intermediate) == (32, 16)
    assert (geometry.shared_intermediate, geometry.dense_intermediate) == (20, 24)
    assert (geometry.heads, geometry.kv_heads, geometry.head_dim) == (4, 2, 8)
    assert geometry.norm_topk is False
    assert header.weights == "fp32"
    assert header.expert_bytes == {"fp32": [3 * 32 * 16 * 4] * 2}
    decoder = sum(p.numel() for p in model.model.layers[0].parameters()) * 4
    dense = sum(p.numel() for p in model.model.layers[1].parameters()) * 4
    assert header.dense_layer_bytes == [dense]
    assert header.dense_bytes == [decoder - 8 * 3 * 32 * 16 * 4] * 2
    assert provenance.model == "qwen2_moe"
    assert provenance.seed == 3
    assert provenance.dtype == "float32"
    assert provenance.tokenizer == "WordTokenizer"
    assert {"moetier", "torch", "transformers"} <= set(provenance.versions)
    text = header.model_dump_json()
    assert not any(word in text for word in ("xylophone", "quagmire", "zeppelin"))


def test_progress_is_told_after_each_batch(tmp_path: Path, build: Build, tokenizer: Any) -> None:
    told: list[tuple[int, int]] = []
    capture(
        build("Mixtral"),
        tokenizer,
        PROMPTS,
        tmp_path / "t.parquet",
        max_new_tokens=1,
        batch_size=2,
        progress=lambda done, total: told.append((done, total)),
    )

    assert told == [(2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_new_tokens": 0}, "0 new tokens"),
        ({"batch_size": 0}, "batches of 0"),
        ({"prompts": []}, "0 prompts"),
        ({"prompts": ["one", " "]}, "prompt 2 has no tokens"),
    ],
)
def test_unusable_arguments_are_refused_and_nothing_is_left(
    changes: dict[str, Any], problem: str, tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    arguments: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": 1, **changes}

    with pytest.raises(InputError, match=problem):
        capture(build("Mixtral"), tokenizer, out=tmp_path / "t.parquet", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_unseen_family_leaves_no_file(tmp_path: Path, build: Build, tokenizer: Any) -> None:
    with pytest.raises(InputError, match="Llama4"):
        capture(build("Llama4"), tokenizer, PROMPTS, tmp_path / "t.parquet", max_new_tokens=1)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_repeats_the_prefix_is_refused(
    tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    model = build("Mixtral")
    plain = model.prepare_inputs_for_generation

    def without_cache(input_ids: Any, **kwargs: Any) -> Any:
        return {**plain(input_ids, **kwargs), "input_ids": input_ids}

    model.prepare_inputs_for_generation = without_cache

    with pytest.raises(InputError, match="with a cache"):
        capture(model, tokenizer, PROMPTS[:1], tmp_path / "t.parquet", max_new_tokens=3)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_fed_embeddings_is_refused(
    tmp_path: Path, build: Build, tokenizer: Any
) -> None:
    model = build("Mixtral")
    plain = model.prepare_inputs_for_generation

    def embedded(input_ids: Any, **kwargs: Any) -> Any:
        inputs = plain(input_ids, **kwargs)
        ids = inputs.pop("input_ids")
        return {**inputs, "inputs_embeds": model.get_input_embeddings()(ids)}

    model.prepare_inputs_for_generation = embedded

    with pytest.raises(InputError, match="without input_ids"):
        capture(model, tokenizer, PROMPTS[:1], tmp_path / "t.parquet", max_new_tokens=3)
    assert list(tmp_path.iterdir()) == []
