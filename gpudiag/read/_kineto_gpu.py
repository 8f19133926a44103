"""GPU rows of a trace as the columns of GpuOps: devices, kinds, directions and memory kinds out of names and args."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from gpudiag.intervals import Int64
from gpudiag.read._kineto_columns import Codes
from gpudiag.read.names import is_communication
from gpudiag.timeline import ApiCalls, CopyKind, Kind, MemKind

# "Memcpy HtoD (Pageable -> Device)"; "CopyHostToDevice" of ROCm's first years. A = array, which lies on the device.
_COPY = re.compile(
    r"(?:\b|Copy)([HDPA])(?:ost|evice)?[tT]o([HDPA])(?:ost|evice)?\b(?: \((\w+)[\w ]* -> (\w+)[\w ]*\))?"
)
_DIRECTIONS = {"HD": CopyKind.H2D, "DH": CopyKind.D2H, "DD": CopyKind.D2D, "PP": CopyKind.P2P, "HH": CopyKind.H2H}
_MEMORIES = {
    "Pageable": MemKind.PAGEABLE,
    "Pinned": MemKind.PINNED,
    "Device": MemKind.DEVICE,
    "Managed": MemKind.MANAGED,
    "Array": MemKind.OTHER,
}
_KINDS = {"kernel": Kind.KERNEL, "memcpy": Kind.MEMCPY, "memset": Kind.MEMSET}


def gpu_columns(
    tables: dict[str, dict[str, npt.NDArray[Any]]], names: Codes, api: ApiCalls | None
) -> dict[str, npt.NDArray[Any]] | None:
    """The columns of GpuOps from those of kernels, copies and memsets as read; None without any."""
    if not tables:
        return None
    kinds = np.concatenate([np.full(t["start"].size, _KINDS[name], np.int8) for name, t in tables.items()])
    columns = {name: np.concatenate([t[name] for t in tables.values()]) for name in next(iter(tables.values()))}
    # pid and tid of a GPU row are the device and the stream; args say it again since 2021, but not in every writer.
    device = np.where(columns["device"] >= 0, columns["device"], columns["process"])
    distinct = names.distinct(columns["name"])
    collectives = [code for code, text in distinct.items() if is_communication(text)]
    kinds[np.isin(columns["name"], collectives) & (kinds == Kind.KERNEL)] = Kind.COMM
    direction, source, target = (np.full(len(names), start, np.int8) for start in (-1, 0, 0))
    for code in np.unique(columns["name"][kinds == Kind.MEMCPY]):
        direction[code], source[code], target[code] = _copy(distinct[int(code)])
    is_copy = kinds == Kind.MEMCPY
    occupancy = columns["occupancy"] / 100
    columns |= {
        "device": np.clip(device, -(2**31), 2**31 - 1).astype(np.int32),
        "stream": np.where(columns["stream"] >= 0, columns["stream"], columns["thread"]),
        "kind": kinds,
        "copy_kind": np.where(is_copy, direction[columns["name"]], np.int8(CopyKind.NONE)),
        "src_mem": np.where(is_copy, source[columns["name"]], np.int8(MemKind.UNKNOWN)),
        "dst_mem": np.where(is_copy, target[columns["name"]], np.int8(MemKind.UNKNOWN)),
        "process": _launchers(columns["correlation"], api),
        "threads": np.clip(columns["threads"], -1, 2**31 - 1).astype(np.int32),
        "registers": np.clip(columns["registers"], -1, 2**31 - 1).astype(np.int32),
        "local_bytes": np.full(kinds.size, -1, np.int64),
        "occupancy": np.where((occupancy >= 0) & (occupancy <= 1), occupancy, np.nan).astype(np.float32),
    }
    return columns


def _copy(name: str) -> tuple[CopyKind, MemKind, MemKind]:
    """(direction, from, to) of `Memcpy HtoD (Pageable -> Device)`. ROCm's `Host` may be pageable or pinned and stays unknown."""
    found = _COPY.search(name)
    if not found:
        return CopyKind.UNKNOWN, MemKind.UNKNOWN, MemKind.UNKNOWN
    direction = _DIRECTIONS.get((found[1] + found[2]).replace("A", "D"), CopyKind.UNKNOWN)
    return direction, _MEMORIES.get(found[3], MemKind.UNKNOWN), _MEMORIES.get(found[4], MemKind.UNKNOWN)


def _launchers(correlation: Int64, api: ApiCalls | None) -> Int64:
    """The process of the call with the same correlation id; with one process in the file that process for every row."""
    if api is None or not len(api):
        return np.zeros(correlation.size, np.int64)
    if bool((api.process == api.process[0]).all()):
        return np.full(correlation.size, api.process[0])
    order = np.argsort(api.correlation, kind="stable")
    known, process = api.correlation[order], api.process[order]
    low = np.minimum(np.searchsorted(known, correlation), known.size - 1)
    high = np.maximum(np.searchsorted(known, correlation, side="right") - 1, 0)
    certain = (known[low] == correlation) & (process[low] == process[high])
    return np.where(certain, process[low], 0)
