"""Metrics of copies: bytes, rates, exposure by memory kind, and what the host did for them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gpudiag.intervals import Intervals
from gpudiag.metrics.busy import NO_GPU
from gpudiag.metrics.launching import idle_after
from gpudiag.metrics.make import ON_GPU, PROFILE, PROFILE_LONGER, PROFILE_NSYS, Value, missing, value
from gpudiag.names import BLOCKING_COPY, COPY_CALL
from gpudiag.scope import Scope
from gpudiag.timeline import Bool, CopyKind, GpuOps, Kind, MemKind

LARGE = 1_000_000  # bytes from which a copy's rate says something of the link (RULES.md T6)
BATCH_TENSORS = 5  # of equal size in one batch: BERT's ids, types, mask, positions and labels
SYNC_COPY_BYTES = 64_000  # nsys's expert rule leaves smaller synchronous copies out
NAMES = (
    "h2d_bytes", "h2d_pageable_bytes", "h2d_pageable_exposed", "h2d_pinned_time", "h2d_pinned_exposed", "h2d_pinned_rate",
    "h2d_pageable_rate", "d2h_bytes", "d2h_large_exposed", "d2h_pageable_bytes", "link_rate_share", "copies_per_step",
    "copy_median_bytes", "copy_api_time", "copy_api_idle", "blocking_copies", "blocking_copy_idle", "reupload_exposed",
    "reupload_bytes", "device_copy_time", "memset_fill_time", "managed_time",
)  # fmt: skip
PCIE_LANE_BYTES_PER_S = {
    1: 0.25e9,
    2: 0.5e9,
    3: 0.985e9,
    4: 1.969e9,
    5: 3.938e9,
    6: 7.563e9,
}  # per lane, one direction, PCI-SIG


def measure(scope: Scope) -> Iterator[Value]:
    if scope.ops is None or scope.layers is None:
        for name in NAMES:
            yield missing(name, NO_GPU, ON_GPU)
        return
    everything = scope.window_ops
    rows = np.flatnonzero(everything.kind == Kind.MEMCPY)
    ops = everything.take(rows)
    copy = np.ones(len(ops), bool)
    h2d, d2h = copy & (ops.copy_kind == CopyKind.H2D), copy & (ops.copy_kind == CopyKind.D2H)
    link = h2d | d2h
    size = np.maximum(ops.bytes, 0)
    pageable, pinned = ops.src_mem == MemKind.PAGEABLE, ops.src_mem == MemKind.PINNED
    exposed = {kind: part.intersect(scope.window) for kind, part in scope.layers.copies_exposed.items()}

    yield value("h2d_bytes", scope.per_step(float(size[h2d].sum())), "gpu_ops")
    yield value("d2h_bytes", scope.per_step(float(size[d2h].sum())), "gpu_ops")
    yield value("copies_per_step", scope.per_step(int(link.sum())), "gpu_ops")
    if link.any():
        yield value("copy_median_bytes", float(np.median(size[link])), "gpu_ops")
    else:
        yield missing("copy_median_bytes", "no copy between host and device ran in the window", PROFILE_LONGER)
    into_pageable = d2h & (ops.dst_mem == MemKind.PAGEABLE)
    if d2h.any() and not np.isin(ops.dst_mem[d2h], (MemKind.PAGEABLE, MemKind.PINNED)).any():
        yield missing("d2h_pageable_bytes", "the recorder did not say which memory the copies went to", PROFILE_NSYS)
    else:
        yield value("d2h_pageable_bytes", scope.per_step(float(size[into_pageable].sum())), "gpu_ops")
    if h2d.any() and not (pageable | pinned)[h2d].any():
        for name in ("h2d_pageable_bytes", "h2d_pageable_exposed", "h2d_pinned_time", "h2d_pinned_exposed"):
            yield missing(name, "the recorder did not say which memory the copies came from", PROFILE_NSYS)
    else:
        yield value("h2d_pageable_bytes", scope.per_step(float(size[h2d & pageable].sum())), "gpu_ops")
        pinned_union = _union(ops, h2d & pinned)
        only_pageable = _union(ops, h2d & pageable).subtract(pinned_union)
        yield value("h2d_pageable_exposed", scope.per_step(only_pageable.intersect(exposed["h2d"]).total()), "gpu_ops")
        yield value("h2d_pinned_time", scope.per_step(pinned_union.intersect(scope.window).total()), "gpu_ops")
        yield value("h2d_pinned_exposed", scope.per_step(pinned_union.intersect(exposed["h2d"]).total()), "gpu_ops")
    for name, mask in (("h2d_pinned_rate", h2d & pinned), ("h2d_pageable_rate", h2d & pageable)):
        large = mask & (size >= LARGE)
        time = int((ops.end - ops.start)[large].sum())
        if time:
            yield value(name, float(size[large].sum()) / time * 1e9, "gpu_ops")
        else:
            yield missing(name, "no such copy of at least 1 MB was recorded", PROFILE_LONGER)
    yield from _link_share(scope, ops, link & (size >= LARGE) & (pinned | (ops.dst_mem == MemKind.PINNED)))
    big = _union(ops, d2h & (size >= SYNC_COPY_BYTES))
    yield value("d2h_large_exposed", scope.per_step(big.intersect(exposed["d2h"]).total()), "gpu_ops")
    yield from _host_side(scope, ops, link, rows)
    again = _reuploads(scope, ops, h2d & (size >= LARGE))
    yield value("reupload_exposed", scope.per_step(_union(ops, again).intersect(exposed["h2d"]).total()), "gpu_ops")
    yield value("reupload_bytes", scope.per_step(float(size[again].sum())), "gpu_ops")
    yield from _on_device(scope, everything)


def _union(ops: GpuOps, mask: Bool) -> Intervals:
    return Intervals.union_of(ops.start[mask], ops.end[mask])


def _link_share(scope: Scope, ops: GpuOps, large: Bool) -> Iterator[Value]:
    samples = scope.timeline.samples
    mine = samples.take(samples.device == scope.device) if samples is not None else None
    generation = int(mine.pcie_gen.max()) if mine is not None and len(mine) else -1
    width = int(mine.pcie_width.max()) if mine is not None and len(mine) else -1
    lane = PCIE_LANE_BYTES_PER_S.get(generation)
    if lane is None or width <= 0:
        yield missing("link_rate_share", "the link's generation and width under load were not sampled (NVML)", PROFILE)
    elif not large.any():
        yield missing("link_rate_share", "no pinned copy of at least 1 MB was recorded", PROFILE_LONGER)
    else:
        rates = ops.bytes[large] / np.maximum(1, ops.end[large] - ops.start[large]) * 1e9
        yield value("link_rate_share", float(np.median(rates)) / (lane * width), "gpu_ops, nvml")


def _host_side(scope: Scope, ops: GpuOps, link: Bool, of_window: npt.NDArray[np.intp]) -> Iterator[Value]:
    calls = scope.timeline.api_calls
    if calls is None or scope.launches is None:
        for name in ("copy_api_time", "copy_api_idle", "blocking_copies", "blocking_copy_idle"):
            yield missing(name, "API calls were not recorded", PROFILE)
        return
    copying = scope.feeding & scope.names.rows(calls.name, COPY_CALL)
    in_copy = Intervals.union_of(calls.start[copying], calls.end[copying]).intersect(scope.window)
    yield value("copy_api_time", scope.per_step(in_copy.total()), "api_calls")
    yield value("copy_api_idle", scope.per_step(in_copy.intersect(scope.idle).total()), "api_calls")
    call = scope.window_calls[of_window]
    blocking = link & (call >= 0) & (ops.bytes > SYNC_COPY_BYTES)
    blocking[blocking] = scope.names.rows(calls.name[call[blocking]], BLOCKING_COPY)
    rows = call[blocking]
    yield value("blocking_copies", scope.per_step(int(blocking.sum())), "api_calls, gpu_ops")
    assert scope.host is not None
    chosen = np.isin(scope.host.wait_start, calls.start[rows])
    yield value("blocking_copy_idle", scope.per_step(idle_after(scope, chosen).total()), "api_calls, account")


def _reuploads(scope: Scope, ops: GpuOps, large: Bool) -> Bool:
    """Copies of at least 1 MB to the device whose size comes back often: at least three times a step, more than BATCH_TENSORS
    such copies a step together, or, where no steps are known, three times in all beside at least three other such sizes
    (an input batch has one or two sizes)."""
    again = np.zeros(len(ops), bool)
    rows = np.flatnonzero(large)
    if not rows.size:
        return again
    _, inverse, count = np.unique(ops.bytes[rows], return_inverse=True, return_counts=True)
    often = count >= 3 * scope.count
    if (int(count[often].sum()) <= BATCH_TENSORS * scope.count) if len(scope.steps) else (int(often.sum()) < 4):
        return again
    again[rows] = often[inverse]
    return again


def _on_device(scope: Scope, ops: GpuOps) -> Iterator[Value]:
    table = scope.kernels
    moving = table.time([kind.family == "copy" for kind in table.classes])
    filling = table.time(["FillFunctor" in name or "fill_kernel" in name for name in table.names])
    other = ops.take(np.flatnonzero((ops.kind == Kind.MEMCPY) | (ops.kind == Kind.MEMSET)))
    length = other.end - other.start
    d2d = int(length[(other.kind == Kind.MEMCPY) & (other.copy_kind == CopyKind.D2D)].sum())
    sets = int(length[other.kind == Kind.MEMSET].sum())
    yield value("device_copy_time", scope.per_step(moving + d2d), "gpu_ops")
    yield value("memset_fill_time", scope.per_step(filling + sets), "gpu_ops")
    yield value("managed_time", scope.per_step(scope.parts.get("copy_exposed.managed", 0)), "account")
