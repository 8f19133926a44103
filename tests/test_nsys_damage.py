"""Whatever is done to a recording, reading it ends in a timeline that holds together or in a GpudiagError.

GPUDIAG_FUZZ=5000 runs more cases than the few hundred of every day; a case is named by its number and repeats exactly.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import sqlite3
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from builders_nsys import NsysFile, global_tid

from gpudiag.errors import GpudiagError
from gpudiag.read.nsys_sqlite import is_nsys_sqlite, read_nsys_sqlite
from gpudiag.read.nvprof import is_nvprof_sqlite, read_nvprof
from gpudiag.timeline import Timeline

CASES = int(os.environ.get("GPUDIAG_FUZZ", "300"))
_ODD_VALUES: tuple[object, ...] = (
    None,
    0,
    -1,
    1,
    255,
    2**31,
    2**32 - 1,
    -(2**31) - 1,
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
    1e300,
    -0.5,
    float("inf"),
    "",
    "12",
    "text",
    "9" * 40,
    "caf\u00e9 <script>",
    b"\xff\xfe\x00",
    "x" * 5000,
)


def _sound(timeline: Timeline) -> None:
    """Columns of one length, sorted, ends after starts, codes that exist."""
    strings = len(timeline.strings)
    assert all(isinstance(text, str) for text in timeline.strings)
    for table in (timeline.gpu_ops, timeline.api_calls, timeline.ranges, timeline.cpu_ops, timeline.overheads):
        if table is None or not len(table):
            continue
        columns = {f.name: getattr(table, f.name) for f in fields(table)}
        assert {column.shape for column in columns.values()} == {(len(table),)}
        start, end = columns["start"], columns["end"]
        assert bool((start[1:] >= start[:-1]).all())
        assert bool((end[1:] >= end[:-1])[start[1:] == start[:-1]].all())
        assert bool((end >= start).all())
        for name in ("name", "domain"):
            if name in columns:
                assert int(columns[name].min()) >= 0 and int(columns[name].max()) < strings
        if "shapes" in columns:
            assert int(columns["shapes"].min()) >= -1 and int(columns["shapes"].max()) < strings


def _cut(data: bytearray, choose: random.Random) -> None:
    del data[choose.randrange(len(data)) :]


def _flip(data: bytearray, choose: random.Random) -> None:
    for _ in range(choose.choice((1, 3, 30, 300))):
        data[choose.randrange(len(data))] = choose.randrange(256)


def _flip_structure(data: bytearray, choose: random.Random) -> None:
    """Bytes in page headers and cell pointers, where damage reaches furthest."""
    size = int.from_bytes(data[16:18], "big") or 4096
    size = 65536 if size == 1 else size
    for _ in range(choose.choice((1, 5, 40))):
        page = choose.randrange(max(1, len(data) // size))
        at = page * size + choose.randrange(40) + (100 if page == 0 and choose.random() < 0.8 else 0)
        if at < len(data):
            data[at] = choose.choice((0, 1, 2, 5, 10, 13, 127, 128, 255, choose.randrange(256)))


def _move_pages(data: bytearray, choose: random.Random) -> None:
    size = 4096
    pages = len(data) // size
    for _ in range(choose.choice((1, 4))):
        a, b = choose.randrange(pages) * size, choose.randrange(pages) * size
        if choose.random() < 0.5:
            data[a : a + size] = bytes(size)
        else:
            data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


def _change_rows(path: Path, choose: random.Random) -> None:
    """Valid SQLite with contents that nobody expects."""
    db = sqlite3.connect(path, isolation_level=None)
    db.text_factory = bytes
    db.execute("PRAGMA journal_mode = OFF")
    tables = sorted(name.decode() for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'"))
    tables = [t for t in tables if not t.startswith(("ENUM_", "sqlite_")) or choose.random() < 0.1]
    for _ in range(choose.choice((1, 2, 6))):
        table = choose.choice(tables)
        with contextlib.suppress(sqlite3.Error):
            columns = [row[1].decode() for row in db.execute(f'PRAGMA table_info("{table}")')]
            if not columns:
                continue  # dropped before
            column = choose.choice(columns)
            what = choose.randrange(8)
            if what == 0:
                db.execute(f'DROP TABLE "{table}"')
            elif what == 1:
                db.execute(f'ALTER TABLE "{table}" RENAME COLUMN "{column}" TO "{column}_x"')
            elif what == 2:
                db.execute(f'ALTER TABLE "{table}" DROP COLUMN "{column}"')
            elif what == 3:
                db.execute(f'DELETE FROM "{table}"' + choose.choice(("", " WHERE rowid % 2", " WHERE rowid > 5")))
            elif what == 4:
                kind = choose.choice(("TEXT", "REAL", "BLOB", ""))
                body = ", ".join(
                    f'"{c}" {kind if c == column or choose.random() < 0.2 else "INTEGER"}' for c in columns
                )
                db.execute(
                    f"CREATE TABLE other ({body}{', PRIMARY KEY (' + chr(34) + columns[0] + chr(34) + ')) WITHOUT ROWID' if choose.random() < 0.2 else ')'}"
                )
                db.execute(f'INSERT OR IGNORE INTO other SELECT * FROM "{table}"')
                db.execute(f'DROP TABLE "{table}"')
                db.execute(f'ALTER TABLE other RENAME TO "{table}"')
            elif what == 5:
                db.execute(f'UPDATE "{table}" SET "{column}" = ?', (choose.choice(_ODD_VALUES),))
            elif what == 6:
                db.execute(f'UPDATE "{table}" SET "{column}" = ? WHERE rowid % 7 = 3', (choose.choice(_ODD_VALUES),))
            else:
                other = choose.choice(columns)
                db.execute(f'UPDATE "{table}" SET "{column}" = "{other}", "{other}" = "{column}"')
    db.close()


def _read_damaged(source: bytes, path: Path, number: int, reader: Callable[[Path], Timeline]) -> Timeline | None:
    choose = random.Random(number)
    data = bytearray(source)
    way = choose.choice((_cut, _flip, _flip_structure, _flip_structure, _move_pages, None, None, None))
    if way:
        way(data, choose)
    path.write_bytes(data)
    if way is None:
        _change_rows(path, choose)
    try:
        timeline = reader(path)
    except GpudiagError as error:
        assert error.message and error.hint
        return None
    _sound(timeline)
    return timeline


def _built(path: Path) -> Path:
    """Like the real ones but with every table in it."""
    file = NsysFile(path, "2025.5.2.266")
    for at in range(600):
        file.api(at * 100, at * 100 + 9, "cudaLaunchKernel_v7000", correlation=at, pid=at % 2 + 5)
        file.kernel(at * 100 + 10, at * 100 + 90, f"k{at % 9}", correlation=at, pid=at % 2 + 5, device=at % 2)
        file.nvtx(at * 100, at * 100 + 50, f"aten::mm, op_id = {at}, sizes = [[{at}]]" if at % 3 else f"step {at}")
    for at in range(50):
        file.copy(at * 90, at * 90 + 30, at % 14)
        file.memset(at * 91, at * 91 + 3)
        file.graph(at * 50, at * 50 + 40)
        file.row(
            "CUPTI_ACTIVITY_KIND_OVERHEAD",
            start=at,
            end=at + 2,
            globalTid=global_tid(5, 6),
            nameId=1,
            overheadType=at % 9,
        )
    file.row("DIAGNOSTIC_EVENT", severity=2, text="something is off")
    file.row("ANALYSIS_DETAILS", duration=10**6)
    file.row("TARGET_INFO_GPU", id=0, name="GPU", cuDevice=0)
    file.row("TARGET_INFO_CUDA_DEVICE", gpuId=0, cudaId=0, pid=5)
    return file.write()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[bytes]:
    found = [_built(tmp_path_factory.mktemp("fuzz") / "built.sqlite").read_bytes()]
    with contextlib.suppress(pytest.skip.Exception):
        traces: Path = request.getfixturevalue("traces")
        found += [path.read_bytes() for path in sorted((traces / "nsys").glob("*.sqlite"))]
    return found


def test_a_damaged_recording_ends_in_an_error_or_a_sound_timeline(sources: list[bytes], tmp_path: Path) -> None:
    refused = slowest = 0.0
    for number in range(CASES):
        began = time.monotonic()
        try:
            read = _read_damaged(sources[number % len(sources)], tmp_path / "x.sqlite", number, read_nsys_sqlite)
            is_nsys_sqlite(tmp_path / "x.sqlite")
        except BaseException as error:
            error.add_note(f"case {number}")
            raise
        refused += read is None
        slowest = max(slowest, time.monotonic() - began)
    assert 0 < refused < CASES, "the damage is neither always harmless nor always fatal"
    assert slowest < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 * 2**20


def test_a_damaged_nvprof_database_ends_in_an_error_or_a_sound_timeline(tmp_path: Path) -> None:
    from test_nvprof import _whole

    _whole(tmp_path / "whole.nvvp")
    source = (tmp_path / "whole.nvvp").read_bytes()
    for number in range(CASES // 3):
        try:
            _read_damaged(source, tmp_path / "x.nvvp", number, read_nvprof)
            is_nvprof_sqlite(tmp_path / "x.nvvp")
        except BaseException as error:
            error.add_note(f"case {number}")
            raise
