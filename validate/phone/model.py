"""This module joins a model's geometry and a profile, and sets a profile to a level of compute."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from moetier.sim.hardware import Link, Profile
from moetier.sim.layout import Layout
from moetier.sim.machine.costs import Costs
from moetier.sim.machine.hierarchy import Hierarchy, build_hierarchy
from moetier.sim.machine.work import dense_work
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.formats import stored_expert_bytes
from moetier.traces.schema import Header
from moetier.validate.phone.reads import PAGE, READS

Ints = npt.NDArray[np.int64]
MIB, MS = 1 << 20, 1_000_000  # bytes; ns
_CLOSE = 0.01


def layout_of(header: Header) -> Layout:
    """Return the model's experts, whole, as they are stored."""
    sizes = stored_expert_bytes(header)[1]
    return Layout([[size] for size in sizes], header.geometry.n_experts)


def costs_of(header: Header, hierarchy: Hierarchy) -> Costs:
    """Return what the model's layers take on a machine."""
    geometry = header.geometry
    work = dense_work(header, stored_expert_bytes(header)[0])
    sized = geometry.hidden is not None and geometry.moe_intermediate is not None
    return Costs(hierarchy, work, layout_of(header), 2 * geometry.expert_weights if sized else 0)


def batch_of(step: int, layer: int, context: int, top_k: int) -> LayerBatch:
    """Return what one decoded token asks of a layer, where it is not known which experts."""
    return LayerBatch(step, DECODE, layer, 1, context, list(range(top_k)))


def compute_ms(header: Header, profile: Profile, top_k: int, context: int) -> float:
    """Return what one decoded token computes on *profile*, management left out, in ms."""
    hierarchy = hierarchy_of(with_management(profile, 0), overlap=False)
    costs, layout = costs_of(header, hierarchy), layout_of(header)
    total = 0
    for layer in range(layout.n_layers):
        nbytes = top_k * layout.nbytes[layer * layout.layer_slices]
        total += costs.dense_ns(batch_of(0, layer, context, top_k))
        total += costs.experts(nbytes, top_k, top_k)
    return total / MS


def at_level(
    header: Header, profile: Profile, top_k: int, context: int, level: float, mgmt: float
) -> Profile:
    """Return *profile* with compute of *level* and cache management of *mgmt* ms per token.

    The processor's peak and the bandwidth of its tier change together, so that every part of
    compute, dense or expert, changes by one factor.

    Raises:
        InputError: If measured times in the profile keep it from following.
    """
    factor = compute_ms(header, profile, top_k, context) / level
    name, main = next(iter(profile.compute.items()))
    tier = profile.tiers[main.tier]
    faster = main.model_copy(
        update={"peak": {kind: max(1, round(x * factor)) for kind, x in main.peak.items()}}
    )
    changed = profile.model_copy(
        update={
            "compute": {**profile.compute, name: faster},
            "tiers": {
                **profile.tiers,
                main.tier: tier.model_copy(
                    update={"bandwidth": max(1, round(tier.bandwidth * factor))}
                ),
            },
        }
    )
    reached = compute_ms(header, changed, top_k, context)
    if abs(reached / level - 1) > _CLOSE:
        raise InputError(
            f"compute follows to {reached:.1f} ms, not to {level:.1f} ms",
            where=f"profile '{profile.name}'",
            way_out="use a profile with a peak and without measured times",
        )
    return with_management(changed, management_ns(header, mgmt))


def management_ns(header: Header, mgmt: float) -> int:
    """Return the overhead that makes *mgmt* ms per token: half of a layer's share."""
    return round(mgmt * MS / (2 * header.geometry.n_moe_layers))


def with_management(profile: Profile, overhead: int) -> Profile:
    """Return *profile* with *overhead* ns per batch of kernels, twice per layer.

    The first is paid before the reads of a layer begin, the second beside them: the runtime takes
    pages for what it is going to read, queues the reads, then gives the evicted pages back. That
    both halves are equal is assumed.
    """
    name, main = next(iter(profile.compute.items()))
    changed = main.model_copy(update={"overhead": overhead})
    return profile.model_copy(update={"compute": {**profile.compute, name: changed}})


def with_lanes(profile: Profile, lanes: int) -> Profile:
    """Return *profile* with *lanes* on the link into its processor's tier."""
    link = read_link(profile)
    links = [x.model_copy(update={"lanes": lanes}) if x is link else x for x in profile.links]
    return profile.model_copy(update={"links": links})


def read_link(profile: Profile) -> Link:
    """Return the link into the processor's tier from the one below it."""
    fast, below = _tiers(profile)
    return profile.link(below, fast)


def hierarchy_of(profile: Profile, overlap: bool) -> Hierarchy:
    """Return the processor's tier of *profile* and the one below it."""
    return build_hierarchy(profile, _tiers(profile), overlap=overlap)


def experts_read(layout: Layout, nbytes: Sequence[float], reads: int = READS) -> list[int]:
    """Return how many experts of average size, read in *reads* aligned parts, make up *nbytes*."""
    firsts = layout.nbytes[:: layout.layer_slices]
    each = sum(firsts) / len(firsts) + reads * PAGE
    return [round(n / each) for n in nbytes]


def spread(misses: Sequence[int], layers: int, top_k: int, seed: int = 0) -> Ints:
    """Draw which of a token's look-ups miss, each equally likely: (tokens, layers) counts.

    *misses* are those of each token; no more than there are look-ups.
    """
    rng = np.random.default_rng(seed)
    lookups = np.repeat(np.arange(layers), top_k)
    rows = [
        np.bincount(rng.permutation(lookups)[: min(n, len(lookups))], minlength=layers)
        for n in misses
    ]
    return np.array(rows, np.int64).reshape(-1, layers)


def _tiers(profile: Profile) -> list[str]:
    names = list(profile.tiers)
    first = names.index(profile.main_compute.tier)
    return names[first : first + 2]
