"""From rounds to one number: the median, the spread, whether it is stable, and if not the likely reason."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpudiag.bench.result import RoundLoad, Rounds
from gpudiag.units import format_percent

OTHERS_NOTABLE = 0.05  # of all cores: a round of a benchmark should have the machine to itself
STEAL_NOTABLE = 0.02
CLOCK_NOTABLE = 0.05
SHORTEST_NS = (
    200_000_000  # the kernel counts CPU time in ticks of 10 ms: a share over less than 20 of them says nothing
)
HOT_CELSIUS = 80.0  # most NVIDIA boards start to slow down between 80 and 90 degrees (nvidia-smi -q -d TEMPERATURE)


def summarise(
    values: Sequence[float], unit: str, unstable_over: float, loads: Sequence[RoundLoad] = (), cores: int = 1
) -> Rounds:
    """values: one a round, at least one. With a single round there is no spread to judge, and the result is not called stable."""
    median = statistics.median(values)
    spread = (max(values) - min(values)) / median if median else 0.0
    stable = len(values) > 1 and spread <= unstable_over
    reasons: tuple[str, ...] = ()
    if len(values) == 1:
        reasons = ("only one round: no spread",)
    elif not stable:
        reasons = tuple(likely_reasons(loads, cores))
    return Rounds(unit, tuple(values), median, spread, stable, reasons, tuple(loads))


def likely_reasons(loads: Sequence[RoundLoad], cores: int) -> list[str]:
    """What was recorded beside the rounds and can move a result, strongest evidence first."""
    reasons: list[str] = []
    others = [load.others for load in loads if load.others is not None]
    if others and max(others) >= OTHERS_NOTABLE:
        reasons.append(f"other processes used {format_percent(max(others))} of the CPU cores")
    gpu_processes = [load.gpu_processes for load in loads if load.gpu_processes is not None]
    if gpu_processes and max(gpu_processes) > 1:
        reasons.append(f"{max(gpu_processes) - 1} other process(es) on the GPU")
    events = sorted({event for load in loads for event in load.gpu_events})
    if events:
        reasons.append("the GPU lowered its clocks: " + ", ".join(events))
    celsius = [load.gpu_celsius for load in loads if load.gpu_celsius is not None]
    if celsius and max(celsius) >= HOT_CELSIUS:
        reasons.append(f"GPU temperature reached {max(celsius):.0f} C")
    for label, clocks in (
        ("GPU", [load.gpu_mhz for load in loads if load.gpu_mhz]),
        ("CPU", [load.cpu_mhz for load in loads if load.cpu_mhz]),
    ):
        if clocks and (max(clocks) - min(clocks)) / max(clocks) > CLOCK_NOTABLE:
            reasons.append(f"the {label} clock moved between {min(clocks):.0f} and {max(clocks):.0f} MHz")
    steal = [load.steal for load in loads if load.steal is not None]
    if steal and max(steal) >= STEAL_NOTABLE:
        reasons.append(f"the hypervisor took {format_percent(max(steal))} of the CPU time")
    before = [load.load_before for load in loads if load.load_before is not None]
    if not reasons and before and before[0] > 0.5 * cores:
        reasons.append(f"load average {before[0]:.1f} on {cores} cores before the first round")
    return reasons or ["no cause recorded: few iterations or a very short measurement; raise the counts"]


@dataclass(frozen=True)
class CpuTimes:
    """Cumulative CPU seconds of the `cpus` that this process may run on: busy, stolen, and used by this process with its
    descendants (loader workers, instances). A quota is not in it: who else runs on these CPUs cannot be told from it."""

    busy: float
    steal: float
    own: float
    wall_ns: int
    cpus: int


def read_cpu_times(wall_ns: int, proc: Path = Path("/proc")) -> CpuTimes | None:
    """None where /proc/stat is not there (not Linux). Fields: proc(5)."""
    try:
        lines = (proc / "stat").read_text().splitlines()
    except OSError:
        return None
    tick = os.sysconf("SC_CLK_TCK")
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    rows = [line.split() for line in lines if line.partition(" ")[0] in mine]
    if not rows:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        sum(int(row[place]) for row in rows) / tick for place in range(1, 9)
    )
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    own += sum(_process_seconds(proc, pid, tick) for pid in _descendants(proc, "self"))
    return CpuTimes(user + nice + system + irq + softirq, steal, own, wall_ns, len(rows))


def _descendants(proc: Path, pid: str) -> list[str]:
    """Live processes below `pid`; empty where the kernel does not list children (proc(5), CONFIG_PROC_CHILDREN)."""
    found: list[str] = []
    try:
        for task in (proc / pid / "task").iterdir():
            for child in (task / "children").read_text().split():
                found += [child, *_descendants(proc, child)]
    except OSError:  # it ended while we looked
        pass
    return found


def _process_seconds(proc: Path, pid: str, tick: int) -> float:
    try:
        fields = (proc / pid / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / tick  # utime stime cutime cstime


def load_of_round(before: CpuTimes | None, after: CpuTimes | None, **known: object) -> RoundLoad:
    """Shares of the CPUs over the round, beside what else is `known` of it."""
    if before is None or after is None or after.wall_ns - before.wall_ns < SHORTEST_NS:
        return RoundLoad(**known)  # type: ignore[arg-type]
    capacity = after.cpus * (after.wall_ns - before.wall_ns) / 1e9
    others = min(1.0, max(0.0, (after.busy - before.busy) - (after.own - before.own)) / capacity)
    return RoundLoad(others=others, steal=(after.steal - before.steal) / capacity, **known)  # type: ignore[arg-type]


def load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def cpu_mhz(proc: Path = Path("/proc")) -> float | None:
    """Mean of the cores' current clock, or None where /proc/cpuinfo does not say it."""
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return None
    clocks = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
    return statistics.mean(clocks) if clocks else None
