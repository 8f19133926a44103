"""Record an application with Nsight Systems without disturbing it, and finish what nsys leaves unfinished.

What nsys does on its own, seen with 2022.4.2 (tests/test_nsys_collect.py holds each of these against the real one):
- It puts the application into a session of its own, so a terminal's Ctrl-C never reaches it. nsys passes SIGINT or
  SIGTERM on, but then writes its report at once and returns 0 while the application is still saving: what the
  application does after the signal is lost, its exit status too. So nsys gets a session of its own and no signal, and
  the application gets them from us (`NsysProcess.forward`).
- It takes the application's stdout and stderr through a pipe, mixes its own words into them and stores a copy in the
  report. A shim in front of the application puts the real descriptors back before exec, so bytes, `isatty` and order
  stay the application's own and no output lands in the report.
- `--capture-range-end` defaults to ending the application; `--wait` defaults to waiting for orphans.
- When nsys itself is killed, its agent still writes the report once the application has ended; only the exit status is lost.
- When no capture range ever starts, it exits with the application's status and writes nothing.
"""

from __future__ import annotations

import functools
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpudiag.collect.inject.nvtx_emit import DOMAIN
from gpudiag.collect.launch import end_with
from gpudiag.collect.nsys_finish import REPORT_SUFFIXES, FinishedReport, finish_report, log_of
from gpudiag.errors import GpudiagError
from gpudiag.read.nsys_report import find_nsys, nsys_version, utf8_alias

__all__ = ["FinishedReport", "NsysProcess", "finish_report", "nsys_command", "nsys_version", "start"]

CAPTURE_RANGE = "capture"  # the range that opens and closes the window; inject/ pushes it in domain "gpudiag"

