"""This package recomputes published figures; one file per study, named in `experiments/papers/`.

A study is a function of a `Paper` that returns a `Row` for each of its figures.
"""

from __future__ import annotations

from moetier.experiments.papers import Row
from moetier.traces.registry import Registry

STUDIES: Registry[list[Row]] = Registry("study", __name__)
register = STUDIES.register
