"""Every profile that comes with the package loads, says where its numbers are from, and is sane."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from moetier.sim.hardware import Profile, load_profile, profile_names
from moetier.sim.units import parse_bytes, parse_energy_per_byte, parse_rate
from moetier.sim.yaml_input import read_yaml

FOLDER = Path(str(files("moetier.hw_profiles")))
FILES = sorted(FOLDER.rglob("*.yaml"))
EXPECTED = {
    "rtx-a6000",
    "rtx-3090",
    "rtx-4090",
    "rtx-5090",
    "a100-80g-pcie4",
    "h100-pcie5",
    "h200-pcie5",
    "gh200",
    "jetson-orin",
    "desktop-nvme",
    "phone-ufs4",
    "phone-oneplus15r",
    "phone-sd8-elite",
    "phone-sd8-elite-mid-ufs",
    "phone-sd8-elite-slow-ufs",
    "phone-sd8-elite-sd-card",
    "xpu-lpddr4-ufs31",
}
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def test_the_machines_are_there() -> None:
    assert set(profile_names()) >= EXPECTED
    assert profile_names() == sorted(file.stem for file in FILES)


@every_file
def test_it_loads_by_name_and_by_path(file: Path) -> None:
    assert load_profile(file.stem) == load_profile(file)
    assert load_profile(str(file)).name == file.stem


def blocks(node: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every block that carries numbers: the profile, its tiers, links and processors."""
    yield "profile", node
    for section in ("tiers", "compute"):
        yield from ((f"{section}.{name}", block) for name, block in node[section].items())
    yield from ((f"links.{i}", block) for i, block in enumerate(node["links"]))


@every_file
def test_every_block_says_where_its_numbers_come_from(file: Path) -> None:
    for path, block in blocks(read_yaml(file)):
        assert len(block["source"].split()) >= 1, path
        assert "TODO" not in block["source"], path


def scalars(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    match node:
        case dict():
            for name, value in node.items():
                yield from scalars(value, str(name))
        case list():
            for value in node:
                yield from scalars(value, key)
        case _:
            yield key, node


@every_file
def test_every_number_has_a_unit(file: Path) -> None:
    bare = {key for key, value in scalars(read_yaml(file)) if not isinstance(value, str)}

    assert bare <= {"lanes"}


@every_file
def test_lines_are_short_enough_to_read(file: Path) -> None:
    assert max(map(len, file.read_text(encoding="utf-8").splitlines())) <= 100


@every_file
def test_tier_names_are_the_known_ones(file: Path) -> None:
    tiers = load_profile(file).tier_names
    known = ["hbm", "dram", "flash", "nvme"]

    assert list(tiers) == [name for name in known if name in tiers]


@every_file
def test_a_link_is_no_faster_than_the_memory_it_reads(file: Path) -> None:
    profile = load_profile(file)

    for link in profile.links:
        assert link.bandwidth.peak <= profile.tiers[link.src].bandwidth


@every_file
def test_the_main_processor_computes_from_the_fastest_tier(file: Path) -> None:
    profile = load_profile(file)

    assert profile.main_compute.tier == profile.tier_names[0]
    for compute in profile.compute.values():
        assert compute.peak_of("bf16") > 0


@every_file
def test_energy_per_byte_rises_with_distance_or_is_close(file: Path) -> None:
    profile = load_profile(file)

    for name, tier in profile.tiers.items():
        assert 0 < tier.read_energy <= parse_energy_per_byte("110 pJ/bit"), name
        assert (tier.read_energy > parse_energy_per_byte("20 pJ/bit")) == (
            name in ("flash", "nvme")
        )


def test_flash_is_never_written_so_its_write_energy_is_not_claimed() -> None:
    for name in profile_names():
        for tier in ("flash", "nvme"):
            found = load_profile(name).tiers.get(tier)
            assert found is None or found.write_energy == 0


def test_the_a6000_of_the_paper() -> None:
    a6000 = load_profile("rtx-a6000")

    assert a6000.tiers["hbm"].bandwidth == parse_rate("768 GB/s")
    assert a6000.link("dram", "hbm").bandwidth.peak == parse_rate("25.1 GB/s")
    assert a6000.main_compute.peak_of("bf16") == 155 * 10**12


def test_qwen3_on_the_a6000_copies_for_144_ms_per_token() -> None:
    # arXiv 2603.19289: 48 layers of 8 experts of 9.437 MB; copies are 84-88 % of 164-172 ms.
    link = load_profile("rtx-a6000").link("dram", "hbm")
    expert = 3 * 2048 * 768 * 2

    assert 48 * 8 * (link.copy_ns(expert) - link.latency) // 10**6 == 144
    assert 0.84 * 164e6 <= 48 * 8 * link.copy_ns(expert) <= 0.88 * 172e6


def test_the_machine_that_slicemoe_models() -> None:
    xpu = load_profile("xpu-lpddr4-ufs31")
    dram, flash = xpu.tiers["dram"], xpu.tiers["flash"]

    assert dram.capacity == parse_bytes("8 GB")
    assert dram.bandwidth == parse_rate("104 Gbit/s")
    assert flash.bandwidth == xpu.links[0].bandwidth.peak == parse_rate("10 Gbit/s")
    assert dram.bandwidth * 10 == flash.bandwidth * 104  # 10.4 times
    assert round(flash.read_energy / dram.read_energy, 1) == 68.7
    assert xpu.main_compute.energy == 314
    assert xpu.main_compute.peak_of("int8") == 16_400_000_000_000


def test_desktop_nvme_has_three_tiers_and_two_links() -> None:
    desktop = load_profile("desktop-nvme")

    assert desktop.tier_names == ("hbm", "dram", "nvme")
    assert desktop.tiers["hbm"].capacity == parse_bytes("24 GiB")
    assert desktop.link("nvme", "dram").copy_ns(3 * 10**9) == 10**9 + 80_000


def test_the_storage_variants_of_the_phone_differ_in_storage_only() -> None:
    def without_storage(profile: Profile) -> dict[str, Any]:
        dump = profile.model_dump(mode="json")
        del dump["name"], dump["source"], dump["links"], dump["tiers"]["flash"]
        return dump

    variants = [
        load_profile(f"phone-sd8-elite{suffix}")
        for suffix in ("", "-mid-ufs", "-slow-ufs", "-sd-card")
    ]
    rates = [variant.links[0].bandwidth.peak for variant in variants]

    assert rates == [parse_rate(f"{r} GB/s") for r in ("2.5", "1.2", "0.7", "0.25")]
    assert all("a choice" in variant.links[0].source for variant in variants)
    assert all(without_storage(v) == without_storage(variants[0]) for v in variants)


def test_idle_power_of_the_h100_server() -> None:
    assert load_profile("h100-pcie5").static_power == (70 + 57) * 10**6
