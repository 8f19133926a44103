"""gpudiag's own records of a run (`rank<r>.<pid>.jsonl`).

One file a process, one JSON object a line; times are CLOCK_MONOTONIC ns, common to all processes of a machine.

    process  pid, ppid, role (main|rank|launcher|spawned|forked), rank, world, python, torch, cuda, threads, mono, wall
    clock    mono, wall: one moment on both clocks; event start|stop of a recording with window early|steps, reason, file,
             machine {at, own CPU ns of the process, busy CPU ns of all CPUs, pressure us, load, cpus}, what could be read
    source   what ends a step from here on: forward | loader | optimizer
    step     i index, s start, e end, o source, p {phase: exclusive ns}, w [[phase, where, count, ns]],
             y [[call, where, count, ns]] reads of values, r 1 recorded, mixed 1 partly so, partial 1 not ended by a step,
             q ns that the training thread was queued for a CPU (absent: unknown)
    loader   l number, where, num_workers, batch_size, ...: how a DataLoader was built; shm [size, free] of /dev/shm
    batch    l, it iterator, e epoch of the iterator, n count, b number (-1 main process), s, t: the wait; pids of workers;
             r when its message arrived, u ns of unpickling it, m its bytes, sz bytes of the batch's tensors (the first three)
    fetch    f fetcher, n count, b number, w worker (-1 main), s, e, c collate ns, cpu ns, q ns queued for a CPU (-1 unknown),
             pc CPU ns of the whole process, pt the same since its start, rd bytes read from storage, x ns in the transforms, xs {transform: [calls, ns]}
    worker   w, threads torch's, tasks threads of the process, cpus it may run on (numbers): a worker after its second batch
    alloc    at, d GPU, a bytes in tensors, r bytes reserved, pa, pr their peaks so far: between recorded steps
    states   seen {state: samples} of the worker processes, sampled while recording (D: waits for a disk)
    oom      of gpu | host, said: the exception that ended the script
    shm_error l loader (-1 unknown), said: a worker died of a full /dev/shm
    pin      b, s, e      gc  s, e, g generation      compile  at, ns, where      optimizer  params, bytes
    recompile at, i step, where it was called, what function, reason: a guard that no compiled version passes
    lines    [[where, samples, ns]]: where the training thread was outside all phases, sampled while recording
    log_lines  the same of those samples that computed an argument of a log call: the line of that call
    looks    places [where], at [ns, then ns since the one before], n [number in places]: where it was, phases or not
    own_profiler where    note  note    truncated    no_torch  pid, program    end  at, cpu s, children_cpu s

A line that is cut off or of a kind that is not known here is skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

Record = dict[str, Any]
BUSIER, CONTENDED = 0.05, 0.20  # of a step waited for a CPU: 5 % is the least observer effect that is told
RARE_PHASES = ("checkpoint", "compile")
VARYING_PHASES = ("data_wait", "log")
LEAST_ALIKE = 5  # steps of each kind, for a median of one epoch
FIRST_STEPS = 3  # not counted as plain: they hold start-up, lazy loading and the profiler's own start


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
        return sum(len(steps_of(process)) for process in self.processes if process.pid == pid)

    def trainer(self, rank: int) -> Process | None:
        """The process of a rank that took most steps, else the first of that rank that could be recorded."""
        mine = [process for process in self.processes if process.rank == rank and process.role in ("main", "rank")]
        return max(mine, key=lambda process: (len(steps_of(process)), -mine.index(process)), default=None)

    def optimizer_name(self, rank: int) -> str:
        """The class of the optimizer that a rank's trainer has most parameters in; "" where none was seen."""
        process = self.trainer(rank)
        seen = process.of("optimizer") if process is not None else []
        return str(max(seen, key=lambda record: int(record["params"]))["name"]) if seen else ""

    @property
    def too_busy_to_compare(self) -> bool:
        """Whether the CPUs were more contended in the recorded steps than in the plain ones, or much contended in any: then
        their lengths do not tell what recording costs, since the threads that the training thread waits for were held up too."""
        shares: tuple[list[float], list[float]] = [], []
        for process in self.processes:
            for position, record in enumerate(steps_of(process)):
                if "q" in record and not record.get("mixed") and (record.get("r") or position >= FIRST_STEPS):
                    shares[bool(record.get("r"))].append(record["q"] / max(1, record["e"] - record["s"]))
        plain, recorded = shares
        if not plain or not recorded:
            return False
        before, during = float(np.mean(plain)), float(np.mean(recorded))
        return during - before > BUSIER or max(before, during) > CONTENDED

    def step_cost(self) -> tuple[int | None, int | None]:
        """Typical step (ns) outside and inside the recorded window, over the processes; None where there was none.

        Steps that save or compile are left out of both: they are rare, and which side they fall on is chance. What a step
        waits for data, logs or evaluates depends on the batch, the cache and the calendar more than on a recording: both
        sides get the mean wait and log of the plain steps, and no evaluation. The training thread's waits for a CPU that
        others had are no part of either. Where an epoch has steps of both kinds, only such epochs are compared: in a first
        one all runs slower while files are read from storage.
        """
        plain: list[_StepWork] = []
        recorded: list[_StepWork] = []
        for process in self.processes:
            steps = steps_of(process)
            for position, (record, epoch) in enumerate(zip(steps, _epochs(process, steps), strict=True)):
                phases = record.get("p", {})
                if record.get("mixed") or any(phase in phases for phase in RARE_PHASES):
                    continue
                varies = sum(phases.get(phase, 0) for phase in VARYING_PHASES)
                left = record["e"] - record["s"] - varies - phases.get("eval", 0) - max(0, record.get("q", 0))
                work = _StepWork((process.pid, epoch), max(0, left), varies)
                if record.get("r"):
                    recorded.append(work)
                elif position >= FIRST_STEPS:
                    plain.append(work)
        both = {step.epoch for step in recorded} & {step.epoch for step in plain}
        alike = [step for step in plain if step.epoch in both], [step for step in recorded if step.epoch in both]
        if min(map(len, alike)) >= LEAST_ALIKE:
            plain, recorded = alike
        own, own_recorded = _median([step.ran for step in plain]), _median([step.ran for step in recorded])
        varied = sum(step.varied for step in plain) // len(plain) if plain else 0
        return own + varied if own is not None else None, own_recorded + varied if own_recorded is not None else None


