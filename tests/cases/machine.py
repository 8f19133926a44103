"""Cases of several GPUs, the machine, and its configuration."""

from __future__ import annotations

from cases.case import Case
from cases.kernels import LAUNCHING
from cases.loading import LOADER, STEPS
from cases.sim import ALL_REDUCE, MS, US, Sim, host, samples
from gpudiag.timeline import Kind, Timeline

NETWORK = ("slow_link", "low_comm_overlap", "exposed_communication")


def rank(number: int, late: int, extra: int = 0) -> Timeline:
    """One of four ranks; all enter a step together, rank 1 computes `extra` longer, and the collective ends for all together."""
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            begin = run.now
            run.launch(2 * MS, count=10)
            if number == late:
                run.launch(extra)
            end = begin + 20 * MS + extra + 300 * US
            for i in range(5):  # five small messages a step; all but the first find every rank ready
                done = end + i * 100 * US
                run.launch(
                    max(60 * US, done - max(run.free, run.now)) if i == 0 else 60 * US, ALL_REDUCE, kind=Kind.COMM
                )
            run.now = begin + 20 * MS + extra + 2 * MS
            run.free = max(run.free, run.now)
    return run.timeline(host=host(), rank=number, world_size=4)


def ranks(late: int, extra: int) -> tuple[Timeline, ...]:
    return tuple(rank(number, late, extra) for number in range(4))


def time_sliced() -> Timeline:
    """The host is far ahead; kernels that are queued do not start for 8 ms at a time: the device works for somebody else."""
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            for _ in range(5):
                run.launch(1 * MS, count=7)
                run.launch(1 * MS, late=8 * MS)
            run.now = max(run.now, run.free - 30 * MS)
    times = [rows[0] for rows in run.step_rows]
    return run.timeline(samples=samples(times, other_processes=1, other_memory=8 << 30), host=host())


def heated() -> Timeline:
    run = Sim()
    for i in range(40):
        with run.step():
            run.launch(1 * MS if i < 4 else 1580 * US, count=10)
            run.idle_until_device()
    times = [rows[0] for rows in run.step_rows]
    hot = [i >= 4 for i in range(40)]
    return run.timeline(
        samples=samples(times, sm_clock_mhz=[1200.0 if h else 1900.0 for h in hot], sm_clock_max_mhz=1900.0,
                        reasons=[0x20 if h else 0 for h in hot], temperature_c=[91.0 if h else 70.0 for h in hot]),
        host=host(),
    )  # fmt: skip


def at_the_power_limit() -> Timeline:
    run = Sim()
    for _ in range(30):
        with run.step():
            run.launch(1 * MS, count=10)
            run.idle_until_device()
    times = [rows[0] for rows in run.step_rows]
    capped = samples(times, reasons=0x4, power_w=399.0, sm_clock_mhz=1508.0, sm_clock_max_mhz=1695.0)
    return run.timeline(samples=capped, host=host())


def switched_on(*switches: str) -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            with run.phase("forward"):
                run.operator(run.now, run.now + 10 * MS, "aten::linear")
                run.think(10 * MS)
            with run.phase("backward"):
                run.operator(run.now, run.now + 40 * MS, "autograd::engine")
                run.think(40 * MS)
    return run.timeline(host=host(debug_switches=switches, gpu_present=False))


def on_the_cpu_by_mistake() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.load(300 * US)
            with run.phase("forward"):
                run.operator(run.now, run.now + 100 * MS, "aten::linear")
                run.think(100 * MS)
            with run.phase("backward"):
                run.think(200 * MS)
    return run.timeline(host=host(torch="2.14.1+cpu", cuda=None, gpu_present=True))


CASES = (
    Case("comm-tiny-allreduce-imbalance", lambda: ranks(1, 4 * MS), ("straggler_rank",), silent=("slow_link", "low_comm_overlap")),
    Case("comm-backward-straggler-hidden", lambda: ranks(1, 40 * MS), ("straggler_rank",), silent=NETWORK, says=("rank 1",)),
    Case("shared-gpu", time_sliced, ("gpu_idle", "long_gaps", "gpu_shared"), ("gpu_shared",), (*LAUNCHING, *LOADER)),
    Case("thermal-laptop", heated, ("thermal_throttled",), silent=LOADER),
    Case("power-cap-benign", at_the_power_limit, also=("power_capped",), silent=("thermal_throttled",), status="healthy"),
    Case("cfg-anomaly-mode", lambda: switched_on("autograd anomaly detection"), ("debug_switches_on",), says=("anomaly",)),
    Case("deterministic-slow", lambda: switched_on("deterministic algorithms"), ("debug_switches_on",), says=("deterministic",)),
    Case("cpu-only-torch", on_the_cpu_by_mistake, ("gpu_unused",), silent=LOADER),
)  # fmt: skip
