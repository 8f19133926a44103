"""Shares and parts of the account as metrics: computed on paper, divided by the steps once, inside the window only."""

from __future__ import annotations

import itertools

import pytest
from builders import Recorder, gpu_ops, measured, scopes

from gpudiag.account import DEVICE_PARTS, HOST_PARTS
from gpudiag.metrics.base import Metric, Missing
from gpudiag.timeline import CopyKind, DeviceInfo, Kind

US = 1_000
MS = 1_000_000


def one_of_each() -> Recorder:
    """4 steps of 1000 us, each: kernel 300, collective 200 of which 100 exposed, copies 50 exposed each, memset 20, and a
    wait for data of 200 under which the device is idle for 150."""
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    for step in range(4):
        at = step * 1000 * US
        recorder.kernel(at, at + 300 * US)
        recorder.kernel(at + 200 * US, at + 400 * US, "ncclAllReduce", kind=Kind.COMM, stream=9)
        for place, kind in enumerate(
            (CopyKind.H2D, CopyKind.D2H, CopyKind.D2D, CopyKind.P2P, CopyKind.MANAGED, CopyKind.UNKNOWN)
        ):
            recorder.copy(at + (400 + 50 * place) * US, at + (450 + 50 * place) * US, 100, kind)
        recorder.memset(at + 700 * US, at + 720 * US)
        recorder.mark(at + 650 * US, at + 870 * US, "gpudiag::data_wait")
    return recorder


def test_each_part_is_its_time_a_step() -> None:
    got = measured(one_of_each())
    wanted = {
        "compute": 300, "communication_exposed": 100, "copy_exposed_h2d": 50, "copy_exposed_d2h": 50, "copy_exposed_d2d": 50,
        "copy_exposed_p2p": 50, "copy_exposed_managed": 50, "copy_exposed_other": 50, "memset_exposed": 20, "idle_input": 150,
        "idle_unknown": 130, "copy_exposed": 300, "copy_exposed_link": 150, "gpu_idle": 280, "input_lost": 150,
    }  # fmt: skip
    assert {name: got[name].value for name in wanted} == {name: us * US for name, us in wanted.items()}
    assert got["gpu_busy"].value == pytest.approx(0.72)
    assert got["step_time"].value == 1000 * US
    assert sum(got[part.replace(".", "_")].value for part in DEVICE_PARTS) == 1000 * US


def test_counts_are_of_the_window_and_not_divided() -> None:
    got = measured(one_of_each())
    assert got["gpu_ops_total"].value == 4 * 9
    assert got["kernels_total"].value == 4 * 2, "communication kernels are kernels, copies are not"


def test_idle_that_the_host_explains_goes_to_its_part() -> None:
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    for step in range(4):
        at = step * 1000 * US
        recorder.kernel(at, at + 300 * US)
        for place, name in enumerate(("gpudiag::checkpoint", "gpudiag::compile", "gpudiag::gc")):
            recorder.mark(at + (300 + 100 * place) * US, at + (400 + 100 * place) * US, name)
        recorder.call(at + 600 * US, at + 700 * US, "cudaMalloc")
        recorder.overhead(at + 700 * US, at + 730 * US, "Buffer flush")
        recorder.call(at + 730 * US, at + 750 * US, "cudaLaunchKernel")
    got = measured(recorder)
    wanted = {
        "idle_checkpoint_log": 100, "idle_compile": 100, "idle_gc": 100, "idle_allocator": 100, "idle_profiler": 30,
        "idle_launch": 20, "idle_unknown": 250, "checkpoint_log_lost": 100, "compile_lost": 100, "gc_lost": 100,
    }  # fmt: skip
    assert {name: got[name].value for name in wanted} == {name: us * US for name, us in wanted.items()}


