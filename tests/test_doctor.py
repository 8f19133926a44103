"""`gpudiag doctor` and its checks: each state of a machine is told with what is lost and how to get it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpudiag.cli import main
from gpudiag.collect import checks
from gpudiag.collect.checks import Check
from gpudiag.commands.doctor import text
from gpudiag.errors import GpudiagError

FACTS: dict[str, Any] = {
    "python": "3.11.7",
    "torch": "2.6.0+cu124",
    "torch_cuda": "12.4",
    "driver": "550.54.15",
    "driver_cuda": "12.4",
    "gpus": [{"name": "NVIDIA H100", "memory_bytes": 85_000_000_000}],
    "machine_cpus": 8,
    "affinity_cpus": 8,
    "cpu_quota": None,
    "usable_cpus": 8.0,
    "shm_bytes": 8 << 30,
    "shm_free_bytes": 8 << 30,
    "debug_switches": [],
}


def check(name: str, root: Path, env: dict[str, str] | None = None, **facts: Any) -> Check:
    found = {c.name: c for c in checks.all_checks(FACTS | facts, env or {}, root, trial=False)}[name]
    assert bool(found.lost) == (found.status in ("missing", "limited")) or found.status == "unknown"
    return found


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        ({}, "ok", "built for CUDA 12.4"),
        ({"torch": None}, "missing", "not installed"),
        ({"torch_cuda": None}, "limited", "built without CUDA"),
        ({"torch_cuda": "13.0"}, "limited", "built for CUDA 13.0"),
        ({"torch_cuda": "12.8"}, "ok", "12.8"),  # minor versions are compatible
        ({"torch_cuda": None, "torch_hip": "6.2"}, "ok", "ROCm 6.2"),
        ({"problem": "/x: does not run", "torch": None}, "missing", "/x: does not run"),
    ],
)
def test_torch(tmp_path: Path, facts: dict[str, Any], status: str, words: str) -> None:
    found = check("torch", tmp_path, **facts)
    assert found.status == status and words in found.found


def test_a_driver_without_a_reachable_gpu_is_told_apart_from_no_driver(tmp_path: Path) -> None:
    assert check("GPU", tmp_path).status == "ok"
    assert "can be reached" in check("GPU", tmp_path, gpus=[]).found
    assert check("GPU", tmp_path, gpus=[], driver=None).found == "no NVIDIA driver"


def test_a_quota_below_the_machine_is_told_with_its_source(tmp_path: Path) -> None:
    found = check("CPUs", tmp_path, cpu_quota=1.5, usable_cpus=1.5)
    assert found.status == "limited" and "1.5 usable" in found.found and "cgroup quota 1.5" in found.found
    assert check("CPUs", tmp_path).status == "ok"


@pytest.mark.parametrize(("free", "status"), [(64 << 20, "limited"), (65 << 20, "ok")])
def test_the_shared_memory_that_docker_gives_by_default_is_too_small(tmp_path: Path, free: int, status: str) -> None:
    assert check("/dev/shm", tmp_path, shm_free_bytes=free).status == status
    assert check("/dev/shm", tmp_path, shm_bytes=None, shm_free_bytes=None).status == "missing"


def test_debug_switches_left_on_are_named_with_the_command_that_ends_them(tmp_path: Path) -> None:
    found = check("debug switches", tmp_path, debug_switches=["CUDA_LAUNCH_BLOCKING=1", "NCCL_DEBUG=INFO"])
    assert found.fix == "unset CUDA_LAUNCH_BLOCKING NCCL_DEBUG"


def test_counters_reserved_for_administrators(tmp_path: Path) -> None:
    assert check("GPU counters", tmp_path).status == "unknown"
    parameters, status = tmp_path / "proc/driver/nvidia/params", tmp_path / "proc/self/status"
    parameters.parent.mkdir(parents=True)
    status.parent.mkdir(parents=True)
    parameters.write_text("ResmanDebugLevel: 0\nRmProfilingAdminOnly: 1\n")
    status.write_text("Name: x\nCapEff:\t00000000a80425fb\n")
    assert check("GPU counters", tmp_path).status == "limited"
    status.write_text("CapEff:\t000001ffffffffff\n")
    assert check("GPU counters", tmp_path).status == "ok"


@pytest.mark.parametrize(("value", "status"), [("4", "limited"), ("2", "ok"), ("-1", "ok"), ("?", "unknown")])
def test_perf_event_paranoid(tmp_path: Path, value: str, status: str) -> None:
    path = tmp_path / "proc/sys/kernel/perf_event_paranoid"
    path.parent.mkdir(parents=True)
    path.write_text(value + "\n")
    assert check("CPU sampling", tmp_path).status == status


def test_a_profiler_that_is_attached_already_is_named(tmp_path: Path) -> None:
    assert check("other profilers", tmp_path).status == "ok"
    assert "CUDA_INJECTION64_PATH" in check("other profilers", tmp_path, {"CUDA_INJECTION64_PATH": "/x.so"}).found


def test_without_nsys_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_nsys", lambda: None)
    names = [c.name for c in checks.all_checks(FACTS, {}, tmp_path)]
    assert "NVTX ranges" not in names and check("nsys", tmp_path).status == "missing"


def test_a_trial_recording_that_fails_is_a_finding_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise GpudiagError("nsys does not start the application: sem_open")

    monkeypatch.setattr(checks.nsys, "start", refuses)
    found = checks._ranges()
    assert found.status == "missing" and "sem_open" in found.found


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("0.2.11", "2022.4.2", "ok"),
        ("0.2.12", "2024.2.3", "limited"),
        ("0.2.17", "2025.1.1", "ok"),
        (None, "2022.4.2", "ok"),
    ],
)
def test_a_package_whose_ranges_that_nsys_loses_is_named(package: str | None, version: str, status: str) -> None:
    assert checks._own_ranges({"packages": {"nvtx": package} if package else {}}, version).status == status


@pytest.mark.nsys
@pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed")
def test_a_trial_recording_holds_our_range() -> None:
    assert checks._ranges() == Check("NVTX ranges", "ok", "a trial recording holds ours")


def everything(trial: bool = True) -> list[Check]:
    long = "/a/very/long/path/" + "x" * 60
    return [
        Check("GPU", "missing", "no NVIDIA driver", "everything about the GPU " * 6, "buy one"),
        Check("torch", "ok", "torch 2.6"),
        Check("nsys", "ok", f"2022.4.2 at {long}"),
        Check("NVTX ranges", "limited", "evil \x1b[31m\nname", "x", "y"),
    ]


def test_the_text_fits_80_columns_without_colour_and_hides_no_escape_codes() -> None:
    lines = text(everything()).splitlines()
    assert all(len(line) <= 80 or "/a/very/long/path" in line for line in lines)
    assert "\x1b" not in "".join(lines)
    assert lines[-1] == "This machine can record the CPU only, with torch.profiler."
    assert [line.split()[0] for line in lines if line[:1].strip()] == ["missing", "ok", "ok", "limited", "This"]
    coloured = text(everything(), color=True)
    assert "\x1b[31mmissing\x1b[0m" in coloured


def test_exit_code_is_0_whatever_is_missing_and_json_is_only_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "find_nsys", lambda: None)
    result = CliRunner().invoke(main, ["doctor", "--json", "-", "--python", str(tmp_path / "none")])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["schema"] == "gpudiag.doctor/1"
    by_name = {c["name"]: c for c in data["checks"]}
    assert by_name["torch"]["status"] == by_name["nsys"]["status"] == "missing"
    assert data["environment"]["usable_cpus"] > 0
    file = tmp_path / "d.json"
    result = CliRunner().invoke(main, ["doctor", "--json", str(file), "--no-color"])
    assert result.exit_code == 0 and "This machine can record" in result.stdout
    assert json.loads(file.read_text())["checks"]
