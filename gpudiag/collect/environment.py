"""What reproduces a run: facts about the machine and the interpreter, by allow-list, for the manifest.

Nothing here is fatal and nothing takes long: a fact that cannot be had is None or absent.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpudiag.collect.nvml import Nvml, NvmlUnavailable
from gpudiag.collect.privacy import Scrubber, mask_command

__all__ = ["cpu_quota", "debug_switches", "describe", "mask_command", "target_python", "usable_cpus"]

# Environment variables that change speed or numerics and carry no secret; their values pass through the scrubber.
KEPT_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "KMP_BLOCKTIME"),
    *("GOMP_CPU_AFFINITY", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "MALLOC_ARENA_MAX", "PYTHONHASHSEED"),
    *("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NNODES", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"),
    *("TORCH_CUDNN_V8_API_DISABLED", "TORCHINDUCTOR_MAX_AUTOTUNE", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"),
)

_OFF = {"", "0", "false", "off", "no"}
# variable -> values that cost speed; None = anything that is not off
_DEBUG_SWITCHES: dict[str, frozenset[str] | None] = {
    "CUDA_LAUNCH_BLOCKING": None,  # every launch waits for its kernel
    "TORCH_USE_CUDA_DSA": None,
    "PYTORCH_NO_CUDA_MEMORY_CACHING": None,  # cudaMalloc and cudaFree, which synchronise, for every tensor
    "CUDNN_LOGINFO_DBG": None,
    "CUDNN_LOGLEVEL_DBG": None,
    "CUBLAS_LOGINFO_DBG": None,
    "TORCH_COMPILE_DEBUG": None,
    "TORCHDYNAMO_DISABLE": None,
    "TORCH_COMPILE_DISABLE": None,
    "PYTORCH_JIT_LOG_LEVEL": None,
    "TORCH_DISTRIBUTED_DEBUG": frozenset({"info", "detail"}),  # DETAIL adds a collective per collective
    "NCCL_DEBUG": frozenset({"info", "trace"}),
    "TORCH_SHOW_CPP_STACKTRACES": None,
    "CUBLAS_WORKSPACE_CONFIG": None,  # set for deterministic algorithms
    "NVIDIA_TF32_OVERRIDE": frozenset({"0"}),
    "CUDA_DEVICE_WAITS_ON_EXCEPTION": None,
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": None,
    "PYTHONDEVMODE": None,
    "PYTHONMALLOC": frozenset({"debug", "malloc_debug", "pymalloc_debug"}),
    "PYTHONTRACEMALLOC": None,
    "MALLOC_CHECK_": None,
}

# Asked of the target interpreter. Reads torch/version.py instead of importing torch: 0.1 s instead of 1.3 to 5 s.
_ASK = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import importlib.metadata as metadata, importlib.util, json, pathlib, platform
facts = {"python": platform.python_version(), "implementation": platform.python_implementation()}
spec = importlib.util.find_spec("torch")
if spec and spec.origin:
    version = {}
    try:
        exec((pathlib.Path(spec.origin).parent / "version.py").read_text(), version)
    except (OSError, SyntaxError, NameError, ImportError) as error:
        facts["torch_problem"] = repr(error)
    facts["torch"] = str(version.get("__version__") or metadata.version("torch"))
    facts["torch_cuda"], facts["torch_hip"] = version.get("cuda"), version.get("hip")
wanted = ("torchvision", "lightning", "pytorch-lightning", "transformers", "accelerate", "deepspeed", "numpy", "nvtx")
packages = {}
for dist in metadata.distributions():
    name = (dist.metadata["Name"] or "").lower()
    if name in wanted or name == "triton":
        packages[name] = dist.version
    elif name.startswith("nvidia-cudnn"):
        facts["cudnn"] = dist.version
    elif name.startswith("nvidia-nccl"):
        facts["nccl"] = dist.version
facts["packages"] = dict(sorted(packages.items()))
print("\\n" + json.dumps(facts))
"""


