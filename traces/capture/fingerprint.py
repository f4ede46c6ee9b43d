"""This module names a model or a tensor by what it is: a hash over all that makes it."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 1 << 24  # bytes hashed at a time
_NOT_THE_MODEL = ("transformers_version", "architectures", "dtype", "torch_dtype")
"""Set by saving or loading."""


def fingerprint(model: Any) -> str:
    """Return the sha256, in hex, of *model*'s configuration and weights as loaded, streaming.

    Where it was loaded from, by which version and onto which device make no difference; the type
    the weights were loaded in does.
    """
    digest = hashlib.sha256(json.dumps(_plain(model.config.to_dict()), sort_keys=True).encode())
    for path, module in sorted(model.named_modules(), key=lambda item: item[0]):
        with _present(module):
            own = (*module.named_parameters(recurse=False), *_buffers(module))
            for name, value in sorted(own, key=lambda item: item[0]):
                head = f"{path}.{name} {value.dtype} {tuple(value.shape)}\n"
                digest.update(head.encode())
                _update(digest, value)
    return digest.hexdigest()


def checksum(value: Tensor) -> str:
    """Return the sha256, in hex, of a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}\n".encode())
    _update(digest, value)
    return digest.hexdigest()


def _update(digest: Any, value: Tensor) -> None:
    flat = value.detach().reshape(-1)
    step = max(1, CHUNK // max(flat.element_size(), 1))
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step].contiguous().cpu()
        digest.update(part.view(torch.uint8).numpy().data)


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that a checkpoint holds."""
    skip = module._non_persistent_buffers_set
    return [
        (name, value) for name, value in module.named_buffers(recurse=False) if name not in skip
    ]


def _present(module: nn.Module) -> AbstractContextManager[Any]:
    """Bring the weights of an offloaded module here for a while."""
    if not hasattr(module, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device  # type: ignore[import-untyped]  # has no types

    present: AbstractContextManager[Any] = align_module_device(module, torch.device("cpu"))
    return present


def _plain(value: Any) -> Any:
    """Return a configuration without what does not belong to the model."""
    if isinstance(value, dict):
        return {
            str(key): _plain(item)
            for key, item in value.items()
            if not str(key).startswith("_") and key not in _NOT_THE_MODEL
        }
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
