"""What a recording lost or bent is said, and what cannot be judged is not judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from builders import Recorder, gpu_ops

from gpudiag.diagnosis import Diagnosis
from gpudiag.errors import GpudiagError
from gpudiag.pipeline import diagnose_recordings
from gpudiag.read import Recordings
from gpudiag.rules import RuleSet, load_rules
from gpudiag.timeline import Kind, Repair, Timeline

US = 1_000


@pytest.fixture(scope="module")
def rules() -> Iterator[RuleSet]:
    yield load_rules()


def run(steps: int = 6, kernels: int = 20, *, busy: int = 45, lose: int = 0, **more: Any) -> Timeline:
    """Steps of `kernels` kernels of `busy` us every 50 us; the first `lose` kernels of each step have a launch and no record."""
    recorder = Recorder()
    correlation = 0
    for step in range(steps):
        at = step * kernels * 50 * US
        recorder.mark(at, at + kernels * 50 * US, f"ProfilerStep#{step}")
        for i in range(kernels):
            correlation += 1
            begin = at + i * 50 * US
            recorder.call(begin, begin + 2 * US, correlation=correlation)
            if i >= lose:
                recorder.kernel(begin + 3 * US, begin + (3 + busy) * US, correlation=correlation)
    return recorder.timeline(**more)


def diagnosed(rules: RuleSet, *timelines: Timeline) -> Diagnosis:
    return diagnose_recordings(Recordings(timelines), rules)


def said(diagnosis: Diagnosis, *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in diagnosis.warnings)


def test_a_complete_recording_of_a_busy_run_is_healthy_and_says_nothing(rules: RuleSet) -> None:
    diagnosis = diagnosed(rules, run())
    assert diagnosis.verdict.status == "healthy"
    assert diagnosis.warnings == ()


def test_launches_without_gpu_records_are_said_from_one_percent(rules: RuleSet) -> None:
    assert said(diagnosed(rules, run(lose=1)), "5.0 %", "no GPU record", "lower bound")


def test_a_recording_that_lost_most_of_its_work_is_not_called_idle(rules: RuleSet) -> None:
    diagnosis = diagnosed(rules, run(lose=12))
    assert diagnosis.verdict.status == "cannot_judge"


def test_launches_still_queued_at_the_end_are_not_lost(rules: RuleSet) -> None:
    recorder = Recorder()
    for i in range(200):
        recorder.call(i * 10 * US, i * 10 * US + 2 * US, correlation=i)
        if i < 100:
            recorder.kernel(i * 20 * US + 5 * US, i * 20 * US + 24 * US, correlation=i)
    assert not said(diagnosed(rules, recorder.timeline()), "no GPU record")


def test_fewer_than_three_steps_are_said_and_the_span_is_judged(rules: RuleSet) -> None:
    diagnosis = diagnosed(rules, run(steps=2, kernels=60))
    assert said(diagnosis, "2 steps are too few")
    assert diagnosis.accounts[0].scope == "span"


def test_api_calls_without_any_gpu_table_are_a_failed_capture_not_an_idle_gpu(rules: RuleSet) -> None:
    timeline = replace(run(), gpu_ops=None)
    diagnosis = diagnosed(rules, timeline)
    assert diagnosis.verdict.status == "cannot_judge"
    assert "no GPU activity" in diagnosis.verdict.headline
    assert not [finding for finding in diagnosis.findings if finding.severity != "info"]


def test_queries_of_the_driver_do_not_make_a_cpu_run_a_failed_capture(rules: RuleSet) -> None:
    recorder = Recorder()
    for step in range(5):
        recorder.mark(step * 1000 * US, (step + 1) * 1000 * US, f"ProfilerStep#{step}")
        recorder.mark(step * 1000 * US, (step + 1) * 1000 * US - 9 * US, "gpudiag::forward")
    recorder.call(0, US, "cudaGetDeviceCount")
    diagnosis = diagnosed(rules, recorder.timeline())
    assert diagnosis.verdict.status == "healthy"
    assert diagnosis.accounts[0].device == -1


def test_an_empty_recording_is_an_error_with_a_next_step(rules: RuleSet) -> None:
    empty = replace(Recorder().timeline(), gpu_ops=gpu_ops([]))
    with pytest.raises(GpudiagError, match="no GPU work") as caught:
        diagnosed(rules, empty)
    assert caught.value.hint


@pytest.mark.parametrize(("slowdown", "words"), [(1.2, "inflated"), (1.07, "7.0 % longer")])
def test_the_observers_cost_is_said(rules: RuleSet, slowdown: float, words: str) -> None:
    assert said(diagnosed(rules, run(observer_slowdown=slowdown)), words)
    assert not said(diagnosed(rules, run(observer_slowdown=1.02)), "longer")


def test_kernels_that_start_before_their_launch_are_a_clock_mismatch(rules: RuleSet) -> None:
    timeline = run()
    assert timeline.gpu_ops is not None
    shifted = replace(timeline.gpu_ops, start=timeline.gpu_ops.start - 10 * US, end=timeline.gpu_ops.end - 10 * US)
    assert said(diagnosed(rules, replace(timeline, gpu_ops=shifted)), "clocks do not agree")


def test_repaired_rows_are_counted(rules: RuleSet) -> None:
    timeline = run(repairs=(Repair("negative duration, left out", 3, 1000),))
    assert said(diagnosed(rules, timeline), "3 of 1000 rows", "negative duration")


def test_graph_launches_are_busy_time_and_the_blind_rules_are_said(rules: RuleSet) -> None:
    recorder = Recorder()
    for step in range(6):
        recorder.mark(step * 1000 * US, (step + 1) * 1000 * US, f"ProfilerStep#{step}")
        recorder.kernel(step * 1000 * US, step * 1000 * US + 950 * US, "graph", kind=Kind.GRAPH)
    diagnosis = diagnosed(rules, recorder.timeline())
    assert said(diagnosis, "CUDA graphs", "cuda-graph-trace=node")
    assert diagnosis.accounts[0].parts["compute"] == 6 * 950 * US


def test_two_timelines_of_one_rank_number_are_told_apart(rules: RuleSet) -> None:
    diagnosis = diagnosed(rules, run(), replace(run(), rank=1))
    assert [(account.rank, account.device) for account in diagnosis.accounts] == [(0, 0), (1, 0)]


def test_a_warning_about_some_of_several_devices_names_them(rules: RuleSet) -> None:
    ranks = [replace(run(lose=lose), rank=rank) for rank, lose in ((0, 0), (1, 2), (2, 2), (3, 0))]
    assert said(diagnosed(rules, *ranks), "rank 1; rank 2: 10 % of the launch calls have no GPU record")
    everywhere = [replace(run(lose=2), rank=rank) for rank in (0, 1)]
    assert [w for w in diagnosed(rules, *everywhere).warnings if "rank" in w and "launch calls" in w] == []


def test_evaluation_that_is_kept_apart_is_said(rules: RuleSet) -> None:
    recorder = Recorder()
    for step in range(6):
        recorder.mark(step * 1000 * US, (step + 1) * 1000 * US, f"ProfilerStep#{step}")
        recorder.kernel(step * 1000 * US, step * 1000 * US + 950 * US)
    recorder.mark(2500 * US, 2800 * US, "validation")
    assert said(diagnosed(rules, recorder.timeline()), "evaluation", "300 us", "5.0 %")
    assert not said(diagnosed(rules, run()), "evaluation")


def test_much_evaluation_stands_in_the_headline_and_is_a_finding(rules: RuleSet) -> None:
    """Half of the stretch, in three passes; the account is that of the training steps alone, which are busy."""
    recorder = Recorder()
    for step in range(6):
        recorder.mark(step * 1000 * US, (step + 1) * 1000 * US, f"ProfilerStep#{step}")
        recorder.kernel(step * 1000 * US, step * 1000 * US + 1000 * US)
    for step in (1, 3, 5):
        recorder.mark(step * 1000 * US, (step + 1) * 1000 * US - 100, "validation")
    diagnosis = diagnosed(rules, recorder.timeline())
    begin = (
        "Evaluation inside training takes 50 % of the time, 500 us for each step. The steps of training are healthy: "
    )
    assert diagnosis.verdict.headline.startswith(begin)
    assert (diagnosis.verdict.status, diagnosis.verdict.bound_by) == ("bottleneck", "none")
    assert [f.severity for f in diagnosis.findings if f.rule == "evaluation_costly"] == ["warning"]
    assert not said(diagnosis, "evaluation"), "once is enough"
