"""Broken, cut and foreign files: the Kineto reader saves what is readable, counts the rest, and never shows a traceback."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest
from builders_kineto import KinetoTrace

from gpudiag.errors import GpudiagError
from gpudiag.read.kineto import read_kineto, sniff_json
from gpudiag.timeline import Timeline


def _trace(kernels: int = 20) -> KinetoTrace:
    trace = KinetoTrace()
    for i in range(kernels):
        trace.call("cudaLaunchKernel", 10_000 * i + 1, 100, correlation=i).kernel(
            f"k{i}", 10_000 * i + 500, 1000, correlation=i
        )
    return trace


def _read(tmp_path: Path, data: bytes | str, name: str = "t.json") -> Timeline:
    path = tmp_path / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_kineto(path)


def _kernels(timeline: Timeline) -> list[str]:
    assert timeline.gpu_ops is not None
    return [timeline.strings[code] for code in timeline.gpu_ops.name]


def _repairs(timeline: Timeline) -> dict[str, int]:
    return {repair.what: repair.count for repair in timeline.repairs}


@pytest.mark.parametrize(
    ("broken", "read_as"),
    [
        ('say "hi" (x)', 'say "hi" (x)'),
        (r"C:\Users\new", None),
        ("two\nlines", "two lines"),
        ("bell\x07", "bell "),
        (r"half\u12", r"half\u12"),
        (r"fine\\Users \q", r"fine\Users \q"),
    ],
)
def test_a_name_with_broken_escapes_keeps_its_event(tmp_path: Path, broken: str, read_as: str | None) -> None:
    text = _trace().text().replace('"k7"', f'"{broken}"')
    names = _kernels(timeline := _read(tmp_path, text))
    assert len(names) == 20
    assert read_as is None or names[7] == read_as
    assert names[:7] + names[8:] == [f"k{i}" for i in range(20) if i != 7]
    assert _repairs(timeline) == {"events with broken escapes or numbers": 1}


def test_bytes_that_are_not_utf8_cost_no_event_and_are_counted(tmp_path: Path) -> None:
    data = _trace().text().encode().replace(b'"k7"', b'"k\xff\xfe7"').replace(b'"k9"', b'"\xc3("')
    timeline = _read(tmp_path, data)
    assert len(_kernels(timeline)) == 20
    assert _repairs(timeline) == {"events with bytes that are not UTF-8": 2}


@pytest.mark.parametrize("number", ["nan", "NaN", "-Infinity", "inf"])
def test_numbers_that_json_does_not_know_cost_no_event(tmp_path: Path, number: str) -> None:
    text = _trace().kernel("odd", 900_000, 50, **{"est._achieved_occupancy_%": 12345}).text().replace("12345", number)
    assert _kernels(_read(tmp_path, text))[-1] == "odd"


def test_an_event_without_a_usable_time_is_left_out_and_counted(tmp_path: Path) -> None:
    trace = _trace()
    for ts, dur in (
        ("0.000", "0.000"),
        ("null", "1.000"),
        ('"soon"', "1.000"),
        ("NaN", "1.0"),
        ("1e40", "1.0"),
        ("5.0", "null"),
    ):
        trace.raw(f'{{"ph": "X", "cat": "kernel", "name": "bad", "pid": 0, "tid": 7, "ts": {ts}, "dur": {dur}}}')
    timeline = _read(tmp_path, trace.text())
    assert len(_kernels(timeline)) == 20
    assert _repairs(timeline)["events without a time (ts 0)"] == 1
    assert _repairs(timeline)["events whose time or length is no number"] == 5


def test_a_negative_length_is_taken_as_none_and_counted(tmp_path: Path) -> None:
    trace = _trace().raw('{"ph": "X", "cat": "kernel", "name": "neg", "pid": 0, "tid": 7, "ts": 900.5, "dur": -3.2}')
    timeline = _read(tmp_path, trace.text())
    ops = timeline.gpu_ops
    assert ops is not None and (ops.start[-1], ops.end[-1]) == (900_500, 900_500)
    assert _repairs(timeline) == {"events of negative length, taken as 0": 1}


@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "X", "cat": 7, "name": ["k"], "pid": 0, "tid": 7, "ts": 9, "dur": 1}',
        '{"ph": "X", "cat": "kernel", "name": null, "ts": 9, "dur": 1, "args": [1, 2]}',
        '"text instead of an event"',
        "[[[]]]",
        "null",
        '{"no": "phase"}',
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": 9, "dur": 1, "args": {"device": 1e300, "grid": "big"}}',
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": 9, "dur": 1, "args": {"device": 99999999999999999999999}}',
        '{"ph": "X", "cat": "cpu_op", "name": "deep", "ts": 9, "dur": 1, "args": {"x": '
        + "[" * 50_000
        + "]" * 50_000
        + "}}",
        '{"ph": "X", "cat": "cpu_op", "name": "open", "ts": 9, "dur": 1, "args": {"x": ' + "[" * 200_000 + "}}",
    ],
)
def test_an_event_of_the_wrong_shape_costs_only_itself(tmp_path: Path, event: str) -> None:
    trace = _trace()
    trace.events.insert(7, event)
    timeline = _read(tmp_path, trace.text())
    assert [name for name in _kernels(timeline) if re.fullmatch(r"k\d+", name)] == [f"k{i}" for i in range(20)]


def test_a_file_cut_anywhere_gives_its_events_up_to_there(tmp_path: Path) -> None:
    data = _trace(10).text().encode()
    first = data.index(b'"k0"') + 200
    seen = []
    for end in range(first, len(data) - 4, 37):
        timeline = _read(tmp_path, data[:end])
        seen.append(len(_kernels(timeline)))
        if end < data.index(b"],\n"):
            assert any("incomplete" in text for text in timeline.warnings)
    assert seen == sorted(seen) and seen[-1] == 10


def test_a_gzip_cut_or_damaged_gives_its_events_up_to_there(tmp_path: Path) -> None:
    random.seed(1)
    trace = _trace(0)
    for i in range(6000):
        trace.kernel(f"k{random.random()}", 10_000 * i + 1, 1000)
    packed = gzip.compress(trace.text().encode())
    cut = _read(tmp_path, packed[: len(packed) // 2])
    assert 2000 < len(_kernels(cut)) < 4000
    assert "ends early" in cut.incomplete
    middle = len(packed) // 2
    hurt = _read(tmp_path, packed[:middle] + b"\xff" * 64 + packed[middle + 64 :])
    assert "damaged" in hurt.incomplete


def test_a_gzip_that_unpacks_a_thousandfold_is_read_to_its_end(tmp_path: Path) -> None:
    text = _trace().text().replace("\n  {", " " * 400_000 + "\n  {")
    timeline = _read(tmp_path, gzip.compress(text.encode()))
    assert len(_kernels(timeline)) == 20
    assert timeline.warnings == () and timeline.repairs == ()


def test_a_time_from_before_the_base_is_no_time(tmp_path: Path) -> None:
    """Kineto writes such times as 0; taken as recorded, they would stretch the span by days."""
    trace = KinetoTrace().kernel("early", 0, 5_000)
    for i in range(3):
        trace.kernel("k", 4_458_676_522_690_655 + 10_000 * i, 1000)
    timeline = _read(tmp_path, trace.text())
    assert _kernels(timeline) == ["k"] * 3
    assert _repairs(timeline) == {"events without a time (ts 0)": 1}


def test_what_a_file_is_does_not_depend_on_its_name(tmp_path: Path) -> None:
    text = _trace().text()
    for name, data in {
        "a.json": gzip.compress(text.encode()),
        "b.gz": text.encode(),
        "c": b"\xef\xbb\xbf" + text.encode(),
    }.items():
        assert len(_kernels(_read(tmp_path, data, name))) == 20
        assert sniff_json(tmp_path / name) == "kineto"
    several = gzip.compress(text[:500].encode()) + gzip.compress(text[500:].encode()) + b"\0" * 512
    assert len(_kernels(_read(tmp_path, several))) == 20


def test_a_bare_list_and_other_layouts_are_read(tmp_path: Path) -> None:
    whole = json.loads(_trace().text())
    for data in (
        json.dumps(whole["traceEvents"]),
        json.dumps(whole, separators=(",", ":")),
        json.dumps(whole, sort_keys=True, indent=2),
        json.dumps(
            {"traceEvents": whole["traceEvents"], "distributedInfo": {"rank": 3, "world_size": 8, "backend": "nccl"}}
        ),
        json.dumps(whole).replace("}]", "}, ]"),
    ):
        timeline = _read(tmp_path, data)
        assert _kernels(timeline) == [f"k{i}" for i in range(20)], data[:80]
        assert timeline.repairs == ()
        assert sniff_json(tmp_path / "t.json") == "kineto"
        assert timeline.rank == (3 if "distributedInfo" in data else 0)


def test_damage_round_the_events_loses_no_more_than_itself(tmp_path: Path) -> None:
    text = (
        _trace()
        .text()
        .replace(
            '"schemaVersion": 1,',
            '"schemaVersion": 1, "distributedInfo": {"rank": 2, "world_size": 4}, "host": "a "b"",',
        )
    )
    timeline = _read(tmp_path, text)
    assert len(_kernels(timeline)) == 20 and timeline.devices[0].name == "NVIDIA T4"
    assert (timeline.rank, timeline.world_size) == (2, 4)
    assert any("description" in text for text in timeline.warnings)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"   ",
        b"not json",
        b"{}",
        b"[]",
        b"[1, 2]",
        b"\x1f\x8b",
        b"\x1f\x8bgarbage of no gzip",
        b'{"traceEvents": []}',
        b'{"traceEvents": 7}',
        b'{"traceEvents": [',
        b'{"traceEvents": [{"ph": "X", "cat": "renderer", "name": "a", "ts": 1, "dur": 1}]}',
        b'{"schema": "gpudiag.diagnosis/1"}',
        b"PK\x03\x04 zip",
        '{"traceEvents": []}'.encode("utf-16"),
        b'{"a":' + b"[" * 100_000,
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_a_next_step(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(GpudiagError) as caught:
        _read(tmp_path, data)
    assert str(tmp_path) in caught.value.message and caught.value.hint


def test_what_cannot_be_opened_is_refused_with_a_next_step(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(GpudiagError) as caught:
            read_kineto(path)
        assert caught.value.hint


def test_a_diagnosis_and_other_json_are_no_traces(tmp_path: Path) -> None:
    kinds = {
        '{"schema": "gpudiag.diagnosis/1", "views": {"traceEvents": []}}': "diagnosis",
        '{"gpudiag": "0.1.0", "schema" : "gpudiag.diagnosis/1"}': "diagnosis",
        '{"name": "package", "version": 1}': "other",
        '[{"id": 1}]': "other",
        "": "other",
        "\x00\x01": "other",
        '{"traceEvents": [{"name": "\\"schema\\": \\"gpudiag.diagnosis/\\""}]}': "kineto",
    }
    for text, kind in kinds.items():
        (tmp_path / "f.json").write_text(text)
        assert sniff_json(tmp_path / "f.json") == kind, text
