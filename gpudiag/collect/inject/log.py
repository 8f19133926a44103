"""A process's own record as JSON lines, readable up to the last full line whatever happens to the process.

Every line is an object with "k" (its kind; `read/loader_log.py` documents them all). Times are CLOCK_MONOTONIC ns, which
all processes of a machine share; "clock" lines pair it with the wall clock, which Kineto's traces use.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from typing import Any, Deque, Dict

FLUSH_NS = 200_000_000  # what a SIGKILL may lose; a write costs some microseconds
MAX_BYTES = 64 << 20  # about 300 000 steps; a run of weeks must not fill the disk


class Log:
    """One file, opened at the first line. A full or vanished disk closes it for good and the script goes on."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._lines: Deque[str] = deque()  # the pinning thread writes too
        self._flushed = 0
        self._bytes = 0
        self._pid = os.getpid()
        self.closed = False

    def write(self, record: Dict[str, Any], flush: bool = False) -> None:
        if self.closed or self._pid != os.getpid():
            return
        line = json.dumps(record, separators=(",", ":"))
        # perhaps a lone surrogate, of a file name that is not UTF-8: strict readers refuse the whole line
        if "\\ud" in line:
            line = json.dumps(_spelled(record), separators=(",", ":"))
        self._lines.append(line)
        now = time.monotonic_ns()
        if flush or now - self._flushed > FLUSH_NS:
            self.flush(now)

    def flush(self, now: int = 0) -> None:
        if self.closed or not self._lines or self._pid != os.getpid():
            return
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        data = ("\n".join(lines) + "\n").encode("utf-8", "replace")
        self._flushed = now or time.monotonic_ns()
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._bytes += len(data)
            if self._bytes > MAX_BYTES:
                data += b'{"k":"truncated"}\n'
                self.closed = True
            os.write(self._fd, data)
        except OSError:
            self.closed = True


def _spelled(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_spelled(key): _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    return value


def clock() -> Dict[str, Any]:
    """A pair (monotonic, wall) of one moment: the tightest of five tries."""
    best = None
    for _ in range(5):
        before = time.monotonic_ns()
        wall = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, wall)
    assert best is not None
    return {"k": "clock", "mono": best[1], "wall": best[2]}
