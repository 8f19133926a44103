"""The line of the user's code that led here."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from types import FrameType
from typing import Dict, Optional, Tuple

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SKIP = tuple(
    {
        _HERE,
        *(
            path + os.sep
            for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
            if path
        ),
    }
)
_START = os.getcwd() + os.sep
_names: Dict[str, Optional[str]] = {}
# `log.debug(`, `self.logger.info(`, `logging.warning(`: a call of the logging module's, or of one that is like it
_LOG_CALL = re.compile(r"\blog(?:ger|ging)?\.(?:debug|info|warning|error|critical|log)\(")
_log_calls: Dict[Tuple[str, int], bool] = {}


def _name(file: str) -> Optional[str]:
    """How a source file is shown: relative to where the run started; None when it is not the user's."""
    if file not in _names:
        path = file if os.path.isabs(file) else _START + file
        if file.startswith("<") or path.startswith(_SKIP) or os.sep + "site-packages" + os.sep in path:
            _names[file] = None
        else:
            _names[file] = path[len(_START) :] if path.startswith(_START) else path
    return _names[file]


def user_line(depth: int = 2) -> str:
    """`train.py:42` of the nearest frame of the user's code above the caller's caller, or "" when there is none."""
    try:
        frame: Optional[FrameType] = sys._getframe(depth)
    except ValueError:
        return ""
    return line_of(frame)


def line_of(frame: Optional[FrameType]) -> str:
    """The same for a frame and those that called it."""
    while frame is not None:
        name = _name(frame.f_code.co_filename)
        if name is not None:
            return "%s:%d" % (name, frame.f_lineno)
        frame = frame.f_back
    return ""


def log_call_of(frame: Optional[FrameType]) -> str:
    """The line of the user's code whose log call a frame computes an argument for, or "" when it does not.

    The call itself has not begun: were it running, its own frame would be the one to be seen.
    """
    while frame is not None:
        name = _name(frame.f_code.co_filename)
        if name is not None:
            at = (frame.f_code.co_filename, frame.f_lineno)
            if at not in _log_calls:
                _log_calls[at] = _LOG_CALL.search(linecache.getline(*at)) is not None
            if _log_calls[at]:
                return "%s:%d" % (name, frame.f_lineno)
        frame = frame.f_back
    return ""
