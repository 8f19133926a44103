"""How far a running profile is, read from the records that the processes are writing (read/loader_log.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

EVERY_S = 0.3  # the processes write every 0.2 s at most
MOST_BYTES = 1 << 20  # a look; what lies beyond waits for the next


@dataclass
class _Process:
    """What one process's file has said so far. recorded: complete steps of the present window."""

    offset: int = 0
    rest: bytes = b""
    known: bool = False
    steps: int = 0
    window: str = ""
    recorded: int = 0
    saved: bool = False


class Watch:
    """`text()` says in a few words what the application is at. wanted: steps to be recorded."""

    def __init__(self, folder: Path, wanted: int) -> None:
        self._folder = folder
        self._wanted = wanted
        self._processes: dict[Path, _Process] = {}
        self._looked = 0.0
        self._text = "starting"

    def text(self, judged: bool = False) -> str:
        """judged: a report of the recording is there already."""
        now = time.monotonic()
        if now - self._looked >= EVERY_S:
            self._looked = now
            for file in self._folder.glob("rank*.jsonl"):
                self._read(file, self._processes.setdefault(file, _Process()))
            self._text = self._say(judged)
        return self._text

    def _say(self, judged: bool) -> str:
        known = [process for process in self._processes.values() if process.known]
        if not known:
            return "starting"
        first = max(known, key=lambda process: process.steps)
        if first.saved:
            done = "recorded, the report is written" if judged else "recorded"
            return f"{done}; the script runs on, step {first.steps + 1}"
        if first.window == "steps":
            if first.recorded >= self._wanted:
                return "saving the recording"
            return f"recording step {first.recorded + 1}/{self._wanted}"
        return f"warming up, step {first.steps + 1}" if first.steps else "running, no step has ended yet"

    def _read(self, path: Path, process: _Process) -> None:
        try:
            with path.open("rb") as file:
                file.seek(process.offset)
                data = file.read(MOST_BYTES)
        except OSError:
            return
        process.offset += len(data)
        *lines, process.rest = (process.rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b'{"k":"step"') and b'"partial"' not in line:
                process.steps += 1
                process.recorded += b'"r":1' in line
            elif line.startswith(b'{"k":"process"'):
                process.known = True
            elif line.startswith(b'{"k":"clock"'):
                _window(process, line)


def _window(process: _Process, line: bytes) -> None:
    """A recording has begun or was saved."""
    try:
        record = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.MsgspecError:
        return
    if record.get("event") == "start":
        process.window, process.recorded = str(record.get("window")), 0
    elif record.get("event") == "stop":
        process.window = ""
        process.saved = process.saved or record.get("window") == "steps"
