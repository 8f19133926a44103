"""`nvml.jsonl`, as collect/nvml.py writes it, as a Samples table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpudiag.errors import GpudiagError
from gpudiag.timeline import DeviceInfo, Samples

_FLOATS = ("gpu_util", "power_w", "power_limit_w", "temperature_c", "sm_clock_mhz", "sm_clock_max_mhz")
_COUNTS = (  # absent = -1
    ("memory_used", np.int64),
    ("memory_total", np.int64),
    ("reasons", np.int64),
    ("pcie_gen", np.int32),
    ("pcie_gen_max", np.int32),
    ("pcie_width", np.int32),
    ("pcie_width_max", np.int32),
    ("other_processes", np.int32),
    ("other_memory", np.int64),
)


def read_nvml_samples(path: Path, time_base_ns: int = 0) -> Samples:
    """One row a device and moment, sorted by time; the header's limits are repeated in each row.

    time_base_ns: the wall-clock ns of the timeline's zero (Timeline.time_base_ns), subtracted from each moment.
    A last line cut short by a kill is dropped. Raises GpudiagError when the file is not what collect/nvml.py writes.
    """
    header, rows = _lines(path)
    return samples_of(header["devices"], rows, time_base_ns)


def samples_of(
    devices: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], time_base_ns: int = 0
) -> Samples:
    """The same from what collect/nvml.py's Nvml gives: devices() and the rows of sample()."""
    limits = {device["device"]: device for device in devices}
    rows = [{**limits.get(row["device"], {}), **row} for row in rows]
    rows = sorted(rows, key=lambda row: (row["t"], row["device"]))
    moments = np.array([row["t"] for row in rows], np.int64) - time_base_ns
    columns: dict[str, Any] = {f: np.array([row.get(f, np.nan) for row in rows], np.float32) for f in _FLOATS}
    columns |= {field: np.array([row.get(field, -1) for row in rows], kind) for field, kind in _COUNTS}
    device = np.array([row["device"] for row in rows], np.int32)
    return Samples(start=moments, end=moments, device=device, **columns)


def read_nvml_devices(path: Path) -> dict[int, DeviceInfo]:
    """Name, memory and NVLink links of the GPUs that were sampled. Errors as read_nvml_samples."""
    header, _ = _lines(path)
    return {
        device["device"]: DeviceInfo(
            name=device["name"],
            memory_bytes=device.get("memory_total"),
            nvlinks=device.get("nvlinks"),
            nvlinks_active=device.get("nvlinks_active"),
        )
        for device in header["devices"]
    }


def _lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    hint = "profile again; the recording can be analyzed without this file"
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise GpudiagError(f"{path}: {error.strerror}", hint) from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and number > 1:
                break
            raise GpudiagError(f"{path}: line {number} is not JSON", hint) from error
        needed = {"gpudiag_nvml", "devices"} if number == 1 else {"t", "device"}
        if not isinstance(row, dict) or not needed <= row.keys():
            raise GpudiagError(f"{path}: line {number} is no NVML sample of gpudiag", hint)
        rows.append(row)
    if not rows:
        raise GpudiagError(f"{path}: empty", hint)
    return rows[0], rows[1:]
