"""Tests of the texts of a report: warnings, assumptions, provenance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moetier.experiments.report.folder import Entry, Folder, read_folder
from moetier.experiments.report.provenance import facts, hardware_sources, keys_of
from moetier.experiments.report.remarks import (
    Remark,
    grouped,
    limitations_of,
    measured_or_modelled,
    warnings_of,
)

MakeEntry = Callable[..., Entry]


def folder_of(*entries: Entry, **more: Any) -> Folder:
    return Folder(Path("x"), "sweep", "x", datetime(2026, 1, 2, tzinfo=UTC), list(entries), **more)


def test_texts_that_differ_in_numbers_are_one() -> None:
    said = [["1 of 340 late", "routing is synthetic"], ["25 of 1,093 late"], []]

    assert grouped(said) == [
        Remark("1 of 340 late", points=2, variants=2),
        Remark("routing is synthetic", points=1),
    ]


def test_a_point_that_says_a_thing_twice_is_one_point() -> None:
    assert grouped([["1 late", "2 late"]]) == [Remark("1 late", points=1, variants=2)]
    assert grouped([]) == []


def test_warnings_of_points_and_of_the_whole(make_entry: MakeEntry) -> None:
    entries = [make_entry(str(n), outcome={"warnings": ["LRU cliff"]}) for n in range(3)]
    said = ["policy inert: a and b", "LRU cliff (policy=lru)"]

    points, whole = warnings_of(folder_of(*entries, provenance={"warnings": said}))

    assert points == [Remark("LRU cliff", 3)]
    assert whole == ["policy inert: a and b"]


def test_limitations_of_points_and_of_the_whole(make_entry: MakeEntry) -> None:
    entries = [make_entry(outcome={"known_limitations": ["time is modelled"]})]
    whole = ["time is modelled", "oracle_gap is to a bound"]

    found = limitations_of(folder_of(*entries, provenance={"known_limitations": whole}))

    assert found == [Remark("time is modelled", 1), Remark("oracle_gap is to a bound", 0)]


def test_limitations_of_a_validation_are_grouped(validated: Path) -> None:
    assert limitations_of(read_folder(validated)) == [
        Remark("1 of 340 transfers took longer", points=0, variants=2)
    ]


def test_every_point_of_a_sweep_says_what_it_assumed(finished: Path) -> None:
    found = limitations_of(read_folder(finished))

    assert any(one.points == 6 and "modelled, not measured" in one.text for one in found)


def test_a_point_on_a_real_machine_is_not_called_modelled(
    make_entry: MakeEntry, validated: Path
) -> None:
    real, plain, simulated = (
        make_entry(outcome={"config": {"machine": machine}})
        for machine in ({"kind": "disk"}, None, {"kind": "simulated"})
    )

    assert measured_or_modelled(folder_of(plain, simulated)) == "Times and energy are modelled."
    assert measured_or_modelled(folder_of(real)) == "Times are measured, energy is modelled."
    assert "measured for 1 of 2 points" in measured_or_modelled(folder_of(real, plain))
    assert measured_or_modelled(read_folder(validated)) == ""


def test_the_facts_identify_the_results(finished: Path) -> None:
    folder = read_folder(finished)

    found = dict(facts(folder))

    assert found["written by"] == "moetier sweep"
    assert "numpy" in found["versions"]
    digest = hashlib.sha256((finished / "sweep.yaml").read_bytes()).hexdigest()
    assert found["SHA-256 of sweep.yaml"] == digest
    source = folder.entries[0].outcome["provenance"]["source"]
    assert found["routing of moe-tiny"] == source
    assert found["results of"].endswith("UTC")


def test_the_facts_of_a_validation_name_its_machine(validated: Path) -> None:
    assert ("measured on: cpu", "a processor") in facts(read_folder(validated))


def test_the_content_keys_have_one_hash(finished: Path, make_entry: MakeEntry) -> None:
    assert keys_of(read_folder(finished)) == keys_of(read_folder(finished))
    assert keys_of(folder_of(make_entry("a"))) != keys_of(folder_of(make_entry("b")))


def test_the_sources_of_a_machine_are_those_of_its_profile(finished: Path) -> None:
    (table,) = hardware_sources(read_folder(finished))

    blocks = {row[0]: row[1] for row in table.rows}
    assert table.caption == "phone-ufs4"
    assert "BigMoeOnEdge" in blocks["profile"]
    assert {"tiers.dram", "tiers.flash", "links[0]"} <= set(blocks)
    assert not any("\n" in text for text in blocks.values())


def test_a_machine_that_is_gone_is_said_to_be(make_entry: MakeEntry, validated: Path) -> None:
    (gone,) = hardware_sources(folder_of(make_entry(axes={"hardware": "gone"})))
    (own,) = hardware_sources(read_folder(validated))

    assert gone.rows == [["profile", "not found today"]]
    assert own.rows == [["tiers.dram", "measured here"]]
    assert json.dumps(own.caption) == '"this-disk"'