# Runs between nsys and the application, in the process that becomes the application: reports its pid, waits for our
# word (so that an abandoned start can never run the application), puts the real stdout, stderr and working directory in
# place, and restores the signals that Python ignores at start-up. nsys refuses a command line or a working directory that
# is not UTF-8 ("Message parsing failed"), so it gets the words in hexadecimal then, and / to work in.
_SHIM = """\
import os, signal, sys
out, err, pid, go, folder = map(int, sys.argv[1:6])
os.write(pid, b"%d\\n" % os.getpid())
if os.read(go, 1) != b"g":
    os._exit(125)
os.dup2(out, 1); os.dup2(err, 2)
os.fchdir(folder)
for fd in (out, err, pid, go, folder):
    os.close(fd)
for name in ("SIGPIPE", "SIGXFSZ"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
app = sys.argv[7:]
if sys.argv[6] == "hex":
    app = [bytes.fromhex(word) for word in app]
try:
    os.execvp(app[0], app)
except OSError as error:
    sys.stderr.write("gpudiag: cannot run %s: %s\\n" % (os.fsdecode(app[0]), error.strerror))
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""

# Under load nsys 2022.4.2 sometimes fails before the application starts (1 of 60 starts with both CPUs busy: sem_open
# in its ProcessWaiter, exit 1) or never gets that far (1 of 90). Trying again is safe: the application has not run.
_ATTEMPTS = 3
_START_TIMEOUT_S = 30.0
_EXIT_CODE = 49  # field 52 of proc(5)'s stat, after the pid and the name
_AGENT_S = 2.0
_WRITING_S = 60.0


@functools.cache
def _options(nsys: Path) -> frozenset[str]:
    """The long options of `nsys profile` in this version, without dashes."""
    return frozenset(re.findall(r"^\s+(?:-\w, )?--([a-z-]+)=", _ask(nsys, "profile", "--help"), re.MULTILINE))


def _ask(nsys: Path, *arguments: str) -> str:
    try:
        done = subprocess.run([nsys, *arguments], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GpudiagError(
            f"{nsys}: does not run ({error})", "reinstall Nsight Systems, or use --with torch"
        ) from error
    return done.stdout + done.stderr


def nsys_command(
    app: Sequence[str], output: Path, *, gpu: bool, window: bool = False, osrt: bool = False, nsys: Path | None = None
) -> list[str]:
    """The command line that records `app` into `output` + suffix, with options that this nsys has.

    gpu: trace CUDA. window: record only between push and pop of range "capture" in domain "gpudiag" (else all of it);
    the application runs on afterwards. osrt: trace OS calls; heavy (134,698 rows and 190 MB for a 2-second loader run).
    CPU sampling and context switches stay off: they need rights that a container seldom has, and nothing here reads
    them. Raises GpudiagError without nsys, or when it is too old for a window that leaves the application running.
    """
    nsys = nsys or find_nsys()
    if nsys is None:
        raise GpudiagError("nsys is not installed", "install Nsight Systems, or use --with torch")
    offered = _options(nsys)
    traces = [*(["cuda"] if gpu else []), "nvtx", *(["osrt"] if osrt else [])]
    wanted = {
        "trace": ",".join(traces),
        "sample": "none",
        "cpuctxsw": "none",
        "wait": "primary",  # an orphan that never ends must not hold the report back
        "trace-fork-before-exec": "false",  # loader workers; nsys itself calls it undefined behaviour
        "force-overwrite": "true",
        "stats": "false",
    }
    if window:
        wanted |= {
            "capture-range": "nvtx",
            "nvtx-capture": f"{CAPTURE_RANGE}@{DOMAIN}",
            "capture-range-end": "stop",
            "kill": "none",
        }
        missing = [option for option in ("capture-range-end", "kill", "nvtx-capture") if option not in offered]
        if missing:
            raise GpudiagError(
                f"nsys {nsys_version(nsys)} has no --{missing[0]}: it would end the application with the window",
                "update Nsight Systems, or use --with torch",
            )
    options = [f"--{name}={value}" for name, value in wanted.items() if name in offered]
    return [str(nsys), "profile", *options, f"--output={_escaped(output)}", *app]


def _escaped(output: Path) -> str:
    """nsys substitutes %p, %h and %q{} in file names."""
    return str(output).replace("%", "%%")


@dataclass(frozen=True)
class NsysProcess:
    """A running `nsys profile`. app_pid: the application, which leads its own session; log: nsys's words.

    sessions: of nsys and of its agent, which is nobody's child once nsys ends. launcher: nsys's process that is the
    application's parent.
    """

    process: subprocess.Popen[bytes]
    app_pid: int
    log: Path
    sessions: frozenset[int]
    launcher: int = 0

    def forward(self, signum: int, *, group: bool = False) -> bool:
        """Send a signal to the application alone, or as a terminal does to its whole group. False when it is gone.

        nsys starts the application as the leader of a session, so `group` reaches its children and not nsys.
        """
        try:
            (os.killpg if group else os.kill)(self.app_pid, signum)
        except ProcessLookupError:
            return False
        return True

    def poll(self) -> int | None:
        """The application's exit status as a shell gives it, None before nsys has ended.

        When nsys was killed its launcher would take the status and tell nobody. So it is halted until the application has
        ended, whose status can be read for as long as it has not been taken (proc(5)); then it goes on and has the agent
        write the report. 128 + nsys's signal where even that did not help. Ask until it is not None, and not again.
        """
        status = self.process.poll()
        if status is None or status >= 0:
            return status
        halts = self.launcher != self.process.pid and self.launcher in _members(self.sessions)
        if halts:
            os.kill(self.launcher, signal.SIGSTOP)
        state = _stat(self.app_pid)
        if state and state[0] not in "ZX":
            return None
        if halts:
            os.kill(self.launcher, signal.SIGCONT)
        if len(state) <= _EXIT_CODE:
            return 128 - status
        code = os.waitstatus_to_exitcode(int(state[_EXIT_CODE]))
        return code if code >= 0 else 128 - code

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The application's exit status as a shell gives it (128 + signal), once nsys has written its report.

        None when nsys was killed and took the status with it; then this has waited for the application all the same.
        Raises subprocess.TimeoutExpired; nothing is ended by that.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        status = self.process.wait(timeout_s)
        while status < 0 and _alive(self.app_pid):
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.process.args, timeout_s or 0)
            time.sleep(0.1)
        # the agent outlives nsys by a moment, and writes the report itself when nsys was killed
        patience = time.monotonic() + (_AGENT_S if status >= 0 else _WRITING_S)
        while _members(self.sessions) and time.monotonic() < patience:
            time.sleep(0.05)
        # an orphan of the application keeps the agent, and through it the user's stdout; it lives on without (tested)
        _end(self.sessions)
        return status if status >= 0 else None

    def kill(self) -> None:
        """End the application's group and nsys at once; for an application that ignored its signals."""
        with suppress(ProcessLookupError):
            os.killpg(self.app_pid, signal.SIGKILL)
        try:
            self.process.wait(30)  # nsys writes what it has: the report is complete up to the kill
        except subprocess.TimeoutExpired:
            _abandon(self.process)


