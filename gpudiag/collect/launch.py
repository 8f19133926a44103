"""Run the user's command as if gpudiag were not there: streams, working directory, signals, exit code.

Streams are inherited, never piped. Signals reach the application exactly once, in whichever way they come:

- In the foreground of a terminal the application shares gpudiag's process group, so that Ctrl-C, Ctrl-Z and reading
  from the terminal work as always. What the terminal sends (si_code SI_KERNEL) has reached it already; what somebody
  sends to gpudiag alone (`kill PID`) is passed on.
- Elsewhere (a pipe, CI, `timeout`, a scheduler) it gets a group of its own and gpudiag passes signals on, since a
  sender like `timeout` signals both gpudiag and its whole group: the second copy within half a second is dropped.

Orphans are not waited for: gpudiag makes itself their reaper (Linux) to be able to name them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpudiag.errors import GpudiagError

SI_KERNEL = 0x80
SAME_SIGNAL_S = 0.5  # `timeout` sends to its child and to the group within microseconds; a person needs longer
LAST_WORDS_S = 1.0  # what the application has to end by itself after the second Ctrl-C
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
POLL_S = 0.1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Outcome:
    """How the application ended. exit_code as a shell has it (128 + signal). orphans: pids that it left running.

    signals: what was passed on, in order. stopped_by_us: ended on request (`--stop-after-capture`).
    """

    exit_code: int
    wall_s: float
    orphans: tuple[int, ...] = ()
    signals: tuple[str, ...] = ()
    stopped_by_us: bool = False


@dataclass
class Application:
    """A started application. `send` signals it (its whole group when asked), `poll` is its status or None while it runs.

    shares_terminal: it got the terminal's signals by itself. end: kill it and what it has started.
    """

    poll: Callable[[], int | None]
    send: Callable[[int], None]
    end: Callable[[], None]
    shares_terminal: bool = False


def spawn(argv: Sequence[str], env: Mapping[str, str]) -> Application:
    """Start `argv`. Raises GpudiagError when it cannot be started."""
    shares = _in_foreground()
    try:
        # Python ignores SIGPIPE and SIGXFSZ at start-up; a program expects neither that nor a mask
        start = functools.partial(os.posix_spawnp, setsigmask=(), setsigdef=(signal.SIGPIPE, signal.SIGXFSZ))
        words = list(argv)
        pid = start(words[0], words, env) if shares else start(words[0], words, env, setpgroup=0)
    except FileNotFoundError as error:
        raise GpudiagError(
            f"cannot run {argv[0]}: not found", "check the name, or give the interpreter with --python"
        ) from error
    except OSError as error:
        raise GpudiagError(f"cannot run {argv[0]}: {error.strerror}", "check that it is executable") from error

    ended: list[int] = []

    def poll() -> int | None:
        if not ended:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended.append(os.waitstatus_to_exitcode(status))
        return ended[0] if ended else None

    def send(signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            # Ctrl-C goes to a whole group, else `bash run.sh` waits for a child that never heard of it. SIGTERM goes to
            # the application alone, which may want its loader workers alive to save a checkpoint; its group hears it
            # when it has ended.
            if not shares and (ended or signum in (signal.SIGINT, signal.SIGQUIT)):
                os.killpg(pid, signum)
            elif not ended:
                os.kill(pid, signum)

    def end() -> None:
        # in a terminal's foreground gpudiag is of the same group: there the processes are found one by one
        for each in [*_descendants(pid), pid] if shares else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        if not shares:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    return Application(poll, send, end, shares)


def run(
    start: Callable[[], Application],
    *,
    before_signal: Callable[[], None] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[], None] = lambda: None,
) -> Outcome:
    """Start an application and wait for it, passing signals on.

    before_signal runs before the first deadly signal is passed on (to let a recording be saved first); should_stop is
    asked every 0.1 s and ends the application by SIGTERM; meanwhile is called as often. The first Ctrl-C leaves it all the time it needs; after the
    second it is killed if it has not ended within a second, at the third at once.
    """
    began = time.monotonic()
    sent: list[str] = []
    interrupts, last, stopped, killed_at = 0, (0, 0.0), False, float("inf")
    with _signals_held() as held:
        _adopt_orphans()
        application = start()
        while (status := application.poll()) is None:
            info = signal.sigtimedwait(held, POLL_S)
            if time.monotonic() > killed_at:
                killed_at = float("inf")
                application.end()
            if info is None or info.si_signo == signal.SIGCHLD:
                meanwhile()
                if not stopped and should_stop():
                    stopped = True
                    application.send(signal.SIGTERM)
                continue
            signum, now = info.si_signo, time.monotonic()
            typed = application.shares_terminal and info.si_code == SI_KERNEL
            if not typed and last[0] == signum and now - last[1] < SAME_SIGNAL_S:
                continue
            last = (signum, now)
            interrupts += signum == signal.SIGINT
            if interrupts > 2:
                application.end()
                continue
            if not sent and signum not in (signal.SIGUSR1, signal.SIGUSR2):
                before_signal()
            if not typed:
                application.send(signum)
            if interrupts == 2:
                killed_at = now + LAST_WORDS_S
            sent.append(signal.Signals(signum).name)
        if sent or stopped:
            application.send(signal.SIGTERM)  # to what is left of its group: children must not stay behind
            time.sleep(POLL_S)
        code = 128 - status if status < 0 else status
        return Outcome(code, time.monotonic() - began, tuple(_children()), tuple(sent), stopped)


@contextlib.contextmanager
def _signals_held() -> Iterator[tuple[int, ...]]:
    """Keep the signals pending, to be taken one by one; afterwards what is left over is dropped, not acted on."""
    held = (*PASSED_ON, signal.SIGCHLD)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield held
    finally:
        while signal.sigtimedwait(held, 0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_foreground() -> bool:
    """Whether gpudiag is the foreground job of a terminal that is its stdin."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> list[int]:
    """Live children of this process; ended ones are reaped on the way."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return sorted(pid for pid, parent in _parents().items() if parent == os.getpid())


def _descendants(ancestor: int) -> list[int]:
    """The live processes that `ancestor` has started, directly or not."""
    parents, found = _parents(), [ancestor]
    for pid in found:  # grows on the way
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _parents() -> dict[int, int]:
    """pid -> parent of every live process (proc(5))."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX":
                parents[int(stat.parent.name)] = int(fields[1])
    return parents
