"""This module is the disk machine as calibration sees it: its own lanes, kernels and dense part.

A run computes experts when their copies have landed, and a dense part after the experts of the
layer before: with caches that others filled, on a core that has just waited. In a loop of nothing
else both are up to three times as fast. So what is timed here comes right after real copies, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch

from moetier.sim.hardware import Profile
from moetier.sim.machine.work import dense_work
from moetier.sim.policy.base import Precision
from moetier.sim.run import Result, Setting, simulate
from moetier.sim.units import format_rate
from moetier.traces.batch import DECODE, PREFILL, LayerBatch
from moetier.traces.errors import InputError
from moetier.traces.geometry import Geometry
from moetier.traces.schema import Header, Provenance
from moetier.traces.synthetic import Synthetic
from moetier.validate.calibrate.device import DensePoint, Memory
from moetier.validate.calibrate.power import energy_uj
from moetier.validate.calibrate.scratch import Pieces, scratch_file
from moetier.validate.calibrate.ways import ways, whole
from moetier.validate.compare.observe import Around, Case, observe
from moetier.validate.identity import DISK, identity
from moetier.validate.machines.dense import Dense
from moetier.validate.machines.direct import DirectFile, aligned
from moetier.validate.machines.experts import RandomHidden, WholeKernel
from moetier.validate.machines.lanes import LaneSet
from moetier.validate.machines.pacing import Pace
from moetier.validate.machines.run import disk_machine, pack_synthetic
from moetier.validate.machines.slots import SlotPool, free_memory

FILE_BYTES = 1 << 30
LAYERS = 4  # of the model whose dense part is timed, in turn
WAVES = 4  # copies of each lane in one repeat
PIECE = 1 << 20  # bytes of a copy that keeps a lane busy
QUEUED = 64  # of them per lane, so that none falls idle during one repeat
HOST_STEPS = 30
LATE = 0.1  # share of paced bytes that may come late


class DiskDevice:
    """Reads pieces of a scratch file and computes with random weights."""

    def __init__(
        self,
        geometry: Geometry,
        weights: str,
        file: DirectFile,
        *,
        lanes: int,
        pace: Pace | None,
        threads: int,
        precisions: Sequence[Precision] = (),
    ) -> None:
        """Make the weights: of whole experts, and of those that *precisions* store.

        Raises:
            InputError: If no kernel computes *weights*, sizes are unknown, or memory is short.
        """
        folder = file.path.parent.parent
        self.lanes, self._pace, self._file = lanes, pace, file
        self.expert_ops = 2 * geometry.expert_weights
        kernel = WholeKernel(geometry, weights)
        self._ways = whole(kernel)
        for precision in precisions:
            self._ways |= ways(precision, geometry, weights)
        self.kernels = {name: way.nbytes for name, way in self._ways.items()}
        self.identity = identity(DISK, folder) | {
            "threads": str(threads), "format": weights, "machine": "disk",
        }  # fmt: skip
        self.tiers = (
            Memory("dram", free_memory() or FILE_BYTES, "memory that was free"),
            Memory("disk", disk_usage(folder).total, f"the file system of {folder.resolve()}"),
        )
        cut = _cut(geometry)
        header = Header(geometry=cut, weights=weights, provenance=Provenance(kind="synthetic"))
        self._work = dense_work(header, weights)
        self._dense = Dense(self._work, cut, weights)
        self._heads: list[int] = self._work.head_bytes.tolist()
        self._turn = {
            head: cycle([at for at, n in enumerate(self._heads) if bool(n) == head] or [-1])
            for head in (False, True)
        }
        self._hidden = RandomHidden(self._dense.hidden, kernel.dtype)
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
        """Read random pieces; return ns per piece and lane."""
        return self._read(nbytes, lanes, WAVES) // WAVES

    def experts(self, kernel: str, count: int, tokens: int) -> int:
        """Compute a batch as the disk machine does, right after copies have landed."""
        return self._compute(kernel, count, tokens, self._let_copies_land)

    def _compute(self, kernel: str, count: int, tokens: int, ready: Callable[[], None]) -> int:
        """Compute a batch when *ready* has returned; return ns."""
        way = self._ways[kernel]
        ids = [next(way.ids) for _ in range(count)]
        batch = LayerBatch(0, DECODE, 0, tokens, tokens, ids * tokens)
        x = self._hidden(batch).to(way.experts.kernel.dtype)
        routed = way.experts.routed(batch, ids)
        ready()
        begin = perf_counter_ns()
        outputs = {e: way.experts.run(next(way.slots), routed[e], x) for e in routed}
        way.experts.add_up(outputs, routed, x)
        return perf_counter_ns() - begin

    def dense(self, point: DensePoint) -> int:
        """Compute a layer's dense part, and return its share for one layer of the model.

        The experts of a layer before it are computed first, and not timed.
        """
        at = next(self._turn[point.head])
        phase = DECODE if point.phase == "decode" else PREFILL
        batch = LayerBatch(0, phase, at, point.tokens, point.context, [])
        x = self._hidden(batch)
        self.experts(next(iter(self.kernels)), self._geometry.top_k, 1)
        begin = perf_counter_ns()
        self._dense.run(batch, x)
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
        """Keep all lanes reading until the end; it begins when the first copy has landed."""
        lanes = self._lane_set(self._piece, self.lanes)
        n = len(Pieces(self._file, self._piece).nbytes)
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

    def energy(self) -> int | None:
        """Return what the processor's counter says."""
        return energy_uj()

    def remarks(self) -> Sequence[str]:
        """Return how the file was read; refuse a pace that the disk did not keep."""
        self.close()
        found = [f"by {self._file.how}"]
        if self._pace is not None:
            rate = format_rate(self._pace.rate)
            late = self._overdue / max(self._served, 1)
            if late > LATE:
                raise InputError(
                    f"the disk does not keep {rate} on each of {self.lanes} lanes: {late:.1%} of "
                    "the bytes came late",
                    where="pace",
                    way_out="give a lower --pace, or fewer --lanes",
                )
            found.append(f"each lane held to {rate}; {late:.1%} of the bytes came late")
        return found

    def close(self) -> None:
        """End the threads that read; calling it twice does nothing."""
        if self._open is not None:
            (nbytes, _), lanes = self._open
            lanes.close()
            self._overdue += lanes.overdue * nbytes
            self._served += lanes.served * nbytes
            self._open = None

    def _read(self, nbytes: int, lanes: int, waves: int) -> int:
        """Read *waves* random pieces on each of *lanes* lanes; return ns."""
        served = self._lane_set(nbytes, lanes)
        pieces = self._rng.integers(len(Pieces(self._file, nbytes).nbytes), size=waves * lanes)
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
            slots = SlotPool(room * lanes * aligned(nbytes))
            pieces = Pieces(self._file, nbytes)
            self._open = (nbytes, lanes), LaneSet(pieces, lanes, self._pace, slots=slots)
        return self._open[1]

    def _host_times(self) -> list[int]:
        """Run a tiny model with as many experts, all of them in memory; return ns per layer."""
        geometry = _tiny(self._geometry)
        source = Synthetic(geometry, tokens=HOST_STEPS)
        setting = Setting(
            _any_profile(),
            {"eviction": "lru", "warmup": "random"},
            capacity={"dram": 1 << 30},
            weights=self._weights,
        )
        with TemporaryDirectory(dir=self._file.path.parent) as inside:
            path = Path(inside) / "tiny"
            pack_synthetic(path, source, setting)
            with disk_machine(path, threads=self._threads) as machines:

                def run(case: Case, around: Around, **observers: Any) -> Result:
                    return simulate(
                        case.source, case.setting, machine=around(machines), **observers
                    )

                seen = observe(run, Case("lru", {}, source, setting))
        # Tokens are sorted by expert after the copies are ordered, which counts as a wait.
        spent = (seen.host_ns + seen.rows["wait_ns"])[seen.rows["misses"] == 0]
        return spent[1:].tolist() or [0]  # nothing came before the first


