"""One capture as tool-neutral tables of int64 ns, whichever recorder wrote it.

The rule that everything rests on: **None = not recorded; an empty table = recorded, and nothing happened.**
Names are stored once in `Timeline.strings`; tables carry int32 codes into it. Every table is sorted by (start, end).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Self

import numpy as np
import numpy.typing as npt

from gpudiag.intervals import Int64, Intervals

Int32 = npt.NDArray[np.int32]
Int8 = npt.NDArray[np.int8]
Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]


class Kind(IntEnum):
    """What a GPU operation is. GRAPH is a whole CUDA graph launch recorded as one row (`--cuda-graph-trace=graph`)."""

    KERNEL = 0
    COMM = 1
    MEMCPY = 2
    MEMSET = 3
    GRAPH = 4


class CopyKind(IntEnum):
    """Direction of a copy. MANAGED is a unified-memory migration in either direction."""

    NONE = -1
    UNKNOWN = 0
    H2D = 1
    D2H = 2
    D2D = 3
    P2P = 4
    H2H = 5
    MANAGED = 6


class MemKind(IntEnum):
    """Where one end of a copy lies. Values are ours; readers map labels, never the recorder's numbers."""

    UNKNOWN = 0
    PAGEABLE = 1
    PINNED = 2
    DEVICE = 3
    MANAGED = 4
    OTHER = 5


class Table:
    """Columns of equal length. Subclasses are frozen dataclasses whose fields are all 1-d arrays."""

    def __len__(self) -> int:
        first = getattr(self, fields(self)[0].name)  # type: ignore[arg-type]
        return int(first.size)

    def take(self, index: npt.NDArray[np.intp] | Bool | slice) -> Self:
        """The rows at an index or mask, in that order."""
        return type(self)(**{f.name: getattr(self, f.name)[index] for f in fields(self)})  # type: ignore[arg-type]


def _absent() -> Int64:
    """The default of a column that older records lack; `_fill_absent` gives it the length of the others."""
    return np.empty(0, np.int64)


def _fill_absent(table: Table) -> None:
    for f in fields(table):  # type: ignore[arg-type]
        if getattr(table, f.name).size != len(table):
            object.__setattr__(table, f.name, np.full(len(table), -1, np.int64))


@dataclass(frozen=True, eq=False)
class GpuOps(Table):
    """Everything that ran on a GPU.

    start, end: ns; device: CUDA device index as the recording numbers it; stream: stream id.
    kind: Kind; name: code into strings; bytes: of a copy or memset, -1 unknown or not one.
    copy_kind: CopyKind; src_mem, dst_mem: MemKind.
    correlation: joins to api_calls within one process, -1 none. process: OS pid of the launcher (0 unknown).
    blocks: thread blocks in the grid (-1 unknown); threads: per block; registers: per thread;
    shared_bytes: static + dynamic per block; local_bytes: local memory per thread (-1 unknown).
    occupancy: estimated achieved occupancy 0-1 where the recorder gives it (Kineto), else nan.
    graph: graph id when the kernel ran inside a CUDA graph, else 0.
    """

    start: Int64
    end: Int64
    device: Int32
    stream: Int64
    kind: Int8
    name: Int32
    bytes: Int64
    copy_kind: Int8
    src_mem: Int8
    dst_mem: Int8
    correlation: Int64
    process: Int64
    blocks: Int64
    threads: Int32
    registers: Int32
    shared_bytes: Int64
    local_bytes: Int64
    occupancy: Float32
    graph: Int64


@dataclass(frozen=True, eq=False)
class ApiCalls(Table):
    """CUDA (or HIP) runtime and driver calls on host threads. name: code, without the `_v3020` suffix.

    thread: OS thread id; (process, correlation) joins to gpu_ops.
    """

    start: Int64
    end: Int64
    process: Int64
    thread: Int64
    name: Int32
    correlation: Int64


@dataclass(frozen=True, eq=False)
class Ranges(Table):
    """NVTX ranges and profiler annotations on host threads (never the gpu_user_annotation copies).

    name: code; domain: code (the empty string is the default domain; "gpudiag" is ours); index: integer payload, -1 none.
    Unfinished ranges are closed at the end of the recording and counted in `Timeline.repairs`.
    """

    start: Int64
    end: Int64
    process: Int64
    thread: Int64
    name: Int32
    domain: Int32
    index: Int64


