"""The columns of a trace put together into a Timeline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gpudiag.errors import GpudiagError
from gpudiag.read._kineto_columns import BAD_TIME, GPU_TABLES, NO_TIME, TABLES, Codes, Columns
from gpudiag.read._kineto_gpu import gpu_columns
from gpudiag.read._kineto_meta import Meta, describe, devices, host
from gpudiag.read._kineto_salvage import LOST
from gpudiag.read.names import api_name
from gpudiag.timeline import (
    ApiCalls,
    Bool,
    CpuOps,
    GpuOps,
    Int32,
    MemoryEvents,
    Overheads,
    PyCalls,
    Ranges,
    Repair,
    Source,
    Table,
    Timeline,
)

_Columns = dict[str, npt.NDArray[Any]]
_T = TypeVar("_T", GpuOps, ApiCalls, Ranges, CpuOps, PyCalls, Overheads)

# Ranges that 2021 traces file under Operator like any aten:: call: what torch itself and Lightning open as user annotations.
_USER_SCOPE = re.compile(
    r"ProfilerStep\*?#|enumerate\(DataLoader\)#|Optimizer\.(?:step|zero_grad)#|DistributedDataParallel\.|gpudiag::|\[pl\]|## "
)
_INDEX = re.compile(r"(?:ProfilerStep\*?|gpudiag::\w+)#(\d{1,18})$")
_QUEUE_FULL = re.compile(r"command[ _]buffer[ _]full", re.IGNORECASE)
# Categories of accelerators whose rows no rule speaks about.
_OTHER_ACCELERATOR = re.compile(r"(?:mtia|glow|hpu|xpu|privateuse1)_")
_HOUR = 3600 * 10**9  # ns
_ABSOLUTE = 10**18  # ns: 2001; a time after that is a wall clock, a smaller one is relative to something

# Calls that give the GPU something to do.
_GPU_WORK = re.compile(r"(?:cuda|cu|hip)\w*(?:Launch|Memcpy|Memset)")
_GPU_LOST = (
    "launches and copies were recorded, but nothing that ran on the GPU: another profiler may have held CUPTI; record again "
    "without it"
)
_NO_GPU = (
    "no GPU activity was recorded: if the script uses a GPU, "
    "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
)


def build(path: Path, columns: Columns, meta: Meta, diagnostics: Sequence[str], damage: Sequence[str]) -> Timeline:
    """The Timeline of all that was read. Raises GpudiagError when no event is one of torch.profiler's.

    gpu_ops is None when the trace cannot tell: no GPU row and no CUDA or HIP call, with GPUs in the machine or no word about
    them; or calls that launch or copy, whose work the profiler lost. It is empty when calls were recorded and none of them
    gave the GPU work, or when the machine had no usable GPU (an empty deviceProperties), as in a run on the CPU.
    """
    categories = frozenset(columns.seen)
    others = sorted(c for c in categories if _OTHER_ACCELERATOR.match(c))
    if not columns.seen.total():
        raise GpudiagError(
            f"{path}: the trace holds no event that can be read",
            "record again, and check that prof.step() is called often enough for the schedule to reach its active steps",
        )
    if not categories & (TABLES.keys() | {"Trace"}) and not others:
        raise GpudiagError(
            f"{path}: none of its {columns.seen.total()} events is one of torch.profiler's",
            "record with torch.profiler.profile(...) and export_chrome_trace(...), or with `gpudiag profile`",
        )
    names = columns.names
    tables = {
        table: {name: np.concatenate(arrays) for name, arrays in parts.items()}
        for table, parts in columns.parts.items()
    }
    columns.parts.clear()
    memory = _memory(tables.pop("memory", None))
    _drop_clamped(tables, columns.repairs)
    _move_user_scopes(tables, names)
    api = _api_calls(tables.pop("api", None), names)
    gpu = _table(GpuOps, gpu_columns({t: tables.pop(t) for t in GPU_TABLES if t in tables}, names, api))
    cpu = _table(CpuOps, tables.pop("cpu_op", None))
    ranges = _ranges(tables.pop("range", None), names)
    python = _python(tables.pop("python", None), cpu, ranges)
    overhead = _overheads(tables.pop("overhead", None), names)
    lost = gpu is None and api is not None and bool(_by_name(api.name, names, _GPU_WORK).any())
    if gpu is None and not lost and (api is not None or meta.devices == []):
        gpu = _empty(GpuOps)
    if gpu is not None:
        api = api if api is not None else _empty(ApiCalls)
        overhead = overhead if overhead is not None else _empty(Overheads)
    if cpu is not None:
        ranges = ranges if ranges is not None else _empty(Ranges)
    recorder, schema = describe(meta, categories)
    distributed = meta.distributed
    window = (min(columns.window), max(columns.window)) if columns.window else (0, 0)
    return Timeline(
        source=Source("kineto", str(path), recorder, schema),
        strings=tuple(names.texts),
        gpu_ops=gpu,
        api_calls=api,
        ranges=ranges,
        cpu_ops=cpu,
        py_calls=python,
        overheads=overhead,
        memory=memory,
        devices=devices(meta),
        host=host(meta),
        rank=(distributed and distributed.rank) or 0,
        world_size=(distributed and distributed.world_size) or 1,
        backend=distributed.backend if distributed else None,
        time_base_ns=0 if _is_absolute(gpu, api, cpu, ranges) else meta.base_ns,
        recorded=window if window[0] < window[1] else None,
        with_stack=bool(meta.with_stack) or python is not None or columns.call_stacks,
        repairs=tuple(
            Repair(what, count, columns.seen.total() + columns.repairs[LOST], what in (LOST, BAD_TIME, NO_TIME))
            for what, count in columns.repairs.items()
            if count
        ),
        diagnostics=tuple(diagnostics),
        warnings=(*damage, *_warnings(gpu, lost, others)),
    )


def _drop_clamped(tables: dict[str, _Columns], repairs: Counter[str]) -> None:
    """Leave out rows at time 0 where everything else lies over an hour later: Kineto writes a time before its base as 0."""
    starts = [t["start"][t["start"] > 0] for t in tables.values()]
    if min((int(s.min()) for s in starts if s.size), default=0) < _HOUR:
        return
    for table, columns in tables.items():
        keep = columns["start"] > 0
        if not keep.all():
            repairs[NO_TIME] += int((~keep).sum())
            tables[table] = {name: values[keep] for name, values in columns.items()}


def _warnings(gpu: GpuOps | None, lost: bool, others: Sequence[str]) -> list[str]:
    said = []
    if others:
        said.append(f"rows of another accelerator ({', '.join(others)}) are not judged")
    elif lost:
        said.append(_GPU_LOST)
    elif gpu is None:
        said.append(_NO_GPU)
    return said


def _is_absolute(*tables: Table | None) -> bool:
    starts = [int(t.start[len(t) // 2]) for t in tables if t is not None and len(t)]  # type: ignore[attr-defined]
    return bool(starts) and max(starts) > _ABSOLUTE


def _table(kind: type[_T], columns: _Columns | None) -> _T | None:
    """A table sorted by (start, end); None for no columns."""
    if columns is None:
        return None
    order = np.lexsort((columns["end"], columns["start"]))
    return kind(**{name: columns[name][order] for name in (f.name for f in fields(kind))})


def _empty(kind: type[_T]) -> _T:
    dtypes = {"Int64": np.int64, "Int32": np.int32, "Int8": np.int8, "Float32": np.float32, "Bool": np.bool_}
    return kind(**{f.name: np.empty(0, dtypes[str(f.type)]) for f in fields(kind)})


def _by_name(codes: npt.NDArray[Any], names: Codes, wanted: re.Pattern[str]) -> Bool:
    """Which of n rows have a name that matches from its start; each distinct name is matched once."""
    mask = np.zeros(len(names), bool)
    mask[[code for code, text in names.distinct(codes).items() if wanted.match(text)]] = True
    rows: Bool = mask[codes]
    return rows


def _renamed(codes: npt.NDArray[Any], names: Codes, new: Mapping[int, str]) -> Int32:
    """codes with those in new given another text."""
    lookup = np.arange(len(names), dtype=np.int32)
    for code, text in new.items():
        lookup[code] = names[text]
    renamed: Int32 = lookup[codes]
    return renamed


def _move_user_scopes(tables: dict[str, _Columns], names: Codes) -> None:
    operators = tables.get("cpu_op")
    if operators is None:
        return
    scopes = _by_name(operators["name"], names, _USER_SCOPE)
    if not scopes.any():
        return
    moved = {name: values[scopes] for name, values in operators.items() if name != "shapes"}
    ranges = tables.get("range")
    tables["range"] = {n: np.concatenate([ranges[n], v]) for n, v in moved.items()} if ranges else moved
    tables["cpu_op"] = {name: values[~scopes] for name, values in operators.items()}


def _ranges(columns: _Columns | None, names: Codes) -> Ranges | None:
    """ProfilerStep#7 keeps its name and has index 7; gpudiag::step#7 becomes `step` of domain gpudiag with index 7."""
    if columns is None:
        return None
    distinct = names.distinct(columns["name"])
    index = np.full(len(names), -1, np.int64)
    ours = {}
    for code, text in distinct.items():
        number = _INDEX.match(text)
        if number:
            index[code] = int(number[1])
        if text.startswith("gpudiag::"):
            ours[code] = text.removeprefix("gpudiag::").partition("#")[0]
    columns["index"] = index[columns["name"]]
    columns["domain"] = np.where(np.isin(columns["name"], list(ours)), names["gpudiag"], names[""]).astype(np.int32)
    columns["name"] = _renamed(columns["name"], names, ours)
    return _table(Ranges, columns)


