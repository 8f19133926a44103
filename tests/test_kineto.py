"""The Kineto reader against real recordings, the reference figures, and damage."""

from __future__ import annotations

import csv
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import msgspec
import numpy as np
import pytest
from builders_kineto import ORIGIN, PROCESS, Epoch, KinetoTrace
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.intervals import Intervals
from gpudiag.read._kineto_times import INVALID, exact_ns
from gpudiag.read.kineto import read_kineto
from gpudiag.timeline import CopyKind, GpuOps, Kind, MemKind

KERNELS = (Kind.KERNEL, Kind.GRAPH)


def _union(ops: GpuOps, *kinds: Kind) -> Intervals:
    rows = np.isin(ops.kind, kinds)
    return Intervals.union_of(ops.start[rows], ops.end[rows])


def _figures(ops: GpuOps) -> dict[str, int]:
    """The columns of REFERENCE.tsv, for the rows of one device."""
    compute, comm = _union(ops, *KERNELS), _union(ops, Kind.COMM)
    copies, memsets = _union(ops, Kind.MEMCPY), _union(ops, Kind.MEMSET)
    busy = _union(ops, *Kind)
    first, last = int(ops.start.min()), int(ops.end.max())
    gaps = busy.gaps(first, last)
    return {
        "span_ns": last - first,
        "busy_ns": busy.total(),
        "idle_ns": last - first - busy.total(),
        "compute_union_ns": compute.total(),
        "comm_union_ns": comm.total(),
        "comm_exposed_ns": comm.subtract(compute).total(),
        "copy_union_ns": copies.total(),
        "copy_exposed_ns": copies.subtract(compute.union(comm)).total(),
        "memset_exposed_ns": memsets.subtract(compute.union(comm).union(copies)).total(),
        "kernels": int(np.isin(ops.kind, (Kind.KERNEL, Kind.COMM, Kind.GRAPH)).sum()),
        "comm_kernels": int((ops.kind == Kind.COMM).sum()),
        "copies": int((ops.kind == Kind.MEMCPY).sum()),
        "gaps_over_1ms": int(((gaps.end - gaps.start) > 1_000_000).sum()),
    }


def test_device_figures_equal_an_independent_programs_to_the_nanosecond(traces: Path) -> None:
    with (traces / "REFERENCE.tsv").open() as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["file"].startswith("kineto/")]
    assert len(rows) > 20
    for row in rows:
        ops = read_kineto(traces / row["file"]).gpu_ops
        assert ops is not None
        assert np.unique(ops.device).tolist() == [int(row["device"])]
        assert _figures(ops) == {name: int(row[name]) for name in row if name not in ("file", "device")}, row["file"]


def test_figures_equal_those_of_holistic_trace_analysis_on_its_own_window(traces: Path) -> None:
    """HTA 0.5.0 leaves out the last profiler step; on the rest it says idle 62,119 us (16.2 %), compute 234,760 us, overlap 47.03 %."""
    timeline = read_kineto(traces / "kineto" / "a100_ddp_overlap_control.json.gz")
    ops, ranges = timeline.gpu_ops, timeline.ranges
    assert ops is not None and ranges is not None
    last = int(ranges.start[ranges.index == 1014][0])
    ops = ops.take(ops.end <= last)
    figures = _figures(ops)
    overlap = 1 - figures["comm_exposed_ns"] / figures["comm_union_ns"]
    assert (figures["span_ns"], figures["idle_ns"], figures["compute_union_ns"]) == (
        383_404_000,
        62_119_000,
        234_760_000,
    )
    assert round(100 * overlap, 2) == 47.03


