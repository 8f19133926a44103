"""Step lengths, stalls, and what a recording lost: on paper and by metric."""

from __future__ import annotations

import numpy as np
import pytest
from builders import Recorder, measured, scopes

from gpudiag.metrics import measure
from gpudiag.metrics.across import run_facts
from gpudiag.metrics.base import Missing
from gpudiag.metrics.run import periodic_stalls
from gpudiag.metrics.texts import texts_of
from gpudiag.rules import judge, load_rules
from gpudiag.timeline import HostInfo, Repair, StepLog

US = 1_000


def run_of(lengths: list[int]) -> Recorder:
    """Marked steps of these lengths in us, each with a kernel for all of it."""
    recorder = Recorder()
    at = 0
    for step, length in enumerate(lengths):
        recorder.mark(at * US, (at + length) * US, f"ProfilerStep#{step}")
        recorder.launch(at * US + 5 * US, (at + length) * US - 5 * US)
        at += length
    return recorder


def test_mean_median_and_percentile_of_the_steps() -> None:
    got = measured(run_of([100, 100, 100, 100, 140]))
    assert got["step_time"].value == 108 * US
    assert got["step_median"].value == 100 * US
    assert got["step_p99"].value == 140 * US
    assert got["steps"].value == 5


def test_the_longest_of_the_first_three_steps_over_the_median() -> None:
    assert measured(run_of([100, 140, 100, 100, 100, 300]))["warm_up_left_ratio"].value == pytest.approx(1.4)


def test_median_percentile_and_mean_are_of_the_same_recorded_steps() -> None:
    log = np.arange(100) * 100 * US
    got = measured(run_of([100] * 5), step_log=StepLog(log, log + 50 * US, np.arange(100)))
    assert got["step_median"].value == got["step_p99"].value == got["step_time"].value == 100 * US


def test_a_stall_outside_the_recorded_steps_shows_in_the_log_of_all() -> None:
    length = np.where(np.arange(200) % 20 == 19, 2000 * US, 100 * US)
    end = np.cumsum(length)
    got = measured(run_of([100] * 5), step_log=StepLog(end - length, end, np.arange(200)))
    assert got["periodic_stall_period"].value == 20
    assert got["periodic_stall_time"].value == 50 * US, "half of the time of 190 steps is 10 steps' excess"


def test_a_stall_each_fourth_step_is_its_excess_spread_over_all_steps() -> None:
    got = measured(run_of([100, 100, 100, 300] * 5))
    assert got["periodic_stall_period"].value == 4
    assert got["periodic_stall_time"].value == 200 * US * 5 / 20


@pytest.mark.parametrize(
    "lengths",
    [
        [100] * 20,
        [100, 100, 300, 100, 100, 100, 100, 300, 300, 100, 100, 100, 100, 100, 100, 300],  # no rhythm
        [100] * 7 + [900] + [100] * 7,  # once
        [100, 300],
    ],
)
def test_steps_without_a_rhythm_hold_no_periodic_stall(lengths: list[int]) -> None:
    assert periodic_stalls(np.array(lengths) * US) == (0, 0.0)


def test_launches_without_a_record_are_a_share_of_all_launches() -> None:
    recorder = run_of([100] * 5)
    assert measured(recorder)["launches_missing_share"].value == 0
    recorder.call(150 * US, 152 * US, correlation=77)
    got = measured(recorder)
    assert got["launches_missing_share"].value == pytest.approx(1 / 6)
    assert got["kernels_without_launch_share"].value == 0


def test_a_launch_inside_a_launch_is_one() -> None:
    recorder = run_of([100] * 5)
    recorder.call(100 * US + 500, 100 * US + 1500, "cuLaunchKernel", correlation=77)
    assert measured(recorder)["launches_missing_share"].value == 0


def test_what_one_thread_launched_on_another_device_is_not_lost() -> None:
    recorder = Recorder()
    recorder.steps(4, 100 * US)
    for step in range(4):
        for device in range(4):
            recorder.launch(step * 100 * US + (10 + device) * US, step * 100 * US + 80 * US, device=device)
    recorder.call(150 * US, 152 * US, correlation=77)
    for device in range(4):
        assert measured(recorder, device)["launches_missing_share"].value == pytest.approx(1 / 5)


def test_correlation_ids_of_two_processes_are_not_mixed() -> None:
    recorder = Recorder()
    for process, device in ((100, 0), (200, 1)):
        for i in range(5):
            at = i * 100 * US
            if not (process == 200 and i == 2):
                recorder.kernel(at + 10 * US, at + 60 * US, correlation=i, process=process, device=device)
            recorder.call(at, at + 2 * US, correlation=i, process=process, thread=process)
    assert measured(recorder, 0)["launches_missing_share"].value == 0
    assert measured(recorder, 1)["launches_missing_share"].value == pytest.approx(1 / 5)


