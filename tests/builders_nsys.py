"""Tiny Nsight Systems exports for tests, with the tables and columns that each exporter version writes.

file = NsysFile(tmp_path / "x.sqlite", "2024.5.1.113")
file.api(100, 110, "cudaLaunchKernel_v7000", correlation=1)
file.kernel(120, 180, "saxpy(float*)", correlation=1)
timeline = read_nsys_sqlite(file.write())
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path

# Exporter -> schema version; "" stands for the 2020 exports, which carry no version and no metadata table.
VERSIONS = {
    "": "",
    "2022.1.3.3": "2.9.1",
    "2022.2.1.31": "2.9.1",
    "2022.4.2.1": "3.0.0",
    "2023.2.3.0": "3.1.7",
    "2023.3.1.92": "3.4.0",
    "2023.4.1.97": "3.6.0",
    "2023.4.4.54": "3.7.2",
    "2024.2.3.38": "3.11.1",
    "2024.5.1.113": "3.13.2",
    "2024.6.2.225": "3.16.1",
    "2025.1.3.140": "3.17.2",
    "2025.3.1.90": "3.20.2",
    "2025.3.2.367": "3.20.3",
    "2025.5.1.121": "3.23.3",
    "2025.5.2.266": "3.24.0",
    "2026.1.1.204": "3.24.14",
    "2026.2.1.210": "3.25.0",
}
PID, TID = 1000, 1001
_KERNEL = (
    "start end deviceId contextId streamId correlationId globalPid demangledName shortName mangledName launchType cacheConfig "
    "registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory dynamicSharedMemory localMemoryPerThread "
    "localMemoryTotal gridId sharedMemoryExecuted graphNodeId sharedMemoryLimitConfig"
)
_KERNEL_2025_5_2 = (
    "qmdBulkReleaseDone qmdPreexitDone qmdLastCtaDone graphId clusterX clusterY clusterZ clusterSchedulingPolicy "
    "maxPotentialClusterSize maxActiveClusters"
)
_MEMCPY = (
    "start end deviceId contextId streamId correlationId globalPid bytes copyKind deprecatedSrcId srcKind dstKind srcDeviceId "
    "srcContextId dstDeviceId dstContextId migrationCause graphNodeId"
)
_MEMSET = "start end deviceId contextId streamId correlationId globalPid value bytes graphNodeId memKind"
_SYNC = "start end deviceId contextId streamId correlationId globalPid"
_GRAPH = "start end deviceId contextId greenContextId streamId correlationId globalPid graphId graphExecId"
_NVTX = (
    "start end eventType rangeId category color text globalTid endGlobalTid textId domainId uint64Value int64Value doubleValue "
    "uint32Value int32Value floatValue jsonTextId jsonText"
)
_GPU = "vmId id name busLocation totalMemory memoryBandwidth clockRate smCount chipName cuDevice computeMajor computeMinor smMajor smMinor"
_COPIES = "UNKNOWN HTOD DTOH HTOA ATOH ATOA ATOD DTOA DTOD HTOH PTOP UVM_HTOD UVM_DTOH UVM_DTOD"
_MEMORIES = "PAGEABLE PINNED DEVICE ARRAY MANAGED DEVICE_STATIC MANAGED_STATIC UNKNOWN"


def global_tid(pid: int, tid: int = 0) -> int:
    """nsys's serialised id: the process in bits 24..47, the thread in the lower 24."""
    return (1 << 48) | (pid << 24) | tid


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")) if version else (2020,)