@pytest.mark.parametrize("epoch", ["2021", "2022", "2024-absolute", "2024"])
def test_every_epoch_gives_the_same_tables(tmp_path: Path, epoch: Epoch) -> None:
    trace = KinetoTrace(epoch)
    trace.annotation("ProfilerStep#7", 1_000_000, 9_000_000)
    trace.op("aten::mm", 2_000_000, 500_000, **{"Input_Dims": [[64, 32], [32, 16]]})
    trace.op("aten::relu", 3_000_000, 500_000, **{"Input_Dims": [[64, 16]]})
    trace.call("cudaLaunchKernel", 2_100_000, 10_000, correlation=5)
    trace.kernel(
        "sgemm",
        2_200_000,
        40_000,
        correlation=5,
        grid=[4, 2, 1],
        block=[128, 1, 1],
        registers_per_thread=32,
        shared_memory=1024,
    )
    trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float", 2_300_000, 50_000, correlation=6)
    trace.copy("Memcpy HtoD (Pageable -> Device)", 2_400_000, 60_000, correlation=7, bytes=1 << 20)
    trace.add("gpu_memset", "Memset (Device)", 2_500_000, 1_000, 0, 7, device=0, stream=7, correlation=8, bytes=64)
    timeline = read_kineto(trace.write(tmp_path / "t.json"))
    ops, strings = timeline.gpu_ops, timeline.strings
    assert (
        ops is not None
        and timeline.ranges is not None
        and timeline.cpu_ops is not None
        and timeline.api_calls is not None
    )
    zero = 0 if epoch == "2024" else ORIGIN
    assert timeline.time_base_ns == ORIGIN - zero
    assert (ops.start - zero).tolist() == [2_200_000, 2_300_000, 2_400_000, 2_500_000]
    assert (ops.end - ops.start).tolist() == [40_000, 50_000, 60_000, 1_000]
    assert ops.kind.tolist() == [Kind.KERNEL, Kind.COMM, Kind.MEMCPY, Kind.MEMSET]
    assert (ops.device.tolist(), ops.stream.tolist()) == ([0] * 4, [7] * 4)
    assert ops.bytes.tolist() == [-1, -1, 1 << 20, 64]
    assert ops.correlation.tolist() == [5, 6, 7, 8] and set(ops.process.tolist()) == {PROCESS}
    assert (ops.blocks[0], ops.threads[0], ops.registers[0], ops.shared_bytes[0]) == (8, 128, 32, 1024)
    assert (ops.copy_kind[2], ops.src_mem[2], ops.dst_mem[2]) == (CopyKind.H2D, MemKind.PAGEABLE, MemKind.DEVICE)
    assert [strings[code] for code in timeline.cpu_ops.name] == ["aten::mm", "aten::relu"]
    assert strings[timeline.cpu_ops.shapes[0]] == "[[64, 32], [32, 16]]" and timeline.cpu_ops.shapes[1] == -1
    assert [strings[code] for code in timeline.ranges.name] == ["ProfilerStep#7"]
    assert timeline.ranges.index.tolist() == [7]
    assert (timeline.api_calls.process[0], timeline.api_calls.thread[0]) == (PROCESS, PROCESS)
    assert timeline.repairs == () and timeline.warnings == ()
    assert timeline.devices[0].name == "NVIDIA T4" and timeline.devices[0].compute_capability == (7, 5)


def test_times_are_converted_in_decimal_and_not_in_binary() -> None:
    written = ["1712195495502094.513", "4458676522690.655", "0.0005", "0.0015", "7", "12.5", "-3.25", "1e3", "0.001"]
    exact = [1712195495502094513, 4458676522690655, 0, 2, 7000, 12500, -3250, 1_000_000, 1]
    raws = [msgspec.Raw(text.encode()) for text in written]
    assert exact_ns(raws).tolist() == exact
    for raw, ns in zip(raws, exact, strict=True):
        assert exact_ns([raw]).tolist() == [ns]
    assert round(float(written[0]) * 1000) != exact[0]


@given(st.lists(st.tuples(st.integers(-(10**20), 10**20), st.integers(0, 6)), min_size=1, max_size=40))
def test_times_round_like_decimal_arithmetic(numbers: list[tuple[int, int]]) -> None:
    exact = [Decimal(digits).scaleb(-places) for digits, places in numbers]
    expected = [int((number * 1000).to_integral_value()) for number in exact]
    expected = [ns if abs(ns) < 2**61 else INVALID for ns in expected]
    assert exact_ns([msgspec.Raw(format(number, "f").encode()) for number in exact]).tolist() == expected


