"""Tests of importing route_trace v1, against files made here and the phone's real one."""

from __future__ import annotations

import csv
import random
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.errors import InputError
from moetier.traces.importers.bigmoeonedge import import_bigmoeonedge
from moetier.traces.io import TraceReader

PREAMBLE = """# route_trace v1
# model=Some-MoE-Q4_0.gguf arch=some n_layer=4 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=0 dense_bytes=900
# layer=1 expert_bytes=100 dense_bytes=10
# layer=2 expert_bytes=200 dense_bytes=20
# layer=3 expert_bytes=300 dense_bytes=30
"""
COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
NAMES: list[str] = [*COLUMNS.split(",")]


def line(turn: int, phase: int, step: int, layer: int, slot: int, expert: int, **more: Any) -> Any:
    row = {"weight": 0.5, "residency": 0, "expert_bytes": 100}
    return {
        "turn": turn, "phase": phase, "step": step, "layer": layer, "slot": slot, "expert": expert,
        **row, **more,
    }  # fmt: skip


def turn_of(turn: int, prompt: int, tokens: int, start: int = 0) -> list[Any]:
    """Return a turn's rows, layer-major in prefill; the last layer sees the last token only."""
    rows = [
        line(
            turn,
            0,
            start + token,
            layer,
            slot,
            (token + layer + 3 * slot) % 8,
            weight=0.75 - slot / 2,
        )
        for layer in (1, 2, 3)
        for token in range(prompt)
        for slot in (0, 1)
        if layer < 3 or token == prompt - 1
    ]
    return rows + [
        line(
            turn,
            1,
            start + prompt + token,
            layer,
            slot,
            (token * layer + 5 * slot) % 8,
            residency=slot,
        )
        for token in range(tokens)
        for layer in (1, 2, 3)
        for slot in (0, 1)
    ]


def text_of(rows: list[Any], names: list[str] = NAMES, preamble: str = PREAMBLE) -> str:
    lines = [",".join(str(row[name]) for name in names) for row in rows]
    return preamble + "\n".join([",".join(names), *lines]) + "\n"


def imported(tmp_path: Path, text: str, **options: Any) -> TraceReader:
    source = tmp_path / "route.csv"
    source.write_text(text)
    import_bigmoeonedge(source, tmp_path / "t.parquet", **options)
    reader = TraceReader(tmp_path / "t.parquet")
    reader.validate()
    return reader


ROWS = turn_of(0, 3, 2)


def test_header_of_a_model_that_is_not_published(tmp_path: Path) -> None:
    header = imported(tmp_path, text_of(ROWS)).header
    geometry = header.geometry

    assert (geometry.name, geometry.n_experts, geometry.top_k) == ("Some-MoE", 8, 2)
    assert (geometry.moe_layers, geometry.n_layers, geometry.hidden) == ([1, 2, 3], 4, None)
    assert header.weights == "q4_0"
    assert header.expert_bytes == {"q4_0": [100, 200, 300]}
    assert (header.dense_bytes, header.dense_layer_bytes) == ([10, 20, 30], [900])
    assert header.recorded_residency
    assert header.unknown == [
        "geometry.hidden", "geometry.moe_intermediate", "geometry.heads", "scores",
    ]  # fmt: skip
    assert header.provenance.importer == "bigmoeonedge"


def test_a_prefill_is_one_step_and_each_decoded_token_another(tmp_path: Path) -> None:
    batches = list(imported(tmp_path, text_of(ROWS)).batches())
    prefill = [b for b in batches if b.phase == PREFILL]

    assert [(b.step, b.layer, b.n_tokens, b.context) for b in batches] == [
        (0, 0, 3, 6), (0, 1, 3, 6), (0, 2, 1, 3),
        (1, 0, 1, 4), (1, 1, 1, 4), (1, 2, 1, 4),
        (2, 0, 1, 5), (2, 1, 1, 5), (2, 2, 1, 5),
    ]  # fmt: skip
    assert prefill[0].experts == [1, 4, 2, 5, 3, 6]  # token-major, in slot order
    assert prefill[0].weights is not None
    assert prefill[0].weights.tolist() == [0.75, 0.25] * 3
    assert batches[3].recorded == [0, 1]


