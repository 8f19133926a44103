"""However a script ends, or whatever is done to it: its bytes and exit code, the recording so far, and nobody left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_profile import clean_environment

from gpudiag.bundle import read_bundle
from gpudiag.diagnosis import Diagnosis, from_json
from gpudiag.read.nsys_report import find_nsys

pytest.importorskip("torch")
pytestmark = pytest.mark.live
NSYS = [pytest.mark.nsys, pytest.mark.skipif(find_nsys() is None, reason="nsys is not installed")]
recorders = pytest.mark.parametrize("recorder", ["torch", pytest.param("nsys", marks=NSYS)])

# Trains 60 steps of 20 ms; from step 20 on, a few steps within the window, something happens.
TRAIN = """
import os, resource, signal, subprocess, sys, time, torch
def used(): return int(open("/proc/self/statm").read().split()[0]) * 4096
def exhaust():
    resource.setrlimit(resource.RLIMIT_AS, (used() + (32 << 20),) * 2)
    while True: keep.append(bytearray(1 << 20))
def join_group():
    with open(os.environ["OOM_GROUP"] + "/cgroup.procs", "w") as file: file.write(str(os.getpid()))
    while True: keep.append(b"x" * (1 << 20))
def flood(stream):
    for _ in range(50): os.write(stream, b"x" * (1 << 20))
def orphan():
    if os.fork() == 0:
        time.sleep(3); os._exit(0)
    os._exit(5)
keep = []
net = torch.nn.Linear(64, 64); opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(60):
    opt.zero_grad(); net(torch.randn(32, 64)).sum().backward(); opt.step(); time.sleep(0.02)
    if i == int(sys.argv[2]):
        if sys.argv[1] == "memory": exhaust()
        if sys.argv[1] == "out of memory": join_group()
        if sys.argv[1] == "killed": os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "_exit": os._exit(7)
        if sys.argv[1] == "flood": flood(1); flood(2)
        if sys.argv[1] == "orphan": orphan()
