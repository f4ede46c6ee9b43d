"""This module computes every metric of a run from its records, and from nothing else.

Definitions, symbols and denominators are in docs/metrics.md. A value that cannot be computed is
None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from moetier.sim.energy import COMPONENTS
from moetier.sim.records import Columns
from moetier.traces.batch import DECODE, PREFILL

Ints = npt.NDArray[np.int64]

_SUMMED = (
    "tokens", "assignments", "lookups", "misses", "late_hits", "compulsory", "skipped", "cpu",
    "degraded", "lsb_lookups", "lsb_misses", "spared_bytes", "cpu_bytes", "skipped_bytes",
    "degraded_bytes",
    "lookup_bytes", "miss_bytes", "fetch_bytes", "lower_lookups", "lower_hits", "lower_bytes",
    "prefetch_issued", "prefetch_bytes", "prefetch_used", "prefetch_wasted_bytes",
    "cancelled_bytes", "dropped_bytes", "demoted_bytes", "warmup_bytes",
    "wait_ns", "copy_ns", "dense_ns", "expert_ns",
    *(f"energy_{name}_pj" for name in COMPONENTS),
)  # fmt: skip


@dataclass
class _Steps:
    """Per-step sums, gathered block by block; a step may straddle two blocks."""

    step: list[Ints] = field(default_factory=list)
    values: list[npt.NDArray[np.int64]] = field(default_factory=list)  # (steps, columns)


class Metrics:
    """Gather records block by block and summarise them; memory grows by one row per step.

    *warmup_steps* decode steps are left out of every rate and mean, to measure a steady state.
    """

    _columns = ("phase", "step_tokens", "duration", *_SUMMED)

    def __init__(self, warmup_steps: int = 0) -> None:
        """Begin with no records."""
        self._warmup = warmup_steps
        self._steps = _Steps()
        self._peak = 0

    def __call__(self, columns: Columns) -> None:
        """Take in a block of rows, which must follow the block before."""
        step = columns["step"]
        if not len(step):
            return
        starts = np.flatnonzero(np.concatenate(([True], step[1:] != step[:-1])))
        sums = [np.add.reduceat(columns[name], starts) for name in _SUMMED]
        duration = np.add.reduceat(columns["end_ns"] - columns["start_ns"], starts)
        tokens = np.maximum.reduceat(columns["tokens"], starts)
        self._steps.step.append(step[starts])
        self._steps.values.append(
            np.stack([columns["phase"][starts], tokens, duration, *sums], axis=1)
        )
        self._peak = max(self._peak, int(columns["peak_bytes"].max()))

    def summary(self) -> dict[str, Any]:
        """Return the metrics by name; shares and rates are fractions, missing values None."""
        table = self._table()
        decoding = table[:, 0] == DECODE
        measured = decoding & (np.cumsum(decoding) > self._warmup)
        prefill, decode = table[table[:, 0] == PREFILL], table[measured]
        both = np.concatenate((prefill, decode))
        total, pre, dec = self._sums(both), self._sums(prefill), self._sums(decode)
        timed = table[measured & _after_another(decoding)]
        tpot = timed[:, 2] / 1e6
        lockstep = decode[:, 1]
        result: dict[str, Any] = {
            "tpot_ms": _mean(tpot),
            **{f"tpot_p{q}_ms": _quantile(tpot, q) for q in (50, 95, 99)},
            "ttft_ms": _mean(prefill[:, 2] / 1e6),
            "tokens": int(lockstep.sum()),
            "tokens_per_s": _ratio(int(lockstep.sum()) * 1e9, int(decode[:, 2].sum())),
            "decode_steps": len(decode),
            "prefill_tokens": int(prefill[:, 1].sum()),
            "miss_rate": _ratio(dec["misses"], dec["lookups"]),
            "byte_miss_rate": _ratio(dec["miss_bytes"], dec["lookup_bytes"]),
            "late_hit_rate": _ratio(dec["late_hits"], dec["lookups"]),
            "miss_rate_prefill": _ratio(pre["misses"], pre["lookups"]),
            "byte_miss_rate_prefill": _ratio(pre["miss_bytes"], pre["lookup_bytes"]),
            "compulsory_miss_rate": _ratio(dec["compulsory"], dec["lookups"]),
            "hit_rate_decode": _hit(dec),
            "hit_rate_cumulative": _hit(total),
            "decode_bytes_looked_up": dec["lookup_bytes"],
            "lookups": total["lookups"],
            "misses": total["misses"],
            "compulsory_misses": total["compulsory"],
            "bytes_read_total": _read(total),
            "bytes_per_token": _ratio(_read(dec), int(lockstep.sum())),
            "demand_bytes": total["fetch_bytes"],
            "prefetch_bytes": _brought(total),
            "lower_bytes": total["lower_bytes"],
            "warmup_bytes": total["warmup_bytes"],
            "stall_share": _ratio(dec["wait_ns"], int(decode[:, 2].sum())),
            "copy_share": _ratio(dec["copy_ns"], int(decode[:, 2].sum())),
            **_prefetch(self._sums(table)),
            "lower_hit_rate": _ratio(total["lower_hits"], total["lower_lookups"]),
            **_bit_slices(dec),
            "byte_fetch_rate": _ratio(dec["fetch_bytes"], dec["lookup_bytes"]),
            "weight_read_share": _ratio(_computed(dec), dec["lookup_bytes"]),
            "skipped_share": _ratio(dec["skipped"], dec["lookups"]),
            "degraded_share": _ratio(dec["degraded"], dec["lookups"]),
            "cpu_share": _ratio(dec["cpu"], dec["lookups"]),
            "time_breakdown_ms": _breakdown(timed),
            **_energy(dec, pre, int(lockstep.sum())),
            "peak_bytes": self._peak,
        }
        return result

    def _table(self) -> npt.NDArray[np.int64]:
        """Return one row per step; the parts of a step that straddles blocks are added up."""
        if not self._steps.step:
            return np.empty((0, len(self._columns)), np.int64)
        step, values = np.concatenate(self._steps.step), np.concatenate(self._steps.values)
        starts = np.flatnonzero(np.concatenate(([True], step[1:] != step[:-1])))
        merged = np.add.reduceat(values, starts, axis=0)
        merged[:, :2] = np.maximum.reduceat(values[:, :2], starts, axis=0)
        return merged

    def _sums(self, table: npt.NDArray[np.int64]) -> dict[str, int]:
        return {name: int(table[:, at].sum()) for at, name in enumerate(self._columns)}


def summarise(blocks: list[Columns], warmup_steps: int = 0) -> dict[str, Any]:
    """Return the metrics of records given as *blocks* of rows."""
    metrics = Metrics(warmup_steps)
    for block in blocks:
        metrics(block)
    return metrics.summary()


def _after_another(decoding: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return which steps follow a decode step: TPOT leaves out the first one after a prefill."""
    return np.concatenate(([False], decoding[:-1]))


