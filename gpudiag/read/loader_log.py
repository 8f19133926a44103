"""gpudiag's own records of a run (`rank<r>.<pid>.jsonl`), and joining them to a timeline.

One file a process, one JSON object a line; times are CLOCK_MONOTONIC ns, common to all processes of a machine.

    process  pid, ppid, role (main|rank|launcher|spawned|forked), rank, world, python, torch, cuda, threads, mono, wall
    clock    mono, wall: one moment on both clocks; event start|stop of a recording with window early|steps, reason, file,
             machine {at, own CPU ns of the process, busy CPU ns of all CPUs, pressure us, load, cpus}, what could be read
    source   what ends a step from here on: forward | loader | optimizer
    step     i index, s start, e end, o source, p {phase: exclusive ns}, w [[phase, where, count, ns]],
             y [[call, where, count, ns]] reads of values, r 1 recorded, mixed 1 partly so, partial 1 not ended by a step,
             q ns that the training thread was queued for a CPU (absent: unknown)
    loader   l number, where, num_workers, batch_size, ...: how a DataLoader was built
    batch    l, it iterator, e epoch of the iterator, n count, b number (-1 main process), s, t: the wait; pids of workers
    fetch    f fetcher, n count, b number, w worker (-1 main), s, e, c collate ns, cpu ns, q ns queued for a CPU (-1 unknown)
    pin      b, s, e      gc  s, e, g generation      compile  at, ns, where      optimizer  params, bytes
    recompile at, i step, where it was called, what function, reason: a guard that no compiled version passes
    lines    [[where, samples, ns]]: where the training thread was outside all phases, sampled while recording
    log_lines  the same of those samples that computed an argument of a log call: the line of that call
    own_profiler where    note  note    truncated    no_torch  pid, program    end  at, cpu s, children_cpu s

A line that is cut off or of a kind that is not known here is skipped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gpudiag.intervals import Int64
from gpudiag.read.loader_join import join_batches
from gpudiag.timeline import CallSite, HostInfo, LoaderBatches, LoaderInfo, Ranges, StepLog, Timeline

Record = dict[str, Any]
BUSIER, CONTENDED = 0.05, 0.20  # of a step waited for a CPU: 5 % is the least observer effect that is told
LEAST_WATCH_NS = 300_000_000  # /proc/stat counts in ticks of 10 ms a CPU
FIRST_STEPS = 3  # not counted as plain: they hold start-up, lazy loading and the profiler's own start
STEP_RANGE = re.compile(r"^(?:gpudiag::)?step(?:#(\d+))?$")
# kind of a CallSite by phase; reads of CPU tensors do not wait for a device and are kept apart from readbacks
SITE_KINDS = {"checkpoint": "checkpoint", "log": "log", "compile": "compile"}


@dataclass(frozen=True)
class Process:
    """One Python process of the run that imported torch. cpu_s, children_cpu_s: None when it was killed."""

    pid: int
    parent: int
    role: str
    rank: int
    torch: str
    cuda: str | None
    threads: int
    wall_offset_ns: int
    cpu_s: float | None = None
    children_cpu_s: float | None = None
    records: dict[str, list[Record]] = field(default_factory=dict, repr=False, compare=False)

    def of(self, kind: str) -> list[Record]:
        return self.records.get(kind, [])


@dataclass(frozen=True)
class Window:
    """A recording that was saved. start_ns, end_ns: monotonic; kind early | steps; reason: why it ended."""

    pid: int
    rank: int
    file: str
    kind: str
    reason: str
    steps: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class ProcessLog:
    """Everything that the processes of one capture wrote. damaged: lines that could not be read.

    without_torch: programs that gpudiag was in and that never imported torch.
    """

    processes: tuple[Process, ...] = ()
    damaged: int = 0
    without_torch: tuple[str, ...] = ()

    @property
    def windows(self) -> tuple[Window, ...]:
        """The last recording saved by each process."""
        last: dict[int, Window] = {}
        for process in self.processes:
            for record in process.of("clock"):
                if record.get("event") == "stop":
                    last[process.pid] = Window(
                        process.pid,
                        process.rank,
                        record["file"],
                        record["window"],
                        record["reason"],
                        record["steps"],
                        record["from"],
                        record["to"],
                    )
        return tuple(last.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """What went wrong inside the processes, each thing once."""
        said = [record["note"] for process in self.processes for record in process.of("note")]
        said += ["the run was too long to keep every step's record" for p in self.processes if p.of("truncated")]
        return tuple(dict.fromkeys(said))

    @property
    def own_profiler(self) -> str:
        """Where the script starts a profiler of its own, or ""."""
        found = [record["where"] or "?" for process in self.processes for record in process.of("own_profiler")]
        return found[0] if found else ""

    def step_count(self, pid: int) -> int:
        return sum(len(_steps(process)) for process in self.processes if process.pid == pid)

    def trainer(self, rank: int) -> Process | None:
        """The process of a rank that took most steps, else the first of that rank that could be recorded."""
        mine = [process for process in self.processes if process.rank == rank and process.role in ("main", "rank")]
        return max(mine, key=lambda process: (len(_steps(process)), -mine.index(process)), default=None)

    @property
    def too_busy_to_compare(self) -> bool:
        """Whether the CPUs were more contended in the recorded steps than in the plain ones, or much contended in any: then
        their lengths do not tell what recording costs, since the threads that the training thread waits for were held up too."""
        shares: tuple[list[float], list[float]] = [], []
        for process in self.processes:
            for position, record in enumerate(_steps(process)):
                if "q" in record and not record.get("mixed") and (record.get("r") or position >= FIRST_STEPS):
                    shares[bool(record.get("r"))].append(record["q"] / max(1, record["e"] - record["s"]))
        plain, recorded = shares
        if not plain or not recorded:
            return False
        before, during = float(np.mean(plain)), float(np.mean(recorded))
        return during - before > BUSIER or max(before, during) > CONTENDED

    def step_cost(self) -> tuple[int | None, int | None]:
        """Typical step (ns) outside and inside the recorded window, over the processes; None where there was none.

        Steps that save or log are left out of both: they are rare, and which side they fall on is chance. The same is true
        of waits for worker processes, which no recording lengthens: both sides get the mean wait of the plain steps. The
        training thread's waits for a CPU that others had are no part of either.
        """
        plain: list[int] = []
        recorded: list[int] = []
        waits: list[int] = []
        for process in self.processes:
            has_workers = any(loader.get("num_workers") for loader in process.of("loader"))
            for position, record in enumerate(_steps(process)):
                phases = record.get("p", {})
                if record.get("mixed") or "checkpoint" in phases:
                    continue
                wait = phases.get("data_wait", 0) if has_workers else 0
                ran = max(0, record["e"] - record["s"] - wait - max(0, record.get("q", 0)))
                if record.get("r"):
                    recorded.append(ran)
                elif position >= FIRST_STEPS:
                    plain.append(ran)
                    waits.append(wait)
        own, own_recorded = _median(plain), _median(recorded)
        wait = sum(waits) // len(waits) if waits else 0
        return own + wait if own is not None else None, own_recorded + wait if own_recorded is not None else None


def read_process_log(files: Sequence[Path]) -> ProcessLog:
    """Read the records of all processes of a capture. A file that is missing, empty or cut off costs its own lines only."""
    processes: list[Process] = []
    without_torch: list[str] = []
    damaged = 0
    for file in files:
        records: dict[str, list[Record]] = defaultdict(list)
        for record in _lines(file):
            if record is None:
                damaged += 1
            else:
                records[record["k"]].append(record)
        without_torch += [record["program"] for record in records.get("no_torch", [])]
        for start in records.get("process", [])[-1:]:
            processes.append(_process(start, records))
    return ProcessLog(tuple(processes), damaged, tuple(without_torch))


def _lines(file: Path) -> Iterator[Record | None]:
    try:
        data = file.read_bytes()
    except OSError:
        return
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for line in data.split(b"\n"):
        if not line:
            continue
        try:
            record = decode(line)
        except msgspec.MsgspecError:
            yield None
            continue
        yield record if isinstance(record.get("k"), str) else None


def _process(start: Record, records: dict[str, list[Record]]) -> Process:
    # The clocks drift apart with NTP, so the pair taken when the recording began is the one that fits the trace.
    pairs = [start, *(record for record in records.get("clock", []) if record.get("event") == "start")]
    end = records.get("end", [{}])[-1]
    return Process(
        pid=start["pid"],
        parent=start["ppid"],
        role=start["role"],
        rank=start["rank"],
        torch=start["torch"],
        cuda=start["cuda"],
        threads=start["threads"],
        wall_offset_ns=pairs[-1]["wall"] - pairs[-1]["mono"],
        cpu_s=end.get("cpu"),
        children_cpu_s=end.get("children_cpu"),
        records=dict(records),
    )


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
    steps = [record for record in _steps(process) if not record.get("mixed")]
    plain, recorded = log.step_cost()
    slowdown = timeline.observer_slowdown
    if slowdown is None and plain and recorded and not log.too_busy_to_compare:
        slowdown = recorded / plain
    loaders, batches = _loaders(log, process)
    host = timeline.host
    return replace(
        _with_collections(timeline, process, offset),
        loader=_shifted(batches, offset) if loaders else None,
        loaders=loaders,
        step_log=StepLog(
            _column(steps, "s") + offset,
            _column(steps, "e") - _evaluation(steps) + offset,
            _column(steps, "i"),
            np.array([record.get("q", -1) for record in steps], np.int64),
        )
        if steps
        else None,
        step_source=_source(process),
        sites=_sites(process),
        optimizer_params=_optimizer(process),
        observer_slowdown=slowdown,
        host=replace(
            _with_load(host, log, process),
            torch_threads=host.torch_threads if host.torch_threads is not None else process.threads,
            torch=host.torch or process.torch or None,
            cuda=host.cuda or process.cuda,
        ),
    )


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
    """CPUs that a process of the run kept busy: by its own count while it was recorded, a worker by its fetches."""
    ends = _watched(process)
    if ends is not None and ends[1]["at"] > ends[0]["at"]:
        used: int = ends[1]["own"] - ends[0]["own"]
        return float(used / (ends[1]["at"] - ends[0]["at"]))
    fetches = [record for record in process.of("fetch") if start <= record["e"] <= end and record["w"] >= 0]
    worked: int = sum(record["cpu"] for record in fetches)
    return worked / max(1, end - start)


def _evaluation(steps: Sequence[Record]) -> Int64:
    """Evaluation inside each step, ns: it is kept apart from training, here as in the account."""
    return np.array([record.get("p", {}).get("eval", 0) for record in steps], np.int64)


def _source(process: Process) -> str:
    """What ended the steps: the strongest source that this process had."""
    sources = [str(record["source"]) for record in process.of("source")]
    return sources[-1] if sources else ""


def _steps(process: Process) -> list[Record]:
    """The steps of the strongest source that this process had; partial ones are none."""
    steps = [record for record in process.of("step") if not record.get("partial")]
    source = _source(process)
    return [record for record in steps if not source or record["o"] == source]


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


def _loaders(log: ProcessLog, process: Process) -> tuple[tuple[LoaderInfo, ...], LoaderBatches]:
    built = process.of("loader")
    workers = [other for other in log.processes if other.pid != process.pid and other.role in ("forked", "spawned")]
    batches = join_batches(
        process.of("batch"),
        {process.pid: process.of("fetch"), **{worker.pid: worker.of("fetch") for worker in workers}},
        process.of("pin"),
        process.pid,
    )
    infos = []
    for record in built:
        number = record["l"]
        infos.append(
            LoaderInfo(
                loader=number,
                where=record["where"],
                num_workers=record["num_workers"],
                batch_size=record["batch_size"],
                pin_memory=record["pin_memory"],
                prefetch_factor=record["prefetch_factor"],
                persistent_workers=record["persistent_workers"],
                start_method=record["start_method"],
                dataset=record["dataset"],
                dataset_length=record["length"],
                in_memory=record["in_memory"],
                batches=int((batches.loader == number).sum()),
            )
        )
    return tuple(infos), batches


def _shifted(batches: LoaderBatches, offset: int) -> LoaderBatches:
    def moved(column: Int64) -> Int64:
        return np.where(column >= 0, column + offset, -1)

    return replace(
        batches,
        start=batches.start + offset,
        end=batches.end + offset,
        fetch_start=moved(batches.fetch_start),
        fetch_end=moved(batches.fetch_end),
    )


def _sites(process: Process) -> tuple[CallSite, ...]:
    """Costly places over the whole run, the longest first; kinds "host" and "log_argument" are sampled in the
    recorded window only.

    A place that compiles again says of the last time what was compiled and why.
    """
    again = {record["where"]: record for record in process.of("recompile") if record["reason"]}
    found: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for record in process.of("step"):
        for phase, where, count, length in record.get("w", ()):
            if phase in SITE_KINDS:
                _add(found, (SITE_KINDS[phase], phase, where), count, length)
        for call, where, count, length in record.get("y", ()):
            kind, what = ("read", call[4:]) if call.startswith("cpu:") else ("readback", call)
            _add(found, (kind, what, where), count, length)
    for kind, what in (("lines", "host"), ("log_lines", "log_argument")):
        for record in process.of(kind):
            for where, count, length in record["lines"]:
                _add(found, (what, "sampled", where), count, length)
    sites = [
        CallSite(*key, count, length, _recompiled(again.get(key[2])) if key[0] == "compile" else "")
        for key, (count, length) in found.items()
    ]
    return tuple(sorted(sites, key=lambda site: (-site.total_ns, site.kind, site.where, site.what)))


def _recompiled(record: Record | None) -> str:
    return f"{record['what']}: {record['reason']}" if record is not None else ""


def _add(table: dict[tuple[str, str, str], list[int]], key: tuple[str, str, str], count: int, length: int) -> None:
    table[key][0] += count
    table[key][1] += length


def _optimizer(process: Process) -> tuple[int, int] | None:
    records = process.of("optimizer")
    return (max(r["params"] for r in records), max(r["bytes"] for r in records)) if records else None


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


def _median(values: Sequence[int]) -> int | None:
    return int(np.median(values)) if values else None