print("end")
"""


class Profile:
    """`gpudiag profile` of a script in a session of its own, with everything that it left."""

    def __init__(self, folder: Path, recorder: str, words: list[str], cwd: Path | None = None) -> None:
        self.bundle, self.temporary = folder / "bundle", folder / "tmp"
        self.temporary.mkdir()
        self.highest_kb = 0
        options = ["--no-save", "--warmup", "10", "--with", recorder, "-o", str(self.bundle)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpudiag", "profile", *options, *words],
            cwd=cwd or folder,
            env=clean_environment(TMPDIR=str(self.temporary), GPUDIAG_TEST=str(folder)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.marker = f"GPUDIAG_TEST={folder}".encode()

    def started(self) -> None:
        """The script runs and has imported torch."""
        self.wait_for(lambda: any(self.bundle.glob("*/rank*.jsonl")))

    def wait_for(self, done: object) -> None:
        deadline = time.monotonic() + 60
        while not done():  # type: ignore[operator]
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)

    def watch_memory(self) -> None:
        while self.process.poll() is None:
            with contextlib.suppress(OSError, IndexError, ValueError):
                status = Path(f"/proc/{self.process.pid}/status").read_text()
                self.highest_kb = max(self.highest_kb, int(status.split("VmHWM:")[1].split()[0]))
            time.sleep(0.2)

    def end(self, timeout: float = 60) -> tuple[int, bytes, str]:
        """Exit code, stdout, and all of stderr; nothing of it may be left in the process table or in $TMPDIR."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err.decode("utf-8", "replace")

    def left(self) -> list[str]:
        """Command lines of the processes of this run that still live, and names of temporary files of ours and of nsys."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.marker in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        # torch makes the one at its import, nsys keeps a lock in the other, with gpudiag and without
        return found + [p.name for p in self.temporary.iterdir() if p.name not in ("torchinductor_root", "nvidia")]

    def judged(self) -> Diagnosis:
        return from_json((self.bundle / "diagnosis.json").read_bytes())


@contextlib.contextmanager
def profile(folder: Path, recorder: str, words: list[str], cwd: Path | None = None) -> Iterator[Profile]:
    run = Profile(folder, recorder, words, cwd)
    try:
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)


@pytest.fixture
def train(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def plain(folder: Path, *words: str) -> tuple[int, bytes, bytes]:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True
    )
    code = done.returncode
    return (128 - code if code < 0 else code), done.stdout, done.stderr


@recorders
@pytest.mark.parametrize(("how", "code"), [("memory", 1), ("_exit", 7), ("orphan", 5)])
def test_a_script_that_ends_in_the_middle_of_its_recording_is_judged_by_what_was_recorded(
    train: Path, recorder: str, how: str, code: int
) -> None:
    expected = plain(train, "train.py", how, "22")
    with profile(train, recorder, ["train.py", how, "22"]) as run:
        got, out, err = run.end()
    assert (got, out) == (code, b"") == expected[:2]
    assert err.startswith(expected[2].decode())  # the traceback is the script's, and ours is not behind it
    assert "Traceback" not in err.removeprefix(expected[2].decode())
    steps = run.judged().steps
    assert 3 <= steps.count <= 20
    assert steps.source == "optimizer"
    assert steps.p99_ns is not None and steps.p99_ns < 250_000_000  # the one that was cut off is none
    manifest = read_bundle(run.bundle).manifest
    assert manifest.exit_code == code
    assert any("still ran" in note for note in manifest.captures[0].notes) == (how == "orphan")


@pytest.mark.parametrize(
    ("recorder", "step", "recorded"),
    [
        ("torch", "22", False),  # what torch.profiler has is in the memory of the process
        ("torch", "55", True),
        pytest.param("nsys", "22", True, marks=NSYS),
    ],
)
def test_a_script_that_is_killed_as_for_want_of_memory_leaves_what_was_recorded_or_a_clear_line(
    train: Path, recorder: str, step: str, recorded: bool
) -> None:
    with profile(train, recorder, ["train.py", "killed", step]) as run:
        code, out, err = run.end()
    assert (code, out) == (137, b"")
    assert "the script was ended by signal 9 (SIGKILL)" in err
    if recorded:
        steps = run.judged().steps
        assert steps.count >= 3 and steps.source == "optimizer"
        assert steps.p99_ns is not None and steps.p99_ns < 250_000_000
    else:
        assert "gpudiag: torch: no recording was saved: the process ended (killed?) before one was complete" in err
    assert run.left() == []


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of 100 MB, whose processes the kernel kills when they want more."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, f"gpudiag-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(100 << 20))
                yield group
                return
        finally:
            for _ in range(50):  # it is busy until the last process in it has been reaped
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)
    pytest.skip("no control group of the memory controller can be made here")


@recorders
def test_the_kernels_out_of_memory_killer_leaves_what_was_recorded(
    train: Path, memory_group: Path, recorder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOM_GROUP", str(memory_group))
    with profile(train, recorder, ["train.py", "out of memory", "55"]) as run:
        code, out, err = run.end()
    assert (code, out) == (137, b"")
    assert "the script was ended by signal 9 (SIGKILL)" in err
    assert run.judged().steps.count >= 15
    assert run.left() == []


def test_too_little_memory_to_import_torch_is_not_called_a_failure_to_get_inside(train: Path) -> None:
    words = ["--", "bash", "-c", f'ulimit -v 2000000; exec "{sys.executable}" train.py none 0']
    with profile(train, "torch", words) as run:
        code, _, err = run.end()
    assert code != 0
    assert err.count("gpudiag: ") == 2 and "nothing to judge" in err
    assert "did not import torch" in err or "was ended before it had imported torch" in err


@recorders
def test_fifty_megabytes_without_a_newline_pass_through_and_are_not_kept(train: Path, recorder: str) -> None:
    with profile(train, recorder, ["train.py", "flood", "22"]) as run:
        watcher = threading.Thread(target=run.watch_memory)
        watcher.start()
        code, out, err = run.end()
        watcher.join()
    assert code == 0
    assert out == b"x" * (50 << 20) + b"end\n"
    assert err.count("x" * (1 << 20)) == 50
    assert run.judged().steps.count >= 15
    assert 0 < run.highest_kb < 400_000
    assert sum(file.stat().st_size for file in run.bundle.rglob("*") if file.is_file()) < 5 << 20


@recorders
@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143), ("HUP", 129)])
def test_an_endless_script_ends_on_a_signal_and_leaves_nobody_behind(
    shared: Path, tmp_path: Path, recorder: str, name: str, code: int
) -> None:
    with profile(tmp_path, recorder, [str(shared / "scripts/25_infinite_loop.py")]) as run:
        assert run.process.stdout is not None
        assert run.process.stdout.readline() == b"step 50\n"
        number = getattr(signal, f"SIG{name}")
        os.kill(run.process.pid, number)
        os.killpg(run.process.pid, number)  # as timeout does
        got, _, err = run.end(30)
    assert got == code
    assert f"the script was ended by signal {int(number)} (SIG{name})" in " ".join(err.split())
    assert run.left() == []
    assert read_bundle(run.bundle).manifest.warnings == (f"the script was ended by signal {int(number)} (SIG{name})",)


SAVES = """
import signal, sys, time, torch
hits = []
def stop(sig, frame):
    hits.append(signal.Signals(sig).name)
    if len(hits) == 1: raise KeyboardInterrupt
