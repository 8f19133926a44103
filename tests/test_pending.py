"""What runs between two bytecodes of the script's must not swallow what a signal handler of the script's raises there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
SCRIPT = """
import os, signal, sys, threading, time
sys.path.insert(0, {repo!r})
from gpudiag.collect.inject.pending import PendingCall
class Stop(Exception): pass
def handler(number, frame):
    {raises}
signal.signal(signal.SIGTERM, handler)
def run():
    os.kill(os.getpid(), signal.SIGTERM)  # the signal strikes here
    for _ in range(1000): pass
    {fails}
def failed(error): print("ours:", error, flush=True)
call = PendingCall(run, failed, {library!r})
threading.Timer(0.1, call.ask).start()
def train():
    for _ in range(300): time.sleep(0.005)
train()
print("went on")
"""


def ran(raises: str, fails: str = "pass", library: str = "/nowhere/") -> tuple[int, str, list[str]]:
    code = SCRIPT.format(repo=str(REPO), raises=raises, fails=fails, library=library)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("raises", "code", "last"),
    [
        ("sys.exit(7)", 7, ""),
        ("raise Stop('x')", 1, "Stop: x"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_what_a_handler_raises_comes_out_where_the_script_was_interrupted(raises: str, code: int, last: str) -> None:
    got, out, err = ran(raises)
    assert (got, out, "".join(err[-1:])) == (code, "", last)
    assert not any("pending.py" in line or "ignored" in line for line in err)
    if last:
        assert any("in train" in line for line in err) and any("in handler" in line for line in err)


def test_an_error_of_ours_is_kept_from_the_script() -> None:
    assert ran("pass", "1 / 0", library="<string>") == (0, "ours: division by zero\nwent on\n", [])