def test_warm_up_evaluation_and_what_lies_outside_the_steps_do_not_count() -> None:
    recorder = one_of_each()
    plain = measured(recorder)
    recorder.kernel(-5000 * US, -1 * US)  # before the first step
    recorder.copy(4100 * US, 9000 * US, 10**9)  # after the last
    recorder.mark(4100 * US, 9000 * US, "gpudiag::data_wait")
    outside = measured(recorder)
    for name in ("compute", "copy_exposed_h2d", "input_lost", "gpu_busy", "kernels_total", "step_time", "h2d_bytes"):
        assert outside[name] == plain[name], name


def test_a_slow_first_step_is_warm_up_and_not_in_the_window() -> None:
    recorder = Recorder()
    ends = [0, 900, 1000, 1100, 1200, 1300, 1400]
    for step, (start, end) in enumerate(itertools.pairwise(ends)):
        recorder.mark(start * US, end * US, f"ProfilerStep#{step}")
        recorder.kernel(start * US, end * US - 20 * US)
    got = measured(recorder)
    assert got["steps"].value == 5
    assert got["step_time"].value == 100 * US
    assert got["compute"].value == 80 * US


def test_evaluation_inside_a_step_is_taken_out_of_everything() -> None:
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    for step in range(4):
        recorder.kernel(step * 1000 * US, step * 1000 * US + 400 * US)
    recorder.mark(1500 * US, 1900 * US, "validation")
    recorder.kernel(1500 * US, 1900 * US, "evaluation")
    got = measured(recorder)
    assert got["step_time"].value == 900 * US
    assert got["kernels_total"].value == 4
    assert got["compute"].value == 400 * US


def test_evaluation_of_another_process_in_the_file_does_not_cut_this_one() -> None:
    recorder = Recorder()
    for process, device in ((100, 0), (200, 1)):
        for step in range(4):
            at = step * 1000 * US
            recorder.mark(at, at + 1000 * US, f"ProfilerStep#{step}", process=process, thread=process)
            recorder.kernel(at, at + 400 * US, process=process, device=device)
    recorder.mark(1500 * US, 1900 * US, "validation", process=200, thread=200)
    assert measured(recorder, 0)["step_time"].value == 1000 * US
    assert measured(recorder, 1)["step_time"].value == 900 * US


def test_streams_that_overlap_are_one_device() -> None:
    recorder = Recorder()
    recorder.steps(3, 100 * US)
    for step in range(3):
        at = step * 100 * US
        recorder.kernel(at, at + 60 * US, stream=1)
        recorder.kernel(at + 20 * US, at + 80 * US, stream=2)
    got = measured(recorder)
    assert got["compute"].value == 80 * US
    assert got["gpu_busy"].value == pytest.approx(0.8)
    assert got["kernel_time"].value == 120 * US, "a sum of lengths, as its doc says"


def test_without_steps_the_span_counts_as_one_step() -> None:
    recorder = Recorder()
    recorder.kernel(100 * US, 200 * US)
    recorder.kernel(250 * US, 300 * US)
    got = measured(recorder)
    assert (got["steps"].value, got["step_time"].value, got["compute"].value) == (0, 200 * US, 150 * US)
    assert isinstance(got["step_median"], Missing)


def test_long_gaps_are_those_of_a_millisecond_or_five_percent_of_the_step() -> None:
    recorder = Recorder()
    recorder.steps(4, 100 * MS)
    for step in range(4):
        at = step * 100 * MS
        recorder.kernel(at, at + 50 * MS)
        recorder.kernel(at + 54 * MS, at + 80 * MS)  # 4 ms: under 5 % of the step
        recorder.kernel(at + (80 if step == 3 else 86) * MS, at + 100 * MS)
    got = measured(recorder)
    assert got["long_gap_time"].value == 3 * 6 * MS / 4
    assert got["long_gap_steps"].value == 3


