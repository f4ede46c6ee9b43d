"""This module makes toy machines, models and traces with round numbers, for tests.

A rate of 1 GB/s is one byte per nanosecond, so in a toy a copy of 40 bytes takes 40 ns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeVar

import numpy as np

from moetier.sim.hardware import Profile
from moetier.sim.machine.base import Span
from moetier.sim.machine.simulated import SimMachine
from moetier.sim.plan import LayerPlan
from moetier.sim.policy.seams import SEAMS
from moetier.sim.records import Columns
from moetier.sim.run import MachineFactory, Result, Setting, simulate
from moetier.traces.batch import DECODE, PREFILL
from moetier.traces.columns import PAD, build
from moetier.traces.formats import bit_slice_bytes
from moetier.traces.geometry import Geometry
from moetier.traces.io import ArrayTrace
from moetier.traces.schema import Header, Provenance
from moetier.traces.synthetic import Synthetic

BITS = ((4, 2), (8, 1))
"""Of cases with bit slices: an MSB slice of 17 and an LSB slice of 5 bytes, or of 16 and 17."""

T = TypeVar("T")
Token = Sequence[Sequence[int]]  # the experts of each layer


def toy_header(
    expert_bytes: int | Sequence[int] = 40,
    *,
    layers: int = 1,
    n_experts: int = 4,
    top_k: int = 1,
    dense_bytes: int | Sequence[int] = 10,
    **sizes: Any,
) -> Header:
    """Return a model whose stored sizes are given; *sizes* go to the geometry."""
    each = [expert_bytes] * layers if isinstance(expert_bytes, int) else list(expert_bytes)
    dense = [dense_bytes] * layers if isinstance(dense_bytes, int) else list(dense_bytes)
    return Header(
        geometry=Geometry(
            name="toy",
            n_experts=n_experts,
            top_k=top_k,
            moe_layers=list(range(layers)),
            n_layers=layers,
            **sizes,
        ),
        weights="bf16",
        expert_bytes={"bf16": each},
        dense_bytes=dense,
        provenance=Provenance(kind="synthetic"),
    )


def toy_trace(
    header: Header, decode: Sequence[Token | Sequence[Token]], prefill: Sequence[Token] = ()
) -> ArrayTrace:
    """Return a trace of one *prefill* step, one request, and then one step per entry of *decode*.

    A token is a list of experts per layer; a decode step is one token, or a list of tokens in
    lockstep.
    """
    layers, k = header.geometry.n_moe_layers, header.geometry.top_k
    steps: list[tuple[int, list[Token]]] = [(PREFILL, list(prefill))] if prefill else []
    steps += [(DECODE, _tokens(step)) for step in decode]
    rows = []
    for step, (phase, tokens) in enumerate(steps):
        for layer in range(layers):
            for at, token in enumerate(tokens):
                position = at if phase == PREFILL else len(prefill) + step - bool(prefill)
                experts = [*token[layer], *[PAD] * (k - len(token[layer]))]
                request = 0 if phase == PREFILL else at
                rows.append((request, phase, step, position, layer, experts))
    names = ("request", "phase", "step", "position", "moe_layer", "experts")
    columns: dict[str, Any] = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    return ArrayTrace(header, [build(header, **columns)])


def _tokens(step: Any) -> list[Token]:
    return [step] if isinstance(step[0][0], int) else list(step)


def toy_profile(
    *,
    bandwidth: Any = "1 GB/s",
    latency: str = "0 ns",
    lanes: int = 1,
    three: Mapping[str, Any] | None = None,
    down: Mapping[str, Any] | None = None,
    hbm: Mapping[str, Any] | None = None,
    gpu: Mapping[str, Any] | None = None,
    cpu: Mapping[str, Any] | None = None,
    **machine: Any,
) -> Profile:
    """Return a machine of hbm over dram, and over nvme where *three* describes that link.

    The arguments describe the link from dram to hbm; *down* is the one back; *hbm*, *gpu* and *cpu*
    override fields of that tier and those processors. Everything runs at a byte or an operation per
    nanosecond.
    """
    tier = {"capacity": "1 GB", "bandwidth": "1 GB/s", "source": "a toy"}
    link = {"bandwidth": "1 GB/s", "source": "a toy"}
    processor = {"peak": "1 GOP/s", "source": "a toy"}
    tiers: dict[str, Any] = {"hbm": tier | dict(hbm or {}), "dram": tier}
    up = {"src": "dram", "dst": "hbm", "latency": latency, "lanes": lanes, "source": "a toy"}
    links: list[Any] = [up | {"bandwidth": bandwidth}]
    if three is not None:
        tiers["nvme"] = tier
        links.append(link | {"src": "nvme", "dst": "dram"} | dict(three))
    if down is not None:
        links.append(link | {"src": "hbm", "dst": "dram"} | dict(down))
    tiers["dram"] = tiers["dram"] | dict(machine.pop("dram", {}))
    return Profile.model_validate(
        {
            "name": "toy",
            "source": "a toy",
            "tiers": tiers,
            "links": links,
            "compute": {
                "gpu": processor | {"tier": "hbm"} | dict(gpu or {}),
                "cpu": processor | {"tier": "dram"} | dict(cpu or {}),
            },
            **machine,
        }
    )


@dataclass
class Run:
    """Everything that can be seen of a run."""

    result: Result
    records: Columns
    plans: list[LayerPlan]
    spans: list[Span]

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the metrics by name."""
        return self.result.metrics

    def column(self, name: str) -> list[int]:
        """Return one column of the records."""
        found: list[int] = self.records[name].tolist()
        return found

    def links(self, src: str = "") -> list[Span]:
        """Return what links did, by start; those from tier *src*, or all."""
        found = [span for span in self.spans if span.lane.startswith(f"link {src}")]
        return sorted(found, key=lambda span: (span.start, span.end))

    @property
    def digest(self) -> str:
        """Return the sha256 of the records."""
        found = sha256()
        for name, values in self.records.items():
            found.update(name.encode() + values.tobytes())
        return found.hexdigest()


