"""nvprof databases (`nvprof -o x.nvvp`, `-o x.nvprof`, `-s -o x.sqlite`) as a Timeline.

One table a CUPTI activity kind; names are ids into StringTable, API calls are numbers, memory kinds are CUPTI's own (not those
of nsys exports), times are ns of the wall clock.

A metrics or analysis run serialises its kernels, which then stand in KERNEL instead of CONCURRENT_KERNEL, without copies or API
calls: such a file says nothing about idle time, so its GPU operations are None and a diagnostic says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from gpudiag.errors import GpudiagError
from gpudiag.read import _cupti_cbid as cbid
from gpudiag.read._columns import ABSENT, Array, Column, Job, fetch
from gpudiag.read._nvprof_markers import read_devices, read_ranges, texts_of
from gpudiag.read._sqlite import MAGIC, Database
from gpudiag.read._tidy import Strings, assemble, check_times, distinct, recode
from gpudiag.read.names import is_communication
from gpudiag.timeline import (
    ApiCalls,
    CopyKind,
    GpuOps,
    Kind,
    MemKind,
    Overheads,
    Repair,
    Source,
    Timeline,
)

_PREFIX = "CUPTI_ACTIVITY_KIND_"
_TIMES = {"start": Column(("start",), missing=ABSENT), "end": Column(("end",), missing=ABSENT)}
_GPU = {
    **_TIMES,
    "device": Column(("deviceId",), np.int32, missing=0),
    "stream": Column(("streamId",), missing=0),
    "correlation": Column(("correlationId",)),
}
_COPY = {
    **_GPU,
    "bytes": Column(("bytes",)),
    "copy": Column(("copyKind",), np.int32),
    "src": Column(("srcKind",), np.int32),
    "dst": Column(("dstKind",), np.int32),
}
_API = {
    **_TIMES,
    "process": Column(("processId",), missing=0),
    "thread": Column(("threadId",), missing=0),
    "cbid": Column(("cbid",), np.int32),
    "correlation": Column(("correlationId",)),
}
_TABLES: dict[str, dict[str, Column]] = {
    "CONCURRENT_KERNEL": {
        **_GPU,
        "name_id": Column(("name",), np.int32),
        "blocks": Column(("gridX", "gridY", "gridZ"), combine="*"),
        "threads": Column(("blockX", "blockY", "blockZ"), np.int32, combine="*"),
        "registers": Column(("registersPerThread",), np.int32),
        "shared_bytes": Column(("staticSharedMemory", "dynamicSharedMemory"), np.int32, combine="+"),
        "local_bytes": Column(("localMemoryPerThread",), np.int32),
    },
    "MEMCPY": _COPY,
    "MEMCPY2": _COPY,
    "MEMSET": {**_GPU, "bytes": Column(("bytes",)), "dst": Column(("memoryKind",), np.int32)},
    "RUNTIME": _API,
    "DRIVER": _API,
    "OVERHEAD": {**_TIMES, "type": Column(("overheadKind",), np.int32)},
}
# cupti_activity.h: CUpti_ActivityMemcpyKind, CUpti_ActivityMemoryKind, CUpti_ActivityOverheadKind, CUpti_ActivityFlag.
_COPIES = {
    1: CopyKind.H2D,
    2: CopyKind.D2H,
    3: CopyKind.H2D,
    4: CopyKind.D2H,
    5: CopyKind.D2D,
    6: CopyKind.D2D,
    7: CopyKind.D2D,
    8: CopyKind.D2D,
    9: CopyKind.H2H,
    10: CopyKind.P2P,
}
_MEMORIES = {
    1: MemKind.PAGEABLE,
    2: MemKind.PINNED,
    3: MemKind.DEVICE,
    4: MemKind.DEVICE,
    5: MemKind.MANAGED,
    6: MemKind.DEVICE,
    7: MemKind.MANAGED,
}
_OVERHEADS = {
    1: "Driver compiler",
    1 << 16: "CUPTI buffer flush",
    2 << 16: "CUPTI instrumentation",
    3 << 16: "CUPTI resource",
    4 << 16: "Runtime-triggered module loading",
    5 << 16: "Lazy function loading",
    6 << 16: "Command buffer full",
}
_QUEUE_FULL = 6 << 16


def is_nvprof_sqlite(path: Path) -> bool:
    """Whether a file is a database of nvprof, by its tables. False too for what cannot be read."""
    try:
        with path.open("rb") as file:
            if file.read(16) != MAGIC:
                return False
        database = Database(path)
    except (OSError, GpudiagError):
        return False
    try:
        return _looks_like_nvprof(database)
    finally:
        database.close()


def _looks_like_nvprof(database: Database) -> bool:
    return "StringTable" in database.tables and any(t.startswith(_PREFIX) for t in database.tables)


def read_nvprof(path: Path, progress: Callable[[str], None] | None = None) -> Timeline:
    """The whole file. Raises GpudiagError when it is damaged, no nvprof database, or an XML session without events."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise GpudiagError(f"{path}: {error.strerror}", "check the path and its permissions") from None
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<?xml"):
        raise GpudiagError(
            f"{path}: a session of the Visual Profiler, which holds settings and no events",
            "record with `nvprof -o run.nvvp ...`, or with nsys on newer GPUs",
        )
    database = Database(path)
    try:
        if not _looks_like_nvprof(database):
            raise GpudiagError(f"{path}: a SQLite file, but not one that nvprof wrote", "give the file of `nvprof -o`")
        if progress:
            progress(f"reading {path.name}")
        return _read(database)
    except MemoryError:
        raise database.damaged("it states more rows than memory can hold") from None
    finally:
        database.close()


