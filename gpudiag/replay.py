"""Replay a stretch of a recording with something changed: the dependency graph behind the `estimate` of a finding.

The model (Daydream, Zhu et al., ATC 2020, and Lighthouse's Lantern work alike): one host line that launches and waits, streams
that run in order, a launch before its operation, and a wait that ends with the operation it waited for. Unchanged, it must
give back the recorded time (TOLERANCE); where it does not, it is not used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpudiag.intervals import Int64, Intervals
from gpudiag.names import COPY_CALL, LAUNCH, SYNC
from gpudiag.scope import Scope
from gpudiag.timeline import Bool, Kind

TOLERANCE = 0.02  # issue 5.4
MAX_EVENTS = 60_000  # host events replayed; more tell nothing new and cost a second each
CROSS_STREAM_NS = 20_000  # an operation this soon after one of another stream ends, and late otherwise, waited for it
LATENCY_NS = 5_000  # launch to start on an idle device, where a dependency hides the recorded one
GRAPH_GAP_NS = (
    1_000  # between kernels of one CUDA graph (NVIDIA, "Getting started with CUDA graphs": about 1.3 us to launch)
)
BLOCKED_LAUNCH = 20  # a launch call this many times the median waited for room in the queue

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Graph:
    """Host events by start, and the operations that they launched.

    think: host time before event i that is not in a call; cost: of the call itself, without waiting. op: operation that the
    event launched, -1 none. wait_for: operation whose end released the call, -1 did not wait; tail: recorded time from that
    end to the call's return. stream, length, latency, depends: per operation; latency counts from the call's start, gap from the end of
    the stream's last operation, depends
    is an operation of another stream that it waited for (-1 none) and lag the time from that one's end; on_free: its stream had nothing to do.
    stream_free: per stream, the time until which earlier work keeps it busy. start, end: of the stretch. recorded: its length.
    """

    begin: Int64
    think_start: Int64
    think: Floats
    cost: Floats
    op: npt.NDArray[np.int64]
    wait_for: npt.NDArray[np.int64]
    tail: Floats
    is_copy_call: Bool
    stream: npt.NDArray[np.int64]
    length: Floats
    latency: Floats
    gap: Floats
    depends: npt.NDArray[np.int64]
    lag: Floats
    on_free: Bool
    is_link_copy: Bool
    stream_free: Floats
    start: int
    end: int
    rest: float
    recorded: float
    steps: int


@dataclass(frozen=True)
class Edit:
    """What to change. drop: host time in these intervals vanishes by `drop_share`. no_wait: calls that no longer wait (mask over
    events). free_launch: host time in these intervals and launch costs vanish (a graph replay). overlap_copies: copies over
    the host link get a stream of their own and nobody waits for them. floor_ns: the result is at least this long.
    """

    drop: Intervals = field(default_factory=Intervals.empty)
    drop_share: float = 1.0
    no_wait: Bool | None = None
    free_launch: Intervals = field(default_factory=Intervals.empty)
    overlap_copies: bool = False
    floor_ns: float = 0.0


def build(scope: Scope) -> Graph | str:
    """The graph of the scope's steady steps (as many as fit MAX_EVENTS), or why there is none."""
    calls = scope.timeline.api_calls
    if calls is None or scope.launches is None or scope.ops is None or scope.host is None or not len(scope.window):
        return "launches were not recorded, so nothing can be replayed"
    start, end, steps = int(scope.window.start[0]), int(scope.window.end[-1]), len(scope.steps)
    joined = np.full(len(calls), -1, np.int64)
    first = np.flatnonzero(scope.launches.call_of >= 0)[::-1]
    joined[scope.launches.call_of[first]] = first  # the first operation of a call (a graph launch has many)
    chosen = (
        scope.feeding
        & ((joined >= 0) | scope.names.rows(calls.name, SYNC))
        & (calls.start >= start)
        & (calls.start < end)
    )
    rows = np.flatnonzero(chosen)
    if rows.size > MAX_EVENTS and steps:
        per_step = rows.size / steps
        steps = max(1, int(MAX_EVENTS / per_step))
        end = int(scope.steps.end[steps - 1])
        rows = rows[calls.start[rows] < end]
    if rows.size > 2 * MAX_EVENTS:
        return "the stretch holds too many launches to replay"
    if rows.size < 3:
        return "too few launches were recorded to replay"
    order = np.lexsort((calls.end[rows], calls.start[rows]))
    return _graph(scope, rows[order], joined, start, end, max(1, steps))


