"""Tests of the locality of traces, and of what bit slices save on SliceMoE's machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moetier.experiments.studies.locality import Locality, fit, localities, measure
from moetier.experiments.studies.slicemoe import CACHES, gain, high_bit, run, sliced
from moetier.traces.geometry import load_geometry
from moetier.traces.importers.bigmoeonedge import import_bigmoeonedge
from moetier.traces.importers.jsonl_layers import import_jsonl_layers
from moetier.traces.info import describe
from moetier.traces.io import TraceReader
from moetier.traces.samples import moe_tiny_path
from moetier.traces.synthetic import Synthetic

DATA = os.environ.get("MOETIER_DATA")
PLACE = Locality(0.0, 0.0, skew=1.1, reuse=0.17)
SAMPLE = moe_tiny_path().parent / "moe-tiny.parquet"


def test_all_experts_hit_and_stay_when_a_token_uses_all() -> None:
    geometry = load_geometry("moe-tiny").model_copy(update={"top_k": 8, "n_experts": 8})

    reuse, hit_rate = measure(Synthetic(geometry, tokens=10))

    assert reuse == 1
    assert hit_rate == 0  # a quarter of the experts is less than a token uses: the cliff


def test_a_fit_finds_the_locality_that_was_put_in() -> None:
    geometry = load_geometry("olmoe-1b-7b")
    source = Synthetic(geometry, tokens=150, skew=1.2, reuse=0.25, seed=5)

    found = fit(source, 150)

    assert found.skew == pytest.approx(1.2, abs=0.15)
    assert found.reuse == pytest.approx(0.25, abs=0.06)
    made = Synthetic(geometry, tokens=150, skew=found.skew, reuse=found.reuse)
    reuse, hit_rate = measure(made)
    assert reuse == pytest.approx(found.reuse_measured, abs=0.02)
    assert hit_rate == pytest.approx(found.hit_rate, abs=0.03)


def test_the_module_prints_what_the_file_says_of_the_sample() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "moetier.experiments.studies.locality", str(SAMPLE)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert Locality(**yaml.safe_load(ran.stdout)) == localities()["moe-tiny"]


@pytest.mark.skipif(DATA is None, reason="MOETIER_DATA does not point at the real traces")
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "olmoe-1b-7b"])
def test_recorded_traces_are_as_local_as_the_file_says(name: str, tmp_path: Path) -> None:
    assert DATA is not None
    path = tmp_path / "trace.parquet"
    if name == "olmoe-1b-7b":
        import_jsonl_layers(Path(DATA) / "olmoe-1b-7b" / "trace.jsonl", path)
    else:
        import_bigmoeonedge(Path(DATA) / "phone-qwen3-30b-a3b" / "route.csv", path)
    source = TraceReader(path)

    reuse, hit_rate = measure(source)

    known = localities()[name]
    assert (round(reuse, 4), round(hit_rate, 4)) == (known.reuse_measured, known.hit_rate)
    tokens = describe(source).decode_tokens
    made = Synthetic(
        source.header.geometry, tokens=tokens, skew=known.skew, reuse=known.reuse, seed=0
    )
    assert measure(made)[1] == pytest.approx(known.hit_rate, abs=0.05)


def test_slices_spend_less_than_whole_experts() -> None:
    model, size = "qwen1.5-moe-a2.7b", CACHES[1]

    whole = run(model, PLACE, high_bit("cache-prior"), size, tokens=24)
    parts = run(model, PLACE, sliced([8, 4]), size, tokens=24)

    assert parts["bytes_per_token"] < whole["bytes_per_token"]
    assert parts["miss_rate_msb"] < whole["miss_rate"]
    assert parts["degraded_share"] > 0


@pytest.mark.slow
def test_a_gain_is_of_the_high_bit_run_over_the_sliced_one() -> None:
    model, size = "qwen1.5-moe-a2.7b", CACHES[0]

    found = gain(model, PLACE, [8, 4], size, "tpot_ms", "cache-prior")

    high, low = (
        run(model, PLACE, policy, size)["tpot_ms"]
        for policy in (high_bit("cache-prior"), sliced([8, 4]))
    )
    assert found == high / low > 1