def start(
    app: Sequence[str],
    output: Path,
    *,
    gpu: bool,
    window: bool = False,
    osrt: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int | None = None,
    stdout: int = 1,
    stderr: int = 2,
) -> NsysProcess:
    """Start `app` under nsys, and return once it runs. stdin, stdout, stderr: descriptors that it gets as they are.

    nsys's own words go to `output` + ".nsys.log". Raises GpudiagError as nsys_command, when a report of that name is
    there already, when the folder cannot be written (nsys itself would say so only after the run), or when nsys does
    not get as far as the application.
    """
    log = log_of(output)
    plain = _is_utf8(str(Path.cwd()), *map(str, app))
    for old in (output.with_name(output.name + suffix) for suffix in REPORT_SUFFIXES):
        if old.exists():
            raise GpudiagError(f"{old}: exists", "choose another folder with -o, or remove it")
    for _ in range(_ATTEMPTS):
        try:
            said = log.open("wb")
        except OSError as error:
            raise GpudiagError(
                f"{log}: cannot be written ({error.strerror})", "choose another folder with -o"
            ) from error
        pid_reader, pid_writer = os.pipe()
        go_reader, go_writer = os.pipe()
        folder = os.open(cwd or ".", os.O_RDONLY | os.O_DIRECTORY)
        passed = [os.dup(stdout), os.dup(stderr), pid_writer, go_reader, folder]
        shim = [sys.executable, "-I", "-S", "-c", _SHIM, *map(str, passed), "plain" if plain else "hex"]
        words = list(app) if plain else [os.fsencode(word).hex() for word in app]
        try:
            process = subprocess.Popen(
                nsys_command([*shim, *words], utf8_alias(output.absolute()), gpu=gpu, window=window, osrt=osrt),
                stdin=stdin,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=env,
                cwd="/" if not plain else cwd,
                pass_fds=passed,
                start_new_session=True,
                preexec_fn=end_with(os.getpid()),
            )
            for descriptor in passed:  # ours must be closed for the pipe to end with the last of theirs
                os.close(descriptor)
            passed.clear()
            ready = select.select([pid_reader], [], [], _START_TIMEOUT_S)[0]
            pid = int(os.read(pid_reader, 32) or 0) if ready else 0
            if pid:
                launcher = int(_stat(pid)[1])
                os.write(go_writer, b"g")
                sessions = frozenset({process.pid, *_agents(process.pid)})
                return NsysProcess(process, pid, log, sessions, launcher)
        finally:
            said.close()
            for descriptor in (*passed, pid_reader, go_writer):
                os.close(descriptor)
        _abandon(process)
    lines = log.read_text(errors="replace").strip().splitlines()
    reason = next((line for line in reversed(lines) if "Importer" not in line and "importer" not in line), "it hangs")
    raise GpudiagError(f"nsys does not start the application: {reason.strip()}", "try again, or use --with torch")


def _is_utf8(*texts: str) -> bool:
    """Whether none holds bytes that are not UTF-8 (as lone surrogates)."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Kill an nsys that is stuck, with its agent, which has a session of its own and holds the user's stdout open."""
    _end(frozenset({process.pid, *_agents(process.pid)}))
    process.wait()


def _end(sessions: frozenset[int]) -> None:
    for _ in range(20):  # a kill takes effect a moment later
        pids = _members(sessions)
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _agents(nsys_pid: int) -> list[int]:
    """The agent of an nsys, known by its command line: `nsys --start-agent --session-name=profile-<app>-<pid of nsys>`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if b"\0--start-agent\0" in command and b"-%d\0" % nsys_pid in command:
                found.append(int(entry.name))
    return found


def _members(sessions: frozenset[int]) -> list[int]:
    """The live processes of these sessions."""
    pids = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if (state := _stat(pid)) and state[0] not in "ZX" and int(state[3]) in sessions]


def _alive(pid: int) -> bool:
    state = _stat(pid)
    return bool(state) and state[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """State, parent, group, session, ... of a process (proc(5)); empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
