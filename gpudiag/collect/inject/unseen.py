"""Keeping torch.compile off our own code.

While compiled code runs, Dynamo takes every Python frame it comes upon, our wrappers among them, for one to be compiled:
it would break the graph in them, and compile a wrapper of .item() whose graph calls .item() without end.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any, Callable, Iterator


def keep_from_dynamo(torch: Any) -> None:
    """Mark all functions of this package as ones that run as they are; those they call are looked at as ever."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    skip = getattr(frames, "skip_code", None)
    if skip is None and hasattr(frames, "set_code_exec_strategy"):  # from torch 2.7 on
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        skip = functools.partial(_set, frames.set_code_exec_strategy, strategy)
    if skip is None:
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(__name__.rpartition(".")[0] + "."):
            for code in _codes(module):
                skip(code)


def _set(change: Callable[[CodeType, Any], None], strategy: Any, code: CodeType) -> None:
    change(code, strategy)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    for thing in list(vars(module).values()):
        for function in [thing, *(vars(thing).values() if isinstance(thing, type) else ())]:
            function = getattr(function, "fget", function)  # of a property
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                function = getattr(function, "__wrapped__", function)
                yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions defined in it: all closures made of one share it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