def _read(database: Database) -> Timeline:
    jobs = {}
    for kind, columns in _TABLES.items():
        table = database.find(_PREFIX + kind)
        if table and {"start", "end"} <= set(database.tables[table]):
            jobs[kind] = Job(table, columns)
    got = dict(zip(jobs, fetch(database, list(jobs.values())), strict=True))
    strings = Strings()
    repairs: list[Repair] = []
    for kind, table_columns in got.items():
        start, end = (np.asarray(table_columns[name], np.int64) for name in ("start", "end"))
        keep, said = check_times({"CONCURRENT_KERNEL": "kernels"}.get(kind, f"{kind} rows"), start, end, None)
        repairs += said
        if keep is not None:
            got[kind] = {name: column[keep] for name, column in table_columns.items()}

    api_calls = _api_calls(got, strings) if "RUNTIME" in got or "DRIVER" in got else None
    gpu_ops, diagnostics = _gpu_ops(database, got, api_calls, strings)
    if api_calls is not None and not len(api_calls) and (gpu_ops is None or len(gpu_ops)):
        api_calls = None
    ranges, said = read_ranges(database, strings)
    repairs += said
    version = next((str(v) for (v,) in database.small("Version", ("version",), 1) if isinstance(v, int)), "")
    return Timeline(
        source=Source("nvprof", str(database.path), "nvprof", version),
        strings=strings.texts,
        gpu_ops=gpu_ops,
        api_calls=api_calls,
        ranges=ranges,
        overheads=_overheads(got["OVERHEAD"], strings) if "OVERHEAD" in got else None,
        devices=read_devices(database),
        time_base_ns=0,
        repairs=tuple(repairs),
        diagnostics=tuple(diagnostics),
    )


def _gpu_ops(
    database: Database, got: dict[str, dict[str, Array]], api_calls: ApiCalls | None, strings: Strings
) -> tuple[GpuOps | None, list[str]]:
    kernels = got.get("CONCURRENT_KERNEL")
    if (kernels is None or not kernels["start"].size) and database.any(_PREFIX + "KERNEL"):
        return None, [
            "a metrics or analysis run of nvprof: its kernels ran one by one, so it says nothing about idle time; record a "
            "timeline with `nvprof -o` and no --metrics, --events or --analysis-metrics"
        ]
    launched = _launches(api_calls, strings)
    if launched and (kernels is None or not kernels["start"].size):
        return None, [
            f"{launched} kernel launches were recorded but no kernel: the GPU side of this recording is missing"
        ]
    names = texts_of(database)
    pids = distinct(api_calls.process) if api_calls is not None else []
    parts, counts = [], []
    for kind in ("CONCURRENT_KERNEL", "MEMCPY", "MEMCPY2", "MEMSET"):
        if kind not in got:
            continue
        columns = got.pop(kind)
        counts.append(int(columns["start"].size))
        parts.append({"process": pids[0] if len(pids) == 1 else 0, **_part(kind, columns, names, strings)})
    return (assemble(GpuOps, parts, counts) if parts else None), []


