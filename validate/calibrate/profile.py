"""This module turns what was measured into a hardware profile, and writes it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from moetier.sim.hardware import Profile
from moetier.sim.units import format_ns
from moetier.sim.yaml_input import check
from moetier.traces.files import replacing
from moetier.validate.calibrate.device import Device
from moetier.validate.calibrate.measure import TOKENS, Copies, Figures
from moetier.validate.calibrate.samples import Sample
from moetier.validate.calibrate.ways import kernel_name


def profile_of(name: str, device: Device, figures: Figures, model: str) -> Profile:
    """Return the profile of *device*, called *name*, with times measured for *model*.

    Raises:
        InputError: If *device* did not work as it should have.
    """
    date = device.identity.get("date", "an unknown date")
    remarks = list(device.remarks())
    fast, slow = device.tiers
    kernel = next(iter(device.kernels))
    peak_rate = max(figures.rate(*key) for key in figures.copies)
    one = figures.expert(kernel, 1)
    reading = max(device.kernels[kernel] * 1_000_000_000 // one, peak_rate, 1)
    most = max(TOKENS)
    ops = max(device.expert_ops * most * 1_000_000_000 // figures.expert(kernel, most), 1)
    contention = (
        f"measured {date}: {figures.together} experts with all {device.lanes} lanes busy against "
        f"alone, {_said(figures.compute_beside)} against {_said(figures.compute_alone)}; beside "
        f"compute copies took {_percent(figures.copy_slowdown)} longer "
        f"({_said(figures.copy_beside)} against {_said(figures.copy_alone)}), which is not modelled"
    )
    data: dict[str, Any] = {
        "name": name,
        "source": f"measured {date} by micro-benchmarks, for experts and dense parts of {model}",
        "tiers": {
            fast.name: {
                "capacity": f"{fast.capacity} B",
                "bandwidth": f"{reading} B/s",
                "source": f"capacity: {fast.source}; bandwidth: measured {date}, what computing an "
                "expert on one token reads (the link's, where that is more)",
            },
            slow.name: {
                "capacity": f"{slow.capacity} B",
                "bandwidth": f"{peak_rate} B/s",
                "source": f"capacity: {slow.source}; bandwidth: the highest of the link, {date}",
            },
        },
        "links": _links(device, figures, date, remarks),
        "compute": {"processor": _compute(device, figures, date, ops)},
        "contention": {
            "compute_slowdown": _percent(figures.compute_slowdown),
            "source": contention,
        },
        "notes": _notes(figures),
        "identity": dict(device.identity),
    }
    if figures.idle_uw is not None:
        data["static_power"] = f"{figures.idle_uw} uW"
    return check(Profile, data, "what was measured")


def _links(device: Device, figures: Figures, date: str, remarks: list[str]) -> list[dict[str, Any]]:
    """Return the link up, and the one down where it was measured."""
    fast, slow = (tier.name for tier in device.tiers)
    said = "; ".join([f"measured {date}, all lanes reading at once", *remarks])
    found = [_link(slow, fast, device.lanes, Copies(figures.copies), said)]
    if figures.back:
        said = f"measured {date}, all lanes writing at once, nothing else under way"
        found.append(_link(fast, slow, device.lanes, Copies(figures.back), said))
    return found


def _link(src: str, dst: str, lanes: int, copies: Copies, said: str) -> dict[str, Any]:
    return {
        "src": src,
        "dst": dst,
        "lanes": lanes,
        "latency": f"{copies.latency} ns",
        "bandwidth": [
            {
                "size": f"{nbytes} B",
                "lanes": busy,
                "rate": f"{copies.rate(nbytes, busy)} B/s",
                **_beside(sample),
            }
            for (nbytes, busy), sample in copies.samples.items()
        ],
        "source": f"{said}; the latency is where time over size meets zero bytes on one lane",
    }


def _compute(device: Device, figures: Figures, date: str, ops: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tier": device.tiers[0].name,
        "peak": f"{ops} OP/s",
        "overhead": f"{figures.overhead} ns",
        "host_time_per_layer": f"{figures.host.ns} ns",
        "experts": [
            {
                "kernel": kernel_name(kernel),
                "nbytes": f"{nbytes} B",
                "tokens": tokens,
                "time": f"{figures.expert(kernel, tokens)} ns",
                **_beside(figures.experts[kernel, tokens, figures.together]),
            }
            for kernel, nbytes in device.kernels.items()
            for tokens in TOKENS
        ],
        "dense": [
            {
                "phase": point.phase,
                "nbytes": f"{device.dense_bytes(point.head)} B",
                "tokens": point.tokens,
                "context": point.context,
                "time": f"{sample.ns} ns",
                **_beside(sample),
            }
            for point, sample in figures.dense.items()
        ],
        "source": (
            f"measured {date}; an expert is a part of a batch of {figures.together}, and what a "
            f"batch of one takes beyond its part is the overhead; host time per layer: "
            f"{_said(figures.host)}; the peak is that of {max(TOKENS)} tokens on one expert"
        ),
    }
    if figures.busy_uw is not None and figures.idle_uw is not None:
        # microwatts over operations per second are microjoules per operation: 1e9 femtojoules
        above = max(figures.busy_uw - figures.idle_uw, 0)
        kernel = next(iter(device.kernels))
        rate = device.expert_ops * 1_000_000_000 // figures.expert(kernel, 1)
        found["energy"] = f"{above * 1_000_000_000 // max(rate, 1)} fJ/op"
    return found


def _notes(figures: Figures) -> str:
    if figures.idle_uw is None:
        return "no energy counter can be read here, so every energy that is computed is 0: unknown"
    return (
        "static power is the idle power of what the counter counts; energy per operation is what "
        "experts on one token add to it, their memory traffic included"
    )


def _beside(sample: Sample) -> dict[str, Any]:
    return {"repeats": len(sample.values), "spread": _percent(sample.spread)}


def _percent(share: Fraction) -> str:
    return f"{float(share * 100):.1f} %"


def _said(sample: Sample) -> str:
    return (
        f"{format_ns(sample.ns)} (median of {len(sample.values)}, spread {_percent(sample.spread)})"
    )


def write_profile(path: str | Path, profile: Profile) -> None:
    """Write *profile* to *path* as YAML; the file appears only when it is complete."""
    data = profile.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
