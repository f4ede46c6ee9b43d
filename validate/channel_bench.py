"""This module measures the channel reader's compiled kernel beside a dense MoE block.

One block with the shape of a published model and random weights, far larger than any cache; one
thread. Reader and dense blocks run in turn in the same process, every repeat on tokens and experts
that none of them saw just before; all of them see the same draws. The dense block is the fastest of
several: torch's matrix products in bfloat16 and float32, on the experts routed to, and the same
compiled code with every channel and no screening.

    python -m moetier.validate.channel_bench --model qwen3-30b-a3b
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry, load_geometry
from moetier.validate.numerics.channels.experts import ChannelExperts
from moetier.validate.numerics.channels.gating import Gating
from moetier.validate.numerics.channels.keep import TopK
from moetier.validate.numerics.channels.reads import Reads, batch_reads
from moetier.validate.numerics.channels.sketch import ChannelSettings, Sketch, make_sketch
from moetier.validate.numerics.experts import ExpertMatrices

PUBLISHED = {1: "1.60-1.90"}
PUBLISHED_LARGER = "up to 2.69"
"""MoE-block speed-ups over an optimised GPU engine, by batch (Kim & Hwang)."""

Row = dict[str, Any]
Step = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    geometry: Geometry
    batches: tuple[int, ...] = (1, 8, 32)
    reads: tuple[float, ...] = (0.13, 0.178)
    rank: int = 32
    repeats: int = 15
    seed: int = 0
    union: bool = False  # every token computes what any token of the batch keeps


def bench(plan: Plan) -> list[Row]:
    """Return one row per batch and target reads; raises `InputError` where numba is missing."""
    # Importing the kernel takes numba, which is optional.
    from moetier.validate.numerics.channels.kernel import ChannelKernel

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        experts = random_experts(plan.geometry, plan.seed)
        settings = ChannelSettings(rank=plan.rank, seed=plan.seed)
        channels = ChannelExperts.build(experts, settings, _sketch(experts, settings))
        kernel = ChannelKernel.of(channels, Gating())
        cost = channels.cost()
        kept = {reads: cost.kept(reads) for reads in plan.reads}
        dense: dict[str, Step] = {
            "torch bfloat16": torch_block(experts, torch.bfloat16),
            "torch float32": torch_block(experts, torch.float32),
            "compiled bfloat16": kernel.dense,
        }
        rows = []
        for batch in plan.batches:
            masks: dict[float, list[tuple[Tensor, Tensor]]] = {reads: [] for reads in plan.reads}

            def reader(reads: float, seen: list[tuple[Tensor, Tensor]]) -> Step:
                def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
                    keep = TopK(kept[reads])
                    out, mask = kernel.forward(x, ids, weights, keep, union=plan.union)
                    seen.append((ids, mask))  # counted later, as counting takes time
                    return out

                return run

            readers = {f"{reads:.1%}": reader(reads, masks[reads]) for reads in plan.reads}
            times = in_turn({**dense, **readers}, draws(plan, batch))
            counted = {
                reads: sum((batch_reads(cost, *one) for one in seen), Reads())
                for reads, seen in masks.items()
            }
            best = min(dense, key=lambda name: median(times[name]))
            for reads, name in zip(plan.reads, readers, strict=True):
                rows.append(
                    {
                        "name": f"{plan.geometry.name}, batch {batch}, reads {name}",
                        "batch": batch,
                        "reads_target": reads,
                        "reads": counted[reads].share,  # over all draws
                        "k": kept[reads],
                        "channels": cost.channels,
                        "rank": plan.rank,
                        "sketch_share": cost.sketch_bytes / cost.full_bytes,
                        "recovery_share": cost.recovery_bytes / cost.full_bytes,
                        "reader_ms": median(times[name]),
                        "dense_ms": median(times[best]),
                        "dense": best,
                        "dense_all_ms": {each: median(times[each]) for each in dense},
                        **_ratios(times[best], times[name]),
                        "published": PUBLISHED.get(batch, PUBLISHED_LARGER),
                        "repeats": plan.repeats,
                        "union": plan.union,
                    }
                )
        return rows
    finally:
        torch.set_num_threads(threads)


def random_experts(geometry: Geometry, seed: int) -> ExpertMatrices:
    """Return random bfloat16 experts of the shape of *geometry*, scaled to keep x's size."""
    if geometry.hidden is None or geometry.moe_intermediate is None:
        raise InputError(
            f"the size of an expert of '{geometry.name}' is unknown",
            way_out="name a published geometry with --model",
        )
    rng = torch.Generator().manual_seed(seed)
    n, inner, hidden = geometry.n_experts, geometry.moe_intermediate, geometry.hidden

    def made(*shape: int) -> Tensor:
        result = torch.empty(shape, dtype=torch.bfloat16)
        for part in result:  # one expert at a time, to save memory
            part.copy_(torch.randn(shape[1:], generator=rng) / shape[-1] ** 0.5)
        return result

    both, down = made(n, 2 * inner, hidden), made(n, hidden, inner)
    gate, up = both.chunk(2, 1)
    return ExpertMatrices(gate, up, down, None, None, None, Gating())


