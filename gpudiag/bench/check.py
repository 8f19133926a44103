"""The checklist of a reproducible benchmark: what would keep another person from getting the same number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from gpudiag.bench.result import BenchResult, measured_gpu, unstable_parts
from gpudiag.units import format_percent

Outcome = Literal["ok", "missing", "warn"]


class Item(NamedTuple):
    """One line of the list. missing: the number cannot be repeated as it stands. warn: it can, with care."""

    name: str
    outcome: Outcome
    text: str


def checklist(result: BenchResult) -> list[Item]:
    return [check(result) for check in CHECKS]


def _versions(r: BenchResult) -> Item:
    m = r.machine
    absent = [name for name, value in (("torch", m.torch), ("Python", m.python)) if not value]
    if r.device != "cpu":
        absent += [n for n, v in (("driver", m.driver), ("CUDA", m.torch_cuda), ("cuDNN", m.cudnn)) if not v]
    if absent:
        return Item("software versions", "missing", f"not recorded: {', '.join(absent)}")
    gpu = f", driver {m.driver}, CUDA {m.torch_cuda}, cuDNN {m.cudnn}" if r.device != "cpu" else ""
    return Item("software versions", "ok", f"torch {m.torch}, Python {m.python}{gpu}")


def _hardware(r: BenchResult) -> Item:
    m = r.machine
    if r.device == "cpu":
        return Item(
            "hardware",
            "ok" if m.cpu else "missing",
            f"{m.cpu or 'CPU not recorded'}, {m.cores_usable} usable of {m.cores} cores",
        )
    gpu = measured_gpu(r)
    if gpu is None:
        return Item("hardware", "missing", f"{r.device}: which GPU it was is not recorded (NVML did not answer)")
    return Item("hardware", "ok", gpu.name)


def _clocks(r: BenchResult) -> Item:
    if r.device == "cpu":
        governor = r.machine.governor
        if not governor:
            return Item("clocks", "warn", "the CPU's frequency governor is not visible here (a virtual machine?)")
        outcome: Outcome = "ok" if governor == "performance" else "warn"
        return Item("clocks", outcome, f"CPU governor {governor}")
    gpu = measured_gpu(r)
    if gpu is None or gpu.sm_mhz is None:
        return Item("clocks", "missing", "GPU clocks are not recorded")
    loads = [load for m in r.models for run in m.runs if run.training for load in run.training.images_per_s.loads]
    seen = [load.gpu_mhz for load in loads if load.gpu_mhz is not None]
    moved = f", {min(seen):.0f} to {max(seen):.0f} MHz while training" if seen else ""
    limit = f", power limit {gpu.power_limit_w:.0f} W" if gpu.power_limit_w is not None else ""
    events = sorted({event for load in loads for event in load.gpu_events})
    if events:
        return Item("clocks", "warn", f"lowered while measuring: {', '.join(events)}{moved}{limit}")
    return Item("clocks", "ok", f"SM {gpu.sm_mhz:.0f} of {gpu.sm_mhz_max or 0:.0f} MHz at the start{moved}{limit}")


def _link(r: BenchResult) -> Item:
    if r.device == "cpu":
        return Item("PCIe and NVLink", "ok", "no GPU was measured")
    gpu = measured_gpu(r)
    if gpu is None or gpu.pcie_width is None:
        return Item("PCIe and NVLink", "warn", "not recorded")
    text = f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_width}"
    if gpu.nvlinks_active is not None:
        text += f", {gpu.nvlinks_active} of {gpu.nvlinks} NVLink links up"
    seen = [run.power.pcie_share for m in r.models for run in m.runs if run.power and run.power.pcie_share is not None]
    if not seen:
        return Item("PCIe and NVLink", "warn", f"{text} at the start; not sampled under load")
    text += f" at the start; {format_percent(max(seen))} of the link's most under load"
    if max(seen) < 0.99 or (gpu.nvlinks_active and gpu.nvlinks_active < (gpu.nvlinks or 0)):
        return Item("PCIe and NVLink", "warn", f"{text}: less than the hardware can do")
    return Item("PCIe and NVLink", "ok", text)


def _seed(r: BenchResult) -> Item:
    if r.machine.settings.get("deterministic_algorithms"):
        return Item("seed", "ok", f"{r.rules.seed}, deterministic algorithms")
    return Item("seed", "ok", f"{r.rules.seed} (rates do not depend on it; losses may differ in the last digits)")


def _weights(r: BenchResult) -> Item:
    absent = [m.model for m in r.models if not m.weights]
    if absent:
        return Item("weights", "missing", f"origin not recorded: {', '.join(absent)}")
    own = [m.model for m in r.models if ":" in m.model]
    if own:
        return Item("weights", "warn", f"{', '.join(own)}: your own function; send its code along")
    return Item("weights", "ok", "; ".join(sorted({m.weights for m in r.models})))


def _data(r: BenchResult) -> Item:
    if r.rules.data == "folder":
        return Item(
            "data", "warn", "a folder of images: name the data set and its version; the path is not in the result"
        )
    return Item("data", "ok", f"{r.rules.data}, batch {r.rules.batch}, made from the seed")


def _steps(r: BenchResult) -> Item:
    rules = r.rules
    text = f"batch {rules.batch}, {rules.train_iterations} training and {rules.latency_iterations} latency iterations, {rules.warm_up} warm-up, {rules.rounds} rounds"
    if r.quick:
        return Item("counts", "missing", f"quick run, not for comparison: {text}")
    few = [
        name for name, value, least in (("warm-up", rules.warm_up, 10), ("rounds", rules.rounds, 3)) if value < least
    ]
    if few:
        return Item("counts", "warn", f"few {' and '.join(few)}: {text}")
    return Item("counts", "ok", text)


def _percentiles(r: BenchResult) -> Item:
    short = [m.model for m in r.models for run in m.runs if run.latency and not run.latency.p99.enough]
    if short:
        return Item("percentiles", "warn", f"too few samples for a p99: {', '.join(sorted(set(short)))}")
    return Item("percentiles", "ok", "enough samples for each p99")


def _training(r: BenchResult) -> Item:
    bad = [
        f"{m.model} {run.mode}" for m in r.models for run in m.runs if run.training and run.training.losses_not_finite
    ]
    if bad:
        return Item(
            "optimizer and precision",
            "missing",
            f"losses that are not finite: {', '.join(bad)}; the speed of a broken run",
        )
    wrong = [f"{m.model} {run.mode}" for m in r.models for run in m.runs if run.agreement and not run.agreement.agrees]
    if wrong:
        return Item("optimizer and precision", "missing", f"outputs do not agree with eager: {', '.join(wrong)}")
    dtypes = sorted({f"{run.mode} {run.dtype}" for m in r.models for run in m.runs})
    settings = ", ".join(f"{key} {value}" for key, value in sorted(r.machine.settings.items()))
    return Item("optimizer and precision", "ok", f"{r.rules.optimizer}, {', '.join(dtypes)}; {settings}")


def _load(r: BenchResult) -> Item:
    m = r.machine
    if m.load_before is None:
        return Item("background load", "warn", "not recorded")
    text = f"load average {m.load_before:.2f} before, {m.load_after or 0:.2f} after, on {m.cores_usable} cores"
    others = [
        load.others
        for model in r.models
        for run in model.runs
        for rounds in ([run.training.images_per_s] if run.training else [])
        for load in rounds.loads
        if load.others is not None
    ]
    if others and max(others) > 0.05:
        return Item(
            "background load",
            "warn",
            f"{text}; other processes used up to {format_percent(max(others))} of the CPU; threads that spin while they wait suffer most (--omp-wait-policy passive)",
        )
    return Item("background load", "ok", text)


def _stability(r: BenchResult) -> Item:
    unstable = unstable_parts(r)
    if unstable:
        more = f" and {len(unstable) - 3} more" if len(unstable) > 3 else ""
        return Item("stability", "missing", f"{len(unstable)} unstable number(s): {'; '.join(unstable[:3])}{more}")
    return Item("stability", "ok", f"every spread within {format_percent(r.rules.unstable_over)}")


def _start(r: BenchResult) -> Item:
    return Item("start time", "ok" if r.started else "missing", r.started or "not recorded")


CHECKS: tuple[Callable[[BenchResult], Item], ...] = (
    _versions,
    _hardware,
    _clocks,
    _link,
    _seed,
    _weights,
    _data,
    _steps,
    _percentiles,
    _training,
    _load,
    _stability,
    _start,
)
