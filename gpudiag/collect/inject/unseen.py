"""Keeping our own frames from what counts or compiles frames: warnings and log records that name a caller, and torch.compile."""

from __future__ import annotations

import functools
import os
import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any, Callable, Iterator

# warnings.warn(stacklevel=2 and more) and logging (Python 3.11 and newer) pass over the frames of the import system, which they
# know by these two words in the name of the file
_NOWHERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "importlib_bootstrap", "")


def keep_from_warnings() -> None:
    """Give all functions of this package a file that is passed over where a warning looks for the line that it is about. Call it
    before any of them is put around something of the script's."""
    for function in _functions():
        function.__code__ = _refiled(function.__code__)


def _refiled(code: CodeType) -> CodeType:
    inner = tuple(_refiled(constant) if isinstance(constant, CodeType) else constant for constant in code.co_consts)
    return code.replace(co_filename=_NOWHERE + os.path.basename(code.co_filename), co_consts=inner)


def keep_from_dynamo(torch: Any) -> None:
    """Mark all functions of this package as ones that run as they are; those they call are looked at as ever.

    While compiled code runs, Dynamo takes every Python frame it comes upon, our wrappers among them, for one to be compiled:
    it would break the graph in them, and compile a wrapper of .item() whose graph calls .item() without end.
    """
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    skip = getattr(frames, "skip_code", None)
    if skip is None and hasattr(frames, "set_code_exec_strategy"):  # from torch 2.7 on
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        skip = functools.partial(_set, frames.set_code_exec_strategy, strategy)
    if skip is None:
        return
    for function in _functions():
        for code in _nested(function.__code__):
            skip(code)


def _set(change: Callable[[CodeType, Any], None], strategy: Any, code: CodeType) -> None:
    change(code, strategy)


def _functions() -> Iterator[FunctionType]:
    """The functions and methods that the modules of this package define, decorated ones with what they decorate."""
    package = __name__.rpartition(".")[0] + "."
    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for thing in list(vars(module).values()):
                for found in [thing, *(vars(thing).values() if isinstance(thing, type) else ())]:
                    yield from _undecorated(found, module)


def _undecorated(thing: Any, module: ModuleType) -> Iterator[FunctionType]:
    function = getattr(thing, "fget", thing)  # of a property
    while isinstance(function, FunctionType) and function.__module__ == module.__name__:
        yield function
        function = getattr(function, "__wrapped__", None)


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A code object and those of the functions defined in it: all closures made of one share it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
