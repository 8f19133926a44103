"""Looked at again and again: which line of the script the training thread is at outside all phases, and whether the workers
of the loader wait for a disk."""

from __future__ import annotations

import sys
import time
from typing import Dict, List

from .log import Log
from .tracker import Tracker
from .where import line_of

MOST_A_SAMPLE_NS = 100_000_000  # beyond that the sampler itself was held up
MOST_LINES = 20
STATES_EVERY_NS = 20_000_000  # a look at a worker takes some 10 us


class LineSampler:
    """`sample` is called every few ms from another thread while a planned window records."""

    def __init__(self, tracker: Tracker, log: Log) -> None:
        self._tracker = tracker
        self._log = log
        self._sampled = 0
        self._lines: Dict[str, List[int]] = {}  # [samples, ns]

    def sample(self) -> None:
        """Note the line that the training thread is at, unless a phase explains it. Wakes late where a call keeps the
        interpreter lock, so a sample stands for the time since the last one."""
        now, before = time.monotonic_ns(), self._sampled
        self._sampled = now
        if before and not self._tracker.busy and self._tracker.owner is not None:
            line = line_of(sys._current_frames().get(self._tracker.owner))
            if line:
                entry = self._lines.setdefault(line, [0, 0])
                entry[0] += 1
                entry[1] += min(now - before, MOST_A_SAMPLE_NS)

    def write(self) -> None:
        """The lines with most time as one record, and begin anew."""
        if self._lines:
            lines = sorted(self._lines.items(), key=lambda item: -item[1][1])[:MOST_LINES]
            self._log.write({"k": "lines", "lines": [[where, count, ns] for where, (count, ns) in lines]})
        self._lines, self._sampled = {}, 0


class WorkerStates:
    """The state of each worker process of the loader in use (proc(5), field 3 of stat): D waits for a disk, S for anything
    else. `sample` is called every few ms while a planned window records."""

    def __init__(self, tracker: Tracker, log: Log) -> None:
        self._tracker = tracker
        self._log = log
        self._sampled = 0
        self._seen: Dict[str, int] = {}

    def sample(self) -> None:
        now = time.monotonic_ns()
        if now - self._sampled < STATES_EVERY_NS:
            return
        self._sampled = now
        for pid in self._tracker.workers:
            try:
                with open("/proc/%d/stat" % pid, "rb") as file:
                    state = file.read().rpartition(b") ")[2][:1].decode("ascii", "replace")
            except OSError:  # it has ended
                continue
            self._seen[state] = self._seen.get(state, 0) + 1

    def write(self) -> None:
        """The counts as one record, and begin anew."""
        if self._seen:
            self._log.write({"k": "states", "seen": self._seen})
        self._seen = {}
