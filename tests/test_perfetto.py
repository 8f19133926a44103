"""The trace for ui.perfetto.dev: what the importer asks of a trace holds, and nothing of the recording is lost in it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Recorder

from gpudiag.diagnosis import Diagnosis
from gpudiag.perfetto import write_perfetto
from gpudiag.pipeline import diagnose_recordings
from gpudiag.read import Recordings, open_recordings
from gpudiag.read.kineto import read_kineto
from gpudiag.rules import load_rules
from gpudiag.scope import Scope, scopes_of
from gpudiag.timeline import Timeline

FILES = ("kineto/v100_resnet50_workers0.json.gz", "nsys/h100_2gpu_train_before.sqlite", "kineto/a100_nccl_2024.json.gz")


def exported(
    timelines: tuple[Timeline, ...], folder: Path, name: str = "trace.json"
) -> tuple[Any, list[Scope], Diagnosis]:
    scopes = [scope for timeline in timelines for scope in scopes_of(timeline)]
    diagnosis = diagnose_recordings(Recordings(timelines), load_rules())
    path = folder / name
    write_perfetto(timelines, [scope.account for scope in scopes], diagnosis, path)
    data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    return json.loads(data, parse_float=str), scopes, diagnosis


def ns(text: str) -> int:
    whole, _, fraction = str(text).partition(".")
    assert len(fraction) == 3, "three decimals of a us are one ns"
    return int(whole + fraction)


def slices(trace: Any) -> dict[tuple[int, int], list[tuple[int, int, dict[str, Any]]]]:
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["dur"]), event))
    return tracks


def track_names(trace: Any) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "thread_name"
    }


@pytest.mark.parametrize("file", FILES)
def test_slices_of_a_track_nest_and_every_track_and_process_has_a_name(traces: Path, tmp_path: Path, file: str) -> None:
    trace, _, _ = exported(open_recordings([traces / file]).timelines, tmp_path)
    named = track_names(trace)
    processes = {event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    for (pid, tid), events in slices(trace).items():
        assert (pid, tid) in named and pid in processes
        ends: list[int] = []
        for start, length, event in sorted(events, key=lambda e: (e[0], -e[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start + length <= ends[-1], event
            ends.append(start + length)


@pytest.mark.parametrize("file", FILES)
def test_the_owners_track_holds_the_account_to_the_ns(traces: Path, tmp_path: Path, file: str) -> None:
    trace, scopes, _ = exported(open_recordings([traces / file]).timelines, tmp_path)
    named = track_names(trace)
    owners = [events for track, events in slices(trace).items() if named[track].endswith("who owns the time")]
    assert [sum(length for _, length, _ in events) for events in owners] == [scope.account.total for scope in scopes]


def test_every_operation_operator_range_and_call_is_in_the_trace_once(traces: Path, tmp_path: Path) -> None:
    timeline = open_recordings([traces / FILES[0]]).timelines[0]
    trace, _, _ = exported((timeline,), tmp_path)
    count: dict[str, int] = defaultdict(int)
    for events in slices(trace).values():
        for _, _, event in events:
            count[event["cat"]] += 1
    tables = (timeline.ranges, timeline.cpu_ops, timeline.api_calls, timeline.gpu_ops)
    ranges, operators, calls, ops = (0 if table is None else len(table) for table in tables)
    assert min(ranges, operators, calls, ops) > 0
    assert (count["user_annotation"], count["cpu_op"], count["cuda_runtime"]) == (ranges, operators, calls)
    assert count["kernel"] + count["gpu_memcpy"] + count["gpu_memset"] == ops


@pytest.mark.parametrize("file", FILES)
def test_our_own_torch_reader_finds_the_same_gpu_work_in_it(traces: Path, tmp_path: Path, file: str) -> None:
    before = open_recordings([traces / file]).timelines[0]
    exported((before,), tmp_path)
    after = read_kineto(tmp_path / "trace.json")
    assert before.gpu_ops is not None and after.gpu_ops is not None
    for device in np.unique(before.gpu_ops.device):
        one, two = (ops.take(ops.device == device) for ops in (before.gpu_ops, after.gpu_ops))
        shift = int(one.start.min() - two.start.min())
        rows = [
            sorted(zip(t.start + more, t.end + more, t.stream, strict=True)) for t, more in ((one, 0), (two, shift))
        ]
        assert rows[0] == rows[1]


@pytest.mark.parametrize("file", [FILES[0], FILES[2]])
def test_the_account_of_a_torch_trace_is_the_same_when_its_export_is_read_again(
    traces: Path, tmp_path: Path, file: str
) -> None:
    _, scopes, _ = exported(open_recordings([traces / file]).timelines, tmp_path)
    (again,) = scopes_of(read_kineto(tmp_path / "trace.json"))
    assert again.account.parts == scopes[0].account.parts


def test_findings_lie_where_the_time_that_they_are_about_lies(traces: Path, tmp_path: Path) -> None:
    trace, scopes, diagnosis = exported(open_recordings([traces / FILES[0]]).timelines, tmp_path)
    first = diagnosis.findings[0]
    named = track_names(trace)
    mine = next(events for track, events in slices(trace).items() if named[track].startswith("finding 1: "))
    assert sum(length for _, length, _ in mine) == scopes[0].account.parts["idle.input"]
    assert mine[0][2]["args"]["rule"] == first.rule and first.fixes[0].change in mine[0][2]["args"].values()


def test_the_queue_counter_rises_at_a_launch_and_falls_when_the_work_begins(tmp_path: Path) -> None:
    recorder = Recorder()
    for i in range(3):  # three launches at 0, 10, 20; the kernels begin at 100, 200, 300
        recorder.call(10 * i, 10 * i + 5, correlation=i + 1)
        recorder.kernel(100 * (i + 1), 100 * (i + 1) + 50, correlation=i + 1)
    trace, _, _ = exported((recorder.timeline(),), tmp_path)
    counted = [(ns(e["ts"]), e["args"]["value"]) for e in trace["traceEvents"] if e["ph"] == "C"]
    assert counted == [(0, 1), (10, 2), (20, 3), (100, 2), (200, 1), (300, 0)]


def test_kernels_that_overlap_on_one_stream_go_to_a_track_of_their_own(tmp_path: Path) -> None:
    recorder = Recorder()
    for start, end in ((0, 100), (50, 150), (120, 200)):
        recorder.kernel(start, end)
    trace, _, _ = exported((recorder.timeline(),), tmp_path)
    named = track_names(trace)
    tracks = {named[k]: [(s, d) for s, d, _ in v] for k, v in slices(trace).items() if named[k].startswith("stream")}
    assert tracks == {"stream 7": [(0, 100), (120, 80)], "stream 7 (2)": [(50, 100)]}


def test_gzip_and_hostile_names(tmp_path: Path) -> None:
    recorder = Recorder()
    for i, name in enumerate(('"},{"ph":"X', "</script>", "\u202eevil", "lone \udcff", "k" * 10_000, "\n\x00")):
        recorder.kernel(100 * i, 100 * i + 50, name)
    trace, _, _ = exported((recorder.timeline(),), tmp_path, "trace.json.gz")
    names = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "kernel"]
    assert len(names) == 6 and names[0] == '"},{"ph":"X' and max(map(len, names)) <= 2_000
    again = (tmp_path / "trace.json.gz").read_bytes()
    exported((recorder.timeline(),), tmp_path, "trace.json.gz")
    assert (tmp_path / "trace.json.gz").read_bytes() == again  # same recording, same bytes
