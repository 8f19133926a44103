"""When torch.profiler records, and getting its trace onto the disk before anything can happen to the process.

Two kinds of window. `early`: from the import of torch on, so that a script without steps (or one that crashes before
the warm-up is over) leaves something; dropped as soon as a planned window exists. `steps`: the planned one, after the
warm-up, for N steps. The profiler's events are never turned into Python objects (`_disable_profiler().save`): that is
what makes torch.profiler triple its memory at the stop.
"""

from __future__ import annotations

import _thread
import mmap
import os
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

from .cpu_wait import machine
from .log import Log, clock
from .memory import allocator, heap
from .patch_threads import ThreadEnd
from .pending import PendingCall
from .sampler import LineSampler, WorkerStates
from .torch_trace import Profiler, TorchEmitter
from .tracker import Emitter, Tracker

NS = 1_000_000_000
WARM_UP_STEPS, WARM_UP_NS, WARM_UP_MOST = 5, NS // 2, 25  # default: 5 steps and half a second, 25 steps at most
EARLY_AT_S = (0.0, 15.0, 60.0)  # when a script without steps is recorded, s after the import of torch; the last stays
EARLY_NS = 3 * NS
WINDOW_NS = 60 * NS  # a window of slow steps ends after this, having at least one step
# Kineto keeps every event until the stop: 220 bytes of heap an event while it records, six times that at the stop, which
# takes some 4 us an event (torch 2.14, measured). So a recording ends early by how much the heap has grown:
EARLY_HEAP = 64 << 20  # 300 000 events
STEP_HEAP = ((5, 64 << 20), (3, 128 << 20), (1, 256 << 20))  # with at least so many steps
HARD_HEAP = 512 << 20  # in the middle of a step
RESERVE = 64 << 20  # of address space, never touched: for saving a recording where the script has left no memory
POLL_S = 0.05
SAMPLE_S = 0.005  # while a planned window records: which line runs outside all phases; some 1 % of one CPU
MOST_VAIN_STARTS = 10


