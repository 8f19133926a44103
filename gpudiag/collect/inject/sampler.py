"""Looked at again and again: which line of the script the training thread is at, and whether the workers of the loader wait
for a disk.

Outside all phases the lines account for the time. On a GPU run each look is kept with its moment: one that lies in a wait for
the device says which line waits, whatever it calls (patch_sync.py tells what cannot be wrapped). The calls that wait give
the interpreter lock away, so the look does happen.
"""

from __future__ import annotations

import sys
import time
from typing import Callable, Dict, List, Tuple

from .log import Log
from .tracker import Tracker
from .where import line_of, log_call_of

MOST_A_SAMPLE_NS = 100_000_000  # beyond that the sampler itself was held up
MOST_LINES = 20
MOST_LOOKS = 8_000  # 40 s of recording; some 80 kB of the log
STATES_EVERY_NS = 20_000_000  # a look at a worker takes some 10 us


class LineSampler:
    """`sample` is called every few ms from another thread while a planned window records."""

    def __init__(self, tracker: Tracker, log: Log, on_gpu: Callable[[], bool]) -> None:
        self._tracker = tracker
        self._log = log
        self._on_gpu = on_gpu
        self._sampled = 0
        self._lines: Dict[Tuple[str, str], List[int]] = {}  # (kind of record, line): [samples, ns]
        self._places: Dict[str, int] = {}
        self._looks: List[Tuple[int, int]] = []  # (ns, number of the line in places)

    def sample(self) -> None:
        """Note the line that the training thread is at. Wakes late where a call keeps the interpreter lock, so a sample
        stands for the time since the last one; what a phase explains is no code outside of it."""
        now, before = time.monotonic_ns(), self._sampled
        self._sampled = now
        if not before or self._tracker.owner is None:
            return
        frame = sys._current_frames().get(self._tracker.owner)
        line = line_of(frame)
        if line and len(self._looks) < MOST_LOOKS:
            self._looks.append((now, self._places.setdefault(line, len(self._places))))
        if not self._tracker.busy:
            for kind, where in (("lines", line), ("log_lines", log_call_of(frame))):
                if where:
                    entry = self._lines.setdefault((kind, where), [0, 0])
                    entry[0] += 1
                    entry[1] += min(now - before, MOST_A_SAMPLE_NS)

    def write(self) -> None:
        """The lines with most time as one record, those of log calls as another, on a GPU run the looks as a third, and begin anew."""
        most = sorted(self._lines.items(), key=lambda item: -item[1][1])
        for kind in ("lines", "log_lines"):
            lines = [[where, count, ns] for (of, where), (count, ns) in most if of == kind][:MOST_LINES]
            if lines:
                self._log.write({"k": kind, "lines": lines})
        looks, places = self._looks, list(self._places)
        if looks and self._on_gpu():
            moments = [looks[0][0], *(after[0] - before[0] for before, after in zip(looks, looks[1:]))]
            self._log.write({"k": "looks", "places": places, "at": moments, "n": [place for _, place in looks]})
        self._lines, self._places, self._looks, self._sampled = {}, {}, [], 0


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
