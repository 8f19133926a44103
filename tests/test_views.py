"""The pictures: which steps are shown, what lies in the lanes, and how they stay small."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from builders import Recorder
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.diagnosis import Lane, TimelineView, from_json, to_json
from gpudiag.pipeline import diagnose
from gpudiag.read import open_recordings
from gpudiag.scope import scopes_of
from gpudiag.timeline import Kind, LoaderBatches, Timeline
from gpudiag.views import MAX_EVENTS, make_views

FILES = (
    "kineto/v100_resnet50_workers0.json.gz",
    "kineto/b200_eager_8rank_rank.json.gz",
    "kineto/cpu_only.json.gz",
    "nsys/h100_2gpu_streamed_weights.sqlite",
    "nsys/a100_sync_after_each_kernel.sqlite",
)


def views_of(timeline: Timeline, **options: int) -> tuple[TimelineView, ...]:
    return make_views(timeline, next(iter(scopes_of(timeline))).account, **options)


def training(lengths: list[int], kernels: int = 1) -> Recorder:
    """Steps of these lengths one after the other; in each, `kernels` kernels fill the middle half."""
    recorder, at = Recorder(), 0
    for i, length in enumerate(lengths):
        recorder.mark(at, at + length, f"gpudiag::step#{i}", index=i)
        slot = length // 2 // kernels
        for k in range(kernels):
            start = at + length // 4 + k * slot
            recorder.kernel(start, start + slot // 2, f"kernel_{k % 3}")
        at += length
    return recorder


def lanes(view: TimelineView) -> dict[str, Lane]:
    return {lane.label: lane for lane in view.lanes}


def events(view: TimelineView, label: str) -> list[tuple[int, int, str]]:
    lane = lanes(view)[label]
    return [(s, s + d, view.names[n]) for s, d, n in zip(lane.start_ns, lane.length_ns, lane.name, strict=True)]


def test_the_step_nearest_the_median_and_the_longest_are_shown() -> None:
    typical, longest = views_of(training([900, 1000, 1010, 1100, 1300]).timeline())
    assert typical.title == "Typical step, number 2: 1.01 us"
    assert (typical.start_ns, typical.end_ns) == (1900, 2910)
    assert longest.title == "Longest step, number 4: 1.30 us"


def test_a_step_that_is_owned_oddly_is_not_the_typical_one_though_its_length_is() -> None:
    recorder = training([1000, 1000, 1000, 1000, 1000])
    recorder.kernel(10, 990, "odd")  # step 0 has the median length and computes all the time
    (view, *_) = views_of(recorder.timeline())
    assert "number 1" in view.title


def test_steps_of_one_length_give_one_picture_where_typical_and_longest_are_the_same() -> None:
    assert len(views_of(training([1000] * 5).timeline())) == 1


def test_without_steps_the_whole_span_is_shown() -> None:
    recorder = Recorder()
    recorder.kernel(100, 200)
    recorder.kernel(700, 900)
    (view,) = views_of(recorder.timeline())
    assert view.title == "The whole recording" and (view.start_ns, view.end_ns) == (100, 900)
    assert events(view, "Stream 7: kernels") == [(0, 100, "kernel"), (600, 800, "kernel")]


def test_lanes_hold_ranges_operators_calls_loader_kernels_collectives_and_copies() -> None:
    recorder = training([1000, 900, 900, 900])
    recorder.mark(0, 250, "gpudiag::data_wait")
    recorder.operator(250, 600, "aten::conv2d")
    recorder.operator(260, 500, "aten::convolution")
    recorder.call(300, 320, "cudaLaunchKernel", correlation=1)
    recorder.kernel(800, 900, "ncclDevKernel_AllReduce", kind=Kind.COMM, stream=20)
    recorder.copy(100, 150, 4096)
    zero, none = np.zeros(1, np.int64), np.full(1, -1, np.int64)
    waits = {
        "start": zero + 5,
        "end": zero + 240,
        "fetch_start": zero - 300,
        "fetch_end": zero + 230,
        "worker": zero + 1,
    }
    columns = {name: waits.get(name, none) for name in LoaderBatches.__dataclass_fields__}
    view = views_of(recorder.timeline(loader=LoaderBatches(**columns)))[-1]
    assert [lane.kind for lane in view.lanes] == sorted(
        (lane.kind for lane in view.lanes),
        key=["owner", "range", "loader", "host", "launch", "stream", "copy", "comm"].index,
    )
    assert events(view, "Ranges") == [(0, 1000, "gpudiag::step#0")]
    assert events(view, "Ranges, level 2") == [(0, 250, "gpudiag::data_wait")]
    assert events(view, "Waits for the loader") == [(5, 240, "wait for the next batch")]
    assert events(view, "Loader worker 1") == [(0, 230, "fetch a batch")]  # cut at the view's edge
    assert events(view, "Main thread") == [(250, 600, "aten::conv2d")]
    assert events(view, "Main thread, inside") == [(260, 500, "aten::convolution")]
    assert events(view, "Main thread: CUDA calls") == [(300, 320, "cudaLaunchKernel")]
    assert events(view, "Stream 20: collectives") == [(800, 900, "ncclDevKernel_AllReduce")]
    assert events(view, "Stream 7: copies") == [(100, 150, "Memcpy H2D")]


def test_work_of_another_device_is_not_in_the_picture() -> None:
    recorder = training([1000, 900, 900, 900])
    recorder.kernel(10, 20, "elsewhere", device=1)
    for view in views_of(recorder.timeline()):
        assert "elsewhere" not in view.names


def test_short_neighbours_are_merged_under_the_name_that_fills_most_and_say_how_many_they_are() -> None:
    recorder = training([100_000, 90_000, 90_000, 90_000])
    for i in range(5_000):
        recorder.kernel(i * 10, i * 10 + (8 if i % 4 == 0 else 1), "big" if i % 4 == 0 else "small", stream=9)
    view = views_of(recorder.timeline(), max_events=1200)[-1]
    lane = lanes(view)["Stream 9: kernels"]
    assert lane.detail.startswith("merged ") and sum(lane.count) == 5_000
    assert {view.names[code] for code in lane.name} == {"big"}
    assert sum(len(each.start_ns) for each in view.lanes) <= 600
    assert lanes(view)["Stream 7: kernels"].detail == "exact"  # one long kernel stays what it is


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), min_size=1, max_size=200),
    st.integers(10, 400),
)
def test_merging_loses_no_event_and_no_time(pieces: list[tuple[int, int]], most: int) -> None:
    recorder, at = Recorder(), 0
    for gap, length in pieces:
        recorder.kernel(at + gap, at + gap + length, f"kernel {length}")
        at += gap + length
    recorder.kernel(at, at + 10)
    timeline = recorder.timeline()
    exact = views_of(timeline, max_events=10_000)[0]
    merged = views_of(timeline, max_events=most)[0]
    for one, two in zip(exact.lanes, merged.lanes, strict=True):
        assert (sum(two.count) if two.count else len(two.start_ns)) == len(one.start_ns)
        assert sum(two.length_ns) == sum(one.length_ns)
        ends = [s + d for s, d in zip(two.start_ns, two.length_ns, strict=True)]
        assert all(end <= start for end, start in zip(ends, two.start_ns[1:], strict=False))
    assert time_by_name(merged) == time_by_name(exact)  # the owners' times are those of the account, merged or not


def time_by_name(view: TimelineView) -> dict[str, int]:
    owner = view.lanes[0]
    total: dict[str, int] = {}
    for code, length in zip(owner.name, owner.length_ns, strict=True):
        total[view.names[code]] = total.get(view.names[code], 0) + length
    return total


def test_names_that_are_no_utf8_or_endless_become_short_text() -> None:
    recorder = training([1000, 900, 900, 900])
    recorder.kernel(10, 20, "bad \udcff" + "x" * 10_000)
    view = views_of(recorder.timeline())[-1]
    name = next(name for name in view.names if name.startswith("bad"))
    assert name.startswith("bad ?xxx") and len(name) <= 400
    msgspec.json.encode(view)


@pytest.mark.parametrize("file", FILES)
def test_the_owner_lane_of_a_real_recording_fills_the_picture_and_its_lanes_stay_inside(
    traces: Path, file: str
) -> None:
    for timeline in open_recordings([traces / file]).timelines:
        for view in views_of(timeline):
            span = view.end_ns - view.start_ns
            owner = view.lanes[0]
            assert owner.kind == "owner" and sum(owner.length_ns) == span
            account = next(s.account for s in scopes_of(timeline))
            if not len(account.steps):
                assert time_by_name(view) == account.parts
            assert sum(len(lane.start_ns) for lane in view.lanes) <= MAX_EVENTS
            for lane in view.lanes:
                assert all(s >= 0 and s + d <= span for s, d in zip(lane.start_ns, lane.length_ns, strict=True))
                assert list(lane.start_ns) == sorted(lane.start_ns)


@pytest.mark.parametrize("file", FILES[:2])
def test_the_diagnosis_of_a_real_recording_stays_under_two_megabytes_and_round_trips(traces: Path, file: str) -> None:
    diagnosis = diagnose([traces / file])
    data = to_json(diagnosis)
    assert len(data) < 2_000_000 and diagnosis.views
    assert from_json(data) == diagnosis
