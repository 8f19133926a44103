"""What this machine can record, check by check: what is there, what is not, what is lost by it and how to get it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from gpudiag.collect import environment, nsys
from gpudiag.collect.nvml import Nvml, NvmlUnavailable
from gpudiag.errors import GpudiagError
from gpudiag.read.nsys_report import find_importer, find_nsys, nsys_version
from gpudiag.units import format_bytes

Status = Literal["ok", "limited", "missing", "unknown"]

# Docker's default for /dev/shm; a loader with workers dies of a bus error there (pytorch/README, "Docker Image").
_SMALL_SHM = 64 * 2**20
_SMALL_TEMPORARY = 10**9  # bytes; a 2-second recording of a loader script left 190 MB (SCHEMAS 1.9)
_CAP_SYS_ADMIN = 1 << 21  # linux/capability.h


class Check(msgspec.Struct, frozen=True):
    """status: ok | limited (works with less) | missing | unknown (cannot be told from here).

    lost: what a recording or a diagnosis goes without; fix: how to get it. Both empty when ok.
    """

    name: str
    status: Status
    found: str
    lost: str = ""
    fix: str = ""


def all_checks(
    facts: Mapping[str, Any], env: Mapping[str, str] = os.environ, root: Path = Path("/"), *, trial: bool = True
) -> Iterator[Check]:
    """Every check, in the order of what matters. facts: environment.describe(). trial: record something with nsys (2 s)."""
    yield _gpu(facts)
    yield _torch(facts)
    yield _nvml(env)
    yield from _gpu_health(env)
    path = find_nsys()
    yield _nsys(path)
    if path is not None:
        yield _importer(path)
        yield _ranges() if trial else Check("NVTX ranges", "unknown", "not tried")
        yield _own_ranges(facts, nsys_version(path))
    yield _cupti(root)
    yield _paranoid(root)
    yield _other_profiler(env)
    yield _cpus(facts)
    yield _background(facts)
    yield _shared_memory(facts)
    yield _temporary()
    yield _switches(facts)


def _gpu(facts: Mapping[str, Any]) -> Check:
    if facts["gpus"]:
        names = ", ".join(f"{gpu['name']} ({format_bytes(gpu['memory_bytes'] or 0)})" for gpu in facts["gpus"])
        return Check("GPU", "ok", f"{names}; driver {facts['driver']}, CUDA up to {facts['driver_cuda']}")
    if facts["driver"]:
        found = f"driver {facts['driver']} is loaded, but no GPU can be reached"
        return Check("GPU", "missing", found, "everything about the GPU", "check nvidia-smi, or start with --gpus all")
    lost = "everything about the GPU; runs get the account of the host: loader, forward, backward, checkpoints"
    return Check("GPU", "missing", "no NVIDIA driver", lost, "run on a machine with an NVIDIA GPU and driver")


def _torch(facts: Mapping[str, Any]) -> Check:
    python = f"Python {facts['python']}"
    if facts.get("problem"):
        return Check("torch", "missing", facts["problem"], "profiling a script", "name the interpreter: --python PATH")
    if facts["torch"] is None:
        lost = "torch.profiler; steps and phases of a script that uses torch"
        return Check(
            "torch", "missing", f"not installed for {python}", lost, "name the interpreter that has it: --python PATH"
        )
    found = f"torch {facts['torch']} for {python}"
    if facts.get("torch_hip"):
        return Check("torch", "ok", f"{found}, built for ROCm {facts['torch_hip']}")
    if facts["torch_cuda"] is None:
        lost = "the GPU: this build computes on the CPU only" if facts["gpus"] else "nothing while there is no GPU"
        return Check(
            "torch", "limited", f"{found}, built without CUDA", lost, "install a CUDA build (pytorch.org, Get Started)"
        )
    found += f", built for CUDA {facts['torch_cuda']}"
    if facts["driver_cuda"] and _numbers(facts["torch_cuda"])[0] > _numbers(facts["driver_cuda"])[0]:
        lost = "the GPU, unless the cuda-compat package is installed: the driver is a major version older than torch"
        fix = f"update the driver, or install torch for CUDA {facts['driver_cuda']}"
        return Check("torch", "limited", found, lost, fix)
    return Check("torch", "ok", found)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _nvml(env: Mapping[str, str]) -> Check:
    try:
        nvml = Nvml(env=env)
    except NvmlUnavailable as error:
        lost = "power, clocks and why they are low, PCIe link, other processes on the GPU"
        fix = "pip install nvidia-ml-py" if "pynvml" in str(error) else "needs the NVIDIA driver"
        return Check("NVML", "missing", str(error), lost, fix)
    fields = nvml.sample(lambda pid: None)[0].keys() - {"t", "device"}
    nvml.close()
    return Check("NVML", "ok", f"{len(fields)} readings, 10 a second")


def _nsys(path: Path | None) -> Check:
    lost = "recordings with nsys: low overhead, several processes, CUDA API calls of any framework"
    if path is None:
        fix = "install Nsight Systems (developer.nvidia.com/nsight-systems; Debian non-free: nsight-systems)"
        return Check("nsys", "missing", "not found; --with torch works without it", lost, fix)
    version = nsys_version(path)
    if not version:
        return Check("nsys", "missing", f"{path} does not run", lost, "reinstall Nsight Systems")
    return Check("nsys", "ok", f"{version} at {path}")


def _importer(path: Path) -> Check:
    importer = find_importer(path)
    if importer is None:
        lost = "reports, where nsys leaves only a .qdstrm (installations with the target half alone)"
        return Check("importer", "limited", "no QdstrmImporter", lost, "install the full Nsight Systems, host half too")
    return Check("importer", "ok", str(importer))


def _ranges() -> Check:
    """Record one range with our own emitter and look for it: the only way to know."""
    name, lost = "NVTX ranges", "steps and phases in nsys recordings"
    code = (
        "import importlib.util as u, sys; s = u.spec_from_file_location('emit', sys.argv[1]);"
        " m = u.module_from_spec(s); s.loader.exec_module(m); m.push('step', 0); m.pop(); sys.exit(not m.available())"
    )
    emitter = Path(__file__).parent / "inject" / "nvtx_emit.py"
    with tempfile.TemporaryDirectory(prefix="gpudiag-doctor-", ignore_cleanup_errors=True) as folder:
        try:
            with Path(os.devnull).open("wb") as nowhere:
                process = nsys.start(
                    [sys.executable, "-I", "-c", code, str(emitter)],
                    Path(folder) / "trial",
                    gpu=False,
                    stdout=nowhere.fileno(),
                    stderr=nowhere.fileno(),
                )
                status = process.wait(60)
            report = nsys.finish_report(Path(folder) / "trial", gpu=False)
        except subprocess.TimeoutExpired:
            process.kill()
            return Check(name, "missing", "the trial did not end in 60 s", lost, "use --with torch")
        except GpudiagError as error:
            return Check(name, "missing", f"the trial failed: {error}", lost, "use --with torch")
    if report.failed:
        return Check(name, "missing", f"the trial failed: {report.failed}", lost, "use --with torch")
    if status or not report.ranges:
        return Check(
            name, "missing", "nsys ran, but our range did not arrive", lost, "use --with torch, or another nsys"
        )
    return Check(name, "ok", "a trial recording holds ours")


def _own_ranges(facts: Mapping[str, Any], version: str) -> Check:
    """Measured: `nvtx` up to 0.2.11 arrives, 0.2.12 to 0.2.17 does not (collect/inject/nvtx_emit.py), with nsys 2022.4,
    2023.4 and 2024.2; newer ones were not tried."""
    name, package = "nvtx package", facts.get("packages", {}).get("nvtx")
    if package is None:
        return Check(name, "ok", "not installed, and not needed")
    if _numbers(package) >= [0, 2, 12] and _numbers(version)[:2] <= [2024, 2]:
        lost = f"your own ranges in recordings by nsys {version}: the package believes that its domains are disabled"
        return Check(name, "limited", package, lost, "pip install 'nvtx<0.2.12', or a newer nsys")
    return Check(name, "ok", package)


def _cupti(root: Path) -> Check:
    """Tracing needs no right; hardware counters do (developer.nvidia.com/ERR_NVGPUCTRPERM)."""
    name, lost = "GPU counters", "occupancy and memory throughput by hardware counters (ncu); timelines need no right"
    parameters = _text(root / "proc/driver/nvidia/params")
    if not parameters:
        return Check(name, "unknown", "no NVIDIA driver to ask", lost, "")
    restricted = "RmProfilingAdminOnly: 1" in parameters
    status = _text(root / "proc/self/status")
    capabilities = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    if restricted and not capabilities & _CAP_SYS_ADMIN:
        fix = "modprobe option NVreg_RestrictProfilingToAdminUsers=0, or --cap-add=SYS_ADMIN for a container"
        return Check(name, "limited", "the driver allows them to administrators only", lost, fix)
    return Check(name, "ok", "allowed")


def _paranoid(root: Path) -> Check:
    text = _text(root / "proc/sys/kernel/perf_event_paranoid").strip()
    name = "CPU sampling"
    if not text.lstrip("-").isdigit():
        return Check(name, "unknown", "perf_event_paranoid cannot be read", "call stacks of the CPU in nsys", "")
    if int(text) > 2:
        lost = "call stacks of the CPU in your own nsys runs; gpudiag uses none"
        fix = "sudo sysctl kernel.perf_event_paranoid=2"
        return Check(name, "limited", f"perf_event_paranoid is {text}, nsys needs 2 or less", lost, fix)
    return Check(name, "ok", f"perf_event_paranoid is {text}")


def _other_profiler(env: Mapping[str, str]) -> Check:
    name = "other profilers"
    marks = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "KINETO_USE_DAEMON")
    found = [mark for mark in marks if env.get(mark)]
    if found:
        lost = "GPU activity: CUPTI serves one profiler at a time"
        return Check(name, "limited", f"one is attached: {', '.join(found)}", lost, "start gpudiag outside of it")
    return Check(name, "ok", "none attached")


def _cpus(facts: Mapping[str, Any]) -> Check:
    machine, affinity, quota, usable = (facts[k] for k in ("machine_cpus", "affinity_cpus", "cpu_quota", "usable_cpus"))
    found = (
        f"{usable:g} usable (machine {machine}, affinity {affinity}, cgroup quota {f'{quota:g}' if quota else 'none'})"
    )
    if machine and usable < machine:
        fix = "raise the limit (docker --cpus, Kubernetes limits.cpu, Slurm --cpus-per-task), or plan workers for it"
        return Check("CPUs", "limited", found, "loader workers beyond that number only take turns", fix)
    return Check("CPUs", "ok", found)


def _gpu_health(env: Mapping[str, str]) -> Iterator[Check]:
    """One a GPU; none where NVML does not answer, which its own check tells. One machine has one driver for all its GPUs."""
    from gpudiag.collect.health import gpus_health

    try:
        nvml = Nvml(env=env)
    except NvmlUnavailable:
        return
    for gpu in gpus_health(nvml):
        name, found = f"GPU {gpu.device}", gpu.state or "NVML reads nothing of it"
        if not gpu.busy:
            found += "; idle: heat, clocks and PCIe are judged under load, by profile and bench"
        lost = [f"{finding.title}: {finding.summary}" for finding in gpu.findings]
        fixes = [finding.fixes[0].change for finding in gpu.findings if finding.fixes]
        if gpu.processes:
            lost.append(f"{gpu.processes} other process(es) on it: what is measured now is not one program's alone")
            fixes.append("measure when it is free: nvidia-smi --query-compute-apps=pid,used_memory --format=csv")
        yield Check(name, "limited" if lost else "ok", found, " ".join(lost), " ".join(fixes))
    nvml.close()


def _background(facts: Mapping[str, Any]) -> Check:
    from gpudiag.collect.health import background_load

    name = "background load"
    found, findings = background_load(facts["machine_cpus"], facts["usable_cpus"])
    if not found:
        return Check(name, "unknown", "no /proc/stat to read", "how busy the machine is", "")
    if findings:
        lost = f"times that are one program's alone. {findings[0].why}"
        return Check(name, "limited", found, lost, findings[0].fixes[0].change)
    return Check(name, "ok", found)


def _shared_memory(facts: Mapping[str, Any]) -> Check:
    name, size, free = "/dev/shm", facts["shm_bytes"], facts["shm_free_bytes"]
    fix = "docker run --shm-size=8g or --ipc=host; Kubernetes: an emptyDir of medium Memory at /dev/shm"
    if size is None:
        return Check(name, "missing", "none", "DataLoader workers (num_workers > 0)", fix)
    found = f"{format_bytes(size)}, {format_bytes(free)} free"
    if free <= _SMALL_SHM:
        return Check(name, "limited", found, "loader workers with large batches die of a bus error", fix)
    return Check(name, "ok", found)


def _temporary() -> Check:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    found = f"{format_bytes(free)} free in {folder}"
    if free < _SMALL_TEMPORARY:
        return Check("disk", "limited", found, "long nsys recordings, which are first written there", "set TMPDIR")
    return Check("disk", "ok", found)


def _switches(facts: Mapping[str, Any]) -> Check:
    name, switches = "debug switches", facts["debug_switches"]
    if switches:
        lost = "speed: a run with these is not the run you want to know about"
        names = " ".join(switch.partition("=")[0] for switch in switches)
        return Check(name, "limited", ", ".join(switches), lost, f"unset {names}")
    return Check(name, "ok", "none set in the environment")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def describe_and_check(
    python: Path | None, progress: Callable[[str], None], *, trial: bool = True
) -> tuple[dict[str, Any], list[Check]]:
    """environment.describe() of this machine and its checks."""
    progress("asking the interpreter and the driver")
    facts = environment.describe(python)
    checks = []
    for check in all_checks(facts, trial=trial):
        progress(f"checked {check.name}")
        checks.append(check)
    return facts, checks
