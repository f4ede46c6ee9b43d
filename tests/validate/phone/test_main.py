"""`python -m moetier.validate.phone` prints tables or JSON, and says by its status how it went."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from moetier.sim.hardware import Profile, load_profile
from moetier.validate.phone.__main__ import as_yaml, main

READ = 3 * (1 << 20) + 3 * 4096
Write = Callable[..., Path]


@pytest.fixture
def mine(tmp_path: Path, phone: Profile) -> str:
    path = tmp_path / "toy-phone.yaml"
    path.write_text(as_yaml(phone))
    return str(path)


@pytest.fixture
def fittable(folder: Path, write_run: Write) -> Path:
    rows = [(99.0, 20.0 * n, 40.0 + n, READ * n, 0.0, 0.0) for n in (1, 2, 3, 4, 2, 3)]
    for lanes in (1, 2, 4):
        write_run(f"k2_c9_l{lanes}", rows)
    return folder


def test_a_written_profile_reads_back_the_same(mine: str, phone: Profile) -> None:
    assert load_profile(mine) == phone
    assert Path(mine).read_text().startswith("# Written by `python -m moetier.validate.phone fit")
    assert "host_time_per_layer" not in Path(mine).read_text()


def test_the_table_has_every_run_and_what_is_left(
    folder: Path, write_run: Write, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("k1_c9_l4_ov")
    write_run("k2_c12_l4", [(20.0, 8.0, 12.0, 2 * READ, 0.0, 0.0)] * 6)

    status = main(["predict", str(folder), "--profile", mine, "--bar", "99"])

    shown = capsys.readouterr().out
    assert status == 0
    assert shown.count("k1_c9_l4_ov") == shown.count("k2_c12_l4") == 2
    assert "levels alone" in shown
    assert "error on wall above 9900%: none" in shown
    assert "over 2 runs: median io error" in shown


def test_json_is_all_that_is_printed(
    folder: Path, write_run: Write, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("k1_c9_l4_ov")

    main(["predict", str(folder), "--profile", mine, "--json"])

    told = json.loads(capsys.readouterr().out)
    assert told["profile"] == "toy-phone"
    (run,) = told["runs"]
    assert run["given"] == {"compute_ms": 10.0, "mgmt_ms": 6.0}
    assert run["measured"] == {"io": 8.0, "stall": 4.0, "wall": 20.0}
    for name in ("predicted", "own", "given_bytes"):
        assert set(run[name]) == {"io", "stall", "wall"}
    assert told["overall"]["median_wall_error"] == abs(run["error"]["wall"])
    assert told["met"] is (told["overall"]["median_wall_error"] <= 0.12)


def test_a_missed_bar_is_status_1(
    folder: Path, write_run: Write, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run("k1_c9_l4_ov", [(999.0, 8.0, 10.0, READ, 4.0, 6.0)] * 6)

    assert main(["predict", str(folder), "--profile", mine]) == 1
    assert "error on wall above 12%: k1_c9_l4_ov" in capsys.readouterr().out


def test_reads_per_expert_and_the_seed_matter(
    folder: Path, write_run: Write, mine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(20.0, 8.0, 10.0, READ * n, 4.0, 6.0) for n in (1, 2, 1, 2, 3, 2)]
    write_run("k4_c3_l4_ov", rows)
    asked = ["predict", str(folder), "--profile", mine, "--bar", "99", "--json"]

    def wall(*more: str) -> float:
        main([*asked, *more])
        return float(json.loads(capsys.readouterr().out)["runs"][0]["predicted"]["wall"])

    assert wall() == wall("--seed", "0")
    assert wall("--reads", "1") > wall()  # one lane alone, where three share the work
    assert len({wall("--seed", str(seed)) for seed in range(4)}) > 1


def test_a_fit_is_written_and_told(
    fittable: Path, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new.yaml"
    asked = ["fit", str(fittable), "--base", mine, "--top-k", "2", "--name", "new"]

    assert main([*asked, "--out", str(out)]) == 0
    assert "factors on the flash table, by lanes: 1:" in capsys.readouterr().out

    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["io_ms"]) == {"k2_c9_l1", "k2_c9_l2", "k2_c9_l4"}
    assert Profile.model_validate(told["profile"]) == load_profile(out)
    assert yaml.safe_load(out.read_text())["name"] == "new"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["predict", "FOLDER"], "no runs/"),
        (["predict", "FOLDER", "--profile", "no-such"], "unknown hardware 'no-such'"),
        (["predict", "nowhere"], "route.csv: no such file"),
        (["fit", "FOLDER"], "no runs/"),
    ],
)
def test_bad_input_is_status_2(
    folder: Path, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(folder) if word == "FOLDER" else word for word in arguments]

    assert main(asked) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ")
    assert problem in told.err
    assert told.out == ""
