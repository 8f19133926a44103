"""Under nsys: ranges as NVTX, and the window as the range "capture" that nsys waits for (collect/nsys.py).

nsys takes one window a run, so there is no early one to be replaced: a script that has shown no step opens it after half
a minute, once it uses the GPU, and keeps it for the steps if they come within a minute after all.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Optional

from . import nvtx_emit
from .cpu_wait import machine
from .log import clock
from .recorder import NS, Recorder, touch
from .tracker import Emitter

CAPTURE = "capture"
STEPLESS_AT_S = (30.0, 60.0, 120.0, 300.0)  # loading data and a model takes that long and is not worth the window
STEPLESS_NS = 60 * NS


def _gpu_present() -> bool:
    try:
        return any(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))
    except OSError:
        return False


class NvtxEmitter(Emitter):
    """Ranges in domain "gpudiag"; the step carries its number as payload."""

    def begin(self, name: str, index: Optional[int] = None) -> Any:
        nvtx_emit.push(name, index)
        return True

    def end(self, token: Any) -> None:
        nvtx_emit.pop()


class NvtxWindow(Recorder):
    """Decides as Recorder does; the recording itself is nsys's."""

    early_at_s = STEPLESS_AT_S
    early_ns = STEPLESS_NS

    def begin_early(self) -> None:
        self._base_time = time.monotonic_ns()
        self._watch()

    def _is_prepared(self) -> bool:
        return True

    def _grown(self) -> int:
        return 0  # nsys keeps its events in a process of its own

    def _hold(self) -> None:
        """The steps have come after all: the window that is open becomes theirs."""
        self._kind, self._began_count = "steps", self._tracker.count

    def _may_start(self) -> bool:
        if not self._source and _gpu_present() and not self._torch.cuda.is_initialized():
            return False
        return not self._recordings and not self._tracker.open_ranges  # nsys takes the first window and no other

    def _start(self, kind: str) -> None:
        nvtx_emit.push(CAPTURE)
        self._recordings += 1
        self._profile, self._kind, self._thread, self._began = True, kind, threading.get_ident(), time.monotonic_ns()
        self._tracker.recording = True
        self._log.write({**clock(), "event": "start", "window": kind, "cuda": True, "machine": machine()}, flush=True)

    def _stop(self, reason: str, steps: int = 0) -> None:
        # A range is closed by whoever is innermost: with others open this is not the moment, and the process's end closes all.
        if self._profile is None or threading.get_ident() != self._thread or self._tracker.open_ranges:
            return
        nvtx_emit.pop()
        self._profile, self._done = None, True
        self._tracker.recording = False
        self._write_samples()
        now = time.monotonic_ns()
        record = {**clock(), "event": "stop", "window": self._kind, "reason": reason, "steps": steps, "file": ""}
        record.update({"from": self._began, "to": now, "paused_ns": 0, "machine": machine()})
        self._log.write(record, flush=True)
        touch(os.path.join(self._folder, "captured.%d" % os.getpid()))
