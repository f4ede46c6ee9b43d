"""This module measures what a policy inside a model costs beside the model alone."""

from __future__ import annotations

import time
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from moetier.sim.hardware import load_profile
from moetier.sim.run import Setting
from moetier.traces.capture.load import load_model
from moetier.traces.samples import moe_tiny_path
from moetier.validate.evaluate import Loaded, evaluate, one_thread
from moetier.validate.evaluate_arms import Asked, Count, Extras
from moetier.validate.evaluate_plain import Plain
from moetier.validate.evaluate_questions import tiny_questions

MACHINE, TIER = "phone-ufs4", "dram"


class Overhead(NamedTuple):
    """Seconds of the same questions, repeat by repeat: the model alone, and a whole evaluation."""

    plain: list[float]
    evaluated: list[float]


def overhead(
    repeats: int = 5, items: int = 22, long_tokens: int = 48, policy: Any = "on-demand"
) -> Overhead:
    """Time moe-tiny alone and with *policy* at a quarter of its experts, in turn.

    An evaluation counts from the loaded model to its result, but for the plain model's run, which
    is kept from before.
    """
    loaded = Loaded(*load_model(str(moe_tiny_path())))
    setting = Setting(load_profile(MACHINE), policy, {TIER: Fraction(1, 4)})
    questions = tiny_questions(items)
    extras = Extras(long_prompts=2, long_tokens=long_tokens)
    asked = Asked(*loaded, questions, extras)
    evaluate(loaded, setting, questions, extras)  # keeps the plain run, and warms up
    found = Overhead([], [])
    for _ in range(repeats):
        begin = time.perf_counter()
        with torch.no_grad(), one_thread(loaded.model):
            asked.run_plain(Plain(loaded.model, "bench"), Count(), again=True)
        middle = time.perf_counter()
        evaluate(loaded, setting, questions, extras)
        found.plain.append(middle - begin)
        found.evaluated.append(time.perf_counter() - middle)
    return found
