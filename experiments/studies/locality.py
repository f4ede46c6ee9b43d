"""This module measures how local a trace's routing is, and makes other geometries as local.

Two numbers decide what a cache can do: how many of a token's experts the token before had used, and
how often a plain LRU cache of a quarter of the experts hits. Synthetic routing has a knob for each,
reuse and skew; both are set so that routing of the trace's own geometry and length has the trace's
two numbers, and then carry over to a geometry nobody has a trace of.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.resources import files

import yaml

from moetier.sim.layout import Layout
from moetier.sim.planner import Planner
from moetier.sim.policy.compose import compose
from moetier.sim.yaml_input import read_yaml
from moetier.traces.batch import DECODE, Source
from moetier.traces.geometry import Geometry
from moetier.traces.info import describe
from moetier.traces.io import TraceReader
from moetier.traces.synthetic import Synthetic

SHARE = Fraction(1, 4)
SKEWS = tuple(round(0.1 * step, 1) for step in range(21))
HALVINGS = 7
MOST_TOKENS = 300


@dataclass(frozen=True, slots=True)
class Locality:
    """How local routing is: what was measured, and the knobs that give it."""

    reuse_measured: float  # share of a token's experts that the token before had used
    hit_rate: float  # decode, LRU over all layers, a quarter of the experts
    skew: float
    reuse: float


def localities() -> dict[str, Locality]:
    """Return the localities of the traces that were measured, by model."""
    known = read_yaml(files("moetier.experiments.studies") / "localities.yaml")
    keys = Locality.__dataclass_fields__
    return {name: Locality(**{key: row[key] for key in keys}) for name, row in known.items()}


def measure(source: Source) -> tuple[float, float]:
    """Return the token-to-token reuse of *source*, and its LRU hit rate in decode."""
    return describe(source).reuse or 0.0, _hit_rate(source)


def fit(source: Source, tokens: int, seed: int = 0) -> Locality:
    """Return the knobs that make *tokens* decoded tokens as local as *source*."""
    geometry = source.header.geometry
    reuse_measured, hit_rate = measure(source)
    found = min(
        (_with_skew(geometry, tokens, seed, skew, reuse_measured) for skew in SKEWS),
        key=lambda made: abs(made[1] - hit_rate),
    )
    return Locality(reuse_measured, hit_rate, *found[0])


def _hit_rate(source: Source) -> float:
    """Return the share of decode look-ups that hit an LRU cache of `SHARE` of the experts."""
    geometry = source.header.geometry
    layout = Layout([[1]] * geometry.n_moe_layers, geometry.n_experts)
    planner = Planner(compose("on-demand"), layout, [int(SHARE * layout.total_bytes)])
    lookups = misses = 0
    for batch in source.batches():
        plan = planner.step(batch)
        if batch.phase == DECODE:
            lookups += len(plan.needed)
            misses += len(plan.missing)
    return 1 - misses / lookups if lookups else 0.0


def _with_skew(
    geometry: Geometry, tokens: int, seed: int, skew: float, wanted: float
) -> tuple[tuple[float, float], float]:
    """Return (skew, reuse) with the *wanted* token-to-token reuse, and the hit rate they give."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        reuse = (low + high) / 2
        made = Synthetic(geometry, tokens=tokens, skew=skew, reuse=reuse, seed=seed)
        if (describe(made).reuse or 0.0) < wanted:
            low = reuse
        else:
            high = reuse
    made = Synthetic(geometry, tokens=tokens, skew=skew, reuse=low, seed=seed)
    return (skew, low), _hit_rate(made)


def main(path: str) -> None:
    """Print the locality of the trace at *path*."""
    source = TraceReader(path)
    found = fit(source, min(describe(source).decode_tokens, MOST_TOKENS))
    rounded = {key: round(value, 4) for key, value in asdict(found).items()}
    sys.stdout.write(yaml.safe_dump(rounded, sort_keys=False))


if __name__ == "__main__":
    main(sys.argv[1])
