"""DataLoaders: how each was built, what the main thread waits, and what each batch costs where it is fetched.

The patches sit on classes that every process finds under their own names (`_MapDatasetFetcher.fetch`), so nothing of
ours is pickled into a worker: forked workers inherit them, spawned ones patch themselves when they import torch.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Optional

from .fetches import Fetches
from .log import Log
from .patch_queue import Arrivals, shared_memory_error, tensor_bytes
from .patch_torch import forget
from .tracker import Tracker
from .where import user_line

MEASURED_BATCHES = 3  # of each iterator: how many bytes of tensors a batch holds


def install(torch: Any, tracker: Tracker, fetches: Fetches) -> None:
    data = torch.utils.data
    _fetchers(data._utils.fetch, fetches, data._utils.worker)
    _loaders(data, tracker, torch)
    _pinning(data._utils.pin_memory, tracker.log)


def _fetchers(fetch: Any, fetches: Fetches, worker: Any) -> None:
    base = fetch._BaseDatasetFetcher
    create = base.__init__

    @functools.wraps(create)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        create(self, *args, **kwargs)
        fetches.fetchers += 1
        self._gpudiag = state = [fetches.fetchers, 0, -1]  # which fetcher, batches so far, ns of the last collate
        collate = self.collate_fn

        def timed_collate(samples: Any) -> Any:
            began = time.monotonic_ns()
            try:
                return collate(samples)
            except BaseException as error:
                forget(error)
                raise
            finally:
                state[2] = time.monotonic_ns() - began

        self.collate_fn = timed_collate

    base.__init__ = __init__
    for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
        kind = getattr(fetch, name)
        kind.fetch = _timed_fetch(kind.fetch, fetches, worker)


def _timed_fetch(original: Callable[..., Any], fetches: Fetches, worker: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def fetch(self: Any, index: Any) -> Any:
        state = getattr(self, "_gpudiag", None)
        if state is None:
            return original(self, index)
        state[2] = -1
        fetches.begin()
        try:
            return original(self, index)
        except BaseException as error:
            forget(error)
            raise
        finally:
            # The worker's loop holds the batch's number in a local; counting would drift when a worker is restarted.
            caller = sys._getframe(1)
            number = caller.f_locals.get("idx", -1) if caller.f_code.co_name == "_worker_loop" else -1
            info = worker._worker_info
            fetches.end(state, number if isinstance(number, int) else -1, info.id if info is not None else -1)
            state[1] += 1

    return fetch


def _loaders(data: Any, tracker: Tracker, torch: Any) -> None:
    grad_enabled = torch.is_grad_enabled
    loader_class = data.DataLoader
    iterator_class = data.dataloader._BaseDataLoaderIter
    loader_init, iterator_init = loader_class.__init__, iterator_class.__init__
    iterate = loader_class.__iter__
    reset, advance = iterator_class._reset, iterator_class.__next__
    log = tracker.log
    numbers: Dict[str, int] = {"loader": 0, "iterator": 0}

    @functools.wraps(loader_init)
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            loader_init(self, *args, **kwargs)
        except BaseException as error:
            forget(error)
            raise
        if "_gpudiag_loader" not in self.__dict__:
            self.__dict__["_gpudiag_loader"] = numbers["loader"]
            numbers["loader"] += 1
            log.write({"k": "loader", "l": self.__dict__["_gpudiag_loader"], "where": user_line(), **_describe(self)})

    @functools.wraps(iterator_init)
    def init_iterator(self: Any, loader: Any) -> None:
        self._gpudiag = [loader.__dict__.get("_gpudiag_loader", -1), numbers["iterator"], -1, 0]
        numbers["iterator"] += 1
        try:
            iterator_init(self, loader)
        except BaseException as error:
            forget(error)
            raise

    @functools.wraps(iterate)
    def __iter__(self: Any) -> Any:  # noqa: N807
        # Workers that start anew at each epoch start here, before the first next: in a run under way that is waiting for data.
        waiting = tracker.mine() and bool(tracker.source)
        if waiting:
            tracker.push(tracker.waits_in(self.__dict__.get("_gpudiag_loader", -1), grad_enabled()))
        try:
            iterator = iterate(self)
            queue = getattr(iterator, "_worker_result_queue", None)
            if queue is not None and "_gpudiag_arrivals" not in iterator.__dict__:
                iterator._gpudiag_arrivals = Arrivals(queue)
            return iterator
        except BaseException as error:
            forget(error)
            raise
        finally:
            if waiting:
                tracker.pop()

    @functools.wraps(reset)
    def reset_iterator(self: Any, loader: Any, first_iter: bool = False) -> None:
        reset(self, loader, first_iter)
        state = getattr(self, "_gpudiag", None)
        if state is not None:
            state[2] += 1
            state[3] = 0
            log.write({"k": "epoch", "l": state[0], "it": state[1], "e": state[2], "at": time.monotonic_ns()})

    @functools.wraps(advance)
    def __next__(self: Any) -> Any:  # noqa: N807
        state = getattr(self, "_gpudiag", None)
        if state is None or not tracker.mine():
            try:
                return advance(self)
            except BaseException as error:
                forget(error)
                raise
        if not tracker.busy:
            tracker.turn("loader", id(self))
        tracker.push(tracker.waits_in(state[0], grad_enabled()))
        began = time.monotonic_ns()
        number = getattr(self, "_rcvd_idx", -1)
        got = False
        try:
            batch = advance(self)
            got = True
            return batch
        except BaseException as error:
            said = shared_memory_error(error)
            if said:
                log.write({"k": "shm_error", "l": state[0], "said": said}, flush=True)
            forget(error)
            raise
        finally:
            ended = time.monotonic_ns()
            tracker.pop()
            if got:
                if number >= 0:
                    number = self._rcvd_idx - 1  # exhausted workers of an iterable dataset were skipped meanwhile
                workers = getattr(self, "_workers", None)
                record = {"k": "batch", "l": state[0], "it": state[1], "e": state[2], "n": state[3], "b": number}
                record.update(s=began, t=ended)
                if workers:
                    arrivals = self.__dict__.get("_gpudiag_arrivals")
                    record.update(arrivals.of(number) if arrivals is not None else {})
                    if state[3] == 0:
                        record["pids"] = tracker.workers = [worker.pid for worker in workers]
                    if state[3] < MEASURED_BATCHES:
                        record["sz"] = tensor_bytes(batch, torch)
                log.write(record)
                state[3] += 1

    loader_class.__init__ = init_loader
    loader_class.__iter__ = __iter__
    iterator_class.__init__ = init_iterator
    iterator_class._reset = reset_iterator
    iterator_class.__next__ = __next__
    # next() finds the slot of the class that defines it; subclasses inherit both


def _describe(loader: Any) -> Dict[str, Any]:
    dataset = loader.dataset
    try:
        length: Optional[int] = len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        length = None
    context = loader.multiprocessing_context
    start_method = None
    if loader.num_workers:
        import multiprocessing

        start_method = (context or multiprocessing).get_start_method()
    return {
        "num_workers": loader.num_workers,
        "batch_size": loader.batch_size if loader.batch_size is not None else _sampler_batch(loader),
        "pin_memory": bool(loader.pin_memory),
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": bool(loader.persistent_workers),
        "start_method": start_method,
        "dataset": type(dataset).__module__ + "." + type(dataset).__qualname__,
        "length": length,
        "in_memory": _in_memory(dataset, length),
        "iterable": not hasattr(type(dataset), "__getitem__"),
        "shm": _shared_memory(),
    }


def _shared_memory() -> Optional[List[int]]:
    """Size of /dev/shm, through which workers hand over their batches, and what of it is free, in bytes."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return None
    return [room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize]


