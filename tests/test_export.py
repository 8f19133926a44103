"""`gpudiag export`: what leaves the machine judges the same and holds no environment, names, homes or secrets."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sqlite3
import sys
import zipfile
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gpudiag.bundle import SCHEMA, CaptureInfo, Manifest, read_bundle, write_manifest
from gpudiag.cli import main
from gpudiag.collect import nsys, scrub_json
from gpudiag.collect.privacy import Scrubber
from gpudiag.collect.scrub_json import scrub_trace
from gpudiag.collect.scrub_sqlite import scrub_sqlite
from gpudiag.collect.sharing import share
from gpudiag.errors import GpudiagError
from gpudiag.read.kineto import read_kineto
from gpudiag.read.nsys_sqlite import read_nsys_sqlite
from gpudiag.timeline import Timeline

SCRUB = Scrubber("/home/alice", "alice", "node17.lab")
PRIVATE = (b"alice", b"node17", b"Sesam0effne", b"bob", b"hf_ABCDEFGHIJKLMNOPQRST", b"cupsd")


def same_events(one: Timeline, other: Timeline) -> None:
    for table in ("gpu_ops", "api_calls", "ranges", "cpu_ops", "py_calls", "overheads"):
        before, after = getattr(one, table), getattr(other, table)
        assert (before is None) == (after is None), table
        if before is None:
            continue
        for field in fields(before):
            first, second = getattr(before, field.name), getattr(after, field.name)
            if field.name in ("name", "domain", "shapes"):
                # codes may differ; where they are codes, compare the texts
                first = np.array([one.strings[code] if code >= 0 else "" for code in first])
                second = np.array([other.strings[code] if code >= 0 else "" for code in second])
            np.testing.assert_array_equal(first, second, err_msg=f"{table}.{field.name}")
    assert (one.devices, one.diagnostics, one.recorded) == (other.devices, other.diagnostics, other.recorded)
    assert one.source.recorder == other.source.recorder


@pytest.mark.parametrize(
    "name",
    [
        "a100_saxpy_old_schema",
        "a100_sync_after_each_kernel",
        "h100_2gpu_train_before",
        "healthy_1pct_idle",
        "two_kernels_only",
    ],
)
def test_a_scrubbed_nsys_export_reads_as_the_original(traces: Path, tmp_path: Path, name: str) -> None:
    source, target = traces / "nsys" / f"{name}.sqlite", tmp_path / f"{name}.sqlite"
    scrub_sqlite(source, target, SCRUB)
    same_events(read_nsys_sqlite(source), read_nsys_sqlite(target))
    assert target.stat().st_size <= source.stat().st_size


def hostile_export(path: Path) -> Path:
    """An export with something private in every place that nsys is known to put it, and in some it is not."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            """
            CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
            INSERT INTO StringIds VALUES (1, 'volta_sgemm'), (2, 'unused of alice'), (3, 'load /home/alice/data'),
              (4, 'cupsd'), (5, '/tmp/pid_9_stdout.log'), (6, 'my password is Sesam0effne!'), (7, 'python3');
            INSERT INTO StringIds VALUES (8, CAST(x'6b65726e656cff2f686f6d652f616c696365' AS TEXT));
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, globalPid INTEGER, shortName INTEGER,
              demangledName INTEGER, myLabel INTEGER -- REFERENCES StringIds(id) -- new in some version
            );
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 150994944, 1, 8, 3), (3, 4, NULL, 1, NULL, NULL);
            CREATE TABLE NVTX_EVENTS (start INTEGER, text TEXT, textId INTEGER, globalTid INTEGER, jsonText TEXT, binaryData BLOB);
            INSERT INTO NVTX_EVENTS VALUES (1, 'read /home/alice/x for bob@node17.lab', NULL, 150994945, '{"u":"alice"}', x'616c696365');
            INSERT INTO NVTX_EVENTS VALUES (2, 'key Sesam0effne!', 3, NULL, NULL, NULL);
            CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
            INSERT INTO PROCESSES VALUES (150994944, 9, 'python3'), (167772160, 10, 'cupsd');
            CREATE TABLE ThreadNames (nameId INTEGER, globalTid INTEGER);
            INSERT INTO ThreadNames VALUES (7, 150994945), (4, 167772161);
            CREATE TABLE ProcessStreams (globalPid INTEGER, filenameId INTEGER, contentId INTEGER);
            INSERT INTO ProcessStreams VALUES (150994944, 5, 6);
            CREATE TABLE OSRT_FILE_ACCESS_EVENTS (path TEXT); INSERT INTO OSRT_FILE_ACCESS_EVENTS VALUES ('/home/alice/.ssh');
            CREATE TABLE SOMETHING_NEW (x TEXT); INSERT INTO SOMETHING_NEW VALUES ('alice');
            CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
            INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', 'node17.lab'), ('NvDriverVersion', '550.54'),
              ('DeviceEnvironment', 'USER=bob' || char(10) || 'HOME=/nfs/bob' || char(10) || 'WANDB_API_KEY=Sesam0effne!');
            CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT);
            INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ARGUMENT_0', '--token=Sesam0effne!'), ('CAPTURE_EVENT_TYPE', 'Cuda'),
              (NULL, 'alice'), ('PROCESS_0:WORKING_DIR', '/nfs/bob/run');
            CREATE TABLE DIAGNOSTIC_EVENT (severity INTEGER, text TEXT);
            INSERT INTO DIAGNOSTIC_EVENT VALUES (2, 'cannot open /nfs/bob/x');
            CREATE VIEW names AS SELECT * FROM StringIds;
            """
        )
    return path


def test_nothing_private_is_left_anywhere_in_the_bytes_of_the_copy(tmp_path: Path) -> None:
    source = hostile_export(tmp_path / "s.sqlite")
    before = source.read_bytes()
    assert all(word in before for word in PRIVATE if not word.startswith(b"hf_"))
    done = scrub_sqlite(source, tmp_path / "t.sqlite", SCRUB)
    after = (tmp_path / "t.sqlite").read_bytes()
    assert [word for word in PRIVATE if word in after] == []
    assert source.read_bytes() == before
    with closing(sqlite3.connect(tmp_path / "t.sqlite")) as db:
        db.text_factory = bytes
        assert db.execute("SELECT id, value FROM StringIds ORDER BY id").fetchall() == [
            (1, b"volta_sgemm"),
            (3, b"load /home/USER/data"),
            (7, b"python3"),
            (8, b"kernel\xff/home/USER"),  # `~` only at a word's start
        ]
        assert db.execute("SELECT name, value FROM TARGET_INFO_SYSTEM_ENV").fetchall() == [
            (b"NvDriverVersion", b"550.54")
        ]
        assert db.execute("SELECT name FROM META_DATA_CAPTURE").fetchall() == [(b"CAPTURE_EVENT_TYPE",)]
        assert db.execute("SELECT text FROM DIAGNOSTIC_EVENT").fetchall() == [(b"cannot open ~/x",)]
        assert db.execute("SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone() == (2,)
    assert any("SOMETHING_NEW" in line for line in done)


TRACE = (
    '{"schemaVersion": 1, "host_name": "node17.lab", "username": "bo\\u0062", "tw_job": 17,\n'
    ' "traceName": "/home/alice/log/node17.lab_1.pt.trace.json", "traceEvents": [\n'
    '  {"ph": "X", "cat": "python_function", "name": "/nfs/bob/train.py(42): <lambda>", "ts": 1.25, "args": {"token": 5}},'
    '  {"ph": "X", "name": "void foo<token::key>(float*)", "ts": 2, "args": {"user": 7.5, "c": "hf_ABCDEFGHIJKLMNOPQRST"}}\n]}'
)


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_a_trace_keeps_its_events_and_loses_its_names_whatever_the_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(scrub_json, "_BLOCK", block)
    (tmp_path / "a.json").write_text(TRACE)
    scrub_trace(tmp_path / "a.json", tmp_path / "b.json", SCRUB)
    after = json.loads((tmp_path / "b.json").read_text())
    assert [word for word in PRIVATE if word in (tmp_path / "b.json").read_bytes()] == []
    assert after["host_name"] == after["username"] == after["tw_job"] == "***"
    assert after["traceName"] == "~/log/HOST_1.pt.trace.json"
    first, second = after["traceEvents"]
    assert first == {
        "ph": "X",
        "cat": "python_function",
        "name": "/nfs/USER/train.py(42): <lambda>",
        "ts": 1.25,
        "args": {"token": 5},
    }
    assert second["name"] == "void foo<token::key>(float*)"


@pytest.mark.parametrize("name", ["cpu_only", "gp100_gpu_user_annotation", "a100_event_sync"])
def test_a_scrubbed_real_trace_reads_as_the_original(traces: Path, tmp_path: Path, name: str) -> None:
    source = traces / "kineto" / f"{name}.json.gz"
    scrub = Scrubber("/home/nobody", "nobody9", "nohost9")
    scrub_trace(source, tmp_path / source.name, scrub)
    scrub_trace(source, tmp_path / "again.json.gz", scrub)
    assert (tmp_path / source.name).read_bytes() == (tmp_path / "again.json.gz").read_bytes()
    before, after = read_kineto(source), read_kineto(tmp_path / source.name)
    assert [
        None if t is None else len(t) for t in (before.gpu_ops, before.api_calls, before.cpu_ops, before.ranges)
    ] == [None if t is None else len(t) for t in (after.gpu_ops, after.api_calls, after.cpu_ops, after.ranges)]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    (root / "nsys").mkdir(parents=True)
    (root / "torch").mkdir()
    hostile_export(root / "nsys" / "report.sqlite")
    (root / "nsys" / "report.nsys-rep").write_bytes(b"NVIDIA Tegra Profiler Report USER=bob WANDB_API_KEY=Sesam0effne!")
    (root / "nsys" / "report.nsys.log").write_text("alice")
    (root / "torch" / "rank0.kineto.json.gz").write_bytes(gzip.compress(TRACE.encode()))
    (root / "torch" / "rank0.9.jsonl").write_text(
        '{"k":"loader","where":"/home/alice/train.py:4","api_key":"Sesam0effne!"}\n{"k":"batch","s":1}\n{"k":"ba'
    )
    (root / "report.html").write_text("<p>alice")
    (root / "link.json").symlink_to(tmp_path / "outside.json")
    (tmp_path / "outside.json").write_text('{"x": "alice"}')
    files = {"trace": ["nsys/report.sqlite"], "report": ["nsys/report.nsys-rep"]}
    write_manifest(
        root,
        Manifest(
            SCHEMA,
            "0.1.0",
            ("python", "/home/alice/train.py", "--hf-token", "Sesam0effne!"),
            "2026-11-30T10:00:00Z",
            0,
            (
                CaptureInfo("nsys", "nsys", files),
                CaptureInfo("torch", "torch", {"trace": ["torch/rank0.kineto.json.gz"]}),
            ),
            environment={"gpus": [], "note": "on node17.lab, in /home/bob"},
        ),
    )
    return root


def test_a_bundle_becomes_a_bundle_without_what_cannot_be_cleaned(bundle: Path, tmp_path: Path) -> None:
    done = {entry.name: entry for entry in share(bundle, tmp_path / "a.zip", scrub=SCRUB)}
    share(bundle, tmp_path / "b.zip", scrub=SCRUB)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert {name for name, entry in done.items() if not entry.kept} == {
        "nsys/report.nsys-rep",
        "nsys/report.nsys.log",
        "report.html",
    }
    assert "whole environment" in done["nsys/report.nsys-rep"].what[0]
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        archive.extractall(tmp_path / "out")
        assert "link.json" not in archive.namelist()
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            assert [word for word in PRIVATE if word in data] == [], path
    manifest = read_bundle(tmp_path / "out").manifest
    assert manifest.command == ("python", "~/train.py", "--hf-token", "***")
    assert manifest.captures[0].files == {"trace": ["nsys/report.sqlite"]}
    records = (tmp_path / "out" / "torch" / "rank0.9.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in records] == [
        {"k": "loader", "where": "~/train.py:4", "api_key": "***"},
        {"k": "batch", "s": 1},
    ]


def test_a_zip_that_fails_leaves_nothing_and_an_old_one_stays(bundle: Path, tmp_path: Path) -> None:
    (bundle / "torch" / "rank0.kineto.json.gz").write_bytes(gzip.compress(TRACE.encode())[:-20])
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.zip").write_text("old")
    with pytest.raises(GpudiagError, match="cut short"):
        share(bundle, out / "a.zip", scrub=SCRUB)
    assert [path.name for path in out.iterdir()] == ["a.zip"] and (out / "a.zip").read_text() == "old"


def test_the_zip_may_lie_in_the_bundle_and_is_not_in_itself(bundle: Path) -> None:
    share(bundle, bundle / "shared.zip", scrub=SCRUB)
    names = [entry.name for entry in share(bundle, bundle / "shared.zip", scrub=SCRUB)]
    assert not any("shared.zip" in name for name in names)


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def test_the_verb_lists_what_it_did_and_never_overwrites_unasked(bundle: Path, tmp_path: Path) -> None:
    result = invoke(bundle, "-o", tmp_path / "a.zip")
    assert result.exit_code == 0, result.output
    assert "- nsys/report.nsys-rep" in result.stdout and "  nsys/report.sqlite" in result.stdout
    assert "wrote" in result.stderr
    again = invoke(bundle, "-o", tmp_path / "a.zip")
    assert again.exit_code == 1 and "exists" in again.stderr
    assert invoke(bundle, "-o", tmp_path / "a.zip", "--force").exit_code == 0
    assert invoke(bundle).exit_code == 2
    assert invoke(tmp_path / "missing", "-o", tmp_path / "b.zip").exit_code == 1
    (tmp_path / "x.txt").write_text("x")
    nothing = invoke(tmp_path / "x.txt", "-o", tmp_path / "b.zip")
    assert nothing.exit_code == 1 and "nothing in it can be shared" in nothing.stderr
    assert not (tmp_path / "b.zip").exists()


def test_the_verb_writes_a_trace_for_perfetto(traces: Path, tmp_path: Path) -> None:
    target = tmp_path / "p.json"
    result = invoke(traces / "nsys" / "a100_sync_after_each_kernel.sqlite", "--perfetto", target)
    assert result.exit_code == 0, result.output
    assert json.loads(target.read_text())["traceEvents"]


@pytest.mark.nsys
@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed")
def test_the_environment_of_a_real_recording_does_not_leave_the_machine(tmp_path: Path) -> None:
    env = {**os.environ, "WANDB_API_KEY": "Sesam0effne!", "USER": "alice", "HOME": "/home/alice"}
    with Path(os.devnull).open("wb") as nowhere:
        process = nsys.start(
            [sys.executable, "-c", "print('alice')"], tmp_path / "r", gpu=False, env=env, stdout=nowhere.fileno()
        )
        assert process.wait(60) == 0
    report = nsys.finish_report(tmp_path / "r", gpu=False)
    assert report.sqlite is not None and b"Sesam0effne!" in report.sqlite.read_bytes()
    share(report.sqlite, tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        data = archive.read("r.sqlite")
    assert [word for word in (b"Sesam0effne!", b"alice", str(tmp_path).encode(), b"PATH=") if word in data] == []
