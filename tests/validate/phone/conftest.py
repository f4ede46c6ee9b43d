"""Fixtures of the phone tests: a folder in the recorded format, of a model nobody published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moetier.sim.hardware import Profile
from moetier.traces.schema import Header
from moetier.validate.phone.predict import open_routing

LAYERS, EXPERTS, TOP_K = 2, 4, 2
EXPERT_BYTES, DENSE_BYTES = 3 * (1 << 20), 1 << 20
READ = EXPERT_BYTES + 3 * 4096  # three reads, each a page longer

WriteRun = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording of 2 prompt tokens and 9 decode steps: token t uses experts t and t + 1."""
    lines = [
        "# route_trace v1",
        "# model=Tiny-Q4_0.gguf arch=tiny "
        f"n_layer={LAYERS} n_expert={EXPERTS} n_expert_used={TOP_K}",
        *(
            f"# layer={layer} expert_bytes={EXPERT_BYTES} dense_bytes={DENSE_BYTES}"
            for layer in range(LAYERS)
        ),
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes",
    ]
    for step in range(11):
        for layer in range(LAYERS):
            for slot in range(TOP_K):
                expert = (step + slot) % EXPERTS
                lines.append(f"0,{int(step > 1)},{step},{layer},{slot},{expert},0.5,0,0")
    (tmp_path / "route.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "runs").mkdir()
    return tmp_path


@pytest.fixture
def header(folder: Path) -> Header:
    """The model of that recording."""
    return open_routing(folder).header


@pytest.fixture
def write_run(folder: Path) -> WriteRun:
    """Write a run of equal tokens, or of the *rows* given, under a name."""

    def write(
        name: str,
        rows: Sequence[Sequence[float]] = ((20.0, 8.0, 10.0, READ, 4.0, 6.0),) * 6,
        columns: str = "wall_ms,io_ms,compute_ms,read_bytes,stall_ms,mgmt_ms",
        preamble: str = "",
    ) -> Path:
        path = folder / "runs" / f"{name}.csv"
        body = "\n".join(
            ",".join(str(value) for value in (i, *row)) for i, row in enumerate(rows, start=1)
        )
        path.write_text(f"{preamble}step,{columns}\n{body}\n# summary tokens=6 n_prompt=7\n")
        return path

    return write


@pytest.fixture
def phone() -> Profile:
    """A machine of round numbers: 1 MiB reads take longer per lane the more lanes are busy."""
    return Profile.model_validate(
        {
            "name": "toy-phone",
            "source": "made up",
            "tiers": {
                "dram": {"capacity": "1 GiB", "bandwidth": "1 GB/s", "source": "made up"},
                "flash": {"capacity": "64 GiB", "bandwidth": "1 GB/s", "source": "made up"},
            },
            "links": [
                {
                    "src": "flash",
                    "dst": "dram",
                    "lanes": 4,
                    "source": "made up",
                    "bandwidth": [
                        {"size": "1 MiB", "lanes": 1, "rate": "100 MiB/s"},
                        {"size": "1 MiB", "lanes": 2, "rate": "160 MiB/s"},
                        {"size": "1 MiB", "lanes": 4, "rate": "200 MiB/s"},
                    ],
                }
            ],
            "compute": {"cpu": {"tier": "dram", "peak": "1 TOP/s", "source": "made up"}},
        }
    )