@pytest.mark.parametrize("text", ["null", '"soon"', "[1, 2]", "1e99", "99999999999999999999999", "{}"])
def test_what_is_no_time_is_marked_and_not_guessed(text: str) -> None:
    assert exact_ns([msgspec.Raw(b"1.500"), msgspec.Raw(text.encode())]).tolist() == [1500, INVALID]


def test_gpu_annotations_and_syncs_are_no_gpu_work(tmp_path: Path) -> None:
    trace = KinetoTrace().kernel("k", 1000, 1000).annotation("## forward ##", 0, 500)
    trace.add("gpu_user_annotation", "## forward ##", 0, 9000, 0, 7)
    trace.add("cuda_sync", "Stream Sync", 0, 9000, 0, 7, cuda_sync_kind="Stream Sync")
    timeline = read_kineto(trace.write(tmp_path / "t.json"))
    assert timeline.gpu_ops is not None and len(timeline.gpu_ops) == 1
    assert timeline.ranges is not None and len(timeline.ranges) == 1


def test_our_own_ranges_come_out_as_the_nvtx_ones_do(tmp_path: Path) -> None:
    trace = (
        KinetoTrace()
        .annotation("gpudiag::step#41", 0, 5000)
        .annotation("gpudiag::h2d", 1000, 2000)
        .op("aten::mm", 0, 1)
    )
    timeline = read_kineto(trace.write(tmp_path / "t.json"))
    ranges = timeline.ranges
    assert ranges is not None
    assert [timeline.strings[code] for code in ranges.name] == ["step", "h2d"]
    assert [timeline.strings[code] for code in ranges.domain] == ["gpudiag", "gpudiag"]
    assert ranges.index.tolist() == [41, -1]


def test_a_loader_wait_is_a_range_even_where_2021_calls_it_an_operator(traces: Path) -> None:
    timeline = read_kineto(traces / "kineto" / "v100_resnet50_workers0.json.gz")
    assert timeline.ranges is not None
    names = [timeline.strings[code] for code in timeline.ranges.name]
    assert sum(name.startswith("enumerate(DataLoader)#") for name in names) == 6
    assert sum(name.startswith("ProfilerStep#") for name in names) == 6
    assert timeline.with_stack


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Memcpy HtoD (Pinned -> Device)", (CopyKind.H2D, MemKind.PINNED, MemKind.DEVICE)),
        ("Memcpy DtoH (Device -> Pageable)", (CopyKind.D2H, MemKind.DEVICE, MemKind.PAGEABLE)),
        ("Memcpy DtoD (Device -> Device)", (CopyKind.D2D, MemKind.DEVICE, MemKind.DEVICE)),
        ("Memcpy PtoP (Device -> Device)", (CopyKind.P2P, MemKind.DEVICE, MemKind.DEVICE)),
        ("Memcpy HtoD (Managed Static -> Device)", (CopyKind.H2D, MemKind.MANAGED, MemKind.DEVICE)),
        ("Memcpy HtoA (Pinned -> Array)", (CopyKind.H2D, MemKind.PINNED, MemKind.OTHER)),
        ("Memcpy HtoD (Host -> Device)", (CopyKind.H2D, MemKind.UNKNOWN, MemKind.DEVICE)),
        ("CopyDeviceToHost", (CopyKind.D2H, MemKind.UNKNOWN, MemKind.UNKNOWN)),
        ("Memcpy", (CopyKind.UNKNOWN, MemKind.UNKNOWN, MemKind.UNKNOWN)),
    ],
)
def test_a_copys_direction_and_memory_are_read_from_its_name(
    tmp_path: Path, name: str, expected: tuple[CopyKind, MemKind, MemKind]
) -> None:
    ops = read_kineto(KinetoTrace().copy(name, 0, 1000).write(tmp_path / "t.json")).gpu_ops
    assert ops is not None
    assert (ops.copy_kind[0], ops.src_mem[0], ops.dst_mem[0]) == expected


def test_api_names_lose_their_version_and_keep_their_correlation(tmp_path: Path) -> None:
    trace = (
        KinetoTrace()
        .call("cudaLaunchKernel_v7000", 0, 10, correlation=3)
        .call("cuLaunchKernel", 20, 10, 4, "cuda_driver")
    )
    timeline = read_kineto(trace.write(tmp_path / "t.json"))
    calls = timeline.api_calls
    assert calls is not None
    assert [timeline.strings[code] for code in calls.name] == ["cudaLaunchKernel", "cuLaunchKernel"]
    assert calls.correlation.tolist() == [3, 4]


