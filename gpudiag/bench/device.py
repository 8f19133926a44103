"""The real devices behind the loop: what synchronise, peak memory and out of memory mean on CUDA and on the CPU."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from gpudiag.bench.memory import peak_resident, reset_peak_resident
from gpudiag.bench.result import Memory


class CpuDevice:
    """PyTorch's CPU operations return when their work is done: there is nothing to wait for."""

    kind = "cpu"

    def __init__(self) -> None:
        self.resident_before = peak_resident()[0]

    def synchronize(self) -> None:
        pass

    def reset_peak(self) -> None:
        gc.collect()
        reset_peak_resident()

    def peak(self) -> Memory:
        resident, source = peak_resident()
        return Memory(resident=resident, resident_before=self.resident_before, source=source)

    def release(self) -> None:
        gc.collect()


class CudaDevice:
    kind = "cuda"

    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self.name)

    def reset_peak(self) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()  # else reserved memory of an earlier part counts as this one's
        torch.cuda.reset_peak_memory_stats(self.name)

    def peak(self) -> Memory:
        import torch

        return Memory(
            allocated=int(torch.cuda.max_memory_allocated(self.name)),
            reserved=int(torch.cuda.max_memory_reserved(self.name)),
            source="torch.cuda.max_memory_allocated/reserved (the CUDA context and libraries are not in it)",
        )

    def release(self) -> None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()


def open_device(name: str) -> CpuDevice | CudaDevice:
    return CpuDevice() if name == "cpu" else CudaDevice(name)


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA raises its own type; the CPU allocator a RuntimeError that is known by its text, Python a MemoryError."""
    import torch

    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)


def cuda_problem() -> str:
    """Why CUDA cannot be used here, or "" when it can. torch warns on an unusable driver; the warning is the reason."""
    import warnings

    import torch

    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        return ""
    for warning in caught:
        text = str(warning.message).split(". ")[0]
        return f"torch cannot use the GPU: {text}"
    return "no CUDA device is visible"


def choose_device(asked: str) -> tuple[str, str]:
    """(`cpu` or `cuda:N`, why not CUDA or ""). `auto` takes CUDA where it works; a device named by the user must work.

    Raises GpudiagError when `cuda` was asked for and cannot be used.
    """
    from gpudiag.errors import GpudiagError

    if asked == "cpu":
        return "cpu", "the CPU was asked for (--device cpu)"
    problem = cuda_problem()
    if not problem:
        return ("cuda:0" if asked in ("auto", "cuda") else asked), ""
    if asked == "auto":
        return "cpu", problem
    raise GpudiagError(f"--device {asked}: {problem}", "take --device cpu, or see `gpudiag doctor`")


def usable_cores() -> tuple[int, float | None]:
    """(cores this process may run on, CPU quota of the control group in cores or None). threads = the smaller, rounded down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores, cpu_quota()


def usable_threads() -> int:
    cores, quota = usable_cores()
    return max(1, min(cores, int(quota))) if quota else cores


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """cgroup v2 `cpu.max` ("max 100000" or "200000 100000"), else v1 `cpu.cfs_quota_us`; None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        value = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return value / period_us if value > 0 else None


def math_settings(device: str) -> dict[str, Any]:
    """The switches of torch that change what is computed or how fast; they belong to a reproducible result."""
    import torch

    settings: dict[str, Any] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if device != "cpu":
        settings["cudnn_allow_tf32"] = torch.backends.cudnn.allow_tf32
        settings["cudnn_benchmark"] = torch.backends.cudnn.benchmark
    return settings
