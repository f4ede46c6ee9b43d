"""The energy counter is read through NVML where that is there, and is silent where it is not."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from moetier.validate.machines.cuda.nvml import Counter


class NVMLError(Exception):
    """What the package raises."""


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package that answers, and notes what it was asked."""
    made: Any = ModuleType("pynvml")
    made.NVMLError, made.asked, made.broken = NVMLError, [], set()

    def answer(name: str, value: Any) -> None:
        def call(*given: Any) -> Any:
            made.asked.append((name, *given))
            if name in made.broken:
                raise NVMLError(name)
            return value

        setattr(made, name, call)

    answer("nvmlInit", None)
    answer("nvmlShutdown", None)
    answer("nvmlDeviceGetHandleByUUID", "handle")
    answer("nvmlDeviceGetTotalEnergyConsumption", 1234)
    answer("nvmlDeviceGetMaxPcieLinkGeneration", 5)
    answer("nvmlDeviceGetMaxPcieLinkWidth", 16)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_millijoules_are_given_in_microjoules_of_the_right_gpu(nvml: Any) -> None:
    counter = Counter("0ddba11")

    assert counter.energy() == 1_234_000
    assert counter.link() == "gen 5 x16"
    assert ("nvmlDeviceGetHandleByUUID", "GPU-0ddba11") in nvml.asked

    counter.close()
    counter.close()

    assert [name for name, *_ in nvml.asked].count("nvmlShutdown") == 1
    assert (counter.energy(), counter.link()) == (None, None)


def test_an_id_with_its_prefix_is_taken_as_it_is(nvml: Any) -> None:
    Counter("GPU-1")

    assert ("nvmlDeviceGetHandleByUUID", "GPU-1") in nvml.asked


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_where_nvml_cannot_be_opened_nothing_counts(call: str, nvml: Any) -> None:
    nvml.broken.add(call)
    counter = Counter("1")

    assert (counter.energy(), counter.link()) == (None, None)


def test_a_gpu_without_a_counter_has_a_link(nvml: Any) -> None:
    nvml.broken.add("nvmlDeviceGetTotalEnergyConsumption")
    counter = Counter("1")

    assert counter.energy() is None
    assert counter.link() == "gen 5 x16"

    nvml.broken.add("nvmlDeviceGetMaxPcieLinkWidth")

    assert counter.link() is None


def test_without_the_package_nothing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    counter = Counter("1")

    assert (counter.energy(), counter.link()) == (None, None)
    counter.close()
