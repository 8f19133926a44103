"""Where the steps are found, from which source, and what is set aside."""

from __future__ import annotations

import numpy as np
import pytest
from builders import Recorder

from gpudiag.intervals import Int64
from gpudiag.metrics.run import periodic_stalls
from gpudiag.steps import find_steps, mark_warm_up
from gpudiag.timeline import StepLog, Steps

MS = 1_000_000


def steps_of(recorder: Recorder) -> Steps:
    timeline = recorder.timeline()
    return find_steps(timeline, timeline.gpu_ops)


def marked(*names: str, length: int = 10 * MS) -> Recorder:
    recorder = Recorder()
    for i, name in enumerate(names):
        recorder.mark(i * length, (i + 1) * length, name)
    return recorder


@pytest.mark.parametrize(
    ("pattern", "source"),
    [
        ("gpudiag::step#{}", "annotation"),
        ("ProfilerStep#{}", "ProfilerStep"),
        ("step {}", "annotation"),
        ("iteration {}", "annotation"),
        ("training_step_{}", "annotation"),
        ("Iter: {}", "annotation"),
        ("batch {}", "annotation"),
    ],
)
def test_steps_from_common_names(pattern: str, source: str) -> None:
    steps = steps_of(marked(*[pattern.format(i + 7) for i in range(4)]))
    assert steps.source == source
    assert steps.index.tolist() == [7, 8, 9, 10]
    assert (steps.end - steps.start).tolist() == [10 * MS] * 4


@pytest.mark.parametrize("name", ["forward", "stepper", "aten::step_", "nccl:all_reduce", "backward step fn"])
def test_other_ranges_are_no_steps(name: str) -> None:
    assert steps_of(marked(*[name] * 6)).source == "none"


def test_our_own_ranges_win_over_the_profilers() -> None:
    recorder = marked(*[f"ProfilerStep#{i}" for i in range(5)])
    for i in range(10):
        recorder.mark(i * 5 * MS, (i + 1) * 5 * MS, f"gpudiag::step#{i}")
    assert len(steps_of(recorder)) == 10


