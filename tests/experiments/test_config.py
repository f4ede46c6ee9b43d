"""Tests of the schema of a run."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.experiments.config import (
    RunConfig,
    check_run,
    load_hardware,
    load_run,
    parse_capacity,
    policy_label,
    spell_capacity,
)
from moetier.traces.errors import InputError

WriteYaml = Callable[..., Path]


def test_a_run_holds_integers_and_fractions(make_run: Callable[..., RunConfig]) -> None:
    config = make_run(capacity={"dram": "2 GiB"}, seed=3, measure={"warmup_steps": 2})

    assert config.capacity == {"dram": 2 << 30}
    assert config.measure.warmup_steps == 2
    assert config.policy == "on-demand"
    assert config.kv_bytes == 2


def test_a_run_cannot_be_changed(make_run: Callable[..., RunConfig]) -> None:
    with pytest.raises(ValueError, match="frozen"):
        make_run().seed = 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 GiB", 2 << 30),
        ("1.5 MB", 1_500_000),
        ("25 %", Fraction(1, 4)),
        ("12.5%", Fraction(1, 8)),
        ("100 %", Fraction(1)),
        (" 3 % ", Fraction(3, 100)),
    ],
)
def test_a_capacity_is_a_size_or_a_share(text: str, value: int | Fraction) -> None:
    assert parse_capacity(text) == value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (4, "expected a size such as '2 GiB' or a share such as '25 %', got 4"),
        (0.25, "expected a size such as '2 GiB' or a share such as '25 %', got 0.25"),
        (None, "got None"),
        ("4", "expected a size such as '24 GiB', got '4'"),
        ("0 %", "must be above zero, got '0 %'"),
        ("0 B", "must be above zero, got '0 B'"),
        ("-1 GiB", "a size cannot be negative, got '-1 GiB'"),
        ("-5 %", "a share cannot be negative, got '-5 %'"),
        ("101 %", "a share cannot be above 100 %, got '101 %'"),
        ("2 GHz", "got '2 GHz'; its units are"),
    ],
)
def test_a_bad_capacity_is_quoted(value: object, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_capacity(value)

    assert problem in str(caught.value)


@given(st.integers(1, 1 << 45) | st.integers(1, 10_000).map(lambda n: Fraction(n, 10_000)))
def test_a_capacity_reads_back_as_it_was(value: int | Fraction) -> None:
    assert parse_capacity(spell_capacity(value)) == value


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hardwear": "x"}, "hardwear: unknown key; did you mean 'hardware'?"),
        ({"synthetic__tokes": 3}, "synthetic.tokes: unknown key; did you mean 'tokens'?"),
        ({"hardware": "phone-ufs"}, "hardware: unknown hardware 'phone-ufs'; did you mean"),
        ({"hardware": "no/such.yaml"}, "hardware: no/such.yaml: no such file"),
        ({"synthetic__geometry": "gpt-9"}, "synthetic.geometry: unknown model 'gpt-9'; known:"),
        ({"policy": "lazy"}, "policy: unknown policy 'lazy'; presets: on-demand"),
        ({"policy__evict": "lru"}, "policy: unknown seam 'evict'; did you mean 'eviction'? seams:"),
        ({"policy__eviction": "lruu"}, "policy.eviction: unknown eviction 'lruu'; did you mean"),
        ({"weights": "q3"}, "weights: unknown weights 'q3'; known: bf16"),
        ({"tiers": ["dram", "nvme"]}, "tiers: 'phone-ufs4' has no tier 'nvme'"),
        ({"capacity__dram": 25}, "capacity.dram: expected a size such as '2 GiB'"),
        ({"seed": True}, "seed: true is no number; give a number"),
        ({"synthetic__tokens": True}, "synthetic.tokens: true is no number"),
        (
            {"policy": None},
            "policy: Input should be a valid string or a valid dictionary, got None",
        ),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0, got -1"),
        ({"measure__warmup_steps": -1}, "measure.warmup_steps: Input should be greater"),
        ({"synthetic__reuse": 2}, "synthetic.reuse: Input should be less than or equal to 1"),
        ({"model": "mixtral-8x7b"}, "model 'mixtral-8x7b' completes a trace, and none is given"),
        ({"trace": "x.parquet"}, "of trace, synthetic, live, got trace and synthetic"),
        ({"synthetic": None}, "expected one routing source of trace, synthetic, live, got none"),
        ({"synthetic": None, "trace": "no.parquet"}, "trace: no.parquet: no such file"),
        ({"popularity": "no.parquet"}, "popularity: no.parquet: no such file"),
        ({"exclusive": True}, "exclusive: exclusive tiers need two caches"),
    ],
)
def test_bad_input_names_file_key_value_and_way_out(
    changes: dict[str, Any], problem: str, make_run: Callable[..., RunConfig]
) -> None:
    with pytest.raises(InputError) as caught:
        make_run(**changes)

    assert str(caught.value).startswith("test: ")
    assert problem in str(caught.value)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InputError, match="f: hardware: this key is missing"):
        check_run({"live": "x"}, "f")


def test_an_unknown_model_for_a_trace_is_named(tmp_path: Path, run_keys: dict[str, Any]) -> None:
    trace = tmp_path / "t.parquet"
    trace.touch()
    del run_keys["synthetic"]

    with pytest.raises(InputError, match="f: model: unknown model 'gpt-9'"):
        check_run({**run_keys, "trace": str(trace), "model": "gpt-9"}, "f")


def test_a_file_is_read_with_overrides(write_yaml: WriteYaml, run_keys: dict[str, Any]) -> None:
    path = write_yaml(run_keys)

    config = load_run(path, ["capacity.dram=50 %", "policy.eviction=lfu"])

    assert config.capacity == {"dram": Fraction(1, 2)}
    assert config.policy == {"eviction": "lfu"}


def test_an_override_at_fault_is_quoted(write_yaml: WriteYaml, run_keys: dict[str, Any]) -> None:
    path = write_yaml(run_keys)

    with pytest.raises(InputError, match=r"config\.yaml with --set seed=x: seed: Input should be"):
        load_run(path, ["seed=x"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1, 2]", "expected a mapping of keys, got list"),
        ("", "expected a mapping of keys, got NoneType"),
        ("a: [", "line 1: not valid YAML"),
        ("seed: 1\nseed: 2", "line 2: key 'seed' is given twice"),
        ("base: {}", "this is a sweep, not one run; use `moetier sweep`"),
    ],
)
def test_a_file_that_is_no_run_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)

    with pytest.raises(InputError) as caught:
        load_run(path)

    assert str(caught.value).startswith(f"{path}: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("on-demand", "on-demand"),
        ({"eviction": "layer-lfu"}, "layer-lfu"),
        ({"eviction": {"kind": "lfu", "remember": False}}, "lfu(remember=False)"),
        ({"preset": "fiddler", "miss": "fetch"}, "fiddler miss=fetch"),
        ({"prefetch": "oracle"}, "prefetch=oracle"),
        ({"eviction": "lru", "miss": "skip"}, "eviction=lru miss=skip"),
        ({}, "on-demand"),
    ],
)
def test_a_policy_has_a_short_name(spec: str | dict[str, Any], label: str) -> None:
    assert policy_label(spec) == label


def test_hardware_can_be_a_path_into_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert load_hardware("hw_profiles/phone-ufs4.yaml") == load_hardware("phone-ufs4")
