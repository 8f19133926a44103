"""The same stdin for every run of the application.

A file is wound back. What comes through a pipe or a socket passes through gpudiag, which keeps a copy in the bundle's
folder (without a name, so that nothing is left of it) and gives it to the next run again. A terminal is the
application's own in each run. One run alone gets gpudiag's stdin itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import tempfile
import threading
from pathlib import Path

MOST_BYTES = 1 << 30  # kept on disk; more than a data set that someone would pipe in
_BLOCK = 1 << 16


class Stdin:
    """`take` before each run, `feed` once it has started, `release` after it. lost: the next run cannot have it again."""

    def __init__(self, runs: int, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.lost = False
        self._folder, self._most = folder, most_bytes
        self._start: int | None = None
        self._piped = False
        self._kept, self._ended = 0, False
        self._copy = -1
        self._read = self._write = -1
        self._stop: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        with contextlib.suppress(OSError):  # closed, or a file that cannot be wound back
            mode = os.fstat(0).st_mode if runs > 1 else 0
            self._piped = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
            if stat.S_ISREG(mode):
                self._start = os.lseek(0, 0, os.SEEK_CUR)

    def take(self) -> int | None:
        """The descriptor that the application gets, None for ours. Raises OSError when there is no room for the copy."""
        if self._start is not None:
            os.lseek(0, self._start, os.SEEK_SET)
        if not self._piped:
            return None
        if self._copy < 0:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                self._copy = os.dup(file.fileno())
        self._read, self._write = os.pipe()
        self._stop = os.pipe()
        return self._read

    def feed(self) -> None:
        if self._stop is not None:
            os.close(self._read)  # it is the application's, and its end must be seen
            self._thread = threading.Thread(
                target=self._run, args=(self._write, self._stop[0]), name="gpudiag-stdin", daemon=True
            )
            self._thread.start()

    def release(self) -> None:
        if self._stop is not None and self._thread is not None:
            os.write(self._stop[1], b"x")
            self._thread.join()
            for descriptor in self._stop:
                os.close(descriptor)
            self._stop = self._thread = None

    def _run(self, out: int, stop: int) -> None:
        try:
            self._copy_on(out, stop)
        except BrokenPipeError:
            pass  # the application reads no more
        finally:
            os.close(out)

    def _copy_on(self, out: int, stop: int) -> None:
        os.set_blocking(out, False)  # of this end alone
        at, waiting = 0, b""
        while True:
            if waiting:
                if stop in select.select([stop], [out], [])[0]:
                    return
                waiting = waiting[os.write(out, waiting) :]
            elif at < self._kept:
                waiting = os.pread(self._copy, min(_BLOCK, self._kept - at), at)
                at += len(waiting)
            elif self._ended:
                return
            else:
                poll = select.poll()
                poll.register(0, select.POLLIN)
                poll.register(stop, select.POLLIN)
                poll.register(out, 0)  # tells when the application has closed its end
                ready = {descriptor for descriptor, _ in poll.poll()}
                if ready & {stop, out}:
                    return
                waiting = os.read(0, _BLOCK)
                self._ended = not waiting
                at += self._keep(waiting)

    def _keep(self, data: bytes) -> int:
        """How much was kept: all of it, or nothing any more once the copy is too long or the disk is full."""
        with contextlib.suppress(OSError):
            fits = not self.lost and self._kept + len(data) <= self._most
            if fits and os.pwrite(self._copy, data, self._kept) == len(data):
                self._kept += len(data)
                return len(data)
        self.lost = True
        return 0
