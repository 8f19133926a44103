"""SQLite exports of Nsight Systems, every exporter version from 2020 to 2026, as a Timeline.

What is where differs by the version of the EXPORTER, not of the recorder; columns are taken by name, tables may be missing or
empty, labels come from ENUM_ tables where there are any.

None or empty. Since 2022 a table is written only when it has rows, so its absence alone says nothing:
- GPU operations are None when kernels were launched (API calls that succeeded) but no kernel or graph was recorded: the
  GPU side is lost, whatever copies are left. They are empty when the file says that CUDA was traced and nothing was launched.
- API calls are None when GPU operations were recorded without any; empty when CUDA was traced and there was nothing.
- Ranges are empty when the file says that NVTX was traced, else None. Operators are None unless emit_nvtx marked some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpudiag.errors import GpudiagError
from gpudiag.read import _nsys_meta as meta
from gpudiag.read._columns import ABSENT, Array, Column, Job, compact, fetch
from gpudiag.read._nsys_gpu import GRAPH_LAUNCHES, KERNEL_LAUNCHES, gpu_jobs, lost_kernels, read_gpu_ops
from gpudiag.read._nsys_nvtx import nvtx_job, read_nvtx
from gpudiag.read._sqlite import MAGIC, Database, as_text
from gpudiag.read._tidy import Strings, assemble, check_times, distinct, recode
from gpudiag.read.names import api_name
from gpudiag.timeline import ApiCalls, DeviceInfo, GpuOps, Overheads, Ranges, Repair, Source, Timeline

_API = {
    "start": Column(("start",), missing=ABSENT),
    "end": Column(("end",), missing=ABSENT),
    "tid": Column(("globalTid",), missing=0),
    "correlation": Column(("correlationId",)),
    "name_id": Column(("nameId",), np.int32),
    "class": Column(("eventClass",), np.int8),
}
# ENUM_NSYS_EVENT_CLASS, TRACE_PROCESS_EVENT_CUDABACKTRACE: with --cudabacktrace each call longer than its threshold has a
# second row around the first, which carries the call chain. Counted too, it doubles the calls (and does in nsys's own sums).
_BACKTRACE = 67
_OVERHEAD = {**{k: _API[k] for k in ("start", "end", "tid", "name_id")}, "type": Column(("overheadType",), np.int32)}
# ENUM_CUPTI_OVERHEAD_TYPE 8, OVERHEAD_COMMAND_BUFFER_FULL: the host waited for room in the launch queue.
_QUEUE_FULL = "command buffer full"
_TELLING = ("META_DATA_EXPORT", "EXPORT_META_DATA", "StringIds", "TARGET_INFO_SYSTEM_ENV", "NVTX_EVENTS")


def is_nsys_sqlite(path: Path) -> bool:
    """Whether a file is a SQLite export of Nsight Systems, by its tables. False too for what cannot be read."""
    try:
        with path.open("rb") as file:
            if file.read(16) != MAGIC:
                return False
        database = Database(path)
    except (OSError, GpudiagError):
        return False
    try:
        return looks_like_nsys(database)
    finally:
        database.close()


def looks_like_nsys(database: Database) -> bool:
    if "StringTable" in database.tables and "Version" in database.tables:
        return False  # nvprof
    return any(t in database.tables for t in _TELLING) or any(
        t.startswith("CUPTI_ACTIVITY_KIND_") for t in database.tables
    )


def read_nsys_sqlite(path: Path, progress: Callable[[str], None] | None = None) -> Timeline:
    """The whole file: all its processes and devices. Raises GpudiagError when it is damaged or no nsys export.

    progress: told in words what is being read.
    """
    database = Database(path)
    try:
        if not looks_like_nsys(database):
            raise GpudiagError(
                f"{path}: a SQLite file, but not one that Nsight Systems exported",
                "export the report with `nsys export -t sqlite report.nsys-rep`",
            )
        return _read(database, progress or (lambda text: None))
    except MemoryError:
        raise database.damaged("it states more rows than memory can hold") from None
    finally:
        database.close()


def _read(database: Database, progress: Callable[[str], None]) -> Timeline:
    progress(f"reading {database.path.name}")
    gpu = gpu_jobs(database)
    runtime = database.find("CUPTI_ACTIVITY_KIND_RUNTIME")
    overhead = [t for t in map(database.find, ("PROFILER_OVERHEAD", "CUPTI_ACTIVITY_KIND_OVERHEAD")) if t]
    nvtx = nvtx_job(database)
    api = [Job(runtime, _API)] if runtime else []
    costs = [Job(table, _OVERHEAD) for table in overhead]
    got = fetch(database, [*gpu, *api, *costs, *([nvtx.job] if nvtx else [])])
    gpu_got, rest = got[: len(gpu)], got[len(gpu) :]

    names = _names(database, got)
    strings = Strings()
    recorded = meta.recorded(database)
    traced = meta.traced(database)
    repairs: list[Repair] = []
    diagnostics = list(meta.diagnostics(database))
    warnings: list[str] = []

    progress("sorting GPU operations")
    gpu_ops: GpuOps | None = None
    kernels = sum(
        int(columns["start"].size) for job, columns in zip(gpu, gpu_got, strict=True) if "MEM" not in job.table
    )
    launched = 0 if kernels else _launches(database, runtime)
    if launched:
        diagnostics.append(
            f"{launched} kernel launches were recorded but no kernel: the GPU side of this recording is missing"
        )
    elif gpu or "cuda" in traced:
        gpu_ops, said = read_gpu_ops(database, gpu, gpu_got, names, strings, recorded)
        repairs += said

    progress("sorting API calls")
    api_calls: ApiCalls | None = None
    if api:
        api_calls, said = _api_calls(rest.pop(0), names, strings, recorded)
        repairs += said
    elif "cuda" in traced:
        api_calls = assemble(ApiCalls, [], [])
    if api_calls is not None and not len(api_calls) and gpu_ops is not None and len(gpu_ops):
        api_calls = None
    if gpu_ops is not None and api_calls is not None:
        warnings += lost_kernels(gpu_ops, api_calls, strings)
    overheads: Overheads | None = None
    if costs:
        overheads, said = _overheads(database, rest[: len(costs)], names, strings)
        rest = rest[len(costs) :]
        repairs += said

    last = max((int(t.end.max()) for t in (gpu_ops, api_calls) if t is not None and len(t)), default=None)
    ranges = cpu_ops = None
    if nvtx:
        progress("sorting NVTX ranges")
        ranges, cpu_ops, said = read_nvtx(database, nvtx, rest.pop(0), names, strings, last)
        repairs += said
    elif "nvtx" in traced:
        ranges = assemble(Ranges, [], [])

    devices: dict[int, DeviceInfo] = {}
    if gpu_ops is not None:
        gpu_ops, devices, said_of_devices = _devices(database, gpu_ops, api_calls)
        warnings += said_of_devices
    version = meta.versions(database)
    return Timeline(
        source=Source("nsys-sqlite", str(database.path), version.recorder, version.schema),
        strings=strings.texts,
        gpu_ops=gpu_ops,
        api_calls=api_calls,
        ranges=ranges,
        cpu_ops=cpu_ops,
        overheads=overheads,
        devices=devices,
        time_base_ns=meta.time_base(database),
        recorded=recorded,
        repairs=tuple(repairs),
        diagnostics=tuple(diagnostics),
        warnings=tuple(warnings),
    )


def _names(database: Database, got: Sequence[dict[str, Array]]) -> dict[int, str]:
    """StringIds of every id that a fetched row uses. The table also holds file contents and symbols that nobody asks for."""
    if not {"id", "value"} <= set(database.tables.get("StringIds", ())):
        return {}
    ids = {i for columns in got for key in ("name_id", "text_id") if key in columns for i in distinct(columns[key])}
    wanted = sorted(i for i in ids if i >= 0)
    names: dict[int, str] = {}
    for at in range(0, len(wanted), 500):
        some = wanted[at : at + 500]
        sql = f"SELECT id, value FROM StringIds WHERE id IN ({', '.join('?' * len(some))})"
        for number, text in database.rows(sql, some):
            if isinstance(number, int) and text is not None:
                names[number] = as_text(text)
    return names


def _launches(database: Database, runtime: str | None) -> int:
    """Kernel and graph launches among the API calls that did not fail."""
    have = database.tables[runtime] if runtime else ()
    if not runtime or "nameId" not in have or not {"id", "value"} <= set(database.tables.get("StringIds", ())):
        return 0
    launch_ids = [
        number
        for number, text in database.rows("SELECT id, value FROM StringIds WHERE value LIKE 'cu%Launch%' ORDER BY id")
        if isinstance(text, str) and api_name(text) in KERNEL_LAUNCHES + GRAPH_LAUNCHES
    ]
    succeeded = " AND coalesce(returnValue, 0) = 0" if "returnValue" in have else ""
    succeeded += f" AND coalesce(eventClass, 0) <> {_BACKTRACE}" if "eventClass" in have else ""
    count = 0
    for number in launch_ids:
        count += int(
            str(database.rows(f'SELECT count(*) FROM "{runtime}" WHERE nameId = ?{succeeded}', (number,))[0][0])
        )
    return count


def _name_codes(ids: Array, names: Mapping[int, str], strings: Strings) -> Array:
    """Codes of API and overhead names by their StringIds id, without `_v7000`."""
    return recode(
        ids,
        {i: strings.code(api_name(names[i]) if i in names else f"string {i} (not recorded)") for i in distinct(ids)},
    )


def _host_columns(columns: dict[str, Array], keep: Array | None) -> dict[str, Array | int | float]:
    if keep is not None:
        for name in columns:
            columns[name] = columns[name][keep]
    tid = compact(np.asarray(columns.pop("tid"), np.int64))
    if tid.size and tid.strides == (0,):
        return {"process": int(tid[0] >> 24) & 0xFFFFFF, "thread": int(tid[0]) & 0xFFFFFF}
    return {"process": (tid >> 24) & 0xFFFFFF, "thread": tid & 0xFFFFFF}


def _api_calls(
    columns: dict[str, Array], names: Mapping[int, str], strings: Strings, recorded: tuple[int, int] | None
) -> tuple[ApiCalls, list[Repair]]:
    again = columns.pop("class") == _BACKTRACE
    if again.any():
        columns = {name: column[~again] for name, column in columns.items()}
    keep, repairs = check_times(
        "API calls", np.asarray(columns["start"], np.int64), np.asarray(columns["end"], np.int64), recorded
    )
    part = _host_columns(columns, keep)
    part["name"] = _name_codes(columns.pop("name_id"), names, strings)
    return assemble(ApiCalls, [{**part, **columns}], [int(columns["start"].size)]), repairs


def _overheads(
    database: Database, got: Sequence[dict[str, Array]], names: Mapping[int, str], strings: Strings
) -> tuple[Overheads, list[Repair]]:
    """What the profiler cost. From 2025.5 `overheadType` says what kind; the name says it in every version."""
    types = meta.labels(database, "ENUM_CUPTI_OVERHEAD_TYPE", {8: "COMMAND_BUFFER_FULL"}, "OVERHEAD_")
    full_types = [number for number, name in types.items() if name == "COMMAND_BUFFER_FULL"]
    parts: list[dict[str, Array | int | float]] = []
    counts = []
    repairs = []
    for columns in got:
        keep, said = check_times(
            "profiler overheads", np.asarray(columns["start"], np.int64), np.asarray(columns["end"], np.int64), None
        )
        repairs += said
        part = _host_columns(columns, keep)
        ids = columns.pop("name_id")
        full_names = [i for i in distinct(ids) if names.get(i, "").lower().replace("_", " ") == _QUEUE_FULL]
        part["is_queue_full"] = np.isin(columns.pop("type"), full_types) | np.isin(ids, full_names)
        part["name"] = _name_codes(ids, names, strings)
        parts.append({**part, **columns})
        counts.append(int(columns["start"].size))
    return assemble(Overheads, parts, counts), repairs


def _devices(
    database: Database, ops: GpuOps, api_calls: ApiCalls | None
) -> tuple[GpuOps, dict[int, DeviceInfo], list[str]]:
    """(operations with device and process made sure of, what is known of each used device, warnings)."""
    warnings: list[str] = []
    pids = distinct(ops.process)
    if pids == [0] and api_calls is not None:
        # Altered copies lack globalPid; with one process there is no doubt whose kernels they are.
        owners = distinct(api_calls.process)
        if len(owners) == 1:
            ops, pids = replace(ops, process=np.broadcast_to(np.int64(owners[0]), len(ops))), owners
    gpus = meta.gpus(database)
    if gpus.ambiguous:
        # Each process numbers its visible devices from 0: taken as they are, two GPUs would become one.
        device = np.array(ops.device)
        for (pid, index), gpu in gpus.of.items():
            device[(ops.process == pid) & (ops.device == index)] = gpu
        used = distinct(device)
        return replace(ops, device=device), {d: gpus.infos[d] for d in used if d in gpus.infos}, warnings
    used = distinct(ops.device)
    if not gpus.of and len(pids) > 1:
        shared = [d for d in used if len(distinct(ops.process[ops.device == d])) > 1]
        if shared:
            warnings.append(
                f"{len(pids)} processes used device {shared[0]} by its number, and this export does not say whether it was the "
                "same GPU for all of them; if CUDA_VISIBLE_DEVICES differed, analyze one process at a time"
            )
    infos = {d: info for d in used if (info := gpus.device(d)) is not None}
    return ops, infos, warnings
