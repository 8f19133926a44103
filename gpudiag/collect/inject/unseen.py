"""Keeping our own frames from what counts or compiles frames: warnings and log records that name a line, and torch.compile."""

from __future__ import annotations

import functools
import os
import sys
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

# warnings.warn(stacklevel=2 and more) and logging (Python 3.11 and newer) pass over the frames of the import system, which they
# know by these two words in the name of the file
_NOWHERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "importlib_bootstrap", "")


def keep_from_warnings() -> None:
    """Give all functions of this package a file that is passed over where a warning looks for the line that it is about. Call it
    before any of them is put around something of the script's."""
    if not hasattr(CodeType, "replace"):  # Python 3.7 has no torch that is watched; a script of it is only left alone
        return
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
    skip = _skipping(torch)
    for function in _functions():
        for code in _nested(function.__code__):
            skip(code)


def _skipping(torch: Any) -> Callable[[CodeType], None]:
    """What marks a code object as one that Dynamo runs as it is."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    skip: Optional[Callable[[CodeType], None]] = getattr(frames, "skip_code", None)
    if skip is None and hasattr(frames, "set_code_exec_strategy"):  # from torch 2.7 on
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        skip = functools.partial(_set, frames.set_code_exec_strategy, strategy)
    return skip or _let_be


def _let_be(code: CodeType) -> None:
    return None


def _set(change: Callable[[CodeType, Any], None], strategy: Any, code: CodeType) -> None:
    change(code, strategy)


# of one line, so that every instruction of it is on the line that a copy is given
_through: Any = lambda original, args, kwargs: original(*args, **kwargs)  # noqa: E731


def as_caller(torch: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, to be called by a wrapper of ours in its stead. A Python function is given back as it is.

    A warning of C code is about the line of the innermost Python frame, which would be the wrapper's: its file and line
    are shown, and its module decides by which filter, and whether the line has been told of before. So C code is called
    from a frame that has the file, the line, the name and the globals of the script's frame.
    """
    if isinstance(original, FunctionType):
        return original
    skip, codes = _skipping(torch), _codes

    def call(*args: Any, **kwargs: Any) -> Any:
        frame: FrameType = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOWHERE):
            frame = frame.f_back
        at = frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno or 1
        code = codes.get(at)
        if code is None:
            code = _through.__code__.replace(co_filename=at[0], co_name=at[1], co_firstlineno=at[2])
            skip(code)
            codes[at] = code
        function = FunctionType(code, frame.f_globals)
        del frame  # a traceback that the script keeps would hold it, and so itself
        try:
            return function(original, args, kwargs)
        except BaseException as error:
            for _ in range(2):  # this frame, and the other that is not the script's
                if error.__traceback__ is not None:
                    error.__traceback__ = error.__traceback__.tb_next
            raise

    return call


_codes: Dict[Tuple[str, str, int], CodeType] = {}


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
