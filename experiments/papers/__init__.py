"""This package holds published results, one YAML each, and how they are put beside ours."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moetier.sim.yaml_input import check, read_yaml
from moetier.traces.errors import InputError

Kind = Literal["prediction", "fitted", "not-testable"]


class Figure(BaseModel):
    """A published number; *low* and *high* where a range is published.

    *neutral* is the value at which there is no effect. A *bound* says that ours should be above or
    below the number, not equal to it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    published: float
    low: float | None = None
    high: float | None = None
    neutral: float | None = None
    bound: Literal["above", "below"] | None = None
    what: str
    source: str | None = None  # where it differs from the paper's


class Paper(BaseModel):
    """A publication: where it is, its figures, and the study that recomputes them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: str
    source: str
    study: str
    figures: dict[str, Figure] = Field(min_length=1)


class Row(BaseModel):
    """A published number beside ours.

    *low* and *high* span ours over what the source leaves open; *ratio* is ours to published. A
    figure that cannot be recomputed is `not-testable`, with the *reason*.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    published: float
    ours: float | None
    low: float | None = None
    high: float | None = None
    ratio: float | None
    kind: Kind
    what: str
    source: str
    reason: str | None = None
    published_low: float | None = None
    published_high: float | None = None
    verdict: str = ""
    assumptions: list[str] = Field(default_factory=list)


def row(
    paper: Paper,
    name: str,
    ours: float | None = None,
    *,
    low: float | None = None,
    high: float | None = None,
    kind: Kind = "prediction",
    reason: str | None = None,
    assumptions: list[str] | None = None,
) -> Row:
    """Return the figure *name* of *paper* beside *ours*; without *ours* it needs a *reason*."""
    if ours is None and not reason:
        raise ValueError(f"'{name}' has no value of ours and no reason why")
    figure = paper.figures[name]
    if ours is None:
        kind = "not-testable"
    return Row(
        name=name,
        published=figure.published,
        ours=ours,
        low=low,
        high=high,
        ratio=None if ours is None else ours / figure.published,
        kind=kind,
        what=figure.what,
        source=figure.source or paper.source,
        reason=reason,
        published_low=figure.low,
        published_high=figure.high,
        verdict="" if ours is None else judge(figure, ours, low, high, kind),
        assumptions=assumptions or [],
    )


CLOSE = 0.1  # relative


def judge(
    figure: Figure, ours: float, low: float | None, high: float | None, kind: Kind = "prediction"
) -> str:
    """Say how *ours*, or its range from *low* to *high*, stands to a published *figure*."""
    if kind == "fitted":
        return "fitted to it"
    if figure.bound is not None:
        kept = ours >= figure.published if figure.bound == "above" else ours <= figure.published
        return f"{figure.bound} it, as it must be" if kept else f"not {figure.bound} it"
    first, last = (end if end is not None else ours for end in (low, high))
    least, most = (
        end if end is not None else figure.published for end in (figure.low, figure.high)
    )
    if first <= most and last >= least and low is not None:
        return "inside the band"
    if figure.low is not None and least <= ours <= most:
        return "inside the published range"
    off = min(abs(ours / end - 1) for end in (least, figure.published, most))
    if off <= CLOSE:
        return f"reproduced within {max(off, 0.001):.1%}"
    if figure.neutral is None:
        return f"not reproduced, off by {off:.0%}"
    same = (ours - figure.neutral) * (figure.published - figure.neutral) > 0
    return "same sign, another size" if same else "not reproduced"


def paper_names() -> list[str]:
    """Return the names of the papers that there is a file for, sorted."""
    found = (file.name for file in files(__name__).iterdir())
    return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))


def load_paper(name: str) -> Paper:
    """Return the paper *name*; raise `InputError` when its file is wrong."""
    file = f"{name}.yaml"
    return check(Paper, read_yaml(files(__name__) / file), where=f"experiments/papers/{file}")


def reproduce(name: str) -> list[Row]:
    """Return every figure of the paper *name* beside ours."""
    from moetier.experiments.studies import STUDIES

    paper, where = load_paper(name), f"experiments/papers/{name}.yaml"
    rows: list[Any] = STUDIES.create(paper.study, {"paper": paper}, where)
    missing = set(paper.figures) - {item.name for item in rows}
    if missing:
        raise InputError(
            f"the study leaves out {', '.join(sorted(missing))}",
            where=where,
            way_out="return a row for each figure, `not-testable` with a reason where need be",
        )
    return rows