class Recorder:
    """Owns at most one running torch profiler, on the tracker's thread."""

    early_at_s = EARLY_AT_S
    early_ns = EARLY_NS

    def __init__(
        self, torch: Any, folder: str, stem: str, log: Log, tracker: Tracker, asked: Dict[str, Any], rank: int
    ) -> None:
        self._torch = torch
        self._profiler = Profiler(torch, log, rank)
        self._folder = folder
        self._trace = os.path.join(folder, stem + ".kineto.json")
        self._marker = os.path.join(folder, "recording.%d" % os.getpid())
        self._captured = os.path.join(folder, "captured.%d" % os.getpid())
        self._finish_request = os.path.join(folder, "finish")
        self._log = log
        self._tracker = tracker
        self._warm_up: Optional[int] = asked.get("warmup")
        self._steps: int = asked.get("steps") or 20
        self._profile: Any = None
        self._prepared: Any = None
        self._kind = ""  # early | steps
        self._thread = 0
        self._began = 0
        self._began_count = 0
        self._memory = 0
        self._machine: Dict[str, Any] = {}  # when the last recording ended
        self._cuda = False
        self._done = False
        self._exported = ""
        self._source = ""
        self._base_count = 0
        self._base_time = 0
        self._watching = False
        self._requests: List[Tuple[str, int]] = []  # (reason, which recording) from the watch, at most one
        self._held: Optional[Tuple[Any, int, int]] = None  # an early recording that a planned one may replace
        self._vain = 0
        self._stopping = False
        self._samplers = (LineSampler(tracker, log, torch.cuda.is_initialized), WorkerStates(tracker, log))
        self._local = threading.local()
        self._recordings = 0  # started so far: a request that is late must not end the next one
        library = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
        self._pending = PendingCall(self._on_pending, self._pending_failed, library)
        self._reserve = _reserve()
        self.inside = False  # our own calls into the profiler: not to be taken for the script's
        self.off = False  # for good

    # -- decisions ---------------------------------------------------------------------------------------------------

    def begin_early(self) -> None:
        """Called right after the import of torch."""
        self._base_time = time.monotonic_ns()
        self._start("early")
        self._watch()

    def on_step(self, count: int, source: str) -> None:
        """Between two steps: `count` steps of `source` are complete."""
        with self._tracker.quiet:
            self._decide(count, source, time.monotonic_ns())

    def _decide(self, count: int, source: str, now: int) -> None:
        if source != self._source:
            # a stronger sign of steps: what was recorded by the weaker one (an evaluation before training) is replaced
            self._source, self._base_count, self._base_time, self._done = source, count, now, False
            self._began_count = count
        if self.off or self._stopping or (self._profile is not None and threading.get_ident() != self._thread):
            return  # torch's profiler follows one thread and can be ended by that one only
        if self._tracker.capturing:
            return  # a CUDA graph, in another thread: starting and stopping synchronise, which would break it
        if self._profile is not None and self._kind == "steps":
            self._note_memory()
            recorded = count - self._began_count
            if recorded >= self._steps:
                self._stop("complete", recorded)
            elif recorded and now - self._began > WINDOW_NS:
                self._stop("time", recorded)
            else:
                grown = self._grown()
                if any(recorded >= steps and grown > limit for steps, limit in STEP_HEAP):
                    self._stop("memory", recorded)
        elif not self._done and self._is_warm(count - self._base_count, now - self._base_time):
            if self._profile is not None:
                # The optimizer's own record_function is open just now: one step in between, then the next recording.
                self._hold()
            elif self._may_start() and self._is_prepared():
                self._start("steps")
                self._began_count = count
                self._note_memory()
                self._watch()

    def _grown(self) -> int:
        return heap() - self._memory

    def _note_memory(self) -> None:
        """The GPU's memory between two steps, where a leak shows, and the peaks, which lie within."""
        found = allocator(self._torch)
        if found:
            self._log.write({"k": "alloc", "at": time.monotonic_ns(), **found})

    def _write_samples(self) -> None:
        for sampler in self._samplers:
            sampler.write()

    def _is_warm(self, count: int, elapsed: int) -> bool:
        if self._warm_up is not None:
            return count >= self._warm_up
        return count >= WARM_UP_STEPS and (elapsed >= WARM_UP_NS or count >= WARM_UP_MOST)

    def script_profiles(self) -> None:
        """The script starts a profiler of its own: CUPTI and torch serve one at a time, so ours gives way."""
        self._stop("own_profiler")
        self.off = True

    def script_profiled(self) -> None:
        """The script's profiler has ended: warm up anew, then record."""
        self.off = False
        self._base_count, self._base_time = self._tracker.count, time.monotonic_ns()

    def finish(self) -> None:
        """The process is about to end."""
        if self._reserve is not None:
            self._reserve.close()
        if self._tracker.elsewhere is not None and not self._done:
            self._note_elsewhere()
        self._stop("end")
        self.off = True

    def records_here(self) -> bool:
        """Whether this thread is in the recording of the first seconds, which nobody else can end."""
        return self._profile is not None and self._kind == "early" and threading.get_ident() == self._thread

    def main_ends(self) -> None:
        if self.records_here():
            self._stop("end")

    def thread_ends(self) -> None:
        """The calling thread ends: torch crashes where its recording has not been ended by then."""
        with self._tracker.quiet:
            self._stop("end", self._tracker.count - self._began_count)

    def _note_elsewhere(self) -> None:
        """The script trained in a thread, and its steps could not be recorded."""
        recording = self._profile is not None and self._kind == "steps"  # nsys, to the end
        warm = self._is_warm(self._tracker.count - self._base_count, time.monotonic_ns() - self._base_time)
        if not recording and (warm or self._tracker.missed > WARM_UP_MOST):
            note = (
                "the script's steps ran in a thread, which could not be recorded since the main thread waited for"
                " something else than its end: let it wait by Thread.join(), or train in the main thread"
            )
            self._log.write({"k": "note", "note": note})

    def forget_in_child(self) -> None:
        """In a forked child: the parent's profiler must not fill the child's memory."""
        if self._profile is not None:
            self._profile = None
            self._torch._C._autograd._enable_record_function(False)

    # -- the profiler ------------------------------------------------------------------------------------------------

    def _is_prepared(self) -> bool:
        """With a GPU, CUPTI gets a step to warm up in: without it the first kernels of a recording are lost."""
        if self._prepared is None and self._torch.cuda.is_initialized():
            self._prepared = self._prepare(cuda=True)
            return False
        return True

    def _prepare(self, cuda: bool) -> Any:
        self.inside = True
        profile = self._profiler.prepared(cuda)
        self.inside = False
        self.off = self.off or profile is None
        return profile

    def _start(self, kind: str) -> None:
        # CUDA only once the script has set it up: CUPTI would initialise it, and break a script that forks first.
        # Never is_available(): it warns and sets things up on its own.
        cuda = bool(self._torch.cuda.is_initialized())
        profile, self._prepared = self._prepared or self._prepare(cuda), None
        if profile is None:
            return
        self._recordings += 1
        self.inside = True
        if not self._profiler.start(profile, cuda):
            self.off, self.inside = True, False
            return
        self._profile, self._kind, self._cuda, self._thread = profile, kind, cuda, threading.get_ident()
        self._began, self._memory = time.monotonic_ns(), heap()
        if threading.current_thread() is not threading.main_thread():
            self._local.end = ThreadEnd(self.thread_ends)
        self._tracker.detach(TorchEmitter(self._torch))
        self._tracker.recording = True
        self._log.write({**clock(), "event": "start", "window": kind, "cuda": cuda, "machine": machine()}, flush=True)
        touch(self._marker)
        self.inside = False

    def _end(self) -> Any:
        self.inside = True
        self._machine = machine()
        self._profile = None
        self._tracker.detach(Emitter())
        self._tracker.recording = False
        try:
            return self._profiler.end(self._cuda and not self._tracker.capturing)
        finally:
            self.inside = False

    def _hold(self) -> None:
        """End an early recording, to be saved only if no better one comes."""
        self._held = (self._end(), self._began, time.monotonic_ns())
        _remove(self._marker)

    def _may_start(self) -> bool:
        """Never under a range of the script's that an earlier recording has seen begin: closing it then would write to
        memory that torch has freed. Such a range spans steps (an epoch); after some vain tries there is no recording."""
        if not self._profiler.ranges_open():
            return True
        self._vain += 1
        if self._vain > MOST_VAIN_STARTS:
            self._log.write(
                {"k": "note", "note": "no steps were recorded: the script keeps a record_function open over them"}
            )
            self.off = True
        return False

    def _stop(self, reason: str, steps: int = 0) -> None:
        """End the recording, if there is one, and put it on disk at once."""
        if self._profile is not None and threading.get_ident() == self._thread:
            self._stopping = True  # the steps may be on another thread, and must not start a recording meanwhile
            kind, began, stopped = self._kind, self._began, time.monotonic_ns()
            result = self._end()
            self._done = kind == "steps"
            self._write_samples()
            if kind == "steps" or not self._exported:
                self._save(result, kind, reason, steps, began, stopped)
            _remove(self._marker)
            self._stopping = False
        elif self._held is not None and not self._exported:
            self._save(self._held[0], "early", reason, 0, *self._held[1:])

    def _save(self, result: Any, kind: str, reason: str, steps: int, began: int, stopped: int) -> None:
        self._held = None
        if result is None:
            return
        try:
            # as bytes: pybind takes no path that is not UTF-8 as str
            result.save(os.fsencode(self._trace + ".part"))
            os.replace(self._trace + ".part", self._trace)
        except (OSError, RuntimeError, TypeError) as error:
            self._log.write({"k": "note", "note": "the trace could not be written: %s" % error}, flush=True)
            return
        self._exported = kind
        record = {
            **clock(),
            "event": "stop",
            "window": kind,
            "reason": reason,
            "steps": steps,
            "from": began,
            "to": stopped,
            "machine": self._machine,
        }
        record.update(
            paused_ns=time.monotonic_ns() - stopped if kind == self._kind else 0, file=os.path.basename(self._trace)
        )
        self._log.write(record, flush=True)
        if kind == "steps":
            touch(self._captured)

    # -- the watch: an eye on time, memory and the launcher's requests while recording ---------------------------------

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            _thread.start_new_thread(self._watch_loop, ())  # not threading's: the script counts those

    def _watch_loop(self) -> None:
        pid, started = os.getpid(), time.monotonic_ns()
        early = [int(at * NS) for at in self.early_at_s if at]
        while os.getpid() == pid:
            sampling = self._profile is not None and self._kind == "steps"
            time.sleep(SAMPLE_S if sampling else POLL_S)
            if sampling:
                for sampler in self._samplers:
                    sampler.sample()
            if self._tracker.capturing:
                continue  # a recording can neither start nor end now
            now = time.monotonic_ns()
            reason = ""
            if self._profile is not None:
                if os.path.exists(self._finish_request):
                    reason = "asked"
                elif self._kind == "early" and now - self._began > self.early_ns:
                    reason = "time"
                elif self._kind == "early" and self._tracker.elsewhere not in (None, self._thread):
                    reason = "elsewhere"
                elif self._grown() > (EARLY_HEAP if self._kind == "early" else HARD_HEAP):
                    reason = "memory"
            elif self._source or self.off or not early:
                break
            elif now - started > early[0]:
                early.pop(0)
                reason = "early"
            if reason:
                self._requests.append((reason, self._recordings))
                self._pending.ask()
                while self._requests and os.getpid() == pid and not self.off:
                    time.sleep(POLL_S)
        self._watching = False

    def _on_pending(self) -> None:
        try:
            with self._tracker.quiet:
                self._answer(*(self._requests[0] if self._requests else ("", -1)))
        finally:
            del self._requests[:]

    def _answer(self, reason: str, recording: int) -> None:
        # inside: this call has struck in the midst of our own dealings with the profiler; the watch asks again
        amid = self.inside or self._tracker.critical or self._tracker.capturing
        # torch writes a warning to stderr for each of its own ranges that is open at the stop, and a compilation is full of them
        amid = amid or (reason == "time" and self._tracker.inside("compile"))
        if amid or self.off or recording != self._recordings:
            return
        if reason != "early":
            self._stop(reason)
            self.off = self.off or reason == "asked"
        elif self._profile is None and not self._source and self._may_start():
            self._start("early")

    def _pending_failed(self, error: Exception) -> None:
        self._log.write({"k": "note", "note": "stopping the recording failed: %s" % error})


def _reserve() -> Optional[mmap.mmap]:
    """None where there is no such room: ulimit -v is as low as that."""
    try:
        return mmap.mmap(-1, RESERVE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError):
        return None


def touch(path: str) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
    except OSError:
        pass


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