@contextmanager
def disk_device(
    geometry: Geometry,
    weights: str,
    folder: Path,
    *,
    lanes: int = 1,
    pace: Pace | None = None,
    threads: int = 1,
    precisions: Sequence[Precision] = (),
    file_bytes: int = FILE_BYTES,
) -> Iterator[DiskDevice]:
    """Yield a disk as a device; at the end its file and threads are gone.

    Beside whole experts in the format *weights*, those that *precisions* store are timed.

    Raises:
        InputError: If *folder* or memory do not suffice, or the model cannot be computed.
    """
    before = torch.get_num_threads()
    with scratch_file(folder, file_bytes) as file:
        torch.set_num_threads(threads)
        device = None
        try:
            device = DiskDevice(
                geometry,
                weights,
                file,
                lanes=lanes,
                pace=pace,
                threads=threads,
                precisions=precisions,
            )
            yield device
        finally:
            torch.set_num_threads(before)
            if device is not None:
                device.close()


def _cut(geometry: Geometry) -> Geometry:
    """Return the model with its first layers only, whose dense parts are like the others'."""
    layers = geometry.moe_layers[:LAYERS]
    return geometry.model_copy(update={"moe_layers": layers, "n_layers": layers[-1] + 1})


def _tiny(geometry: Geometry) -> Geometry:
    """Return a model that costs the planner as much and computes next to nothing."""
    return Geometry(
        name="tiny", n_experts=geometry.n_experts, top_k=geometry.top_k, moe_layers=[0, 1],
        n_layers=2, hidden=64, moe_intermediate=32, heads=1, kv_heads=1, head_dim=16, vocab=64,
    )  # fmt: skip


def _any_profile() -> Profile:
    """Return a machine to plan for; no time comes from it."""
    block = {"source": "to plan for"}
    tier = {"capacity": "1 TB", "bandwidth": "1 GB/s", **block}
    return Profile.model_validate(
        {
            "name": "any",
            **block,
            "tiers": {"dram": tier, "disk": tier},
            "links": [{"src": "disk", "dst": "dram", "bandwidth": "1 GB/s", **block}],
            "compute": {"cpu": {"tier": "dram", "peak": "1 GOP/s", **block}},
        }
    )
