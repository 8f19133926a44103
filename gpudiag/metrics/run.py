"""Metrics of the run: its steps, what the recording lost, how it was recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from gpudiag.host import join_launches, named
from gpudiag.intervals import Int64, Intervals
from gpudiag.metrics.make import PROFILE, PROFILE_LONGER, Value, missing, value
from gpudiag.names import LAUNCH
from gpudiag.scope import Scope
from gpudiag.timeline import Kind

STALL_FACTOR = 1.5  # a step this much over the median is slow; nsys-ai's iteration variance threshold
MIN_CYCLES = 3  # RULES.md O5
STEP_NAMES = (
    "evaluation_time", "evaluation_share", "step_median", "step_p99", "slow_steps", "step_excess_lost", "warm_up_left_ratio", "periodic_stall_time",
    "periodic_stall_period",
)  # fmt: skip
OWN_WORK = ("host.h2d", "host.forward", "host.backward", "host.optimizer", "host.framework")
RECURS, CLEARLY = 0.75, 3.0  # of 1600 random series of 20 to 400 steps, 8 show a period by these
# What torch.compile'd code is called as an operator: AOTAutograd's function, inductor's graph, dynamo's region.
COMPILED_REGION = re.compile(r"CompiledFunction|CompiledFxGraph|Torch-Compiled Region")
NO_STEPS = "no steps are known in this recording"


def measure(scope: Scope) -> Iterator[Value]:
    yield from _steps(scope)
    yield from _evidence(scope)
    yield from _recorder(scope)


def step_lengths(scope: Scope) -> Int64:
    """Length of each steady step without evaluation, ns. Shape (steps,)."""
    return scope.window.covered_in(scope.steps.start, scope.steps.end)


def run_lengths(scope: Scope) -> Int64:
    """Lengths of all steps of the run after warm-up, from gpudiag's own step records where there are some, ns."""
    log = scope.timeline.step_log
    if log is not None and len(log) > len(scope.steps):
        return np.asarray(log.end - log.start, np.int64)[min(len(log) // 10, 10) :]
    return step_lengths(scope)


def periodic_stalls(lengths: Int64) -> tuple[int, float]:
    """(period in steps, mean excess over the median a step) of slow steps that recur at one distance; (0, 0.0) if none do.

    Slow: over STALL_FACTOR times the median and over the mean, so that noise of a short median step does not count beside
    real stalls. The period is the least distance at which a stall is followed by a slow step in RECURS of the cases, is so
    clearly more often than chance would have it (CLEARLY standard deviations: batches of varying length are slow at random
    and would otherwise show some period), and is so again at twice the distance. From 10 steps on a step either way is
    allowed. A period of 1 is no stall but a slow run.
    """
    if lengths.size < 2 * MIN_CYCLES:
        return 0, 0.0
    median = float(np.median(lengths))
    slow = lengths > max(STALL_FACTOR * median, float(lengths.mean()))
    first = slow & ~np.append(False, slow[:-1])  # a run of slow steps is one stall
    if int(first.sum()) < MIN_CYCLES:
        return 0, 0.0
    near = slow | np.append(slow[1:], False) | np.append(False, slow[:-1])
    for period in range(2, lengths.size // 2 + 1):
        after = near if period >= 10 else slow
        followed, twice = after[period:][first[:-period]], after[2 * period :][first[: -2 * period]]
        if followed.size < MIN_CYCLES - 1 or not twice.size:
            break
        chance = float(after.mean())
        beyond = float(followed.mean()) - chance
        if (
            followed.mean() >= RECURS
            and beyond >= CLEARLY * (chance * (1 - chance) / followed.size) ** 0.5
            and twice.mean() >= 0.5
        ):
            return period, float((lengths[slow] - median).sum() / lengths.size)
    return 0, 0.0


def _steps(scope: Scope) -> Iterator[Value]:
    total = scope.account.total
    yield value("step_time", scope.per_step(total), "account")
    yield value("steps", len(scope.steps), scope.steps.source)
    evaluated, share = scope.evaluation
    if not len(scope.steps):
        for name in STEP_NAMES:
            yield missing(name, NO_STEPS, PROFILE_LONGER)
        return
    recorded = step_lengths(scope)
    median = float(np.median(recorded))
    yield value("evaluation_time", scope.per_step(evaluated), "ranges")
    yield value("evaluation_share", share, "ranges")
    yield value("step_median", median, "steps")
    yield value("step_p99", float(np.quantile(recorded, 0.99, method="higher")), "steps")
    yield value("slow_steps", int((recorded > 2 * median).sum()), "steps")
    yield value("step_excess_lost", _excess_lost(scope), "account")
    yield value("warm_up_left_ratio", float(recorded[:3].max() / max(1.0, median)), "steps")
    lengths = run_lengths(scope)  # a stall every hundred steps shows in the whole run only
    period, excess = periodic_stalls(lengths)
    # as a share of the run, so that it compares with the step of the recorded window, which may hold no stall at all
    share = excess / max(1.0, float(lengths.mean()))
    yield value("periodic_stall_time", share * scope.per_step(total), "steps")
    yield value("periodic_stall_period", period, "steps")


def _excess_lost(scope: Scope) -> float:
    """Mean less median over the steps of the time outside the step's own work: a step that has more to compute loses nothing.
    The step that lost most is left out: one accident (a full garbage collection) is no habit."""
    lost = np.zeros(len(scope.steps), np.int64)
    for part, time in scope.account.owned.items():
        if part.startswith("idle.") or (part.startswith("host.") and part not in OWN_WORK):
            lost += time.covered_in(scope.steps.start, scope.steps.end)
    return max(0.0, float(np.sort(lost)[:-1].mean() - np.median(lost))) if lost.size > 1 else 0.0


def launch_coverage(scope: Scope) -> tuple[int, int, int]:
    """(launch calls that should have run, those without any GPU work, kernels without a launch call) of the device.

    A launch call nested in another (a runtime call and the driver call it makes) counts once. One thread may feed several
    devices: what ran on another is not lost.
    """
    timeline = scope.timeline
    if timeline.api_calls is None or scope.launches is None or scope.ops is None or scope.host is None:
        return 0, 0, 0
    calls = timeline.api_calls
    is_launch = scope.names.rows(calls.name, LAUNCH)
    if scope.host.threads:
        is_launch &= scope.feeding
    joined = np.zeros(len(calls), bool)
    joined[scope.launches.call_of[scope.launches.call_of >= 0]] = True
    without = np.flatnonzero(is_launch & ~joined)
    assert timeline.gpu_ops is not None
    if without.size and len(timeline.gpu_ops) > len(scope.ops):
        others = timeline.gpu_ops.take(timeline.gpu_ops.device != scope.device)
        elsewhere = join_launches(others, calls.take(without)).call_of
        without = np.delete(without, np.unique(elsewhere[elsewhere >= 0]))
    done = np.flatnonzero(is_launch & joined)
    if without.size and done.size:
        # Streams run in order: what was launched after the last recorded work had not run when the recording ended.
        without = without[calls.start[without] < calls.start[done].max()]
        covered = Intervals.union_of(calls.start[done], calls.end[done])
        inside = covered.covered_in(calls.start[without], calls.end[without]) > 0
        without = without[~inside]
    kernels = np.isin(scope.ops.kind, (Kind.KERNEL, Kind.COMM, Kind.GRAPH))
    orphans = int((kernels & (scope.launches.call_of < 0)).sum())
    return int(done.size + without.size), int(without.size), orphans


def _evidence(scope: Scope) -> Iterator[Value]:
    timeline = scope.timeline
    launches, without, orphans = launch_coverage(scope)
    if scope.ops is None or not launches:
        reason = "launch calls and GPU work were not both recorded"
        yield missing("launches_missing_share", reason, PROFILE)
        yield missing("kernels_without_launch_share", reason, PROFILE)
    else:
        yield value("launches_missing_share", without / launches, "api_calls, gpu_ops")
        kernels = int(np.isin(scope.ops.kind, (Kind.KERNEL, Kind.COMM, Kind.GRAPH)).sum())
        yield value("kernels_without_launch_share", orphans / max(1, kernels), "api_calls, gpu_ops")
    yield value("rows_dropped", sum(repair.count for repair in timeline.repairs), "reader")
    diagnostics = " ".join(timeline.diagnostics)
    yield value("counters_denied", int("ERR_NVGPUCTRPERM" in diagnostics), "recorder's diagnostics")


def _recorder(scope: Scope) -> Iterator[Value]:
    timeline, host = scope.timeline, scope.timeline.host
    if timeline.observer_slowdown is None:
        yield missing("observer_slowdown", "no step was timed without recording while the machine was as busy", PROFILE)
    else:
        yield value("observer_slowdown", timeline.observer_slowdown, "gpudiag's step records")
    yield value("recorded_with_stacks", int(timeline.with_stack), "recorder")
    if host.gpu_present is None:
        yield missing("gpu_present", "the recording does not describe the machine", PROFILE)
    else:
        yield value("gpu_present", int(host.gpu_present), "environment record")
    if host.torch is None:
        yield missing("torch_cuda_build", "the recording does not say which torch ran", PROFILE)
        yield missing("debug_switches", "the recording does not describe the environment", PROFILE)
    else:
        yield value("torch_cuda_build", int(bool(host.cuda)), "environment record")
        yield value("debug_switches", len(host.debug_switches), "environment record")
    for whose in ("gpu", "host"):
        name = f"{whose}_out_of_memory"
        if host.torch_threads is None:  # known where gpudiag was inside
            yield missing(name, "how the script ended was not recorded", PROFILE)
        else:
            yield value(name, int(whose in host.out_of_memory), "gpudiag's records")
    if scope.ops is None and timeline.cpu_ops is None:
        yield missing("torch_compiled", "neither kernels nor operators were recorded", PROFILE_LONGER)
        return
    compiled = scope.ops is not None and any("triton" in name for name in scope.kernels.names)
    compiled |= len(named(scope.cpu_ops, scope.names, COMPILED_REGION).intersect(scope.window)) > 0
    yield value("torch_compiled", int(compiled), "kernel names, operators")
