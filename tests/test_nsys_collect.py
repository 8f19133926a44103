"""Recording with the real nsys: the application notices nothing, and the report is whole or the reason is said."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpudiag.collect import nsys, nsys_finish
from gpudiag.errors import GpudiagError

REPO = Path(__file__).resolve().parents[1]
real_nsys = [
    pytest.mark.nsys,
    pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed"),
]

# Pushes a step every 20 ms for `seconds` within range "capture" (10 of them), and saves for 1.5 s on a signal.
TRAINS = """
import os, signal, sys, time
sys.path.insert(0, {repo!r})
from gpudiag.collect.inject import nvtx_emit
def save(signum, frame):
    time.sleep(1.5)
    nvtx_emit.push("checkpoint"); nvtx_emit.pop()
    print("saved", signum, flush=True)
    sys.exit(3)
signal.signal(signal.SIGINT, save); signal.signal(signal.SIGTERM, save)
began = time.monotonic()
nvtx_emit.push(sys.argv[2] if len(sys.argv) > 2 else "capture")
step = 0
while time.monotonic() - began < float(sys.argv[1]):
    nvtx_emit.push("step", step); time.sleep(0.02); nvtx_emit.pop()
    step += 1
    if step == 10:
        nvtx_emit.pop()
    if step == 12:
        print("running", flush=True)
