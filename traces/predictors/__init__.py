"""This package predicts what the routers of later layers will say; one file per predictor.

A predictor is a class registered under its kind. Its file says what it needs, how many weights and
operations it costs, and what it predicts; importing it loads no torch, so that `moetier list` and
predictors that only look at a trace work without. What needs a model is in `learn/`: its parts, the
samples, training, checkpoints, and a predictor inside a running model.
"""

from __future__ import annotations

from typing import Any

from moetier.traces.errors import InputError
from moetier.traces.predictors.base import Predictor
from moetier.traces.registry import Registry

PREDICTORS: Registry[Predictor] = Registry("predictor", __name__)
register = PREDICTORS.register


def create(spec: str | dict[str, Any], where: str | None = None) -> Predictor:
    """Return the predictor of *spec*: a kind, or a mapping of `kind` and its parameters.

    Raises `InputError`, naming *where*, for a kind, parameter or value that cannot be used.
    """
    arguments = {"kind": spec} if isinstance(spec, str) else dict(spec)
    kind = arguments.pop("kind", None)
    if not isinstance(kind, str):
        raise InputError(
            "a predictor without a kind",
            where=where,
            way_out=f"write {{kind: ...}}; known: {', '.join(PREDICTORS.names())}",
        )
    predictor = PREDICTORS.create(kind, arguments, where)
    predictor.kind, predictor.arguments = kind, arguments
    return predictor
