"""The machine's health now, for `gpudiag doctor`: NVML and /proc read for half a second, judged by the rules that judge a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpudiag.collect.nvml import Nvml
from gpudiag.diagnosis import Finding
from gpudiag.judge import judge
from gpudiag.metrics.base import Metric, Missing
from gpudiag.metrics.machine import BUSY, of_busy
from gpudiag.metrics.make import value
from gpudiag.metrics.spec import BY_NAME
from gpudiag.read.nvml_samples import samples_of
from gpudiag.rules import load_rules
from gpudiag.units import format_percent

READINGS, PAUSE_S = 6, 0.1
OF_A_GPU = ("thermal_throttled", "power_capped", "clocks_locked", "pcie_degraded", "nvlinks_down")
SECOND = 1_000_000_000  # the step, where a rule weighs what a slow clock costs: all of it counts as computing


@dataclass(frozen=True)
class GpuHealth:
    """state: what was read, in words. busy: another program works on it, so that heat, clocks and link can be judged."""

    device: int
    state: str
    busy: bool
    processes: int | None
    findings: tuple[Finding, ...]


def gpus_health(nvml: Nvml, sleep: Callable[[float], None] = time.sleep) -> list[GpuHealth]:
    """One a GPU. Rules about load are judged only on a GPU that works meanwhile: an idle one lowers its clocks and its link."""
    devices = nvml.devices()
    rows: list[dict[str, Any]] = []
    for reading in range(READINGS):
        if reading:
            sleep(PAUSE_S)
        rows += nvml.sample(lambda pid: pid == os.getpid())
    samples = samples_of(devices, rows)
    return [
        _health(
            info,
            [row for row in rows if row["device"] == info["device"]],
            samples.take(samples.device == info["device"]),
        )
        for info in devices
    ]


def _health(info: dict[str, Any], rows: list[dict[str, Any]], samples: Any) -> GpuHealth:
    busy = samples.take(samples.gpu_util >= BUSY)
    metrics: dict[str, Metric | Missing] = {
        "step_time": value("step_time", SECOND, "assumed"),
        "compute": value("compute", SECOND, "assumed"),
    }
    for name in ("nvlinks", "nvlinks_active"):
        if name in info:
            metrics[name] = value(name, info[name], "nvml")
    if len(busy):
        metrics |= {item.name: item for item in of_busy(busy)}
    known = load_rules()
    judged = judge(
        [known.named(name) for name in OF_A_GPU],
        {name: metrics.get(name, Missing(name, "not read", "")) for name in BY_NAME},
        step_time_ns=SECOND,
        parts={"compute": SECOND},
    )
    others = [row["other_processes"] for row in rows if "other_processes" in row]
    return GpuHealth(
        info["device"], "; ".join(_words(info, rows)), bool(len(busy)), max(others, default=None), judged.findings
    )


def _words(info: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[str]:
    last = rows[-1]
    if "gpu_util" in last:
        yield f"used {format_percent(float(np.mean([row.get('gpu_util', 0.0) for row in rows])))} of the time"
    if "temperature_c" in last:
        yield f"{last['temperature_c']} C"
    if "power_w" in last and "power_limit_w" in info:
        yield f"{last['power_w']:.0f} of {info['power_limit_w']:.0f} W"
    if "sm_clock_mhz" in last and "sm_clock_max_mhz" in info:
        yield f"SM {last['sm_clock_mhz']} of {info['sm_clock_max_mhz']} MHz"
    if {"pcie_gen", "pcie_width"} <= last.keys() and {"pcie_gen_max", "pcie_width_max"} <= info.keys():
        yield f"PCIe {last['pcie_gen']}.0 x{last['pcie_width']} of {info['pcie_gen_max']}.0 x{info['pcie_width_max']}"
    if "nvlinks" in info:
        yield f"NVLink {info['nvlinks_active']} of {info['nvlinks']} up"


def background_load(
    machine_cpus: int, usable_cpus: float, sleep: Callable[[float], None] = time.sleep, proc: Path = Path("/proc")
) -> tuple[str, tuple[Finding, ...]]:
    """(what was read, findings) over half a second; ("", ()) where there is no /proc/stat."""
    from gpudiag.bench.stability import load_average, read_cpu_times

    before = read_cpu_times(time.perf_counter_ns(), proc)
    sleep(READINGS * PAUSE_S)
    after = read_cpu_times(time.perf_counter_ns(), proc)
    if before is None or after is None:
        return "", ()
    spent = (after.busy - before.busy) - (after.own - before.own)
    others = max(0.0, spent / max(1e-9, (after.wall_ns - before.wall_ns) / 1e9))
    load = load_average()
    values = {"other_cpus": others, "machine_cpus": after.cpus, "usable_cpus": usable_cpus, "load_average": load}
    metrics: dict[str, Metric | Missing] = {name: Missing(name, "not read", "") for name in BY_NAME}
    metrics |= {name: value(name, number, "/proc") for name, number in values.items() if number is not None}
    judged = judge([load_rules().named("background_load")], metrics, step_time_ns=SECOND, parts={})
    text = f"others use {others:.1f} of {after.cpus} CPUs"
    if load is not None:
        text += f"; load average of the last minute {load:.1f} on {machine_cpus}"
    return text, judged.findings
