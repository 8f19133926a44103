"""Joining gpudiag's own records (read/loader_log.py) to the timeline of the same rank."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpudiag.intervals import Int64
from gpudiag.read.loader_log import FIRST_STEPS, Process, ProcessLog, Record, source_of, steps_of
from gpudiag.read.log_loaders import loader_records, shifted, worker_states
from gpudiag.timeline import (
    CallSite,
    HostInfo,
    LoaderInfo,
    Looks,
    MemoryEvents,
    Ranges,
    StepLog,
    Timeline,
    main_loader_of,
)

LEAST_WATCH_NS = 300_000_000  # /proc/stat counts in ticks of 10 ms a CPU
STEP_RANGE = re.compile(r"^(?:gpudiag::)?step(?:#(\d+))?$")
# kind of a CallSite by phase; reads of CPU tensors do not wait for a device and are kept apart from readbacks
SITE_KINDS = {"checkpoint": "checkpoint", "log": "log", "compile": "compile"}


def attach(timeline: Timeline, log: ProcessLog) -> Timeline:
    """The timeline with what the log adds for its rank: loader, loaders, step_log, sites, optimizer_params, host, and
    garbage collections as ranges `gpudiag::gc`. A timeline whose rank the log does not know comes back as it is."""
    process = log.trainer(timeline.rank)
    if process is None:
        return timeline
    offset = _offset(timeline, process)
    if offset is None:
        offset = process.wall_offset_ns  # no common moment: at least the lengths are right
    # a step in which a recording began or ended holds our own pause
    steps = [record for record in steps_of(process) if not record.get("mixed")]
    plain, recorded = log.step_cost()
    slowdown = timeline.observer_slowdown
    if slowdown is None and plain and recorded and not log.too_busy_to_compare:
        slowdown = recorded / plain
    loaders, batches = loader_records(log, process)
    host = timeline.host
    return replace(
        _with_collections(timeline, process, offset),
        loader=shifted(batches, offset) if loaders else None,
        loaders=loaders,
        step_log=StepLog(
            _column(steps, "s") + offset,
            _column(steps, "e") - _evaluation(steps) + offset,
            _column(steps, "i"),
            np.array([record.get("q", -1) for record in steps], np.int64),
        )
        if steps
        else None,
        step_source=_step_sign(process, steps),
        sites=_sites(process),
        looks=_looks(process, offset),
        optimizer_params=_optimizer(process),
        memory=timeline.memory if timeline.memory is not None else _memory(process, offset),
        observer_slowdown=slowdown,
        host=replace(
            _with_load(_with_affinity(host, process, loaders), log, process),
            torch_threads=host.torch_threads if host.torch_threads is not None else process.threads,
            torch=host.torch or process.torch or None,
            cuda=host.cuda or process.cuda,
            worker_states=worker_states(process),
            out_of_memory={record["of"]: record["said"] for record in process.of("oom")},
        ),
    )


def _step_sign(process: Process, steps: Sequence[Record]) -> str:
    """What a step was: `replay` where it is rather a replayed CUDA graph than a call of the model, else what ended it."""
    source = source_of(process)
    phases = Counter(phase for record in steps for phase in record.get("p", ()))
    return "replay" if source == "forward" and phases["graph_replay"] > phases["forward"] else source


def _with_affinity(host: HostInfo, process: Process, loaders: Sequence[LoaderInfo]) -> HostInfo:
    """The script, or something that it imports, may have narrowed the CPUs that it was started with; where workers load, theirs
    count: each may be pinned to one of its own, and the training thread to another."""
    main = main_loader_of(loaders)
    ends = _watched(process)
    own: int | None = ends[1].get("cpus") if ends is not None else None
    cpus: int | None = (main.worker_cpus if main is not None else None) or own
    return replace(host, process_cpus=own, usable_cpus=min(filter(None, (host.usable_cpus, cpus)), default=None))


def _with_load(host: HostInfo, log: ProcessLog, process: Process) -> HostInfo:
    """With how busy the machine was while the process was recorded."""
    ends = _watched(process)
    if ends is None:
        return host
    first, last = ends
    length = last["at"] - first["at"]
    pressure = others = None
    if "pressure" in first and "pressure" in last and length > 0:
        pressure = min(1.0, max(0.0, 1000 * (last["pressure"] - first["pressure"]) / length))
    if "busy" in first and "busy" in last and length >= LEAST_WATCH_NS:
        own = sum(_own_cpus(other, first["at"], last["at"]) for other in log.processes)
        others = max(0.0, (last["busy"] - first["busy"]) / length - own)
    return replace(host, load_average=last.get("load"), cpu_pressure=pressure, other_cpus=others)


def _watched(process: Process) -> tuple[Record, Record] | None:
    """The machine when the last recording of a process began and when it ended."""
    began: Record | None = None
    pair: tuple[Record, Record] | None = None
    for record in process.of("clock"):
        if record.get("event") == "start":
            began = record.get("machine")
        elif record.get("event") == "stop" and began and record.get("machine"):
            pair = began, record["machine"]
    return pair


def _own_cpus(process: Process, start: int, end: int) -> float:
    """CPUs that a process of the run kept busy, all its threads: by its own count while it was recorded; a worker by its count at
    the first and the last fetch of that time, what it does between fetches included."""
    ends = _watched(process)
    if ends is not None and ends[1]["at"] > ends[0]["at"]:
        used: int = ends[1]["own"] - ends[0]["own"]
        return float(used / (ends[1]["at"] - ends[0]["at"]))
    fetches = [record for record in process.of("fetch") if start <= record["e"] <= end and record["w"] >= 0]
    if len(fetches) > 1 and "pt" in fetches[0] and fetches[-1]["e"] > fetches[0]["e"]:
        return float((fetches[-1]["pt"] - fetches[0]["pt"]) / (fetches[-1]["e"] - fetches[0]["e"]))
    worked: int = sum(record["pc"] if "pc" in record else record["cpu"] for record in fetches)
    return worked / max(1, end - start)


def _evaluation(steps: Sequence[Record]) -> Int64:
    """Evaluation inside each step, ns: it is kept apart from training, here as in the account."""
    return np.array([record.get("p", {}).get("eval", 0) for record in steps], np.int64)


def _offset(timeline: Timeline, process: Process) -> int | None:
    """What to add to a monotonic time of the log to get the timeline's: by common steps, else by the wall clock."""
    ranges = timeline.ranges
    if ranges is not None and len(ranges):
        index = np.full(len(timeline.strings), -1, np.int64)
        is_step = np.zeros(len(timeline.strings), bool)
        for code, text in enumerate(timeline.strings):
            found = STEP_RANGE.match(text)
            if found:
                is_step[code] = True
                index[code] = int(found[1]) if found[1] else -1
        rows = np.flatnonzero(is_step[ranges.name])
        starts = {record["i"]: record["s"] for record in process.of("step")}
        numbers = np.where(index[ranges.name[rows]] >= 0, index[ranges.name[rows]], ranges.index[rows])
        shifts = [int(ranges.start[r]) - starts[n] for r, n in zip(rows, numbers.tolist(), strict=True) if n in starts]
        if shifts:
            return int(np.median(shifts))
    if timeline.time_base_ns is None:
        return None
    return process.wall_offset_ns - timeline.time_base_ns


