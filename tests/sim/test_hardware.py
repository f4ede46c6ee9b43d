"""Hardware: what a profile must say, how long copies take, and how errors read."""

import pickle
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from moetier.sim.hardware import Compute, Profile, load_profile, profile_names
from moetier.sim.yaml_input import check, read_yaml
from moetier.traces.errors import InputError

TOY = """
name: toy
source: a test
tiers:
  hbm: {capacity: 24 GiB, bandwidth: 1008 GB/s, read_energy: 7.25 pJ/bit, source: a}
  dram: {capacity: 128 GiB, bandwidth: 60 GB/s, source: b}
links:
  - {src: dram, dst: hbm, bandwidth: 25 GB/s, latency: 10 us, energy: 5 pJ/bit, source: c}
compute:
  gpu: {tier: hbm, peak: {bf16: 165 TFLOP/s}, energy: 0.5 pJ/op, overhead: 2 us, source: d}
  cpu: {tier: dram, peak: 1 TFLOP/s, host_time_per_layer: 1 us, source: e}
static_power: 70 W
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def message(folder: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        load_profile(write(folder, text))
    return str(caught.value).removeprefix(f"{folder / 'mine.yaml'}: ")


def toy() -> Profile:
    return Profile.model_validate(yaml.safe_load(TOY))


def test_units_become_integers(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, TOY))

    assert profile == toy()
    assert profile.tiers["hbm"].capacity == 24 << 30
    assert profile.tiers["hbm"].read_energy == 58_000
    assert profile.tiers["dram"].bandwidth == 60 * 10**9
    assert profile.tiers["dram"].read_energy == profile.tiers["dram"].write_energy == 0
    assert profile.links[0].latency == 10_000
    assert profile.links[0].energy == 40_000
    assert profile.links[0].lanes == 1
    assert profile.compute["gpu"].overhead == 2000
    assert profile.compute["gpu"].energy == 500
    assert profile.compute["cpu"].host_time_per_layer == 1000
    assert profile.static_power == 70_000_000


def test_tiers_keep_their_order_and_the_first_processor_is_the_main_one() -> None:
    assert toy().tier_names == ("hbm", "dram")
    assert toy().main_compute is not None
    assert toy().main_compute.tier == "hbm"


def test_a_link_is_found_by_its_ends() -> None:
    profile = toy()

    assert profile.link("dram", "hbm") is profile.links[0]
    with pytest.raises(InputError, match="'toy' has no link hbm -> dram; known: dram -> hbm"):
        profile.link("hbm", "dram")


def test_a_profile_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        toy().name = "other"
    with pytest.raises(ValidationError, match="frozen"):
        toy().links[0].latency = 0


def test_the_peak_of_a_format() -> None:
    gpu, cpu = toy().compute["gpu"], toy().compute["cpu"]

    assert gpu.peak_of("bf16") == 165 * 10**12
    assert cpu.peak_of("bf16") == cpu.peak_of("int8") == 10**12
    with pytest.raises(InputError) as caught:
        gpu.peak_of("int8")
    assert str(caught.value) == (
        "no peak for 'int8' on the processor of tier 'hbm'; add it to its `peak`; known: bf16"
    )


def test_a_peak_for_any_other_format() -> None:
    compute = Compute.model_validate(
        {"tier": "hbm", "peak": {"any": "1 TOP/s", "int8": "2 TOPS"}, "source": "x"}
    )

    assert compute.peak_of("int8") == 2 * compute.peak_of("bf16") == 2 * 10**12


def test_contention_is_part_of_a_profile(tmp_path: Path) -> None:
    text = TOY + "contention: {compute_slowdown: 120 %, source: f}\n"
    profile = load_profile(write(tmp_path, text))
    dump = profile.model_dump(mode="json")

    assert toy().contention is None
    assert profile.contention is not None
    assert profile.contention.compute_slowdown == Fraction(6, 5)
    assert dump["contention"]["compute_slowdown"] == "120 %"
    assert Profile.model_validate(dump) == profile
    assert message(tmp_path, TOY + "contention: {compute_slowdown: 1.2, source: f}\n") == (
        "contention.compute_slowdown: expected a share such as '25 %', got 1.2"
    )
    assert "contention.source" in message(tmp_path, TOY + "contention: {compute_slowdown: 1 %}\n")


def test_what_is_dumped_reads_back_the_same() -> None:
    for profile in (toy(), load_profile("phone-ufs4"), load_profile("desktop-nvme")):
        text = yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False)

        assert Profile.model_validate(yaml.safe_load(text)) == profile


def test_a_dump_writes_a_plain_rate_and_a_plain_peak_as_they_were_given() -> None:
    dump = toy().model_dump(mode="json")

    assert dump["links"][0]["bandwidth"] == "25 GB/s"
    assert dump["compute"]["cpu"]["peak"] == "1 TOP/s"
    assert dump["compute"]["gpu"]["peak"] == {"bf16": "165 TOP/s"}


def test_a_profile_survives_a_trip_between_processes() -> None:
    profile = load_profile("phone-ufs4")
    profile.links[0].copy_ns(1 << 20, 2)

    assert pickle.loads(pickle.dumps(profile)) == profile


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "25 GB/s",
            "25e9",
            "links.0.bandwidth: expected a rate such as '25 GB/s', got '25e9'",
        ),
        (
            "25 GB/s",
            "25000000000",
            "links.0.bandwidth: expected a rate such as '25 GB/s', got 25000000000",
        ),
        ("1008 GB/s", "0 GB/s", "tiers.hbm.bandwidth: must be above zero, got 0"),
        ("25 GB/s", "0 GB/s", "links.0.bandwidth: must be above zero, got 0"),
        ("24 GiB", "0 GiB", "tiers.hbm.capacity: must be above zero, got 0"),
        ("1 TFLOP/s", "0 TFLOP/s", "compute.cpu.peak: must be above zero, got 0"),
        ("24 GiB", "-24 GiB", "tiers.hbm.capacity: a size cannot be negative, got '-24 GiB'"),
        ("25 GB/s", "-1 GB/s", "links.0.bandwidth: a rate cannot be negative, got '-1 GB/s'"),
        (
            "165 TFLOP/s",
            "165",
            "compute.gpu.peak.bf16: expected a compute rate such as '155 TFLOP/s', got 165",
        ),
        (
            "1 TFLOP/s",
            "1",
            "compute.cpu.peak: expected a compute rate such as '155 TFLOP/s', got 1",
        ),
        (
            "70 W",
            "70 J",
            "static_power: expected a power such as '70 W', got '70 J'; "
            "its units are uW, mW, W, kW, µW",
        ),
        (
            "{capacity: 24",
            "{capcity: 24",
            "tiers.hbm.capcity: unknown key; did you mean 'capacity'? "
            "known: source, capacity, bandwidth, read_energy, write_energy",
        ),
        (
            "compute:\n",
            "fans: 3\ncompute:\n",
            "fans: unknown key; known: "
            "name, source, tiers, links, compute, contention, static_power, notes, identity",
        ),
        ("source: a test\n", "", "source: this key is missing"),
        (", source: c", "", "links.0.source: this key is missing"),
        ("latency: 10 us", "lanes: 0", "links.0.lanes: Input should be greater than or equal to 1"),
        ("src: dram", "src: ram", "links.0.src: no tier 'ram'; its tiers are hbm, dram"),
        ("dst: hbm", "dst: gpu", "links.0.dst: no tier 'gpu'; its tiers are hbm, dram"),
        ("tier: hbm", "tier: vram", "compute.gpu.tier: no tier 'vram'; its tiers are hbm, dram"),
        ("dst: hbm", "dst: dram", "links.0: leads from 'dram' to itself; name two tiers"),
        (
            "src: dram, dst: hbm",
            "src: hbm, dst: dram",
            "links: none from 'dram' to the next faster tier 'hbm'; add one",
        ),
        (
            "60 GB/s",
            "2 TB/s",
            "tiers: 'dram' is faster than 'hbm'; list the fastest first",
        ),
        ("{bf16: 165 TFLOP/s}", "{}", "compute.gpu.peak: Dictionary should have at least 1 item"),
        (
            "static_power: 70 W",
            "static_power: 70 W\nname: again",
            "line 13: key 'name' is given twice; the first is on line 2; keep one",
        ),
        (
            "static_power: 70 W",
            "identity: {gpu: A, gpu: B}",
            "line 12: key 'gpu' is given twice; the first is on line 12; keep one",
        ),
        ("tiers:", "tiers: [", "line 6: not valid YAML: expected ',' or ']'"),
    ],
)
def test_an_error_names_the_key_the_value_and_the_way_out(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    assert TOY.count(old) >= 1

    assert message(tmp_path, TOY.replace(old, new, 1)).startswith(expected)


def test_a_link_given_twice(tmp_path: Path) -> None:
    row = next(line for line in TOY.splitlines() if "src: dram" in line)

    assert message(tmp_path, TOY.replace(row, f"{row}\n{row}")) == (
        "links.1: dram -> hbm is given twice; keep one"
    )


def test_a_misspelt_key_comes_before_the_key_it_leaves_missing(tmp_path: Path) -> None:
    table = "[{size: 1 MiB, rat: 2 GB/s}, {size: 1, rate: 2 GB/s}]"

    assert message(tmp_path, TOY.replace("25 GB/s", table)) == (
        "links.0.bandwidth.0.rat: unknown key; did you mean 'rate'? known: size, lanes, rate, "
        "repeats, spread"
    )


def test_how_many_errors_there_are(tmp_path: Path) -> None:
    text = TOY.replace("24 GiB", "24").replace("70 W", "70").replace("10 us", "10")

    assert message(tmp_path, text) == (
        "tiers.hbm.capacity: expected a size such as '24 GiB', got 24; and 2 more in this file"
    )


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("[]", "links.0.bandwidth: a table needs at least one row of size, lanes and rate"),
        ("[{size: 1 MiB, rate: 25e9}]", "links.0.bandwidth.0.rate: expected a rate such as"),
        ("[{size: 0 B, rate: 1 GB/s}]", "links.0.bandwidth.0.size: must be above zero, got 0"),
        ("[{size: 1 B, rate: 0 GB/s}]", "links.0.bandwidth.0.rate: must be above zero, got 0"),
        ("[{size: 1 B, rate: 1 B/s, lanes: 0}]", "links.0.bandwidth.0.lanes: Input should be"),
        (
            "[{size: 1 KiB, rate: 1 B/s}, {size: 1024 B, rate: 2 B/s}]",
            "links.0.bandwidth: two rows for 1024 B with 1 lanes; keep one",
        ),
        ("{size: 1 B, rate: 1 B/s}", "links.0.bandwidth: expected a rate such as '25 GB/s', got {"),
    ],
)
def test_errors_in_a_table_name_the_row(tmp_path: Path, table: str, expected: str) -> None:
    assert message(tmp_path, TOY.replace("25 GB/s", table)).startswith(expected)


def test_a_file_that_is_not_a_mapping(tmp_path: Path) -> None:
    keys = (
        "its keys are name, source, tiers, links, compute, contention, static_power, notes, "
        "identity"
    )

    assert message(tmp_path, "") == f"expected a mapping of keys, got NoneType; {keys}"
    assert message(tmp_path, "- a") == f"expected a mapping of keys, got list; {keys}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(InputError, match=r"binary\.yaml: is not a text file in UTF-8"):
        load_profile(binary)
    with pytest.raises(InputError, match=r"none\.yaml: cannot be read: No such file"):
        load_profile(str(tmp_path / "none.yaml"))
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load_profile(tmp_path)
    assert message(tmp_path, "a: \x07").startswith("not valid YAML: ")
    assert message(tmp_path, "{[1]: 2}").startswith("line 1: not valid YAML: ")


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        load_profile("rtx-a600")

    assert str(caught.value) == (
        "unknown hardware 'rtx-a600'; did you mean 'rtx-a6000'? "
        f"known: {', '.join(profile_names())}; or give the path of a YAML file"
    )
    with pytest.raises(InputError, match="unknown hardware 'abacus'; known: "):
        load_profile("abacus")


def test_unknown_keys_below_what_the_schema_describes() -> None:
    class Inner(BaseModel, extra="forbid"):
        a: int = 0

    class Outer(BaseModel, extra="forbid"):
        one: Inner | None = None
        many: dict[str, list[Inner]] = {}
        rows: tuple[Inner, ...] = ()
        plain: list[int] = []

    for data, expected in [
        ({"one": {"b": 1}}, "one.b: unknown key; known: a"),
        ({"many": {"x": [{}, {"aa": 1}]}}, "many.x.1.aa: unknown key; did you mean 'a'? known: a"),
        ({"rows": [{"b": 1}]}, "rows.0.b: unknown key; known: a"),
        ({"plain": ["x"]}, "plain.0: Input should be a valid integer, unable to parse string"),
    ]:
        with pytest.raises(InputError) as caught:
            check(Outer, data, where="here")
        assert str(caught.value).startswith(f"here: {expected}")


def test_yaml_aliases_and_merges_still_work(tmp_path: Path) -> None:
    text = "base: &base {a: 1, b: 2}\nmine: {<<: *base, b: 3}\nlist: [*base, *base]\n"

    read = read_yaml(write(tmp_path, text))

    assert read["mine"] == {"a": 1, "b": 3}
    assert read["list"] == [{"a": 1, "b": 2}] * 2


# --- time -------------------------------------------------------------------------------------
