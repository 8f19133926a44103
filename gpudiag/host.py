"""What the host threads that feed a device did: the evidence from which idle device time gets its owner."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gpudiag.intervals import Int64, Intervals
from gpudiag.names import (
    ALLOCATOR,
    CHECKPOINT_LOG,
    COMPILE,
    COMPILE_CALL,
    COMPILE_OVERHEAD,
    COPY_CALL,
    GC,
    INPUT,
    PY_LOADER,
    PY_SAVE,
    REPLAY,
    SYNC,
    Names,
)
from gpudiag.timeline import (
    ApiCalls,
    Bool,
    CopyKind,
    CpuOps,
    GpuOps,
    Int32,
    Kind,
    Overheads,
    PyCalls,
    Ranges,
    Timeline,
)

T = TypeVar("T", Ranges, CpuOps, PyCalls, Overheads)
Thread = tuple[int, int]  # (process, thread)

# A pause between two framework calls on the launching thread that is shorter than this is the interpreter walking from one
# operator to the next (eager PyTorch: 5-50 us an operator), so it belongs to launching; a longer one is user code.
INTERPRETER_PAUSE_NS = 200_000
# A launch reaches an idle device within 3-50 us, lazily loaded modules and deep power states included; work that is queued
# longer on an idle device waits for something else (another stream, another GPU, work that the recorder lost).
STALL_NS = 100_000


@dataclass(frozen=True, eq=False)
class Launches:
    """The join of GPU operations to the API calls that started them.

    call_of: for each GPU op the row of its call in api_calls, -1 none. Shape (ops,).
    """

    call_of: Int32


def join_launches(ops: GpuOps, calls: ApiCalls) -> Launches:
    """Join on (process, correlation): correlation ids repeat between processes (SCHEMAS 1.5).

    Where several calls share one correlation id the first that starts wins. O(n) where the ids are dense, else O(n log n).
    """
    call_of = np.full(len(ops), -1, np.int32)
    if not len(calls) or not len(ops):
        return Launches(call_of)
    one = ops.process[0]
    if (ops.process == one).all() and (calls.process == one).all():
        return Launches(_lookup(calls.correlation, ops.correlation))
    for process in np.unique(ops.process):
        mine = np.flatnonzero(ops.process == process)
        theirs = np.flatnonzero(calls.process == process) if process else np.arange(len(calls))
        found = _lookup(calls.correlation[theirs], ops.correlation[mine])
        call_of[mine] = np.where(found >= 0, theirs[found], -1) if theirs.size else -1
    return Launches(call_of)


def _lookup(keys: Int64, wanted: Int64) -> Int32:
    """For each wanted key its first row in keys, or -1. Keys below 0 never match."""
    if not keys.size:
        return np.full(wanted.size, -1, np.int32)
    low, high = max(int(keys.min()), 0), int(keys.max())
    if 0 <= high - low < max(8 * keys.size, 1 << 16):
        table = np.full(high - low + 1, -1, np.int32)
        usable = keys >= 0
        if usable.all():
            table[(keys - low)[::-1]] = np.arange(keys.size - 1, -1, -1, dtype=np.int32)
        else:
            rows = np.flatnonzero(usable)[::-1]
            table[keys[rows] - low] = rows
        inside = (wanted >= low) & (wanted <= high)
        found = table[np.where(inside, wanted - low, 0)]
        found[~inside] = -1
        return found
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    at = np.minimum(np.searchsorted(ordered, wanted), keys.size - 1)
    return np.where((ordered[at] == wanted) & (wanted >= 0), order[at], -1).astype(np.int32)


@dataclass(frozen=True, eq=False)
class HostWork:
    """The evidence about the host threads that feed one device. None = that kind of thing was not recorded.

    active: framework operators and API calls other than waits, with pauses of the interpreter closed.
    stalled: work was launched and had not started; where the device is idle then, no host thread is the cause.
    wait_start, wait_end: calls in which the host waited for the device, by start; copy waits are those in a copy call.
    """

    threads: frozenset[Thread]
    input: Intervals
    checkpoint_log: Intervals
    compile: Intervals
    gc: Intervals
    allocator: Intervals
    profiler: Intervals
    active: Intervals
    observed: Intervals
    stalled: Intervals
    wait_start: Int64
    wait_end: Int64
    queue_full: Intervals

    def made_by_feeding(self, calls: ApiCalls) -> Bool:
        """The rows of api_calls made by `threads`."""
        mask = _Runs.of(calls).mask(self.threads)
        return np.ones(len(calls), bool) if mask is None else mask


def host_work(timeline: Timeline, ops: GpuOps, launches: Launches | None, names: Names) -> HostWork:
    """The host work of the threads that launched `ops` (the rows of one device; launches is their join to api_calls)."""
    calls, ranges, cpu_ops, py_calls = timeline.api_calls, timeline.ranges, timeline.cpu_ops, timeline.py_calls
    processes = np.unique(ops.process[ops.process > 0]) if len(ops) else np.empty(0, np.int64)
    threads: frozenset[Thread] = frozenset()
    if calls is not None:
        runs = _Runs.of(calls)
        launched = np.zeros(len(calls), bool)
        if launches is not None:
            launched[launches.call_of[launches.call_of >= 0]] = True
        threads = runs.threads_of(launched)
        if not threads:  # nothing could be joined: all threads of the processes that own the work
            threads = runs.all_threads(set(processes.tolist()))
        mask = runs.mask(threads)
        calls = calls if mask is None else calls.take(mask)
    # Phases are marked by the main thread, which launches nothing while autograd's thread runs backward: ranges are taken
    # from every thread of the launching processes, operators from the feeding threads. Waits for data and checkpoints count
    # on the feeding threads and the main thread: one that fetches or saves in the background holds nobody up by itself.
    ranges, py_calls, cpu_ops = (
        of_processes(ranges, processes),
        of_processes(py_calls, processes),
        of_processes(cpu_ops, processes),
    )

    input_parts = (
        _held(ranges, threads, names, INPUT)
        .union(_held(cpu_ops, threads, names, INPUT))
        .union(_held(py_calls, threads, names, PY_LOADER))
    )
    checkpoint = _held(ranges, threads, names, CHECKPOINT_LOG).union(_held(py_calls, threads, names, PY_SAVE))
    compiling = (
        named(ranges, names, COMPILE).union(named(cpu_ops, names, COMPILE)).union(named(calls, names, COMPILE_CALL))
    )
    profiler, queue_full = Intervals.empty(), Intervals.empty()
    rows = of_processes(timeline.overheads, processes)
    if rows is not None and len(rows):
        lazy = names.rows(rows.name, COMPILE_OVERHEAD)
        compiling = compiling.union(Intervals.union_of(rows.start[lazy], rows.end[lazy]))
        cost = ~lazy & ~rows.is_queue_full
        profiler = Intervals.union_of(rows.start[cost], rows.end[cost])
        queue_full = Intervals.union_of(rows.start[rows.is_queue_full], rows.end[rows.is_queue_full])
    wait_start, wait_end = _waits(calls, ops, launches, timeline.api_calls, names)
    return HostWork(
        threads=threads,
        input=input_parts,
        checkpoint_log=checkpoint,
        compile=compiling,
        gc=named(ranges, names, GC).union(named(py_calls, names, GC)),
        allocator=named(calls, names, ALLOCATOR),
        profiler=profiler,
        active=_active(calls, cpu_ops, threads, names).union(_held(ranges, threads, names, REPLAY)),
        observed=_observed(cpu_ops, ranges, py_calls),
        stalled=_stalled(ops, launches, timeline.api_calls),
        wait_start=wait_start,
        wait_end=wait_end,
        queue_full=queue_full,
    )


def _waits(
    calls: ApiCalls | None, ops: GpuOps, launches: Launches | None, all_calls: ApiCalls | None, names: Names
) -> tuple[Int64, Int64]:
    """Calls in which the host waited for the device: synchronise calls, and copy calls that lasted until their copy was done."""
    if calls is None or all_calls is None:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    sync = names.rows(calls.name, SYNC)
    start, end = [calls.start[sync]], [calls.end[sync]]
    if launches is not None:
        copies = np.flatnonzero((launches.call_of >= 0) & (ops.kind == Kind.MEMCPY))
        if copies.size:
            call = launches.call_of[copies]
            blocked = (all_calls.end[call] >= ops.end[copies]) & names.rows(all_calls.name[call], COPY_CALL)
            start.append(all_calls.start[call[blocked]])
            end.append(all_calls.end[call[blocked]])
    starts, ends = np.concatenate(start), np.concatenate(end)
    order = np.lexsort((ends, starts))
    return starts[order], ends[order]


def _stalled(ops: GpuOps, launches: Launches | None, calls: ApiCalls | None) -> Intervals:
    """From STALL_NS after the launch of an operation to its start. Copies to the device count from the end of their call:
    until then the host may still be staging pageable memory."""
    if launches is None or calls is None or not len(ops):
        return Intervals.empty()
    joined = np.flatnonzero(launches.call_of >= 0)
    call = launches.call_of[joined]
    to_device = ops.copy_kind[joined] == CopyKind.H2D
    launched = np.where(to_device, calls.end[call], calls.start[call]) + STALL_NS
    return Intervals.union_of(launched, ops.start[joined])


def _active(calls: ApiCalls | None, cpu_ops: CpuOps | None, threads: frozenset[Thread], names: Names) -> Intervals:
    starts, ends = [], []
    if calls is not None and len(calls):
        working = ~names.rows(calls.name, SYNC)
        starts.append(calls.start[working])
        ends.append(calls.end[working])
    if cpu_ops is not None and len(cpu_ops):
        mine = ~names.rows(cpu_ops.name, INPUT)
        fed = _Runs.of(cpu_ops).mask(threads) if threads else None
        if fed is not None:
            mine &= fed
        starts.append(cpu_ops.start[mine])
        ends.append(cpu_ops.end[mine])
    if not starts:
        return Intervals.empty()
    work = Intervals.union_of(np.concatenate(starts), np.concatenate(ends))
    return close_pauses(work, INTERPRETER_PAUSE_NS)


def close_pauses(work: Intervals, pause: int) -> Intervals:
    """The same set with gaps of up to `pause` ns filled."""
    if len(work) < 2:
        return work
    keep = np.append(True, work.start[1:] - work.end[:-1] > pause)
    begins = np.flatnonzero(keep)
    return Intervals(work.start[begins], work.end[np.append(begins[1:] - 1, len(work) - 1)])


def _observed(cpu_ops: CpuOps | None, ranges: Ranges | None, py_calls: PyCalls | None) -> Intervals:
    """The stretch in which host code was being recorded, so that silence there means user code and not missing evidence."""
    tables = [table for table in (cpu_ops, py_calls) if table is not None and len(table)]
    if not tables:
        return Intervals.empty()
    if ranges is not None and len(ranges):
        tables.append(ranges)  # type: ignore[arg-type]
    return Intervals.single(min(int(t.start.min()) for t in tables), max(int(t.end.max()) for t in tables))


@dataclass(frozen=True, eq=False)
class _Runs:
    """Stretches of rows made by one thread after the other: threads change far less often than rows.

    starts: first row of each run; process, thread: of each run; rows: of the table.
    """

    starts: npt.NDArray[np.intp]
    process: Int64
    thread: Int64
    rows: int

    @classmethod
    def of(cls, table: ApiCalls | CpuOps) -> _Runs:
        changes = (table.thread[1:] != table.thread[:-1]) | (table.process[1:] != table.process[:-1])
        starts = np.append(0, np.flatnonzero(changes) + 1) if len(table) else np.empty(0, np.intp)
        return cls(starts, table.process[starts], table.thread[starts], len(table))

    def _pairs(self, runs: npt.NDArray[np.bool_]) -> frozenset[Thread]:
        return frozenset(zip(self.process[runs].tolist(), self.thread[runs].tolist(), strict=True))

    def threads_of(self, rows: Bool) -> frozenset[Thread]:
        """The threads that made any of the rows."""
        if not self.rows:
            return frozenset()
        return self._pairs(np.logical_or.reduceat(rows, self.starts))

    def all_threads(self, processes: set[int]) -> frozenset[Thread]:
        """The threads of these processes; of all when none is named or none is present."""
        everything = self._pairs(np.ones(self.starts.size, bool))
        return frozenset(pair for pair in everything if pair[0] in processes) or everything

    def mask(self, threads: frozenset[Thread]) -> Bool | None:
        """The rows of these threads; None for all."""
        pairs = zip(self.process.tolist(), self.thread.tolist(), strict=True)
        chosen = np.fromiter((pair in threads for pair in pairs), bool, self.starts.size)
        if chosen.all():
            return None
        return np.repeat(chosen, np.diff(np.append(self.starts, self.rows)))


def of_processes(table: T | None, processes: Int64) -> T | None:
    """The rows of these processes; all rows when none is named."""
    if table is None or not processes.size or not len(table):
        return table
    mine = np.isin(table.process, processes)
    if mine.all() or not mine.any():  # none: the recorder numbers CPU rows otherwise, so all may be meant
        return table
    return table.take(mine)


def _held(
    table: Ranges | CpuOps | PyCalls | None, threads: frozenset[Thread], names: Names, pattern: re.Pattern[str]
) -> Intervals:
    """`named`, on the feeding threads and the main thread of a process (whose id is the process's); where those made no
    row of the table at all, on all threads: the recorder numbers them otherwise."""
    if table is None or not len(table):
        return Intervals.empty()
    rows = np.flatnonzero(names.rows(table.name, pattern))
    theirs = _on(table.process[rows], table.thread[rows], threads)
    if theirs.any() or _on(table.process, table.thread, threads).any():
        rows = rows[theirs]
    return Intervals.union_of(table.start[rows], table.end[rows]) if rows.size else Intervals.empty()


def _on(process: Int64, thread: Int64, threads: frozenset[Thread]) -> Bool:
    mask: Bool = np.equal(thread, process)
    for one, its in threads:
        mask |= (process == one) & (thread == its)
    return mask


def named(table: ApiCalls | Ranges | CpuOps | PyCalls | None, names: Names, pattern: re.Pattern[str]) -> Intervals:
    if table is None or not len(table):
        return Intervals.empty()
    rows = names.rows(table.name, pattern)
    return Intervals.union_of(table.start[rows], table.end[rows]) if rows.any() else Intervals.empty()