@dataclass(frozen=True, eq=False)
class CpuOps(Table):
    """Framework operators on host threads (Kineto cpu_op / Operator; emit_nvtx's `aten::` ranges of nsys).

    name: code, without `, op_id = N`; shapes: code of the input shapes as recorded, -1 none.
    """

    start: Int64
    end: Int64
    process: Int64
    thread: Int64
    name: Int32
    shapes: Int32


@dataclass(frozen=True, eq=False)
class PyCalls(Table):
    """Python stack frames as calls (Kineto python_function). name: code of `file(line): function`."""

    start: Int64
    end: Int64
    process: Int64
    thread: Int64
    name: Int32


@dataclass(frozen=True, eq=False)
class Overheads(Table):
    """What the recorder itself cost (nsys PROFILER_OVERHEAD, CUPTI OVERHEAD; Kineto `overhead`). name: code of its label.

    `COMMAND_BUFFER_FULL` is not a cost: it says that the host had filled the launch queue. `is_queue_full` marks it.
    """

    start: Int64
    end: Int64
    process: Int64
    thread: Int64
    name: Int32
    is_queue_full: Bool


@dataclass(frozen=True, eq=False)
class LoaderBatches(Table):
    """One row a batch that a DataLoader delivered, from gpudiag's own records (read/loader_log.py). ns; -1 not measured.

    start, end: the main process waiting in the loader's next. fetch_start, fetch_end: the whole of fetching in the
    worker (dataset calls and collate). io_ns: of the fetch, the time neither on a CPU nor waiting for one (fetch stall);
    cpu_ns: CPU time of the worker in the fetch (prep stall). collate_ns, pin_ns. worker: index, -1 in the main process;
    worker_pid; epoch: how many times the loader had been iterated; batch: index in the epoch; loader: which DataLoader.
    process_cpu_ns: CPU time of all threads of the fetching process. read_bytes: read from storage, not from the page cache.
    transform_ns: in the transforms of a Compose. transfer_ns: from the end of the fetch to the message's arrival, where the
    main process waited for it all that time. unpickle_ns, message_bytes: of that message.
    """

    start: Int64
    end: Int64
    fetch_start: Int64
    fetch_end: Int64
    dataset_ns: Int64
    collate_ns: Int64
    pin_ns: Int64
    cpu_ns: Int64
    io_ns: Int64
    worker: Int64
    worker_pid: Int64
    epoch: Int64
    batch: Int64
    loader: Int64
    process_cpu_ns: Int64 = field(default_factory=_absent)
    read_bytes: Int64 = field(default_factory=_absent)
    transform_ns: Int64 = field(default_factory=_absent)
    transfer_ns: Int64 = field(default_factory=_absent)
    unpickle_ns: Int64 = field(default_factory=_absent)
    message_bytes: Int64 = field(default_factory=_absent)

    def __post_init__(self) -> None:
        _fill_absent(self)


@dataclass(frozen=True, eq=False)
class StepLog(Table):
    """Every step of the run, recorded window or not, from gpudiag's own records: start, end ns, index. Evaluation inside a step
    is taken off its end; steps that did not end as steps do (the rest of the script after the last one) are not here.
    cpu_wait_ns: time that the training thread could have run and waited for a CPU, -1 not recorded (the default).
    """

    start: Int64
    end: Int64
    index: Int64
    cpu_wait_ns: Int64 = field(default_factory=_absent)

    def __post_init__(self) -> None:
        _fill_absent(self)


@dataclass(frozen=True)
class CallSite:
    """A place in the user's code that did something costly, from gpudiag's own records over the whole run.

    kind: readback (reads a device value: .item(), .cpu(), print(tensor)) | checkpoint | log | compile. what: the call,
    `Tensor.item`; where: the user's file:line; count, total_ns: over `steps` steps (0: not by step, over all of the run);
    detail: e.g. the recompilation reason.
    """

    kind: str
    what: str
    where: str
    count: int
    total_ns: int
    detail: str = ""
    steps: int = 0


