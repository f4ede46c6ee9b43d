"""Leave out the checkpoint's tests where the extra 'models' is not installed."""

from __future__ import annotations

from importlib.util import find_spec

HAS_MODELS = all(find_spec(name) for name in ("torch", "transformers"))
collect_ignore = [] if HAS_MODELS else ["test_checkpoint.py"]
