"""The account: every nanosecond has one owner, the owner is the right one, and the parts sum to the window."""

from __future__ import annotations

import numpy as np
from builders import Recorder
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.account import DEVICE_PARTS
from gpudiag.scope import Scope, scopes_of
from gpudiag.timeline import CopyKind, Kind, MemKind

US = 1_000


def scope_of(recorder: Recorder) -> Scope:
    (scope,) = scopes_of(recorder.timeline())
    return scope


def parts(recorder: Recorder) -> dict[str, int]:
    return scope_of(recorder).parts


spans = st.tuples(st.integers(0, 300), st.integers(0, 40))


@settings(max_examples=200)
@given(
    kernels=st.lists(st.tuples(spans, st.sampled_from([Kind.KERNEL, Kind.COMM, Kind.GRAPH]), st.integers(0, 2)), min_size=1, max_size=15),
    copies=st.lists(st.tuples(spans, st.sampled_from(list(CopyKind))), max_size=8),
    calls=st.lists(st.tuples(spans, st.sampled_from(["cudaLaunchKernel", "cudaDeviceSynchronize", "cudaMalloc", "cuModuleLoadData"])), max_size=12),
    marks=st.lists(st.tuples(spans, st.sampled_from(["gpudiag::data_wait", "gpudiag::checkpoint", "gpudiag::gc", "step 1", "other"])), max_size=8),
    operators=st.lists(spans, max_size=8),
)  # fmt: skip
def test_each_nanosecond_of_random_timelines_has_one_owner_as_a_bitmap_says(
    kernels, copies, calls, marks, operators
) -> None:
    recorder = Recorder()
    for (start, length), kind, stream in kernels:
        recorder.kernel(start, start + length, kind=kind, stream=stream)
    for (start, length), kind in copies:
        recorder.copy(start, start + length, 10, kind)
    for (start, length), name in calls:
        recorder.call(start, start + length, name)
    for (start, length), name in marks:
        recorder.mark(start, start + length, name)
    for start, length in operators:
        recorder.operator(start, start + length, "aten::add")
    account = scope_of(recorder).account
    window = account.window
    assert sum(account.parts.values()) == account.total == window.total()
    if len(window):
        starts, ends, _ = account.segments(int(window.start[0]), int(window.end[-1]))
        assert np.array_equal(starts[1:], ends[:-1]), "segments leave holes or overlap"
        assert (starts[0], ends[-1]) == (window.start[0], window.end[-1])
    low, high = (int(window.start[0]), int(window.end[-1])) if len(window) else (0, 0)

    def bitmap(rows: list[tuple[int, int]]) -> np.ndarray:
        bits = np.zeros(max(0, high - low), bool)
        for start, end in rows:
            bits[max(0, start - low) : max(0, end - low)] = True
        return bits

    compute = bitmap([(s, s + n) for (s, n), kind, _ in kernels if kind != Kind.COMM])
    comm = bitmap([(s, s + n) for (s, n), kind, _ in kernels if kind == Kind.COMM])
    copied = bitmap([(s, s + n) for (s, n), _ in copies])
    owned = account.parts
    assert owned.get("compute", 0) == compute.sum()
    assert owned.get("communication_exposed", 0) == (comm & ~compute).sum()
    assert sum(ns for part, ns in owned.items() if part.startswith("copy_exposed")) == (copied & ~comm & ~compute).sum()
    assert set(owned) <= set(DEVICE_PARTS)


