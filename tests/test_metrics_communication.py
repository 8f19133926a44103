"""Collectives of one rank: union, overlap, reductions an update, and what is nn.DataParallel's."""

from __future__ import annotations

import pytest
from builders import Recorder, measured

from gpudiag.metrics.base import Missing
from gpudiag.timeline import Kind

US = 1_000


def training(micro_steps: int = 1, zero_grad: bool = True) -> Recorder:
    """4 steps of 1000 us: `micro_steps` backward passes with a reduction each, the optimizer, zero_grad."""
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    for step in range(4):
        at = step * 1000 * US
        for micro in range(micro_steps):
            begin = at + (100 + 100 * micro) * US
            recorder.mark(begin, begin + 80 * US, "gpudiag::backward")
            recorder.launch(begin + 20 * US, begin + 60 * US, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", kind=Kind.COMM)
            recorder.launch(begin + 40 * US, begin + 50 * US, "gemm", stream=9)
        recorder.mark(at + 800 * US, at + 900 * US, "gpudiag::optimizer")
        if zero_grad:
            recorder.mark(at + 920 * US, at + 940 * US, "gpudiag::zero_grad")
    return recorder


def test_collectives_on_several_streams_are_a_union() -> None:
    recorder = training()
    for step in range(4):
        at = step * 1000 * US
        recorder.kernel(at + 140 * US, at + 180 * US, "ncclDevKernel_AllGather", kind=Kind.COMM, stream=3)
    got = measured(recorder)
    assert got["comm_time"].value == 60 * US
    assert got["comm_overlap_share"].value == pytest.approx(10 / 60)
    assert got["communication_exposed"].value == 50 * US


def test_collectives_outside_the_window_do_not_count() -> None:
    recorder = training()
    recorder.kernel(-900 * US, -1, "ncclAllReduce", kind=Kind.COMM)
    recorder.kernel(4000 * US, 4900 * US, "ncclAllReduce", kind=Kind.COMM)
    assert measured(recorder)["comm_time"].value == 40 * US


def test_a_run_without_collectives_has_none_and_no_overlap() -> None:
    recorder = Recorder()
    recorder.kernel(0, 9)
    got = measured(recorder)
    assert got["comm_time"].value == 0
    assert isinstance(got["comm_overlap_share"], Missing)
    assert got["comm_median_bytes"].record_with == ""


@pytest.mark.parametrize("zero_grad", [True, False])
@pytest.mark.parametrize("micro_steps", [1, 2, 4])
def test_reductions_an_update_are_backward_passes_an_optimizer_step(micro_steps: int, zero_grad: bool) -> None:
    assert measured(training(micro_steps, zero_grad))["grad_syncs_per_update"].value == micro_steps


def test_a_backward_pass_without_a_reduction_is_no_sync() -> None:
    recorder = training(1)
    for step in range(4):
        recorder.mark(step * 1000 * US + 500 * US, step * 1000 * US + 600 * US, "gpudiag::backward")
        recorder.launch(step * 1000 * US + 520 * US, step * 1000 * US + 540 * US, "ncclAllGather", kind=Kind.COMM)
    assert measured(recorder)["grad_syncs_per_update"].value == 1


def test_ranges_of_another_rank_in_the_file_do_not_count() -> None:
    recorder = training(2)
    for step in range(4):
        at = step * 1000 * US
        recorder.mark(at, at + 30 * US, "gpudiag::optimizer", process=200, thread=200)
        recorder.mark(at + 600 * US, at + 900 * US, "Broadcast", process=200, thread=200)
    got = measured(recorder)
    assert got["grad_syncs_per_update"].value == 2
    assert got["dataparallel_time"].value == 0


def test_operators_of_another_rank_are_not_this_ones_data_parallel() -> None:
    recorder = training()
    recorder.operator(100 * US, 150 * US, "aten::mm")
    recorder.operator(600 * US, 900 * US, "Broadcast", process=200, thread=200)
    assert measured(recorder)["dataparallel_time"].value == 0


def test_backward_passes_of_another_rank_do_not_hold_this_ones_reductions() -> None:
    recorder = training(1)
    for step in range(4):
        at = step * 1000 * US
        recorder.launch(at + 620 * US, at + 640 * US, "ncclDevKernel_AllReduce_Sum", kind=Kind.COMM)
        recorder.mark(at + 600 * US, at + 700 * US, "gpudiag::backward", process=200, thread=200)
    assert measured(recorder)["grad_syncs_per_update"].value == 1


def test_ranges_outside_the_window_do_not_count() -> None:
    recorder = training(2)
    for start in (-2000 * US, 5000 * US):
        recorder.mark(start, start + 100 * US, "gpudiag::optimizer")
        recorder.mark(start + 200 * US, start + 900 * US, "gpudiag::backward")
        recorder.operator(start, start + 900 * US, "Broadcast")
    got = measured(recorder)
    assert got["grad_syncs_per_update"].value == 2
    assert got["dataparallel_time"].value == 0


def test_operators_of_autograd_are_no_backward_passes() -> None:
    recorder = training(1)
    for step in range(4):
        at = step * 1000 * US
        for place in range(5):
            begin = at + (110 + 10 * place) * US
            recorder.mark(begin, begin + 5 * US, "autograd::engine::evaluate_function: AccumulateGrad")
    assert measured(recorder)["grad_syncs_per_update"].value == 1


def test_without_ranges_or_calls_updates_are_unknown() -> None:
    recorder = Recorder()
    recorder.kernel(0, 9)
    assert isinstance(measured(recorder)["grad_syncs_per_update"], Missing)


@pytest.mark.parametrize(
    "name", ["Broadcast", "Scatter", "Gather", "GatherBackward", "DataParallel.scatter", "aten::broadcast_coalesced"]
)
def test_work_of_data_parallel_is_named(name: str) -> None:
    recorder = training()
    for step in range(4):
        recorder.operator(step * 1000 * US, step * 1000 * US + 30 * US, name)
        recorder.operator(step * 1000 * US + 20 * US, step * 1000 * US + 40 * US, name)
    assert measured(recorder)["dataparallel_time"].value == 40 * US


@pytest.mark.parametrize(
    "name",
    ["GatherBackward0", "ScatterAddBackward0", "aten::gather", "ncclBroadcast", "c10d::broadcast_", "aten::broadcast_to",
     "BroadcastObjectList", "autograd::engine::evaluate_function: GatherBackward0"],
)  # fmt: skip
def test_what_only_sounds_like_data_parallel_is_not_its(name: str) -> None:
    recorder = training()
    recorder.operator(100 * US, 900 * US, name)
    recorder.mark(100 * US, 900 * US, name)
    assert measured(recorder)["dataparallel_time"].value == 0


def test_without_gpu_work_all_are_missing() -> None:
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    got = measured(recorder)
    for name in ("comm_time", "comm_overlap_share", "dataparallel_time", "grad_syncs_per_update", "comm_wait_share"):
        assert isinstance(got[name], Missing)


def test_one_rank_says_how_to_record_all() -> None:
    got = measured(training())
    for name in ("comm_wait_share", "straggler_share", "straggler_wait", "is_straggler"):
        assert got[name].reason == "one rank was given"
        assert "torchrun" in got[name].record_with