def _sites(process: Process) -> tuple[CallSite, ...]:
    """Costly places over the whole run, the longest first; kinds "host" and "log_argument" are sampled in the recorded window
    only, reads are those of whole steps.

    A place that compiles again says of the last time what was compiled and why.
    """
    whole = steps_of(process)
    whole = whole[1:] if len(whole) > FIRST_STEPS else whole  # the first holds what the script does before its loop
    again = {record["where"]: record for record in process.of("recompile") if record["reason"]}
    found: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for record in process.of("step"):
        for phase, where, count, length in record.get("w", ()):
            if phase in SITE_KINDS:
                _add(found, (SITE_KINDS[phase], phase, where), count, length)
    for record in whole or process.of("step"):
        for call, where, count, length in record.get("y", ()):
            kind, what = ("read", call[4:]) if call.startswith("cpu:") else ("readback", call)
            _add(found, (kind, what, where), count, length)
    for kind, what in (("lines", "host"), ("log_lines", "log_argument")):
        for record in process.of(kind):
            for where, count, length in record["lines"]:
                _add(found, (what, "sampled", where), count, length)
    sites = [
        CallSite(
            *key,
            count,
            length,
            detail=_recompiled(again.get(key[2])) if key[0] == "compile" else "",
            steps=len(whole) if key[0] in ("read", "readback") else 0,
        )
        for key, (count, length) in found.items()
    ]
    return tuple(sorted(sites, key=lambda site: (-site.total_ns, site.kind, site.where, site.what)))


