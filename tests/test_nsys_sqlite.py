"""Every exporter version gives the same timeline, what was not recorded stays apart from what did not happen."""

from __future__ import annotations

import csv
import os
import shutil
import sqlite3
import subprocess
from pathlib import Path

import numpy as np
import pytest
from builders_nsys import PID, TID, VERSIONS, NsysFile, global_tid

from gpudiag.errors import GpudiagError
from gpudiag.intervals import Intervals
from gpudiag.read.names import api_name
from gpudiag.read.nsys_sqlite import is_nsys_sqlite, read_nsys_sqlite
from gpudiag.timeline import ApiCalls, CopyKind, GpuOps, Kind, MemKind, Timeline


def _names(timeline: Timeline, codes: np.ndarray) -> list[str]:
    return [timeline.strings[i] for i in codes]


def _ops(timeline: Timeline) -> GpuOps:
    assert timeline.gpu_ops is not None
    return timeline.gpu_ops


def _figures(ops: GpuOps) -> dict[str, int]:
    """The definitions of REFERENCE.tsv, of one device."""

    def union(*kinds: Kind) -> Intervals:
        of = np.isin(ops.kind, kinds)
        return Intervals.union_of(ops.start[of], ops.end[of])

    compute, comm, copy = union(Kind.KERNEL, Kind.GRAPH), union(Kind.COMM), union(Kind.MEMCPY)
    memset, busy = union(Kind.MEMSET), union(*Kind)
    first, last = int(ops.start.min()), int(ops.end.max())
    gaps = busy.gaps(first, last)
    kernels = compute.union(comm)
    return {
        "span_ns": last - first,
        "busy_ns": busy.total(),
        "idle_ns": gaps.total(),
        "compute_union_ns": compute.total(),
        "comm_union_ns": comm.total(),
        "comm_exposed_ns": comm.subtract(compute).total(),
        "copy_union_ns": copy.total(),
        "copy_exposed_ns": copy.subtract(kernels).total(),
        "memset_exposed_ns": memset.subtract(kernels.union(copy)).total(),
        "kernels": int(np.isin(ops.kind, (Kind.KERNEL, Kind.COMM)).sum()),
        "comm_kernels": int((ops.kind == Kind.COMM).sum()),
        "copies": int((ops.kind == Kind.MEMCPY).sum()),
        "gaps_over_1ms": int((gaps.end - gaps.start > 1_000_000).sum()),
    }


def test_device_figures_of_every_real_recording_equal_the_reference_to_the_ns(traces: Path) -> None:
    lines = (traces / "REFERENCE.tsv").read_text().splitlines()
    rows = [r for r in csv.DictReader(lines, delimiter="\t") if r["file"].startswith("nsys/")]
    assert len(rows) == 8
    for row in rows:
        ops = _ops(read_nsys_sqlite(traces / row["file"]))
        expected = {name: int(value) for name, value in row.items() if name not in ("file", "device")}
        assert _figures(ops.take(ops.device == int(row["device"]))) == expected, row["file"]


def test_every_table_of_every_real_recording_is_sorted(traces: Path) -> None:
    for path in sorted((traces / "nsys").glob("*.sqlite")):
        timeline = read_nsys_sqlite(path)
        for table in (timeline.gpu_ops, timeline.api_calls, timeline.ranges, timeline.cpu_ops, timeline.overheads):
            if table is not None and len(table):
                pairs = list(zip(table.start.tolist(), table.end.tolist(), strict=True))
                assert pairs == sorted(pairs), path.name
                assert int((table.end - table.start).min()) >= 0
        assert not timeline.repairs


def test_nothing_private_is_taken_from_a_real_recording(traces: Path, tmp_path: Path) -> None:
    for path in sorted((traces / "nsys").glob("*.sqlite")):
        shown = repr(read_nsys_sqlite(path))
        with sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            if "TARGET_INFO_SYSTEM_ENV" in tables:
                for (value,) in db.execute("SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE length(value) > 24"):
                    assert value not in shown
        db.close()
        assert "/home/" not in shown
        assert "quadd_session" not in shown