def test_gpu_work_not_recorded_is_kept_apart_from_none_done(tmp_path: Path) -> None:
    trace = KinetoTrace().op("aten::mm", 0, 1000)
    assert read_kineto(trace.write(tmp_path / "gpu_machine.json")).gpu_ops is None
    trace.top = {"deviceProperties": []}
    timeline = read_kineto(trace.write(tmp_path / "cpu_machine.json"))
    assert timeline.gpu_ops is not None and len(timeline.gpu_ops) == 0
    trace.call("cudaGetDeviceCount", 0, 10)
    trace.top = {}
    called = read_kineto(trace.write(tmp_path / "calls.json"))
    assert called.gpu_ops is not None and len(called.gpu_ops) == 0 and called.host.gpu_present
    trace.call("cudaLaunchKernel", 20, 10)
    lost = read_kineto(trace.write(tmp_path / "lost.json"))
    assert lost.gpu_ops is None and any("launches" in text for text in lost.warnings)
    trace = KinetoTrace(top={"deviceProperties": None}).op("aten::mm", 0, 1000)
    assert read_kineto(trace.write(tmp_path / "no_word.json")).gpu_ops is None


def test_another_accelerators_trace_is_read_and_said_not_to_be_judged(tmp_path: Path) -> None:
    trace = KinetoTrace().add("mtia_ccp_events", "job", 0, 1000, 0, 0)
    timeline = read_kineto(trace.write(tmp_path / "t.json"))
    assert timeline.gpu_ops is None
    assert "mtia_ccp_events" in " ".join(timeline.warnings)


def test_frames_without_a_thread_belong_to_the_main_thread(traces: Path) -> None:
    timeline = read_kineto(traces / "kineto" / "mi300_qwen_inference.json.gz")
    assert timeline.py_calls is not None and timeline.with_stack
    assert set(timeline.py_calls.thread.tolist()) == {23232}


def test_rank_and_world_are_read_and_hosts_and_users_are_not(traces: Path) -> None:
    timeline = read_kineto(traces / "kineto" / "cpu_only.json.gz")
    assert (timeline.rank, timeline.world_size, timeline.backend) == (34, 300, "gloo")
    assert not any("unixname" in text or "redacted" in text for text in timeline.strings)


def test_records_that_the_profiler_counted_as_missing_are_reported(traces: Path) -> None:
    timeline = read_kineto(traces / "kineto" / "v100_ns_resolution.json.gz")
    assert any("3829" in text for text in timeline.diagnostics)


def test_every_table_is_sorted(traces: Path) -> None:
    timeline = read_kineto(traces / "kineto" / "a100_ddp_overlap_control.json.gz")
    for table in (timeline.gpu_ops, timeline.api_calls, timeline.cpu_ops, timeline.ranges):
        assert table is not None and len(table)
        later = table.start[1:] > table.start[:-1]
        assert (later | ((table.start[1:] == table.start[:-1]) & (table.end[1:] >= table.end[:-1]))).all()


@pytest.mark.live
def test_a_trace_of_the_installed_torch_is_read(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, record_function
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
    for i in range(3):
        with record_function(f"gpudiag::step#{i}"):
            torch.randn(8, 16) @ torch.randn(16, 4)
prof.export_chrome_trace(sys.argv[1])
"""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path / "t.json.gz")], check=True, capture_output=True
    )
    timeline = read_kineto(tmp_path / "t.json.gz")
    ranges, operators = timeline.ranges, timeline.cpu_ops
    assert ranges is not None and operators is not None
    assert sorted(ranges.index.tolist()) == [0, 1, 2]
    products = [row for row, code in enumerate(operators.name) if timeline.strings[code] == "aten::mm"]
    assert [timeline.strings[operators.shapes[row]] for row in products] == ["[[8, 16], [16, 4]]"] * 3
    assert timeline.repairs == () and timeline.recorded is not None and timeline.time_base_ns is not None
