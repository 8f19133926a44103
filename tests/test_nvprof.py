"""nvprof databases are read with CUPTI's own numbers, and a metrics run is not mistaken for a timeline."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from gpudiag.errors import GpudiagError
from gpudiag.read._cupti_cbid import DRIVER, RUNTIME
from gpudiag.read.nsys_sqlite import is_nsys_sqlite
from gpudiag.read.nvprof import is_nvprof_sqlite, read_nvprof
from gpudiag.timeline import CopyKind, Kind, MemKind, Timeline

NOW = 1_600_000_000_000_000_000
SCHEMA = """
CREATE TABLE Version (_id_ INTEGER PRIMARY KEY, version INT);
CREATE TABLE StringTable (_id_ INTEGER PRIMARY KEY AUTOINCREMENT, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_{kernels} (_id_ INTEGER PRIMARY KEY, start INT, end INT, completed INT, deviceId INT,
  contextId INT, streamId INT, gridX INT, gridY INT, gridZ INT, blockX INT, blockY INT, blockZ INT, registersPerThread INT,
  staticSharedMemory INT, dynamicSharedMemory INT, localMemoryPerThread INT, correlationId INT, gridId INT, name INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (_id_ INTEGER PRIMARY KEY, copyKind INT, srcKind INT, dstKind INT, flags INT, bytes INT,
  start INT, end INT, deviceId INT, contextId INT, streamId INT, correlationId INT, runtimeCorrelationId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY2 (_id_ INTEGER PRIMARY KEY, copyKind INT, srcKind INT, dstKind INT, bytes INT,
  start INT, end INT, deviceId INT, streamId INT, correlationId INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (_id_ INTEGER PRIMARY KEY, value INT, bytes INT, start INT, end INT, deviceId INT,
  contextId INT, streamId INT, correlationId INT, memoryKind INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (_id_ INTEGER PRIMARY KEY, cbid INT, start INT, end INT, processId INT, threadId INT,
  correlationId INT, returnValue INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_DRIVER (_id_ INTEGER PRIMARY KEY, cbid INT, start INT, end INT, processId INT, threadId INT,
  correlationId INT, returnValue INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_MARKER (_id_ INTEGER PRIMARY KEY, flags INT, timestamp INT, id INT, objectKind INT,
  objectId BLOB, name INT, domain INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_OVERHEAD (_id_ INTEGER PRIMARY KEY, overheadKind INT, objectKind INT, objectId BLOB, start INT,
  end INT);
CREATE TABLE CUPTI_ACTIVITY_KIND_DEVICE (_id_ INTEGER PRIMARY KEY, id INT, name INT, numMultiprocessors INT,
  globalMemoryBandwidth INT, globalMemorySize INT, coreClockRate INT, computeCapabilityMajor INT, computeCapabilityMinor INT);
INSERT INTO Version VALUES (1, 11);
INSERT INTO StringTable VALUES (1, 'saxpy(int, float)'), (2, 'ncclAllReduceRingLLKernel_sum_f32'), (3, 'step'), (4, 'mine'),
  (5, 'Tesla V100'), (6, x'6bf09f');
"""


def _write(path: Path, statements: str, kernels: str = "CONCURRENT_KERNEL") -> Path:
    with sqlite3.connect(path) as db:
        db.executescript(SCHEMA.replace("{kernels}", kernels) + statements.replace("NOW", str(NOW)))
    db.close()
    return path


def _whole(path: Path) -> Timeline:
    owner = (77).to_bytes(4, "little").hex() + (78).to_bytes(4, "little").hex()
    return read_nvprof(
        _write(
            path,
            f"""
INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 211, NOW+10, NOW+20, 77, 78, 5, 0), (2, 41, NOW+30, NOW+40, 77, 78, 6, 0),
  (3, 131, NOW+50, NOW+90, 77, 78, 7, 0), (4, 99999, NOW+91, NOW+92, 77, 78, 8, 0);
INSERT INTO CUPTI_ACTIVITY_KIND_DRIVER VALUES (1, 307, NOW+12, NOW+18, 77, 78, 5, 0), (2, 307, NOW+95, NOW+99, 77, 78, 9, 0);
INSERT INTO CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL VALUES
  (1, NOW+25, NOW+60, 0, 0, 1, 7, 10, 2, 3, 128, 2, 1, 32, 16, 1024, 8, 5, 1, 1),
  (2, NOW+100, NOW+120, 0, 0, 1, 7, 1, 1, 1, 32, 1, 1, 24, 0, 0, 0, 9, 2, 2),
  (3, NOW+130, NOW+90, 0, 0, 1, 7, 1, 1, 1, 32, 1, 1, 24, 0, 0, 0, 9, 2, 2);
INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (1, 1, 1, 3, 0, 4096, NOW+40, NOW+50, 0, 1, 7, 6, 0),
  (2, 2, 3, 2, 1, 8192, NOW+61, NOW+62, 0, 1, 7, 10, 0);
INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY2 VALUES (1, 10, 3, 3, 64, NOW+70, NOW+71, 0, 7, 11);
INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (1, 0, 256, NOW+63, NOW+64, 0, 1, 7, 12, 3);
INSERT INTO CUPTI_ACTIVITY_KIND_MARKER VALUES (1, 2, NOW+5, 1, 2, x'{owner}', 3, 4), (2, 2, NOW+6, 2, 2, x'{owner}', 6, 0),
  (3, 4, NOW+110, 1, 2, x'{owner}', 0, 0), (4, 1, NOW+111, 3, 2, x'{owner}', 3, 0);
INSERT INTO CUPTI_ACTIVITY_KIND_OVERHEAD VALUES (1, 65536, 2, x'00', NOW+1, NOW+2), (2, 393216, 2, x'00', NOW+3, NOW+4);
INSERT INTO CUPTI_ACTIVITY_KIND_DEVICE VALUES (1, 0, 5, 80, 900096000, 16945512448, 1380000, 7, 0);
""",
        )
    )


def test_a_timeline_run_gives_every_table(tmp_path: Path) -> None:
    timeline = _whole(tmp_path / "run?#.nvvp")
    ops = timeline.gpu_ops
    assert ops is not None
    assert ops.start.tolist() == [NOW + at for at in (25, 40, 61, 63, 70, 100)]
    assert ops.kind.tolist() == [Kind.KERNEL, Kind.MEMCPY, Kind.MEMCPY, Kind.MEMSET, Kind.MEMCPY, Kind.COMM]
    assert ops.copy_kind.tolist() == [
        CopyKind.NONE,
        CopyKind.H2D,
        CopyKind.D2H,
        CopyKind.NONE,
        CopyKind.P2P,
        CopyKind.NONE,
    ]
    assert ops.bytes.tolist() == [-1, 4096, 8192, 256, 64, -1]
    assert timeline.strings[ops.name[0]] == "saxpy(int, float)"
    assert (ops.blocks[0], ops.threads[0], ops.registers[0], ops.shared_bytes[0]) == (60, 256, 32, 1040)
    assert set(ops.process.tolist()) == {77}
    assert timeline.source.kind == "nvprof"
    assert timeline.time_base_ns == 0
    assert (timeline.repairs[0].what, timeline.repairs[0].count) == ("kernels left out: an end before its start", 1)
    device = timeline.devices[0]
    assert (device.name, device.sm_count, device.compute_capability) == ("Tesla V100", 80, (7, 0))
    assert (device.memory_bandwidth, device.clock_hz) == (900_096_000_000, 1_380_000_000)


def test_memory_kinds_are_those_of_cupti_not_of_nsys(tmp_path: Path) -> None:
    ops = _whole(tmp_path / "x.nvvp").gpu_ops
    assert ops is not None
    copies = ops.take(ops.kind == Kind.MEMCPY)
    assert list(zip(copies.src_mem.tolist(), copies.dst_mem.tolist(), strict=True)) == [
        (MemKind.PAGEABLE, MemKind.DEVICE),
        (MemKind.DEVICE, MemKind.PINNED),
        (MemKind.DEVICE, MemKind.DEVICE),
    ]


def test_api_numbers_become_names_and_a_nested_driver_call_is_not_a_second_launch(tmp_path: Path) -> None:
    timeline = _whole(tmp_path / "x.nvvp")
    calls = timeline.api_calls
    assert calls is not None
    assert [timeline.strings[i] for i in calls.name] == [
        "cudaLaunchKernel",
        "cudaMemcpyAsync",
        "cudaStreamSynchronize",
        "cuda runtime call 99999",
        "cuLaunchKernel",
    ]
    assert set(calls.thread.tolist()) == {78}


def test_markers_pair_into_ranges_and_marks_are_none(tmp_path: Path) -> None:
    timeline = _whole(tmp_path / "x.nvvp")
    ranges = timeline.ranges
    assert ranges is not None
    got = [
        (timeline.strings[n], timeline.strings[d], s - NOW, e - NOW, t)
        for n, d, s, e, t in zip(ranges.name, ranges.domain, ranges.start, ranges.end, ranges.thread, strict=True)
    ]
    assert got == [("step", "mine", 5, 110, 78), ("k\ufffd", "", 6, 111, 78)]
    assert any("without an end" in r.what and r.count == 1 for r in timeline.repairs)


def test_a_full_launch_queue_is_marked_as_no_cost(tmp_path: Path) -> None:
    overheads = _whole(tmp_path / "x.nvvp").overheads
    assert overheads is not None
    assert overheads.is_queue_full.tolist() == [False, True]


def test_a_metrics_run_cannot_be_judged_and_says_why(tmp_path: Path) -> None:
    kernels = (
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, name) VALUES (NOW, NOW+9, 0, 7, 1);"
    )
    timeline = read_nvprof(_write(tmp_path / "metrics.nvprof", kernels, kernels="KERNEL"))
    assert timeline.gpu_ops is None
    assert "one by one" in timeline.diagnostics[0]


def test_launches_without_kernels_mean_that_the_gpu_was_not_recorded(tmp_path: Path) -> None:
    launch = "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (1, 211, NOW, NOW+9, 1, 2, 3, 0);"
    timeline = read_nvprof(_write(tmp_path / "x.nvvp", launch))
    assert timeline.gpu_ops is None
    assert "1 kernel launches" in timeline.diagnostics[0]


def test_an_xml_session_is_refused_with_a_way_on(tmp_path: Path) -> None:
    path = tmp_path / "session.nvvp"
    path.write_text('<?xml version="1.0"?><org.eclipse/>')
    with pytest.raises(GpudiagError, match="no events") as error:
        read_nvprof(path)
    assert "nvprof -o" in error.value.hint


def test_nvprof_and_nsys_databases_are_told_apart_by_content(tmp_path: Path, traces: Path) -> None:
    nvprof = _write(tmp_path / "looks_like_nsys.sqlite", "")
    nsys = traces / "nsys" / "two_kernels_only.sqlite"
    text = tmp_path / "text.sqlite"
    text.write_text("no database")
    assert [is_nvprof_sqlite(p) for p in (nvprof, nsys, text, tmp_path)] == [True, False, False, False]
    assert [is_nsys_sqlite(p) for p in (nvprof, nsys, text, tmp_path)] == [False, True, False, False]


def test_known_callback_ids_hold(tmp_path: Path) -> None:
    assert RUNTIME[211] == "cudaLaunchKernel"
    assert RUNTIME[13] == "cudaLaunch"
    assert RUNTIME[165] == "cudaDeviceSynchronize"
    assert DRIVER[307] == "cuLaunchKernel"
    assert DRIVER[17] == "cuCtxSynchronize"
