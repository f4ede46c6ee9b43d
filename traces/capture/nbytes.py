"""This module counts the bytes of a model's layers in the format its checkpoint stores."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moetier.traces.capture.find import MoeLayer, dense_layers

FORMATS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
}
_STORED = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}


def stored_dtype(model: Any, layers: list[MoeLayer]) -> torch.dtype:
    """Return the type in which the checkpoint stores the experts.

    That is what the files at the model's path say; a model that was not loaded from local
    safetensors files is taken as it is in memory.
    """
    folder = Path(str(getattr(model.config, "name_or_path", "") or "/nonexistent"))
    found = _checkpoint_dtype(folder) if folder.is_dir() else None
    return found or next(layers[0].experts.parameters()).dtype


def expert_bytes(layers: list[MoeLayer], dtype: torch.dtype) -> list[int]:
    """Return the bytes of one whole routed expert of each MoE layer, biases included."""
    return [
        sum(
            _nbytes(value, layers, dtype) // where.n_experts
            for value in where.experts.parameters()
            if value.shape[0] == where.n_experts
        )
        for where in layers
    ]


def dense_bytes(layers: list[MoeLayer], dtype: torch.dtype) -> list[int]:
    """Return the bytes of the rest of each decoder layer that holds routed experts."""
    result = []
    for where in layers:
        routed = {id(value) for value in where.experts.parameters()}
        rest = (value for value in where.decoder.parameters() if id(value) not in routed)
        result.append(sum(_nbytes(value, layers, dtype) for value in rest))
    return result


def dense_layer_bytes(model: nn.Module, layers: list[MoeLayer], dtype: torch.dtype) -> list[int]:
    """Return the bytes of each decoder layer that holds no routed experts."""
    return [
        sum(_nbytes(value, layers, dtype) for value in decoder.parameters())
        for decoder in dense_layers(model, layers)
    ]


def _nbytes(value: nn.Parameter, layers: list[MoeLayer], dtype: torch.dtype) -> int:
    """Count *value* in the stored type if it has the experts' type, else in its own."""
    loaded = next(layers[0].experts.parameters()).dtype
    return value.numel() * (dtype if value.dtype == loaded else value.dtype).itemsize


def _checkpoint_dtype(folder: Path) -> torch.dtype | None:
    """Return the type most bytes of expert tensors have in the safetensors files of *folder*."""
    sizes: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            tensors = json.loads(stream.read(length))
        for name, entry in tensors.items():
            if "expert" in name and "shared" not in name:
                start, end = entry["data_offsets"]
                sizes[entry["dtype"]] += end - start
    return _STORED.get(sizes.most_common(1)[0][0]) if sizes else None