def _part(
    kind: str, columns: dict[str, Array], names: Mapping[int, str], strings: Strings
) -> dict[str, Array | int | float]:
    unknown = ("blocks", "threads", "registers", "shared_bytes", "local_bytes", "bytes")
    part: dict[str, Array | int | float] = dict.fromkeys(unknown, -1)
    part |= {"copy_kind": int(CopyKind.NONE), "src_mem": 0, "dst_mem": 0, "graph": 0, "occupancy": float("nan")}
    if kind == "CONCURRENT_KERNEL":
        ids = columns.pop("name_id")
        texts = {i: names.get(i, f"string {i} (not recorded)") for i in distinct(ids)}
        part["name"] = recode(ids, {i: strings.code(text) for i, text in texts.items()})
        part["kind"] = recode(ids, {i: int(is_communication(text)) for i, text in texts.items()}, np.int8)
        return {**part, **columns}
    memories = {int(k): int(v) for k, v in _MEMORIES.items()}
    if "src" in columns:
        part["src_mem"] = _codes(columns.pop("src"), memories)
    part["dst_mem"] = _codes(columns.pop("dst"), memories)
    if kind == "MEMSET":
        part |= {"kind": int(Kind.MEMSET), "name": strings.code("Memset")}
        return {**part, **columns}
    copy = _codes(columns.pop("copy"), {k: int(v) for k, v in _COPIES.items()})
    if kind == "MEMCPY2":
        copy = np.full(copy.size, int(CopyKind.P2P), np.int8)
    part |= {"kind": int(Kind.MEMCPY), "copy_kind": copy}
    part["name"] = recode(copy, {k: strings.code(f"Memcpy {CopyKind(k).name}") for k in distinct(copy)})
    return {**part, **columns}


def _codes(values: Array, mapping: Mapping[int, int]) -> Array:
    return recode(values, {value: mapping.get(value, 0) for value in distinct(values)}, np.int8)


def _launches(api_calls: ApiCalls | None, strings: Strings) -> int:
    if api_calls is None:
        return 0
    launching = [i for i, text in enumerate(strings.texts) if text.startswith(("cudaLaunch", "cuLaunch"))]
    return int(np.isin(api_calls.name, [i for i in launching if "HostFunc" not in strings.texts[i]]).sum())


def _api_calls(got: dict[str, dict[str, Array]], strings: Strings) -> ApiCalls:
    """Runtime calls, and driver calls that were made directly.

    A driver call inside a runtime call carries its correlation id; both in one table would count each launch twice.
    """
    parts: list[dict[str, Array | int | float]] = []
    counts = []
    runtime = got.get("RUNTIME")
    for kind, names, plain in (
        ("RUNTIME", cbid.RUNTIME, "cuda runtime call"),
        ("DRIVER", cbid.DRIVER, "cuda driver call"),
    ):
        columns = got.pop(kind, None)
        if columns is None:
            continue
        if kind == "DRIVER" and runtime is not None and runtime["start"].size:
            own = ~np.isin(_pair(columns), _pair(runtime))
            columns = {name: column[own] for name, column in columns.items()}
        ids = columns["cbid"]
        code = recode(ids, {i: strings.code(names.get(i, f"{plain} {i}")) for i in distinct(ids)})
        parts.append({**{name: column for name, column in columns.items() if name != "cbid"}, "name": code})
        counts.append(int(columns["start"].size))
    return assemble(ApiCalls, parts, counts)


def _pair(columns: Mapping[str, Array]) -> Array:
    """(process, correlation) as one number; CUPTI's correlation ids have 32 bits."""
    return (np.asarray(columns["process"], np.int64) << 32) ^ (
        np.asarray(columns["correlation"], np.int64) & 0xFFFFFFFF
    )


def _overheads(columns: dict[str, Array], strings: Strings) -> Overheads:
    kinds = columns["type"]
    code = recode(kinds, {k: strings.code(_OVERHEADS.get(k, f"overhead {k}")) for k in distinct(kinds)})
    part: dict[str, Array | int | float] = {"start": columns["start"], "end": columns["end"], "process": 0, "thread": 0}
    return assemble(Overheads, [{**part, "name": code, "is_queue_full": kinds == _QUEUE_FULL}], [int(kinds.size)])
