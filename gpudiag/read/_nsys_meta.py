"""What an nsys export says about itself: versions, what was traced, the GPUs, the profiler's own messages.

Never read here: the environment, host, user, paths and command line that META_DATA_* and TARGET_INFO_SYSTEM_ENV also hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpudiag.read._sqlite import Database
from gpudiag.timeline import CopyKind, DeviceInfo, MemKind

# ENUM_CUDA_MEMCPY_OPER and ENUM_CUDA_MEM_KIND as every export that has these tables numbers them; for those that have none
# (up to 2022.2). Names are matched by the part that they share over the versions.
COPY_NUMBERS = {
    0: "UNKNOWN",
    1: "HTOD",
    2: "DTOH",
    3: "HTOA",
    4: "ATOH",
    5: "ATOA",
    6: "ATOD",
    7: "DTOA",
    8: "DTOD",
    9: "HTOH",
    10: "PTOP",
    11: "UVM_HTOD",
    12: "UVM_DTOH",
    13: "UVM_DTOD",
}
MEMORY_NUMBERS = {
    0: "PAGEABLE",
    1: "PINNED",
    2: "DEVICE",
    3: "ARRAY",
    4: "MANAGED",
    5: "DEVICE_STATIC",
    6: "MANAGED_STATIC",
    7: "UNKNOWN",
}
# Arrays lie in device memory, so a copy from the host to one is a copy to the device.
_COPIES = {
    "HTOD": CopyKind.H2D,
    "HTOA": CopyKind.H2D,
    "DTOH": CopyKind.D2H,
    "ATOH": CopyKind.D2H,
    "ATOA": CopyKind.D2D,
    "ATOD": CopyKind.D2D,
    "DTOA": CopyKind.D2D,
    "DTOD": CopyKind.D2D,
    "HTOH": CopyKind.H2H,
    "PTOP": CopyKind.P2P,
    "UVM_HTOD": CopyKind.MANAGED,
    "UVM_DTOH": CopyKind.MANAGED,
    "UVM_DTOD": CopyKind.MANAGED,
}
_MEMORIES = {
    "PAGEABLE": MemKind.PAGEABLE,
    "PINNED": MemKind.PINNED,
    "DEVICE": MemKind.DEVICE,
    "DEVICE_STATIC": MemKind.DEVICE,
    "ARRAY": MemKind.DEVICE,
    "MANAGED": MemKind.MANAGED,
    "MANAGED_STATIC": MemKind.MANAGED,
}
_PATH = re.compile(r"(?<![\w.])(?!/(?:proc|sys)/)(?:[A-Za-z]:)?[/\\][\w.@+~-]+(?:[/\\][^\s'\",;:]*)+")
_MESSAGES = 20


@dataclass(frozen=True)
class Versions:
    """exporter: `2024.5.1.113`; schema: `3.13.2`; empty when the export carries none (2020 and before)."""

    exporter: str
    schema: str

    @property
    def recorder(self) -> str:
        """`nsys 2024.5.1`. The schema follows the exporter; the export does not name the nsys that recorded."""
        match = re.match(r"\d+\.\d+(?:\.\d+)?", self.exporter)
        return f"nsys {match[0]}" if match else "nsys (version not recorded)"


def versions(database: Database) -> Versions:
    found: dict[str, str] = {}
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
        for name, value in database.small(table, ("name", "value")):
            if name in ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION") and isinstance(value, str):
                found.setdefault(str(name), value[:40])
    return Versions(found.get("EXPORT_PRODUCT_VERSION", ""), found.get("EXPORT_SCHEMA_VERSION", ""))


def traced(database: Database) -> frozenset[str]:
    """Which of `cuda` and `nvtx` the recording says it traced, so that an absent table means that nothing happened.

    From 2023.3 the capture options say so; before, the profiler's own start-up overhead names what it hooked.
    """
    seen = set()
    for name, value in database.small("META_DATA_CAPTURE", ("name", "value")):
        if name == "CAPTURE_EVENT_TYPE" and isinstance(value, str):
            seen.add({"cuda": "cuda", "nvtxevents": "nvtx", "nvtx": "nvtx"}.get(value.lower(), ""))
    overhead = database.find("PROFILER_OVERHEAD")
    if overhead and {"nameId"} <= set(database.tables[overhead]) and "StringIds" in database.tables:
        names = database.rows(
            f'SELECT DISTINCT value FROM StringIds WHERE id IN (SELECT nameId FROM "{overhead}") ORDER BY value LIMIT 1000'
        )
        for (text,) in names:
            if isinstance(text, str) and text.endswith("profiling initialization"):
                seen.add(text.split()[0].lower())
    return frozenset(seen & {"cuda", "nvtx"})


def labels(database: Database, table: str, fallback: Mapping[int, str], prefix: str) -> dict[int, str]:
    """number -> label without its prefix, from an ENUM_ table, over the documented numbers."""
    found = dict(fallback)
    for number, name in database.small(table, ("id", "name")):
        if isinstance(number, int) and isinstance(name, str) and name:
            found[number] = name.upper().removeprefix(prefix)
    return found


def copy_kinds(database: Database) -> dict[int, int]:
    """copyKind number -> CopyKind."""
    named = labels(database, "ENUM_CUDA_MEMCPY_OPER", COPY_NUMBERS, "CUDA_MEMCPY_KIND_")
    return {number: int(_COPIES.get(name, CopyKind.UNKNOWN)) for number, name in named.items()}


def memory_kinds(database: Database) -> dict[int, int]:
    """srcKind / dstKind number -> MemKind."""
    named = labels(database, "ENUM_CUDA_MEM_KIND", MEMORY_NUMBERS, "CUDA_MEMOPR_MEMORY_KIND_")
    return {number: int(_MEMORIES.get(name, MemKind.UNKNOWN)) for number, name in named.items()}


def recorded(database: Database) -> tuple[int, int] | None:
    """The extent of the recording as stated; a sliced file still states that of the whole."""
    for (duration,) in database.small("ANALYSIS_DETAILS", ("duration",), 1):
        if isinstance(duration, int) and 0 < duration < 10**17:
            return 0, duration
    return None


def time_base(database: Database) -> int | None:
    for (epoch,) in database.small("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",), 1):
        if isinstance(epoch, int) and 0 < epoch < 4 * 10**18:
            return epoch
    return None


@dataclass(frozen=True)
class Gpus:
    """infos: node GPU id -> what is known of it. of: (pid, CUDA device index) -> node GPU id. ordinals: CUDA index -> id."""

    infos: Mapping[int, DeviceInfo]
    of: Mapping[tuple[int, int], int]
    ordinals: Mapping[int, int]

    @property
    def ambiguous(self) -> bool:
        """Whether one CUDA device index stands for different GPUs in different processes (CUDA_VISIBLE_DEVICES)."""
        meaning: dict[int, int] = {}
        return any(meaning.setdefault(index, gpu) != gpu for (_, index), gpu in sorted(self.of.items()))

    def device(self, index: int) -> DeviceInfo | None:
        """The GPU behind a CUDA device index; None when the recording cannot say."""
        mapped = {gpu for (_, i), gpu in self.of.items() if i == index}
        if len(mapped) == 1:
            return self.infos.get(mapped.pop())
        if index in self.ordinals:
            return self.infos.get(self.ordinals[index])
        return self.infos.get(index)


def gpus(database: Database) -> Gpus:
    """The GPUs of the node, used or not."""
    fields = ("id", "deviceId", "name", "smCount", "computeMajor", "computeMinor", "smMajor", "smMinor", "totalMemory")
    infos: dict[int, DeviceInfo] = {}
    ordinals: dict[int, int] = {}
    for table in ("TARGET_INFO_GPU", "TARGET_INFO_CUDA_GPU"):
        for row in database.small(table, (*fields, "memoryBandwidth", "clockRate", "cuDevice"), 1000):
            known = dict(zip((*fields, "memoryBandwidth", "clockRate", "cuDevice"), row, strict=True))
            gpu = _whole(known["id"]) if known["id"] is not None else _whole(known["deviceId"])
            if gpu is None or gpu in infos:
                continue
            major = _whole(known["computeMajor"]) or _whole(known["smMajor"])
            minor = _whole(known["computeMinor"] if _whole(known["computeMajor"]) else known["smMinor"])
            infos[gpu] = DeviceInfo(
                name=str(known["name"] or "")[:100],
                sm_count=_whole(known["smCount"]) or None,
                compute_capability=(major, minor or 0) if major else None,
                memory_bytes=_whole(known["totalMemory"]) or None,
                memory_bandwidth=_whole(known["memoryBandwidth"]) or None,
                clock_hz=_whole(known["clockRate"]) or None,
            )
            ordinal = _whole(known["cuDevice"])
            if ordinal is not None:
                ordinals.setdefault(ordinal, gpu)
    of = {}
    for gpu_id, index, pid in database.small("TARGET_INFO_CUDA_DEVICE", ("gpuId", "cudaId", "pid")):
        if isinstance(gpu_id, int) and isinstance(index, int) and isinstance(pid, int):
            of[pid, index] = gpu_id
    return Gpus(infos, of, ordinals)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 2**62 else None


def diagnostics(database: Database) -> tuple[str, ...]:
    """The profiler's own warnings and errors, and what it says about CUDA events; paths are taken out."""
    severities = {0: "UNKNOWN", 1: "INFO", 2: "WARNING", 3: "ERROR", 4: "VERBOSE"}
    severities |= labels(database, "ENUM_DIAGNOSTIC_SEVERITY_LEVEL", {}, "")
    found: dict[str, None] = {}
    for severity, text in database.small("DIAGNOSTIC_EVENT", ("severity", "text"), 10_000):
        if not isinstance(text, str) or not isinstance(severity, int):
            continue
        if severities.get(severity) in ("WARNING", "ERROR") or re.match(r"no cuda events", text, re.IGNORECASE):
            found[without_paths(text)] = None
    return tuple(found)[:_MESSAGES]


def without_paths(text: str) -> str:
    """One line, with `<path>` for every path: they hold user and host names."""
    return " ".join(_PATH.sub("<path>", text).split())[:300]
