"""This module says which part of a machine made a measured run slower than the simulated one.

Per decode step but the first, as TPOT counts them, measured less simulated, in ms:

    link        the wait for copies
    host        between the end of a batch and the machine's turn: source, planner, recorder
    compute     the rest of the dense part, and the experts, as they err in quiet batches
    contention  what batches beside copies err more than that

The four add up to the difference of the TPOTs. A batch is beside copies if prefetches are queued or
in flight when it begins; its experts also if it orders some itself or, with overlap, fetches. Where
no batch is quiet, all of the error of compute counts as contention. Wait is what compute leaves of
a copy, so with prefetching an error of compute comes back in the link with the opposite sign.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moetier.sim.records import Columns
from moetier.traces.batch import DECODE
from moetier.validate.compare.observe import Ints, Observed, simulated_host_ns

PARTS = ("compute", "link", "contention", "host")

Marks = npt.NDArray[np.bool_]


def attribute(
    simulated: Observed, measured: Observed, warmup_steps: int = 0
) -> dict[str, float] | None:
    """Return the difference by part, in ms per decode step; None where no step is counted.

    Both must have decided the same; their rows are compared one by one. *warmup_steps* decode steps
    are left out, as TPOT leaves them out.
    """
    timed = timed_rows(measured.rows, warmup_steps)
    steps = len(np.unique(measured.rows["step"][timed]))
    if not steps or len(timed) != len(simulated.rows["step"]):
        return None
    host = simulated_host_ns(simulated)
    sim = {
        "dense": simulated.rows["dense_ns"] - host,
        "experts": simulated.rows["expert_ns"],
    }
    real = {
        "dense": measured.rows["dense_ns"] - measured.host_ns,
        "experts": measured.rows["expert_ns"],
    }
    ordered = measured.rows["prefetch_issued"] > 0
    if measured.result.stage.hierarchy.overlap:
        ordered |= measured.rows["fetch_bytes"] > 0
    beside = {"dense": measured.beside, "experts": measured.beside | ordered}
    compute = contention = 0.0
    for name in sim:
        quiet, extra = _split(sim[name][timed], real[name][timed], beside[name][timed])
        compute += quiet
        contention += extra
    wait = measured.rows["wait_ns"] - simulated.rows["wait_ns"]
    found = {
        "compute": compute,
        "link": float(wait[timed].sum()),
        "contention": contention,
        "host": float((measured.host_ns - host)[timed].sum()),
    }
    return {name: value / 1e6 / steps for name, value in found.items()}


def timed_rows(rows: Columns, warmup_steps: int = 0) -> Marks:
    """Return which rows count for TPOT: decode steps after the warm-up that follow another one."""
    step, decode = rows["step"], rows["phase"] == DECODE
    decoded = np.unique(step[decode])
    late = decoded[warmup_steps:]
    counted: Marks = decode & np.isin(step, late[np.isin(late - 1, decoded)])
    return counted


def stall_ms(rows: Columns, warmup_steps: int = 0) -> float | None:
    """Return how long compute waited for copies, per decode step that counts for TPOT."""
    timed = timed_rows(rows, warmup_steps)
    steps = len(np.unique(rows["step"][timed]))
    return float(rows["wait_ns"][timed].sum()) / 1e6 / steps if steps else None


def _split(simulated: Ints, measured: Ints, beside: Marks) -> tuple[float, float]:
    """Return the error of compute by itself over all rows, and what rows *beside* copies add."""
    error = measured - simulated
    quiet = error[~beside]
    usual = float(quiet.mean()) * len(error) if len(quiet) else 0.0
    return usual, float(error.sum()) - usual
