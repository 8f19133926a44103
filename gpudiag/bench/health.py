"""The machine's health while it was measured, judged by the same rules as a profile: heat, power limit, fixed clocks, company."""

from __future__ import annotations

from gpudiag.bench.result import BenchResult, Gpu, ModeResult, measured_gpu
from gpudiag.diagnosis import Finding
from gpudiag.metrics.base import Metric, Missing

# The rules that need no recording of kernels: everything they ask for is sampled by `bench` (power.py).
RULES = ("thermal_throttled", "power_capped", "clocks_locked", "gpu_shared")
THERMAL = ("SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")


def findings(result: BenchResult) -> list[tuple[str, Finding]]:
    """(model and mode, finding), in the result's order. Nothing on a CPU: these rules are about GPUs."""
    from gpudiag.rules import judge, load_rules

    known = load_rules()
    rules = [known.named(name) for name in RULES]
    gpu = measured_gpu(result)
    found: list[tuple[str, Finding]] = []
    for model in result.models:
        for run in model.runs:
            if run.device == "cpu" or run.training is None:
                continue
            step_ns = round(run.training.batch / run.training.images_per_s.median * 1e9)
            metrics = metrics_of(run, gpu, step_ns)
            judged = judge(rules, metrics, step_time_ns=step_ns, parts={"compute": step_ns})
            found += [(f"{model.model}, {run.mode}", finding) for finding in judged.findings]
    return found


def metrics_of(run: ModeResult, gpu: Gpu | None, step_ns: int) -> dict[str, Metric | Missing]:
    """Named as in the metric catalogue. compute: the whole step, an upper bound, since kernels are not recorded here."""
    values: dict[str, tuple[float | None, str]] = {"step_time": (step_ns, "ns"), "compute": (step_ns, "ns")}
    power = run.power
    shares = power.event_shares if power else {}
    values["thermal_share"] = (
        max((shares.get(name, 0.0) for name in THERMAL), default=None) if power else None,
        "ratio",
    )
    values["power_cap_share"] = (shares.get("SwPowerCap", 0.0) if power else None, "ratio")
    values["clocks_locked_share"] = (shares.get("ApplicationsClocksSetting", 0.0) if power else None, "ratio")
    mhz = power.mean_mhz if power else None
    values["sm_clock"] = (mhz, "mhz")
    values["sm_clock_share"] = (mhz / gpu.sm_mhz_max if mhz and gpu and gpu.sm_mhz_max else None, "ratio")
    values["power_draw"] = (power.mean_watts if power else None, "watt")
    values["power_limit"] = (gpu.power_limit_w if gpu else None, "watt")
    values["temperature"] = (power.max_celsius if power else None, "celsius")
    loads = run.training.images_per_s.loads if run.training else ()
    processes = [load.gpu_processes for load in loads if load.gpu_processes is not None]
    values["foreign_processes"] = (max(processes) - 1 if processes else None, "count")
    return {
        name: Metric(name, value, unit, "nvml")
        if value is not None
        else Missing(name, "NVML did not give it", "gpudiag doctor")
        for name, (value, unit) in values.items()
    }
