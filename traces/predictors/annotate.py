"""This module gives recorded routing the predictions of a predictor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moetier.traces.batch import Floats, LayerBatch, Source
from moetier.traces.columns import Bools, Columns
from moetier.traces.errors import InputError
from moetier.traces.io import TraceReader, TraceWriter
from moetier.traces.predictors.base import BatchPredictor, Predictor
from moetier.traces.schema import Header, arrow_schema

Predictions = tuple[int, dict[int, Floats]]
"""The tokens of a batch, and scores (n_tokens, E) of them by horizon."""


class Annotated:
    """A source whose batches carry predictions in `predicted`, and whose header says of whom.

    Nothing is held but the batches that the horizons look ahead to. A prediction that cannot be
    made, such as beyond the last layer, is left out.
    """

    def __init__(self, source: Source, predictor: Predictor) -> None:
        """Let *predictor* look at the batches of *source*.

        Raises `InputError` for one that needs a model: its scores are recorded while capturing.
        """
        if not isinstance(predictor, BatchPredictor):
            raise InputError(
                f"predictor '{predictor.kind}' works inside a model, and this is a trace",
                way_out="capture with --predictor, which records its scores",
            )
        header = source.header
        self.source, self.predictor = source, predictor
        self.header: Header = header.model_copy(
            update={"predictors": predictor.entries(header.geometry)}
        )
        self.assumption = predictor.assumption
        self._prepared = False

    def batches(self) -> Iterator[LayerBatch]:
        """Yield the batches in forward order, with predictions. Can be called again."""
        predictor, header = self.predictor, self.source.header
        if not self._prepared or predictor.needs == "past":
            predictor.start(header.geometry, header.score_kind)
        if not self._prepared:
            if predictor.needs == "future":
                predictor.prepare(header, self.source.batches())
            self._prepared = True
        reach = max(predictor.horizons) if predictor.needs == "future" else 0
        held: deque[LayerBatch] = deque()
        for batch in self.source.batches():
            held.append(batch)
            if len(held) > reach:
                yield self._with_predictions(held)
        while held:
            yield self._with_predictions(held)

    def columns(self) -> Iterator[Columns]:
        """Yield the rows of the source in chunks, as they are."""
        columns: Callable[[], Iterator[Columns]] | None = getattr(self.source, "columns", None)
        if columns is None:
            raise InputError("this source has no rows to read as columns")
        return columns()

    def _with_predictions(self, held: deque[LayerBatch]) -> LayerBatch:
        batch = held.popleft()
        wanted = {batch.layer + horizon: horizon for horizon in self.predictor.horizons}
        ahead = {
            wanted[later.layer]: later
            for later in held
            if later.step == batch.step and later.layer in wanted
        }
        predicted = self.predictor.predict(batch, ahead)
        self.predictor.observe(batch)
        return replace(batch, predicted=predicted)


def annotate(trace: str | Path, out: str | Path, predictor: Predictor, model: Any = None) -> Path:
    """Write *trace* to *out* with what *predictor* says in its `predicted_<horizon>` columns.

    A predictor that works inside a model needs that *model*, loaded, and a trace of it that was
    captured with `--hidden`; the model is not run again. Earlier predictions are replaced.

    Raises `InputError` where the trace lacks what the predictor needs.
    """
    reader = TraceReader(trace, with_scores=True)
    made: Iterator[Predictions]
    if isinstance(predictor, BatchPredictor):
        batches = Annotated(reader, predictor).batches()
        made = ((batch.n_tokens, batch.predicted) for batch in batches)
    elif model is None:
        raise InputError(
            f"predictor '{predictor.kind}' works inside a model, and none is given",
            way_out="give the model that was captured",
        )
    else:
        made = _inside(reader.path, predictor, model)
    header = reader.header.model_copy(
        update={"predictors": predictor.entries(reader.header.geometry)}
    )
    names = [item.name for item in arrow_schema(reader.header)]
    kept = [name for name in names if name in ("weights", "scores", "recorded")]
    with TraceWriter(out, header) as writer:
        rows = _Rows(made, header)
        for chunk in reader.columns(kept):
            writer.add_columns(replace(chunk, predicted=rows.take(chunk.valid)))
    return Path(out)


class _Rows:
    """Cuts predictions, which come batch by batch, into those of any number of rows."""

    def __init__(self, made: Iterator[Predictions], header: Header) -> None:
        self.made, self.width = made, header.geometry.n_experts
        self.horizons = [entry.horizon for entry in header.predictors]
        self.left = 0  # tokens of the current batch that were not taken yet
        self.current: Predictions = (0, {})

    def take(self, valid: Bools) -> dict[int, Floats]:
        """Return the next rows by horizon: NaN where not *valid*, or not predicted."""
        found = {h: np.full((len(valid), self.width), np.nan, np.float32) for h in self.horizons}
        rows, done = np.flatnonzero(valid), 0
        while done < len(rows):
            if not self.left:
                self.current = next(self.made)
                self.left = self.current[0]
            n_tokens, predicted = self.current
            count = min(self.left, len(rows) - done)
            first = n_tokens - self.left
            for horizon, scores in predicted.items():
                found[horizon][rows[done : done + count]] = scores[first : first + count]
            done, self.left = done + count, self.left - count
        return found


def _inside(trace: Path, predictor: Predictor, model: Any) -> Iterator[Predictions]:
    from moetier.traces.predictors.learn.parts import find_parts
    from moetier.traces.predictors.learn.running import check_tensors, predictions
    from moetier.traces.predictors.learn.samples import batch_samples

    parts = find_parts(model)
    check_tensors(predictor, parts)
    for batch, layer in batch_samples(trace, parts):
        yield batch.n_tokens, predictions(predictor, layer.view(batch.layer, parts))
