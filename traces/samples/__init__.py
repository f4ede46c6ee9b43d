"""This package holds moe-tiny, a small trained Mixture-of-Experts model, and its tasks."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

MOE_TINY_LAYERS = 8
MOE_TINY_EXPERTS = 32
MOE_TINY_TOP_K = 4
MOE_TINY_HIDDEN = 128
MOE_TINY_EXPERT_HIDDEN = 128


def moe_tiny_path() -> Path:
    """Return the directory of the checkpoint, to be passed to ``from_pretrained``."""
    return Path(str(resources.files(__name__) / "moe-tiny"))