def _sampler_batch(loader: Any) -> Optional[int]:
    """The batch size of a batch sampler given as the sampler (batch_size=None): batched indexing."""
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        size = getattr(sampler, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def _in_memory(dataset: Any, length: Optional[int], depth: int = 0) -> bool:
    """Whether the samples are rows of tensors or arrays that the dataset holds."""
    try:
        values = list(vars(dataset).values())
    except TypeError:
        return False
    for value in values:
        if isinstance(value, (tuple, list)) and 0 < len(value) <= 8:
            values.extend(value)
    for value in values:
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple) and shape and length and shape[0] == length:
            return True
    inner = getattr(dataset, "dataset", None)
    return inner is not None and depth < 4 and _in_memory(inner, getattr(inner, "__len__", lambda: None)(), depth + 1)


def _pinning(module: Any, log: Log) -> None:
    pin = module.pin_memory
    depth = threading.local()

    @functools.wraps(pin)
    def pin_memory(*args: Any, **kwargs: Any) -> Any:
        if getattr(depth, "inside", False):
            return pin(*args, **kwargs)
        depth.inside = True
        began = time.monotonic_ns()
        try:
            return pin(*args, **kwargs)
        except BaseException as error:
            forget(error)
            raise
        finally:
            depth.inside = False
            number = sys._getframe(1).f_locals.get("idx", -1)
            log.write(
                {"k": "pin", "b": number if isinstance(number, int) else -1, "s": began, "e": time.monotonic_ns()}
            )

    module.pin_memory = pin_memory
