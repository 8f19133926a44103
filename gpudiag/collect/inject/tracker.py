"""What the training thread is doing: nested phases, steps, and the totals of each step.

One thread is followed, the one that steps. Everything is exclusive: a phase's time is without the phases inside it, so
that the phases of a step never sum to more than the step.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from .cpu_wait import CpuWait
from .log import Log

# What ends a step, strongest first: once a stronger sign is seen, weaker ones no longer end steps.
SOURCES = ("forward", "loader", "optimizer")


class Emitter:
    """Where ranges go as they happen. The default is nowhere: the totals are kept in any case."""

    def begin(self, name: str, index: Optional[int] = None) -> Any:
        return None

    def end(self, token: Any) -> None:
        return None


class Cycle:
    """Which of several optimizers (or loaders, or models) marks the turn: the first seen, as long as it takes part.

    A GAN steps two optimizers in turn and makes one step of both. When another comes round twice without the leader,
    the leader is gone and the other leads.
    """

    def __init__(self) -> None:
        self._leader: Optional[int] = None
        self._others: Set[int] = set()

    def turn(self, key: int) -> bool:
        if self._leader is None or key == self._leader or key in self._others:
            self._leader = key
            self._others.clear()
            return True
        self._others.add(key)
        return False


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """A fault of ours ends the watching, never the script."""

    @functools.wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            self.give_up(error)
            return 0

    return call


class Tracker:
    """Phases and steps of one thread. `on_step(count, source)` runs between steps and may start or stop a recording."""

    def __init__(self, log: Log, on_step: Callable[[int, str], None]) -> None:
        self.log = log
        self.on_step = on_step
        self.emitter = Emitter()
        self.recording = False
        self.critical = False  # our own ranges are being opened or closed: no moment to end a recording
        self.capturing: Dict[int, int] = {}  # CUDA graphs (by id) that are being captured, and the thread of each
        self.captured: Dict[int, int] = {}  # CUDA graphs (by id) that hold a step of an optimizer, and its key
        self.quiet = threading.RLock()  # held while a recording starts or ends, and while a capture begins
        self.owner = threading.main_thread().ident
        self.elsewhere: Optional[int] = None  # the thread that steps, where it is not the main one
        self.missed = 0  # steps of that thread that could not be followed
        self.source = ""
        self.count = 0  # completed steps of this source
        self.index = -1  # of the step in progress, over all sources
        self.last_checkpoint, self.saved_in_step = 0, False
        self.loader = -1  # that gave the last batch
        self.workers: List[int] = []  # pids of that loader's worker processes
        self._evaluating: Set[int] = set()  # loaders whose last batch went into an evaluation
        self._cycles = {source: Cycle() for source in SOURCES}
        self._stack: List[List[Any]] = []  # [name, start, ns of inner phases, token of the emitter]
        self._open_step = False
        self._start = 0
        self._token: Any = None
        self._queued = CpuWait().queued
        self._queued_before = -1
        self._clean = True  # the whole step in progress ran with the same state of recording
        self._phases: Dict[str, int] = {}
        self._sites: Dict[Tuple[str, str], List[int]] = {}
        self._syncs: Dict[Tuple[str, str], List[int]] = {}

    def mine(self) -> bool:
        return threading.get_ident() == self.owner

    @_guarded
    def push(self, name: str) -> None:
        self.critical = True
        if not self._open_step:
            self._open(time.monotonic_ns())
        token = self.emitter.begin(name)
        self._stack.append([name, time.monotonic_ns(), 0, token])
        self.critical = False

    @_guarded
    def pop(self, where: str = "") -> int:
        """Close the innermost phase; `where` books it on a line of the user's code. Returns its whole length in ns."""
        name, start, inner, token = self._stack.pop()
        now = time.monotonic_ns()
        if token is not None:
            self.emitter.end(token)
        length: int = now - start
        if self._stack:
            self._stack[-1][2] += length
        self._phases[name] = self._phases.get(name, 0) + length - inner
        if where:
            _add(self._sites, (name, where), length - inner)
        if name == "checkpoint":
            self.last_checkpoint, self.saved_in_step = now, True
        return length

    @_guarded
    def pop_to(self, name: str, where: str = "") -> int:
        """Close phases up to and with the innermost `name`: those within it were left by an exception."""
        while self._stack[-1][0] != name:
            self.pop()
        return self.pop(where)

    def inside(self, name: str) -> bool:
        for entry in self._stack:
            if entry[0] == name:
                return True
        return False

    def fed(self, evaluates: bool) -> None:
        """A model is called: what the last batch was for."""
        if evaluates:
            self._evaluating.add(self.loader)
        else:
            self._evaluating.discard(self.loader)

    def waits_in(self, loader: int, grad_enabled: bool) -> str:
        """The phase of a wait for a batch: an evaluation within training is kept apart with all that belongs to it."""
        self.loader = loader
        apart = self.source == "optimizer" and (loader in self._evaluating or not grad_enabled)
        return "eval" if apart else "data_wait"

    def give_up(self, error: Exception) -> None:
        """Watch nothing from now on, and say why."""
        if self.owner is not None:
            self.owner, self.critical = None, False
            self.log.write({"k": "note", "note": "watching stopped: %s: %s" % (type(error).__name__, error)}, True)

    def adopt(self) -> None:
        """Follow the calling thread from now on: the script trains outside the main thread.

        A range that is open in the thread followed so far has to be closed there: the recorder sees to it."""
        self.elsewhere = threading.get_ident()
        if not self._stack and self._token is None and self.owner is not None:
            self.owner, self.emitter, self.recording = threading.get_ident(), Emitter(), False
        else:
            self.missed += 1

    @property
    def open_ranges(self) -> bool:
        """Whether a range is open in the emitter: never between two steps, where on_step is called."""
        return self._token is not None or any(entry[3] is not None for entry in self._stack)

    @property
    def busy(self) -> bool:
        return bool(self._stack)

    def sync(self, what: str, where: str, length: int) -> None:
        _add(self._syncs, (what, where), length)

    @_guarded
    def turn(self, source: str, key: int) -> None:
        """A sign that a step may be over: an optimizer has stepped, a loader is asked, a model is called."""
        if self.capturing and self._into_graph(source, key):
            return
        known = SOURCES.index(self.source) if self.source else -1
        rank = SOURCES.index(source)
        if rank < known:
            return
        if rank > known:
            self.source, self.count = source, 0
            self.log.write({"k": "source", "source": source, "at": time.monotonic_ns(), "from": max(self.index, 0)})
            if source != "optimizer" and self._open_step:
                # these signs come at the start of a step; what lies before the first belongs to none
                self._close(time.monotonic_ns(), whole=False)
        if self._cycles[source].turn(key):
            self.boundary()

    def _into_graph(self, source: str, key: int) -> bool:
        """Whether this thread captures a CUDA graph: then nothing runs now, and each replay will be what is seen here."""
        graphs = [graph for graph, thread in list(self.capturing.items()) if thread == threading.get_ident()]
        if source == "optimizer":
            for graph in graphs:
                self.captured.setdefault(graph, key)
        return bool(graphs)

    def boundary(self) -> None:
        """End the step in progress and begin the next; phases that are open across it are split."""
        self.critical = True
        now = time.monotonic_ns()
        had_step = self._open_step
        for entry in reversed(self._stack):
            self._end_token(entry)
            self._phases[entry[0]] = self._phases.get(entry[0], 0) + now - entry[1] - entry[2]
        if had_step:
            self._close(now)
            self.count += 1
        self.on_step(self.count, self.source)
        self._open(time.monotonic_ns())
        for entry in self._stack:
            entry[3] = self.emitter.begin(entry[0])
            entry[1], entry[2] = time.monotonic_ns(), 0
        self.critical = False

    def _end_token(self, entry: List[Any]) -> None:
        token, entry[3] = entry[3], None
        if token is not None:
            self.emitter.end(token)

    def detach(self, emitter: Emitter) -> None:
        """Close every range that is open in the present emitter and go on with another, maybe in the middle of a step,
        which then counts neither as recorded nor as plain.

        A record_function that a stopped profiler has opened must not be closed under the next one: torch crashes.
        """
        for entry in reversed(self._stack):
            self._end_token(entry)
        if self._token is not None:
            self.emitter.end(self._token)
            self._token = None
        self.emitter = emitter
        self._clean = False

    def finish(self) -> None:
        """Write what is known of the step in progress; it is no step, since nothing ended it."""
        if self._open_step:
            self._close(time.monotonic_ns(), whole=False)
        self.log.flush()

    def _open(self, now: int) -> None:
        self.index += 1
        self._open_step = True
        self._clean, self.saved_in_step = True, False
        self._token = self.emitter.begin("step", self.index)
        self._queued_before = self._queued()
        self._start = now

    def _close(self, now: int, whole: bool = True) -> None:
        if self._token is not None:
            self.emitter.end(self._token)
            self._token = None
        self._open_step = False
        record: Dict[str, Any] = {"k": "step", "i": self.index, "s": self._start, "e": now, "o": self.source}
        queued = self._queued()
        if queued >= 0 and self._queued_before >= 0:
            record["q"] = queued - self._queued_before
        if not whole:
            record["partial"] = 1
        if not self._clean:
            record["mixed"] = 1
        if self.recording:
            record["r"] = 1
        if self._phases:
            record["p"] = self._phases
        if self._sites:
            record["w"] = [[name, where, n, ns] for (name, where), (n, ns) in self._sites.items()]
        if self._syncs:
            record["y"] = [[what, where, n, ns] for (what, where), (n, ns) in self._syncs.items()]
        # what nsys has of a recorded step outlives a SIGKILL, and without this record it is no step; some 3 us
        self.log.write(record, flush=self.recording)
        self._phases, self._sites, self._syncs = {}, {}, {}


def _add(table: Dict[Tuple[str, str], List[int]], key: Tuple[str, str], length: int) -> None:
    entry = table.get(key)
    if entry is None:
        table[key] = [1, length]
    else:
        entry[0] += 1
        entry[1] += length