@dataclass(frozen=True)
class _StepWork:
    """epoch: of which process and epoch (-1 unknown); ran: ns without what varies; varied: ns of that."""

    epoch: tuple[int, int]
    ran: int
    varied: int


def _epochs(process: Process, steps: Sequence[Record]) -> list[int]:
    """The epoch of each step: that of the last batch which the busiest loader had delivered by its end, -1 without one."""
    by_loader: dict[int, list[Record]] = defaultdict(list)
    for record in process.of("batch"):
        by_loader[record["l"]].append(record)
    busiest: list[Record] = max(by_loader.values(), key=lambda batches: len(batches), default=[])
    batches = sorted(busiest, key=lambda record: record["t"])
    if not batches:
        return [-1] * len(steps)
    ends = np.array([record["e"] for record in steps], np.int64)
    place = np.searchsorted(np.array([record["t"] for record in batches], np.int64), ends, side="right") - 1
    return [int(batches[i]["e"]) if i >= 0 else -1 for i in place.tolist()]


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


def source_of(process: Process) -> str:
    """What ended the steps: the strongest source that this process had."""
    sources = [str(record["source"]) for record in process.of("source")]
    return sources[-1] if sources else ""


def steps_of(process: Process) -> list[Record]:
    """The steps of the strongest source that this process had; partial ones are none."""
    steps = [record for record in process.of("step") if not record.get("partial")]
    source = source_of(process)
    return [record for record in steps if not source or record["o"] == source]


def _median(values: Sequence[int]) -> int | None:
    return int(np.median(values)) if values else None
