"""The application runs as if gpudiag were not there: streams, signals once, exit codes, orphans."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gpudiag.collect import launch
from gpudiag.errors import GpudiagError

DRIVER = """
import json, os, sys
from gpudiag.collect import launch
outcome = launch.run(lambda: launch.spawn(sys.argv[2:], os.environ))
with open(sys.argv[1], "w") as file:
    json.dump([outcome.exit_code, list(outcome.signals), len(outcome.orphans)], file)
"""


def start(tmp_path: Path, code: str, **options: object) -> tuple[subprocess.Popen[bytes], Path]:
    """A process of its own that launches `python -c code`: signals and reaping must not touch the tests' process."""
    out = tmp_path / "outcome.json"
    command = [sys.executable, "-c", DRIVER, str(out), sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options), out  # type: ignore[call-overload,return-value]


def outcome(tmp_path: Path, code: str) -> tuple[int, list[str], int]:
    process, out = start(tmp_path, code, stdin=subprocess.DEVNULL)
    process.communicate(timeout=30)
    return tuple(json.loads(out.read_text()))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os._exit(5)", 5),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("raise RuntimeError('x')", 1),
    ],
)
def test_the_exit_code_is_the_applications_as_a_shell_gives_it(tmp_path: Path, code: str, expected: int) -> None:
    assert outcome(tmp_path, code)[0] == expected


def test_streams_pass_through_byte_for_byte(tmp_path: Path) -> None:
    code = """
        import sys
        data = sys.stdin.buffer.read()
        sys.stdout.buffer.write(b"\\xff\\r" + data); sys.stderr.buffer.write(b"\\x00err")
    """
    process, _ = start(tmp_path, code, stdin=subprocess.PIPE)
    out, err = process.communicate(b"\x00\xfe in", timeout=30)
    assert (out, err) == (b"\xff\r\x00\xfe in", b"\x00err")


def test_an_application_gets_default_signals_and_an_empty_mask(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import signal
        print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), signal.getsignal(signal.SIGTERM))
        ignored = int(open("/proc/self/status").read().split("SigIgn:")[1].split()[0], 16)
        print(hex(ignored & 0x7FFFFFFF))  # glibc's posix_spawn ignores its own two, 32 and 33
    """)
    process, _ = start(tmp_path, code)
    out, _err = process.communicate(timeout=30)
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=True)
    assert out == plain.stdout


COUNT = """
    import os, signal, sys, time
    hits = []
    signal.signal(signal.SIGTERM, lambda *_: hits.append("TERM")); signal.signal(signal.SIGINT, lambda *_: hits.append("INT"))
    signal.signal(signal.SIGHUP, lambda *_: hits.append("HUP"))
    print("ready", flush=True)
    while not hits: time.sleep(0.02)
    time.sleep(1.0)
    print(hits, flush=True); sys.exit(7)
"""


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
@pytest.mark.parametrize(
    "whole_group", [False, True], ids=["to gpudiag alone", "to gpudiag and its group, like timeout"]
)
def test_a_signal_reaches_the_application_once_and_its_end_is_waited_for(
    tmp_path: Path, name: str, whole_group: bool
) -> None:
    process, out = start(tmp_path, COUNT, stdin=subprocess.DEVNULL, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    number = getattr(signal, f"SIG{name}")
    os.kill(process.pid, number)
    if whole_group:
        os.killpg(process.pid, number)
    text, _ = process.communicate(timeout=30)
    assert text.decode() == f"['{name}']\n"
    assert out.read_text().startswith(f'[7, ["SIG{name}"]')


SLOW_SAVE = """
import json, os, sys, time
from gpudiag.collect import launch
start = lambda: launch.spawn(sys.argv[2:], os.environ)
outcome = launch.run(start, before_signal=lambda: time.sleep(1.2))
with open(sys.argv[1], "w") as file:
    json.dump([outcome.exit_code, list(outcome.signals)], file)
