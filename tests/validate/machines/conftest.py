"""A small model whose slices are in a file, and a machine described by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from moetier.sim.hardware import Profile
from moetier.sim.layout import Layout
from moetier.sim.run import Setting
from moetier.traces.geometry import Geometry
from moetier.traces.synthetic import Synthetic

LATENCY, RATE = 50_000, 100_000_000  # ns, bytes/s of each lane


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.name.startswith("moetier")]

    assert left == []


@pytest.fixture(scope="session")
def geometry() -> Geometry:
    """Experts of 12 KiB in bf16."""
    return Geometry(
        name="small",
        n_experts=8,
        top_k=2,
        moe_layers=[0, 1, 2],
        n_layers=3,
        hidden=64,
        moe_intermediate=32,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=256,
    )


@pytest.fixture(scope="session")
def source(geometry: Geometry) -> Synthetic:
    return Synthetic(geometry, prompt=6, tokens=12, skew=1.0, reuse=0.4, seed=3)


@pytest.fixture(scope="session")
def profile() -> Callable[..., Profile]:
    """Make a profile of memory over flash whose link is what lanes are paced to."""

    def make(lanes: int = 1, **more: Any) -> Profile:
        block = {"source": "by hand"}
        rates = [
            {"size": "4 KiB", "lanes": n, "rate": f"{RATE * n} B/s"} for n in range(1, lanes + 1)
        ]
        link = {"src": "flash", "dst": "dram", "bandwidth": rates, "latency": f"{LATENCY} ns"}
        return Profile.model_validate(
            {
                "name": "by hand",
                "source": "by hand",
                "tiers": {
                    "dram": block | {"capacity": "1 GiB", "bandwidth": "10 GB/s"},
                    "flash": block | {"capacity": "4 GiB", "bandwidth": "1 GB/s"},
                },
                "links": [block | link | {"lanes": lanes}],
                "compute": {"cpu": block | {"tier": "dram", "peak": "10 GOP/s"}},
                **more,
            }
        )

    return make


@pytest.fixture(scope="session")
def setting(profile: Callable[..., Profile]) -> Callable[..., Setting]:
    """Make a setting; *share* is the capacity in percent of all experts."""

    def make(policy: Any = "on-demand", share: int = 50, lanes: int = 1, **more: Any) -> Setting:
        return Setting(profile(lanes), policy, {"dram": Fraction(share, 100)}, **more)

    return make


@pytest.fixture
def layout() -> Layout:
    """Six slices of three sizes, none a whole number of pages."""
    return Layout([[5000], [3000], [10_000]], 2)


@pytest.fixture(scope="session")
def packed(
    tmp_path_factory: pytest.TempPathFactory, source: Synthetic, setting: Callable[..., Setting]
) -> Path:
    from moetier.validate.machines.run import pack_synthetic

    path = tmp_path_factory.mktemp("slices") / "small.slices"
    pack_synthetic(path, source, setting(), seed=5)
    return path