@dataclass(frozen=True, eq=False)
class Looks:
    """Where the training thread was at moments of the recorded window some ms apart, from gpudiag's own records.

    at: ns, rising; place: code into places, `train.py:42` each. process: whose thread.
    """

    at: Int64
    place: Int32
    places: tuple[str, ...]
    process: int


@dataclass(frozen=True, eq=False)
class MemoryEvents(Table):
    """The torch allocator's totals on a GPU after each allocation or free (torch.profiler with profile_memory=True).

    start == end == the moment, ns; device: CUDA index; allocated: bytes in tensors; reserved: bytes taken from the driver.
    """

    start: Int64
    end: Int64
    device: Int32
    allocated: Int64
    reserved: Int64


@dataclass(frozen=True, eq=False)
class Samples(Table):
    """NVML at intervals, one row a device and moment. start == end == the moment, ns; nan not read.

    reasons: bit mask as NVML's clocks event reasons (-1 not read).
    other_processes: processes on the device that are not of this run (-1 not known), other_memory: their bytes (-1).
    """

    start: Int64
    end: Int64
    device: Int32
    gpu_util: Float32
    memory_used: Int64
    memory_total: Int64
    power_w: Float32
    power_limit_w: Float32
    temperature_c: Float32
    sm_clock_mhz: Float32
    sm_clock_max_mhz: Float32
    reasons: Int64
    pcie_gen: Int32
    pcie_gen_max: Int32
    pcie_width: Int32
    pcie_width_max: Int32
    other_processes: Int32
    other_memory: Int64


@dataclass(frozen=True)
class DeviceInfo:
    """What the recording says of a GPU; None = not recorded. memory_bandwidth in bytes/s, clock in Hz.

    nvlinks: links of the board, nvlinks_active: those that were up when the recording began.
    """

    name: str = ""
    sm_count: int | None = None
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    memory_bandwidth: int | None = None
    clock_hz: int | None = None
    nvlinks: int | None = None
    nvlinks_active: int | None = None


@dataclass(frozen=True)
class LoaderInfo:
    """How a DataLoader was built (gpudiag's own records). `where` is the user's file:line, `batches` how many it delivered.

    Of its workers: worker_threads of torch's own and worker_os_threads all of a process, the largest; worker_cpus that they may
    run on, together (None: not recorded). batch_bytes: tensors of a batch. shm_bytes, shm_free_bytes: /dev/shm when it was
    built. shm_error: what was said when a worker died of it. transforms: (name, calls, ns) over the run, the longest first;
    empty where they were not timed one by one.
    """

    loader: int
    where: str
    num_workers: int
    batch_size: int | None
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    start_method: str | None
    dataset: str
    dataset_length: int | None
    in_memory: bool
    batches: int = 0
    worker_threads: int = 1
    worker_os_threads: int | None = None
    worker_cpus: int | None = None
    batch_bytes: int | None = None
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    shm_error: str = ""
    transforms: tuple[tuple[str, int, int], ...] = ()


def main_loader_of(loaders: Sequence[LoaderInfo]) -> LoaderInfo | None:
    """The DataLoader that delivered most batches, of equals the first; None where there is none."""
    return max(loaders, key=lambda info: (info.batches, -info.loader), default=None)