def _looks(process: Process, offset: int) -> Looks | None:
    """Those of the last recording."""
    records = process.of("looks")
    if not records:
        return None
    last = records[-1]
    return Looks(np.cumsum(last["at"]) + offset, np.array(last["n"], np.int32), tuple(last["places"]), process.pid)


def _recompiled(record: Record | None) -> str:
    return f"{record['what']}: {record['reason']}" if record is not None else ""


def _add(table: dict[tuple[str, str, str], list[int]], key: tuple[str, str, str], count: int, length: int) -> None:
    table[key][0] += count
    table[key][1] += length


def _optimizer(process: Process) -> tuple[int, int] | None:
    records = process.of("optimizer")
    return (max(r["params"] for r in records), max(r["bytes"] for r in records)) if records else None


def _memory(process: Process, offset: int) -> MemoryEvents | None:
    """What torch's allocator held between the recorded steps, and as the last row of each GPU its peaks, which fell within."""
    records = process.of("alloc")
    if not records:
        return None
    last = {record["d"]: record for record in records}
    rows = [(record["at"], record["d"], record["a"], record["r"]) for record in records]
    rows += [(record["at"], record["d"], record["pa"], record["pr"]) for record in last.values()]
    table = np.array(sorted(rows, key=lambda row: row[0]), np.int64)  # stable: the peaks stay behind
    at = table[:, 0] + offset
    return MemoryEvents(at, at, table[:, 1].astype(np.int32), table[:, 2], table[:, 3])


def _with_collections(timeline: Timeline, process: Process, offset: int) -> Timeline:
    """Garbage collections of the recorded stretch as ranges; they are not in the trace, since a collection may strike
    while the profiler itself is at work."""
    ranges, records = timeline.ranges, process.of("gc")
    if ranges is None or not records:
        return timeline
    start, end = _column(records, "s") + offset, _column(records, "e") + offset
    low, high = timeline.recorded or (
        (int(ranges.start[0]), int(ranges.end.max())) if len(ranges) else (start[0], end[-1])
    )
    inside = (end > low) & (start < high)
    start, end = start[inside], end[inside]
    strings = [*timeline.strings]
    codes = []
    for text in ("gpudiag::gc", "gpudiag"):
        if text not in strings:
            strings.append(text)
        codes.append(strings.index(text))
    thread = _main_thread(ranges, process.pid, timeline)
    fill = np.ones(start.size, np.int64)
    added = Ranges(
        start=start,
        end=end,
        process=fill * process.pid,
        thread=fill * thread,
        name=np.full(start.size, codes[0], np.int32),
        domain=np.full(start.size, codes[1], np.int32),
        index=-fill,
    )
    both = Ranges(*(np.concatenate([getattr(ranges, name), getattr(added, name)]) for name in vars(ranges)))
    return replace(timeline, strings=strings, ranges=both.take(np.lexsort((both.end, both.start))))


def _main_thread(ranges: Ranges, pid: int, timeline: Timeline) -> int:
    """The thread that our step ranges are on, as the recorder numbers it; the pid (Linux' main thread) without steps."""
    step = np.array([bool(STEP_RANGE.match(text)) for text in timeline.strings], bool)
    rows = np.flatnonzero(step[ranges.name]) if len(ranges) else np.empty(0, np.int64)
    return int(ranges.thread[rows[0]]) if rows.size else pid


def _column(records: Sequence[Record], name: str) -> Int64:
    return np.array([record[name] for record in records], np.int64)
