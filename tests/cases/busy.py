"""Runs on a machine whose CPUs other programs have."""

from __future__ import annotations

import numpy as np

from cases.case import Case
from cases.sim import MS, TENSOR_GEMM, Sim, host, loader_info
from gpudiag.timeline import StepLog, Timeline

STEPS = 20


def waited(run: Sim, ns: int) -> StepLog:
    """The steps' log, with this wait for a CPU in each."""
    rows = np.array(run.step_rows, np.int64)
    return StepLog(rows[:, 0], rows[:, 1], rows[:, 2], np.full(len(rows), ns, np.int64))


def launcher_held_up() -> Timeline:
    """10 ms of work a step; the thread that launches it stands ready for 15 ms and gets no CPU."""
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.think(15 * MS)
            run.launch(MS, TENSOR_GEMM, count=10)
            run.idle_until_device()
    return run.timeline(host=host(2, 2, other_cpus=1.8, load_average=9.0), step_log=waited(run, 14 * MS))


def workers_held_up() -> Timeline:
    """Two workers make a batch in 8 ms of CPU time, for which they queue 72 ms behind other programs."""
    run = Sim()
    for i in range(STEPS):
        with run.step():
            run.load(30 * MS, fetch=80 * MS, cpu=0.1, io=0.0, worker=i % 2)
            run.launch(MS, TENSOR_GEMM, count=10)
            run.idle_until_device()
    machine = host(2, 2, other_cpus=1.9, load_average=9.0)
    return run.timeline(loader=loader_info(2), host=machine, step_log=waited(run, 0))


CASES = (
    Case("rule:cpu_contended", launcher_held_up, ("cpu_contended",), ("background_load",), silent=("loader_cpus_taken",)),
    Case("rule:loader_cpus_taken", workers_held_up, ("loader_cpus_taken",), silent=("cpu_contended", "loader_cpu_bound"),
         bound_by="input"),
)  # fmt: skip