def test_turns_become_requests_that_follow_each_other(tmp_path: Path) -> None:
    rows = turn_of(0, 3, 2) + turn_of(1, 2, 1, start=5)  # the second goes on from the first's cache
    batches = list(imported(tmp_path, text_of(rows)).batches())

    assert [b.step for b in batches] == [i for i in range(5) for _ in range(3)]
    assert [b.requests for b in batches[9:]] == [[1, 1], [1, 1], [1], [1], [1], [1]]
    assert [b.context for b in batches[9:]] == [13, 13, 7, 8, 8, 8]


def as_lists(reader: TraceReader) -> list[Any]:
    return [
        (b.step, b.phase, b.layer, b.context, b.experts, b.requests, b.recorded,
         None if b.weights is None else b.weights.tolist())
        for b in reader.batches()
    ]  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(seed=st.integers(0, 1000), block=st.sampled_from([40, 200, 1 << 20]))
def test_neither_the_order_of_lines_nor_blocks_matter(
    tmp_path: Path, seed: int, block: int
) -> None:
    rows = turn_of(0, 3, 4) + turn_of(1, 2, 2, start=7)
    expected = as_lists(imported(tmp_path, text_of(rows)))
    token_major = sorted(rows, key=lambda r: (r["turn"], r["phase"], r["step"], r["layer"]))
    mixed = random.Random(seed).sample(rows, len(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moetier.traces.importers._csv.BLOCK_BYTES", block)
        for order in (rows, token_major, mixed):
            assert as_lists(imported(tmp_path, text_of(order))) == expected


def test_columns_are_found_by_name_and_more_may_come(tmp_path: Path) -> None:
    expected = as_lists(imported(tmp_path, text_of(ROWS)))
    names = ["dropped", *reversed(NAMES), "temperature"]
    rows = [{**row, "dropped": 0, "temperature": "warm"} for row in ROWS]

    assert as_lists(imported(tmp_path, text_of(rows, names))) == expected


def test_a_dropped_expert_is_an_empty_slot(tmp_path: Path) -> None:
    rows = [{**row, "dropped": 0} for row in ROWS]
    rows[-1]["dropped"] = 1
    last = list(imported(tmp_path, text_of(rows, [*NAMES, "dropped"])).batches())[-1]

    assert last.experts == [ROWS[-2]["expert"]]
    assert last.weights is not None
    assert last.weights.tolist() == [0.5]
    assert last.recorded == [0]
    assert last.token_ids() == [0]


def test_weights_that_are_nan_are_not_known(tmp_path: Path) -> None:
    some = [dict(row) for row in ROWS]
    some[0]["weight"] = "nan"
    every = [{**row, "weight": "nan"} for row in ROWS]
    partly = imported(tmp_path, text_of(some))
    known = [batch.weights is not None for batch in partly.batches()]
    none = imported(tmp_path, text_of(every))

    assert known == [False] + [True] * 8
    assert "weights" not in partly.header.unknown
    assert {batch.weights is None for batch in none.batches()} == {True}
    assert "weights" in none.header.unknown


def test_without_optional_columns_weights_and_residency_are_unknown(tmp_path: Path) -> None:
    reader = imported(tmp_path, text_of(ROWS, NAMES[:6]))
    batch = next(iter(reader.batches()))

    assert (batch.weights, batch.recorded) == (None, None)
    assert not reader.header.recorded_residency
    assert "weights" in reader.header.unknown


def test_without_layer_lines_sizes_are_unknown_and_layers_come_from_the_rows(
    tmp_path: Path,
) -> None:
    preamble = "".join(PREAMBLE.splitlines(keepends=True)[:2])
    header = imported(tmp_path, text_of(ROWS, preamble=preamble)).header

    assert header.geometry.moe_layers == [1, 2, 3]
    assert (header.expert_bytes, header.dense_bytes) == ({}, None)
    assert {"expert_bytes", "dense_bytes"} <= set(header.unknown)


def test_no_format_in_the_name_is_called_recorded(tmp_path: Path) -> None:
    header = imported(tmp_path, text_of(ROWS, preamble=PREAMBLE.replace("-Q4_0.gguf", ""))).header

    assert header.weights == "recorded"
    assert header.expert_bytes == {"recorded": [100, 200, 300]}


def test_comments_blank_lines_and_carriage_returns_are_skipped(tmp_path: Path) -> None:
    expected = as_lists(imported(tmp_path, text_of(ROWS)))
    lines = text_of(ROWS).splitlines()
    lines[9:9] = ["# a remark", ""]
    (tmp_path / "w").mkdir()

    assert as_lists(imported(tmp_path / "w", "\r\n".join(lines) + "\r\n")) == expected


def broken(change: dict[str, Any], row: int = 4) -> str:
    rows = [dict(r) for r in ROWS]
    rows[row].update(change)
    return text_of(rows)


LINE = 4 + 8  # the preamble has six lines, the names one


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"expert": 8}, r"column 'expert': 8; expected 0 to 7"),
        ({"expert": -1}, r"column 'expert': -1; expected 0 to 7"),
        ({"expert": "five"}, r"column 'expert': 'five' is not a whole number"),
        ({"expert": ""}, r"column 'expert': '' is not a whole number"),
        ({"expert": "nan"}, r"column 'expert': 'nan' is not a whole number"),
        ({"expert": 1.5}, r"column 'expert': '1\.5' is not a whole number"),
        ({"weight": "heavy"}, r"column 'weight': 'heavy' is not a number"),
        ({"weight": "inf"}, r"column 'weight': inf; expected a finite weight or nan"),
        ({"phase": 2}, r"column 'phase': 2; expected 0 to 1"),
        ({"step": -1}, r"column 'step': -1; expected 0 to 2147483647"),
        ({"step": 1 << 40}, r"column 'step': 1099511627776; expected"),
        ({"turn": -1}, r"column 'turn': -1"),
        ({"slot": 2}, r"column 'slot': 2; expected 0 to 1"),
        ({"layer": 4}, r"column 'layer': 4; expected 0 to 3"),
        ({"layer": 0}, r"column 'layer': 0; expected a layer with expert_bytes in the preamble"),
        ({"residency": 3}, r"column 'residency': 3; expected 0 to 2"),
        ({"slot": 1}, r"column 'slot': 1; expected each slot once per token and layer"),
    ],
)
def test_a_malformed_value_names_its_line(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=rf"route\.csv: line 1[23], {words}"):
        imported(tmp_path, broken(change))

    assert not (tmp_path / "t.parquet").exists()


