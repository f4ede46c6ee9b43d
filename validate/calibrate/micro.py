"""This module times a real machine's own lanes, kernels and dense part, wherever they are.

A run computes experts when their copies have landed, and a dense part after the experts of the
layer before: with caches that others filled, on a core that has just waited. In a loop of nothing
else both are up to three times as fast. So what is timed here comes right after real copies, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle
from threading import Event, Thread
from time import perf_counter_ns

import numpy as np
import torch

from moetier.sim.machine.work import DenseWork, dense_work
from moetier.sim.run import Setting
from moetier.traces.batch import DECODE, PREFILL, LayerBatch
from moetier.traces.geometry import Geometry
from moetier.traces.schema import Header, Provenance
from moetier.traces.synthetic import Synthetic
from moetier.validate.calibrate.device import DensePoint, Memory
from moetier.validate.calibrate.stand_in import stand_in
from moetier.validate.calibrate.ways import Way
from moetier.validate.compare.observe import Case, Run, observe
from moetier.validate.machines.dense import Dense
from moetier.validate.machines.experts import RandomHidden
from moetier.validate.machines.lanes import LaneSet

LAYERS = 4  # of the model whose dense part is timed, in turn
WAVES = 4  # copies of each lane in one repeat
PIECE = 1 << 20  # bytes of a copy that keeps a lane busy
QUEUED = 64  # of them per lane, so that none falls idle during one repeat
HOST_STEPS = 30


class RealDevice(ABC):
    """What calibration asks of a `Device`, but for where the machine keeps things."""

    writes_back = False

    def __init__(
        self,
        geometry: Geometry,
        weights: str,
        ways: Mapping[str, Way],
        dense: Callable[[DenseWork, Geometry], Dense],
        hidden: RandomHidden,
        *,
        lanes: int,
        threads: int,
    ) -> None:
        """Time the *ways* to compute an expert, and what *dense* makes of the model's first layers.

        *hidden* gives hidden states; *threads* of torch compute.
        """
        self.lanes = lanes
        self.expert_ops = 2 * geometry.expert_weights
        self._ways = ways
        self.kernels = {name: way.nbytes for name, way in ways.items()}
        cut = geometry.first_layers(min(LAYERS, geometry.n_moe_layers))  # like the others
        header = Header(geometry=cut, weights=weights, provenance=Provenance(kind="synthetic"))
        self._work = dense_work(header, weights)
        self._dense = dense(self._work, cut)
        self._heads: list[int] = self._work.head_bytes.tolist()
        self._turn = {
            head: cycle([at for at, n in enumerate(self._heads) if bool(n) == head] or [-1])
            for head in (False, True)
        }
        self._hidden = hidden
        self._geometry, self._weights, self._threads = geometry, weights, threads
        self._open: tuple[tuple[int, int], LaneSet] | None = None
        self._piece, self._copying = min(PIECE, *self.kernels.values()), False
        self._rng = np.random.default_rng(0)
        self._overdue = self._served = 0  # bytes
        self._steps: list[int] = []  # host times that were measured and not handed out yet

    def dense_bytes(self, head: bool) -> int | None:
        """Return the weights of one model layer's dense part, the output head's with *head*."""
        at = next((at for at, n in enumerate(self._heads) if bool(n) == head), None)
        if at is None:
            return None
        nbytes, layers = int(self._work.weight_bytes[at]), int(self._work.model_layers[at])
        own = self._heads[at]
        return (nbytes - own) // layers + own

    def copy(self, nbytes: int, lanes: int) -> int:
        """Bring random pieces; return ns per piece and lane."""
        return self._read(nbytes, lanes, WAVES) // WAVES

    def copy_back(self, nbytes: int, lanes: int) -> int:
        """Refuse, where nothing is written back."""
        raise NotImplementedError(f"{type(self).__name__} writes nothing back")

    def experts(self, kernel: str, count: int, tokens: int) -> int:
        """Compute a batch as the machine does, right after copies have landed."""
        return self._compute(kernel, count, tokens, self._let_copies_land)

    def _compute(self, kernel: str, count: int, tokens: int, ready: Callable[[], None]) -> int:
        """Compute a batch when *ready* has returned; return ns."""
        way = self._ways[kernel]
        ids = [next(way.ids) for _ in range(count)]
        batch = LayerBatch(0, DECODE, 0, tokens, tokens, ids * tokens)
        with self._computes():
            x = self._hidden(batch).to(way.experts.kernel.dtype)
            routed = way.experts.routed(batch, ids)
            self._settle()
            ready()
            begin = perf_counter_ns()
            outputs = {e: way.experts.run(next(way.slots), routed[e], x) for e in routed}
            way.experts.add_up(outputs, routed, x)
            self._settle()
        return perf_counter_ns() - begin

    def dense(self, point: DensePoint) -> int:
        """Compute a layer's dense part, and return its share for one layer of the model.

        The experts of a layer before it are computed first, and not timed.
        """
        at = next(self._turn[point.head])
        phase = DECODE if point.phase == "decode" else PREFILL
        batch = LayerBatch(0, phase, at, point.tokens, point.context, [])
        self.experts(next(iter(self.kernels)), self._geometry.top_k, 1)
        with self._computes():
            x = self._hidden(batch)
            self._settle()
            begin = perf_counter_ns()
            self._dense.run(batch, x)
            self._settle()
        took = perf_counter_ns() - begin
        layers = int(self._work.model_layers[at])
        return took if point.head else took // layers

    def host(self) -> int:
        """Return what a layer of a run takes beside its compute, of a model that is tiny.

        Planner, records and Python are those of the real run.
        """
        if not self._steps:
            self._steps = self._host_times()
        return self._steps.pop()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Keep all lanes busy until the end; it begins when the first copy has landed."""
        lanes = self._lane_set(self._piece, self.lanes)
        n = self._pieces(self._piece)
        asked = lanes.ask((), (), self._rng.choice(n, min(n, QUEUED * self.lanes), False).tolist())
        lanes.until(lambda: any(t.landed for t in asked.prefetched))
        self._copying = True
        try:
            yield
        finally:
            self._copying = False
            lanes.withdraw(asked.prefetched)
            lanes.quiet()
            lanes.release([t for t in asked.prefetched if t.landed])

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute experts in another thread until the end."""
        begun, ends = Event(), Event()
        kernel = next(iter(self.kernels))

        def work() -> None:
            torch.set_num_threads(self._threads)
            while not ends.is_set():
                self._compute(kernel, 1, 1, begun.set)  # lanes belong to the other thread

        thread = Thread(target=work, name="moetier calibrate", daemon=True)
        thread.start()
        begun.wait(10)
        try:
            yield
        finally:
            ends.set()
            thread.join()

    def close(self) -> None:
        """End the threads that read; calling it twice does nothing."""
        if self._open is not None:
            (nbytes, _), lanes = self._open
            lanes.close()
            self._overdue += lanes.overdue * nbytes
            self._served += lanes.served * nbytes
            self._open = None

    def _read(self, nbytes: int, lanes: int, waves: int) -> int:
        """Bring *waves* random pieces on each of *lanes* lanes; return ns."""
        served = self._lane_set(nbytes, lanes)
        pieces = self._rng.integers(self._pieces(nbytes), size=waves * lanes)
        asked = served.ask((), pieces.tolist())
        served.wait(asked.fetched)
        served.release(asked.fetched)
        return max(t.done for t in asked.fetched) - asked.at

    def _let_copies_land(self) -> None:
        """Wait for a copy on every lane, where none are under way anyhow."""
        if not self._copying:
            self._read(self._piece, self.lanes, 1)

    def _lane_set(self, nbytes: int, lanes: int) -> LaneSet:
        if self._open is None or self._open[0] != (nbytes, lanes):
            self.close()
            room = 2 * WAVES + (QUEUED if nbytes <= PIECE else 0)
            self._open = (nbytes, lanes), self._open_lanes(nbytes, lanes, room * lanes)
        return self._open[1]

    def _host_times(self) -> list[int]:
        """Run a tiny model with as many experts, all of them there; return ns per layer."""
        source = Synthetic(_tiny(self._geometry), tokens=HOST_STEPS)
        fast, slow = (tier.name for tier in self.tiers)
        setting = Setting(
            stand_in({fast: None, slow: None}),
            {"eviction": "lru", "warmup": "random"},
            capacity={fast: 1 << 30},
            weights=self._weights,
        )
        with self._tiny_runs(source, setting) as run:
            seen = observe(run, Case("lru", {}, source, setting))
        # Tokens are sorted by expert after the copies are ordered, which counts as a wait.
        spent = (seen.host_ns + seen.rows["wait_ns"])[seen.rows["misses"] == 0]
        return spent[1:].tolist() or [0]  # nothing came before the first

    @property
    @abstractmethod
    def tiers(self) -> tuple[Memory, Memory]:
        """The tier that computes, and the one below it."""

    @abstractmethod
    def _pieces(self, nbytes: int) -> int:
        """Return how many different pieces of *nbytes* there are to bring."""

    @abstractmethod
    def _open_lanes(self, nbytes: int, lanes: int, room: int) -> LaneSet:
        """Return *lanes* lanes that bring such pieces, with slots for *room* of them."""

    @abstractmethod
    def _tiny_runs(self, source: Synthetic, setting: Setting) -> AbstractContextManager[Run]:
        """Return what runs *source* under *setting* on the machine."""

    def _computes(self) -> AbstractContextManager[None]:
        """Return where compute is given to, for as long as it lasts."""
        return nullcontext()

    @abstractmethod
    def _settle(self) -> None:
        """Return once all that was given to compute is computed."""


def _tiny(geometry: Geometry) -> Geometry:
    """Return a model that costs the planner as much and computes next to nothing."""
    return Geometry(
        name="tiny", n_experts=geometry.n_experts, top_k=geometry.top_k, moe_layers=[0, 1],
        n_layers=2, hidden=64, moe_intermediate=32, heads=1, kv_heads=1, head_dim=16, vocab=64,
    )  # fmt: skip
