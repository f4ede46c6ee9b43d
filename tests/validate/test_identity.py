"""A calibrated profile is refused on another machine, and what differs is named."""

import os
import platform
from pathlib import Path
from typing import Any

import pytest

from moetier.sim.hardware import Profile
from moetier.sim.testing import toy_profile
from moetier.traces.errors import InputError
from moetier.validate.identity import CUDA, DISK, READERS, UNCOMPARED, check_identity, identity


def profile_of(found: dict[str, str] | None) -> Profile:
    return toy_profile(identity=found)


def test_a_machine_is_itself(tmp_path: Path) -> None:
    found = identity(DISK, tmp_path)

    assert {"cpu", "cores", "os", "python", "date"} <= set(found)
    assert int(found["cores"]) >= 1
    check_identity(profile_of(found), tmp_path)


def test_what_is_asked_can_be_read() -> None:
    assert set(CUDA) == set(READERS)
    assert not set(UNCOMPARED) & set(READERS)


@pytest.mark.parametrize("fact", ["cpu", "cores", "os", "python", "threads"])
def test_another_machine_is_refused_by_name(fact: str, tmp_path: Path) -> None:
    found = identity(DISK, tmp_path)

    with pytest.raises(InputError) as caught:
        check_identity(profile_of(found | {fact: "another"}), tmp_path)

    assert str(caught.value) == (
        f"toy: was measured on another machine: {fact} is {found[fact]} here and was another; "
        "measure this one with `moetier calibrate`, or simulate without running"
    )


def test_every_difference_is_named(tmp_path: Path) -> None:
    found = identity(DISK, tmp_path) | {"cpu": "6502", "cores": "0"}

    with pytest.raises(InputError, match=r"was 6502; cores is .* and was 0"):
        check_identity(profile_of(found), tmp_path)


def test_a_fact_that_is_gone_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = identity(DISK, tmp_path) | {"gpu": "a GPU"}
    monkeypatch.setitem(READERS, "gpu", lambda _: None)

    with pytest.raises(InputError, match="gpu is unknown here and was a GPU"):
        check_identity(profile_of(found), tmp_path)


def test_the_day_of_the_measurement_may_differ(tmp_path: Path) -> None:
    check_identity(profile_of(identity(DISK, tmp_path) | {"date": "1999-12-31"}), tmp_path)


def test_what_the_caller_knows_goes_first(tmp_path: Path) -> None:
    found = identity(DISK, tmp_path) | {"threads": "77", "format": "bf16"}
    check_identity(profile_of(found), tmp_path, {"threads": "77"})
    check_identity(profile_of(found), tmp_path, {"threads": "77", "format": "bf16"})

    with pytest.raises(InputError, match="format is int8 here and was bf16"):
        check_identity(profile_of(found), tmp_path, {"threads": "77", "format": "int8"})


def test_a_profile_of_a_data_sheet_is_refused() -> None:
    with pytest.raises(InputError, match="toy: does not say on which machine it was measured"):
        check_identity(profile_of(None))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = {"file system": "ext4"}

    with pytest.raises(InputError, match="nowhere: cannot be read"):
        check_identity(profile_of(found), tmp_path / "nowhere")


def test_the_file_system_is_the_one_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two mounts of one device: the later one hides the earlier."""
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    rows = [
        "20 1 0:99 / /elsewhere rw - tmpfs none rw",
        f"21 1 {number} / / rw shared:1 - ext4 /dev/first rw",
        f"22 1 {number} / /mnt rw - xfs /dev/second rw",
        "23 1 0:98 / /proc rw - proc none rw",
    ]
    real = Path.read_text

    def read(path: Path, *args: Any, **more: Any) -> str:
        return "\n".join(rows) if str(path) == "/proc/self/mountinfo" else real(path, *args, **more)

    monkeypatch.setattr(Path, "read_text", read)
    found = identity(("file system", "device"), tmp_path)

    assert (found["file system"], found["device"]) == ("xfs", "/dev/second")


def test_a_system_that_says_nothing_leaves_facts_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(platform, "processor", lambda: "")
    found = identity(("cpu", "memory", "file system", "device", "driver"), tmp_path)

    assert set(found) == {"date"}