@pytest.mark.parametrize("block", [60, 1 << 20])
def test_line_numbers_count_comments_and_blocks(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetier.traces.importers._csv.BLOCK_BYTES", block)
    lines = text_of(ROWS).splitlines()
    lines[9:9] = ["# a remark", ""]
    lines[15] = "0,0,1"
    with pytest.raises(InputError, match="line 16: 3 values, expected 9; a last line cut short"):
        imported(tmp_path, "\n".join(lines))


def test_a_line_cut_short_at_the_end_is_refused(tmp_path: Path) -> None:
    text = text_of(ROWS)
    with pytest.raises(InputError, match=f"line {len(text.splitlines())}: 8 values, expected 9"):
        imported(tmp_path, text[:-5])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("# route_trace v1\n", "", "line 1: expected '# route_trace v1', got '# model=Some"),
        ("route_trace v1", "route_trace v2", "line 1: version '2' is not known"),
        ("n_expert=8", "n_expert=many", "line 2: cannot read '# model=Some"),
        ("layer=1 expert_bytes=100", "layer=1 bytes=100", "line 4: cannot read '# layer=1"),
        ("# model=", "# file ", "line 2: cannot read '# file Some"),
        ("turn,", "round,", r"line 7: no column 'turn' \(found: round, phase"),
    ],
)
def test_a_preamble_that_cannot_be_read_is_named(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        imported(tmp_path, text_of(ROWS).replace(old, new))


def test_files_without_rows_or_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rows after the preamble"):
        imported(tmp_path, text_of([]))
    with pytest.raises(InputError, match=r"no '# model=\.\.\.' line"):
        imported(tmp_path, "# route_trace v1\n" + COLUMNS + "\n")
    with pytest.raises(InputError, match=r"no column 'turn' \(found: nothing\)"):
        imported(tmp_path, PREAMBLE)


def test_a_named_model_must_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model 'olmoe-1b-7b' does not fit the trace: it has 64"):
        imported(tmp_path, text_of(ROWS), model="olmoe-1b-7b")


# ---- the phone's trace


@pytest.fixture(scope="module")
def phone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TraceReader:
    out = tmp_path_factory.mktemp("phone") / "phone.parquet"
    import_bigmoeonedge(data / "phone-qwen3-30b-a3b" / "route.csv", out)
    return TraceReader(out)


def test_the_phone_s_trace_is_complete(phone: TraceReader, data: Path) -> None:
    with (data / "phone-qwen3-30b-a3b" / "route.csv").open() as file:
        rows = [row.split(",") for row in file if row[0] not in "#t"]
    weights = np.array([float(row[6]) for row in rows], np.float32)
    chunks = list(phone.columns())

    assert phone.validate() == 27 * 47 + 47 + 1 + 128 * 48
    assert sum(int((chunk.experts >= 0).sum()) for chunk in chunks) == len(rows) == 44_766
    total = sum(float(c.weights.sum(dtype=np.float64)) for c in chunks if c.weights is not None)
    assert total == pytest.approx(float(weights.sum(dtype=np.float64)), rel=1e-6)


def test_the_phone_s_header(phone: TraceReader) -> None:
    header = phone.header

    assert (header.geometry.name, header.geometry.top_k) == ("qwen3-30b-a3b", 6)
    assert (header.weights, header.unknown) == ("q4_k_m", ["scores"])
    assert header.dense_bytes is not None
    assert sum(header.expert_bytes["q4_k_m"]) * 128 == 17_553_162_240
    assert set(header.dense_bytes) == {11_953_152, 11_682_816}


def lru(reader: TraceReader, budget: int) -> Iterator[tuple[int, bool, int, int]]:
    """Yield (phase, hit, bytes read, recorded) of each lookup under the device's rules."""
    nbytes = reader.header.expert_bytes["q4_k_m"]
    cache: OrderedDict[tuple[int, int], int] = OrderedDict()
    used = 0
    for batch in reader.batches():
        assert batch.recorded is not None
        touched: set[tuple[int, int]] = set()
        for expert, recorded in zip(batch.experts, batch.recorded, strict=True):
            key = (batch.layer, expert)
            if key not in touched:
                hit = key in cache
                yield batch.phase, hit, 0 if hit else nbytes[batch.layer], recorded
                used += 0 if hit else nbytes[batch.layer]
                cache[key] = nbytes[batch.layer]
                touched.add(key)
            cache.move_to_end(key)
        if used > budget:
            for key in [key for key in cache if key not in touched]:
                used -= cache.pop(key)
                if used <= budget:
                    break


@pytest.mark.parametrize("mib", [500, 1000, 4000, 8000])
def test_replaying_it_gives_the_device_s_figures(phone: TraceReader, data: Path, mib: int) -> None:
    with (data / "phone-qwen3-30b-a3b" / "replay_curve.csv").open() as file:
        published = next(
            row
            for row in csv.DictReader(file)
            if row["policy"] == "lru" and row["budget_mib"] == str(mib)
        )
    seen = list(lru(phone, mib << 20))
    decode = [hit for phase, hit, _, _ in seen if phase == DECODE]

    assert f"{100 * sum(hit for _, hit, _, _ in seen) / len(seen):.3f}" == published["hit_pct_cum"]
    assert f"{100 * sum(decode) / len(decode):.3f}" == published["hit_pct_decode"]
    assert f"{sum(n for _, _, n, _ in seen) / (1 << 20):.1f}" == published["read_mib"]
    if mib == 4000:  # the size of the cache when this was recorded
        assert [int(hit) for _, hit, _, _ in seen] == [recorded for _, _, _, recorded in seen]