def test_time_in_the_loader_counts_only_where_the_device_is_idle_under_it() -> None:
    recorder = Recorder()
    recorder.kernel(0, 100 * US)
    recorder.mark(20 * US, 180 * US, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    recorder.kernel(200 * US, 300 * US)
    assert parts(recorder)["idle.input"] == 80 * US


def test_a_wait_hidden_by_queued_work_costs_nothing() -> None:
    recorder = Recorder()
    recorder.kernel(0, 100 * US)
    recorder.mark(0, 80 * US, "gpudiag::data_wait")
    recorder.call(10 * US, 90 * US, "cudaStreamSynchronize")
    recorder.kernel(100 * US, 200 * US)
    assert parts(recorder) == {"compute": 200 * US}


def test_the_gap_after_a_wait_is_the_waits_up_to_its_own_length() -> None:
    recorder = Recorder()
    recorder.call(0, 5 * US, correlation=1)
    recorder.kernel(10 * US, 40 * US, correlation=1)
    recorder.call(20 * US, 45 * US, "cudaDeviceSynchronize")  # waits 20 us under the kernel, returns 5 us after it
    recorder.call(170 * US, 175 * US, correlation=2)
    recorder.kernel(180 * US, 200 * US, correlation=2)
    got = parts(recorder)
    assert got["idle.sync"] == 25 * US, "without the call the host would have been 25 us earlier, not more"
    assert sum(ns for part, ns in got.items() if part.startswith("idle.")) == 140 * US


def test_a_sync_on_an_idle_device_is_no_bubble() -> None:
    recorder = Recorder()
    recorder.call(0, 5 * US, correlation=1)
    recorder.kernel(10 * US, 20 * US, correlation=1)
    recorder.call(50 * US, 52 * US, "cudaDeviceSynchronize")
    recorder.call(60 * US, 65 * US, correlation=2)
    recorder.kernel(70 * US, 80 * US, correlation=2)
    assert "idle.sync" not in parts(recorder)


def test_a_wait_during_which_only_copies_run_belongs_to_the_copies() -> None:
    recorder = Recorder()
    recorder.call(0, 5 * US, "cudaMemcpyAsync", correlation=1)
    recorder.copy(10 * US, 110 * US, 1_000_000, correlation=1)
    recorder.call(12 * US, 111 * US, "cudaStreamSynchronize")
    recorder.call(140 * US, 145 * US, correlation=2)
    recorder.kernel(150 * US, 200 * US, correlation=2)
    got = parts(recorder)
    assert got["copy_exposed.h2d"] == 100 * US
    assert got.get("idle.sync", 0) == 1 * US, "only the call's return after the copy is the wait's own"


def test_a_blocking_readback_is_a_wait() -> None:
    recorder = Recorder()
    recorder.call(0, 5 * US, correlation=1)
    recorder.kernel(10 * US, 110 * US, correlation=1)
    recorder.call(20 * US, 115 * US, "cudaMemcpyAsync", correlation=2)
    recorder.copy(110 * US, 112 * US, 4, CopyKind.D2H, MemKind.PAGEABLE, correlation=2)
    recorder.call(150 * US, 155 * US, correlation=3)
    recorder.kernel(160 * US, 200 * US, correlation=3)
    assert parts(recorder)["idle.sync"] == 48 * US


def test_work_before_the_first_recorded_operation_is_not_called_idle_for_a_reason() -> None:
    recorder = Recorder()
    for step in range(4):
        at = step * 1000 * US
        recorder.mark(at, at + 1000 * US, f"ProfilerStep#{step}")
        recorder.mark(at, at + 400 * US, "gpudiag::data_wait")
        recorder.kernel(at + 400 * US, at + 1000 * US)
    got = parts(recorder)
    assert got["idle.unknown"] == 400 * US, "the first step may still run work that was launched before the recording"
    assert got["idle.input"] == 3 * 400 * US


def test_each_device_is_accounted_by_the_threads_that_feed_it() -> None:
    recorder = Recorder()
    for device, thread in ((0, 1), (1, 2)):
        recorder.call(0, 5 * US, correlation=10 + device, thread=thread)
        recorder.kernel(10 * US, 100 * US, device=device, correlation=10 + device)
        recorder.call(300 * US, 305 * US, correlation=20 + device, thread=thread)
        recorder.kernel(310 * US, 400 * US, device=device, correlation=20 + device)
    recorder.call(50 * US, 250 * US, "cudaDeviceSynchronize", thread=2)
    first, second = scopes_of(recorder.timeline())
    assert "idle.sync" not in first.parts
    assert second.parts["idle.sync"] == 200 * US


def test_steps_of_an_account_sum_to_it() -> None:
    recorder = Recorder()
    for step in range(6):
        recorder.mark(step * 100 * US, (step + 1) * 100 * US, f"ProfilerStep#{step}")
        recorder.kernel(step * 100 * US + 10 * US, step * 100 * US + (50 + step) * US)
    account = scope_of(recorder).account
    total: dict[str, int] = {}
    for step in account.per_step:
        for part, ns in step.items():
            total[part] = total.get(part, 0) + ns
    assert total == account.parts


def test_evaluation_is_kept_out_of_the_window() -> None:
    recorder = Recorder()
    for step in range(5):
        recorder.mark(step * 100 * US, (step + 1) * 100 * US, f"ProfilerStep#{step}")
        recorder.kernel(step * 100 * US, step * 100 * US + 90 * US)
    recorder.mark(230 * US, 290 * US, "validation")
    assert scope_of(recorder).account.total == 500 * US - 60 * US


def test_of_nested_phases_the_inner_one_counts() -> None:
    """Step 0..3: the optimizer runs both passes in a closure (LBFGS, Lightning), and one steps inside the backward pass."""
    recorder = Recorder()
    for step in range(4):
        at = step * 100 * US
        recorder.mark(at, at + 100 * US, "gpudiag::step", index=step)
        recorder.mark(at, at + 60 * US, "gpudiag::optimizer")
        recorder.mark(at + 5 * US, at + 25 * US, "gpudiag::forward")
        recorder.mark(at + 25 * US, at + 55 * US, "gpudiag::backward")
        recorder.mark(at + 60 * US, at + 100 * US, "gpudiag::backward")
        recorder.mark(at + 70 * US, at + 80 * US, "gpudiag::optimizer")
    assert scope_of(recorder).parts == {
        "host.forward": 4 * 20 * US,
        "host.backward": 4 * (30 + 30) * US,
        "host.optimizer": 4 * (10 + 10) * US,
    }


def test_a_run_without_gpu_work_gets_a_host_account_of_its_phases() -> None:
    recorder = Recorder()
    for step in range(4):
        at = step * 100 * US
        recorder.mark(at, at + 100 * US, "gpudiag::step", index=step)
        recorder.mark(at, at + 30 * US, "gpudiag::data_wait")
        recorder.mark(at + 30 * US, at + 50 * US, "gpudiag::forward")
        recorder.mark(at + 50 * US, at + 80 * US, "gpudiag::backward")
        recorder.mark(at + 80 * US, at + 95 * US, "gpudiag::optimizer")
    scope = scope_of(recorder)
    assert scope.device == -1
    assert scope.parts == {
        "host.input": 120 * US,
        "host.forward": 80 * US,
        "host.backward": 120 * US,
        "host.optimizer": 60 * US,
        "host.other": 20 * US,
    }


def test_what_another_thread_does_in_the_background_is_no_phase_of_the_step() -> None:
    recorder = Recorder()
    for step in range(4):
        at = step * 100 * US
        recorder.mark(at, at + 100 * US, "gpudiag::step", index=step)
        recorder.mark(at, at + 60 * US, "gpudiag::forward")
        recorder.mark(at + 10 * US, at + 90 * US, "gpudiag::checkpoint", thread=7)
        recorder.mark(at + 60 * US, at + 90 * US, "autograd::engine::evaluate_function: AddmmBackward0", thread=8)
    assert scope_of(recorder).parts == {"host.forward": 240 * US, "host.backward": 120 * US, "host.other": 40 * US}
