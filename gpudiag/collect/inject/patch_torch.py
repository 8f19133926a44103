"""Phases and steps out of torch itself: optimizers, modules, autograd, copies to the device, saving, compiling.

Each wrapper takes itself out of a passing exception's traceback (`_forget`): with a bare `raise`, CPython 3.11 and newer
then show the script's own frames only.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from types import ModuleType
from typing import Any, Callable, Dict, Set

from .tracker import Tracker
from .unseen import as_caller
from .where import user_line

CHECKPOINT_FSYNC_NS = 2_000_000_000  # an fsync this soon after a torch.save belongs to the checkpoint


def forget(error: BaseException) -> None:
    """Take the innermost entry, which is the caller's frame, out of a traceback that is about to be raised again."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def dynamo_asks(torch: Any) -> Callable[[], bool]:
    """What Dynamo knows to be True where it traces a function: a wrapper that begins with it is, to Dynamo, what it wraps."""
    asks: Callable[[], bool] = getattr(
        getattr(torch, "compiler", None), "is_dynamo_compiling", bool
    )  # from torch 2.1 on
    return asks


def phase(tracker: Tracker, name: str, function: Callable[..., Any], site: bool = False) -> Callable[..., Any]:
    """`function` as a phase. Inside a phase of the same name it is called as it is."""
    torch = sys.modules["torch"]
    compiling, call = dynamo_asks(torch), as_caller(torch, function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return function(*args, **kwargs)
        if not tracker.mine() or tracker.inside(name):
            try:
                return call(*args, **kwargs)
            except BaseException as error:
                forget(error)
                raise
        tracker.push(name)
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            forget(error)
            raise
        finally:
            tracker.pop(user_line() if site else "")

    return wrapper


def replace(torch: Any, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap a method of Tensor, and let it pass where torch has listed the method itself: such a list is compared with what
    Tensor holds under the name, and a lazy module's parameters refuse every method that is not on theirs."""
    method = getattr(torch.Tensor, name)
    wrapper = wrapped(method)
    wrapper.__module__, wrapper.__qualname__ = "torch", "Tensor." + name  # how it is pickled
    setattr(torch.Tensor, name, wrapper)
    allowed = getattr(getattr(torch.nn.parameter, "UninitializedTensorMixin", None), "_allowed_methods", ())
    if isinstance(allowed, list) and method in allowed:
        allowed.append(wrapper)
    passed_on = getattr(sys.modules.get("torch._prims_common"), "torch_function_passthrough", ())
    if isinstance(passed_on, set) and method in passed_on:
        passed_on.add(wrapper)


def install(torch: ModuleType, tracker: Tracker) -> None:
    _optimizers(torch, tracker)
    _modules(torch, tracker)
    autograd = torch.autograd
    autograd.backward = phase(tracker, "backward", autograd.backward)
    autograd.grad = phase(tracker, "backward", autograd.grad)
    torch.save = phase(tracker, "checkpoint", torch.save, site=True)
    replace(torch, "cuda", lambda cuda: phase(tracker, "h2d", cuda))
    _fsync(tracker)


def _optimizers(torch: Any, tracker: Tracker) -> None:
    optimizer = torch.optim.Optimizer
    optimizer.zero_grad = phase(tracker, "zero_grad", optimizer.zero_grad)
    torch.nn.Module.zero_grad = phase(tracker, "zero_grad", torch.nn.Module.zero_grad)
    hooks = sys.modules[optimizer.__module__]  # torch.optim deletes its attribute of that name
    if not hasattr(hooks, "register_optimizer_step_post_hook"):  # before torch 2.0
        return
    described: Set[int] = set()
    depth = [0]  # an optimizer may drive another (Lookahead, ZeRO): the outermost is the step

    def before(current: Any, args: Any, kwargs: Any) -> None:
        if not tracker.mine() and tracker.source != "optimizer":
            tracker.adopt()
        if tracker.mine():
            depth[0] += 1
            tracker.push("optimizer")

    def after(current: Any, args: Any, kwargs: Any) -> None:
        if tracker.mine() and depth[0]:
            depth[0] -= 1
            if tracker.inside("optimizer"):
                tracker.pop_to("optimizer")
            if not depth[0]:
                if id(current) not in described:
                    described.add(id(current))
                    tracker.log.write(_parameters(current))
                tracker.turn("optimizer", id(current))

    for hook in (before, after):
        # a compiled optimizer breaks its graph here, where torch has a break of its own, and without a word about it
        hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    hooks.register_optimizer_step_pre_hook(before)
    hooks.register_optimizer_step_post_hook(after)


def _parameters(optimizer: Any) -> Dict[str, Any]:
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return {"k": "optimizer", "name": type(optimizer).__name__, "params": len(tensors), "bytes": size}


def _modules(torch: Any, tracker: Tracker) -> None:
    call = torch.nn.Module.__call__
    depth = [0]
    grad_enabled, tracing = torch.is_grad_enabled, torch._C._get_tracing_state
    mine, push, pop = tracker.mine, tracker.push, tracker.pop

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if depth[0] or not mine() or tracing() is not None:
            try:
                return call(self, *args, **kwargs)
            except BaseException as error:
                error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
                raise
        depth[0] = 1
        trains = self.training or grad_enabled() or tracker.source != "optimizer"
        if not tracker.busy:
            tracker.turn("forward", id(self))
            tracker.fed(not trains)
        push("forward" if trains else "eval")
        try:
            return call(self, *args, **kwargs)
        except BaseException as error:
            error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
            raise
        finally:
            depth[0] = 0
            pop()

    __call__.__qualname__ = call.__qualname__
    __call__.__name__ = call.__name__
    torch.nn.Module.__call__ = __call__


def _fsync(tracker: Tracker) -> None:
    fsync = os.fsync

    @functools.wraps(fsync)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not tracker.mine() or tracker.inside("checkpoint") or tracker.inside("log"):
            return fsync(*args, **kwargs)
        recent = time.monotonic_ns() - tracker.last_checkpoint < CHECKPOINT_FSYNC_NS and tracker.saved_in_step
        tracker.push("checkpoint" if recent else "log")
        try:
            return fsync(*args, **kwargs)
        except BaseException as error:
            forget(error)
            raise
        finally:
            tracker.pop(user_line())

    os.fsync = wrapper


def own_profiler(torch: Any, recorder: Any, tracker: Tracker) -> None:
    """Give way when the script profiles itself."""
    profiler = torch.autograd.profiler.profile
    seen = [False]

    def begins(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not recorder.inside and getattr(self, "enabled", True):
                if not seen[0]:
                    seen[0] = True
                    tracker.log.write({"k": "own_profiler", "where": user_line()}, flush=True)
                recorder.script_profiles()
            try:
                return original(self, *args, **kwargs)
            except BaseException as error:
                forget(error)
                raise

        return wrapper

    def ends(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            except BaseException as error:
                forget(error)
                raise
            finally:
                if not recorder.inside and getattr(self, "enabled", True):
                    recorder.script_profiled()

        return wrapper

    for name in ("_prepare_trace", "_start_trace", "__enter__"):
        if hasattr(profiler, name):
            setattr(profiler, name, begins(getattr(profiler, name)))
    profiler.__exit__ = ends(profiler.__exit__)
    for name in ("emit_nvtx", "emit_itt"):
        other = getattr(torch.autograd.profiler, name, None)
        if other is not None:
            other.__enter__, other.__exit__ = begins(other.__enter__), ends(other.__exit__)


def compiling(dynamo_callback: Any, tracker: Tracker) -> None:
    """Compilations of torch.compile as phases (torch._dynamo.callback, torch >= 2.4)."""
    handler = getattr(dynamo_callback, "callback_handler", None)
    if handler is None or not hasattr(handler, "register_start_callback"):
        return

    def begins(*_: Any) -> None:
        if tracker.mine() and not tracker.inside("compile"):
            tracker.push("compile")

    def ends(*_: Any) -> None:
        if tracker.mine() and tracker.inside("compile"):
            length = tracker.pop_to("compile", user_line())
            tracker.log.write(
                {"k": "compile", "at": time.monotonic_ns(), "ns": length, "where": user_line(), "i": tracker.index}
            )

    handler.register_start_callback(begins)
    handler.register_end_callback(ends)


def recompiling(convert_frame: Any, tracker: Tracker) -> None:
    """Why a function is compiled again, and where it was called from (torch._dynamo.convert_frame, torch >= 2.6)."""
    name = "get_and_maybe_log_recompilation_reasons"
    ask = getattr(convert_frame, name, None)
    if ask is None:
        return

    @functools.wraps(ask)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        reasons = ask(*args, **kwargs)
        if tracker.mine():
            code = getattr(args[1], "f_code", None) if len(args) > 1 else None
            record = {"k": "recompile", "at": time.monotonic_ns(), "i": tracker.index, "where": user_line()}
            record["what"] = getattr(code, "co_name", "")
            record["reason"] = _reason(reasons[0]) if reasons else ""
            tracker.log.write(record)
        return reasons

    setattr(convert_frame, name, wrapper)


def _reason(said: str) -> str:
    """`tensor 'x' size mismatch at index 0. expected 8, actual 9` of what Dynamo says: without the number of the compiled
    version, and without the line of its own source that follows."""
    text = str(said).strip().split("\n", 1)[0]
    if text[:1].isdigit() and ": " in text:
        text = text.split(": ", 1)[1]
    return text.split("  #", 1)[0].strip()[:300]
