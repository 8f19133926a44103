"""Launches, waits and what follows them, compilations, repeating steps."""

from __future__ import annotations

import pytest
from builders import Recorder, measured

from gpudiag.metrics.base import Missing
from gpudiag.metrics.launching import NAMES
from gpudiag.timeline import CopyKind, Kind, MemKind

US = 1_000


def steps() -> Recorder:
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    return recorder


def test_cost_of_a_launch_and_time_in_the_queue_are_medians_of_joined_kernels() -> None:
    recorder = steps()
    for step in range(4):
        at = step * 1000 * US
        for place, (cost, queue) in enumerate(((2, 3), (4, 5), (9, 100))):
            begin = at + place * 300 * US
            recorder.call(begin, begin + cost * US, correlation=10 * step + place)
            recorder.kernel(begin + (cost + queue) * US, begin + 250 * US, correlation=10 * step + place)
        recorder.kernel(at + 900 * US, at + 950 * US)  # no launch call
    got = measured(recorder)
    assert (got["launch_cost"].value, got["queue_time"].value) == (4 * US, 5 * US)
    assert got["queue_empty_share"].value == pytest.approx(2 / 3)


def test_a_kernel_right_behind_another_did_not_find_an_empty_queue() -> None:
    recorder = steps()
    for step in range(4):
        at = step * 1000 * US
        recorder.launch(at + 100 * US, at + 200 * US)
        recorder.call(at + 190 * US, at + 195 * US, correlation=step)
        recorder.kernel(at + 200 * US, at + 300 * US, correlation=step)
    assert measured(recorder)["queue_empty_share"].value == 0.5


def test_allocations_of_the_launching_threads_in_the_window_a_step() -> None:
    recorder = steps()
    for step in range(4):
        at = step * 1000 * US
        recorder.launch(at + 100 * US, at + 200 * US)
        for place, name in enumerate(("cudaMalloc", "cudaFree", "cudaHostAlloc", "cuMemCreate", "cudaLaunchKernel")):
            recorder.call(at + (300 + 10 * place) * US, at + (301 + 10 * place) * US, name)
        recorder.call(at + 500 * US, at + 501 * US, "cudaMalloc", process=200, thread=200)
    recorder.call(-100, -50, "cudaMalloc")
    assert measured(recorder)["alloc_calls"].value == 4


def test_waits_are_counted_and_timed_inside_the_window_of_the_launching_threads() -> None:
    recorder = steps()
    for step in range(4):
        at = step * 1000 * US
        recorder.launch(at + 100 * US, at + 200 * US)
        recorder.call(at + 120 * US, at + 220 * US, "cudaStreamSynchronize")
        recorder.call(at + 300 * US, at + 310 * US, "cudaEventSynchronize")
        recorder.call(at + 400 * US, at + 900 * US, "cudaDeviceSynchronize", thread=999)
    recorder.call(3990 * US, 5000 * US, "cudaDeviceSynchronize")
    recorder.call(-500 * US, 5 * US, "cudaDeviceSynchronize")
    got = measured(recorder)
    assert got["syncs_per_step"].value == 9 / 4
    assert got["sync_time"].value == (4 * 110 + 10 + 5) * US / 4


def test_waiting_while_only_copies_run_is_told_apart() -> None:
    recorder = steps()
    for step in range(4):
        at = step * 1000 * US
        recorder.launch(at + 100 * US, at + 200 * US)
        recorder.copy(at + 150 * US, at + 400 * US, 10, stream=9)
        recorder.call(at + 120 * US, at + 420 * US, "cudaStreamSynchronize")
    got = measured(recorder)
    assert (got["sync_time"].value, got["sync_copy_time"].value) == (300 * US, 200 * US)


def readback(returns: int = 315, size: int = 4) -> Recorder:
    """Each step: a kernel [100, 300), a copy of 4 bytes [300, 310) for which the host waits, the next kernel at 400."""
    recorder = steps()
    for step in range(4):
        at = step * 1000 * US
        recorder.launch(at + 100 * US, at + 300 * US)
        recorder.call(at + 200 * US, at + returns * US, "cudaMemcpyAsync", correlation=step)
        recorder.copy(at + 300 * US, at + 310 * US, size, CopyKind.D2H, MemKind.PAGEABLE, correlation=step)
        recorder.launch(at + 400 * US, at + 999 * US, lead=80 * US)
        recorder.operator(at + 190 * US, at + 318 * US, "aten::item")
        recorder.operator(at + 195 * US, at + 317 * US, "aten::_local_scalar_dense")
    return recorder