class NsysFile:
    """Rows are collected and written by `write`. Tables without rows are left out, as every exporter but 2022.2.1 does."""

    def __init__(self, path: Path, exporter: str = "2025.5.2.266") -> None:
        self.path, self.exporter, self.at = path, exporter, _numbers(exporter)
        self.rows: dict[str, list[dict[str, object]]] = {}
        self.strings: dict[str | bytes, int] = {}
        self.columns = self._columns()
        self._metadata()

    def _columns(self) -> dict[str, list[str]]:
        at = self.at
        green = " greenContextId" if at >= (2023, 4, 4) else ""
        kernel = _KERNEL if at >= (2022,) else _KERNEL.replace(" mangledName", "")
        kernel += f" {_KERNEL_2025_5_2}" if at >= (2025, 5, 2) else ""
        kernel += " sharedMemoryRequestedPercentage" if at >= (2026, 1, 1) else ""
        kernel += " tensorSizeMinusOneElements" if at >= (2026, 2, 1) else ""
        memcpy = _MEMCPY + (" virtualAddress" if at >= (2022,) else "") + (" copyCount" if at >= (2025, 3, 1) else "")
        sync = _SYNC + (
            " deprecatedSyncType syncType eventId eventSyncId" if at >= (2025, 3, 1) else " syncType eventId"
        )
        tables = {
            "StringIds": "id value",
            "CUPTI_ACTIVITY_KIND_KERNEL": kernel.replace(" contextId", f" contextId{green}"),
            "CUPTI_ACTIVITY_KIND_MEMCPY": memcpy.replace(" contextId", f" contextId{green}"),
            "CUPTI_ACTIVITY_KIND_MEMSET": _MEMSET.replace(" contextId", f" contextId{green}"),
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": _GRAPH,
            "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": sync.replace(" contextId", f" contextId{green}"),
            "NVTX_EVENTS": _NVTX + (" binaryData" if at >= (2026, 2, 1) else ""),
            "PROFILER_OVERHEAD": "start end globalTid nameId "
            + ("overheadType" if at >= (2025, 5, 2) else "returnValue"),
            "CUPTI_ACTIVITY_KIND_OVERHEAD": "start end eventClass globalTid correlationId nameId overheadType",
            "DIAGNOSTIC_EVENT": "timestamp timestampType source severity text globalPid",
            "TARGET_INFO_GPU": _GPU if at >= (2022,) else "deviceId name totalMemory",
            "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId pid",
            "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime",
            "TARGET_INFO_SYSTEM_ENV": "globalVid devStateName name nameEnum value",
            "ANALYSIS_DETAILS": "globalVid duration startTime stopTime",
            "EXPORT_META_DATA": "name value",
            "META_DATA_EXPORT": "name value",
            "META_DATA_CAPTURE": "name value",
            "ENUM_CUDA_MEMCPY_OPER": "id name label",
            "ENUM_CUDA_MEM_KIND": "id name label",
            "ENUM_CUPTI_OVERHEAD_TYPE": "id name label",
        }
        return {name: columns.split() for name, columns in tables.items()}

    def _metadata(self) -> None:
        if not self.exporter:
            return
        table = "META_DATA_EXPORT" if self.at >= (2023, 3) else "EXPORT_META_DATA"
        for name, value in (
            ("EXPORT_PRODUCT_VERSION", self.exporter),
            ("EXPORT_SCHEMA_VERSION", VERSIONS[self.exporter]),
            ("EXPORT_USER", "alice"),
            ("EXPORT_HOST", "secret-host"),
        ):
            self.row(table, name=name, value=value)
        self.row("TARGET_INFO_SESSION_START_TIME", utcEpochNs=1_700_000_000_000_000_000)
        self.row(
            "TARGET_INFO_SYSTEM_ENV",
            globalVid=0,
            devStateName="d",
            name="DeviceEnvironment",
            nameEnum=1,
            value="TOKEN=hunter2",
        )
        if self.at >= (2022, 4):
            for number, name in enumerate(_COPIES.split()):
                self.row("ENUM_CUDA_MEMCPY_OPER", id=number, name=f"CUDA_MEMCPY_KIND_{name}", label=name)
            for number, name in enumerate(_MEMORIES.split()):
                self.row("ENUM_CUDA_MEM_KIND", id=number, name=f"CUDA_MEMOPR_MEMORY_KIND_{name}", label=name)

    def string(self, text: str | bytes) -> int:
        """The StringIds id of a text."""
        return self.strings.setdefault(text, len(self.strings) + 1)

    def row(self, table: str, **values: object) -> None:
        self.rows.setdefault(table, []).append(values)

    def kernel(
        self,
        start: object,
        end: object,
        name: str | bytes = "kernel",
        *,
        correlation: int = 1,
        device: int = 0,
        stream: int = 7,
        pid: int = PID,
        grid: tuple[int, int, int] = (10, 2, 1),
        block: tuple[int, int, int] = (256, 1, 1),
        **more: object,
    ) -> None:
        launch = dict(zip(("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"), (*grid, *block), strict=True))
        values = {
            **_place(start, end, device, stream, correlation, pid),
            **{
                "demangledName": self.string(name),
                "shortName": self.string("kernel"),
                "mangledName": self.string("_Z"),
            },
            **{
                "registersPerThread": 32,
                "staticSharedMemory": 16,
                "dynamicSharedMemory": 1024,
                "localMemoryPerThread": 0,
            },
            **launch,
            **more,
        }
        self.row("CUPTI_ACTIVITY_KIND_KERNEL", **values)

    def copy(
        self,
        start: object,
        end: object,
        kind: int = 1,
        *,
        src: int | None = 0,
        dst: int | None = 2,
        size: int = 1024,
        correlation: int = 1,
        device: int = 0,
        stream: int = 7,
        pid: int = PID,
    ) -> None:
        values = _place(start, end, device, stream, correlation, pid)
        self.row("CUPTI_ACTIVITY_KIND_MEMCPY", **values, bytes=size, copyKind=kind, srcKind=src, dstKind=dst)

    def memset(
        self, start: object, end: object, *, size: int = 64, device: int = 0, stream: int = 7, pid: int = PID
    ) -> None:
        values = _place(start, end, device, stream, 1, pid)
        self.row("CUPTI_ACTIVITY_KIND_MEMSET", **values, value=0, bytes=size, memKind=2)

    def graph(
        self, start: object, end: object, *, device: int = 0, stream: int = 7, correlation: int = 1, graph: int = 3
    ) -> None:
        values = _place(start, end, device, stream, correlation, PID)
        self.row("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", **values, graphId=graph, graphExecId=1)

    def api(
        self,
        start: object,
        end: object,
        name: str,
        *,
        correlation: int = 1,
        pid: int = PID,
        tid: int = TID,
        result: int = 0,
        kind: int = 0,
    ) -> None:
        self.row(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            **{"start": start, "end": end, "eventClass": kind, "globalTid": global_tid(pid, tid)},
            **{"correlationId": correlation, "nameId": self.string(name), "returnValue": result},
        )

    def nvtx(
        self,
        start: object,
        end: object,
        text: str | bytes | None,
        *,
        kind: int = 59,
        domain: int = 0,
        registered: str | None = None,
        pid: int = PID,
        tid: int = TID,
        **more: object,
    ) -> None:
        values = {"start": start, "end": end, "eventType": kind, "text": text, "globalTid": global_tid(pid, tid)}
        values |= {"domainId": domain, "textId": self.string(registered) if registered is not None else None, **more}
        self.row("NVTX_EVENTS", **values)

    def write(self, altered: Mapping[str, str] | None = None, without: Mapping[str, str] | None = None) -> Path:
        """The file. altered: SQL type by `table.column`; without: columns (by spaces) to leave out, by table."""
        self.path.unlink(missing_ok=True)
        db = sqlite3.connect(self.path)
        tables = {"StringIds", *self.rows} | (set(self.columns) if self.exporter == "2022.2.1.31" else set())
        self.rows["StringIds"] = [{"id": number, "value": text} for text, number in self.strings.items()]
        for table in sorted(tables):
            columns = [c for c in self.columns[table] if c not in (without or {}).get(table, "").split()]
            typed = [f'"{c}" {(altered or {}).get(f"{table}.{c}", _type(table, c))}' for c in columns]
            db.execute(f"CREATE TABLE {table} ({', '.join(typed)})")
            for row in self.rows.get(table, []):
                unknown = set(row) - set(self.columns[table]) - {"mangledName", "name"}
                assert not unknown, f"{table} of {self.exporter or '2020'} has no {unknown}"
                marks = ", ".join("CAST(? AS TEXT)" if isinstance(row.get(c), bytes) else "?" for c in columns)
                db.execute(f"INSERT INTO {table} VALUES ({marks})", [row.get(c) for c in columns])
        db.commit()
        db.close()
        return self.path


def _type(table: str, column: str) -> str:
    if column == "id":
        return "INTEGER NOT NULL PRIMARY KEY"
    texts = {
        "value",
        "text",
        "name",
        "label",
        "jsonText",
        "utcTime",
        "localTime",
        "busLocation",
        "chipName",
        "devStateName",
    }
    return "TEXT" if column in texts and table != "CUPTI_ACTIVITY_KIND_MEMSET" else "INTEGER"


def _place(start: object, end: object, device: int, stream: int, correlation: int, pid: int) -> dict[str, object]:
    return {
        **{"start": start, "end": end, "deviceId": device, "contextId": 1, "streamId": stream},
        **{"correlationId": correlation, "globalPid": global_tid(pid)},
    }
