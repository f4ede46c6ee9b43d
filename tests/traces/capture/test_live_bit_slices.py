"""Check that bit slices inside a model of any layout are, entry by entry, a mixture of two."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from fractions import Fraction
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import Tensor  # noqa: E402  # needs torch

from moetier.sim.hardware import load_profile  # noqa: E402
from moetier.sim.plan import LayerPlan  # noqa: E402
from moetier.sim.run import Setting  # noqa: E402
from moetier.traces.capture.find import MoeLayer, find_moe_layers  # noqa: E402
from moetier.traces.capture.rebuild import expert_output  # noqa: E402
from moetier.validate.evaluate import Evaluation, Loaded, evaluate  # noqa: E402
from moetier.validate.evaluate_arms import Extras  # noqa: E402
from moetier.validate.numerics.experts import ExpertMatrices, rewritten  # noqa: E402
from moetier.validate.numerics.variants import high_bits, nested  # noqa: E402

FAMILIES = ("GptOss", "Qwen3Moe", "DeepseekV3", "Gemma4")
# transposed, interleaved, clamped, with biases; plain; beside dense layers; scaled per expert
BITS, GROUP, THETA = (6, 2), 8, 0.5
POLICY = {
    "precision": {"kind": "bit-sliced", "bits": list(BITS), "theta": THETA, "group": GROUP},
    "eviction": "slice-aware",
    "miss": "degrade",
}
PROMPTS = ("a few words to begin", "fewer words", "and some more words that are others")


class Seen(NamedTuple):
    """What the experts of one layer got and gave in one forward pass."""

    hidden: Tensor  # (T, H)
    output: Tensor  # (T, H)


class Words:
    """A tokenizer that also decodes; see the one in conftest."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Return the ids of *text*."""
        return {"input_ids": [3 + sum(map(ord, word)) % 57 for word in text.split()]}

    def decode(self, ids: list[int]) -> str:
        """Return *ids* as text."""
        return " ".join(map(str, ids))


def at(layers: list[MoeLayer], variant: Any) -> list[Any]:
    """Return copies of the experts with weights that a *variant* of quantising makes."""

    def change(where: MoeLayer, stack: ExpertMatrices) -> dict[str, Tensor]:
        return {name: variant(w, *BITS, GROUP) for name, w in stack.matrices().items()}

    with rewritten(layers, change):
        return [deepcopy(where.experts) for where in layers]


def watched(model: Any, size: int, plans: list[LayerPlan]) -> tuple[Evaluation, list[Seen]]:
    """Run the policy; return what came of it, and of every batch what the experts got and gave."""
    found: list[Seen] = []
    recording = len(plans)

    def note(module: Any, args: tuple[Any, ...], kwargs: Any, output: Tensor) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if len(plans) > recording + len(found):  # else it is the model by itself
            found.append(Seen(hidden.reshape(-1, hidden.shape[-1]).clone(), output.clone()))

    handles = [
        where.experts.register_forward_hook(note, with_kwargs=True)
        for where in find_moe_layers(model)
    ]
    setting = Setting(load_profile("rtx-a6000"), POLICY, {"hbm": Fraction(1, 5)}, weights="bf16")
    extras = Extras(batch_size=size, long_prompts=0, max_new_tokens=4)
    result = evaluate(Loaded(model, Words()), setting, PROMPTS, extras, on_plan=plans.append)
    for handle in handles:
        handle.remove()
    return result, found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_entry_is_computed_from_the_slices_it_has(
    name: str, size: int, build: Callable[..., Any]
) -> None:
    model = build(name)
    layers = find_moe_layers(model)
    for where in layers:
        for label, value in where.experts.named_parameters():
            if label.endswith("_bias"):
                value.data.normal_(generator=torch.Generator().manual_seed(1))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    high, low = at(layers, high_bits), at(layers, nested)
    plans: list[LayerPlan] = []
    _, found = watched(model, size, plans)

    assert len(found) == len(plans) >= 4
    counts = {True: 0, False: 0}
    for plan, seen in zip(plans, found, strict=True):
        batch = plan.batch
        assert batch.weights is not None
        valid = rows_of(batch.n_tokens, len(seen.hidden))
        expected = torch.zeros_like(seen.output.reshape(len(seen.hidden), -1))
        entries = zip(batch.token_ids(), batch.experts, batch.weights.tolist(), strict=True)
        for token, expert, weight in entries:
            lsb = (batch.layer * layers[0].n_experts + expert) * 2 + 1
            whole = weight >= THETA and lsb not in plan.degrade
            counts[whole] += 1
            experts = (high if whole else low)[batch.layer]
            with torch.no_grad():
                made = expert_output(experts, expert, seen.hidden[valid[token]][None])
            expected[valid[token]] += weight * made[0]
        torch.testing.assert_close(
            seen.output.reshape(len(seen.hidden), -1)[valid], expected[valid], rtol=1e-4, atol=1e-5
        )
    assert min(counts.values()) > 0
    assert any(plan.degrade for plan in plans)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all("forward" not in where.experts.__dict__ for where in layers)


def rows_of(n_tokens: int, rows: int) -> list[int]:
    """Return the rows of a batch's tokens: prompts are padded on the left, decode never is."""
    if rows == n_tokens:
        return list(range(rows))
    lengths = [len(prompt.split()) for prompt in PROMPTS]
    width = max(lengths)
    assert (n_tokens, rows) == (sum(lengths), width * len(lengths))
    return [at * width + i for at, n in enumerate(lengths) for i in range(width - n, width)]
