"""This module shows hit rates over the cache's size, with the oracle where the sweep has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moetier.experiments.findings import is_oracle
from moetier.experiments.report.choice import differing, title_of
from moetier.experiments.report.figure import Figure, Table, percent
from moetier.experiments.report.folder import Entry
from moetier.experiments.report.palette import label, look

MAX_LINES = 16
RATE = "hit_rate_decode"


def lines_of(entries: Sequence[Entry]) -> tuple[str, dict[str, list[Entry]]] | None:
    """Return a tier and the points of each curve by rising size, oracles first; None without any.

    A curve is the points that differ in nothing but the size of the tier's cache; one with fewer
    than two sizes is no curve.
    """
    tier = _tier(entries)
    if tier is None:
        return None
    size = f"capacity_bytes.{tier}"
    known = [
        entry
        for entry in entries
        if None not in (entry.metrics.get(size), entry.metrics.get(RATE), _total(entry))
    ]
    names = [name for name in differing(known) if not name.startswith("capacity.")]
    found: dict[str, list[Entry]] = {}
    for entry in known:
        found.setdefault(title_of(entry, names), []).append(entry)
    lines = {
        name: sorted(own, key=lambda entry: entry.metrics[size])
        for name, own in found.items()
        if len({entry.metrics[size] for entry in own}) > 1
    }
    ordered = dict(sorted(lines.items(), key=lambda item: not _oracle(item[1])))
    return (tier, ordered) if ordered else None


def hit_curves(entries: Sequence[Entry]) -> Figure | None:
    """Return the hit rate of *entries* over the size of the cache; None without a curve."""
    found = lines_of(entries)
    if found is None:
        return None
    tier, lines = found
    drawn = dict(list(lines.items())[:MAX_LINES])
    traces = [_trace(at, name, own, tier) for at, (name, own) in enumerate(drawn.items())]
    rows = [
        [name, percent(share(entry, tier)), percent(entry.metrics[RATE], 2)]
        for name, own in drawn.items()
        for entry in own
    ]
    notes = []
    if len(drawn) < len(lines):
        notes.append(f"{len(drawn)} of {len(lines)} curves are drawn.")
    if not any(_oracle(own) for own in drawn.values()):
        notes.append("No oracle: the points hold no arm with `eviction: belady`.")
    best = max((own[-1].metrics[RATE], name) for name, own in drawn.items())
    return Figure(
        name="hit-curves",
        title=f"Hit rate over the cache in {tier}",
        alt=(
            f"Hit rate in decode over the size of the expert cache in {tier}, {len(drawn)} curves; "
            f"the highest at the right end is {percent(best[0])} of {best[1]}."
        ),
        traces=traces,
        layout={
            "height": 400,
            "xaxis": {
                "title": {"text": f"expert cache in {tier} (% of all expert bytes)"},
                "tickformat": ".0%",
            },
            "yaxis": {
                "title": {"text": "hit rate, decode<br>higher is better →"},
                "tickformat": ",.3~%",
            },
        },
        table=Table("Hit rate by size of the cache", ["policy", "cache", "hit rate"], rows),
        notes=notes,
    )


def _trace(at: int, name: str, own: Sequence[Entry], tier: str) -> dict[str, Any]:
    color, symbol, dash = look(at)
    oracle = _oracle(own)
    shown = f"{name} (oracle)" if oracle else name
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(shown, 44),
        "meta": shown,
        "x": [share(entry, tier) for entry in own],
        "y": [entry.metrics[RATE] for entry in own],
        "line": {"color": color, "dash": "dot" if oracle else dash, "width": 3 if oracle else 1.6},
        "marker": {
            "symbol": "star" if oracle else symbol,
            "size": 11 if oracle else 8,
            "color": color,
        },
        "hovertemplate": "cache %{x:.1%}, hit rate %{y:.2%}<extra>%{fullData.name}</extra>",
    }


def _tier(entries: Sequence[Entry]) -> str | None:
    """Return the tier whose cache has the most sizes, if it has two at all."""
    names = dict.fromkeys(
        name for entry in entries for name in entry.metrics if name.startswith("capacity_bytes.")
    )
    counts = {name: len({entry.metrics.get(name) for entry in entries} - {None}) for name in names}
    best = max(counts, key=counts.__getitem__, default=None)
    return best.partition(".")[2] if best is not None and counts[best] > 1 else None


def _total(entry: Entry) -> int | None:
    return entry.metrics.get("expert_bytes_total") or None


def share(entry: Entry, tier: str) -> float:
    """Return the size of the cache in *tier* as a share of all expert bytes."""
    total = _total(entry)
    assert total is not None
    return float(entry.metrics[f"capacity_bytes.{tier}"] / total)


def _oracle(own: Sequence[Entry]) -> bool:
    config = own[0].outcome.get("config") or {}
    policy = config.get("policy")
    return (
        isinstance(policy, dict) and {"eviction", "prefetch"} <= set(policy) and is_oracle(policy)
    )