"""


class Run:
    """One application under nsys with its output in files."""

    def __init__(self, folder: Path, app: list[str], **options: Any) -> None:
        self.folder, self.output = folder, folder / "report 100%p"  # a name that nsys would expand
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = nsys.start(app, self.output, gpu=False, stdout=out.fileno(), stderr=err.fileno(), **options)

    def wait_for(self, words: bytes) -> None:
        deadline = time.monotonic() + 20
        while words not in self.out.read_bytes():
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.05)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def begin(*app: str, **options: Any) -> Run:
        runs.append(Run(tmp_path, [sys.executable, *app], **options))
        return runs[-1]

    yield begin
    for started in runs:
        started.process.kill()


def trains(folder: Path, *arguments: str) -> tuple[str, ...]:
    script = folder / "trains.py"
    script.write_text(TRAINS.format(repo=str(REPO)))
    return str(script), *arguments


class TestWithRealNsys:
    pytestmark = real_nsys

    def test_every_option_is_one_that_this_version_has(self, tmp_path: Path) -> None:
        path = nsys.find_nsys()
        assert path is not None
        command = nsys.nsys_command(["true"], tmp_path / "r", gpu=True, window=True, osrt=True)
        given = {word[2:].partition("=")[0] for word in command if word.startswith("--")}
        assert {"trace", "capture-range", "capture-range-end", "kill", "wait", "output"} <= given
        assert given <= nsys._options(path)
        assert nsys.nsys_version(path).count(".") == 2

    def test_bytes_arguments_stdin_and_status_pass_through(self, tmp_path: Path, run: Any) -> None:
        script = tmp_path / "echo.py"
        script.write_text(
            "import os, signal, sys\n"
            "os.write(1, b'\\xff\\x00 no newline'); os.write(2, b'err\\r')\n"
            "os.write(1, repr((sys.argv[1:], sys.stdin.read(), os.isatty(1))).encode())\n"
            "sys.exit(7)\n"
        )
        (tmp_path / "in").write_text("typed")
        with (tmp_path / "in").open() as stdin:
            started = run(str(script), "a b", "", "q\"'", stdin=stdin.fileno())
        assert started.process.wait(30) == 7
        assert nsys._members(started.process.sessions) == []
        assert started.out.read_bytes() == b"\xff\x00 no newline" + repr((["a b", "", "q\"'"], "typed", False)).encode()
        assert started.err.read_bytes() == b"err\r"
        assert "Generat" in started.process.log.read_text()

    @pytest.mark.parametrize(("signum", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
    def test_a_signal_reaches_the_application_which_saves_before_the_report_is_written(
        self, tmp_path: Path, run: Any, signum: int, group: bool
    ) -> None:
        started = run(*trains(tmp_path, "30"))
        started.wait_for(b"running")
        assert started.process.forward(signum, group=group)
        assert started.process.wait(30) == 3
        assert b"saved" in started.out.read_bytes()
        report = nsys.finish_report(started.output, gpu=False)
        assert report.failed == "" and names(report.sqlite) >= {"step", "checkpoint", "capture"}
        assert started.process.forward(signum) is False

    def test_a_window_is_reported_while_the_application_runs_on(self, tmp_path: Path, run: Any) -> None:
        started = run(*trains(tmp_path, "30"), window=True)
        started.wait_for(b"running")
        report = nsys.finish_report(started.output, gpu=False)
        assert started.process.process.poll() is None
        assert report.failed == "" and report.ranges == 11  # capture and ten steps
        assert report.warnings == ()
        started.process.forward(signal.SIGTERM)
        assert started.process.wait(30) == 3

    def test_a_window_that_never_opens_is_said(self, tmp_path: Path, run: Any) -> None:
        started = run(*trains(tmp_path, "0.5", "other"), window=True)
        assert started.process.wait(30) == 0
        report = nsys.finish_report(started.output, gpu=False, timeout_s=1)
        assert report.sqlite is None and "window never opened" in report.failed

    def test_a_killed_application_leaves_its_ranges_and_its_signal(self, tmp_path: Path, run: Any) -> None:
        started = run(*trains(tmp_path, "30"))
        started.wait_for(b"running")
        started.process.forward(signal.SIGKILL)
        assert started.process.wait(30) == 128 + signal.SIGKILL
        assert nsys.finish_report(started.output, gpu=False).ranges >= 10

    def test_a_killed_nsys_costs_the_exit_status_and_nothing_else(self, tmp_path: Path, run: Any) -> None:
        started = run(*trains(tmp_path, "3"))
        started.wait_for(b"running")
        os.kill(started.process.process.pid, signal.SIGKILL)
        assert started.process.wait(30) is None
        report = nsys.finish_report(started.output, gpu=False, timeout_s=1)
        assert report.failed == "" and report.ranges > 100

    def test_an_orphan_holds_nothing_back_and_lives_on(self, tmp_path: Path, run: Any) -> None:
        """It pushes ranges all the while: without nsys's agent, which ends with the run, it must not die of SIGPIPE."""
        orphan = tmp_path / "orphan.py"
        orphan.write_text(
            TRAINS.format(repo=str(REPO)).replace("began =", "signal.signal(signal.SIGPIPE, signal.SIG_DFL); began =")
        )
        script = tmp_path / "script.py"
        script.write_text(
            "import subprocess, sys\n"
            f"print(subprocess.Popen([sys.executable, {str(orphan)!r}, '60'], stdout=subprocess.DEVNULL).pid)"
        )
        began = time.monotonic()
        started = run(str(script))
        assert started.process.wait(30) == 0 and time.monotonic() - began < 20
        assert nsys._members(started.process.sessions) == []
        pid = int(started.out.read_text())
        time.sleep(0.5)
        assert nsys._alive(pid)
        os.kill(pid, signal.SIGKILL)

    def test_a_program_that_does_not_exist_ends_as_in_a_shell(self, tmp_path: Path) -> None:
        started = Run(tmp_path, ["/nowhere/python"])
        assert started.process.wait(30) == 127
        assert started.err.read_text() == "gpudiag: cannot run /nowhere/python: No such file or directory\n"

    def test_a_report_without_our_ranges_or_kernels_is_warned_of(self, tmp_path: Path, run: Any) -> None:
        started = run("-c", "pass")
        assert started.process.wait(30) == 0
        report = nsys.finish_report(started.output, gpu=True)
        assert report.failed == "" and report.kernels is None and report.ranges == 0
        assert len(report.warnings) == 2 and "kernel" in report.warnings[0] and "gpudiag" in report.warnings[1]

    def test_an_older_report_of_the_same_name_is_never_taken_for_the_new_one(self, tmp_path: Path) -> None:
        (tmp_path / "r.qdstrm").write_bytes(b"old")
        with pytest.raises(GpudiagError, match="exists"):
            nsys.start(["true"], tmp_path / "r", gpu=False)

    def test_a_folder_that_is_not_there_is_said_before_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(GpudiagError, match="cannot be written"):
            nsys.start(["true"], tmp_path / "missing" / "r", gpu=False)

    def test_a_damaged_report_fails_with_a_reason(self, tmp_path: Path) -> None:
        (tmp_path / "r.nsys-rep").write_bytes(b"NVIDIA Tegra Profiler Report 2022@4@2@1-x" + bytes(100))
        report = nsys.finish_report(tmp_path / "r", gpu=False)
        assert report.sqlite is None and report.failed


