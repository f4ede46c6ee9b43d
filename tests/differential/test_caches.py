"""LRU, FIFO and LFU against ten independent lines each, under the rules of a batch.

Inside a batch every unique expert is looked up once and a repeat only refreshes recency; eviction
runs after the batch and never removes what the batch touched; one cache over all layers, in bytes.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetier.sim.testing import Case, make_case

Batches = list[list[int]]  # slices, repeats included
Reference = Callable[[Batches, Callable[[int], int], int], list[set[int]]]


def lru(batches: Batches, nbytes: Callable[[int], int], capacity: int) -> list[set[int]]:
    cache: OrderedDict[int, None] = OrderedDict()
    missed = []
    for batch in batches:
        missed.append({s for s in batch if s not in cache})
        for s in batch:
            cache[s] = None
            cache.move_to_end(s)
        for s in list(cache):
            if sum(map(nbytes, cache)) > capacity and s not in batch:
                del cache[s]
    return missed


def fifo(batches: Batches, nbytes: Callable[[int], int], capacity: int) -> list[set[int]]:
    cache: list[int] = []
    missed = []
    for batch in batches:
        new = [s for s in dict.fromkeys(batch) if s not in cache]
        missed.append(set(new))
        cache += new
        for s in list(cache):
            if sum(map(nbytes, cache)) > capacity and s not in batch:
                cache.remove(s)
    return missed


def lfu(batches: Batches, nbytes: Callable[[int], int], capacity: int) -> list[set[int]]:
    cache: set[int] = set()
    uses: Counter[int] = Counter()
    last: dict[int, tuple[int, int]] = {}
    missed = []
    for now, batch in enumerate(batches):
        missed.append(set(batch) - cache)
        cache |= set(batch)
        uses.update(set(batch))
        last |= {s: (now, at) for at, s in enumerate(batch)}
        for s in sorted(cache, key=lambda s: (uses[s], last[s])):
            if sum(map(nbytes, cache)) > capacity and s not in batch:
                cache.remove(s)
    return missed


def layer_lfu(batches: Batches, nbytes: Callable[[int], int], capacity: int) -> list[set[int]]:
    """With a layer's experts spaced by 100: the largest layer gives up its least used expert."""
    cache: set[int] = set()
    uses: Counter[int] = Counter()
    last: dict[int, tuple[int, int]] = {}
    missed = []
    for now, batch in enumerate(batches):
        missed.append(set(batch) - cache)
        cache |= set(batch)
        uses.update(set(batch))
        last |= {s: (now, at) for at, s in enumerate(batch)}
        while sum(map(nbytes, cache)) > capacity and not cache <= set(batch):
            held = {layer: [s for s in cache if s // 100 == layer] for layer in range(9)}
            free = {at: [s for s in those if s not in batch] for at, those in held.items()}
            fullest = max(
                (at for at in held if free[at]), key=lambda at: (sum(map(nbytes, held[at])), -at)
            )
            cache.remove(min(free[fullest], key=lambda s: (uses[s], last[s])))
    return missed


REFERENCES: dict[str, Reference] = {"lru": lru, "fifo": fifo, "lfu": lfu, "layer-lfu": layer_lfu}


@st.composite
def cases(draw: st.DrawFn, /, **fixed: Any) -> Case:
    return make_case(lambda options: draw(st.sampled_from(options)), **fixed)


def compare(case: Case, reference: Reference) -> None:
    seen = case.run(watch=False)
    layout = seen.result.stage.layout

    def spaced(layer: int, expert: int) -> int:
        return layer * 100 + expert

    batches = [
        [spaced(batch.layer, expert) for expert in batch.experts] for batch in case.trace.batches()
    ]
    expected = reference(
        batches,
        lambda s: layout.nbytes[layout.slice_id(s // 100, s % 100)],
        seen.result.stage.capacities[0],
    )
    ours = [
        {spaced(layout.layer_of(s), layout.expert_of(s)) for s in plan.missing}
        for plan in seen.plans
    ]

    assert ours == expected


@pytest.mark.parametrize("name", REFERENCES)
@given(st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_cache_misses_where_ten_other_lines_do(name: str, data: st.DataObject) -> None:
    plain: dict[str, Any] = {
        "prefetch": "none", "miss": "fetch", "warmup": "none", "tiers": 2, "bits": None,
    }  # fmt: skip
    compare(data.draw(cases(eviction=name, **plain)), REFERENCES[name])


@given(cases(eviction="belady", prefetch="none", miss="fetch", warmup="none", tiers=2))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_belady_removes_what_is_used_furthest_away(case: Case) -> None:
    """Looking forward through the batches each time, in place of tables."""
    seen = case.run(watch=False)
    needed = [plan.needed for plan in seen.plans]

    def next_use(s: int, now: int) -> int:
        later = (i for i in range(now + 1, len(needed)) if s in needed[i])
        return next(later, len(needed))

    cache: set[int] = set()
    for now, plan in enumerate(seen.plans):
        assert set(plan.missing) == set(plan.needed) - cache
        cache |= set(plan.needed)
        stays = cache - set(plan.evicted)
        assert not set(plan.evicted).intersection(plan.needed)
        if plan.evicted:
            nearest = min(next_use(s, now) for s in plan.evicted)
            assert all(next_use(s, now) <= nearest for s in stays - set(plan.needed))
        cache = stays
