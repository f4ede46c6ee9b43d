"""Tests that a damaged file of another program is refused, and never ends in a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetier.traces.errors import InputError
from moetier.traces.importers.flame import import_flame
from moetier.traces.importers.moe_policylang import import_moe_policylang
from moetier.traces.importers.vllm import import_vllm

Import = Callable[[Path, Path], object]


def arrays(folder: Path) -> tuple[Path, Import]:
    ids = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    np.savez(folder / "r.npz", prompt_routed_experts=ids, routed_experts=ids)
    return folder / "r.npz", import_vllm


def one_array(folder: Path) -> tuple[Path, Import]:
    np.save(folder / "r.npy", np.arange(24, dtype=np.uint8).reshape(3, 2, 4))
    return folder / "r.npy", lambda source, out: import_vllm(source, out, prompt_tokens=0)


def layer(folder: Path) -> tuple[Path, Import]:
    ids = [list(range(at, at + 6)) for at in range(20)]
    scores = [[0.5, 0.1, 0.1, 0.1, 0.1, 0.1]] * 20
    table = pa.table(
        {
            "scores": pa.array(np.asarray(scores, np.float16).tolist(), pa.list_(pa.float16())),
            "indices": pa.array(ids, pa.list_(pa.int16())),
        }
    )
    inner = folder / "flame-moe-290m" / "actives" / "iter_1"
    inner.mkdir(parents=True)
    pq.write_table(table, inner / "layer_02.parquet", row_group_size=4)
    return inner / "layer_02.parquet", lambda source, out: import_flame(
        source.parent, out, sequence=4
    )


def log(folder: Path) -> tuple[Path, Import]:
    rows = [{"num_layers": 2, "num_experts": 8, "top_k": 2, "model": "m"}]
    rows += [{"t": t, "l": n, "e": [n, 5], "ph": "decode"} for t in range(3) for n in range(2)]
    (folder / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "r.jsonl", import_moe_policylang


@pytest.mark.parametrize("make", [arrays, one_array, layer, log])
def test_no_damage_is_a_traceback(
    make: Callable[[Path], tuple[Path, Import]], tmp_path: Path
) -> None:
    source, read = make(tmp_path)
    whole, out = source.read_bytes(), tmp_path / "out.parquet"
    read(source, out)  # as it is, it can be read
    draw = np.random.Generator(np.random.PCG64(5))
    refused = 0

    for at in range(200):
        damaged = bytearray(whole)
        place = int(draw.integers(len(whole)))
        if at % 4 == 0:
            damaged = damaged[:place]
        elif at % 4 == 1:
            damaged[place:place] = b"9" * 25
        else:
            damaged[place] ^= 1 << int(draw.integers(8))
        source.write_bytes(bytes(damaged))
        out.unlink(missing_ok=True)
        try:
            read(source, out)
        except InputError:
            refused += 1
            assert not out.exists()

    assert refused > 50


def test_a_layer_that_no_model_has_is_refused_by_line(tmp_path: Path) -> None:
    source, read = log(tmp_path)
    source.write_text(source.read_text().replace('"l": 1', '"l": 999999', 1))

    with pytest.raises(InputError, match="line 3: key 'l': there is no layer 999999"):
        read(source, tmp_path / "out.parquet")
