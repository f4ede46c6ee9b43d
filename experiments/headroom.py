"""This module says what is left to win in a run: with the best eviction, prefetching, machine.

Each bound is the same run again, over the same routing, with one thing changed. docs/metrics.md
defines them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

from moetier.experiments.config import RunConfig, load_hardware
from moetier.experiments.files import inside
from moetier.experiments.resolve import full_policy
from moetier.experiments.runs import popularity_of, setting_of
from moetier.experiments.sources import open_source
from moetier.sim.hardware import Link, Profile
from moetier.sim.records import Columns
from moetier.sim.run import Result, Setting, TraceSource, simulate
from moetier.traces.batch import DECODE
from moetier.traces.columns import ColumnSource
from moetier.traces.errors import InputError

DEPTHS = (1, 2, 4, 8)
"""How many layers ahead the perfect prefetcher is tried; the best counts."""

_SHOWN = ("tpot_ms", "miss_rate", "byte_miss_rate", "stall_share")


class Moved:
    """Sum up what decode steps moved into the fastest tier and from the lowest, in bytes."""

    def __init__(self, warmup_steps: int) -> None:
        """Leave *warmup_steps* decode steps out, as the metrics do."""
        self._left_out = warmup_steps
        self._decodes: dict[int, bool] = {}  # by step, in their order
        self._steps: list[int] = []
        self._into: list[int] = []
        self._lower: list[int] = []

    def __call__(self, rows: Columns) -> None:
        """Take in a block of rows."""
        decode = rows["phase"] == DECODE
        self._decodes |= dict(zip(rows["step"].tolist(), decode.tolist(), strict=True))
        brought = rows["fetch_bytes"] + rows["prefetch_bytes"]
        into = brought - rows["cancelled_bytes"] - rows["dropped_bytes"]
        self._steps += rows["step"][decode].tolist()
        self._into += into[decode].tolist()
        self._lower += rows["lower_bytes"][decode].tolist()

    def per_step(self) -> tuple[Fraction, Fraction] | None:
        """Return the bytes of a mean decode step, into the fastest tier and from the lowest.

        The steps are those that `tpot_ms` is the mean of: each follows another decode step.
        """
        order = list(self._decodes)
        measured = set([step for step in order if self._decodes[step]][self._left_out :])
        steps = {step for last, step in pairwise(order) if self._decodes[last]} & measured
        if not steps:
            return None
        counted = [at for at, step in enumerate(self._steps) if step in steps]
        into, lower = (sum(x[at] for at in counted) for x in (self._into, self._lower))
        return Fraction(into, len(steps)), Fraction(lower, len(steps))


def headroom(config: RunConfig, *, where: str | None = None) -> dict[str, Any]:
    """Return what *config* could still win: `belady`, `perfect_prefetch`, `roofline`.

    A bound that a policy's parts exclude has a `reason` and null for the rest. *where* names the
    config in errors.

    Raises:
        InputError: For a live model, whose routing is not known before it has run.
    """
    if config.live is not None:
        raise InputError(
            "what is left to win takes knowing the future, which a live model does not have",
            where="live",
            way_out="capture a trace with `moetier capture`, and use `trace:`",
        )
    with inside(where) if where else nullcontext():
        source = open_source(config).source
        setting = setting_of(config, load_hardware(config.hardware))
        again = _Again(source, setting, popularity_of(config, source))
        own = again.run()
        belady, moved = again.belady()
        return {
            "own": {name: own.metrics[name] for name in _SHOWN},
            "belady": _against(own, belady),
            "perfect_prefetch": _against(own, again.prefetched()),
            "roofline": again.roofline(own, moved),
        }


Bound = dict[str, Any]


class _Again:
    """One run, to be repeated with something changed."""

    def __init__(
        self, source: TraceSource, setting: Setting, popularity: ColumnSource | None
    ) -> None:
        self._source, self._setting, self._popularity = source, setting, popularity
        self._policy = full_policy(setting.policy)

    def run(self, moved: Moved | None = None, **changes: Any) -> Result:
        """Return the run with *changes* to its setting."""
        return simulate(
            self._source,
            replace(self._setting, **changes),
            sinks=[] if moved is None else [moved],
            popularity=self._popularity,
        )

    def with_parts(self, moved: Moved | None = None, **parts: Any) -> Result:
        """Return the run with other *parts* of its policy."""
        return self.run(moved, policy=self._policy | parts)

    def belady(self) -> tuple[Bound, Moved | None]:
        """Return the same capacity with the best eviction, all on demand, and what that moves."""
        moved = Moved(self._setting.warmup_steps)
        eviction: Any = "belady"
        given = self._policy["eviction"]
        if isinstance(given, Mapping) and "kind" not in given:  # tier by tier, fastest first
            fastest = self.run().stage.hierarchy.cached[0]
            eviction = {**given, fastest: "belady"}
        try:
            found = self.with_parts(moved, eviction=eviction, prefetch="none")
        except InputError as error:
            return {"reason": error.problem}, None
        sizes = found.stage.layout.nbytes
        return {**found.metrics, "optimal": len(set(sizes)) == 1, "reason": None}, moved

    def prefetched(self) -> Bound:
        """Return the same policy, but that the next layers' needs are known and brought."""
        best: Bound | None = None
        for depth in DEPTHS:
            try:
                part = {"kind": "oracle", "depth": depth}
                found = {**self.with_parts(prefetch=part).metrics, "depth": depth, "reason": None}
            except InputError as error:
                return {"reason": error.problem}
            if best is None or _less(found["tpot_ms"], best["tpot_ms"]):
                best = found
        assert best is not None
        return best

    def roofline(self, own: Result, moved: Moved | None) -> Bound:
        """Return the time of compute alone, that of the links alone, and the longer of the two."""
        stage = own.stage
        fastest, total = stage.hierarchy.cached[0], stage.layout.total_bytes
        resident = self.run(
            profile=_roomier(self._setting.profile, fastest, total),
            policy=self._policy | {"prefetch": "none", "warmup": "static", "eviction": "lru"},
            capacity={**self._setting.capacity, fastest: total},
        )
        compute, link = resident.metrics["tpot_ms"], None
        each = moved.per_step() if moved is not None else None
        if each is not None:
            links = stage.hierarchy.links
            size = max(stage.layout.nbytes)
            times = [nbytes / _rate(one, size) for nbytes, one in zip(each, links, strict=False)]
            link = float(max(times) * 1000)
        known = [time for time in (compute, link) if time is not None]
        least = max(known) if known else None
        return {
            "tpot_ms": least,
            "compute_ms": compute,
            "link_ms": link,
            "bound": None if least is None else "compute" if least == compute else "link",
            "tpot_gain": _gain(own.metrics["tpot_ms"], least),
        }


