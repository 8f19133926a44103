"""A script that trains in a thread of its own while the main thread waits for it.

torch's profiler can be ended only by the thread that it records, and that of the first seconds records the main thread:
while that waits for the training thread, the recording could not end, and none of the steps could begin.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Callable

from .patch_torch import forget

POLL_S = 0.05


class ThreadEnd:
    """Kept in a threading.local, it calls `ends` when the thread ends, in that thread and before a join() of it returns."""

    def __init__(self, ends: Callable[[], None]) -> None:
        self._ends = ends
        self._thread = threading.get_ident()

    def __del__(self) -> None:
        if threading.get_ident() == self._thread:
            self._ends()


def install(recorder: Any) -> None:
    join = threading.Thread.join
    shutdown = threading._shutdown  # type: ignore[attr-defined]

    @functools.wraps(join)
    def wait(self: threading.Thread, timeout: Any = None) -> None:
        try:
            # between two bytecodes the main thread does what the recorder asks of it, which it does not in a wait
            while timeout is None and recorder.records_here() and self.is_alive():
                join(self, POLL_S)
            join(self, timeout)
        except BaseException as error:
            forget(error)
            raise

    @functools.wraps(shutdown)
    def end(*args: Any) -> Any:
        """The main thread has come to its end, and waits for the others."""
        recorder.main_ends()
        return shutdown(*args)

    threading.Thread.join = wait  # type: ignore[method-assign]
    threading._shutdown = end  # type: ignore[attr-defined]
