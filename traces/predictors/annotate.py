"""This module gives recorded routing the predictions of a predictor that needs no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from moetier.traces.batch import LayerBatch, Source
from moetier.traces.columns import Columns
from moetier.traces.errors import InputError
from moetier.traces.predictors.base import BatchPredictor, Predictor
from moetier.traces.schema import Header


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