def torch_block(experts: ExpertMatrices, dtype: torch.dtype) -> Step:
    """Return the dense block of *experts* in torch, with its weights in *dtype*."""
    assert experts.gate is not None  # `random_experts` gives one
    fused = torch.cat([experts.gate, experts.up], 1).to(dtype)
    down = experts.down.to(dtype)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        rows = x.to(dtype)
        for e in torch.unique(ids).tolist():
            token, slot = (ids == e).nonzero(as_tuple=True)
            gate, up = (rows[token] @ fused[e].T).chunk(2, -1)
            made = (torch.nn.functional.silu(gate) * up) @ down[e].T
            out.index_add_(0, token, made.float() * weights[token, slot].unsqueeze(1))
        return out

    return run


def draws(plan: Plan, batch: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return hidden states, experts and gate weights of *batch* tokens, for every repeat."""
    rng = torch.Generator().manual_seed(plan.seed + batch)
    g = plan.geometry
    made = []
    for _ in range(plan.repeats):
        x = torch.randn(batch, g.hidden or 0, generator=rng)
        ids = torch.rand(batch, g.n_experts, generator=rng).argsort(-1)[:, : g.top_k]
        made.append((x, ids, torch.rand(batch, g.top_k, generator=rng).softmax(-1)))
    return made


def in_turn(
    steps: dict[str, Step], batches: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> dict[str, list[float]]:
    """Return the milliseconds of each step on each of *batches*, all steps in turn.

    In one round every step gets another batch, so that none finds weights that the one before it
    left in the caches.
    """
    times: dict[str, list[float]] = {name: [0.0] * len(batches) for name in steps}
    for step in steps.values():
        step(*batches[0])  # compiles, and touches what a first call touches
    for turn in range(len(batches)):
        for place, (name, step) in enumerate(steps.items()):
            index = (turn + place) % len(batches)
            begin = time.perf_counter()
            step(*batches[index])
            times[name][index] = 1000 * (time.perf_counter() - begin)
    return times


def _ratios(dense: list[float], reader: list[float]) -> Row:
    """Return the speed-up, median over median, and the quartiles of the draws' own ratios."""
    each = sorted(d / r for d, r in zip(dense, reader, strict=True))
    quarter = len(each) // 4
    return {
        "speedup": median(dense) / median(reader),
        "speedup_low": each[quarter],
        "speedup_high": each[-1 - quarter],
    }


def _sketch(experts: ExpertMatrices, settings: ChannelSettings) -> Sketch:
    """Make the sketch expert by expert, with a progress bar on stderr."""
    assert experts.gate is not None  # `random_experts` gives one
    parts = []
    for e in track(range(len(experts.up)), "sketch", console=Console(stderr=True)):
        one = replace(
            experts,
            gate=experts.gate[e : e + 1],
            up=experts.up[e : e + 1],
            down=experts.down[e : e + 1],
        )
        parts.append(make_sketch(one, settings, f"expert {e}").tensors())
    return Sketch.of({name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def _show(rows: list[Row]) -> str:
    lines = [
        f"sketch {rows[0]['sketch_share']:.2%} of the experts' bytes, recovery maps "
        f"{rows[0]['recovery_share']:.2%} (rank {rows[0]['rank']})",
        "batch  target   reads    k   dense ms  reader ms  speed-up  quartiles   published   dense",
    ]
    lines += [
        f"{r['batch']:5d}  {r['reads_target']:6.1%}  {r['reads']:6.1%}  {r['k']:3d}  "
        f"{r['dense_ms']:9.2f}  {r['reader_ms']:9.2f}  {r['speedup']:7.2f}x  "
        f"{r['speedup_low']:.2f}-{r['speedup_high']:.2f}   {r['published']:<11} {r['dense']}"
        for r in rows
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, measure and print; return 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(description="Measure the channel reader beside dense experts.")
    parser.add_argument("--model", default="qwen3-30b-a3b", help="a published geometry")
    parser.add_argument("--experts", type=int, help="fewer experts, to save memory")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--reads", type=float, nargs="+", default=[0.13, 0.178])
    parser.add_argument("--rank", type=int, default=32, help="of the recovery maps")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--union", action="store_true", help="tokens of a batch share channels")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(argv)
    try:
        geometry = load_geometry(options.model)
        if options.experts is not None:
            changed = {"n_experts": options.experts}
            geometry = Geometry.model_validate(geometry.model_dump() | changed)
        plan = Plan(
            geometry,
            tuple(options.batch),
            tuple(options.reads),
            options.rank,
            options.repeats,
            options.seed,
            options.union,
        )
        rows = bench(plan)
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write((json.dumps(rows, indent=2) if options.json else _show(rows)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