def describe(
    python: Path | None = None, script: Path | None = None, env: Mapping[str, str] | None = None, root: Path = Path("/")
) -> dict[str, Any]:
    """Allow-listed facts. python: the interpreter that runs the script (default this one); script: finds the git repo.

    Keys: os, python, torch, torch_cuda, torch_hip, cudnn, nccl, packages, driver, driver_cuda, gpus [{name,
    memory_bytes}], cpu, machine_cpus, affinity_cpus, cpu_quota, usable_cpus, memory_bytes, shm_bytes, shm_free_bytes,
    governor, git {commit, dirty}, debug_switches, variables. None = not known.
    """
    env = os.environ if env is None else env
    scrub = Scrubber.of_this_machine()
    facts: dict[str, Any] = {"os": f"{platform.system()} {platform.release()} {platform.machine()}"}
    facts |= target_python(python)
    facts |= _gpus(env, root)
    facts |= {
        "cpu": _cpu_model(root),
        "machine_cpus": os.cpu_count(),
        "affinity_cpus": len(os.sched_getaffinity(0)),
        "cpu_quota": cpu_quota(root),
        "usable_cpus": usable_cpus(root),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        **shared_memory(),
        "governor": _first_line(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "git": _git(script) if script else None,
        "debug_switches": list(debug_switches(env)),
        "variables": {name: scrub.text(env[name]) for name in KEPT_VARIABLES if name in env},
    }
    return facts


def target_python(python: Path | None = None, timeout_s: float = 30.0) -> dict[str, Any]:
    """What the target interpreter says of itself and its torch; `problem` when it does not answer.

    torch None: not installed there. torch_cuda None: a build without CUDA.
    """
    executable = str(python or sys.executable)
    unknown: dict[str, Any] = {"python": None, "torch": None, "torch_cuda": None}
    try:
        done = subprocess.run(
            [executable, "-c", _ASK], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except (OSError, ValueError) as error:
        return unknown | {"problem": f"{executable}: does not run ({error})"}
    except subprocess.TimeoutExpired:
        return unknown | {"problem": f"{executable}: gave no answer in {timeout_s:g} s"}
    lines = done.stdout.strip().splitlines()
    try:
        facts = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        facts = None
    if done.returncode or not isinstance(facts, dict):
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return unknown | {"problem": f"{executable}: is no Python that answers ({reason})"}
    return unknown | facts


def usable_cpus(root: Path = Path("/")) -> float:
    """min(CPUs in the affinity mask, cgroup quota): how many threads can run at once."""
    allowed = float(len(os.sched_getaffinity(0)))
    quota = cpu_quota(root)
    return min(allowed, quota) if quota else allowed


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs that the cgroup quota grants (1.5 = one and a half), None without one. Reads v1 and v2, and every ancestor.

    A container sees its own group as the root of the mount although /proc/self/cgroup may name the host's path (v1),
    so a path that does not exist falls back to the root.
    """
    quotas = []
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup/cpu"]
        else:
            continue
        for mount in mounts:
            group = mount / path.lstrip("/")
            while group == mount or mount in group.parents:
                quotas.append(_quota_of(group))
                if group == mount:
                    break
                group = group.parent
    return min((quota for quota in quotas if quota), default=None)


def _quota_of(group: Path) -> float | None:
    line = _first_line(group / "cpu.max")  # v2: "max 100000" or "150000 100000"
    if line is None:  # v1: microseconds a period, -1 = none
        line = f"{_first_line(group / 'cpu.cfs_quota_us')} {_first_line(group / 'cpu.cfs_period_us')}"
    try:
        quota, period = map(int, line.split())
    except ValueError:
        return None
    return quota / period if quota > 0 and period > 0 else None


def debug_switches(env: Mapping[str, str]) -> tuple[str, ...]:
    """Variables left on that slow a run down, as `NAME=value`, sorted. Anomaly and deterministic mode set in code are not seen."""
    found = []
    for name, costly in _DEBUG_SWITCHES.items():
        value = env.get(name, "")
        if (value.lower() in costly) if costly is not None else (value.lower() not in _OFF):
            found.append(f"{name}={value}")
    return tuple(sorted(found))


def shared_memory(path: Path = Path("/dev/shm")) -> dict[str, int | None]:
    """shm_bytes and shm_free_bytes of /dev/shm, through which loader workers hand over their batches."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return {"shm_bytes": None, "shm_free_bytes": None}
    return {"shm_bytes": stat.f_frsize * stat.f_blocks, "shm_free_bytes": stat.f_frsize * stat.f_bavail}


def _gpus(env: Mapping[str, str], root: Path) -> dict[str, Any]:
    try:
        nvml = Nvml(env=env)
    except NvmlUnavailable:
        found = re.search(r"Kernel Module\D*([\d.]+)", "\n".join(_lines(root / "proc/driver/nvidia/version")))
        return {"driver": found[1] if found else None, "driver_cuda": None, "gpus": []}
    gpus = [{"name": gpu["name"], "memory_bytes": gpu.get("memory_total")} for gpu in nvml.devices()]
    nvml.close()
    return {"driver": nvml.driver, "driver_cuda": nvml.cuda, "gpus": gpus}


def _cpu_model(root: Path) -> str | None:
    for line in _lines(root / "proc/cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or None


def _git(script: Path) -> dict[str, Any] | None:
    """The commit of the repository that holds the script, and whether tracked files differ from it. No names, no URL."""

    def ask(*arguments: str) -> str | None:
        command = ["git", "-C", str(script.absolute().parent), *arguments]
        env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # a status must not write to the user's index
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, env=env)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if commit is None:
        return None
    changed = ask("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _first_line(path: Path) -> str | None:
    lines = _lines(path)
    return lines[0].strip() if lines else None