def test_a_small_copy_that_the_host_waited_for_and_the_idle_time_after_it() -> None:
    got = measured(readback())
    assert got["small_readbacks"].value == 1
    # the wait is 100 us under the kernel and 5 us after the copy: the gap of 90 us is all its own
    assert got["readback_idle"].value == got["idle_sync"].value == 90 * US


def test_a_call_that_returns_in_the_very_moment_its_copy_ends_is_a_readback_too() -> None:
    assert measured(readback(returns=310))["small_readbacks"].value == 1


def test_a_call_that_returned_before_its_copy_ran_is_no_readback() -> None:
    got = measured(readback(returns=205))
    assert (got["small_readbacks"].value, got["readback_idle"].value) == (0, 0)


def test_a_large_copy_is_no_small_readback() -> None:
    got = measured(readback(size=1025))
    assert (got["small_readbacks"].value, got["readback_idle"].value) == (0, 0)
    assert got["idle_sync"].value == 90 * US


def test_operators_that_read_back_count_once_with_the_idle_time_after_their_waits() -> None:
    got = measured(readback())
    assert (got["implicit_syncs"].value, got["implicit_sync_idle"].value) == (1, 90 * US)


def test_an_item_of_a_tensor_on_the_cpu_is_no_synchronisation() -> None:
    recorder = readback()
    for step in range(4):
        recorder.operator(step * 1000 * US + 500 * US, step * 1000 * US + 510 * US, "aten::_local_scalar_dense")
        recorder.operator(step * 1000 * US + 520 * US, step * 1000 * US + 530 * US, "aten::nonzero")
    assert measured(recorder)["implicit_syncs"].value == 1


def test_readbacks_of_another_process_are_not_this_ones() -> None:
    recorder = readback()
    for step in range(4):
        recorder.operator(step * 1000 * US, step * 1000 * US + 600 * US, "aten::nonzero", process=200, thread=200)
    got = measured(recorder)
    assert (got["implicit_syncs"].value, got["implicit_sync_idle"].value) == (1, 90 * US)


def test_without_operators_or_calls_the_reason_is_said() -> None:
    recorder = steps()
    recorder.kernel(0, 100 * US)
    got = measured(recorder)
    assert all(isinstance(got[name], Missing) for name in NAMES)
    assert "API calls" in got["sync_time"].reason
    assert got["implicit_syncs"].record_with == "gpudiag profile --with torch SCRIPT"
    on_cpu = measured(steps())
    assert "no GPU work" in on_cpu["sync_time"].reason


def test_kernels_that_no_call_can_be_joined_to_have_no_launch_cost() -> None:
    recorder = steps()
    recorder.kernel(0, 100 * US, correlation=1)
    recorder.call(0, 10, correlation=2)
    got = measured(recorder)
    assert isinstance(got["launch_cost"], Missing)
    assert got["syncs_per_step"].value == 0


def test_steps_repeat_when_their_kernels_do_whatever_the_copies_and_streams_beside_them() -> None:
    recorder = steps()
    for step in range(4):
        at = step * 1000 * US
        recorder.kernel(at + 100 * US, at + 200 * US, "first")
        recorder.kernel(at + 300 * US, at + 400 * US, "second" if step != 3 else "third")
        late = 250 if step % 2 else 50
        recorder.kernel(at + late * US, at + (late + 40) * US, "aside", stream=9)
        recorder.copy(at + late * US, at + (late + 1) * US, step + 1, stream=10)
    assert measured(recorder)["step_repeat_share"].value == 0.75


def test_repetition_needs_steps() -> None:
    recorder = Recorder()
    recorder.kernel(0, 9)
    assert isinstance(measured(recorder)["step_repeat_share"], Missing)


def test_compilations_in_the_window_count_once_with_what_they_contain() -> None:
    recorder = steps()
    recorder.launch(100 * US, 200 * US)
    recorder.launch(3100 * US, 3200 * US)
    recorder.mark(300 * US, 400 * US, "gpudiag::compile")
    recorder.call(310 * US, 320 * US, "cuModuleLoadData")
    recorder.call(330 * US, 340 * US, "cuModuleLoadData")
    recorder.call(500 * US, 510 * US, "cuLibraryLoadData")
    recorder.overhead(600 * US, 610 * US, "Lazy function loading")
    recorder.mark(-400 * US, -300 * US, "gpudiag::compile")
    assert measured(recorder)["recompilations"].value == 3


def test_compilations_on_the_cpu_and_where_nothing_is_known() -> None:
    recorder = steps()
    recorder.mark(300 * US, 400 * US, "gpudiag::compile")
    assert measured(recorder)["recompilations"].value == 1
    bare = Recorder()
    bare.kernel(0, 9, kind=Kind.KERNEL)
    assert isinstance(measured(bare)["recompilations"], Missing)
