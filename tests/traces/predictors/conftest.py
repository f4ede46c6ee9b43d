"""Tiny random models, those of the tests of capturing, and samples of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HAS_MODELS = all(find_spec(name) for name in ("torch", "transformers"))
NEED_NO_MODEL = ("test_costs.py", "test_annotate.py", "test_create.py")
collect_ignore = (
    []
    if HAS_MODELS
    else [
        item.name
        for item in Path(__file__).parent.glob("test_*.py")
        if item.name not in NEED_NO_MODEL
    ]
)
WORDS = ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st", "uv", "wx", "yz")
PROMPTS = [" ".join((*WORDS[i % 7 : i % 7 + 3 + i % 4], WORDS[-1 - i % 5])) for i in range(24)]


def _capture_conftest() -> Any:
    """Return the module that builds models; sibling conftests cannot be imported by name."""
    path = Path(__file__).parents[1] / "capture" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_models() -> Any:
    return _capture_conftest()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    if not HAS_MODELS:
        yield
        return
    import torch

    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


@pytest.fixture
def build(tiny_models: Any) -> Callable[..., Any]:
    found: Callable[..., Any] = tiny_models.build_model
    return found


@pytest.fixture
def tokenizer(tiny_models: Any) -> Any:
    return tiny_models.WordTokenizer()


@pytest.fixture
def prompts() -> list[str]:
    return list(dict.fromkeys(PROMPTS))


@pytest.fixture(scope="session")
def learnt_from(tiny_models: Any) -> Any:
    """Return a three-layer model, its parts, and samples of what it generates."""
    from moetier.traces.predictors.learn.parts import find_parts
    from moetier.traces.predictors.learn.samples import from_prompts

    model = tiny_models.build_model("Qwen3Moe", num_hidden_layers=3)
    parts = find_parts(model)
    samples = from_prompts(
        parts, tiny_models.WordTokenizer(), PROMPTS, max_new_tokens=4, batch_size=4, seed=0
    )
    return model, parts, samples
