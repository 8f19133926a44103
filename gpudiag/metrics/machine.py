"""Metrics of the GPU's memory, power, clocks and links, from NVML samples taken while it was busy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpudiag.metrics.busy import NO_GPU
from gpudiag.metrics.copies import PCIE_LANE_BYTES_PER_S
from gpudiag.metrics.make import ON_GPU, PROFILE, PROFILE_LONGER, Value, inapplicable, missing, value
from gpudiag.scope import Scope
from gpudiag.timeline import Samples

# NVML clocks event reasons (nvml.h, nvmlClocksEventReason*).
APPLICATIONS_CLOCKS, SW_POWER_CAP = 0x2, 0x4
SLOWDOWNS = 0x8 | 0x20 | 0x40 | 0x80  # HW slowdown, SW thermal, HW thermal, HW power brake
BUSY = 0.01  # of NVML's utilisation: any work since the last sample
# The link trains down to save power when a GPU idles, and a desktop's few draws do not wake it: its state counts only where
# the GPU runs at half its clock or more (at half its utilisation, where the clock is not known), and for half a second.
AWAKE, AWAKE_SAMPLES = 0.5, 5
NAMES = (
    "memory_peak_share", "power_cap_share", "thermal_share", "clocks_locked_share", "sm_clock_share", "power_draw",
    "power_limit", "temperature", "sm_clock", "memory_growth", "pcie_link_share",
)  # fmt: skip


def measure(scope: Scope) -> Iterator[Value]:
    reason = "NVML was not sampled" if scope.timeline.samples is None else "NVML gave no sample of a busy GPU"
    how = PROFILE
    if scope.ops is None:
        reason, how = NO_GPU, ON_GPU
    yield _foreign(scope)
    yield from _nvlinks(scope)
    allocator = _allocator(scope)
    yield allocator.pop("memory_fragmented_share")
    samples = _busy(scope)
    if samples is None or not len(samples):
        for name in NAMES:
            yield allocator.get(name) or missing(name, reason, how)
        return
    known = (samples.memory_used >= 0) & (samples.memory_total > 0)
    if known.any():
        share = samples.memory_used[known] / samples.memory_total[known]
        yield value("memory_peak_share", float(share.max()), "nvml")
        inside = share[scope.window.contains(samples.start[known])]
        if "memory_growth" in allocator:  # NVML sees what the allocator keeps, and other processes
            yield allocator["memory_growth"]
        elif inside.size > 1:
            yield value("memory_growth", float(inside[-1] - inside[0]), "nvml")
        else:
            yield missing("memory_growth", "NVML gave fewer than two samples inside the window", PROFILE_LONGER)
    else:
        reason = "NVML did not give the memory in use"
        yield allocator.get("memory_peak_share") or missing("memory_peak_share", reason, PROFILE)
        yield allocator.get("memory_growth") or missing("memory_growth", reason, PROFILE)
    yield from of_busy(samples)


def of_busy(samples: Samples) -> Iterator[Value]:
    """Clocks, power, heat and the PCIe link of one device, from its samples under load; at least one."""
    yield _pcie(samples)
    reasons = samples.reasons[samples.reasons >= 0]
    for name, bits in (
        ("power_cap_share", SW_POWER_CAP),
        ("thermal_share", SLOWDOWNS),
        ("clocks_locked_share", APPLICATIONS_CLOCKS),
    ):
        if reasons.size:
            yield value(name, float(np.mean((reasons & bits) != 0)), "nvml")
        else:
            yield missing(name, "NVML did not give the clocks event reasons", PROFILE)
    ratio = samples.sm_clock_mhz / np.where(samples.sm_clock_max_mhz > 0, samples.sm_clock_max_mhz, np.nan)
    for name, column, how in (
        ("sm_clock_share", ratio, np.nanmedian),
        ("sm_clock", samples.sm_clock_mhz, np.nanmedian),
        ("power_draw", samples.power_w, np.nanmedian),
        ("power_limit", samples.power_limit_w, np.nanmedian),
        ("temperature", samples.temperature_c, np.nanmax),
    ):
        if np.isfinite(column).any():
            yield value(name, float(how(column)), "nvml")
        else:
            yield missing(name, "NVML did not give it", PROFILE)


def link_rate(generation: int | None, width: int | None) -> float:
    """Bytes/s of a PCIe link in one direction; 0 where it is not known."""
    return PCIE_LANE_BYTES_PER_S.get(generation or 0, 0) * max(0, width or 0)


def _pcie(samples: Samples) -> Value:
    """The best that was seen counts: a reading can fall into a moment in which the link changes its rate."""
    clock = samples.sm_clock_mhz / np.where(samples.sm_clock_max_mhz > 0, samples.sm_clock_max_mhz, np.nan)
    load = np.where(np.isfinite(clock), clock, samples.gpu_util)
    best, most = (
        [
            link_rate(int(generation), int(width))
            for generation, width in zip(generations[load >= AWAKE], widths[load >= AWAKE], strict=True)
        ]
        for generations, widths in (
            (samples.pcie_gen, samples.pcie_width),
            (samples.pcie_gen_max, samples.pcie_width_max),
        )
    )
    if sum(map(bool, best)) < AWAKE_SAMPLES or not max(most):
        reason = f"NVML gave the link's state in fewer than {AWAKE_SAMPLES} samples of a GPU under load"
        return missing("pcie_link_share", reason, PROFILE_LONGER)
    return value("pcie_link_share", max(best) / max(most), "nvml")


def _nvlinks(scope: Scope) -> Iterator[Value]:
    info = scope.timeline.devices.get(scope.device)
    for name in ("nvlinks", "nvlinks_active"):
        count = getattr(info, name, None)
        if scope.ops is None:
            yield missing(name, NO_GPU, ON_GPU)
        elif scope.timeline.samples is None:
            yield missing(name, "NVML was not asked", PROFILE)
        elif count is None:
            yield inapplicable(name, "NVML knows no NVLink on this GPU")
        else:
            yield value(name, count, "nvml")


def _allocator(scope: Scope) -> dict[str, Value]:
    """What the torch allocator's own events tell: how full, how fragmented, growing from step to step."""
    events = scope.timeline.memory
    mine = events.take(events.device == scope.device) if events is not None and scope.ops is not None else None
    if mine is None or not len(mine):
        reason = "what torch's allocator held was not recorded"
        return {"memory_fragmented_share": missing("memory_fragmented_share", reason, PROFILE)}
    at_peak = int(mine.allocated.argmax())
    reserved = max(1, int(mine.reserved[at_peak]))
    spare = 1 - int(mine.allocated[at_peak]) / reserved
    found: dict[str, Value] = {"memory_fragmented_share": value("memory_fragmented_share", spare, "allocator events")}
    info = scope.timeline.devices.get(scope.device)
    if info is None or not info.memory_bytes:
        return found
    peak = int(mine.reserved.max()) / info.memory_bytes
    found["memory_peak_share"] = value("memory_peak_share", peak, "allocator events")
    if len(scope.steps) >= 2:
        row = np.searchsorted(mine.start, scope.steps.end, side="right") - 1
        if row[0] >= 0:
            grown = int(mine.allocated[row[-1]]) - int(mine.allocated[row[0]])
            found["memory_growth"] = value("memory_growth", grown / info.memory_bytes, "allocator events")
    return found


def _foreign(scope: Scope) -> Value:
    samples = scope.timeline.samples
    known = np.empty(0, np.int32)
    if samples is not None:
        known = samples.other_processes[(samples.device == scope.device) & (samples.other_processes >= 0)]
    if scope.ops is None:
        return missing("foreign_processes", NO_GPU, ON_GPU)
    if not known.size:
        return missing("foreign_processes", "the processes on the GPU were not sampled (NVML)", PROFILE)
    return value("foreign_processes", int(known.max()), "nvml")


def _busy(scope: Scope) -> Samples | None:
    samples = scope.timeline.samples
    if samples is None:
        return None
    return samples.take((samples.device == scope.device) & (samples.gpu_util >= BUSY))