def _api_calls(columns: _Columns | None, names: Codes) -> ApiCalls | None:
    if columns is None:
        return None
    plain = {code: api_name(text) for code, text in names.distinct(columns["name"]).items()}
    columns["name"] = _renamed(columns["name"], names, plain)
    return _table(ApiCalls, columns)


def _overheads(columns: _Columns | None, names: Codes) -> Overheads | None:
    if columns is None:
        return None
    columns["is_queue_full"] = _by_name(columns["name"], names, _QUEUE_FULL)
    return _table(Overheads, columns)


def _memory(columns: _Columns | None) -> MemoryEvents | None:
    """The allocator's totals in order of time; None without any about a GPU."""
    if columns is None or not columns["start"].size:
        return None
    order = np.argsort(columns["start"], kind="stable")
    start = columns["start"][order]
    return MemoryEvents(
        start=start,
        end=start,
        device=columns["device"][order].astype(np.int32),
        allocated=columns["allocated"][order],
        reserved=columns["reserved"][order],
    )


def _python(columns: _Columns | None, cpu: CpuOps | None, ranges: Ranges | None) -> PyCalls | None:
    """Frames without a thread (0/0 in some traces) are given to the thread with the most ranges and operators."""
    if columns is None:
        return None
    nowhere = (columns["process"] == 0) & (columns["thread"] == 0)
    if nowhere.any():
        for table in (ranges, cpu):
            if table is not None and len(table):
                pairs, counts = np.unique(np.stack([table.process, table.thread]), axis=1, return_counts=True)
                process, thread = pairs[:, counts.argmax()]
                columns["process"] = np.where(nowhere, process, columns["process"])
                columns["thread"] = np.where(nowhere, thread, columns["thread"])
                break
    return _table(PyCalls, columns)
