"""The exclusive time account: every nanosecond of the window has exactly one owner (DESIGN 4).

Each claimant takes from what the ones before it left of the window, so the parts add up to the window by construction. Device-level unions only; idle time is never summed over streams.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import TypeVar

import numpy as np

from gpudiag.figures import Layers
from gpudiag.host import STALL_NS, HostWork, named
from gpudiag.intervals import Int64, Intervals
from gpudiag.names import BACKWARD, CHECKPOINT_LOG, COMPILE, FORWARD, GC, H2D, INPUT, OPTIMIZER, Names
from gpudiag.steps import OUR_STEP, PROFILER_STEP
from gpudiag.timeline import CpuOps, Int8, Ranges, Steps, Timeline

HostTable = TypeVar("HostTable", Ranges, CpuOps)

DEVICE_PARTS: tuple[str, ...] = (
    "compute",
    "communication_exposed",
    "copy_exposed.h2d",
    "copy_exposed.d2h",
    "copy_exposed.d2d",
    "copy_exposed.p2p",
    "copy_exposed.managed",
    "copy_exposed.other",
    "memset_exposed",
    "idle.input",
    "idle.sync",
    "idle.launch",
    "idle.allocator",
    "idle.compile",
    "idle.checkpoint_log",
    "idle.gc",
    "idle.host",
    "idle.profiler",
    "idle.unknown",
)
HOST_PARTS: tuple[str, ...] = (
    "host.input",
    "host.h2d",
    "host.forward",
    "host.backward",
    "host.optimizer",
    "host.checkpoint_log",
    "host.compile",
    "host.gc",
    "host.framework",
    "host.other",
)
PARTS: tuple[str, ...] = DEVICE_PARTS + HOST_PARTS
HOST_DEVICE = -1


@dataclass(frozen=True, eq=False)
class Account:
    """One device (or, device -1, the host of a run without GPU work) over its window.

    window: what is accounted for. owned: the time of each part that has any, by name in the order of PARTS; disjoint, and
    together exactly the window. steps: the steady steps, empty for scope "span".
    """

    rank: int
    device: int
    window: Intervals
    owned: dict[str, Intervals]
    steps: Steps

    @property
    def scope(self) -> str:
        return "steps" if len(self.steps) else "span"

    @property
    def total(self) -> int:
        return self.window.total()

    @cached_property
    def parts(self) -> dict[str, int]:
        """ns by part; parts with no time are left out."""
        return {name: time.total() for name, time in self.owned.items()}

    def owned_by(self, part: str) -> Intervals:
        """The time of one part as intervals."""
        return self.owned.get(part, Intervals.empty())

    @cached_property
    def per_step(self) -> list[dict[str, int]]:
        """The parts of each steady step; together they are `parts`."""
        if not len(self.steps):
            return []
        columns = {
            name: time.covered_in(self.steps.start, self.steps.end).tolist() for name, time in self.owned.items()
        }
        return [{name: column[i] for name, column in columns.items() if column[i]} for i in range(len(self.steps))]

    def segments(self, start: int, end: int) -> tuple[Int64, Int64, Int8]:
        """The pieces between two times in rising order: start, end, owner (code into PARTS)."""
        pieces = [(PARTS.index(name), time.clip(start, end)) for name, time in self.owned.items()]
        starts = np.concatenate([piece.start for _, piece in pieces]) if pieces else np.empty(0, np.int64)
        ends = np.concatenate([piece.end for _, piece in pieces]) if pieces else np.empty(0, np.int64)
        owner = np.repeat(np.array([code for code, _ in pieces], np.int8), [len(piece) for _, piece in pieces])
        order = np.argsort(starts, kind="stable")
        return starts[order], ends[order], owner[order]


def device_account(rank: int, device: int, window: Intervals, layers: Layers, host: HostWork, steps: Steps) -> Account:
    """The account of one device. window: the steady steps, or the span of the device."""
    claims: list[tuple[str, Intervals]] = [("compute", layers.compute), ("communication_exposed", layers.comm_exposed)]
    claims += [(f"copy_exposed.{label}", part) for label, part in layers.copies_exposed.items()]
    claims.append(("memset_exposed", layers.memset_exposed))
    idle = window.subtract(layers.busy)
    if len(layers.busy) and len(window):
        # Work that was launched before the recording began is in no recording: until the first recorded operation
        # nobody can say that the device was idle, let alone why (a torch.profiler window starts between steps).
        claims.append(("idle.unknown", window.clip(int(window.start[0]), int(layers.busy.start[0]))))
    claims += [
        ("idle.unknown", idle.intersect(host.stalled).at_least(STALL_NS)),
        ("idle.profiler", host.profiler),
        ("idle.input", host.input),
        ("idle.checkpoint_log", host.checkpoint_log),
        ("idle.compile", host.compile),
        ("idle.gc", host.gc),
        ("idle.allocator", host.allocator),
        ("idle.sync", after_waits(idle, host, layers)),
        ("idle.launch", host.active),
        ("idle.host", host.observed),
    ]
    return _settle(rank, device, window, claims, "idle.unknown", steps)


def after_waits(idle: Intervals, host: HostWork, layers: Layers) -> Intervals:
    """Idle time that exists because the host waited for the device with nothing more queued.

    A gap is a wait's when the device ran dry while the host was inside the waiting call. Without the call the host would
    have come back earlier by its length (less the time under copies alone, which belongs to the copies), so at most that
    much of the gap, from its beginning, is the wait's: min(host, device), as RULES.md S2 and the measured control of
    gpu-idle say. Overlapping calls: the one that began first counts.
    """
    if not len(idle) or not host.wait_start.size:
        return Intervals.empty()
    reach = np.maximum.accumulate(host.wait_end)
    call = np.searchsorted(reach, idle.start, side="left")  # the earliest call that had not returned when the gap began
    running = call < host.wait_start.size
    running[running] = host.wait_start[call[running]] < idle.start[running]
    start, end, call = idle.start[running], idle.end[running], call[running]
    kernels = layers.compute.union(layers.comm)
    waited = kernels.covered_in(host.wait_start[call], start) + np.maximum(host.wait_end[call] - start, 0)
    return Intervals.union_of(start, start + np.minimum(waited, end - start))


def host_account(timeline: Timeline, names: Names, window: Intervals, steps: Steps, process: int | None) -> Account:
    """The account of a run without GPU work: what the main thread did, by phase, over the steps."""
    ranges, cpu_ops = timeline.ranges, timeline.cpu_ops
    if process is not None:
        ranges = None if ranges is None else ranges.take(ranges.process == process)
        cpu_ops = None if cpu_ops is None else cpu_ops.take(cpu_ops.process == process)

    everywhere = ranges, cpu_ops  # autograd's thread runs the backward pass while the main thread waits for it
    main = _main_thread(ranges, cpu_ops, names)
    ranges = None if ranges is None else _of_thread(ranges, main)
    cpu_ops = None if cpu_ops is None else _of_thread(cpu_ops, main)

    def phase(pattern: re.Pattern[str]) -> Intervals:
        return named(ranges, names, pattern).union(named(cpu_ops, names, pattern))

    optimizer = phase(OPTIMIZER)
    backward = named(everywhere[0], names, BACKWARD).union(named(everywhere[1], names, BACKWARD))
    framework = Intervals.union_of(cpu_ops.start, cpu_ops.end) if cpu_ops is not None else Intervals.empty()
    claims = [
        ("host.input", phase(INPUT)),
        ("host.checkpoint_log", phase(CHECKPOINT_LOG)),
        ("host.compile", phase(COMPILE)),
        ("host.gc", phase(GC)),
        ("host.h2d", phase(H2D)),
        # the inner phase counts: an optimizer may step from a hook of the backward pass, or run both passes in a closure
        ("host.optimizer", Intervals.union_of(*_beginning_in(backward, optimizer))),
        ("host.backward", backward),
        ("host.forward", phase(FORWARD)),
        ("host.optimizer", optimizer),
        ("host.framework", framework),
    ]
    return _settle(timeline.rank, HOST_DEVICE, window, claims, "host.other", steps)


def _main_thread(ranges: Ranges | None, cpu_ops: CpuOps | None, names: Names) -> tuple[int, int] | None:
    """(process, thread) that spends most time in the phases of a step, else in operators; None where nothing was recorded."""
    best: tuple[int, tuple[int, int]] | None = None
    phases = [names.matching(pattern) for pattern in (FORWARD, OPTIMIZER, INPUT, OUR_STEP, PROFILER_STEP)]
    of_step = np.logical_or.reduce(phases) if names.size else np.zeros(0, bool)
    for table, chosen in ((ranges, of_step), (cpu_ops, None)):
        if best is not None or table is None or not len(table):
            continue
        rows = np.arange(len(table)) if chosen is None else np.flatnonzero(chosen[table.name])
        threads, which = np.unique(np.stack([table.process[rows], table.thread[rows]]), axis=1, return_inverse=True)
        spent = np.bincount(which.ravel(), weights=table.end[rows] - table.start[rows])
        if spent.size:
            first = int(spent.argmax())
            best = int(spent[first]), (int(threads[0, first]), int(threads[1, first]))
    return best[1] if best else None


def _of_thread(table: HostTable, thread: tuple[int, int] | None) -> HostTable:
    if thread is None:
        return table
    mine = (table.process == thread[0]) & (table.thread == thread[1])
    return table if mine.all() else table.take(mine)


def _beginning_in(outer: Intervals, inner: Intervals) -> tuple[Int64, Int64]:
    """The inner intervals that begin inside an outer one, as starts and ends."""
    inside = outer.contains(inner.start)
    return inner.start[inside], inner.end[inside]


def _settle(
    rank: int, device: int, window: Intervals, claims: list[tuple[str, Intervals]], rest: str, steps: Steps
) -> Account:
    """Give each claimant in turn what is left of its claim, and the rest to `rest`."""
    left = window
    owned: dict[str, list[Intervals]] = {}
    for name, claim in [*claims, (rest, window)]:
        got = left.intersect(claim)
        if len(got):
            owned.setdefault(name, []).append(got)
            left = left.subtract(got)
    return Account(
        rank,
        device,
        window,
        {name: reduce(Intervals.union, owned[name]) for name in PARTS if name in owned},
        steps,
    )
