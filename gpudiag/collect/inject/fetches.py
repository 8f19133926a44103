"""What each fetch of a batch took: of the CPU, of the storage, of the transforms. One object a process."""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Callable, Dict, List

from .cpu_wait import CpuWait
from .log import Log

try:
    import resource

    _RUSAGE_THREAD = getattr(resource, "RUSAGE_THREAD", None)  # Linux
except ImportError:
    _RUSAGE_THREAD = None

FLUSH_NS = 2_000_000  # a fetch this long pays for its own write (some 20 us)
BLOCK = 512  # what ru_inblock counts in, on Linux


class Fetches:
    """Times each fetch of a process into that process's log. `log` is replaced in a forked worker."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.fetchers = 0  # created in this process: with persistent workers one an epoch
        self.threads: Callable[[], int] = lambda: 0  # torch.get_num_threads, once torch is there
        self.transforms: Dict[str, List[int]] = {}  # of the fetch in progress, by name: [calls, ns]; "" is all of them
        self._queued = CpuWait().queued
        self._thread = 0  # that is fetching now
        self._before: List[int] = []

    def fetching(self) -> bool:
        """Whether the calling thread is in the midst of a fetch."""
        return self._thread == threading.get_ident()

    def transformed(self, name: str, ns: int) -> None:
        entry = self.transforms.setdefault(name, [0, 0])
        entry[0] += 1
        entry[1] += ns

    def begin(self) -> None:
        self._thread = threading.get_ident()
        self.transforms = {}
        self._before = [
            self._queued(),
            _read_bytes(),
            time.process_time_ns(),
            time.thread_time_ns(),
            time.monotonic_ns(),
        ]

    def end(self, state: List[int], number: int, worker: int) -> None:
        """state: which fetcher, batches so far, ns of the last collate; number of the batch, worker: -1 in the main process."""
        ended, cpu, process_cpu = time.monotonic_ns(), time.thread_time_ns(), time.process_time_ns()
        queued, read, process_before, cpu_before, began = self._before
        self._thread = 0
        record: Dict[str, Any] = {
            "k": "fetch",
            "f": state[0],
            "n": state[1],
            "b": number,
            "w": worker,
            "s": began,
            "e": ended,
            "c": state[2],
            "cpu": cpu - cpu_before,
            "pc": process_cpu - process_before,
            "pt": process_cpu,
            "q": self._queued() - queued if queued >= 0 else -1,
        }
        if read >= 0:
            record["rd"] = _read_bytes() - read
        if "" in self.transforms:
            record["x"] = self.transforms.pop("")[1]
            if self.transforms:
                record["xs"] = self.transforms
        # persistent workers are killed at the end: what took long enough to matter is on disk before that
        self.log.write(record, flush=ended - began > FLUSH_NS)
        if worker >= 0 and state[1] == 1:  # the second batch: threads are started by the first that needs them
            self._introduce(worker)

    def _introduce(self, worker: int) -> None:
        record = {"k": "worker", "w": worker, "threads": self.threads()}
        try:
            record["tasks"] = len(os.listdir("/proc/self/task"))
            record["cpus"] = sorted(os.sched_getaffinity(0))
        except (OSError, AttributeError):
            pass
        self.log.write(record)


def _read_bytes() -> int:
    """Bytes that this thread has had read from storage so far, page cache excluded; -1 where the system does not say."""
    if _RUSAGE_THREAD is None:
        return -1
    return int(resource.getrusage(_RUSAGE_THREAD).ru_inblock) * BLOCK
