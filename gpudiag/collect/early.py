"""A report of the recording while the application runs on: a training that never ends is judged, too.

The work is done by a process of its own, at low priority: the one that passes signals on must not be busy, and the
application must not feel it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

from gpudiag.collect.launch import end_with

AFTER_S = 3.0  # an application that ends so soon after its window gets its report then
NICENESS = 10
ENDING_S = 5.0  # how long the process may take to clean up behind itself


class Early:
    """`look` is called again and again while the application runs, `end` once it has ended.

    captured: whether the planned window is saved; command: the command line of the process, given the s since the start.
    """

    def __init__(self, captured: Callable[[], bool], command: Callable[[float], list[str]]) -> None:
        self._captured = captured
        self._command = command
        self._began = time.monotonic()
        self._captured_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._tried = False

    @property
    def judged(self) -> bool:
        """Whether the report is there."""
        return self._process is not None and self._process.poll() == 0

    def look(self) -> None:
        now = time.monotonic()
        if self._tried or not self._captured():
            return
        self._captured_at = self._captured_at or now
        if now - self._captured_at < AFTER_S:
            return
        self._tried = True
        before_exec = end_with(os.getpid())

        def lowered() -> None:
            before_exec()
            os.nice(NICENESS)

        try:
            self._process = subprocess.Popen(
                self._command(now - self._began),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # no Ctrl-C for it
                preexec_fn=lowered,
            )
        except OSError:  # no process or no memory left: the report at the end is the one that counts
            return

    def end(self) -> None:
        """The whole recording is judged next: what is not written by now need not be."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
