"""How batches get from the workers to the training process: message size, unpickling, and shared memory that runs out."""

from __future__ import annotations

import time
import weakref
from typing import Any, Dict, Optional

from .patch_torch import forget

SHARED_MEMORY_FULL = ("killed by signal: Bus error", "out of shared memory", "unable to allocate shared memory")
MOST_PARTS = 1000  # of a batch, looked at to sum its tensors


class Arrivals:
    """Times the result queue of one loader iterator, in the thread that reads it (the pinning thread where there is one).

    Set on the queue object itself: its pickled form, which spawned workers get, does not hold these attributes.
    """

    def __init__(self, queue: Any) -> None:
        self._known: Dict[int, Dict[str, int]] = {}  # by number of the batch, until the training thread takes it
        self._received = self._size = 0
        receive, get = getattr(queue, "_recv_bytes", None), getattr(type(queue), "get", None)
        if receive is None or get is None:
            return
        # a queue that knew itself would be freed, and its pipes closed, later than without us
        itself = weakref.ref(queue)

        def timed_receive(*args: Any, **kwargs: Any) -> Any:
            message = receive(*args, **kwargs)
            self._received, self._size = time.monotonic_ns(), len(message)
            return message

        def timed_get(*args: Any, **kwargs: Any) -> Any:
            try:
                item = get(itself(), *args, **kwargs)
            except BaseException as error:
                forget(error)
                raise
            if isinstance(item, tuple) and item and isinstance(item[0], int) and self._received:
                unpickling = time.monotonic_ns() - self._received
                self._known[item[0]] = {"r": self._received, "u": unpickling, "m": self._size}
            return item

        queue._recv_bytes, queue.get = timed_receive, timed_get

    def of(self, number: int) -> Dict[str, int]:
        """r: when the message was received; u: ns of unpickling; m: its bytes. Empty where that is not known."""
        return self._known.pop(number, {})


def tensor_bytes(batch: Any, torch: Any) -> int:
    """Bytes of the tensors in a batch: what workers put into shared memory for it. Mappings, lists and tuples are looked into."""
    total, left, parts = 0, MOST_PARTS, [batch]
    while parts and left:
        part = parts.pop()
        left -= 1
        if isinstance(part, torch.Tensor):
            if part.layout == torch.strided:
                total += part.numel() * part.element_size()
        elif isinstance(part, dict):
            parts.extend(part.values())
        elif isinstance(part, (list, tuple)):
            parts.extend(part)
    return total


def shared_memory_error(error: Optional[BaseException]) -> str:
    """What torch says when a worker could not put a batch into /dev/shm, or ""."""
    for _ in range(8):
        if error is None:
            break
        text = str(error)
        full = "No space left on device" in text and "/torch_" in text
        if full or any(words in text for words in SHARED_MEMORY_FULL):
            return text.strip().split("\n", 1)[0][:300]
        error = error.__cause__ or error.__context__
    return ""
