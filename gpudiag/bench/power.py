"""Power, temperature, clocks and energy from NVML while a round runs. NVML is reached through a small seam, so tests need no GPU."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from gpudiag.bench.result import Power
from gpudiag.metrics.machine import AWAKE, AWAKE_SAMPLES, link_rate

INTERVAL_S = (
    0.1  # NVML renews its power reading about every 20-100 ms depending on the board; faster sampling repeats values
)


@dataclass(frozen=True)
class Sample:
    """One NVML reading; None = not supported by this board. energy_mj: millijoules since the driver was loaded. pcie_share: PCIe rate
    now / the most that GPU and slot can do; None too while the clock is down, since an idle link trains down to save power."""

    ns: int
    watts: float | None = None
    celsius: float | None = None
    sm_mhz: float | None = None
    energy_mj: int | None = None
    events: tuple[str, ...] = ()
    processes: int | None = None
    pcie_share: float | None = None


class Source(Protocol):
    def sample(self) -> Sample: ...


@dataclass
class PowerWatch:
    """Samples `source` in a thread between start() and stop(), and keeps every sample of the last round and of all rounds."""

    source: Source
    interval_s: float = INTERVAL_S
    rounds: list[list[Sample]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._stop.clear()
        self.rounds.append([self.source.sample()])
        self._thread = threading.Thread(target=self._run, name="gpudiag-power", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self.interval_s):
            self.rounds[-1].append(self.source.sample())

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.rounds[-1].append(self.source.sample())

    def load(self) -> dict[str, object]:
        return gpu_load(self.rounds[-1])


def gpu_load(samples: list[Sample]) -> dict[str, object]:
    """The GPU's fields of RoundLoad: mean clock and power, highest temperature, all clock events seen."""
    clocks = [s.sm_mhz for s in samples if s.sm_mhz is not None]
    celsius = [s.celsius for s in samples if s.celsius is not None]
    watts = [s.watts for s in samples if s.watts is not None]
    processes = [s.processes for s in samples if s.processes is not None]
    return {
        "gpu_mhz": statistics.mean(clocks) if clocks else None,
        "gpu_celsius": max(celsius) if celsius else None,
        "gpu_watts": statistics.mean(watts) if watts else None,
        "gpu_events": tuple(sorted({event for s in samples for event in s.events if event != FIXED_CLOCKS})),
        "gpu_processes": max(processes) if processes else None,
    }


def summarise_power(rounds: list[list[Sample]], images_per_round: int) -> Power | None:
    """None when no sample has a power reading. Energy: the counter's difference over each round where the board has one
    (Volta and newer), else the time integral of the samples (trapezoids)."""
    samples = [s for each in rounds for s in each]
    watts = [s.watts for s in samples if s.watts is not None]
    if not watts:
        return None
    joules: float | None = None
    source = "not measured"
    if all(each[0].energy_mj is not None and each[-1].energy_mj is not None for each in rounds):
        joules = sum(((each[-1].energy_mj or 0) - (each[0].energy_mj or 0)) / 1e3 for each in rounds)
        source = "NVML energy counter"
    elif all(len([s for s in each if s.watts is not None]) > 1 for each in rounds):
        joules = sum(_integral(each) for each in rounds)
        source = "NVML power samples integrated over time"
    celsius = [s.celsius for s in samples if s.celsius is not None]
    clocks = [s.sm_mhz for s in samples if s.sm_mhz is not None]
    events = sorted({event for s in samples for event in s.events})
    links = [s.pcie_share for s in samples if s.pcie_share is not None]
    images = images_per_round * len(rounds)
    return Power(
        mean_watts=statistics.mean(watts),
        max_watts=max(watts),
        mean_celsius=statistics.mean(celsius) if celsius else None,
        max_celsius=max(celsius) if celsius else None,
        joules_per_image=joules / images if joules is not None and images else None,
        energy_source=source,
        samples=len(watts),
        mean_mhz=statistics.mean(clocks) if clocks else None,
        event_shares={event: sum(event in s.events for s in samples) / len(samples) for event in events},
        pcie_share=max(links) if len(links) >= AWAKE_SAMPLES else None,
    )


def _integral(samples: list[Sample]) -> float:
    known = [(s.ns / 1e9, s.watts) for s in samples if s.watts is not None]
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(known))


FIXED_CLOCKS = "ApplicationsClocksSetting"  # someone chose it: no slow-down that comes and goes
EVENTS = {
    # nvml.h, nvmlClocksEventReason*; GpuIdle is left out
    0x0000000000000002: FIXED_CLOCKS,
    0x0000000000000004: "SwPowerCap",
    0x0000000000000008: "HwSlowdown",
    0x0000000000000020: "SwThermalSlowdown",
    0x0000000000000040: "HwThermalSlowdown",
    0x0000000000000080: "HwPowerBrakeSlowdown",
}


class NvmlSource:
    """Readings of one GPU. Raises nothing after it was opened: what the board does not support stays None."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.nvml, self.handle, self.clock = nvml, handle, clock

    def sample(self) -> Sample:
        nvml, ask = self.nvml, self._ask
        watts = ask(nvml.nvmlDeviceGetPowerUsage)
        celsius = ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        mhz = ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
        processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses)
        most_mhz = ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)
        awake = mhz is not None and bool(most_mhz) and mhz >= AWAKE * most_mhz
        return Sample(
            ns=self.clock(),
            watts=None if watts is None else watts / 1e3,
            celsius=None if celsius is None else float(celsius),
            sm_mhz=None if mhz is None else float(mhz),
            energy_mj=ask(nvml.nvmlDeviceGetTotalEnergyConsumption),
            events=tuple(name for bit, name in EVENTS.items() if reasons & bit),
            processes=None if processes is None else len(processes),
            pcie_share=self._pcie_share() if awake else None,
        )

    def _pcie_share(self) -> float | None:
        nvml, ask = self.nvml, self._ask
        now = link_rate(ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration), ask(nvml.nvmlDeviceGetCurrPcieLinkWidth))
        most = link_rate(ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration), ask(nvml.nvmlDeviceGetMaxPcieLinkWidth))
        return now / most if now and most else None

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None


def open_nvml(uuid: str | None) -> tuple[NvmlSource | None, str]:
    """(source, "") or (None, why). By UUID, since CUDA's order and CUDA_VISIBLE_DEVICES need not match NVML's index."""
    try:
        import pynvml
    except ImportError:
        return None, "the package nvidia-ml-py is not installed (pip install nvidia-ml-py)"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid) if uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    return NvmlSource(pynvml, handle), ""
