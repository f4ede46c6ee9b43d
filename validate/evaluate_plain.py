"""This module keeps what a model does by itself, so that it runs once for many policies.

A plain run is named by all that decides its bits: weights, requests, batches, implementation,
types, threads, versions. It is held in memory, and in a folder where one is given.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from moetier.traces.errors import InputError
from moetier.traces.files import replacing
from moetier.validate.live_generate import Decoding, Output, Request, generate

HELD = 16
"""Runs kept in memory."""

_memory: dict[str, list[Output]] = {}


@dataclass(slots=True)
class Plain:
    """Runs *model* by itself; *fingerprint* names its weights, *folder* is where runs are kept."""

    model: Any
    fingerprint: str
    folder: Path | None = None
    ran: int = 0  # runs that were not kept from before

    def run(
        self,
        requests: Sequence[Request],
        decoding: Decoding,
        on_batch: Callable[[int], None] | None = None,
        *,
        again: bool = False,
    ) -> list[Output]:
        """Return what the model does with *requests*; *again* trusts nothing kept from before."""
        key = self.key(requests, decoding)
        found = None if again else _memory.get(key) or self._read(key, len(requests))
        if found is None:
            found = generate(self.model, requests, decoding, on_batch=on_batch)
            self.ran += 1
            self._write(key, found)
        _memory.pop(key, None)
        _memory[key] = found
        while len(_memory) > HELD:
            _memory.pop(next(iter(_memory)))
        return found

    def key(self, requests: Sequence[Request], decoding: Decoding) -> str:
        """Return a name for everything that decides the outcome bit by bit."""
        config = self.model.config.get_text_config()
        told = {
            "model": self.fingerprint,
            "experts": str(getattr(config, "_experts_implementation", None)),
            "attention": str(getattr(config, "_attn_implementation", None)),
            "dtype": str(next(self.model.parameters()).dtype),
            "device": str(self.model.device),
            "threads": torch.get_num_threads(),
            "machine": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
            "versions": [version(name) for name in ("moetier", "torch", "transformers")],
            "requests": [asdict(request) for request in requests],
            "decoding": asdict(decoding),
        }
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]

    def _read(self, key: str, n: int) -> list[Output] | None:
        """Return the run of *n* requests kept under *key*, None where there is none to trust."""
        if self.folder is None:
            return None
        try:
            kept = json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8"))
            rows = kept["runs"]
            if kept["sha256"] != _digest(rows):
                return None
            found = [Output(tuple(r[0]), tuple(r[1]), str(r[2]), bool(r[3])) for r in rows]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return found if len(found) == n else None

    def _write(self, key: str, outputs: Sequence[Output]) -> None:
        """Keep a run; a folder that cannot be written is no reason to stop."""
        if self.folder is None:
            return
        rows = [[o.tokens, o.nll, o.digest, o.greedy] for o in outputs]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self.folder / f"{key}.json") as temporary:
                text = json.dumps({"sha256": _digest(rows), "runs": rows})
                temporary.write_text(text, encoding="utf-8")
        except (OSError, InputError):
            return


def _digest(rows: list[Any]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
