"""A status on the terminal while a profile runs: on a row of its own, and nothing of it anywhere else."""

from __future__ import annotations

import json
import os
import pty
import select
import struct
import sys
import time
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

import pytest

from gpudiag.collect.watching import Watch

ROWS, COLUMNS = 24, 80
TRAIN = """
import sys, time, torch
net = torch.nn.Linear(8, 8); opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(40):
    opt.zero_grad(); net(torch.randn(4, 8)).sum().backward(); opt.step()
    time.sleep(0.1)
    sys.stdout.write("row %d, " % i if i % 2 else "and %d\\n" % i); sys.stdout.flush()
"""
WRITTEN = "".join(f"row {i}, " if i % 2 else f"and {i}\n" for i in range(40))


def at_a_terminal(command: list[str], cwd: Path) -> list[tuple[float, bytes]]:
    """Runs at a terminal of its own. Returns what arrived there, each piece with its time."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.environ["TERM"] = "xterm"
        os.environ.pop("PYTHONPATH", None)
        os.execv(command[0], command)
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    pieces, deadline = [], time.monotonic() + 90
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                pieces.append((time.monotonic(), os.read(terminal, 65536)))
            except OSError:  # EIO: the last process has closed it
                break
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return pieces


@pytest.mark.live
def test_the_status_has_the_last_row_to_itself_and_leaves_no_trace(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pyte = pytest.importorskip("pyte")
    (tmp_path / "train.py").write_text(TRAIN)
    options = ["--with", "torch", "-o", "bundle", "--warmup", "8", "--steps", "15", "--no-save"]
    pieces = at_a_terminal([sys.executable, "-m", "gpudiag", "profile", *options, "train.py"], tmp_path)
    screen = pyte.HistoryScreen(COLUMNS, ROWS, history=2000)
    stream = pyte.ByteStream(screen)
    statuses: list[str] = []
    for _, piece in pieces:
        stream.feed(piece)
        if (last := screen.display[-1].rstrip()).startswith("gpudiag: ") and last not in statuses[-1:]:
            statuses.append(last)
        above = "\n".join(screen.display[:-1])
        assert not any(text in above for text in ("warming up", "recording step", "the script runs on"))
    said = " ".join(statuses)
    for text in ("starting", "warming up, step ", "recording step ", "/15", "recorded; the script runs on"):
        assert text in said, said
    raw = b"".join(piece for _, piece in pieces)
    assert b"\x1b[r" in raw  # the row is given back
    rows = ["".join(cell.data for _, cell in sorted(row.items())).rstrip() for row in screen.history.top]
    shown = "\n".join([*rows, *(row.rstrip() for row in screen.display)])
    assert WRITTEN.split("\n", 1)[1].rsplit("\n", 1)[0] in shown
    assert "gpudiag: recording: bundle" in shown  # the report came after it
    assert "recording step" not in shown


def test_a_watch_tells_from_the_records_what_the_application_is_at(tmp_path: Path) -> None:
    log = tmp_path / "rank0.7.jsonl"
    watch = Watch(tmp_path, 2)

    def after(*records: dict[str, object]) -> str:
        with log.open("a") as file:
            for record in records:
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
        watch._looked = 0.0  # not waiting for the next look
        return watch.text()

    step: dict[str, object] = {"k": "step", "i": 0, "s": 1, "e": 2}
    assert watch.text() == "starting"
    assert (
        after({"k": "process"}, {"k": "clock", "event": "start", "window": "early"}) == "running, no step has ended yet"
    )
    assert after({**step, "r": 1}) == "warming up, step 2"
    assert after({"k": "clock", "event": "start", "window": "steps"}) == "recording step 1/2"
    assert after({**step, "r": 1}) == "recording step 2/2"
    assert after({**step, "r": 1}) == "saving the recording"
    assert after({"k": "clock", "event": "stop", "window": "steps"}, step) == "recorded; the script runs on, step 5"