def test_kernels_without_a_launch_are_a_share_of_the_kernels() -> None:
    recorder = run_of([100] * 4)
    recorder.kernel(390 * US, 399 * US, correlation=55)
    assert measured(recorder)["kernels_without_launch_share"].value == pytest.approx(1 / 5)


def test_without_api_calls_nobody_knows_what_was_lost() -> None:
    recorder = Recorder()
    recorder.kernel(0, 9)
    got = measured(recorder)
    for name in ("launches_missing_share", "kernels_without_launch_share"):
        assert isinstance(got[name], Missing)


def test_what_the_recording_says_of_itself() -> None:
    got = measured(
        run_of([100] * 4),
        repairs=(Repair("negative length", 3, 100), Repair("cut", 2, 10)),
        diagnostics=("CUPTI: ERR_NVGPUCTRPERM",),
        observer_slowdown=1.25,
        with_stack=True,
        host=HostInfo(torch="2.4", cuda="12.1", gpu_present=True, debug_switches=("CUDA_LAUNCH_BLOCKING", "anomaly mode")),
    )  # fmt: skip
    wanted = {
        "rows_dropped": 5, "counters_denied": 1, "observer_slowdown": 1.25, "recorded_with_stacks": 1, "gpu_present": 1,
        "torch_cuda_build": 1, "debug_switches": 2,
    }  # fmt: skip
    assert {name: got[name].value for name in wanted} == wanted


def test_what_the_recording_does_not_say_is_missing() -> None:
    got = measured(run_of([100] * 4))
    for name in ("observer_slowdown", "gpu_present", "torch_cuda_build", "debug_switches"):
        assert isinstance(got[name], Missing)
        assert got[name].record_with == "gpudiag profile SCRIPT"
    assert (got["rows_dropped"].value, got["counters_denied"].value, got["recorded_with_stacks"].value) == (0, 0, 0)
    assert measured(run_of([100] * 4), host=HostInfo(torch="2.4"))["torch_cuda_build"].value == 0


def test_compiled_code_is_known_by_its_kernels_or_operators_in_the_window() -> None:
    recorder = run_of([100] * 4)
    assert measured(recorder)["torch_compiled"].value == 0
    recorder.kernel(-90 * US, -80 * US, "triton_poi_fused_add_0")
    assert measured(recorder)["torch_compiled"].value == 0, "before the window"
    recorder.kernel(90 * US, 95 * US, "triton_poi_fused_add_0")
    assert measured(recorder)["torch_compiled"].value == 1
    graphs = run_of([100] * 4)
    graphs.operator(100 * US, 120 * US, "Torch-Compiled Region: 0/0")
    assert measured(graphs)["torch_compiled"].value == 1, "kernels inside a CUDA graph have no names"
    on_cpu = Recorder()
    on_cpu.steps(4, 100 * US)
    assert isinstance(measured(on_cpu)["torch_compiled"], Missing)
    on_cpu.operator(-9 * US, -1, "CompiledFunction")
    assert measured(on_cpu)["torch_compiled"].value == 0
    on_cpu.operator(0, 9, "## Call CompiledFxGraph fx1 ##")
    assert measured(on_cpu)["torch_compiled"].value == 1


def test_steps_that_are_long_by_their_own_work_lose_nothing() -> None:
    """Twelve steps back to back: every third has three times the kernel time, or three times the length with the same kernel."""
    for idle in (False, True):
        recorder = Recorder()
        at = 0
        for step in range(12):
            length = 300 * US if step % 3 == 2 else 100 * US
            recorder.mark(at, at + length, f"ProfilerStep#{step}")
            recorder.kernel(at, at + (100 * US if idle else length))
            at += length
        got = measured(recorder)
        assert got["slow_steps"].value == 4
        assert got["step_excess_lost"].value == pytest.approx(200 * US * 3 / 11 if idle else 0)


def test_a_run_that_ended_for_lack_of_gpu_memory_is_told_from_one_of_host_memory() -> None:
    said = "CUDA out of memory. Tried to allocate 2.00 GiB."
    host = HostInfo(torch_threads=4, out_of_memory={"gpu": said})
    recorder = run_of([100] * 5)
    (scope,) = scopes(recorder, host=host)
    facts = run_facts([scope])
    got = measure(scope, facts)
    assert (got["gpu_out_of_memory"].value, got["host_out_of_memory"].value) == (1, 0)
    judged = judge(load_rules(), got, step_time_ns=1000, parts=scope.parts, texts=texts_of(scope, facts))
    assert judged.outcomes["gpu_out_of_memory"] == "fired"
    assert judged.outcomes["host_out_of_memory"] == "clear"
    assert next(finding for finding in judged.findings if finding.rule == "gpu_out_of_memory").summary == said
    assert measured(run_of([100] * 5))["gpu_out_of_memory"].record_with == "gpudiag profile SCRIPT", (
        "not known of a foreign trace"
    )
