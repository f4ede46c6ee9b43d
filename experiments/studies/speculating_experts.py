"""This module recomputes where decode time goes when experts are copied on demand and not kept.

With nothing kept, TPOT is copies plus compute, whichever experts are chosen. Overlapping them can
save at most the smaller of the two in every layer, so never more than half.
"""

from __future__ import annotations

from typing import NamedTuple

from moetier.experiments.papers import Paper, Row, row
from moetier.experiments.studies import register
from moetier.sim.hardware import Profile, load_profile
from moetier.sim.records import Columns
from moetier.sim.run import Setting, simulate
from moetier.sim.units import format_ns
from moetier.traces.geometry import load_geometry
from moetier.traces.predictors import create
from moetier.traces.predictors.annotate import Annotated
from moetier.traces.synthetic import Synthetic

MODEL, MACHINE = "qwen3-30b-a3b", "rtx-a6000"
TOKENS = 33  # the first one does not count towards TPOT
FIT_SHARE, FIT_CONTEXT, FAR_CONTEXT = 0.88, 1024, 65536
RECALL = 0.9  # published; time does not depend on it, as what was predicted is what runs


class Decode(NamedTuple):
    """Mean times of a decode step in ns, and the bytes of all experts."""

    total: float
    copies: float
    saveable: float  # the smaller of copies and compute, summed over the layers
    stored: int


@register("speculating-experts")
def study(paper: Paper) -> list[Row]:
    """Compare copy shares and what overlap could save, at both ends of the published contexts."""
    profile = load_profile(MACHINE)
    bare = decode(with_host_time(profile, 0), FIT_CONTEXT)
    near, far = (decode(profile, context) for context in (FIT_CONTEXT, FAR_CONTEXT))
    stated = profile.main_compute.host_time_per_layer
    assumed = [
        "which experts are chosen does not matter: nothing is kept",
        f"host time per layer {format_ns(stated)}, in the profile of {MACHINE}, the one fitted "
        f"constant: {FIT_SHARE:.0%} at context {FIT_CONTEXT:,} takes {format_ns(fit_host(bare))}",
    ]
    return [
        row(paper, "expert_gib", near.stored / 2**30),
        row(paper, "copy_share_cited_only", bare.copies / bare.total, assumptions=assumed[:1]),
        row(paper, "copy_share_1024", near.copies / near.total, kind="fitted", assumptions=assumed),
        row(paper, "copy_share_65536", far.copies / far.total, assumptions=assumed),
        row(paper, "gain_bound_1024", near.saveable / near.total, assumptions=assumed),
        row(paper, "gain_bound_65536", far.saveable / far.total, assumptions=assumed),
        *_gains(paper, assumed[1:]),
    ]


def _gains(paper: Paper, assumed: list[str]) -> list[Row]:
    """Compare what running predicted experts saves, with one host time on all machines."""
    host = load_profile(MACHINE).main_compute.host_time_per_layer
    about = [
        *assumed,
        "any prediction will do: the experts that were predicted are those that run",
        f"the host time of the {MACHINE} holds on the other machines too",
    ]
    a6000, a100, gh200 = (
        with_host_time(load_profile(name), host) for name in (MACHINE, "a100-80g-pcie4", "gh200")
    )
    contexts = (FIT_CONTEXT, FAR_CONTEXT)
    at_home = [gain(MODEL, a6000, context) for context in contexts]
    on_a100 = [gain("gpt-oss-120b", a100, context) for context in contexts]
    on_gh200 = [
        gain("qwen3-235b-a22b", gh200, context, weights)
        for context in contexts
        for weights in ("bf16", "int8")
    ]
    return [
        row(paper, "tpot_gain_1024", at_home[0], assumptions=about),
        row(paper, "tpot_gain_65536", at_home[1], assumptions=about),
        _band(paper, "tpot_gain_gpt_oss_120b_a100", on_a100, [*about, _CONTEXTS]),
        _band(
            paper,
            "tpot_gain_qwen3_235b_gh200",
            on_gh200,
            [*about, _CONTEXTS, "and weights in bf16 and int8"],
        ),
    ]


_CONTEXTS = "low and high: contexts of 1,024 and 65,536"


def _band(paper: Paper, name: str, found: list[float], assumed: list[str]) -> Row:
    return row(paper, name, found[0], low=min(found), high=max(found), assumptions=assumed)


def gain(model: str, profile: Profile, context: int, weights: str = "bf16") -> float:
    """Return the share of TPOT that speculation saves; overlap can never save more than half."""
    source = Synthetic(load_geometry(model), tokens=TOKENS, context=context, reuse=0.0)
    predicted = Annotated(source, create({"kind": "recall-model", "recall": [RECALL]}))
    policy = {"preset": "speculating-experts", "prefetch": "predicted"}
    plain = simulate(source, Setting(profile, "on-demand-uncached", weights=weights))
    ahead = simulate(predicted, Setting(profile, policy, weights=weights))
    before, after = plain.metrics["tpot_ms"], ahead.metrics["tpot_ms"]
    if before > 2 * after:
        raise RuntimeError(f"speculation is {before / after:.2f} times as fast; 2 is the bound")
    return float(1 - after / before)


def decode(profile: Profile, context: int) -> Decode:
    """Return the mean times of decoding on *profile* with *context* tokens in the cache."""
    blocks: list[Columns] = []
    source = Synthetic(load_geometry(MODEL), tokens=TOKENS, context=context, reuse=0.0)
    result = simulate(
        source, Setting(profile, "on-demand-uncached", weights="bf16"), sinks=[blocks.append]
    )
    rows = blocks[0]
    timed = rows["step"] > rows["step"].min()
    wait = rows["wait_ns"][timed]
    compute = (rows["dense_ns"] + rows["expert_ns"])[timed]
    steps = TOKENS - 1
    return Decode(
        total=float((wait + compute).sum() / steps),
        copies=float(rows["copy_ns"][timed].sum() / steps),
        saveable=float(compute.clip(max=wait).sum() / steps),
        stored=result.stage.budget.stored,
    )


def fit_host(bare: Decode) -> int:
    """Return the host time per layer, in ns, at which copies take `FIT_SHARE` of a step.

    *bare* was decoded without any: copies / (total + layers * host) = share.
    """
    layers = load_geometry(MODEL).n_moe_layers
    return round((bare.copies / FIT_SHARE - bare.total) / layers)


def with_host_time(profile: Profile, ns: int) -> Profile:
    """Return *profile* with another host time per layer of its main processor."""
    data = profile.model_dump(mode="json")
    main = next(iter(data["compute"].values()))
    main["host_time_per_layer"] = f"{ns} ns"
    return Profile.model_validate(data)
