"""Which lines of the script the training thread is at outside all phases, by looking again and again."""

from __future__ import annotations

import sys
import time
from typing import Dict, List, Tuple

from .log import Log
from .tracker import Tracker
from .where import line_of, log_call_of

MOST_A_SAMPLE_NS = 100_000_000  # beyond that the sampler itself was held up
MOST_LINES = 20


class LineSampler:
    """`sample` is called every few ms from another thread while a planned window records."""

    def __init__(self, tracker: Tracker, log: Log) -> None:
        self._tracker = tracker
        self._log = log
        self._sampled = 0
        self._lines: Dict[Tuple[str, str], List[int]] = {}  # (kind of record, line): [samples, ns]

    def sample(self) -> None:
        """Note the line that the training thread is at, unless a phase explains it. Wakes late where a call keeps the
        interpreter lock, so a sample stands for the time since the last one."""
        now, before = time.monotonic_ns(), self._sampled
        self._sampled = now
        if before and not self._tracker.busy and self._tracker.owner is not None:
            frame = sys._current_frames().get(self._tracker.owner)
            for kind, line in (("lines", line_of(frame)), ("log_lines", log_call_of(frame))):
                if line:
                    entry = self._lines.setdefault((kind, line), [0, 0])
                    entry[0] += 1
                    entry[1] += min(now - before, MOST_A_SAMPLE_NS)

    def write(self) -> None:
        """The lines with most time as one record, those of log calls as another, and begin anew."""
        most = sorted(self._lines.items(), key=lambda item: -item[1][1])
        for kind in ("lines", "log_lines"):
            lines = [[where, count, ns] for (of, where), (count, ns) in most if of == kind][:MOST_LINES]
            if lines:
                self._log.write({"k": kind, "lines": lines})
        self._lines, self._sampled = {}, 0
