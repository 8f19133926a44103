"""What a result must say of its machine so that another person can get the same number. No host name, user or path."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from gpudiag.bench.device import math_settings, usable_cores
from gpudiag.bench.memory import machine_memory
from gpudiag.bench.power import EVENTS
from gpudiag.bench.result import Gpu, Machine
from gpudiag.bench.stability import load_average
from gpudiag.collect.nvml import nvlinks


def describe_machine(device: str) -> tuple[Machine, str]:
    """(the machine, why the GPUs could not be asked or "")."""
    import torch
    import torchvision

    uuid = None if device == "cpu" else f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    gpus, why = read_gpus_state(uuid)
    cores, quota = usable_cores()
    cudnn = torch.backends.cudnn.version() if device != "cpu" else None
    machine = Machine(
        cpu=cpu_name(),
        cores=os.cpu_count() or cores,
        cores_usable=cores,
        cpu_quota=quota,
        memory_bytes=machine_memory(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        torchvision=str(torchvision.__version__),
        torch_cuda=torch.version.cuda or "",
        cudnn=str(cudnn or ""),
        driver=next((gpu.driver for gpu in gpus if gpu.driver), ""),
        governor=_read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        load_before=load_average(),
        load_after=None,
        gpus=gpus,
        settings=math_settings(device),
    )
    return machine, why


def cpu_name(proc: Path = Path("/proc")) -> str:
    for line in _read(proc / "cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_gpus_state(measured: str | None = None) -> tuple[tuple[Gpu, ...], str]:
    """Every GPU's state from NVML: limits, clocks, PCIe and NVLink; or none and the reason. measured: UUID of the one to mark."""
    try:
        import pynvml
    except ImportError:
        return (), "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    except pynvml.NVMLError as error:
        return (), f"NVML: {error}"
    return tuple(gpu_state(pynvml, index, handle, driver, measured) for index, handle in enumerate(handles)), ""


def gpu_state(nvml: Any, index: int, handle: Any, driver: str, measured: str | None) -> Gpu:
    """One GPU. A question that the board does not answer stays None (nvmlDevice... raises NotSupported)."""

    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:
            return None

    memory = ask("nvmlDeviceGetMemoryInfo")
    limit = ask("nvmlDeviceGetEnforcedPowerLimit")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    processes = ask("nvmlDeviceGetComputeRunningProcesses")
    links = nvlinks(nvml, handle)
    return Gpu(
        index=index,
        name=_text(ask("nvmlDeviceGetName") or ""),
        memory_bytes=int(memory.total) if memory is not None else None,
        driver=driver,
        power_limit_w=None if limit is None else limit / 1e3,
        sm_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        sm_mhz_max=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        nvlinks=links.get("nvlinks"),
        nvlinks_active=links.get("nvlinks_active"),
        processes=None if processes is None else len(processes),
        events=tuple(name for bit, name in EVENTS.items() if reasons & bit),
        measured=measured is not None and _text(ask("nvmlDeviceGetUUID") or "") == measured,
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
