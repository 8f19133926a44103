"""The part of gpudiag that lives in the user's process: decides what this process is, and wires everything up.

Roles: `main` (it may train: profiled, one profile a process that takes steps), `rank` (RANK is set: torchrun and the
like), `launcher` (torchrun, accelerate themselves: only noted), `spawned` (a child of multiprocessing: noted, its
loader fetches timed, and profiled only when it joins a process group, which makes it a rank), `forked` (the same).
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import sys
import threading
import time
from types import ModuleType
from typing import Any, Dict, List, Optional

from . import patch_graphs, patch_loader, patch_logging, patch_sync, patch_threads, patch_torch, patch_transforms
from .fetches import Fetches
from .imports import PostImport
from .log import Log, clock
from .memory import out_of_memory
from .patch_queue import shared_memory_error
from .recorder import Recorder
from .tracker import Emitter, Tracker
from .unseen import keep_from_dynamo, keep_from_warnings

GC_NS = 200_000  # shorter collections are not worth a line
LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands", "deepspeed.launcher")


class Agent:
    """One process's share of the profile."""

    def __init__(self, asked: Dict[str, Any]) -> None:
        self.asked = asked
        self.folder: str = asked["dir"]
        self.role = _role()
        self.rank = int(os.environ.get("RANK") or 0) if self.role == "rank" else 0
        self.log = Log(self._path(self.rank, "jsonl"))
        self.tracker = Tracker(self.log, self._on_step)
        self.fetches = Fetches(self.log)
        self.imports = PostImport()
        self.recorder: Optional[Recorder] = None
        self.torch: Optional[ModuleType] = None
        self._ended = False
        self._gc_began = 0

    def _path(self, rank: int, suffix: str) -> str:
        return os.path.join(self.folder, "rank%d.%d.%s" % (rank, os.getpid(), suffix))

    @property
    def profiled(self) -> bool:
        return self.role in ("main", "rank")

    # -- start and end of the process ------------------------------------------------------------------------------------

    def start(self) -> None:
        sys.meta_path.insert(0, self.imports)  # type: ignore[arg-type]
        self.imports.when("torch", self._torch_imported)
        atexit.register(self.finish)  # registered first, so run last
        leave = os._exit

        @functools.wraps(leave)
        def _exit(status: int) -> None:
            self.finish()
            leave(status)

        os._exit = _exit  # type: ignore[assignment]
        os.register_at_fork(after_in_child=self._forked)

    def finish(self) -> None:
        """The last words: the recording, the step in progress, what the process has used."""
        if self._ended:
            return
        self._ended = True
        try:
            self._finish()
        except MemoryError:  # there is none left, not even for a note; nothing of ours may stand on the script's stderr
            self.log.closed = True

    def _finish(self) -> None:
        if self.recorder is not None:
            self.recorder.finish()
        if self.torch is None and self.role == "main":
            self.log.write({"k": "no_torch", "pid": os.getpid(), "program": _program()})
        if self.torch is not None:
            if self.profiled:
                self.tracker.finish()
                # the end of a worker is told by a signal, which may strike anywhere in the training
                error = getattr(sys, "last_value", None)  # that ended the script
                said = shared_memory_error(error)
                if said:
                    self.log.write({"k": "shm_error", "l": -1, "said": said})
                elif out_of_memory(error):
                    self.log.write({"k": "oom", **out_of_memory(error)})
            used = os.times()
            children = used.children_user + used.children_system
            self.log.write(
                {"k": "end", "at": time.monotonic_ns(), "cpu": used.user + used.system, "children_cpu": children}
            )
        self.log.flush()

    def _forked(self) -> None:
        """In a forked child: a new, quiet process that only times loader fetches, into a file of its own."""
        self.role = "forked"
        self._ended = False
        self.tracker.owner = None
        self.tracker.emitter = Emitter()
        self.tracker.quiet, self.tracker.capturing = threading.RLock(), {}  # another thread may have held the lock
        if self.recorder is not None:
            self.recorder.off = True
            self.recorder.forget_in_child()
            self.recorder = None
        self.log = Log(self._path(self.rank, "jsonl"))
        self.tracker.log = self.fetches.log = self.log
        if self.torch is not None:
            self._introduce()

    # -- torch --------------------------------------------------------------------------------------------------------------

    def _torch_imported(self, torch: ModuleType) -> None:
        self.torch = torch
        self._introduce()
        try:
            self.fetches.threads = torch.get_num_threads
            patch_loader.install(torch, self.tracker, self.fetches)
            patch_transforms.install(self.imports, self.fetches, bool(self.asked.get("transforms")))
            if self.role == "launcher":
                return
            if self.role in ("spawned", "forked"):  # forked before torch was there: multiprocessing's forkserver
                self._watch_process_group(torch)
            else:
                self._profile(torch)
        except (AttributeError, TypeError, ImportError) as error:  # a torch whose insides look different
            self.log.write(
                {"k": "note", "note": "torch %s: not all of it could be watched: %s" % (torch.__version__, error)}
            )

    def _profile(self, torch: ModuleType) -> None:
        patch_torch.install(torch, self.tracker)
        patch_sync.install(torch, self.tracker)
        patch_graphs.install(torch, self.tracker)
        patch_logging.install(self.imports, self.tracker)
        self.imports.when("torch._dynamo.callback", lambda module: patch_torch.compiling(module, self.tracker))
        self.imports.when("torch._dynamo.convert_frame", lambda module: patch_torch.recompiling(module, self.tracker))
        gc.callbacks.append(self._collecting)
        if self.asked["mode"] == "torch":
            stem = "rank%d.%d" % (self.rank, os.getpid())
            self.recorder = Recorder(torch, self.folder, stem, self.log, self.tracker, self.asked, self.rank)
            patch_torch.own_profiler(torch, self.recorder, self.tracker)
            self.recorder.begin_early()
        else:
            from .nvtx_window import NvtxEmitter, NvtxWindow

            self.tracker.emitter = NvtxEmitter()
            self.recorder = NvtxWindow(torch, self.folder, "", self.log, self.tracker, self.asked, self.rank)
            patch_torch.own_profiler(torch, _NoRecorder(), self.tracker)
            self.recorder.begin_early()
        patch_threads.install(self.recorder)
        keep_from_dynamo(torch)

    def _watch_process_group(self, torch: Any) -> None:
        """A spawned child that joins a process group is a rank and gets a profile from then on."""
        distributed = getattr(torch, "distributed", None)
        join = getattr(distributed, "init_process_group", None)
        if join is None:
            return

        @functools.wraps(join)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            try:
                result = join(*args, **kwargs)
            except BaseException as error:
                patch_torch.forget(error)
                raise
            if not self.profiled:
                self.log.flush()
                self.role, self.rank = "rank", distributed.get_rank()
                self._introduce()
                self._profile(torch)
            return result

        distributed.init_process_group = init_process_group

    def _on_step(self, count: int, source: str) -> None:
        if self.recorder is not None:
            self.recorder.on_step(count, source)

    def _introduce(self) -> None:
        torch: Any = self.torch
        self.log.write(
            {
                **clock(),
                "k": "process",
                "pid": os.getpid(),
                "ppid": os.getppid(),
                "role": self.role,
                "rank": self.rank,
                "world": int(os.environ.get("WORLD_SIZE") or 1) if self.role == "rank" else 1,
                "python": "%d.%d.%d" % sys.version_info[:3],
                "torch": str(torch.__version__),
                "cuda": getattr(torch.version, "cuda", None),
                "threads": torch.get_num_threads() if self.role != "forked" else -1,
            },
            flush=True,
        )

    def _collecting(self, moment: str, info: Dict[str, Any]) -> None:
        # A collection can strike anywhere, in our own code too: take the times and nothing else.
        if not self.tracker.mine() or self.tracker.index < 0:
            return
        now = time.monotonic_ns()
        if moment == "start":
            self._gc_began = now
        elif self._gc_began and now - self._gc_began > GC_NS:
            self.log.write(
                {"k": "gc", "s": self._gc_began, "e": now, "g": info.get("generation"), "i": self.tracker.index}
            )