def test_the_time_of_a_full_launch_queue_is_the_recorders_own_word() -> None:
    recorder = one_of_each()
    assert isinstance(measured(recorder)["queue_full_time"], Missing)
    recorder.overhead(100 * US, 300 * US, "COMMAND_BUFFER_FULL")
    recorder.overhead(9000 * US, 9900 * US, "COMMAND_BUFFER_FULL")
    assert measured(recorder)["queue_full_time"].value == 50 * US


def test_compute_capability_is_major_point_minor() -> None:
    assert measured(one_of_each())["compute_capability"].value == 8.0
    assert isinstance(measured(one_of_each(), devices={0: DeviceInfo("?")})["compute_capability"], Missing)


def test_a_run_on_the_cpu_has_host_parts_and_no_device_parts() -> None:
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    for step in range(4):
        at = step * 1000 * US
        for place, name in enumerate(
            ("data_wait", "h2d", "forward", "backward", "optimizer", "checkpoint", "compile", "gc")
        ):
            recorder.mark(at + place * 100 * US, at + (place + 1) * 100 * US, f"gpudiag::{name}")
        recorder.operator(at + 800 * US, at + 850 * US, "aten::add")
    got = measured(recorder)
    parts = ("input", "h2d", "forward", "backward", "optimizer", "checkpoint_log", "compile", "gc")
    assert {part: got[f"host_{part}"].value for part in parts} == dict.fromkeys(parts, 100 * US)
    assert (got["host_framework"].value, got["host_other"].value) == (50 * US, 150 * US)
    assert sum(got[part.replace(".", "_")].value for part in HOST_PARTS) == 1000 * US
    for lost in ("input_lost", "checkpoint_log_lost", "compile_lost", "gc_lost"):
        assert got[lost].value == 100 * US
    for part in DEVICE_PARTS:
        assert isinstance(got[part.replace(".", "_")], Missing)
    for name in ("gpu_busy", "gpu_idle", "copy_exposed", "copy_exposed_link", "gpu_ops_total", "devices"):
        assert isinstance(got[name], Missing), f"{name}: GPU work was not recorded, so it is not 0"


def test_a_gpu_run_has_no_host_parts_and_recommends_no_run_without_a_gpu() -> None:
    for part in HOST_PARTS:
        item = measured(one_of_each())[part.replace(".", "_")]
        assert isinstance(item, Missing)
        assert (item.record_with, item.applies) == ("", False)


def test_gpu_work_recorded_and_empty_is_zero_operations() -> None:
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    got = measured(recorder, gpu_ops=gpu_ops([]))
    assert (got["gpu_ops_total"].value, got["kernels_total"].value, got["devices"].value) == (0, 0, 0)


def test_what_no_recording_holds_is_missing() -> None:
    got = measured(one_of_each())
    for name in ("mfu",):
        assert isinstance(got[name], Missing)
    assert "bench" in got["mfu"].record_with  # type: ignore[union-attr]


def test_a_background_thread_that_fetches_data_is_not_why_the_device_is_idle() -> None:
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    for step in range(4):
        at = step * 1000 * US
        recorder.launch(at + 500 * US, at + 900 * US)
        recorder.mark(at, at + 1000 * US, "load_batch", thread=777)
    assert measured(recorder)["input_lost"].value == 0
    for step in range(4):
        recorder.mark(step * 1000 * US, step * 1000 * US + 300 * US, "load_batch")
    (scope,) = scopes(recorder)
    assert scope.parts["idle.input"] == (3 * 300) * US, "before the first operation nobody knows"


def test_the_recorders_cost_in_another_process_is_not_this_ones() -> None:
    recorder = one_of_each()
    recorder.overhead(0, 4000 * US, "Buffer flush", process=999)
    recorder.overhead(900 * US, 950 * US, "Buffer flush")
    assert measured(recorder)["idle_profiler"].value == 12.5 * US


def test_values_keep_their_source() -> None:
    item = measured(one_of_each())["compute"]
    assert isinstance(item, Metric)
    assert (item.unit, item.source) == ("ns", "account")
