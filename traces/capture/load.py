"""This module loads a model and its tokenizer for capturing."""

from __future__ import annotations

from typing import Any

from moetier.traces.errors import InputError


def load_model(path: str, device_map: str | None = None) -> tuple[Any, Any]:
    """Return the model at *path*, in the type its configuration names, and its tokenizer.

    A model that also reads images is loaded whole; its text tower is what gets captured.

    Raises `InputError` when there is no such model, or transformers cannot load it.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        causal = type(AutoConfig.from_pretrained(path)) in MODEL_FOR_CAUSAL_LM_MAPPING
        kind = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        model = kind.from_pretrained(path, dtype="auto", device_map=device_map)
    except (OSError, ValueError, KeyError, ImportError) as error:
        line = str(error).strip().partition("\n")[0]
        raise InputError(
            f"cannot be loaded: {line}",
            where=path,
            way_out="check the name of the model, or its path",
        ) from error
    return model.eval(), tokenizer
