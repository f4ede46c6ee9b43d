"""This module loads a model and its tokenizer for capturing."""

from __future__ import annotations

from typing import Any

from moetier.traces.errors import InputError


def load_model(path: str, device_map: str | None = None) -> tuple[Any, Any]:
    """Return the causal model at *path*, in the type it is stored in, and its tokenizer.

    Raises `InputError` when there is no such model, or transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", device_map=device_map)
    except (OSError, ValueError, KeyError, ImportError) as error:
        line = str(error).strip().partition("\n")[0]
        raise InputError(
            f"cannot be loaded: {line}", where=path, way_out="check --model"
        ) from error
    return model.eval(), tokenizer
