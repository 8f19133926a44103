"""Something of ours to run on the main thread, between two bytecodes of whatever runs there."""

from __future__ import annotations

import ctypes
import os
from types import TracebackType
from typing import Callable, Optional

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_add = ctypes.pythonapi.Py_AddPendingCall
_add.argtypes, _add.restype = (ctypes.c_void_p, ctypes.py_object), ctypes.c_int
_is_true = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)


class PendingCall:
    """`ask` has `run` called by the main thread: no signal, and no wake-up of a call that waits.

    A signal can strike while it runs, and the script's handler of that signal may raise. Such an exception is the script's:
    it comes out where the script was interrupted, without a frame of ours. A callback by ctypes could not let it pass (it
    would be printed and lost), so what the interpreter calls is its own truth test of an object. Errors of our own, which
    come from here or from below `library`, go to `failed`.
    """

    def __init__(self, run: Callable[[], None], failed: Callable[[Exception], None], library: str) -> None:
        self._run = run
        self._failed = failed
        self._ours = (_HERE, library)

    def ask(self) -> None:
        _add(_is_true, self)

    def __bool__(self) -> bool:
        try:
            self._run()
        except BaseException as error:
            theirs = self._first_of_theirs(error.__traceback__)
            if theirs is not None or not isinstance(error, Exception):
                error.__traceback__ = theirs
                raise
            self._failed(error)
        return False  # 0: done, without an exception

    def _first_of_theirs(self, entry: Optional[TracebackType]) -> Optional[TracebackType]:
        while entry is not None and entry.tb_frame.f_code.co_filename.startswith(self._ours):
            entry = entry.tb_next
        return entry
