"""The GPU side of an nsys export: KERNEL, MEMCPY, MEMSET and GRAPH_TRACE rows as one table of GPU operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gpudiag.intervals import Int64
from gpudiag.read._columns import ABSENT, Array, Column, Job
from gpudiag.read._nsys_meta import copy_kinds, memory_kinds
from gpudiag.read._sqlite import Database
from gpudiag.read._tidy import Strings, assemble, check_times, distinct, recode
from gpudiag.read.names import is_communication
from gpudiag.timeline import ApiCalls, CopyKind, GpuOps, Kind, MemKind, Repair

_COMMON = {
    "start": Column(("start",), missing=ABSENT),
    "end": Column(("end",), missing=ABSENT),
    "device": Column(("deviceId",), np.int32, missing=0),
    "stream": Column(("streamId",), missing=0),
    "correlation": Column(("correlationId",)),
    "pid": Column(("globalPid",), missing=0),
}
_COPY = {"bytes": Column(("bytes",)), "node": Column(("graphNodeId",), missing=0)}
TABLES: dict[str, dict[str, Column]] = {
    "CUPTI_ACTIVITY_KIND_KERNEL": {
        **_COMMON,
        # shortName can be just "kernel" for half of the GPU time, so it is the second choice.
        "name_id": Column(("demangledName", "shortName", "mangledName"), np.int32),
        "blocks": Column(("gridX", "gridY", "gridZ"), combine="*"),
        "threads": Column(("blockX", "blockY", "blockZ"), np.int32, combine="*"),
        "registers": Column(("registersPerThread",), np.int32),
        "shared_bytes": Column(("staticSharedMemory", "dynamicSharedMemory"), np.int32, combine="+"),
        "local_bytes": Column(("localMemoryPerThread",), np.int32),
        "node": Column(("graphNodeId",), missing=0),
    },
    "CUPTI_ACTIVITY_KIND_MEMCPY": {
        **_COMMON,
        **_COPY,
        "copy": Column(("copyKind",), np.int32),
        "src": Column(("srcKind",), np.int32),
        "dst": Column(("dstKind",), np.int32),
    },
    "CUPTI_ACTIVITY_KIND_MEMSET": {**_COMMON, **_COPY, "dst": Column(("memKind",), np.int32)},
    # With --cuda-graph-trace=graph the kernels inside are not recorded one by one; the row is their busy time.
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": {**_COMMON, "node": Column(("graphId",), missing=0)},
}
KERNEL_LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel",
)
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
_COPY_NAMES = {
    CopyKind.H2D: "HtoD",
    CopyKind.D2H: "DtoH",
    CopyKind.D2D: "DtoD",
    CopyKind.P2P: "PtoP",
    CopyKind.H2H: "HtoH",
    CopyKind.MANAGED: "unified memory",
    CopyKind.UNKNOWN: "unknown direction",
}


def gpu_jobs(database: Database) -> list[Job]:
    """What to fetch: each table of GPU operations that the file has, with times and a device."""
    jobs = []
    for name, columns in TABLES.items():
        table = database.find(name)
        if table and {"start", "end"} <= set(database.tables[table]):
            jobs.append(Job(table, columns))
    return jobs


def read_gpu_ops(
    database: Database,
    jobs: Sequence[Job],
    got: Sequence[dict[str, Array]],
    names: Mapping[int, str],
    strings: Strings,
    recorded: tuple[int, int] | None,
) -> tuple[GpuOps, list[Repair]]:
    """All GPU operations, sorted, and what had to be left out."""
    parts: list[dict[str, Array | int | float]] = []
    counts: list[int] = []
    repairs: list[Repair] = []
    for job, columns in zip(jobs, got, strict=True):
        kind = next(name for name in TABLES if job.table.startswith(name)).rpartition("_KIND_")[2]
        what = {"KERNEL": "kernels", "MEMCPY": "copies", "MEMSET": "memsets"}.get(kind, "graph launches")
        start, end = np.asarray(columns["start"], np.int64), np.asarray(columns["end"], np.int64)
        keep, said = check_times(what, start, end, recorded)
        zero = _false_zero(start, end, columns["stream"], keep)
        if zero is not None:
            said.append(Repair(f"{what} left out: a start of zero", int(zero.sum()), start.size))
            keep = ~zero if keep is None else keep & ~zero
        repairs += said
        if keep is not None:
            for name in columns:
                columns[name] = columns[name][keep]
        counts.append(int(columns["start"].size))
        parts.append(_part(database, kind, columns, names, strings))
    return assemble(GpuOps, parts, counts), repairs


def _part(
    database: Database, kind: str, columns: dict[str, Array], names: Mapping[int, str], strings: Strings
) -> dict[str, Array | int | float]:
    part: dict[str, Array | int | float] = {
        "bytes": -1,
        "copy_kind": int(CopyKind.NONE),
        "src_mem": int(MemKind.UNKNOWN),
        "dst_mem": int(MemKind.UNKNOWN),
        "blocks": -1,
        "threads": -1,
        "registers": -1,
        "shared_bytes": -1,
        "local_bytes": -1,
        "occupancy": float("nan"),
    }
    node = np.asarray(columns.pop("node"), np.int64)
    # CUPTI packs the graph id into the upper half of graphNodeId.
    part["graph"] = 0 if not node.any() else np.where(node >> 32, node >> 32, node)
    pid = np.asarray(columns.pop("pid"), np.int64)
    first = int(pid[0]) if pid.size else 0
    part["process"] = (first >> 24) & 0xFFFFFF if bool((pid == first).all()) else (pid >> 24) & 0xFFFFFF
    if kind == "KERNEL":
        ids = columns.pop("name_id")
        used = distinct(ids)
        texts = {i: names.get(i, f"string {i} (not recorded)" if i >= 0 else "unnamed kernel") for i in used}
        part["name"] = recode(ids, {i: strings.code(text) for i, text in texts.items()})
        comm = {i: int(Kind.COMM if is_communication(text) else Kind.KERNEL) for i, text in texts.items()}
        part["kind"] = recode(ids, comm, np.int8) if len(set(comm.values())) > 1 else next(iter(comm.values()), 0)
    elif kind == "MEMCPY":
        kinds, memories = copy_kinds(database), memory_kinds(database)
        copy = recode_or(columns.pop("copy"), kinds, int(CopyKind.UNKNOWN))
        part["kind"] = int(Kind.MEMCPY)
        part["copy_kind"] = copy
        part["src_mem"] = recode_or(columns.pop("src"), memories, int(MemKind.UNKNOWN))
        part["dst_mem"] = recode_or(columns.pop("dst"), memories, int(MemKind.UNKNOWN))
        part["name"] = recode(copy, {k: strings.code(f"Memcpy {_COPY_NAMES[CopyKind(k)]}") for k in distinct(copy)})
    elif kind == "MEMSET":
        part["kind"] = int(Kind.MEMSET)
        part["dst_mem"] = recode_or(columns.pop("dst"), memory_kinds(database), int(MemKind.UNKNOWN))
        part["name"] = strings.code("Memset")
    else:
        part["kind"] = int(Kind.GRAPH)
        part["name"] = strings.code("CUDA graph")
    return part | columns


def recode_or(values: Array, mapping: Mapping[int, int], other: int) -> Array:
    """mapping[value], or `other` where the mapping has none; int8."""
    return recode(values, {value: mapping.get(value, other) for value in distinct(values)}, np.int8)


def lost_kernels(ops: GpuOps, calls: ApiCalls, strings: Strings) -> list[str]:
    """A warning when far more kernels were launched than recorded: buffers of the profiler were dropped.

    Not said of recordings with CUDA graphs: launches that are captured into a graph run no kernel of their own.
    """
    if (ops.kind == Kind.GRAPH).any() or any("StreamBeginCapture" in text for text in strings.texts):
        return []
    launching = np.array([text in KERNEL_LAUNCHES for text in strings.texts], bool)
    launch = launching[calls.name]
    kernels = int((ops.kind <= Kind.COMM).sum())
    enough = kernels * 3 // 2 + 100  # a recording cut in the middle has launches whose kernels come after it
    if int(launch.sum()) <= enough:
        return []
    # A driver call inside a runtime call has its correlation id and is no second launch.
    launched = np.unique((calls.process[launch] << 32) ^ calls.correlation[launch]).size
    if launched <= enough:
        return []
    return [f"{launched} kernels were launched but only {kernels} recorded: part of the GPU side is missing"]


def _false_zero(start: Int64, end: Int64, stream: Array, keep: Array | None) -> Array | None:
    """Rows whose start of 0 cannot be true: they would still run when the next operation of their stream starts.

    Zero is what CUPTI writes when it took no time stamp; a shifted recording can truly begin at 0.
    """
    suspects = np.flatnonzero((start == 0) & (end > 0))
    if not suspects.size or (keep is not None and not keep[suspects].any()):
        return None
    bad = np.zeros(start.size, bool)
    for at in suspects[:1000].tolist():
        later = start[(stream == stream[at]) & (start > 0)]
        if later.size and end[at] > later.min():
            bad[at] = True
    if keep is not None:
        bad &= keep
    return bad if bad.any() else None
