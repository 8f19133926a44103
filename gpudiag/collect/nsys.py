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
from gpudiag.collect.nsys_finish import REPORT_SUFFIXES, FinishedReport, finish_report, log_of
from gpudiag.errors import GpudiagError
from gpudiag.read.nsys_report import find_nsys

__all__ = ["FinishedReport", "NsysProcess", "finish_report", "nsys_command", "nsys_version", "start"]

CAPTURE_RANGE = "capture"  # the range that opens and closes the window; inject/ pushes it in domain "gpudiag"

# Runs between nsys and the application, in the process that becomes the application: reports its pid, puts the real
# stdout and stderr in place, and restores the signals that Python ignores at start-up.
_SHIM = """\
import os, signal, sys
out, err, pid = map(int, sys.argv[1:4])
os.write(pid, b"%d\\n" % os.getpid())
os.dup2(out, 1); os.dup2(err, 2)
for fd in (out, err, pid):
    os.close(fd)
for name in ("SIGPIPE", "SIGXFSZ"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
app = sys.argv[4:]
try:
    os.execvp(app[0], app)
except OSError as error:
    sys.stderr.write("gpudiag: cannot run %s: %s\\n" % (app[0], error.strerror))
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


@functools.cache
def nsys_version(nsys: Path) -> str:
    """`2022.4.2` of "NVIDIA Nsight Systems version 2022.4.2.1-df9881f". Raises GpudiagError when it does not run."""
    text = _ask(nsys, "--version")
    found = re.search(r"version (\d+\.\d+\.\d+)", text)
    if not found:
        raise GpudiagError(f"{nsys}: does not say its version ({text.strip()[:80]!r})", "reinstall Nsight Systems")
    return found[1]


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


@dataclass
class NsysProcess:
    """A running `nsys profile`. `app_pid` is the application (0 while it has not started); `log` holds nsys's words."""

    process: subprocess.Popen[bytes]
    log: Path
    _pid_reader: int
    app_pid: int = 0

    def wait_for_app(self, timeout_s: float = 30.0) -> int:
        """The application's pid, or 0 when nsys ended or the time ran out before it started."""
        deadline = time.monotonic() + timeout_s
        while not self.app_pid and self._pid_reader >= 0 and (left := deadline - time.monotonic()) > 0:
            if select.select([self._pid_reader], [], [], left)[0]:
                text = os.read(self._pid_reader, 32)
                os.close(self._pid_reader)
                self._pid_reader = -1
                self.app_pid = int(text or 0)
        return self.app_pid

    def forward(self, signum: int, *, group: bool = False) -> bool:
        """Send a signal to the application alone, or as a terminal does to its whole group. False when it is gone.

        The application leads its own process group (nsys starts it so), so `group` reaches its children and not nsys.
        """
        pid = self.wait_for_app()
        if not pid:
            return False
        try:
            (os.killpg if group else os.kill)(pid, signum)
        except ProcessLookupError:
            return False
        return True

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The application's exit status as a shell gives it (128 + signal), once nsys has written its report.

        None when nsys was killed and took the status with it; then this has waited for the application all the same.
        Raises subprocess.TimeoutExpired; nothing is ended by that.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        status = self.process.wait(timeout_s)
        self.wait_for_app(0.1)
        if status >= 0:
            return status
        while self.app_pid and _alive(self.app_pid):
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.process.args, timeout_s or 0)
            time.sleep(0.1)
        return None

    def kill(self) -> None:
        """End the application's group and nsys at once; for an application that ignored its signals."""
        if self.app_pid:
            with suppress(ProcessLookupError):
                os.killpg(self.app_pid, signal.SIGKILL)
        try:
            self.process.wait(30)  # nsys writes what it has; a killed application's report is complete up to then
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


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
    """Start `app` under nsys. stdin, stdout, stderr: descriptors that the application gets as they are.

    nsys's own words go to `output` + ".nsys.log". Raises GpudiagError as nsys_command, when a report of that name is
    there already, or when the folder cannot be written (nsys itself would say so only after the run).
    """
    log = log_of(output)
    for old in (output.with_name(output.name + suffix) for suffix in REPORT_SUFFIXES):
        if old.exists():
            raise GpudiagError(f"{old}: exists", "choose another folder with -o, or remove it")
    reader, writer = os.pipe()
    duplicates = [os.dup(stdout), os.dup(stderr), writer]
    shim = [sys.executable, "-I", "-S", "-c", _SHIM, *map(str, duplicates)]
    try:
        command = nsys_command([*shim, *app], output.absolute(), gpu=gpu, window=window, osrt=osrt)
        try:
            words = log.open("wb")
        except OSError as error:
            raise GpudiagError(
                f"{log}: cannot be written ({error.strerror})", "choose another folder with -o"
            ) from error
        with words:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=words,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=cwd,
                pass_fds=duplicates,
                start_new_session=True,
            )
    except BaseException:
        os.close(reader)
        raise
    finally:
        for descriptor in duplicates:
            os.close(descriptor)
    return NsysProcess(process, log, reader)