"""


@pytest.mark.parametrize(("copies", "expected"), [(True, [7, ["SIGINT"]]), (False, [137, ["SIGINT", "SIGINT"]])])
def test_a_copy_that_comes_while_the_recording_is_saved_is_no_second_interrupt(
    tmp_path: Path, copies: bool, expected: list[object]
) -> None:
    out = tmp_path / "outcome.json"
    code = textwrap.dedent(COUNT if copies else IGNORES)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_SAVE, str(out), sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"ready")
    os.kill(process.pid, signal.SIGINT)
    if not copies:  # somebody asks again while the first is held back
        time.sleep(0.7)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert json.loads(out.read_text()) == expected


IGNORES = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("ready", child.pid, flush=True); time.sleep(60)
"""
SAVES_SLOWLY = """
    import sys, time
    try:
        print("ready", 0, flush=True); time.sleep(60)
    except KeyboardInterrupt:
        try:
            print("saving", flush=True); time.sleep(60)
        except KeyboardInterrupt:
            print("gave up", flush=True); sys.exit(9)
"""


@pytest.mark.parametrize(
    ("code", "status"), [(IGNORES, 137), (SAVES_SLOWLY, 9)], ids=["that ignores them", "that ends by itself"]
)
def test_a_second_interrupt_ends_an_application(tmp_path: Path, code: str, status: int) -> None:
    process, out = start(tmp_path, code, stdin=subprocess.DEVNULL, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    for _ in range(2):
        assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        time.sleep(launch.SAME_SIGNAL_S + 0.2)
    process.communicate(timeout=10)
    assert out.read_text().startswith(f"[{status}, ")
    assert not child or not alive(child)


@pytest.mark.parametrize(("code", "status"), [(IGNORES, 137), (SAVES_SLOWLY, 9)], ids=["ignores", "ends by itself"])
def test_the_second_ctrl_c_typed_at_a_terminal_ends_the_application(tmp_path: Path, code: str, status: int) -> None:
    """gpudiag as the foreground job of a terminal of its own, and the two keys really typed there."""
    out = tmp_path / "outcome.json"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", DRIVER, str(out), sys.executable, "-c", textwrap.dedent(code)])
    try:
        child = int(read_until(terminal, "ready").split("ready")[1].split()[0])
        os.write(terminal, b"\x03")
        if code is SAVES_SLOWLY:
            read_until(terminal, "saving")
        time.sleep(0.3)  # sooner than what two senders of one signal need: a person at the keys
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # one is not enough
        os.write(terminal, b"\x03")
        deadline = time.monotonic() + 10
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline, "it outlived the second Ctrl-C"
            select.select([terminal], [], [], 0.05)
    finally:
        os.close(terminal)
    code_seen, signals = json.loads(out.read_text())[:2]
    assert code_seen == status
    assert signals in (["SIGINT", "SIGINT"], ["SIGINT"])  # the second may find the application gone already
    assert not child or not alive(child)


def read_until(terminal: int, word: str) -> str:
    """What the terminal shows up to the line with `word`."""
    shown, deadline = "", time.monotonic() + 20
    while word not in shown or not shown.endswith("\n"):
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 4096).decode()
            except OSError:  # EIO: the last process at the terminal has gone
                assert word in shown, shown
                break
    return shown


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_rest_of_the_group_is_ended_after_a_signal(tmp_path: Path) -> None:
    code = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True); time.sleep(60)
    """
    process, out = start(tmp_path, code, stdin=subprocess.DEVNULL, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=20)
    assert out.read_text().startswith("[143, ")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_an_orphan_is_counted_and_not_waited_for(tmp_path: Path) -> None:
    code = """
        import os, time
        if os.fork() == 0:
            os.close(1); os.close(2); time.sleep(3); os._exit(0)
        os._exit(5)
    """
    began = time.monotonic()
    code_, _, orphans = outcome(tmp_path, code)
    assert (code_, orphans) == (5, 1)
    assert time.monotonic() - began < 2.5


def test_a_command_that_is_not_there_is_the_users_problem() -> None:
    with pytest.raises(GpudiagError, match="not found"):
        launch.spawn(["/nonexistent/python"], os.environ)