@dataclass(frozen=True)
class HostInfo:
    """The machine that ran it; None = not recorded. usable_cpus = min(affinity, cgroup quota, machine).

    process_cpus: that the recorded process may run on (affinity). worker_states: samples of the loader's worker processes in the recorded window by their state (proc(5): D waits for a disk).
    out_of_memory: gpu | host -> what the exception said that ended the script for lack of it.

    load_average: of a minute, at the recording's end. cpu_pressure: share of the recording in which some task of the machine
    waited for a CPU. other_cpus: CPUs that programs other than the recorded run kept busy meanwhile (the recorder among them).
    """

    usable_cpus: float | None = None
    machine_cpus: int | None = None
    torch_threads: int | None = None
    torch: str | None = None
    cuda: str | None = None
    debug_switches: tuple[str, ...] = ()
    gpu_present: bool | None = None
    load_average: float | None = None
    cpu_pressure: float | None = None
    other_cpus: float | None = None
    driver: str | None = None
    process_cpus: int | None = None
    worker_states: Mapping[str, int] = field(default_factory=dict)
    out_of_memory: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Where a timeline came from. kind: nsys-sqlite | kineto | nvprof | bundle; recorder: `nsys 2023.4.4`, `torch 2.14`."""

    kind: str
    path: str
    recorder: str
    schema: str = ""


@dataclass(frozen=True)
class Repair:
    """Rows that could not be taken as recorded: `what` in words, how many, and out of how many. lost: they were left out."""

    what: str
    count: int
    total: int
    lost: bool = False


@dataclass(frozen=True)
class Timeline:
    """One capture of one rank (nsys: of one file, which may hold several processes and devices).

    rank, world_size: from the recording, else 0 and 1. time_base_ns: add to any time here to get wall-clock ns, None unknown.
    gpu_ops None: GPU activity was not recorded; empty: it was, and there was none.
    with_stack: recorded with Python stacks (inflates host time). recorded: (start, end) of the recording if known.
    observer_slowdown: step time recorded / step time plain, when both were measured (1.0 = none).
    optimizer_params: (number of parameter tensors, their bytes) of the optimizer, from gpudiag's own records;
    optimizer_name: its class, "" unknown.
    step_source: what ends a step of ours: optimizer | loader | forward (a call of the model) | replay (of a CUDA graph),
    "" where we did not mark them.
    incomplete: why an unknown part of the recording is missing (a file cut short), "" when it is whole. Recorders do not
    write in the order of time, so what is left is no shorter recording but one with holes.
    """

    source: Source
    strings: Sequence[str]
    gpu_ops: GpuOps | None = None
    api_calls: ApiCalls | None = None
    ranges: Ranges | None = None
    cpu_ops: CpuOps | None = None
    py_calls: PyCalls | None = None
    overheads: Overheads | None = None
    loader: LoaderBatches | None = None
    loaders: tuple[LoaderInfo, ...] = ()
    step_log: StepLog | None = None
    step_source: str = ""
    sites: tuple[CallSite, ...] = ()
    looks: Looks | None = None
    optimizer_params: tuple[int, int] | None = None
    optimizer_name: str = ""
    samples: Samples | None = None
    memory: MemoryEvents | None = None
    devices: Mapping[int, DeviceInfo] = field(default_factory=dict)
    host: HostInfo = HostInfo()
    rank: int = 0
    world_size: int = 1
    backend: str | None = None
    time_base_ns: int | None = None
    recorded: tuple[int, int] | None = None
    with_stack: bool = False
    observer_slowdown: float | None = None
    repairs: tuple[Repair, ...] = ()
    incomplete: str = ""
    diagnostics: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def codes(self, predicate: Mapping[str, bool] | frozenset[str]) -> Int32:
        """The codes of the strings contained in a set, as an int32 array."""
        return np.array([i for i, text in enumerate(self.strings) if text in predicate], np.int32)


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of one rank. source: nvtx | ProfilerStep | optimizer | loader | inferred | none; confidence 0-1.

    start, end: int64 (n,), rising, not overlapping; index: the recorder's own numbers; warm_up: mask (n,).
    """

    start: Int64
    end: Int64
    index: Int64
    warm_up: Bool
    source: str
    confidence: float = 1.0

    @classmethod
    def none(cls) -> Steps:
        zero = np.empty(0, np.int64)
        return cls(zero, zero, zero, np.empty(0, bool), "none", 0.0)

    def where(self, keep: Bool) -> Steps:
        return Steps(
            self.start[keep], self.end[keep], self.index[keep], self.warm_up[keep], self.source, self.confidence
        )

    def steady(self) -> Steps:
        return self.where(~self.warm_up)

    def __len__(self) -> int:
        return int(self.start.size)


def union(table: GpuOps | ApiCalls | Ranges | CpuOps | PyCalls | Overheads) -> Intervals:
    """The time in which any row of a table ran."""
    return Intervals.union_of(table.start, table.end)