FAKE_NSYS = """#!/bin/sh
case "$1 $2" in
  "--version "*) echo "NVIDIA Nsight Systems version 2022.4.2.1-x" ;;
  "profile --help") printf "\\t-t, --trace=\\n\\t-o, --output=\\n" ;;
  *) echo start >> {folder}/starts; [ $(wc -l < {folder}/starts) -lt {works_at} ] && {{ {fault}; }}
     shift; while [ "${{1#--}}" != "$1" ]; do shift; done; exec "$@" ;;
esac
"""


def fake_nsys(folder: Path, monkeypatch: pytest.MonkeyPatch, works_at: int, fault: str) -> None:
    script = folder / "nsys"
    script.write_text(FAKE_NSYS.format(folder=folder, works_at=works_at, fault=fault))
    script.chmod(0o755)
    monkeypatch.setattr(nsys, "find_nsys", lambda: script)


@pytest.mark.parametrize("fault", ["echo 'boost::errinfo_api_function_ = sem_open'; exit 1", "sleep 60"])
def test_an_nsys_that_fails_before_the_application_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    fake_nsys(tmp_path, monkeypatch, works_at=2, fault=fault)
    monkeypatch.setattr(nsys, "_START_TIMEOUT_S", 2.0)
    ran = tmp_path / "ran"
    process = nsys.start(["/bin/sh", "-c", f"echo x >> {ran}; exit 5"], tmp_path / "r", gpu=False)
    assert process.wait(10) == 5
    assert ran.read_text() == "x\n" and (tmp_path / "starts").read_text() == "start\n" * 2


def test_an_nsys_that_never_starts_the_application_is_given_up_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nsys(tmp_path, monkeypatch, works_at=99, fault="echo no session; exit 1")
    with pytest.raises(GpudiagError, match="no session"):
        nsys.start(["/bin/sh", "-c", f"touch {tmp_path}/ran"], tmp_path / "r", gpu=False)
    assert not (tmp_path / "ran").exists()


def names(sqlite: Path | None) -> set[str]:
    assert sqlite is not None
    with closing(sqlite3.connect(sqlite)) as db:
        rows = db.execute("SELECT COALESCE(text, value) FROM NVTX_EVENTS LEFT JOIN StringIds s ON s.id = textId")
        return {name for (name,) in rows}


def test_without_nsys_the_next_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "find_nsys", lambda: None)
    with pytest.raises(GpudiagError) as error:
        nsys.nsys_command(["true"], tmp_path / "r", gpu=True)
    assert "--with torch" in error.value.hint


def test_an_nsys_that_would_end_the_application_is_refused_for_a_window(tmp_path: Path) -> None:
    old = tmp_path / "nsys"
    old.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "NVIDIA Nsight Systems version 2020.1.1.5-x" ||'
        ' printf "\\t-t, --trace=\\n\\t-o, --output=\\n\\t--nvtx-capture=\\n"\n'
    )
    old.chmod(0o755)
    assert "--trace=nvtx" in nsys.nsys_command(["true"], tmp_path / "r", gpu=False, nsys=old)
    with pytest.raises(GpudiagError, match=r"nsys 2020\.1\.1 has no --capture-range-end"):
        nsys.nsys_command(["true"], tmp_path / "r", gpu=False, window=True, nsys=old)


def test_no_report_says_what_nsys_said_last(tmp_path: Path) -> None:
    assert "killed" in nsys.finish_report(tmp_path / "r", gpu=False, timeout_s=0).failed
    nsys_finish.log_of(tmp_path / "r").write_text("Failed to create session: no space left\n\n")
    assert "no space left" in nsys.finish_report(tmp_path / "r", gpu=False, timeout_s=0).failed


def test_kernels_and_ranges_of_real_recordings_are_counted(traces: Path) -> None:
    ranges, kernels, _ = nsys_finish._verify(traces / "nsys" / "a100_sync_after_each_kernel.sqlite")
    with closing(sqlite3.connect(traces / "nsys" / "a100_sync_after_each_kernel.sqlite")) as db:
        assert kernels == db.execute("SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()[0]
    assert ranges == 0  # nobody pushed ours there
