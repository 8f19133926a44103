"""Copies: bytes, rates and exposure, whose calls they were, and which bring weights again and again."""

from __future__ import annotations

import pytest
from builders import Recorder, measured, samples

from gpudiag.metrics.base import Missing
from gpudiag.metrics.copies import NAMES
from gpudiag.timeline import CopyKind, Kind, MemKind

US = 1_000
MB = 1_000_000


def training() -> Recorder:
    """4 steps of 1000 us, each with a kernel of [500, 900) us."""
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    for step in range(4):
        recorder.launch(step * 1000 * US + 500 * US, step * 1000 * US + 900 * US)
    return recorder


def each_step(recorder: Recorder, start: int, end: int, size: int, *args, **more) -> None:
    for step in range(4):
        recorder.copy(step * 1000 * US + start * US, step * 1000 * US + end * US, size, *args, **more)


def test_bytes_are_those_of_a_step_by_direction_and_memory() -> None:
    recorder = training()
    each_step(recorder, 0, 100, 2 * MB)
    each_step(recorder, 100, 200, 1 * MB, memory=MemKind.PAGEABLE)
    each_step(recorder, 200, 300, 3000, CopyKind.D2H, MemKind.PAGEABLE)
    each_step(recorder, 300, 310, 500, CopyKind.D2H, MemKind.PINNED)
    each_step(recorder, 310, 320, 7 * MB, CopyKind.D2D)
    got = measured(recorder)
    wanted = {
        "h2d_bytes": 3 * MB, "h2d_pageable_bytes": MB, "d2h_bytes": 3500, "d2h_pageable_bytes": 3000, "copies_per_step": 4,
        "copy_median_bytes": 501_500, "h2d_pinned_rate": 2 * MB / 100e-6, "h2d_pageable_rate": MB / 100e-6,
    }  # fmt: skip
    assert {name: got[name].value for name in wanted} == pytest.approx(wanted)


def test_copies_that_start_outside_the_steady_steps_do_not_count() -> None:
    recorder = training()
    recorder.copy(-1000 * US, -10 * US, 100 * MB)
    recorder.copy(4000 * US, 5000 * US, 100 * MB, memory=MemKind.PAGEABLE)
    got = measured(recorder)
    assert got["h2d_bytes"].value == got["copies_per_step"].value == got["h2d_pageable_bytes"].value == 0
    assert isinstance(got["h2d_pinned_rate"], Missing)


def test_exposure_is_told_by_memory_and_never_counted_twice() -> None:
    recorder = training()
    each_step(recorder, 0, 100, MB)  # exposed
    each_step(recorder, 50, 250, MB, memory=MemKind.PAGEABLE, stream=8)  # 150 exposed with no pinned copy beside it
    each_step(recorder, 600, 700, MB, stream=8)  # under the kernel
    got = measured(recorder)
    assert got["copy_exposed_h2d"].value == 250 * US
    assert got["h2d_pinned_time"].value == 200 * US
    assert got["h2d_pinned_exposed"].value == 100 * US
    assert got["h2d_pageable_exposed"].value == 150 * US


def test_a_copy_that_runs_out_of_the_window_counts_inside_it_only() -> None:
    recorder = training()
    recorder.copy(3900 * US, 9000 * US, MB)
    assert measured(recorder)["h2d_pinned_time"].value == 25 * US


def test_memory_that_the_recorder_did_not_name_is_missing_not_pinned() -> None:
    recorder = training()
    each_step(recorder, 0, 100, MB, memory=MemKind.UNKNOWN)
    each_step(recorder, 100, 200, MB, CopyKind.D2H, MemKind.UNKNOWN)
    got = measured(recorder)
    for name in (
        "h2d_pageable_bytes",
        "h2d_pageable_exposed",
        "h2d_pinned_time",
        "h2d_pinned_exposed",
        "d2h_pageable_bytes",
    ):
        assert isinstance(got[name], Missing)
    assert got["h2d_bytes"].value == MB


def test_a_rate_needs_copies_of_a_megabyte() -> None:
    recorder = training()
    each_step(recorder, 0, 100, MB - 1)
    assert isinstance(measured(recorder)["h2d_pinned_rate"], Missing)


def test_copies_inside_the_device_have_no_size_over_the_link() -> None:
    recorder = training()
    for i in range(30):
        each_step(recorder, 10 * i, 10 * i + 5, 100, CopyKind.D2D)
    got = measured(recorder)
    assert got["copies_per_step"].value == 0
    assert isinstance(got["copy_median_bytes"], Missing)


def test_large_readbacks_alone_are_in_their_exposure() -> None:
    recorder = training()
    each_step(recorder, 0, 30, 64_000, CopyKind.D2H, MemKind.PAGEABLE)
    each_step(recorder, 40, 60, 63_999, CopyKind.D2H, MemKind.PAGEABLE)
    got = measured(recorder)
    assert (got["d2h_large_exposed"].value, got["copy_exposed_d2h"].value) == (30 * US, 50 * US)