def _small(path: Path, version: str) -> NsysFile:
    file = NsysFile(path, version)
    file.row("ANALYSIS_DETAILS", globalVid=0, duration=10_000, startTime=5, stopTime=10_005)
    file.api(100, 110, "cudaLaunchKernel_v7000", correlation=1)
    file.api(115, 120, "cuMemcpyHtoDAsync_v2", correlation=2)
    file.api(300, 400, "cudaStreamSynchronize_v3020", correlation=3)
    file.kernel(120, 180, "void saxpy<float>(int)", correlation=1)
    file.kernel(200, 260, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", correlation=4, stream=20)
    file.copy(150, 190, 1, correlation=2)
    file.copy(265, 270, 2, src=2, dst=1)
    file.copy(271, 272, 10, src=2, dst=2)
    file.copy(273, 274, 11, src=4, dst=2)
    file.memset(280, 281)
    file.nvtx(90, 410, "step", int64Value=7)
    file.nvtx(91, None, "mydomain", kind=75, domain=3)
    file.nvtx(92, 130, None, registered="forward", domain=3)
    file.nvtx(93, 99, "aten::mm, seq = 4, op_id = 12, sizes = [[2, 3], [3, 4]]")
    file.nvtx(94, None, "MPI Rank 0", kind=39)
    file.row(
        "PROFILER_OVERHEAD", start=1, end=9, globalTid=global_tid(PID, TID), nameId=file.string("CUPTI: Buffer flush")
    )
    return file


@pytest.mark.parametrize("version", VERSIONS)
def test_an_export_of_every_version_gives_the_same_timeline(tmp_path: Path, version: str) -> None:
    timeline = read_nsys_sqlite(_small(tmp_path / "x.sqlite", version).write())
    ops = _ops(timeline)
    K, C = Kind.KERNEL, Kind.MEMCPY  # noqa: N806
    assert ops.start.tolist() == [120, 150, 200, 265, 271, 273, 280]
    assert ops.kind.tolist() == [K, C, Kind.COMM, C, C, C, Kind.MEMSET]
    assert ops.copy_kind.tolist() == [
        CopyKind.NONE,
        CopyKind.H2D,
        CopyKind.NONE,
        CopyKind.D2H,
        CopyKind.P2P,
        CopyKind.MANAGED,
        CopyKind.NONE,
    ]
    assert ops.src_mem.tolist()[1:6] == [
        MemKind.PAGEABLE,
        MemKind.UNKNOWN,
        MemKind.DEVICE,
        MemKind.DEVICE,
        MemKind.MANAGED,
    ]
    assert ops.dst_mem.tolist()[1:4] == [MemKind.DEVICE, MemKind.UNKNOWN, MemKind.PINNED]
    assert ops.bytes.tolist() == [-1, 1024, -1, 1024, 1024, 1024, 64]
    assert _names(timeline, ops.name)[0] == "void saxpy<float>(int)", "demangledName, not the useless shortName"
    assert (ops.blocks[0], ops.threads[0], ops.registers[0], ops.shared_bytes[0], ops.local_bytes[0]) == (
        20,
        256,
        32,
        1040,
        0,
    )
    assert set(ops.process.tolist()) == {PID}
    assert np.isnan(ops.occupancy).all()

    calls = timeline.api_calls
    assert calls is not None
    assert _names(timeline, calls.name) == ["cudaLaunchKernel", "cuMemcpyHtoDAsync", "cudaStreamSynchronize"]
    assert set(zip(calls.process.tolist(), calls.thread.tolist(), strict=True)) == {(PID, TID)}

    ranges = timeline.ranges
    assert ranges is not None
    assert _names(timeline, ranges.name) == ["step", "forward"]
    assert _names(timeline, ranges.domain) == ["", "mydomain"]
    assert ranges.index.tolist() == [7, -1]
    assert timeline.cpu_ops is not None
    assert _names(timeline, timeline.cpu_ops.name) == ["aten::mm"]
    assert _names(timeline, timeline.cpu_ops.shapes) == ["[[2, 3], [3, 4]]"]

    assert timeline.recorded == (0, 10_000)
    assert timeline.source.schema == VERSIONS[version]
    if version:
        assert timeline.source.recorder == "nsys " + ".".join(version.split(".")[:3])
        assert timeline.time_base_ns == 1_700_000_000_000_000_000
    else:
        assert timeline.source.recorder == "nsys (version not recorded)"
    assert not timeline.repairs
    assert "hunter2" not in repr(timeline) and "secret-host" not in repr(timeline) and "alice" not in repr(timeline)


def test_labels_win_over_numbers(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.rows["ENUM_CUDA_MEMCPY_OPER"] = [{"id": 1, "name": "CUDA_MEMCPY_KIND_DTOH"}]
    file.rows["ENUM_CUDA_MEM_KIND"] = [{"id": 0, "name": "CUDA_MEMOPR_MEMORY_KIND_PINNED"}]
    file.copy(1, 2, 1, src=0, dst=2)
    ops = _ops(read_nsys_sqlite(file.write()))
    assert (ops.copy_kind[0], ops.src_mem[0], ops.dst_mem[0]) == (CopyKind.D2H, MemKind.PINNED, MemKind.DEVICE)


def test_an_unknown_copy_kind_is_unknown_not_an_error(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.copy(1, 2, 77, src=None, dst=99)
    ops = _ops(read_nsys_sqlite(file.write()))
    assert (ops.copy_kind[0], ops.src_mem[0], ops.dst_mem[0]) == (CopyKind.UNKNOWN, MemKind.UNKNOWN, MemKind.UNKNOWN)


@pytest.mark.parametrize("empty_table", [False, True])
def test_launches_without_kernels_mean_that_the_gpu_was_not_recorded(tmp_path: Path, empty_table: bool) -> None:
    file = NsysFile(tmp_path / "x.sqlite", "2024.2.3.38")
    file.api(100, 110, "cudaLaunchKernel_v7000")
    file.api(100, 110, "cudaGraphLaunch_v10000")
    file.copy(150, 190)
    file.row(
        "DIAGNOSTIC_EVENT", severity=2, text="Not all CUDA events might have been collected, see /home/alice/x/log."
    )
    file.row("DIAGNOSTIC_EVENT", severity=1, text="Loaded /home/alice/lib")
    if empty_table:
        file.rows["CUPTI_ACTIVITY_KIND_KERNEL"] = []
    timeline = read_nsys_sqlite(file.write())
    assert timeline.gpu_ops is None
    assert timeline.diagnostics == (
        "Not all CUDA events might have been collected, see <path>",
        "2 kernel launches were recorded but no kernel: the GPU side of this recording is missing",
    )


def test_launches_that_failed_are_no_lost_kernels(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.api(100, 110, "cudaLaunchKernel_v7000", result=209)
    file.copy(150, 190)
    assert len(_ops(read_nsys_sqlite(file.write()))) == 1


def test_far_more_launches_than_kernels_are_said_unless_a_graph_explains_them(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    for at in range(300):
        file.api(at, at + 1, "cudaLaunchKernel", correlation=at)
        file.api(at, at + 1, "cuLaunchKernel", correlation=at)
    file.kernel(400, 500)
    assert read_nsys_sqlite(file.write()).warnings == (
        "300 kernels were launched but only 1 recorded: part of the GPU side is missing",
    )
    file.api(1, 2, "cudaStreamBeginCapture_v10000")
    assert not read_nsys_sqlite(file.write()).warnings


def test_a_call_recorded_again_with_its_backtrace_is_one_call(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.api(99, 111, "cudaLaunchKernel", kind=67)
    file.api(100, 110, "cudaLaunchKernel_v7000")
    file.kernel(120, 130)
    calls = read_nsys_sqlite(file.write()).api_calls
    assert calls is not None
    assert (calls.start.tolist(), calls.end.tolist()) == ([100], [110])
    del file.rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    assert "1 kernel launches" in read_nsys_sqlite(file.write()).diagnostics[0]


def test_kernels_inside_a_graph_launch_count_as_busy_time(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite", "2025.5.2.266")
    file.api(100, 110, "cudaGraphLaunch_v10000")
    file.graph(120, 500)
    ops = _ops(read_nsys_sqlite(file.write()))
    assert (ops.kind.tolist(), ops.graph.tolist()) == ([Kind.GRAPH], [3])


def test_a_kernel_in_a_graph_carries_the_graphs_id(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.kernel(1, 2, graphNodeId=(5 << 32) | 9)
    file.kernel(3, 4)
    assert _ops(read_nsys_sqlite(file.write())).graph.tolist() == [5, 0]


def test_nothing_of_cuda_is_empty_when_it_was_traced_and_none_when_it_was_not(tmp_path: Path) -> None:
    bare = NsysFile(tmp_path / "bare.sqlite", "2025.5.2.266")
    bare.row("META_DATA_CAPTURE", name="CAPTURE_EVENT_TYPE", value="OSRuntime")
    timeline = read_nsys_sqlite(bare.write())
    assert (timeline.gpu_ops, timeline.api_calls, timeline.ranges) == (None, None, None)
    traced = NsysFile(tmp_path / "traced.sqlite", "2025.5.2.266")
    traced.row("META_DATA_CAPTURE", name="CAPTURE_EVENT_TYPE", value="Cuda")
    traced.row("META_DATA_CAPTURE", name="CAPTURE_EVENT_TYPE", value="NvtxEvents")
    timeline = read_nsys_sqlite(traced.write())
    for table in (timeline.gpu_ops, timeline.api_calls, timeline.ranges):
        assert table is not None and len(table) == 0
    assert timeline.cpu_ops is None
    old = NsysFile(tmp_path / "old.sqlite", "2022.4.2.1")
    old.row("PROFILER_OVERHEAD", start=1, end=2, nameId=old.string("CUDA profiling initialization"), returnValue=0)
    timeline = read_nsys_sqlite(old.write())
    assert len(_ops(timeline)) == 0
    assert timeline.ranges is None


def test_kernels_without_api_calls_mean_that_api_calls_were_not_recorded(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite", "2022.2.1.31")
    file.kernel(1, 2)
    timeline = read_nsys_sqlite(file.write())
    assert timeline.api_calls is None
    assert len(_ops(timeline)) == 1


def test_correlation_ids_stay_apart_by_process(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    for pid, device in ((11, 0), (22, 1)):
        file.api(10, 20, "cudaLaunchKernel", correlation=5, pid=pid, tid=pid)
        file.kernel(30 + device, 40, correlation=5, pid=pid, device=device)
    timeline = read_nsys_sqlite(file.write())
    assert _ops(timeline).process.tolist() == [11, 22]
    assert timeline.api_calls is not None
    assert timeline.api_calls.process.tolist() == [11, 22]
    assert not timeline.warnings


def test_two_processes_that_both_call_their_gpu_0_get_two_devices_when_the_file_tells(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite", "2025.3.1.90")
    for gpu, pid in ((2, 11), (3, 22)):
        file.kernel(30, 40, pid=pid, device=0)
        file.row("TARGET_INFO_CUDA_DEVICE", gpuId=gpu, cudaId=0, pid=pid)
        file.row("TARGET_INFO_GPU", id=gpu, name=f"GPU {gpu}", cuDevice=gpu - 2, smCount=108)
    timeline = read_nsys_sqlite(file.write())
    assert _ops(timeline).device.tolist() == [2, 3]
    assert {d: info.name for d, info in timeline.devices.items()} == {2: "GPU 2", 3: "GPU 3"}
    silent = NsysFile(tmp_path / "y.sqlite", "2024.5.1.113")
    silent.kernel(30, 40, pid=11)
    silent.kernel(30, 40, pid=22)
    assert "2 processes used device 0" in read_nsys_sqlite(silent.write()).warnings[0]


def test_a_device_is_found_by_its_cuda_number_among_all_gpus_of_the_node(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite", "2024.5.1.113")
    file.kernel(1, 2, device=3)
    # As on a real node: GPU 0 of the node is CUDA device 3.
    file.row(
        "TARGET_INFO_GPU", id=0, name="right", cuDevice=3, memoryBandwidth=2_039_040_000_000, clockRate=1_410_000_000
    )
    file.row("TARGET_INFO_GPU", id=3, name="wrong", cuDevice=0, computeMajor=9, computeMinor=0)
    devices = read_nsys_sqlite(file.write()).devices
    assert list(devices) == [3]
    assert (devices[3].name, devices[3].memory_bandwidth, devices[3].clock_hz) == (
        "right",
        2_039_040_000_000,
        1_410_000_000,
    )
    assert devices[3].compute_capability is None


def test_a_full_launch_queue_is_told_from_cost_by_type_or_by_name(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite", "2025.5.2.266")
    for number, (name, kind) in enumerate((("Command Buffer Full", 0), ("?", 8), ("Lazy Function Loading", 7))):
        file.row(
            "CUPTI_ACTIVITY_KIND_OVERHEAD",
            **{
                "start": number,
                "end": 9,
                "globalTid": global_tid(PID, TID),
                "nameId": file.string(name),
                "overheadType": kind,
            },
        )
    overheads = read_nsys_sqlite(file.write()).overheads
    assert overheads is not None
    assert overheads.is_queue_full.tolist() == [True, True, False]


def test_times_that_lie_are_left_out_and_counted(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.row("ANALYSIS_DETAILS", duration=10_000_000_000)
    for at in range(1000):
        file.kernel(10**9 + at * 1000, 10**9 + at * 1000 + 500)
    file.kernel(10**9, 10**9 - 5)  # backwards
    file.kernel(0, 0)  # no time stamps
    file.kernel(0, 2 * 10**9)  # a start of zero
    file.kernel(10**9, 1_700_000_000_000_000_000)  # decades
    file.kernel(10**9, 2**63 - 1)
    file.kernel(None, 5)
    file.kernel(500 * 10**9, 500 * 10**9 + 5)  # long after the end
    timeline = read_nsys_sqlite(file.write())
    assert len(_ops(timeline)) == 1000
    assert {r.what: r.count for r in timeline.repairs} == {
        "kernels left out: an end before its start": 1,
        "kernels left out: time stamps of zero, which mean that none was taken": 1,
        "kernels left out: a start of zero": 1,
        "kernels left out: longer than a week": 1,
        "kernels left out: times beyond any clock": 1,
        "kernels left out: no start or no end": 1,
        "kernels left out: far outside the recording": 1,
    }
    assert {r.total for r in timeline.repairs} == {1007}


def test_a_shifted_recording_may_begin_at_zero_or_before(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.api(-30, -10, "cudaLaunchKernel", correlation=1)
    file.kernel(0, 100)
    file.kernel(110, 200)
    timeline = read_nsys_sqlite(file.write())
    assert len(_ops(timeline)) == 2
    assert not timeline.repairs


def test_an_unfinished_range_is_closed_at_the_end_and_said(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.kernel(50, 900)
    file.nvtx(10, None, "train")
    file.nvtx(20, 30, "step")
    timeline = read_nsys_sqlite(file.write())
    assert timeline.ranges is not None
    assert timeline.ranges.end.tolist() == [900, 30]
    assert [(r.what, r.count, r.total) for r in timeline.repairs] == [
        ("ranges without an end closed at the end of the recording", 1, 2)
    ]


def test_rows_come_sorted_by_start_then_end_with_ties_in_the_order_of_the_file(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    for start, end, stream in ((30, 40, 1), (10, 30, 2), (10, 20, 3), (10, 20, 4), (5, 50, 5)):
        file.kernel(start, end, stream=stream)
    file.copy(10, 20, stream=6)
    ops = _ops(read_nsys_sqlite(file.write()))
    assert ops.stream.tolist() == [5, 3, 4, 6, 2, 1]


def test_an_index_that_someone_added_changes_no_order(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    for name in ("cudaMalloc", "cudaFree", "cudaMemset", "cudaEventQuery"):
        file.api(10, 20, name, correlation=-len(name))
    with sqlite3.connect(file.write()) as db:
        everything = "correlationId, start, end, globalTid, nameId, eventClass"
        db.execute(f"CREATE INDEX covering ON CUPTI_ACTIVITY_KIND_RUNTIME ({everything})")
    db.close()
    timeline = read_nsys_sqlite(file.path)
    assert timeline.api_calls is not None
    assert _names(timeline, timeline.api_calls.name) == ["cudaMalloc", "cudaFree", "cudaMemset", "cudaEventQuery"]


def test_names_that_are_not_utf8_or_missing_do_not_stop_the_reading(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.kernel(1, 2, b"gemm\xf0\x9f")
    file.kernel(3, 4, demangledName=None)
    file.kernel(5, 6, demangledName=987_654)
    file.kernel(7, 8, demangledName=None, shortName=None, mangledName=None)
    file.nvtx(1, 9, b"caf\xe9 \x00 <script>")
    timeline = read_nsys_sqlite(file.write())
    assert _names(timeline, _ops(timeline).name) == [
        "gemm\ufffd",
        "kernel",
        "string 987654 (not recorded)",
        "unnamed kernel",
    ]
    assert timeline.ranges is not None
    assert _names(timeline, timeline.ranges.name) == ["caf\ufffd \x00 <script>"]


def test_altered_copies_with_text_reals_or_extra_columns_are_read(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    for at in range(40_000):  # more than one batch of the driver, which guesses types from the first
        file.kernel(at * 10, at * 10 + 5, correlation=at)
    file.kernel("not a time", 5)
    file.kernel(400_001, 400_003, correlation="junk", registersPerThread=1.0)  # type: ignore[arg-type]
    file.columns["CUPTI_ACTIVITY_KIND_KERNEL"].append("kernel_name")
    altered = {f"CUPTI_ACTIVITY_KIND_KERNEL.{c}": "TEXT" for c in ("deviceId", "end", "gridX")}
    altered |= {f"CUPTI_ACTIVITY_KIND_KERNEL.{c}": "" for c in ("registersPerThread", "start", "correlationId")}
    timeline = read_nsys_sqlite(file.write(altered=altered))
    ops = _ops(timeline)
    assert len(ops) == 40_001
    assert (ops.end[-1], ops.blocks[-1], ops.registers[-1], ops.correlation[-1]) == (400_003, 20, 1, -1)
    assert [(r.what, r.count) for r in timeline.repairs] == [("kernels left out: no start or no end", 1)]


def test_synthetic_files_with_few_columns_are_read(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.kernel(1, 2)
    file.api(0, 1, "cudaLaunchKernel")
    lacks = "contextId greenContextId globalPid registersPerThread graphNodeId streamId gridZ localMemoryPerThread mangledName"
    ops = _ops(read_nsys_sqlite(file.write(without={"CUPTI_ACTIVITY_KIND_KERNEL": lacks, "NVTX_EVENTS": "textId"})))
    assert (ops.stream[0], ops.registers[0], ops.blocks[0], ops.local_bytes[0], ops.graph[0]) == (0, -1, -1, -1, 0)
    assert ops.process[0] == PID, "one process made API calls, so its kernels they are"


def test_a_renamed_nvtx_table_is_found(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.kernel(1, 2)
    file.nvtx(1, 9, "step")
    with sqlite3.connect(file.write()) as db:
        db.execute("ALTER TABLE NVTX_EVENTS RENAME TO NVTX_EVENTS_V2")
    db.close()
    timeline = read_nsys_sqlite(file.path)
    assert timeline.ranges is not None
    assert len(timeline.ranges) == 1


def test_rowids_with_holes_lose_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpudiag.read._columns._CHUNK_ROWS", 100)
    file = NsysFile(tmp_path / "x.sqlite")
    for at in range(1000):
        file.kernel(at * 10, at * 10 + 5)
    with sqlite3.connect(file.write()) as db:
        db.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE rowid % 3 = 0 OR rowid BETWEEN 250 AND 420")
        kept = [start for (start,) in db.execute("SELECT start FROM CUPTI_ACTIVITY_KIND_KERNEL ORDER BY start")]
    db.close()
    assert _ops(read_nsys_sqlite(file.path)).start.tolist() == kept
    with sqlite3.connect(file.path) as db:  # so sparse that rowids say nothing about how many rows there are
        db.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET rowid = rowid * 1000000000")
    db.close()
    assert _ops(read_nsys_sqlite(file.path)).start.tolist() == kept


@pytest.mark.parametrize(
    "name", ["a b.sqlite", "what?.sqlite", "100%25#1.sqlite", 'it\'s "x".sqlite', "naïve.sqlite", "file:x?mode=rwc"]
)
def test_any_file_name_can_be_read_and_nothing_is_left_beside_it(tmp_path: Path, name: str) -> None:
    file = NsysFile(tmp_path / name)
    file.kernel(1, 2)
    path = file.write()
    before = path.read_bytes(), path.stat().st_mtime_ns
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        assert is_nsys_sqlite(path)
        assert len(_ops(read_nsys_sqlite(path))) == 1
    finally:
        tmp_path.chmod(0o755)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_a_file_name_that_is_not_utf8_can_be_read(tmp_path: Path) -> None:
    plain = NsysFile(tmp_path / "x.sqlite")
    plain.kernel(1, 2)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.sqlite"))
    shutil.copy(plain.write(), odd)
    assert len(_ops(read_nsys_sqlite(odd))) == 1


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
def test_a_file_that_is_still_being_written_is_refused(tmp_path: Path, suffix: str) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.kernel(1, 2)
    path = file.write()
    path.with_name(path.name + suffix).write_bytes(b"x")
    with pytest.raises(GpudiagError, match="changes"):
        read_nsys_sqlite(path)


def test_other_sqlite_files_and_no_sqlite_files_are_refused_by_name_of_what_they_are(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (a)")
    db.close()
    assert not is_nsys_sqlite(other)
    with pytest.raises(GpudiagError, match="not one that Nsight Systems exported"):
        read_nsys_sqlite(other)
    for content in (b"", b"hello", b"SQLite format 3\x00" + bytes(100)):
        other.write_bytes(content)
        assert not is_nsys_sqlite(other)
        with pytest.raises(GpudiagError, match=r"not a SQLite file|damaged"):
            read_nsys_sqlite(other)
    with pytest.raises(GpudiagError, match="No such file"):
        read_nsys_sqlite(tmp_path / "gone.sqlite")


def test_a_file_that_was_cut_short_is_said_to_be(traces: Path, tmp_path: Path) -> None:
    whole = (traces / "nsys" / "a100_saxpy_old_schema.sqlite").read_bytes()
    path = tmp_path / "cut.sqlite"
    path.write_bytes(whole[:-5000])
    with pytest.raises(GpudiagError, match=r"cut short: 1,444,984 of 1,449,984 bytes"):
        read_nsys_sqlite(path)


def test_a_view_without_end_is_not_run(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.api(1, 2, "cudaMalloc")
    with sqlite3.connect(file.write()) as db:
        db.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(start) AS (SELECT 1 UNION ALL SELECT start + 1 FROM n) "
            "SELECT start, start AS end, 0 AS deviceId FROM n"
        )
    db.close()
    assert read_nsys_sqlite(file.path).api_calls is not None


def test_the_same_file_gives_the_same_timeline_twice(traces: Path) -> None:
    first, second = (read_nsys_sqlite(traces / "nsys" / "h100_2gpu_train_before.sqlite") for _ in range(2))
    assert first.strings == second.strings
    assert first.gpu_ops is not None and second.gpu_ops is not None
    for name in ("start", "name", "correlation", "device"):
        assert np.array_equal(getattr(first.gpu_ops, name), getattr(second.gpu_ops, name))


def test_progress_is_told_in_words(tmp_path: Path) -> None:
    file = NsysFile(tmp_path / "x.sqlite")
    file.kernel(1, 2)
    said: list[str] = []
    read_nsys_sqlite(file.write(), said.append)
    assert said[0] == "reading x.sqlite"


@pytest.mark.nsys
@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed")
@pytest.mark.parametrize(
    "name",
    ["a100_sync_after_each_kernel", "a100_saxpy_old_schema", "h100_2gpu_train_before", "h100_2gpu_streamed_weights"],
)
def test_sums_equal_those_of_nsys_stats(traces: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.sqlite"
    shutil.copyfile(traces / "nsys" / f"{name}.sqlite", path)
    timeline = read_nsys_sqlite(path)
    ops, calls = _ops(timeline), timeline.api_calls
    assert calls is not None
    kernels = ops.take(np.isin(ops.kind, (Kind.KERNEL, Kind.COMM)))
    assert _sums(timeline, kernels) == _nsys_stats(path, "gpukernsum", "Instances", "Name")
    copies, memsets = ops.take(ops.kind == Kind.MEMCPY), ops.take(ops.kind == Kind.MEMSET)
    labels = {CopyKind.H2D: "HtoD", CopyKind.D2H: "DtoH", CopyKind.D2D: "DtoD"}
    moved = {
        f"[CUDA memcpy {labels[CopyKind(k)]}]": copies.take(copies.copy_kind == k) for k in np.unique(copies.copy_kind)
    }
    moved |= {"[CUDA memset]": memsets} if len(memsets) else {}
    assert {k: (int((t.end - t.start).sum()), len(t)) for k, t in moved.items()} == _nsys_stats(
        path, "gpumemtimesum", "Count", "Operation"
    )
    if name != "a100_saxpy_old_schema":  # there nsys counts the rows that carry backtraces once more
        sums = _nsys_stats(path, "cudaapisum", "Num Calls", "Name")
        # nsys 2022 cuts version suffixes of four digits only.
        assert _sums(timeline, calls) == {api_name(called): value for called, value in sums.items()}


def _sums(timeline: Timeline, table: GpuOps | ApiCalls) -> dict[str, tuple[int, int]]:
    """(total ns, rows) by name."""
    length = table.end - table.start
    return {
        timeline.strings[code]: (int(length[table.name == code].sum()), int((table.name == code).sum()))
        for code in np.unique(table.name)
    }


def _nsys_stats(path: Path, report: str, count: str, name: str) -> dict[str, tuple[int, int]]:
    command = ["nsys", "stats", "--report", report, "--format", "csv", "--force-export=false", str(path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    lines = said[said.index("Time (%)") :].splitlines()
    sums: dict[str, tuple[int, int]] = {}
    for row in csv.DictReader(line for line in lines if line):
        total, rows = sums.get(row[name], (0, 0))
        # nsys has a row for each grid; the names are what is summed over here.
        sums[row[name]] = (total + int(row["Total Time (ns)"]), rows + int(row[count]))
    return sums
