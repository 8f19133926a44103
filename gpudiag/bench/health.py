"""The machine's health while it was measured, judged by the same rules as a profile: heat, power limit, clocks, links, company."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from gpudiag.bench.result import BenchResult, Gpu, ModeResult, measured_gpu, rounds_of
from gpudiag.diagnosis import Finding
from gpudiag.judge import judge
from gpudiag.metrics.base import Metric, Missing
from gpudiag.rules import load_rules

# The rules that need no recording of kernels: everything they ask for is sampled by `bench` (power.py).
OF_A_RUN = ("thermal_throttled", "power_capped", "clocks_locked", "gpu_shared", "pcie_degraded")
OF_A_MACHINE = ("nvlinks_down", "background_load")
OF_SEVERAL = ("drivers_differ",)
SLOWDOWNS = ("HwSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")

Values = dict[str, tuple[float | None, str]]


def findings(result: BenchResult) -> list[tuple[str, Finding]]:
    """(where, finding), one a rule: that of the run with most at stake, named by its model and mode; then the machine's own."""
    found: dict[str, list[tuple[str, Finding]]] = {}
    gpu = measured_gpu(result)
    for where, run, step_ns in _runs(result):
        for finding in _judged(OF_A_RUN, metrics_of(run, gpu, step_ns), step_ns):
            found.setdefault(finding.rule, []).append((where, finding))
    worst = []
    for same in found.values():
        where, finding = max(same, key=lambda item: item[1].bound_ns)
        worst.append((f"{where} (and {len(same) - 1} more)" if len(same) > 1 else where, finding))
    return worst + [("machine", finding) for finding in _judged(OF_A_MACHINE, _machine(result, gpu), 1)]


def findings_of_several(results: Sequence[BenchResult]) -> list[Finding]:
    """What only several machines side by side can show."""
    drivers = {result.machine.driver for result in results if result.machine.driver}
    return _judged(OF_SEVERAL, _named({"driver_versions": (len(drivers) or None, "count")}), 1)


def metrics_of(run: ModeResult, gpu: Gpu | None, step_ns: int) -> dict[str, Metric | Missing]:
    """Named as in the metric catalogue. compute: the whole step, an upper bound, since kernels are not recorded here."""
    power = run.power
    shares = power.event_shares if power else {}
    mhz = power.mean_mhz if power else None
    loads = run.training.images_per_s.loads if run.training else ()
    processes = [load.gpu_processes for load in loads if load.gpu_processes is not None]
    return _named(
        {
            "step_time": (step_ns, "ns"),
            "compute": (step_ns, "ns"),
            "thermal_share": (
                max((shares.get(name, 0.0) for name in SLOWDOWNS), default=0.0) if power else None,
                "ratio",
            ),
            "power_cap_share": (shares.get("SwPowerCap", 0.0) if power else None, "ratio"),
            "clocks_locked_share": (shares.get("ApplicationsClocksSetting", 0.0) if power else None, "ratio"),
            "sm_clock": (mhz, "mhz"),
            "sm_clock_share": (mhz / gpu.sm_mhz_max if mhz and gpu and gpu.sm_mhz_max else None, "ratio"),
            "power_draw": (power.mean_watts if power else None, "watt"),
            "power_limit": (gpu.power_limit_w if gpu else None, "watt"),
            "temperature": (power.max_celsius if power else None, "celsius"),
            "pcie_link_share": (power.pcie_share if power else None, "ratio"),
            "foreign_processes": (max(processes) - 1 if processes else None, "count"),
        }
    )


def _runs(result: BenchResult) -> Iterator[tuple[str, ModeResult, int]]:
    """The training runs on a GPU, and how long a step of each takes, ns."""
    for model in result.models:
        for run in model.runs:
            if run.device != "cpu" and run.training is not None:
                yield (
                    f"{model.model}, {run.mode}",
                    run,
                    round(run.training.batch / run.training.images_per_s.median * 1e9),
                )


def _machine(result: BenchResult, gpu: Gpu | None) -> dict[str, Metric | Missing]:
    """machine_cpus: those that the benchmark may run on; what others do on the rest of the machine is not counted either."""
    loads = [load for model in result.models for _, rounds in rounds_of(model) for load in rounds.loads]
    others = [load.others for load in loads if load.others is not None]
    cpus = result.machine.cores_usable
    return _named(
        {
            "other_cpus": (statistics.mean(others) * cpus if others else None, "count"),
            "machine_cpus": (cpus, "count"),
            "nvlinks": (gpu.nvlinks if gpu else None, "count"),
            "nvlinks_active": (gpu.nvlinks_active if gpu else None, "count"),
        }
    )


def _named(values: Values) -> dict[str, Metric | Missing]:
    return {
        name: Metric(name, value, unit, "bench")
        if value is not None
        else Missing(name, "the driver did not give it", "gpudiag doctor")
        for name, (value, unit) in values.items()
    }


def _judged(names: Sequence[str], metrics: dict[str, Metric | Missing], step_ns: int) -> list[Finding]:
    known = load_rules()
    rules = [known.named(name) for name in names]
    return list(judge(rules, metrics, step_time_ns=step_ns, parts={"compute": step_ns}).findings)
