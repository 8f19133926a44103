"""What NVML says of the GPUs while an application runs: a thread in gpudiag's own process, 10 samples a second.

`<capture>/nvml.jsonl`: a header line, then one line a device and moment; a field that could not be read is absent.

    {"gpudiag_nvml": 1, "driver": "550.54.15", "interval_s": 0.1, "devices": [{"device": 0, "name": "...",
     "memory_total": bytes, "power_limit_w": W, "sm_clock_max_mhz": MHz, "pcie_gen_max": 5, "pcie_width_max": 16,
     "nvlinks": 18, "nvlinks_active": 18}]}
    {"t": wall-clock ns, "device": 0, "gpu_util": 0-1, "memory_util": 0-1, "memory_used": bytes, "power_w": W,
     "temperature_c": C, "sm_clock_mhz": MHz, "reasons": bit mask, "pcie_gen": 5, "pcie_width": 16,
     "other_processes": n, "other_memory": bytes}

Needs no root. Nothing here is fatal: without a driver, a GPU or the module pynvml there is no file, and the summary
says why. `device` counts as CUDA does, so CUDA_VISIBLE_DEVICES decides what is sampled (CUDA_DEVICE_ORDER=PCI_BUS_ID is
NVML's order; on a machine with unlike GPUs CUDA's default order may differ, and the header's names tell).
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

FORMAT = 1
INTERVAL_S = (
    0.1  # NVML itself averages utilisation over 1/6 to 1 s, so more often brings nothing (nvml.h, nvmlUtilization_t)
)

# field -> (function, further arguments by the name of their constant, how to turn the answer into our unit)
_Reading = tuple[tuple[str, ...], tuple[str, ...], Callable[[Any], float | int]]
_STATIC: dict[str, _Reading] = {
    "memory_total": (("nvmlDeviceGetMemoryInfo",), (), lambda info: int(info.total)),
    "power_limit_w": (("nvmlDeviceGetEnforcedPowerLimit",), (), lambda mw: mw / 1000),
    "sm_clock_max_mhz": (("nvmlDeviceGetMaxClockInfo",), ("NVML_CLOCK_SM",), int),
    "pcie_gen_max": (("nvmlDeviceGetMaxPcieLinkGeneration",), (), int),
    "pcie_width_max": (("nvmlDeviceGetMaxPcieLinkWidth",), (), int),
}
_MOVING: dict[str, _Reading] = {
    "gpu_util": (("nvmlDeviceGetUtilizationRates",), (), lambda rates: rates.gpu / 100),
    "memory_util": (("nvmlDeviceGetUtilizationRates",), (), lambda rates: rates.memory / 100),
    "memory_used": (("nvmlDeviceGetMemoryInfo",), (), lambda info: int(info.used)),
    "power_w": (("nvmlDeviceGetPowerUsage",), (), lambda mw: mw / 1000),
    "temperature_c": (("nvmlDeviceGetTemperature",), ("NVML_TEMPERATURE_GPU",), int),
    "sm_clock_mhz": (("nvmlDeviceGetClockInfo",), ("NVML_CLOCK_SM",), int),
    # renamed with driver 535; older nvidia-ml-py and older drivers know only the second name
    "reasons": (("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"), (), int),
    "pcie_gen": (("nvmlDeviceGetCurrPcieLinkGeneration",), (), int),
    "pcie_width": (("nvmlDeviceGetCurrPcieLinkWidth",), (), int),
}


class NvmlUnavailable(Exception):  # noqa: N818  a state of the machine, not an error of ours
    """Why there is no NVML here, in words."""


class Nvml:
    """The GPUs of this machine through a pynvml-like module: the seam that tests replay a session through.

    Raises NvmlUnavailable when the module, the driver or every GPU is missing. A single reading that fails is left out.
    """

    def __init__(self, module: Any = None, env: Mapping[str, str] = os.environ) -> None:
        if module is None:
            try:
                module = importlib.import_module("pynvml")
            except ImportError as error:
                raise NvmlUnavailable("the module pynvml is not installed (pip install nvidia-ml-py)") from error
        self._nvml = module
        try:
            module.nvmlInit()
            handles = [module.nvmlDeviceGetHandleByIndex(i) for i in range(module.nvmlDeviceGetCount())]
            self.driver = _text(module.nvmlSystemGetDriverVersion())
            cuda = module.nvmlSystemGetCudaDriverVersion()  # 12040
            self.cuda = f"{cuda // 1000}.{cuda % 1000 // 10}"
        except module.NVMLError as error:
            raise NvmlUnavailable(f"NVML does not start: {error}") from error
        self._handles = self._visible(handles, env.get("CUDA_VISIBLE_DEVICES"))
        if not self._handles:
            raise NvmlUnavailable("NVML sees no GPU that this run may use")

    def _visible(self, handles: list[Any], setting: str | None) -> list[Any]:
        """The handles in CUDA's numbering. CUDA stops at the first entry that it does not know (CUDA C guide, 'CUDA
        Environment Variables'); entries are indices or UUID prefixes."""
        if setting is None:
            return handles
        chosen: list[Any] = []
        for entry in (part.strip() for part in setting.split(",")):
            if entry.isdigit() and int(entry) < len(handles):
                chosen.append(handles[int(entry)])
            elif entry.startswith("GPU-"):
                match = [h for h in handles if _text(self._nvml.nvmlDeviceGetUUID(h)).startswith(entry)]
                if len(match) != 1:
                    break
                chosen += match
            else:
                break
        return chosen

    def devices(self) -> list[dict[str, Any]]:
        """What does not change, one dict a device."""
        return [
            {
                "device": index,
                "name": self._name(handle),
                **self._read(handle, _STATIC),
                **nvlinks(self._nvml, handle),
            }
            for index, handle in enumerate(self._handles)
        ]

    def sample(self, is_own: Callable[[int], bool | None]) -> list[dict[str, Any]]:
        """One dict a device. is_own: whether a pid belongs to the run, None when that cannot be told."""
        rows = []
        for index, handle in enumerate(self._handles):
            row = {"t": time.time_ns(), "device": index, **self._read(handle, _MOVING), **self._others(handle, is_own)}
            rows.append(row)
        return rows

    def pids(self) -> set[int]:
        """The processes with a compute context on the visible GPUs, now."""
        return {process.pid for handle in self._handles for process in self._processes(handle) or ()}

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _name(self, handle: Any) -> str:
        try:
            return _text(self._nvml.nvmlDeviceGetName(handle))
        except self._nvml.NVMLError:
            return ""

    def _read(self, handle: Any, readings: dict[str, _Reading]) -> dict[str, float | int]:
        values = {}
        for field, (functions, constants, convert) in readings.items():
            for name in functions:
                function = getattr(self._nvml, name, None)
                if function is None:
                    continue
                try:
                    values[field] = convert(function(handle, *(getattr(self._nvml, c) for c in constants)))
                except self._nvml.NVMLError:  # NotSupported on consumer cards and MIG slices, GpuIsLost, NoPermission
                    continue
                break
        return values

    def _processes(self, handle: Any) -> list[Any] | None:
        try:
            return list(self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        except self._nvml.NVMLError:
            return None

    def _others(self, handle: Any, is_own: Callable[[int], bool | None]) -> dict[str, int]:
        processes = self._processes(handle)
        if processes is None:
            return {}
        own = [is_own(process.pid) for process in processes]
        if None in own:
            return {}
        others = [process for process, mine in zip(processes, own, strict=True) if not mine]
        return {"other_processes": len(others), "other_memory": sum(p.usedGpuMemory or 0 for p in others)}


def nvlinks(nvml: Any, handle: Any) -> dict[str, int]:
    """nvlinks: links of the board; nvlinks_active: those that are up. Empty for a board without NVLink, and in virtual machines
    whose driver does not answer. Asked once: a link that goes down stays down until the driver is loaded again."""
    ask = getattr(nvml, "nvmlDeviceGetNvLinkState", None)
    if ask is None:
        return {}
    states = []
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            states.append(ask(handle, link))
        except nvml.NVMLError:  # a board answers for the links that it has
            continue
    return {"nvlinks": len(states), "nvlinks_active": sum(map(bool, states))} if states else {}


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value  # bytes before nvidia-ml-py 12


@dataclass(frozen=True)
class NvmlSummary:
    """samples: lines written; problem: why there are none, or fewer than asked for ("" = all well)."""

    samples: int
    problem: str = ""


class NvmlSampler:
    """Writes nvml.jsonl from `start` to `stop`. Each line is flushed: a killed gpudiag loses none of them.

    source: for tests; None means the NVML of this machine.
    """

    def __init__(
        self,
        path: Path,
        *,
        source: Nvml | None = None,
        interval_s: float = INTERVAL_S,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self._path, self._source, self._interval_s, self._env = path, source, interval_s, env
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._samples, self._problem = 0, ""
        self._before: set[int] = set()

    def start(self) -> None:
        """Call before the application starts: whoever is on a GPU by then is not of this run."""
        try:
            self._source = self._source or Nvml(env=self._env)
            file = self._path.open("w", encoding="utf-8")
        except (NvmlUnavailable, OSError) as error:
            self._problem = str(error)
            return
        self._before = self._source.pids()
        self._thread = threading.Thread(target=self._run, args=(self._source, file), name="gpudiag-nvml", daemon=True)
        self._thread.start()

    def stop(self) -> NvmlSummary:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10.0)  # a reading can hang on a GPU that fell off the bus; the thread is a daemon
            if self._thread.is_alive():
                self._problem = "NVML stopped answering"
        return NvmlSummary(self._samples, self._problem)

    def _run(self, source: Nvml, file: IO[str]) -> None:
        try:
            with file:
                header = {"gpudiag_nvml": FORMAT, "driver": source.driver, "interval_s": self._interval_s}
                _write(file, header | {"devices": source.devices()})
                due = time.monotonic()
                while True:
                    for row in source.sample(self._is_own):
                        _write(file, row)
                        self._samples += 1
                    due = max(due + self._interval_s, time.monotonic())
                    if self._stop.wait(due - time.monotonic()):
                        break
            source.close()
        except OSError as error:  # the disk is full
            self._problem = f"{self._path}: {error.strerror}"

    def _is_own(self, pid: int) -> bool | None:
        """Not of this run when it was there before; of this run when it is our user's and came later.

        None in a container that has its own pids: NVML gives the host's, which mean nothing here.
        """
        if pid in self._before:
            return False
        try:
            return Path(f"/proc/{pid}").stat().st_uid == os.getuid()
        except OSError:
            return None


def _write(file: IO[str], row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, separators=(",", ":")) + "\n")
    file.flush()
