"""Run the user's command as if gpudiag were not there: streams, working directory, signals, exit code.

Streams are inherited, never piped. Signals reach the application exactly once, in whichever way they come:

- In the foreground of a terminal the application shares gpudiag's process group, so that Ctrl-C, Ctrl-Z and reading
  from the terminal work as always. What the terminal sends (si_code SI_KERNEL) has reached it already; what somebody
  sends to gpudiag alone (`kill PID`) is passed on.
- Elsewhere (a pipe, CI, `timeout`, a scheduler) it gets a group of its own and gpudiag passes signals on, since a
  sender like `timeout` signals both gpudiag and its whole group: the second copy within half a second is dropped.

Orphans are not waited for: gpudiag makes itself their reaper (Linux) to be able to name them. When gpudiag itself is
killed, the application gets SIGTERM from the kernel (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpudiag.errors import GpudiagError

SI_KERNEL = 0x80
SAME_SIGNAL_S = 0.5  # `timeout` sends to its child and to the group within microseconds; a person needs longer
COPY_S = 0.1  # microseconds, on a machine that is not busy
LAST_WORDS_S = 1.0  # what the application has to end by itself after the second Ctrl-C
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
POLL_S = 0.1
HELPERS_S = 1.0  # multiprocessing's helpers end by themselves a moment after the last process that uses them
_TRACKER, _FORKSERVER = b"multiprocessing.resource_tracker", b"multiprocessing.forkserver"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PRCTL: Callable[..., int] | None = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Outcome:
    """How the application ended. exit_code as a shell has it (128 + signal). orphans: pids that it left running.

    killed_by: the signal that ended it, 0 when it ended by itself. signals: what was passed on, in order.
    stopped_by_us: ended on request (`--stop-after-capture`).
    """

    exit_code: int
    wall_s: float
    orphans: tuple[int, ...] = ()
    signals: tuple[str, ...] = ()
    stopped_by_us: bool = False
    killed_by: int = 0


@dataclass
class Application:
    """A started application. `send` signals it (its whole group when asked; False when it is gone), `poll` is its status or
    None while it runs: negative for a signal, or as a shell has it (128 + signal) where shell_status is set.

    shares_terminal: it got the terminal's signals by itself. end: kill it and what it has started.
    """

    poll: Callable[[], int | None]
    send: Callable[[int], bool]
    end: Callable[[], None]
    shares_terminal: bool = False
    shell_status: bool = False


def spawn(argv: Sequence[str], env: Mapping[str, str], *, stdin: int | None = None, stdout: int = 1) -> Application:
    """Start `argv`. stdin, stdout: descriptors that it gets instead of ours. Raises GpudiagError when it cannot be started."""
    shares = _in_foreground()
    try:
        process = subprocess.Popen(
            list(argv),
            env=env,
            stdin=stdin,
            stdout=None if stdout == 1 else stdout,
            close_fds=False,
            process_group=None if shares else 0,
            preexec_fn=end_with(os.getpid()),
        )
    except FileNotFoundError as error:
        raise GpudiagError(
            f"cannot run {argv[0]}: not found", "check the name, or give the interpreter with --python"
        ) from error
    except OSError as error:
        raise GpudiagError(f"cannot run {argv[0]}: {error.strerror}", "check that it is executable") from error

    pid = process.pid

    def send(signum: int) -> bool:
        ended = process.poll() is not None
        with contextlib.suppress(ProcessLookupError):
            # Ctrl-C goes to a whole group, else `bash run.sh` waits for a child that never heard of it. SIGTERM goes to
            # the application alone, which may want its loader workers alive to save a checkpoint; its group hears it
            # when it has ended.
            if not shares and (ended or signum in (signal.SIGINT, signal.SIGQUIT)):
                os.killpg(pid, signum)
            elif not ended:
                os.kill(pid, signum)
        return not ended

    def end() -> None:
        # in a terminal's foreground gpudiag is of the same group: there the processes are found one by one
        for each in [*_descendants(pid), pid] if shares else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        if not shares:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    return Application(process.poll, send, end, shares)


def end_with(parent: int) -> Callable[[], None]:
    """What a child process of `parent` does before exec: no blocked signals (it would inherit ours), and SIGTERM when
    `parent` dies before it, be it by SIGKILL. Both last over exec; that Python ignores SIGPIPE, subprocess sets right."""

    def before_exec() -> None:
        if _PRCTL is not None:
            _PRCTL(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:  # it has died already
                os._exit(128 + signal.SIGTERM)
        # a Ctrl-C that waits would be taken by our handler, and lost
        if callable(signal.getsignal(signal.SIGINT)):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return before_exec


def run(
    start: Callable[[], Application],
    *,
    before_signal: Callable[[], None] = lambda: None,
    should_stop: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[], None] = lambda: None,
    ended: Callable[[], None] = lambda: None,
) -> Outcome:
    """Start an application and wait for it, passing signals on.

    before_signal runs before the first deadly signal is passed on (to let a recording be saved first); should_stop is
    asked every 0.1 s and ends the application by SIGTERM; meanwhile is called as often; ended is called once it has ended,
    before its orphans are counted. The first Ctrl-C leaves it all the time it needs; after the second it is killed if it
    has not ended within a second, at the third at once.
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
            if application.poll() is not None:
                continue  # too late to be the reason of its end
            typed = application.shares_terminal and info.si_code == SI_KERNEL
            if not typed and last[0] == signum and now - last[1] < SAME_SIGNAL_S:
                continue
            last = (signum, now)
            interrupts += signum == signal.SIGINT
            if interrupts > 2:
                application.end()
                continue
            if not sent and signum not in (signal.SIGUSR1, signal.SIGUSR2):
                # a copy that waits for its turn meanwhile would be taken for a second Ctrl-C, seconds after the first
                if not typed:
                    _drop_copies(signum)
                before_signal()
            if interrupts == 2:
                killed_at = now + LAST_WORDS_S
            if typed or application.send(signum):
                sent.append(signal.Signals(signum).name)
        if sent or stopped:
            application.send(signal.SIGTERM)  # to what is left of its group: children must not stay behind
            time.sleep(POLL_S)
        wall = time.monotonic() - began
        ended()
        code = 128 - status if status < 0 else status
        killed_by = code - 128 if status < 0 or application.shell_status else 0
        if killed_by not in signal.valid_signals():
            killed_by = 0
        return Outcome(code, wall, tuple(_orphans()), tuple(sent), stopped, killed_by)


def _drop_copies(signum: int) -> None:
    """Take what the same sender sends once more to the whole group, which is on its way or here already."""
    deadline = time.monotonic() + SAME_SIGNAL_S
    while time.monotonic() < deadline and signal.sigtimedwait((signum,), COPY_S) is not None:
        pass


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
    if _PRCTL is not None:
        _PRCTL(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _orphans() -> list[int]:
    """Processes of the application that run on, without multiprocessing's helpers, which end with the last of the others."""
    patience = time.monotonic() + HELPERS_S
    while helpers := [pid for pid in _children() if _runs(pid, _TRACKER, _FORKSERVER)]:
        if time.monotonic() > patience:
            break
        time.sleep(POLL_S / 2)
    return [pid for pid in _children() if pid not in helpers or not _runs(pid, _TRACKER)]


def _runs(pid: int, *modules: bytes) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(module in command for module in modules)


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
