"""This package captures the routing of any transformers MoE that uses the experts interface.

Importing it is light: torch and transformers load when `capture_model` is called.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Progress = Callable[[int, int], None]
"""Called with (prompts done, prompts in all) after each batch of prompts."""


def capture_model(
    model_path: str,
    prompts_path: str | Path,
    out: str | Path,
    *,
    hidden: bool = False,
    max_new_tokens: int = 64,
    device_map: str | None = None,
    batch_size: int = 1,
    seed: int = 0,
    predictor: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Load *model_path*, generate greedily from *prompts_path* and write the routing to *out*.

    Args:
        model_path: A local checkpoint folder, or the id of a model on the hub.
        prompts_path: A `.txt` file (one prompt a line) or a `.jsonl` file of `{"prompt": ...}`.
        out: The trace to write; nothing is left there after an error.
        hidden: Also store what each router read, see `moetier.traces.capture.hidden`.
        max_new_tokens: Tokens to generate for each prompt; an end-of-sequence token stops earlier.
        device_map: What `from_pretrained` takes, such as "auto"; None is the CPU.
        batch_size: Prompts that run together, padded on the left.
        seed: Seeds torch while capturing; greedy decoding does not draw, a model with noise may.
        predictor: A checkpoint of `moetier train-predictor`, or a kind that needs no training; the
            trace then carries what it predicts.
        progress: Told after each batch how many prompts are done.

    Raises:
        InputError: The prompts or the model cannot be used; the message says why.
    """
    from moetier.traces.capture.load import load_model
    from moetier.traces.capture.prompts import read_prompts
    from moetier.traces.capture.run import capture

    prompts = read_prompts(prompts_path)
    model, tokenizer = load_model(model_path, device_map)
    beside = None
    if predictor is not None:
        from moetier.traces.predictors.learn.checkpoint import find_predictor

        beside = find_predictor(predictor, model)
    return capture(
        model,
        tokenizer,
        prompts,
        out,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        hidden=hidden,
        seed=seed,
        predictor=beside,
        progress=progress,
    )