def _graph(scope: Scope, rows: npt.NDArray[np.intp], joined: Int64, start: int, end: int, steps: int) -> Graph | str:
    calls, all_ops = scope.timeline.api_calls, scope.ops
    assert calls is not None and all_ops is not None
    op_rows = joined[rows]
    used = np.unique(op_rows[op_rows >= 0])
    if not used.size:
        return "no launch of the stretch has its GPU work in the recording"
    inside = (all_ops.start >= start) & (all_ops.start < end)
    if used.size < 0.9 * inside.sum():
        return "more than a tenth of the GPU work has no launch call in the recording"
    ops = all_ops.take(used)
    number = np.full(len(all_ops), -1, np.int64)
    number[used] = np.arange(used.size)
    op = np.where(op_rows >= 0, number[np.maximum(op_rows, 0)], -1)
    call_start, call_end = calls.start[rows], calls.end[rows]

    streams, stream = np.unique(ops.stream, return_inverse=True)
    free = np.array([_last_before(all_ops.end, (all_ops.stream == s) & (all_ops.start < ops.start[stream == i].min()), start)
                     for i, s in enumerate(streams)], float)  # fmt: skip
    launched_at = np.zeros(used.size, np.int64)
    launched_at[op[op >= 0]] = call_start[op >= 0]
    previous_end = np.zeros(used.size, np.int64)
    for i in range(streams.size):
        mine = np.flatnonzero(stream == i)
        reach = np.maximum.accumulate(ops.end[mine])
        previous_end[mine] = np.append(int(free[i]), reach[:-1])
    ready = np.maximum(previous_end, launched_at)
    late = np.maximum(ops.start - ready, 0)
    by_end = np.argsort(ops.end, kind="stable")
    at = np.searchsorted(ops.end[by_end], ops.start, side="right") - 1
    other = by_end[np.maximum(at, 0)]
    crossed = (
        (at >= 0)
        & (late > CROSS_STREAM_NS)
        & (stream[other] != stream)
        & (ops.start - ops.end[other] < CROSS_STREAM_NS)
    )
    crossed &= launched_at[other] < launched_at
    depends = np.where(crossed, other, -1)
    lag = np.where(crossed, ops.start - ops.end[other], 0).astype(float)
    # Where the stream was free the delay is the launch's latency, else the gap that the stream leaves behind its last operation.
    on_free_stream = launched_at > previous_end
    latency = np.where(on_free_stream & ~crossed, late, np.where(late > 0, LATENCY_NS, 0)).astype(float)
    gap = np.where(on_free_stream | crossed, 0, late).astype(float)

    is_launch = scope.names.rows(calls.name[rows], LAUNCH)
    is_copy_call = scope.names.rows(calls.name[rows], COPY_CALL)
    is_sync = scope.names.rows(calls.name[rows], SYNC)
    duration = call_end - call_start
    typical = float(np.median(duration[is_launch])) if is_launch.any() else 0.0
    blocking = is_sync | (is_copy_call & (op >= 0) & (call_end >= ops.end[np.maximum(op, 0)]))
    blocking |= is_launch & (duration > max(100_000.0, BLOCKED_LAUNCH * typical))
    released = np.searchsorted(ops.end[by_end], call_end, side="right") - 1
    by = np.where(is_copy_call & (op >= 0), op, by_end[np.maximum(released, 0)])
    waited = blocking & (released >= 0) & (ops.end[by] > call_start)
    waited &= (launched_at[by] < call_start) | (by == op)
    wait_for = np.where(waited, by, -1)
    tail = np.where(waited, call_end - ops.end[by], 0).astype(float)
    reach = np.append(start, np.maximum.accumulate(call_end))[:-1]
    begin = np.maximum(call_start, reach)
    cost = np.where(waited, 0, np.maximum(call_end - begin, 0)).astype(float)
    return Graph(
        begin=call_start,
        think_start=reach,
        think=np.maximum(call_start - reach, 0).astype(float),
        cost=cost,
        op=op,
        wait_for=wait_for,
        tail=tail,
        is_copy_call=is_copy_call,
        stream=stream.astype(np.int64),
        length=(ops.end - ops.start).astype(float),
        latency=latency,
        gap=gap,
        depends=depends,
        lag=lag,
        on_free=on_free_stream,
        is_link_copy=(ops.kind == Kind.MEMCPY) & np.isin(ops.copy_kind, (1, 2)),
        stream_free=free,
        start=start,
        end=end,
        rest=float(max(0, end - int(max(call_end.max(), start)))),
        recorded=float(max(end, int(ops.end.max())) - start),
        steps=steps,
    )


