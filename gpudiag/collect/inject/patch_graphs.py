"""CUDA graphs: their captures stay undisturbed, and a replay stands for the code that was captured.

While a stream is captured CUDA refuses synchronisation and much else, in every thread by default, and a refused call
invalidates the capture: no recording starts or stops then (`Tracker.capturing`, `Tracker.quiet`), and an optimizer that
steps is none of the script's steps but a part of the graph, which each replay repeats.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any, Callable

from .patch_torch import forget
from .tracker import Tracker

REPLAY = "graph_replay"


def install(torch: Any, tracker: Tracker) -> None:
    """Watch the methods of torch.cuda.CUDAGraph, a Python class from torch 1.10 on, a GPU or not."""
    kind = getattr(torch.cuda, "CUDAGraph", None)
    if kind is None:
        return
    kind.capture_begin = _begins(tracker, kind.capture_begin)
    for name in ("capture_end", "capture_end_pre"):  # newer versions have the second, which the first calls
        if hasattr(kind, name):
            setattr(kind, name, _ends(tracker, getattr(kind, name)))
    kind.replay = _replays(tracker, kind.replay, torch.is_grad_enabled)


def _begins(tracker: Tracker, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        with tracker.quiet:  # another thread may be starting a recording at this moment
            tracker.captured.pop(id(self), None)  # of an earlier capture, or of another graph at this address
            tracker.capturing[id(self)] = threading.get_ident()
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            tracker.capturing.pop(id(self), None)
            forget(error)
            raise

    return capture_begin


def _ends(tracker: Tracker, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            forget(error)
            raise
        finally:
            tracker.capturing.pop(id(self), None)  # one that failed is over too

    return capture_end


def _replays(tracker: Tracker, original: Callable[..., Any], grad_enabled: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not tracker.mine():
            try:
                return original(self, *args, **kwargs)
            except BaseException as error:
                forget(error)
                raise
        optimizer = tracker.captured.get(id(self))
        name = REPLAY
        if not tracker.busy:  # else it is a part of a model's call, as make_graphed_callables and torch.compile do it
            # torch itself replays with gradients off in training too; a script that does so evaluates
            evaluates = (
                optimizer is None
                and tracker.source == "optimizer"
                and not grad_enabled()
                and not str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
            )
            if optimizer is None:
                tracker.turn("forward", id(self))
            tracker.fed(evaluates)
            if evaluates:
                name = "eval"
        tracker.push(name)
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            forget(error)
            raise
        finally:
            tracker.pop()
        if optimizer is not None:
            tracker.turn("optimizer", optimizer)
        return result

    return replay
