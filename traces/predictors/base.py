"""This module defines what a predictor is, and what it may look at.

Shapes: V valid tokens, H hidden, E experts, K experts per token, L MoE layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from moetier.traces.batch import Floats, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.schema import Header, ScoreKind
from moetier.traces.schema import Predictor as Entry

if TYPE_CHECKING:
    from torch import Generator, Tensor

Needs = Literal["model", "past", "future"]
"""Where a predictor works: inside a model; on any batches in order; on recorded ones only."""

Shapes = dict[str, tuple[int, ...]]


class Parts(Protocol):
    """The norms and routers of a model, which predictors borrow; see `learn.parts.ModelParts`."""

    @property
    def n_layers(self) -> int:
        """The number of MoE layers."""
        ...

    def norm(self, layer: int, residual: Tensor) -> Tensor:
        """Return what the norm before the router of *layer* makes of *residual* (V, H)."""
        ...

    def logits(self, layer: int, router_input: Tensor) -> Tensor:
        """Return the float32 logits (V, E) of the router of *layer* for *router_input* (V, H)."""
        ...

    def scores(self, layer: int, logits: Tensor) -> Tensor:
        """Return *logits* as a trace holds the scores of that router: see `score_kind`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What a predictor sees of one MoE layer, before its experts run.

    `ids` and `weights` are those really executed; a token with fewer than K has weight 0 there.
    """

    layer: int  # index among the MoE layers
    residual: Tensor  # (V, H) the stream after attention, before the experts' output is added
    router_input: Tensor  # (V, H) the same after the norm: what router and experts read
    ids: Tensor  # (V, K)
    weights: Tensor  # (V, K)
    parts: Parts


class Predictor(ABC):
    """Predicts the router scores of MoE layers `layer + horizon`, for each of its horizons.

    A subclass says its `shapes` and `operations`, which are pure functions of a geometry, and what
    it predicts. `kind` and `arguments` are those it was created with.
    """

    needs: ClassVar[Needs] = "model"
    learns: ClassVar[bool] = False  # by gradient descent
    loss_weights: ClassVar[Mapping[int, float]] = {}  # of the horizons; 1 where not named
    assumption: str | None = None  # what a result that used it must say
    kind: str = ""
    arguments: Mapping[str, Any]

    def __init__(self, horizons: Sequence[int]) -> None:
        """Predict for *horizons*, each at least 1."""
        if not horizons or min(horizons) < 1 or len(set(horizons)) < len(horizons):
            raise InputError(
                f"horizons {list(horizons)}",
                way_out="give different numbers of layers, each at least 1",
            )
        self.horizons = tuple(sorted(horizons))
        self.tensors: dict[str, Tensor] = {}  # its own weights
        self.arguments = {}

    def shapes(self, geometry: Geometry, horizon: int) -> Shapes:
        """Return its own weights for *horizon*; shared ones belong to the first horizon alone."""
        return {}

    @abstractmethod
    def operations(self, geometry: Geometry, horizon: int) -> int:
        """Return the operations per token and layer of predicting *horizon*.

        A product and its sum are two. A router that it borrows from the model counts.
        """

    def n_parameters(self, geometry: Geometry, horizon: int | None = None) -> int:
        """Return the number of its own weights: for one *horizon*, or all of them."""
        chosen = self.horizons if horizon is None else (horizon,)
        return sum(prod(shape) for h in chosen for shape in self.shapes(geometry, h).values())

    def entries(self, geometry: Geometry) -> list[Entry]:
        """Return what a trace's header says of it; weights it does not have yet take 4 bytes."""
        first = next(iter(self.tensors.values()), None)
        bytes_each = 4 if first is None else first.element_size()
        return [
            Entry(
                name=self.kind,
                horizon=horizon,
                nbytes=bytes_each * self.n_parameters(geometry, horizon),
                operations=self.operations(geometry, horizon),
            )
            for horizon in self.horizons
            if horizon < geometry.n_moe_layers
        ]


class ModelPredictor(Predictor):
    """A predictor inside a model: it sees a `View`."""

    guesses: ClassVar[bool] = False  # does `state` say more than the residual through the norm?

    @abstractmethod
    def logits(self, view: View, horizon: int) -> Tensor:
        """Return predicted logits (V, E) of MoE layer `view.layer + horizon`, which exists."""

    def own(self, name: str, layer: int, like: Tensor) -> Tensor:
        """Return its weights *name* of *layer*, as float32 where *like* is."""
        return self.tensors[name][layer].to(like.device).float()

    def state(self, view: View, horizon: int) -> Tensor | None:
        """Return its guess (V, H) of what that router will read, where it makes one."""
        return None

    def initial(self, geometry: Geometry, generator: Generator) -> dict[str, Tensor]:
        """Return the weights that training starts from, those of `trained`, as float32."""
        return {}

    def trained(self, view: View, horizon: int) -> Tensor:
        """Return the logits (V, E) that training moves towards the router's; default: all."""
        return self.logits(view, horizon)

    def predict(self, view: View) -> dict[int, Tensor]:
        """Return scores (V, E) by horizon; there is none beyond the last layer."""
        return {
            horizon: view.parts.scores(view.layer + horizon, self.logits(view, horizon))
            for horizon in self.horizons
            if view.layer + horizon < view.parts.n_layers
        }


class BatchPredictor(Predictor):
    """A predictor that looks at batches only, so that it works on a trace without its model.

    `start` is called once; then, in forward order, `predict` and `observe` for every batch.
    """

    @abstractmethod
    def start(self, geometry: Geometry, score_kind: ScoreKind) -> None:
        """Forget everything; predict scores of *score_kind*."""

    @abstractmethod
    def predict(self, batch: LayerBatch, ahead: Mapping[int, LayerBatch]) -> dict[int, Floats]:
        """Return scores (n_tokens, E) by horizon, leaving out what it cannot predict.

        *ahead* holds the batches that the horizons ask for, when `needs` is "future".
        """

    def prepare(self, header: Header, batches: Any) -> None:
        """Look at all *batches* before the first is predicted; most have no need to."""

    @abstractmethod
    def observe(self, batch: LayerBatch) -> None:
        """Learn what *batch* really did."""


def hidden_of(geometry: Geometry) -> int:
    """Return the hidden size of *geometry*; raise `InputError` where it is not known."""
    if geometry.hidden is None:
        raise InputError(
            f"the hidden size of '{geometry.name}' is unknown",
            way_out="name a published geometry with `model:`",
        )
    return geometry.hidden


def router_operations(geometry: Geometry) -> int:
    """Return the operations of one router for one token."""
    return 2 * hidden_of(geometry) * geometry.n_experts


def norm_operations(geometry: Geometry) -> int:
    """Return the operations of one norm for one token: square, sum, and scale twice."""
    return 4 * hidden_of(geometry)
