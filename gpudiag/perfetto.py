"""The timeline with steps, account and findings as a trace that ui.perfetto.dev and chrome://tracing open.

Chrome's JSON trace format ("Trace Event Format", Google, 2016), as Perfetto's trace processor imports it: times in us with
three decimals, which keeps every ns; metadata events name the tracks; slices of one track must nest, or the importer
drops them, so events that only overlap move to a track of their own.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from gpudiag.account import PARTS, Account
from gpudiag.diagnosis import Diagnosis, Finding
from gpudiag.host import join_launches
from gpudiag.intervals import Int64, Intervals
from gpudiag.report.facts import device_label, part_label
from gpudiag.report.text import clean
from gpudiag.timeline import ApiCalls, CpuOps, GpuOps, Kind, PyCalls, Ranges, Samples, Timeline

NAME_LIMIT = 2_000
MAX_STRETCHES = 20_000  # of one finding's track; the longest are kept
_CATEGORY = {
    Kind.KERNEL: "kernel",
    Kind.COMM: "kernel",
    Kind.GRAPH: "kernel",
    Kind.MEMCPY: "gpu_memcpy",
    Kind.MEMSET: "gpu_memset",
}
_COUNTERS = (
    ("GPU utilisation (NVML), 0-1", "gpu_util"),
    ("memory used, bytes", "memory_used"),
    ("power, W", "power_w"),
    ("temperature, degrees C", "temperature_c"),
    ("SM clock, MHz", "sm_clock_mhz"),
)
HostTable = Ranges | CpuOps | ApiCalls | PyCalls


def write_perfetto(
    timelines: Sequence[Timeline], accounts: Sequence[Account], diagnosis: Diagnosis, path: Path
) -> None:
    """Write the trace to `path`, gzipped when the name ends in `.gz`. Raises OSError when that fails."""
    with path.open("wb") as raw:
        # No name and no time in gzip's header: the same recording gives the same bytes.
        packed = gzip.GzipFile("", "wb", compresslevel=5, fileobj=raw, mtime=0) if path.suffix == ".gz" else raw
        with closing(TextIOWrapper(cast(IO[bytes], packed), "utf-8", newline="\n")) as file:
            file.write(
                '{"displayTimeUnit":"ns","otherData":' + json.dumps({"producer": f"gpudiag {diagnosis.gpudiag}"})
            )
            file.write(',"traceEvents":[\n')
            first = True
            for event in _events(timelines, accounts, diagnosis):
                file.write(event if first else ",\n" + event)
                first = False
            file.write("\n]}\n")


def _events(timelines: Sequence[Timeline], accounts: Sequence[Account], diagnosis: Diagnosis) -> Iterator[str]:
    """Every event as one line of JSON: first what the reader looks for first."""
    shift = _shifts(timelines, diagnosis)
    many = len(timelines) > 1
    for i, timeline in enumerate(timelines):
        mine = [account for account in accounts if account.rank == timeline.rank]
        clock = _Clock(shift[i])
        base = 1000 * (i + 1)
        rank = f"rank {timeline.rank}: " if many else ""
        yield from _judged(diagnosis, mine, clock, base, rank)
        yield from _host(timeline, clock, base + 100, rank)
        if timeline.gpu_ops is not None:
            yield from _device(timeline, timeline.gpu_ops, clock, base + 500, rank)


def _shifts(timelines: Sequence[Timeline], diagnosis: Diagnosis) -> list[int]:
    """What to add to the times of each timeline: onto the clock that the ranks were aligned on, and beginning near 0."""
    aligned = {row["rank"]: int(row["clock_offset_ns"]) for row in diagnosis.ranks if "clock_offset_ns" in row}
    bases = [timeline.time_base_ns for timeline in timelines]
    add = [base or 0 for base in bases] if None not in bases else [0] * len(bases)
    if all(timeline.rank in aligned for timeline in timelines):
        add = [aligned[timeline.rank] for timeline in timelines]
    starts = [
        int(table.start.min()) + more
        for timeline, more in zip(timelines, add, strict=True)
        for table in (timeline.gpu_ops, timeline.api_calls, timeline.ranges, timeline.cpu_ops, timeline.py_calls)
        if table is not None and len(table)
    ]
    first = min(starts, default=0)
    return [more - first for more in add]


@dataclass(frozen=True)
class _Clock:
    shift: int

    def us(self, ns: int) -> str:
        """A moment as us with three decimals. Before the first event (a step that begins earlier) it is negative."""
        ns += self.shift
        sign, ns = ("-", -ns) if ns < 0 else ("", ns)
        return f"{sign}{ns // 1000}.{ns % 1000:03d}"


def _length(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


@dataclass
class _Track:
    """Slices of one thread id; spills to further ids when they do not nest. next_tid: the first id for spilling."""

    pid: int
    tid: int
    name: str
    next_tid: int
    used: dict[int, list[int]] = field(default_factory=dict)

    def place(self, starts: list[int], ends: list[int]) -> list[int]:
        """The thread id of each slice; slices come sorted by (start, -end)."""
        out = []
        for start, end in zip(starts, ends, strict=True):
            for tid in (self.tid, *range(self.next_tid, self.next_tid + len(self.used) + 1)):
                open_ends = self.used.setdefault(tid, [])
                while open_ends and open_ends[-1] <= start:
                    open_ends.pop()
                if not open_ends or open_ends[-1] >= end:
                    open_ends.append(end)
                    out.append(tid)
                    break
        return out

    def names(self, sort_index: int) -> Iterator[str]:
        for i, tid in enumerate(self.used):
            name = self.name if i == 0 else f"{self.name} ({i + 1})"
            yield _meta("thread_name", self.pid, tid, {"name": name})
            yield _meta("thread_sort_index", self.pid, tid, {"sort_index": sort_index})


def _meta(what: str, pid: int, tid: int, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}, separators=(",", ":"))


def _process(pid: int, name: str) -> Iterator[str]:
    yield _meta("process_name", pid, 0, {"name": name})
    yield _meta("process_sort_index", pid, 0, {"sort_index": pid})


def _slice(name: str, category: str, pid: int, tid: int, ts: str, dur: str, args: str = "") -> str:
    """name: JSON text, quotes included. args: JSON text of an object, or ""."""
    more = f',"args":{args}' if args else ""
    return f'{{"ph":"X","name":{name},"cat":"{category}","pid":{pid},"tid":{tid},"ts":{ts},"dur":{dur}{more}}}'


# What gpudiag found


def _judged(diagnosis: Diagnosis, accounts: Sequence[Account], clock: _Clock, base: int, rank: str) -> Iterator[str]:
    if not accounts:
        return
    yield from _process(base, f"{rank}gpudiag: steps, account and findings")
    tid = 1
    steps = next((account.steps for account in accounts if len(account.steps)), None)
    if steps is not None:
        yield from _flat_track(base, tid, "steady steps", tid)
        for start, end, index in zip(steps.start.tolist(), steps.end.tolist(), steps.index.tolist(), strict=True):
            yield _slice(json.dumps(f"step {index}"), "step", base, tid, clock.us(start), _length(end - start))
        tid += 1
    labels = [json.dumps(part_label(part)) for part in PARTS]
    for account in accounts:
        yield from _flat_track(
            base, tid, f"{device_label(account.rank, account.device, False)}: who owns the time", tid
        )
        if not len(account.window):
            continue
        columns = account.segments(int(account.window.start[0]), int(account.window.end[-1]))
        for start, end, owner in zip(*(column.tolist() for column in columns), strict=True):
            yield _slice(labels[owner], "account", base, tid, clock.us(start), _length(end - start))
        tid += 1
    for number, finding in enumerate(diagnosis.findings, 1):
        stretches = _where(finding, accounts)
        if not len(stretches):
            continue
        title = clean(finding.title, 120)
        yield from _flat_track(base, tid, f"finding {number}: {title}", tid)
        args = json.dumps(_finding_args(finding))
        for start, end in zip(stretches.start.tolist(), stretches.end.tolist(), strict=True):
            yield _slice(json.dumps(title), "finding", base, tid, clock.us(start), _length(end - start), args)
        tid += 1


def _flat_track(pid: int, tid: int, name: str, sort_index: int) -> Iterator[str]:
    yield _meta("thread_name", pid, tid, {"name": name})
    yield _meta("thread_sort_index", pid, tid, {"sort_index": sort_index})


def _where(finding: Finding, accounts: Sequence[Account]) -> Intervals:
    """The evidence's own times, else the parts of the account that the finding's time is taken from; the longest."""
    mine = [a for a in accounts if not finding.devices or (a.rank, a.device) in finding.devices]
    if not mine:
        return Intervals.empty()
    found = Intervals.empty()
    for evidence in finding.evidence:
        if evidence.start_ns is not None and evidence.end_ns is not None:
            found = found.union(Intervals.single(evidence.start_ns, evidence.end_ns))
    if not len(found):
        for account in mine:
            for part in finding.parts:
                if part in PARTS:
                    found = found.union(account.owned_by(part))
    if len(found) > MAX_STRETCHES:
        keep = np.sort(np.argsort(found.start - found.end, kind="stable")[:MAX_STRETCHES])
        found = Intervals(found.start[keep], found.end[keep])
    return found


def _finding_args(finding: Finding) -> dict[str, str]:
    args = {"rule": finding.rule, "severity": finding.severity, "summary": finding.summary, "where": finding.where}
    args |= {f"evidence: {evidence.label}": evidence.value for evidence in finding.evidence}
    args |= {f"fix {i}": fix.change for i, fix in enumerate(finding.fixes, 1)}
    return {clean(key, 200): clean(value, NAME_LIMIT) for key, value in args.items() if value}


# The host


def _host(timeline: Timeline, clock: _Clock, base: int, rank: str) -> Iterator[str]:
    tables: list[tuple[str, HostTable]] = [
        (category, table)
        for category, table in (
            ("user_annotation", timeline.ranges),
            ("python_function", timeline.py_calls),
            ("cpu_op", timeline.cpu_ops),
            ("cuda_runtime", timeline.api_calls),
        )
        if table is not None and len(table)
    ]
    names = _JsonNames(timeline.strings)
    processes = np.unique(np.concatenate([table.process for _, table in tables])) if tables else np.empty(0, np.int64)
    for k, process in enumerate(processes.tolist()):
        pid = base + k
        yield from _process(pid, f"{rank}host" + (f", process {process}" if process else ""))
        mine = [(category, table.take(table.process == process)) for category, table in tables]
        for j, thread in enumerate(np.unique(np.concatenate([table.thread for _, table in mine])).tolist()):
            track = _Track(pid, j + 1, f"thread {thread}", 1_000 * (j + 1))
            yield from _thread([(c, t.take(t.thread == thread)) for c, t in mine], names, clock, track)
            yield from track.names(j)
    yield from _loader(timeline, clock, base + 300, rank)


def _thread(tables: list[tuple[str, HostTable]], names: _JsonNames, clock: _Clock, track: _Track) -> Iterator[str]:
    """All that one thread did on one track: ranges hold Python calls, those operators, those CUDA calls."""
    start = np.concatenate([table.start for _, table in tables])
    end = np.concatenate([table.end for _, table in tables])
    name = np.concatenate([table.name for _, table in tables])
    kind = np.repeat(np.arange(len(tables)), [len(table) for _, table in tables])
    correlation = np.concatenate(
        [t.correlation if isinstance(t, ApiCalls) else np.full(len(t), -1, np.int64) for _, t in tables]
    )
    order = np.lexsort((kind, -end, start))
    starts, ends = start[order].tolist(), end[order].tolist()
    columns = (name[order].tolist(), kind[order].tolist(), correlation[order].tolist(), track.place(starts, ends))
    for begin, until, code, table, launch, tid in zip(starts, ends, *columns, strict=True):
        args = f'{{"correlation":{launch}}}' if launch >= 0 else ""
        yield _slice(names[code], tables[table][0], track.pid, tid, clock.us(begin), _length(until - begin), args)


def _loader(timeline: Timeline, clock: _Clock, pid: int, rank: str) -> Iterator[str]:
    loader = timeline.loader
    if loader is None or not len(loader):
        return
    yield from _process(pid, f"{rank}data loader")
    waits = _Track(pid, 1, "waits for the next batch", 1_000)
    yield from _batches("wait", loader.start, loader.end, loader.batch, clock, waits)
    yield from waits.names(0)
    fetched = loader.take(loader.fetch_end > loader.fetch_start)
    for j, worker in enumerate(np.unique(fetched.worker).tolist()):
        rows = fetched.take(fetched.worker == worker)
        track = _Track(pid, 2 + j, f"worker {worker}" if worker >= 0 else "main process", 1_000 * (j + 2))
        yield from _batches("fetch", rows.fetch_start, rows.fetch_end, rows.batch, clock, track)
        yield from track.names(1 + j)


def _batches(what: str, start: Int64, end: Int64, batch: Int64, clock: _Clock, track: _Track) -> Iterator[str]:
    order = np.lexsort((-end, start))
    starts, ends = start[order].tolist(), end[order].tolist()
    for begin, until, number, tid in zip(starts, ends, batch[order].tolist(), track.place(starts, ends), strict=True):
        name = json.dumps(f"{what} batch {number}")
        yield _slice(name, "loader", track.pid, tid, clock.us(begin), _length(until - begin))


# The device


def _device(timeline: Timeline, ops: GpuOps, clock: _Clock, base: int, rank: str) -> Iterator[str]:
    names = _JsonNames(timeline.strings)
    for k, device in enumerate(np.unique(ops.device).tolist()):
        pid = base + k
        info = timeline.devices.get(device)
        yield from _process(pid, f"{rank}GPU {device}" + (f", {clean(info.name, 60)}" if info and info.name else ""))
        mine = ops.take(ops.device == device)
        for j, stream in enumerate(np.unique(mine.stream).tolist()):
            track = _Track(pid, j + 1, f"stream {stream}", 1_000 * (j + 1))
            yield from _stream(mine.take(mine.stream == stream), names, clock, track)
            yield from track.names(j)
        yield from _queue(timeline, mine, clock, pid)
        if timeline.samples is not None:
            yield from _samples(timeline.samples, device, clock, pid)


def _stream(ops: GpuOps, names: _JsonNames, clock: _Clock, track: _Track) -> Iterator[str]:
    ops = ops.take(np.lexsort((-ops.end, ops.start)))
    starts, ends = ops.start.tolist(), ops.end.tolist()
    columns = (ops.kind, ops.name, ops.device, ops.stream, ops.correlation, ops.bytes, ops.blocks, ops.threads)
    placed = track.place(starts, ends)
    for start, end, tid, (kind, code, device, stream, correlation, size, blocks, threads) in zip(
        starts, ends, placed, zip(*(column.tolist() for column in columns), strict=True), strict=True
    ):
        args = f'{{"device":{device},"stream":{stream}'
        args += f',"correlation":{correlation}' if correlation >= 0 else ""
        args += f',"bytes":{size}' if size >= 0 else ""
        args += f',"blocks":{blocks},"threads per block":{threads}' if blocks >= 0 else ""
        yield _slice(
            names[code], _CATEGORY[Kind(kind)], track.pid, tid, clock.us(start), _length(end - start), args + "}"
        )


def _queue(timeline: Timeline, ops: GpuOps, clock: _Clock, pid: int) -> Iterator[str]:
    """How many operations were launched and had not begun: at 0 the device has nothing more to do."""
    calls = timeline.api_calls
    if calls is None or not len(calls):
        return
    call = join_launches(ops, calls).call_of
    known = call >= 0
    launched = calls.start[call[known]]
    began = np.maximum(ops.start[known], launched)
    at = np.concatenate([launched, began])
    change = np.concatenate([np.ones(launched.size, np.int64), -np.ones(began.size, np.int64)])
    order = np.lexsort((-change, at))
    at, depth = at[order], np.cumsum(change[order])
    last = np.append(at[1:] != at[:-1], True) if at.size else np.empty(0, bool)
    for moment, value in zip(at[last].tolist(), depth[last].tolist(), strict=True):
        yield _counter("operations queued", pid, clock.us(moment), value)


def _samples(samples: Samples, device: int, clock: _Clock, pid: int) -> Iterator[str]:
    mine = samples.take(samples.device == device)
    for label, column in _COUNTERS:
        for moment, value in zip(mine.start.tolist(), getattr(mine, column).tolist(), strict=True):
            if value == value and value >= 0:  # nan and -1: not read
                yield _counter(label, pid, clock.us(moment), value)


def _counter(name: str, pid: int, ts: str, value: float) -> str:
    return f'{{"ph":"C","name":{json.dumps(name)},"pid":{pid},"ts":{ts},"args":{{"value":{value}}}}}'


class _JsonNames:
    """The timeline's strings as JSON text, each made once."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = strings
        self.made: dict[int, str] = {}

    def __getitem__(self, code: int) -> str:
        if code not in self.made:
            self.made[code] = json.dumps(clean(self.strings[code], NAME_LIMIT))
        return self.made[code]
