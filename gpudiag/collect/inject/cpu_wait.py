"""How long a thread waited for a CPU that others had, and how busy the machine was. Linux only; elsewhere -1 or nothing."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Dict, Tuple


class CpuWait:
    """Reads of the calling thread's run delay; some 2 us each (Linux 6.18, measured). The file stays open between them."""

    def __init__(self) -> None:
        self._fd = -1
        self._of: Tuple[int, int] = (0, 0)

    def queued(self) -> int:
        """ns that this thread has waited for a CPU so far (field 2 of schedstat); -1 where the kernel does not say."""
        me = (os.getpid(), threading.get_ident())
        if self._of != me:  # forked, or the training moved to another thread: the file is the opener's own
            if self._fd >= 0 and self._of[0] == me[0]:
                os.close(self._fd)
            self._of = me
            try:
                self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._fd = -1
        if self._fd < 0:
            return -1
        try:
            return int(os.pread(self._fd, 128, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return -1


def machine() -> Dict[str, Any]:
    """The machine at a moment: `load` average of a minute, `pressure` us in which some task has waited for a CPU, `busy` CPU
    ns that all CPUs have worked, `own` CPU ns of this process, `cpus` it may use. What cannot be read is left out."""
    now: Dict[str, Any] = {"at": time.monotonic_ns(), "own": time.process_time_ns()}
    try:
        now["cpus"] = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        pass
    load = _first_line("/proc/loadavg").split()
    if load:
        now["load"] = float(load[0])
    for word in _first_line("/proc/pressure/cpu").split():
        if word.startswith("total="):
            now["pressure"] = int(word[6:])
    fields = _first_line("/proc/stat").split()
    if len(fields) > 7 and fields[0] == "cpu":
        user, nice, system, _idle, _iowait, irq, softirq = map(int, fields[1:8])
        now["busy"] = (user + nice + system + irq + softirq) * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))
    return now


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline()
    except OSError:
        return ""
