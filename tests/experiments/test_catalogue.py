"""Tests of listing what is there."""

from __future__ import annotations

import json

import pytest

from moetier.experiments.catalogue import KINDS
from moetier.sim.hardware import profile_names
from moetier.sim.policy.compose import presets
from moetier.sim.policy.seams import SEAMS
from moetier.traces.geometry import published
from moetier.traces.importers import IMPORTERS
from moetier.traces.predictors import PREDICTORS


def test_every_registered_part_is_listed() -> None:
    found = {(entry["kind"], entry["name"]) for entry in KINDS["policies"]()}

    assert found == {("preset", name) for name in presets()} | {
        (seam, name) for seam, registry in SEAMS.items() for name in registry.names()
    }


def test_presets_come_expanded() -> None:
    found = {e["name"]: e for e in KINDS["policies"]() if e["kind"] == "preset"}

    assert set(found["on-demand"]["expanded"]) == set(SEAMS)
    assert found["belady"]["expanded"]["eviction"] == "belady"


def test_each_seam_has_one_default() -> None:
    defaults = [e["kind"] for e in KINDS["policies"]() if e.get("default")]

    assert sorted(defaults) == sorted(SEAMS)


def test_parts_come_with_parameters() -> None:
    (lfu,) = [e for e in KINDS["policies"]() if (e["kind"], e["name"]) == ("eviction", "lfu")]

    assert lfu["parameters"] == [{"name": "remember", "type": "bool", "default": "True"}]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("hardware", profile_names()),
        ("models", published()),
        ("importers", IMPORTERS.names()),
        ("predictors", PREDICTORS.names()),
    ],
)
def test_every_name_is_listed(kind: str, names: list[str]) -> None:
    assert [entry["name"] for entry in KINDS[kind]()] == names


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_entry_says_what_it_is(kind: str) -> None:
    found = KINDS[kind]()

    assert all(entry["summary"] for entry in found)
    json.dumps(found, allow_nan=False)


def test_a_model_without_sizes_says_so() -> None:
    sizes = {entry["name"]: entry["expert_bytes_bf16"] for entry in KINDS["models"]()}

    assert sizes["qwen3-30b-a3b"] == 48 * 128 * 3 * 2048 * 768 * 2


def test_importers_do_not_list_their_files() -> None:
    named = {p["name"] for entry in KINDS["importers"]() for p in entry["parameters"]}

    assert "model" in named
    assert not {"source", "out"} & named
