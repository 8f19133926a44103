"""Replaying: unchanged it gives back the recording, edited it never saves more than what was there."""

from __future__ import annotations

import pytest
from builders import Recorder
from conftest import SHARED

from gpudiag.intervals import Intervals
from gpudiag.read import open_recordings
from gpudiag.replay import TOLERANCE, Edit, Graph, build, replay, trusted
from gpudiag.scope import Scope, scopes_of
from gpudiag.timeline import CopyKind, MemKind

US = 1_000
FILES = (
    "kineto/a100_ddp_overlap_control.json.gz",
    "kineto/a100_nccl_2024.json.gz",
    "kineto/h100_owlv2.json.gz",
    "kineto/v100_ns_resolution.json.gz",
    "kineto/v100_resnet50_workers0.json.gz",
    "kineto/v100_resnet50_workers4.json.gz",
    "nsys/a100_sync_after_each_kernel.sqlite",
    "nsys/h100_2gpu_train_before.sqlite",
)


def scope_of(recorder: Recorder) -> Scope:
    (scope,) = scopes_of(recorder.timeline())
    return scope


def graph_of(scope: Scope) -> Graph:
    graph = build(scope)
    assert isinstance(graph, Graph), graph
    return graph


@pytest.mark.parametrize("name", FILES)
def test_real_recordings_replay_to_their_own_length(name: str) -> None:
    path = SHARED / "traces" / name
    if not path.is_file():
        pytest.skip(f"no shared recordings at {SHARED} (set GPUDIAG_SHARED)")
    for scope in scopes_of(open_recordings([path]).timelines[0]):
        good, error = trusted(graph_of(scope))
        assert good, f"misses by {error:.2%}, {TOLERANCE:.0%} is allowed"


def loop(steps: int, *, host: int, device: int, wait: bool) -> Recorder:
    """Each step: `host` us of Python, a launch of 2 us, a kernel of `device` us, and, if asked, a wait for it."""
    recorder, now, free = Recorder(), 0, 0
    for step in range(steps):
        begin = now
        now += host * US
        recorder.call(now, now + 2 * US, correlation=step)
        start = max(now + 5 * US, free)
        free = start + device * US
        recorder.kernel(start, free, correlation=step)
        now += 2 * US
        if wait:
            recorder.call(now, free + 3 * US, "cudaDeviceSynchronize")
            now = free + 3 * US
        recorder.mark(begin, now, f"ProfilerStep#{step}")
    return recorder


@pytest.mark.parametrize(("host", "device"), [(100, 40), (40, 100), (70, 70)])
def test_without_its_wait_a_step_takes_the_longer_of_host_and_device(host: int, device: int) -> None:
    graph = graph_of(scope_of(loop(100, host=host, device=device, wait=True)))
    without = replay(graph, Edit(no_wait=graph.wait_for >= 0)) / 100
    assert without == pytest.approx(max(host + 2, device) * US, rel=0.05)


def test_removing_nothing_changes_nothing() -> None:
    graph = graph_of(scope_of(loop(20, host=50, device=50, wait=True)))
    assert replay(graph, Edit()) == replay(graph)


def test_a_pause_that_the_device_hides_saves_nothing() -> None:
    scope = scope_of(loop(20, host=20, device=100, wait=False))
    graph = graph_of(scope)
    everything = Intervals.single(graph.start, graph.end)
    assert replay(graph, Edit(drop=everything)) == pytest.approx(replay(graph), rel=0.02)


def test_dropping_a_pause_saves_it_where_the_device_waits() -> None:
    graph = graph_of(scope_of(loop(20, host=100, device=10, wait=True)))
    everything = Intervals.single(graph.start, graph.end)
    saved = replay(graph) - replay(graph, Edit(drop=everything))
    assert saved == pytest.approx(20 * 100 * US, rel=0.02)


def test_workers_cannot_deliver_faster_than_their_floor() -> None:
    graph = graph_of(scope_of(loop(20, host=100, device=10, wait=True)))
    everything = Intervals.single(graph.start, graph.end)
    assert replay(graph, Edit(drop=everything, floor_ns=20 * 60 * US)) == 20 * 60 * US


def test_copies_on_a_stream_of_their_own_hide_behind_kernels_but_not_behind_each_other() -> None:
    recorder, now = Recorder(), 0
    for step in range(10):
        begin = now
        recorder.call(now, now + 2 * US, "cudaMemcpyAsync", correlation=2 * step)
        recorder.copy(now + 5 * US, now + 65 * US, 1_000_000, CopyKind.H2D, MemKind.PINNED, correlation=2 * step)
        recorder.call(now + 3 * US, now + 5 * US, correlation=2 * step + 1)
        recorder.kernel(now + 65 * US, now + 105 * US, correlation=2 * step + 1)
        recorder.call(now + 6 * US, now + 106 * US, "cudaStreamSynchronize")
        now += 106 * US
        recorder.mark(begin, now, f"ProfilerStep#{step}")
    graph = graph_of(scope_of(recorder))
    overlapped = replay(graph, Edit(overlap_copies=True))
    assert overlapped < replay(graph)
    assert overlapped >= 10 * 60 * US


def test_a_recording_without_launches_is_not_replayed() -> None:
    recorder = Recorder()
    for i in range(100):
        recorder.kernel(i * 10 * US, i * 10 * US + 9 * US)
    assert isinstance(build(scope_of(recorder)), str)
