"""A status on the last row of the terminal while the script writes to the rows above it.

The script's streams are its own, so gpudiag never knows where its cursor is or whether its line is complete. Therefore
the last row is taken out of the scrolling region (as apt does while dpkg writes), and each update is one write that
saves the cursor, fills that row and puts the cursor back: no line of the script's is touched. What the script writes to
files or pipes never meets these bytes: they go to the terminal on stderr alone, and only while gpudiag is its
foreground job.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

MIN_ROWS, MIN_COLUMNS = 4, 20


@contextlib.contextmanager
def bottom_line() -> Iterator[Callable[[str], None] | None]:
    """Yields what shows a text, or None where there is no terminal to show it on."""
    if not _usable():
        yield None
        return
    line = _BottomLine(sys.stderr.fileno())
    try:
        yield line.show
    finally:
        line.close()


def _usable() -> bool:
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return False
    size = os.get_terminal_size(sys.stderr.fileno())
    return size.lines >= MIN_ROWS and size.columns >= MIN_COLUMNS


class _BottomLine:
    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._size: os.terminal_size | None = None
        self._shown = ""

    def show(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            if os.tcgetpgrp(self._terminal) != os.getpgrp():
                return
            size = os.get_terminal_size(self._terminal)
            if size == self._size and text == self._shown:
                return
            reserve = ""
            if size != self._size and size.lines >= MIN_ROWS:
                # a new line first, in case the cursor is on the row that is taken; setting the region moves the cursor
                reserve = ("\n" if self._size is None else "") + f"\0337\033[1;{size.lines - 1}r\0338"
                reserve += "\033[A" if self._size is None else ""
            self._size, self._shown = size, text
            shown = f"gpudiag: {text}"[: size.columns - 1]
            self._write(f"{reserve}\0337\033[{size.lines};1H\033[2K{shown}\0338")

    def close(self) -> None:
        """Give the row back, empty, with the cursor where the script left it."""
        if self._size is not None:
            with contextlib.suppress(OSError):
                rows = os.get_terminal_size(self._terminal).lines
                self._write(f"\0337\033[r\033[{rows};1H\033[2K\0338")
            self._size = None

    def _write(self, text: str) -> None:
        os.write(self._terminal, text.encode("ascii", "replace"))