def test_a_better_source_with_too_few_steps_gives_way() -> None:
    recorder = marked("ProfilerStep#6", length=100 * MS)
    for i in range(6):
        recorder.mark(i * 15 * MS, i * 15 * MS + 5 * MS, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    steps = steps_of(recorder)
    assert (steps.source, len(steps)) == ("loader", 5)


def test_ranges_with_gaps_between_them_are_taken_from_start_to_start() -> None:
    recorder = Recorder()
    for i in range(5):
        recorder.mark(i * 10 * MS, i * 10 * MS + 6 * MS, f"step {i}")
    steps = steps_of(recorder)
    assert (steps.end - steps.start).tolist() == [10 * MS] * 4


def test_several_optimizers_make_one_step_a_cycle() -> None:
    recorder = Recorder()
    for i in range(6):
        recorder.mark(i * 10 * MS + 1 * MS, i * 10 * MS + 2 * MS, "Optimizer.step#Adam.step")
        recorder.mark(i * 10 * MS + 3 * MS, i * 10 * MS + 4 * MS, "Optimizer.step#Adam.step")
        recorder.mark(i * 10 * MS + 8 * MS, i * 10 * MS + 9 * MS, "Optimizer.step#SGD.step")
    steps = steps_of(recorder)
    assert steps.source == "optimizer"
    assert (steps.end - steps.start).tolist() == [10 * MS] * 5


def test_steps_come_from_one_thread_only() -> None:
    recorder = marked(*[f"step {i}" for i in range(5)])
    for i in range(3):
        recorder.mark(i * 7 * MS, i * 7 * MS + 3 * MS, f"step {i}", thread=999)
    assert len(steps_of(recorder)) == 5


def repeated_kernels(recorder: Recorder, repeats: int) -> Recorder:
    for i in range(repeats):
        for j, name in enumerate(["first", "gemm", "relu", "gemm", "relu", "last"]):
            recorder.kernel(i * 10 * MS + j * MS, i * 10 * MS + j * MS + MS // 2, name)
    return recorder


def test_unmarked_kernels_that_repeat_give_steps_with_a_confidence() -> None:
    steps = steps_of(repeated_kernels(Recorder(), 8))
    assert steps.source == "inferred"
    assert steps.confidence == 1.0
    assert (steps.end - steps.start).tolist() == [10 * MS] * 7


def test_repeats_inside_one_range_are_layers_not_steps() -> None:
    recorder = repeated_kernels(Recorder(), 8)
    recorder.mark(-MS, 90 * MS, "execute_context_1")
    assert steps_of(recorder).source == "none"
    recorder = repeated_kernels(Recorder(), 8)
    recorder.mark(-MS, 90 * MS, "epoch 1")
    assert steps_of(recorder).source == "inferred"


def test_few_repeats_prove_nothing() -> None:
    assert steps_of(repeated_kernels(Recorder(), 4)).source == "none"


def lengths(*values: int) -> tuple[Int64, Int64]:
    end = np.cumsum(np.array(values, np.int64))
    return end - np.array(values, np.int64), end


@pytest.mark.parametrize(
    ("values", "warm_up"),
    [
        ((100, 100, 100), 0),  # too few to tell
        ((900, 100, 100, 100, 100), 1),
        ((900, 400, 100, 100, 100, 100, 100), 2),
        ((30, 100, 100, 100, 100), 1),  # the queue was still filling
        ((100, 100, 900, 100, 100, 100), 0),  # a slow step later on is no warm-up
        ((120, 100, 100, 100, 100), 0),
        ((900, 900, 900, 900, 100, 100, 100), 0),
    ],
)
def test_leading_steps_far_from_the_median_are_set_aside(values: tuple[int, ...], warm_up: int) -> None:
    start, end = lengths(*values)
    if values.count(900) == 4:
        assert mark_warm_up(start, end).sum() <= len(values) // 2
    else:
        assert mark_warm_up(start, end).tolist() == [i < warm_up for i in range(len(values))]


@pytest.mark.parametrize(
    ("lengths", "period"),
    [
        ([5, 5, 5, 200] * 8, 4),
        ([1, 29, 14, 172, 16, 4, 27, 158, 2, 18, 1, 191, 13, 30, 2, 203] * 4, 4),  # noise of short steps is no stall
        ([130, 2] * 20, 2),
        ([10] * 9 + [14] + [10] * 9 + [14], 0),
        ([10] * 40, 0),
        (
            [
                9,
                9,
                30,
                9,
                9,
                9,
                9,
                30,
                9,
                9,
                30,
                9,
                9,
                9,
                30,
                9,
                30,
                9,
                9,
                9,
                9,
                30,
                9,
                9,
                9,
                30,
                9,
                9,
                9,
                9,
                30,
                9,
                9,
                30,
            ],
            0,
        ),
        ([10] * 99 + [500] + [10] * 98 + [500] + [10] * 100 + [500] + [10] * 99 + [500], 100),  # saving by the clock
        ([10, 11, 9, 200, 10, 9, 10, 10, 12, 9, 200, 10, 9, 11], 0),
    ],
)
def test_stalls_that_recur_have_a_period(lengths: list[int], period: int) -> None:
    found, excess = periodic_stalls(np.array(lengths, np.int64))
    assert found == period
    assert excess > 0 or not period


def test_what_follows_the_last_step_is_no_step() -> None:
    recorder = Recorder()
    for i in range(6):
        recorder.mark(i * 10 * MS, (i + 1) * 10 * MS, f"gpudiag::step#{i}")
    recorder.mark(60 * MS, 1600 * MS, "gpudiag::step#6")  # the rest of the script, closed at its end
    start = np.arange(6) * 10 * MS
    timeline = recorder.timeline(step_log=StepLog(start, start + 10 * MS, np.arange(6)), step_source="optimizer")
    steps = find_steps(timeline, None)
    assert steps.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert int(steps.end[-1]) == 60 * MS
    assert steps.source == "optimizer"


def test_a_step_that_only_the_end_of_the_recording_has_closed_is_none() -> None:
    """nsys closes what a killed process left open, the window and the step in it, at one moment."""
    for end, expected in ((400 * MS, 5), (60 * MS, 6)):
        recorder = Recorder()
        for i in range(5):
            recorder.mark(i * 10 * MS, (i + 1) * 10 * MS, f"gpudiag::step#{i}")
        recorder.mark(50 * MS, end, "gpudiag::step#5")
        recorder.mark(-MS, 400 * MS, "gpudiag::capture")
        steps = find_steps(recorder.timeline(), None)
        assert (len(steps), int(steps.end[-1])) == (expected, expected * 10 * MS)


def test_a_script_that_died_in_its_third_step_has_two() -> None:
    """Neither the bare name of our third range nor the loader's calls, several a step, make three of them."""
    recorder = Recorder()
    for i in range(3):
        recorder.mark(i * 10 * MS, (i + 1) * 10 * MS, "step", domain="gpudiag", index=i)
        for call in range(2):
            recorder.mark((i * 10 + call) * MS, (i * 10 + call + 1) * MS, "data_wait", domain="gpudiag")
    whole = np.arange(2) * 10 * MS
    timeline = recorder.timeline(step_log=StepLog(whole, whole + 10 * MS, np.arange(2)))
    assert len(find_steps(timeline, timeline.gpu_ops)) == 2
