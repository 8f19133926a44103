"""Where the script makes the host wait for the device: reads of tensor values and explicit synchronisation, by line.

Only methods of Tensor are wrapped, and not __getitem__: a Python function there makes tensors sequences for C
(PySequence_Check), for good, and then torch.tensor([loss_a, loss_b]) fails. Nor functions of the module torch: torch
hands the C function itself to __torch_function__ and torch.jit.script knows it by its identity. What waits there
(boolean masks, torch.nonzero, torch.where with one argument) is found by sampling (sampler.py).

A read of a CPU tensor waits for nothing; it is noted only when it takes long (a `.tolist()` of many elements).
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, Callable, Dict, Tuple

from .patch_torch import dynamo_asks, forget, replace
from .tracker import Tracker
from .unseen import as_caller
from .where import user_line

SLOW_NS = 50_000  # on CPU tensors: fifty times a plain .item()

READS = ("item", "cpu", "tolist", "nonzero", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__repr__",
         "__format__")  # fmt: skip
# How large the result is, or the result itself, is a value that the host reads (aten/src/ATen/native/cuda: Nonzero.cu,
# Unique.cu, Equal.cpp; ATen/native/TensorCompare.cpp).
ASKS = ("argwhere", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "is_nonzero", "__contains__")

Args = Tuple[Any, ...]  # of a method, the tensor among them
Waits = Callable[[Args, Dict[str, Any]], bool]


def install(torch: Any, tracker: Tracker) -> None:
    reads = Reads(torch, tracker)
    for name in READS:
        replace(torch, name, lambda method, name=name: reads.read("Tensor." + name, method, True))
    for name in ASKS:
        if hasattr(torch.Tensor, name):
            replace(torch, name, lambda method, name=name: reads.read("Tensor." + name, method, False))
    for name, waits in (("__setitem__", reads.masked), ("copy_", reads.copied_out), ("numpy", reads.forced)):
        replace(torch, name, lambda method, name=name, waits=waits: reads.read_if("Tensor." + name, method, waits))
    replace(torch, "to", reads.to)
    cuda = getattr(torch, "cuda", None)
    if cuda is not None:
        cuda.synchronize = _explicit(tracker, "torch.cuda.synchronize", cuda.synchronize)
        for kind, name in ((cuda.Stream, "Stream.synchronize"), (cuda.Event, "Event.synchronize")):
            kind.synchronize = _explicit(tracker, name, kind.synchronize)


class Reads:
    """Wrappers for methods of Tensor that may wait. Of nested ones the outermost counts: printing a tensor reads many values."""

    def __init__(self, torch: Any, tracker: Tracker) -> None:
        self._torch = torch
        self._tracker = tracker
        self._depth = 0  # on the training thread
        self._tensor: type = torch.Tensor
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self._device: Any = torch.device
        self._masks = (torch.bool, torch.uint8)
        self._compiling = dynamo_asks(torch)
        self._modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
        self._unseen = getattr(torch._C, "DisableTorchFunctionSubclass", None) or torch._C.DisableTorchFunction

    def _on_gpu(self, tensor: Any) -> bool:
        """Without a call of its __torch_function__: a subclass of the script's must not see that somebody asks."""
        if type(tensor) in self._plain:
            return bool(tensor.is_cuda)
        with self._unseen():
            return bool(tensor.is_cuda)

    def _on_cpu(self, tensor: Any) -> bool:
        with self._unseen():
            return bool(tensor.device.type == "cpu")

    def read(self, what: str, original: Callable[..., Any], slow: bool) -> Callable[..., Any]:
        """slow: note it on a CPU tensor too, when it takes long. Such a read warns of a gradient that is lost, and of the wait
        (torch.cuda.set_sync_debug_mode): any other is called without the detour for warnings, which takes 0.8 us."""
        clock, ident, tracker, on_gpu = time.monotonic_ns, threading.get_ident, self._tracker, self._on_gpu
        compiling, plain = self._compiling, self._plain
        as_theirs = as_caller(self._torch, original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(*args, **kwargs)
            call = as_theirs
            if slow and args and not (type(args[0]) in plain and (args[0].requires_grad or args[0].is_cuda)):
                call = original
            if ident() != tracker.owner:
                try:
                    return call(*args, **kwargs)
                except BaseException as error:
                    forget(error)
                    raise
            began = clock()
            self._depth += 1
            try:
                return call(*args, **kwargs)
            except BaseException as error:
                forget(error)
                raise
            finally:
                self._depth -= 1
                length = clock() - began
                if not self._depth and args and ((slow and length > SLOW_NS) or on_gpu(args[0])) and not self._modes():
                    tracker.sync(what if on_gpu(args[0]) else "cpu:" + what, user_line(), length)

        return wrapper

    def read_if(self, what: str, original: Callable[..., Any], waits: Waits) -> Callable[..., Any]:
        compiling = self._compiling
        call = as_caller(self._torch, original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(*args, **kwargs)
            try:
                if waits(args, kwargs):
                    return self._noted(what, call, args, kwargs)
                return call(*args, **kwargs)
            except BaseException as error:
                forget(error)
                raise

        return wrapper

    def _noted(self, what: str, original: Callable[..., Any], args: Args, kwargs: Dict[str, Any]) -> Any:
        if threading.get_ident() != self._tracker.owner:
            return original(*args, **kwargs)
        began = time.monotonic_ns()
        self._depth += 1
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            forget(error)
            raise
        finally:
            self._depth -= 1
            if not self._depth and not self._modes():
                self._tracker.sync(what, user_line(3), time.monotonic_ns() - began)

    # -- which calls wait --------------------------------------------------------------------------------------------

    def forced(self, args: Args, kwargs: Dict[str, Any]) -> bool:
        """numpy(force=True) copies; without it a tensor on a GPU is refused."""
        return bool(kwargs.get("force")) and self._on_gpu(args[0])

    def copied_out(self, args: Args, kwargs: Dict[str, Any]) -> bool:
        """copy_(other, non_blocking=False) from a GPU."""
        source = kwargs.get("other") if len(args) < 2 else args[1]
        if not isinstance(source, self._tensor) or not self._on_gpu(source) or self._on_gpu(args[0]):
            return False
        return not _asynchronous(args, 2, kwargs)

    def masked(self, args: Args, kwargs: Dict[str, Any]) -> bool:
        """x[mask] = values has to find the places (nonzero); x[mask] = 0, or a tensor of one element on the CPU, is
        masked_fill and does not (canDispatchToMaskedFill in ATen/native/TensorAdvancedIndexing.h)."""
        if not self._on_gpu(args[0]) or len(args) != 3:
            return False
        indices = [one for one in (args[1] if isinstance(args[1], tuple) else (args[1],)) if self._selects(one)]
        with self._unseen():
            masks = [one for one in indices if isinstance(one, self._tensor) and one.dtype in self._masks]
            if not any(mask.is_cuda and mask.dim() for mask in masks):
                return False
            scalar = not isinstance(args[2], self._tensor) or (args[2].numel() == 1 and not args[2].is_cuda)
            return not (scalar and len(indices) == 1)

    def _selects(self, index: Any) -> bool:
        """Whether an index becomes a tensor of places or a mask: no slice, None, Ellipsis or number, tensors of one included."""
        if isinstance(index, self._tensor):
            with self._unseen():
                return bool(index.dim()) or index.dtype in self._masks
        return isinstance(index, list) or (hasattr(index, "__array__") and getattr(index, "ndim", 1) > 0)

    def to(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Tensor.to: to a device the phase h2d, from one to the CPU a read, unless asked not to block."""
        tracker, tensor_type, named = self._tracker, self._tensor, (str, int, self._device)
        compiling = self._compiling
        call = as_caller(self._torch, original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(*args, **kwargs)
            try:
                place = args[1] if len(args) > 1 else kwargs.get("device", kwargs.get("tensor"))
                if isinstance(place, tensor_type):
                    away, position = not self._on_gpu(place), 2  # to(tensor, non_blocking)
                elif isinstance(place, named):
                    away, position = self._device(place).type == "cpu", 3  # to(device, dtype, non_blocking)
                    if not away and self._on_cpu(args[0]) and tracker.mine() and not tracker.inside("h2d"):
                        tracker.push("h2d")
                        try:
                            return call(*args, **kwargs)
                        finally:
                            tracker.pop()
                else:
                    return call(*args, **kwargs)
                if away and self._on_gpu(args[0]) and not _asynchronous(args, position, kwargs):
                    return self._noted("Tensor.to", call, args, kwargs)
                return call(*args, **kwargs)
            except BaseException as error:
                forget(error)
                raise

        return wrapper


def _asynchronous(args: Args, position: int, kwargs: Dict[str, Any]) -> bool:
    return bool(args[position] if len(args) > position else kwargs.get("non_blocking"))


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