def run(
    trace: ArrayTrace | Synthetic,
    profile: Profile,
    policy: str | Mapping[str, Any] = "on-demand",
    *,
    machine: MachineFactory = SimMachine,
    watch: bool = True,
    popularity: Any = None,
    **setting: Any,
) -> Run:
    """Simulate and keep everything; *watch*: also what occupied links and processors."""
    blocks: list[Columns] = []
    plans: list[LayerPlan] = []
    spans: list[Span] = []
    result = simulate(
        trace,
        Setting(profile, policy, **setting),
        sinks=[blocks.append],
        on_plan=plans.append,
        on_span=spans.append if watch else None,
        machine=machine,
        popularity=popularity,
    )
    records = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    return Run(result, records, plans, spans)


@dataclass(frozen=True)
class Case:
    """A small run: a trace, a machine and a policy that fit together."""

    trace: ArrayTrace
    profile: Profile
    policy: dict[str, Any]
    setting: dict[str, Any] = field(default_factory=dict)

    def run(self, **how: Any) -> Run:
        """Run it."""
        return run(self.trace, self.profile, self.policy, **(self.setting | how))


def make_case(pick: Callable[[Sequence[Any]], Any], **fixed: Any) -> Case:
    """Return a case; *pick* chooses from a list, *fixed* settles choices by name.

    Sizes and times are a few bytes and nanoseconds, so that many things happen in the same one.
    """

    def choose(name: str, options: Sequence[T]) -> T:
        chosen: T = fixed.pop(name) if name in fixed else pick(options)
        return chosen

    layers = choose("layers", [1, 2, 3, 4])
    n_experts = choose("n_experts", [2, 3, 4, 6])
    top_k = choose("top_k", range(1, min(3, n_experts) + 1))
    bits = choose("bits", [None, None, *BITS])
    one_size = choose("one_size", [True, False])
    each = [pick([4, 6, 8])] * layers if one_size else [pick([3, 4, 8]) for _ in range(layers)]
    sizes = {} if bits is None else {"hidden": 2, "moe_intermediate": 2}
    header = toy_header(
        each, layers=layers, n_experts=n_experts, top_k=top_k, dense_bytes=pick([0, 1, 4, 9]),
        **sizes,
    )  # fmt: skip
    if bits is not None:
        each = [sum(bit_slice_bytes(header.geometry, *bits, group=2))] * layers
        header = header.model_copy(update={"expert_bytes": {"bf16": each}})
    synthetic = Synthetic(
        header.geometry,
        prompt=choose("prompt", [0, 1, 4]),
        tokens=choose("tokens", [1, 2, 5, 9, 9]),
        requests=choose("requests", [1, 1, 2, 3]),
        skew=pick([0.0, 1.0]),
        reuse=pick([0.0, 0.4, 0.8]),
        seed=pick(range(100)),
    )
    tiers = choose("tiers", [2, 3])
    exclusive = choose("exclusive", [False, True]) if tiers == 3 else False
    three = {"bandwidth": _toy_rate(pick), "lanes": pick([1, 2, 3])} if tiers == 3 else None
    profile = toy_profile(
        bandwidth=_toy_rate(pick),
        latency=pick(["0 ns", "3 ns", "40 ns"]),
        lanes=choose("lanes", [1, 1, 2, 3, 4]),
        three=three,
        down={"bandwidth": _toy_rate(pick), "lanes": pick([1, 2])} if exclusive else None,
        gpu={"overhead": pick(["0 ns", "2 ns"]), "host_time_per_layer": pick(["0 ns", "1 ns"])},
        cpu={"overhead": pick(["0 ns", "7 ns"])},
        contention=_toy_contention(choose("slowdown", [None, None, None, "20 %", "250 %"])),
    )
    least, total = top_k * max(each), n_experts * sum(each)
    room = {"hbm": min(total, least + choose("room", [0, 4, 12, 24, 40, 1000]))}
    if tiers == 3:
        room["dram"] = min(total, least + pick([0, 8, 16, 1000]))
    sliced = {"kind": "bit-sliced", "bits": bits, "theta": pick([0.3, 0.6]), "group": 2}
    policy = {
        "precision": "full" if bits is None else sliced,
        "eviction": choose("eviction", whole_evictions() if bits is None else sliced_evictions()),
        "prefetch": choose("prefetch", prefetches()),
        "miss": choose("miss", misses(sliced=bits is not None)),
        "warmup": choose("warmup", ["none", "none", *SEAMS["warmup"].names()]),
    }
    setting = {
        "capacity": room,
        "exclusive": exclusive,
        "overlap": choose("overlap", [False, True]),
        "seed": pick(range(3)),
    }
    assert not fixed, f"unknown choices {sorted(fixed)}"
    return Case(ArrayTrace.of(_stored(header, synthetic)), profile, policy, setting)


