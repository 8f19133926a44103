"""Metrics of launches, waits and compilation: what the host did that the device had to wait for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from gpudiag.account import after_waits
from gpudiag.host import HostWork, named
from gpudiag.intervals import Int64, Intervals
from gpudiag.metrics.busy import NO_GPU
from gpudiag.metrics.make import ON_GPU, PROFILE, PROFILE_LONGER, PROFILE_TORCH, Value, missing, value
from gpudiag.names import ALLOCATOR, COMPILE, COMPILE_CALL, LAUNCH, SYNC
from gpudiag.scope import Scope
from gpudiag.timeline import Bool, CopyKind, Kind

READBACK_BYTES = 1024  # RULES.md T5
QUEUE_EMPTY_NS = 10_000  # launch latency on an idle device is 3-8 us; a kernel that starts later waited for something
IMPLICIT_SYNC = re.compile(r"^aten::(?:_local_scalar_dense|nonzero|masked_select|_?unique\d?|is_nonzero)$")
NAMES = (
    "launch_cost", "queue_time", "queue_empty_share", "syncs_per_step", "sync_time", "sync_copy_time", "small_readbacks",
    "readback_idle", "alloc_calls",
)  # fmt: skip


def measure(scope: Scope) -> Iterator[Value]:
    yield from _repeats(scope)
    yield from _compilations(scope)
    if scope.ops is None or scope.host is None:
        for name in (*NAMES, "implicit_syncs", "implicit_sync_idle"):
            yield missing(name, NO_GPU, ON_GPU)
        return
    if scope.timeline.api_calls is None or scope.launches is None:
        for name in NAMES:
            yield missing(name, "API calls were not recorded", PROFILE)
    else:
        yield from _launches(scope)
        yield from _waits(scope)
    yield from _implicit(scope)


def _launches(scope: Scope) -> Iterator[Value]:
    calls = scope.timeline.api_calls
    assert calls is not None and scope.ops is not None
    ops, call = scope.window_ops, scope.window_calls
    kernel = np.isin(ops.kind, (Kind.KERNEL, Kind.COMM, Kind.GRAPH)) & (call >= 0)
    kernel[kernel] = scope.names.rows(calls.name[call[kernel]], LAUNCH)
    rows = call[kernel]
    if not rows.size:
        for name in ("launch_cost", "queue_time", "queue_empty_share"):
            yield missing(name, "no kernel could be joined to its launch call", PROFILE)
    else:
        yield value("launch_cost", float(np.median(calls.end[rows] - calls.start[rows])), "api_calls")
        queue = ops.start[kernel] - calls.end[rows]
        yield value("queue_time", float(np.median(queue)), "api_calls, gpu_ops")
        began = np.flatnonzero(kernel)
        reach = np.maximum.accumulate(ops.end)
        before = np.where(began > 0, reach[np.maximum(began - 1, 0)], np.iinfo(np.int64).min)
        empty = (queue < QUEUE_EMPTY_NS) & (before < ops.start[began])
        yield value("queue_empty_share", float(np.mean(empty)), "api_calls, gpu_ops")
    mine = scope.feeding & scope.names.rows(calls.name, ALLOCATOR) & scope.window.contains(calls.start)
    yield value("alloc_calls", scope.per_step(int(mine.sum())), "api_calls")


def _waits(scope: Scope) -> Iterator[Value]:
    calls = scope.timeline.api_calls
    assert calls is not None and scope.ops is not None and scope.host is not None and scope.layers is not None
    sync = scope.feeding & scope.names.rows(calls.name, SYNC)
    waits = Intervals.union_of(calls.start[sync], calls.end[sync]).intersect(scope.window)
    yield value("syncs_per_step", scope.per_step(int(scope.window.contains(calls.start[sync]).sum())), "api_calls")
    yield value("sync_time", scope.per_step(waits.total()), "api_calls")
    kernels = scope.layers.compute.union(scope.layers.comm)
    only_copies = scope.layers.copies.subtract(kernels)
    yield value("sync_copy_time", scope.per_step(waits.intersect(only_copies).total()), "api_calls, gpu_ops")
    count, idle = readbacks(scope)
    yield value("small_readbacks", scope.per_step(count), "api_calls, gpu_ops")
    yield value("readback_idle", scope.per_step(idle.total()), "account")


def readbacks(scope: Scope) -> tuple[int, Intervals]:
    """(copies of at most 1 kB to the host that the host waited for, the idle time in the account that follows such waits)."""
    assert scope.host is not None
    ops, host = scope.window_ops, scope.host
    small = (
        (ops.kind == Kind.MEMCPY) & (ops.copy_kind == CopyKind.D2H) & (ops.bytes >= 0) & (ops.bytes <= READBACK_BYTES)
    )
    ends = np.sort(ops.end[small])
    if not ends.size or not host.wait_start.size:
        return 0, Intervals.empty()
    # the waits in which such a copy finished
    covering = np.searchsorted(ends, host.wait_end, side="right") > np.searchsorted(ends, host.wait_start, side="left")
    waits = Intervals.union_of(host.wait_start[covering], host.wait_end[covering])
    # a call that returns in the very moment of its copy's end holds it too: intervals are half-open
    return int(waits.contains(ends - 1).sum()), idle_after(scope, covering)


def idle_after(scope: Scope, chosen: Bool) -> Intervals:
    """The part of idle.sync that follows the chosen waits."""
    assert scope.host is not None and scope.layers is not None
    host = scope.host
    some = HostWork(**{**vars(host), "wait_start": host.wait_start[chosen], "wait_end": host.wait_end[chosen]})
    return after_waits(scope.idle, some, scope.layers).intersect(scope.account.owned_by("idle.sync"))


def implicit_sync_rows(scope: Scope) -> Int64:
    """Rows of scope.cpu_ops in the window that read a value back, outermost only (`is_nonzero` calls `_local_scalar_dense`).

    Where API calls were recorded, only those in which the host waited: the item() of a tensor on the CPU waits for nothing.
    """
    ops = scope.cpu_ops
    if ops is None:
        return np.empty(0, np.int64)
    rows = np.flatnonzero(scope.names.rows(ops.name, IMPLICIT_SYNC) & scope.window.contains(ops.start))
    if not rows.size:
        return rows
    reach = np.maximum.accumulate(ops.end[rows])
    rows = rows[np.append(True, ops.start[rows][1:] >= reach[:-1])]
    if scope.timeline.api_calls is not None and scope.host is not None:
        waits = scope.host.wait_start
        rows = rows[np.searchsorted(waits, ops.end[rows]) > np.searchsorted(waits, ops.start[rows])]
    return np.asarray(rows, np.int64)


def _implicit(scope: Scope) -> Iterator[Value]:
    ops = scope.cpu_ops
    if ops is None:
        yield missing("implicit_syncs", "framework operators were not recorded", PROFILE_TORCH)
        yield missing("implicit_sync_idle", "framework operators were not recorded", PROFILE_TORCH)
        return
    assert scope.host is not None
    rows = implicit_sync_rows(scope)
    yield value("implicit_syncs", scope.per_step(rows.size), "cpu_ops")
    under = Intervals.union_of(ops.start[rows], ops.end[rows])
    chosen = under.contains(scope.host.wait_start)
    yield value("implicit_sync_idle", scope.per_step(idle_after(scope, chosen).total()), "cpu_ops, account")


def _repeats(scope: Scope) -> Iterator[Value]:
    if scope.ops is None or not len(scope.steps):
        yield missing("step_repeat_share", "no steps with GPU work are known", PROFILE_LONGER)
        return
    ops = scope.window_ops
    rows = np.flatnonzero(np.isin(ops.kind, (Kind.KERNEL, Kind.GRAPH)))
    start, name, stream = ops.start[rows], ops.name[rows], ops.stream[rows]
    low, high = np.searchsorted(start, scope.steps.start), np.searchsorted(start, scope.steps.end)
    # stream by stream: which of two streams is first varies from step to step
    sequences = Counter(
        name[a:b][np.argsort(stream[a:b], kind="stable")].tobytes() for a, b in zip(low, high, strict=True)
    )
    yield value("step_repeat_share", sequences.most_common(1)[0][1] / len(low), "gpu_ops")


def _compilations(scope: Scope) -> Iterator[Value]:
    timeline = scope.timeline
    if timeline.ranges is None and timeline.api_calls is None and timeline.cpu_ops is None:
        yield missing("recompilations", "neither ranges nor API calls were recorded", PROFILE)
        return
    if scope.host is not None:
        compiling = scope.host.compile
    else:
        compiling = (
            named(timeline.ranges, scope.names, COMPILE)
            .union(named(timeline.cpu_ops, scope.names, COMPILE))
            .union(named(timeline.api_calls, scope.names, COMPILE_CALL))
        )
    # intervals of the union: what a compilation calls counts once
    yield value("recompilations", len(compiling.intersect(scope.window)), "ranges, api_calls")