def test_the_links_rate_is_compared_with_generation_and_width_under_load() -> None:
    recorder = training()
    each_step(recorder, 0, 100, 10 * MB // 8)  # 12.5 GB/s
    assert isinstance(measured(recorder)["link_rate_share"], Missing)
    moments = samples({"at": 0, "pcie_gen": 1, "pcie_width": 16}, {"at": US, "pcie_gen": 4, "pcie_width": 16})
    assert measured(recorder, samples=moments)["link_rate_share"].value == pytest.approx(12.5e9 / (1.969e9 * 16))
    elsewhere = samples({"at": 0, "pcie_gen": 4, "pcie_width": 16, "device": 1})
    assert isinstance(measured(recorder, samples=elsewhere)["link_rate_share"], Missing)


def test_time_in_copy_calls_is_of_the_launching_threads_in_the_window() -> None:
    recorder = training()
    for step in range(4):
        at = step * 1000 * US
        recorder.call(at + 400 * US, at + 600 * US, "cudaMemcpyAsync")  # 100 us with the device idle
        recorder.call(at + 100 * US, at + 300 * US, "cudaMemcpyAsync", thread=999)  # a thread that launches nothing
        recorder.call(at + 100 * US, at + 300 * US, "cudaMemcpyAsync", process=200, thread=200)
    recorder.call(4000 * US, 4900 * US, "cudaMemcpy")
    got = measured(recorder)
    assert (got["copy_api_time"].value, got["copy_api_idle"].value) == (200 * US, 100 * US)


def test_blocking_copies_are_synchronous_calls_of_more_than_64_kilobytes_and_their_idle_time_follows() -> None:
    recorder = training()
    for step in range(4):
        at = step * 1000 * US
        # waits from 600 for the kernel (to 900) and its own copy, returns at 940; the device is idle from 930
        recorder.call(at + 600 * US, at + 940 * US, "cudaMemcpy", correlation=step)
        recorder.copy(at + 900 * US, at + 930 * US, 100_000, CopyKind.D2H, MemKind.PAGEABLE, correlation=step)
        recorder.call(at + 950 * US, at + 952 * US, "cudaMemcpyAsync", correlation=10 + step)
        recorder.copy(at + 955 * US, at + 956 * US, 100_000, correlation=10 + step)
    got = measured(recorder)
    assert got["blocking_copies"].value == 1
    assert got["blocking_copy_idle"].value == 25 * US, "from 930 to the next work at 955"
    small = training()
    for step in range(4):
        small.call(step * 1000 * US, step * 1000 * US + 100 * US, "cudaMemcpy", correlation=step)
        small.copy(step * 1000 * US + 10 * US, step * 1000 * US + 20 * US, 64_000, correlation=step)
    assert measured(small)["blocking_copies"].value == 0


def test_without_api_calls_their_metrics_are_missing() -> None:
    recorder = Recorder()
    recorder.copy(0, 9, 8)
    got = measured(recorder)
    for name in ("copy_api_time", "copy_api_idle", "blocking_copies", "blocking_copy_idle"):
        assert isinstance(got[name], Missing)


def test_weights_that_come_back_each_step_are_reuploads() -> None:
    recorder = training()
    for layer in range(8):
        each_step(recorder, 10 * layer, 10 * layer + 10, 2 * MB)
    each_step(recorder, 90, 100, 3 * MB)  # the batch
    got = measured(recorder)
    assert (got["reupload_exposed"].value, got["reupload_bytes"].value) == (80 * US, 16 * MB)


@pytest.mark.parametrize("tensors", [1, 2, 3, 5])
def test_a_batch_of_equal_tensors_is_no_reupload(tensors: int) -> None:
    recorder = training()
    for tensor in range(tensors):
        each_step(recorder, 10 * tensor, 10 * tensor + 10, 2 * MB)
    got = measured(recorder)
    assert (got["reupload_exposed"].value, got["reupload_bytes"].value) == (0, 0)


def test_without_steps_reuploads_need_four_sizes() -> None:
    for sizes, wanted in ((3, 0), (4, 12 * 2)):
        recorder = Recorder()
        recorder.kernel(0, 10)
        for i in range(3):
            for size in range(sizes):
                recorder.copy(100 + 100 * i + 10 * size, 102 + 100 * i + 10 * size, 2 * MB + size)
        assert measured(recorder)["reupload_exposed"].value == wanted


def test_copies_and_fills_on_the_device() -> None:
    recorder = training()
    for step in range(4):
        at = step * 1000 * US
        recorder.copy(at, at + 10 * US, 10, CopyKind.D2D)
        recorder.kernel(at + 10 * US, at + 30 * US, "void at::native::elementwise_kernel<direct_copy_kernel_cuda>")
        recorder.memset(at + 30 * US, at + 34 * US)
        recorder.kernel(at + 40 * US, at + 45 * US, "vectorized_elementwise_kernel<4, FillFunctor<float>>")
        recorder.copy(at + 50 * US, at + 57 * US, 10, CopyKind.MANAGED)
    got = measured(recorder)
    wanted = {"device_copy_time": 30 * US, "memset_fill_time": 9 * US, "managed_time": 7 * US}
    assert {name: got[name].value for name in wanted} == wanted


def test_without_gpu_work_all_are_missing() -> None:
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    got = measured(recorder)
    assert all(isinstance(got[name], Missing) for name in NAMES)


def test_copies_of_another_device_do_not_count() -> None:
    recorder = training()
    each_step(recorder, 0, 100, MB, device=1)
    assert measured(recorder)["h2d_bytes"].value == 0


def test_a_copy_beside_a_collective_is_hidden() -> None:
    recorder = training()
    each_step(recorder, 0, 100, MB)
    for step in range(4):
        recorder.kernel(step * 1000 * US, step * 1000 * US + 60 * US, "ncclAllReduce", kind=Kind.COMM, stream=3)
    assert measured(recorder)["h2d_pinned_exposed"].value == 40 * US
