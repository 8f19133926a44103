"""Where the script makes the host wait for the device: reads of tensor values and explicit synchronisation, by line.

A read of a CPU tensor waits for nothing; it is noted only when it takes long (a `.tolist()` of many elements).
"""

from __future__ import annotations

import functools
import time
from types import ModuleType
from typing import Any, Callable

from .patch_torch import forget
from .tracker import Tracker
from .where import user_line

SLOW_NS = 50_000  # on CPU tensors: fifty times a plain .item()

READS = ("item", "cpu", "tolist", "nonzero", "__bool__", "__float__", "__int__", "__index__", "__repr__", "__format__")


def install(torch: ModuleType, tracker: Tracker) -> None:
    depth = [0]
    for name in READS:
        setattr(torch.Tensor, name, _read(tracker, "Tensor." + name, getattr(torch.Tensor, name), depth))
    cuda = getattr(torch, "cuda", None)
    if cuda is not None:
        cuda.synchronize = _explicit(tracker, "torch.cuda.synchronize", cuda.synchronize)
        for kind, name in ((cuda.Stream, "Stream.synchronize"), (cuda.Event, "Event.synchronize")):
            kind.synchronize = _explicit(tracker, name, kind.synchronize)


def _read(tracker: Tracker, what: str, original: Callable[..., Any], depth: Any) -> Callable[..., Any]:
    clock = time.monotonic_ns

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = clock()
        depth[0] += 1
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            forget(error)
            raise
        finally:
            depth[0] -= 1
            length = clock() - began
            # the outermost read alone: printing a tensor reads many values
            if not depth[0] and (length > SLOW_NS or self.is_cuda) and tracker.mine():
                tracker.sync(what if self.is_cuda else "cpu:" + what, user_line(), length)

    return wrapper


def _explicit(tracker: Tracker, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic_ns()
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            forget(error)
            raise
        finally:
            if tracker.mine():
                tracker.sync(what, user_line(), time.monotonic_ns() - began)

    return wrapper
