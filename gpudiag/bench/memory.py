"""The resident set of this process and its peak. Linux keeps a high-water mark that can be reset, so a peak belongs to a part."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

PROC = Path("/proc/self")


def reset_peak_resident(proc: Path = PROC) -> bool:
    """Sets VmHWM back to the present VmRSS (proc(5): writing 5 to clear_refs). False where the kernel does not allow it."""
    try:
        (proc / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident(proc: Path = PROC) -> tuple[int | None, str]:
    """(bytes, source): VmHWM since the last reset, or getrusage's peak of the whole process."""
    try:
        for line in (proc / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024, "VmHWM of the measuring process (Python and libraries are in it)"
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes on Linux, bytes on macOS
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, "getrusage: peak of the whole process life"


def machine_memory(proc: Path = Path("/proc")) -> int | None:
    """Bytes of RAM, or None where /proc/meminfo is not there."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")), None)
