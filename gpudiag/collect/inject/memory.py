"""How much memory this process uses: by the C heap where glibc tells, and of the GPU by torch's allocator."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Callable, Dict, Optional


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of glibc >= 2.33."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _heap_reader() -> Callable[[], int]:
    try:
        read = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return _resident
    read.restype = _Mallinfo2
    return lambda: int(read().uordblks) or _resident()  # 0 under jemalloc or tcmalloc


def _resident() -> int:
    """Resident set of this process in bytes; 0 where /proc is not. Says less: freed memory is used again unseen."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


heap = _heap_reader()  # bytes of the C heap in use, large tensors not among them


def allocator(torch: Any) -> Dict[str, int]:
    """Bytes of torch's allocator on the current GPU: `a` in tensors, `r` taken from the driver, `pa` and `pr` their peaks so far;
    `d` the GPU. Some 100 us; empty without CUDA."""
    try:
        if not torch.cuda.is_initialized():
            return {}
        stats = torch.cuda.memory_stats()
        kinds = (
            ("a", "allocated", "current"),
            ("r", "reserved", "current"),
            ("pa", "allocated", "peak"),
            ("pr", "reserved", "peak"),
        )
        found = {key: int(stats["%s_bytes.all.%s" % (kind, when)]) for key, kind, when in kinds}
        found["d"] = int(torch.cuda.current_device())
        return found
    except (RuntimeError, KeyError, AttributeError):  # another backend of the allocator
        return {}


def out_of_memory(error: Optional[BaseException]) -> Dict[str, str]:
    """`of` gpu | host: whose memory an exception says ran out, and what it `said`; empty where it says nothing of the kind."""
    text = str(error).strip().split("\n", 1)[0][:300] if error is not None else ""
    if type(error).__name__ == "OutOfMemoryError" or "CUDA out of memory" in text:
        return {"of": "gpu", "said": text}
    if isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in text:
        return {"of": "host", "said": text or "MemoryError"}
    return {}