def _read(sums: dict[str, int]) -> int:
    return sums["fetch_bytes"] + _brought(sums)


def _brought(sums: dict[str, int]) -> int:
    """Return the bytes that prefetches really moved: what was withdrawn or dropped never did."""
    return sums["prefetch_bytes"] - sums["cancelled_bytes"] - sums["dropped_bytes"]


def _hit(sums: dict[str, int]) -> float | None:
    return _ratio(sums["lookups"] - sums["misses"], sums["lookups"])


def _computed(sums: dict[str, int]) -> int:
    """Return the bytes of routed experts that the main processor really read."""
    unread = ("cpu_bytes", "skipped_bytes", "degraded_bytes", "spared_bytes")
    return sums["lookup_bytes"] - sum(sums[name] for name in unread)


def _bit_slices(sums: dict[str, int]) -> dict[str, float | None]:
    """Return the miss rates of MSB and LSB slices; None where no LSB slice was asked for."""
    lookups, misses = sums["lsb_lookups"], sums["lsb_misses"]
    msb_lookups, msb_misses = sums["lookups"] - lookups, sums["misses"] - misses
    return {
        "miss_rate_msb": _ratio(msb_misses, msb_lookups) if lookups else None,
        "miss_rate_lsb": _ratio(misses, lookups),
    }


def _prefetch(sums: dict[str, int]) -> dict[str, Any]:
    """Return precision, coverage and ready recall; None where nothing was brought early."""
    issued, used, late = sums["prefetch_issued"], sums["prefetch_used"], sums["late_hits"]
    return {
        "prefetch_issued": issued,
        "prefetch_precision": _ratio(used, issued),
        "prefetch_coverage": _ratio(used, used + sums["misses"]) if issued else None,
        "ready_recall": _ratio(used - late, used + sums["misses"]) if issued else None,
        "prefetch_wasted_bytes": sums["prefetch_wasted_bytes"],
    }


def _breakdown(timed: npt.NDArray[np.int64]) -> dict[str, float | None]:
    """Return the mean milliseconds per decode step spent in each part; they add up to TPOT."""
    at = {name: Metrics._columns.index(f"{name}_ns") for name in ("dense", "wait", "expert")}
    return {name: _mean(timed[:, column] / 1e6) for name, column in at.items()}


def _energy(dec: dict[str, int], pre: dict[str, int], tokens: int) -> dict[str, Any]:
    """Return millijoules per decoded token and by component, prefill apart.

    None where all of it is zero: then the machine's profile has no coefficient of energy.
    """
    names = {name: f"energy_{name}_pj" for name in COMPONENTS}
    decode, prefill = (sum(sums[key] for key in names.values()) for sums in (dec, pre))
    known = decode + prefill > 0
    return {
        "energy_mj_per_token": _ratio(decode / 1e9, tokens) if known else None,
        "energy_breakdown": {
            name: _ratio(dec[key] / 1e9, tokens) if known else None for name, key in names.items()
        },
        "energy_mj_prefill": prefill / 1e9 if pre["tokens"] and known else None,
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: npt.NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None


def _quantile(values: npt.NDArray[np.float64], percent: int) -> float | None:
    return float(np.quantile(values, percent / 100)) if len(values) else None