for name in ("SIGINT", "SIGTERM", "SIGHUP"): signal.signal(getattr(signal, name), stop)
try:
    print("ready", flush=True); time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1.5); print("SAVED", *hits, flush=True)
sys.exit(4)
"""


@recorders
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_comes_once_and_the_script_has_its_time_to_save(tmp_path: Path, recorder: str, name: str) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    with profile(tmp_path, recorder, ["saves.py"]) as run:
        assert run.process.stdout is not None
        assert run.process.stdout.readline() == b"ready\n"
        number = getattr(signal, name)
        os.kill(run.process.pid, number)
        os.killpg(run.process.pid, number)
        code, out, err = run.end(30)
    assert (code, out) == (4, f"SAVED {name}\n".encode())
    assert f"the script got {name} and ended by itself with exit code 4" in " ".join(err.split())
    assert run.left() == []


@recorders
def test_a_second_interrupt_ends_a_script_that_will_not(tmp_path: Path, recorder: str) -> None:
    (tmp_path / "saves.py").write_text(SAVES.replace("time.sleep(1.5)", "time.sleep(50)"))
    with profile(tmp_path, recorder, ["saves.py"]) as run:
        assert run.process.stdout is not None
        run.process.stdout.readline()
        os.kill(run.process.pid, signal.SIGINT)
        time.sleep(0.8)
        assert run.process.poll() is None
        os.kill(run.process.pid, signal.SIGINT)
        code, out, err = run.end(20)
    assert (code, out) == (137, b"")
    assert "after SIGINT, SIGINT" in " ".join(err.split())
    assert run.left() == []


def kill_nsys(run: Profile) -> None:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"profile" in words and str(run.bundle).encode() in b" ".join(words) and words[0].endswith(b"nsys"):
                os.kill(int(entry.name), signal.SIGKILL)
                return
    raise AssertionError("nsys does not run")


class TestNsysKilled:
    pytestmark = NSYS

    def test_the_script_runs_on_to_its_end_and_keeps_its_exit_code(self, train: Path) -> None:
        (train / "train.py").write_text(TRAIN.replace("range(60)", "range(150)") + "sys.exit(9)\n")
        with profile(train, "nsys", ["train.py", "none", "0"]) as run:
            run.started()
            kill_nsys(run)
            code, out, err = run.end()
        assert (code, out) == (9, b"end\n")
        assert "nsys was ended by signal 9; the script ran on without it" in err
        assert run.judged().steps.count >= 15  # its agent writes the report all the same
        assert run.left() == []

    def test_the_script_still_gets_its_signals(self, tmp_path: Path) -> None:
        (tmp_path / "saves.py").write_text(SAVES)
        with profile(tmp_path, "nsys", ["saves.py"]) as run:
            assert run.process.stdout is not None
            run.process.stdout.readline()
            kill_nsys(run)
            time.sleep(0.5)
            os.kill(run.process.pid, signal.SIGTERM)
            code, out, err = run.end(20)
        assert (code, out) == (4, b"SAVED SIGTERM\n")
        assert "the script got SIGTERM and ended by itself with exit code 4" in err
        assert run.left() == []