class _NoRecorder:
    """Under nsys nothing of ours records inside the process."""

    inside = False

    def script_profiles(self) -> None:
        return None

    def script_profiled(self) -> None:
        return None


def _command_line() -> List[str]:
    try:
        with open("/proc/self/cmdline", "rb") as file:
            return [part.decode("utf-8", "replace") for part in file.read().split(b"\0")]
    except OSError:
        return list(getattr(sys, "orig_argv", sys.argv))


def _program() -> str:
    """`train.py`, or `-m pkg.train`: a module that was not found leaves Python's placeholder in sys.argv."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    words = _command_line()
    if name == "-m" and "-m" in words[:-1]:
        return "-m " + words[words.index("-m") + 1]
    return name if name not in ("-c", "-m", "") else "python " + name


def _role() -> str:
    words = _command_line()
    if any(word == "--multiprocessing-fork" or word.startswith("from multiprocessing.") for word in words):
        return "spawned"
    program = os.path.basename(words[1]) if len(words) > 1 else ""
    if program in ("torchrun", "accelerate", "deepspeed"):
        return "launcher"
    if "-m" in words[:6] and any(word.startswith(LAUNCHERS) for word in words[:8]):
        return "launcher"
    if os.environ.get("RANK", "").isdigit() and os.environ.get("WORLD_SIZE", "").isdigit():
        return "rank"
    return "main"


def start() -> None:
    """Called by sitecustomize with GPUDIAG_CAPTURE = {"dir", "mode": torch|nsys, "warmup", "steps",
    "transforms"} as JSON."""
    keep_from_warnings()
    Agent(json.loads(os.environ["GPUDIAG_CAPTURE"])).start()