def whole_evictions() -> list[str]:
    """Return the eviction policies that work on whole experts."""
    seam = SEAMS["eviction"]
    return [name for name in seam.names() if not getattr(seam.get(name), "needs_bit_slices", False)]


def sliced_evictions() -> list[Any]:
    """Return the eviction policies that cases of bit slices choose from."""
    aware = "slice-aware"
    return [*whole_evictions(), aware, aware, {"kind": aware, "keep_lsb": False}]


def misses(*, sliced: bool) -> list[Any]:
    """Return the ways to miss that cases choose from; some are about bit slices."""
    without = {"kind": "degrade", "after": 1}
    rates = [without | {"miss_rate": "20 %"}, without | {"miss_rate": "40 %", "per": "byte"}]
    whole = ["fetch", "fetch", "cpu", "skip", {"kind": "skip", "keep": 1}]
    return [*whole, "degrade", "degrade", *rates] if sliced else whole


def prefetches() -> list[Any]:
    """Return the prefetch policies that cases choose from."""
    previous = {"kind": "previous-token"}
    return [
        "none",
        "oracle",
        {"kind": "oracle", "depth": 3},
        *[previous | {"depth": d, "cancel": c} for d in (1, 2, 3) for c in (False, True)],
    ]


def busy_choices() -> list[dict[str, Any]]:
    """Return choices under which prefetches queue up, leave the plan and are withdrawn.

    Without them that happens in a case of thirty; with them in one of three.
    """
    room = {"layers": 4, "tokens": 9, "n_experts": 6, "top_k": 2, "room": 24}
    far = {"kind": "previous-token", "depth": 3}
    return [
        room | {"prefetch": far},
        room | {"prefetch": far | {"cancel": True}, "requests": 1},
        room | {"prefetch": far | {"cancel": True}, "tiers": 3},
    ]


def _toy_rate(pick: Callable[[Sequence[Any]], Any]) -> Any:
    """Return a constant rate, or a table over sizes and lanes."""
    table = [
        {"size": f"{size} B", "lanes": lanes, "rate": f"{rate} MB/s"}
        for size, lanes, rate in [(2, 1, 400), (8, 1, 900), (2, 2, 700), (8, 2, 1500), (8, 4, 2100)]
    ]
    return pick(["1 GB/s", "2 GB/s", "500 MB/s", "100 MB/s", "100 MB/s", table])


def _toy_contention(slowdown: str | None) -> dict[str, str] | None:
    return {"compute_slowdown": slowdown, "source": "a toy"} if slowdown else None


def _stored(header: Header, source: Synthetic) -> Any:
    """Return the rows of *source* under *header*, which says what a model's parts weigh."""
    return ArrayTrace(header, list(source.columns()))