def _against(own: Result, found: Bound) -> Bound:
    """Return what *found* has, and what it is better by than one's *own* run."""
    mine = own.metrics
    shown: Bound = {name: found.get(name) for name in _SHOWN}
    more: Bound = {name: found[name] for name in ("depth", "optimal") if name in found}
    return {
        **shown,
        "tpot_gain": _gain(mine["tpot_ms"], shown["tpot_ms"]),
        "miss_rate_gap": _gap(mine["miss_rate"], shown["miss_rate"]),
        "byte_miss_rate_gap": _gap(mine["byte_miss_rate"], shown["byte_miss_rate"]),
        **more,
        "reason": found["reason"],
    }


def _roomier(profile: Profile, name: str, nbytes: int) -> Profile:
    """Return *profile* with a tier that holds *nbytes* more."""
    tier = profile.tiers[name]
    grown = tier.model_copy(update={"capacity": tier.capacity + nbytes})
    return profile.model_copy(update={"tiers": {**profile.tiers, name: grown}})


def _rate(link: Link, nbytes: int) -> Fraction:
    """Return the most bytes per second that *link* moves in transfers of *nbytes* bytes."""
    return max(link.bandwidth.total(nbytes, n) for n in range(1, link.lanes + 1))


def _gain(own: float | None, bound: float | None) -> float | None:
    return None if own is None or bound is None or not own else 1 - bound / own


def _gap(own: float | None, bound: float | None) -> float | None:
    return None if own is None or bound is None else own - bound


def _less(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and one < other


def rows_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what `headroom` found as a table, a row per bound, best gain told as a share."""
    names = {
        "own": "this run",
        "belady": "Belady's eviction",
        "perfect_prefetch": "perfect prefetch",
        "roofline": "roofline",
    }
    return [
        {
            "": text,
            "tpot_ms": found[key]["tpot_ms"],
            "miss_rate": found[key].get("miss_rate"),
            "left_to_win": found[key].get("tpot_gain"),
            "about": _about(key, found[key]),
        }
        for key, text in names.items()
    ]


def _about(key: str, bound: Mapping[str, Any]) -> str:
    if bound.get("reason"):
        return str(bound["reason"])
    if key == "perfect_prefetch":
        return f"{bound['depth']} layer{'s' * (bound['depth'] > 1)} ahead"
    if key == "belady":
        return "on demand, same capacity" + ("" if bound["optimal"] else "; slices differ in size")
    if key == "roofline" and bound["bound"] is not None:
        parts = (("compute", bound["compute_ms"]), ("link", bound["link_ms"]))
        return ", ".join(f"{name} {ms:.4g} ms" for name, ms in parts if ms is not None)
    return ""