def _last_before(ends: Int64, mask: Bool, default: int) -> int:
    return max(default, int(ends[mask].max())) if mask.any() else default


def replay(graph: Graph, edit: Edit | None = None) -> float:
    """Length of the stretch, ns, with the edit made."""
    edit = edit or Edit()
    think = graph.think - _removed(graph, edit.drop) * edit.drop_share
    cost = graph.cost
    if len(edit.free_launch):
        think = think - np.minimum(think, _removed(graph, edit.free_launch))
        cost = np.where((graph.op >= 0) & ~graph.is_copy_call, 0.0, cost)
    think = np.maximum(think, 0)
    latency, gap = graph.latency, graph.gap
    if len(edit.free_launch):
        # what started on a free stream follows the kernel before it now, and shows no gap of its own
        latency, gap = (
            np.minimum(latency, GRAPH_GAP_NS),
            np.where(graph.on_free, GRAPH_GAP_NS, np.minimum(gap, GRAPH_GAP_NS)),
        )
    wait_for = graph.wait_for
    if edit.no_wait is not None:
        wait_for = np.where(edit.no_wait, -1, wait_for)
    extra = graph.stream_free.size if edit.overlap_copies else -1
    if edit.overlap_copies:
        released_by_copy = (wait_for >= 0) & graph.is_link_copy[np.maximum(wait_for, 0)]
        wait_for = np.where(released_by_copy, -1, wait_for)
    host = float(graph.start)
    free = [*graph.stream_free.tolist(), float(graph.start)]
    ends = np.zeros(graph.stream.size)
    for op, pause, spent, waits, tail in zip(
        graph.op.tolist(), think.tolist(), cost.tolist(), wait_for.tolist(), graph.tail.tolist(), strict=True
    ):
        host += pause
        if op >= 0:
            stream = int(graph.stream[op])
            if extra >= 0 and graph.is_link_copy[op]:
                stream = extra
            began = max(free[stream] + float(gap[op]), host + float(latency[op]))
            before = int(graph.depends[op])
            if before >= 0 and not (extra >= 0 and graph.is_link_copy[before]):
                began = max(began, float(ends[before]) + float(graph.lag[op]))
            ends[op] = free[stream] = began + float(graph.length[op])
        host += spent
        if waits >= 0:
            host = max(host, float(ends[waits]) + tail)
    host += max(0.0, graph.rest - _removed_between(edit, graph))
    return max(host, float(ends.max()) if ends.size else host, graph.start + edit.floor_ns) - graph.start


def _removed(graph: Graph, what: Intervals) -> Floats:
    """How much of each pause lies in the intervals."""
    if not len(what):
        return np.zeros(graph.think.size)
    return what.covered_in(graph.think_start, np.maximum(graph.begin, graph.think_start)).astype(float)


def _removed_between(edit: Edit, graph: Graph) -> float:
    """How much of the time after the last call lies in what is dropped."""
    last = np.array([graph.end - int(graph.rest)], np.int64)
    end = np.array([graph.end], np.int64)
    return float(edit.drop.covered_in(last, end)[0]) * edit.drop_share + float(
        edit.free_launch.covered_in(last, end)[0]
    )


def trusted(graph: Graph) -> tuple[bool, float]:
    """(whether the unchanged replay gives the recorded time within TOLERANCE, the relative error)."""
    error = abs(replay(graph) - graph.recorded) / max(1.0, graph.recorded)
    return error <= TOLERANCE, error
