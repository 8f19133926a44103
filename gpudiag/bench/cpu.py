"""The CPU as a deployment would use it: several instances, each pinned to its own cores, all working in the same window."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import msgspec

from gpudiag.bench.job import Answer, Job, Worker
from gpudiag.bench.result import CpuRun, RoundLoad, SpeedUp
from gpudiag.bench.stability import load_average, load_of_round, read_cpu_times, summarise

ONE_CORE = "one CPU core (the algorithm on parallel hardware)"
ALL_CORES = "all CPU cores (the choice of hardware)"


def split_cores(cores: Sequence[int], instances: int) -> list[tuple[int, ...]]:
    """Disjoint, equal shares of neighbouring cores; the rest of the division is left idle, so that instances are alike."""
    each = len(cores) // instances
    return [tuple(cores[index * each : (index + 1) * each]) for index in range(instances)]


def usable_core_ids() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def run_instances(job: Job, threads: int, doing: Callable[[str], None]) -> CpuRun:
    """One instance a usable core (by number: a CPU quota allows fewer than there are cores), rounds as elsewhere.

    Raises JobError when an instance dies.
    """
    shares = split_cores(usable_core_ids(), threads)
    doing(f"{threads} instances, {len(shares[0])} core(s) each")
    rules = job.rules
    workers = [
        Worker(msgspec.structs.replace(job, task="instance", cores=share, threads=len(share))) for share in shares
    ]
    rates: list[float] = []
    loads: list[RoundLoad] = []
    try:
        for worker in workers:
            while not worker.read().ready:
                pass
        for number in range(rules.rounds):
            if number:
                time.sleep(rules.pause_s)
            before, load_before = read_cpu_times(time.monotonic_ns()), load_average()
            until = time.monotonic_ns() + int(rules.instance_s * 1e9)
            for worker in workers:
                worker.go(until)
            answers = [worker.read().answer for worker in workers]
            after = read_cpu_times(time.monotonic_ns())
            rates.append(common_rate([answer for answer in answers if answer is not None]))
            loads.append(load_of_round(before, after, load_before=load_before, load_after=load_average()))
    finally:
        for worker in workers:
            worker.finish()
    rate = summarise(rates, "images/s", rules.unstable_over, loads, threads)
    return CpuRun(
        "instances", "torch", job.batch, len(shares[0]), len(shares), rate, note="each pinned to its own cores"
    )


def common_rate(answers: Sequence[Answer]) -> float:
    """The sum of the instances' own rates: each counts whole batches in its own time within the common window."""
    return sum(answer.images / ((answer.end_ns - answer.start_ns) / 1e9) for answer in answers)


def speed_ups(mode: str, batch: int, gpu_images_per_s: float, runs: Sequence[CpuRun]) -> list[SpeedUp]:
    """Both, always: against one core, and against the best use of all cores (all threads or pinned instances, whichever is faster).

    Only runs of the same batch and of torch are compared; an unstable run is compared too and stays marked in its own row.
    """
    same = [run for run in runs if run.batch == batch and run.runtime == "torch" and run.images_per_s is not None]
    single = [run for run in same if run.kind == "one thread"]
    every = [run for run in same if run.kind != "one thread"] or single
    found: list[SpeedUp] = []
    for against, candidates in ((ONE_CORE, single), (ALL_CORES, every)):
        best = max(candidates, key=lambda run: run.images_per_s.median if run.images_per_s else 0.0, default=None)
        if best is None or best.images_per_s is None:
            continue
        rate = best.images_per_s.median
        found.append(SpeedUp(against, mode, batch, gpu_images_per_s, rate, gpu_images_per_s / rate, best.kind))
    return found
