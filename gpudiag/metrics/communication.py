"""Metrics of collectives, inside one rank and across ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from gpudiag.host import named
from gpudiag.intervals import Intervals
from gpudiag.metrics.across import RunFacts
from gpudiag.metrics.busy import NO_GPU
from gpudiag.metrics.make import NOTHING, ON_GPU, PROFILE, PROFILE_RANKS, Value, inapplicable, missing, value
from gpudiag.scope import Scope
from gpudiag.steps import OPTIMIZER
from gpudiag.timeline import Kind

REDUCTION = re.compile(r"all_?reduce|reduce_?scatter", re.I)
# torch/nn/parallel/_functions.py: autograd Functions, whose backward nodes bear no number (GatherBackward0 is torch.gather's).
DATA_PARALLEL = re.compile(
    r"^(?:Broadcast|Scatter|Gather|ReduceAddCoalesced)(?:Backward)?$|^DataParallel\.(?:replicate|scatter|gather)$"
    r"|broadcast_coalesced$"
)
BACKWARD_PASS = re.compile(r"^(?:gpudiag::)?backward$|^## ?backward ?##$|^backward_pass$", re.I)
CPU_COLLECTIVE = re.compile(r"^(?:gloo|mpi|ucc):")  # ranges that c10d sets from the start of a collective to its end
NO_COLLECTIVE = "no collective ran in the window"


def measure(scope: Scope, run: RunFacts) -> Iterator[Value]:
    if scope.ranges is None or scope.cpu_ops is None:
        yield missing("backward_collective_wait", "no ranges or no operators were recorded", PROFILE)
    else:
        yield value("backward_collective_wait", scope.per_step(backward_collective_wait(scope)), "ranges, cpu_ops")
    if scope.ops is None or scope.layers is None:
        for name in ("comm_time", "comm_overlap_share", "dataparallel_time", "grad_syncs_per_update"):
            yield missing(name, NO_GPU, ON_GPU)
    else:
        yield from _one_rank(scope)
    yield missing("comm_median_bytes", "gpudiag does not read the collectives' message sizes", NOTHING)
    mine = run.stragglers.get(scope.rank)
    if mine is None or run.latest_rank is None:
        for name in ("comm_wait_share", "straggler_share", "straggler_wait", "is_straggler"):
            if scope.ops is None or scope.layers is None:
                yield missing(name, NO_GPU, ON_GPU)
            elif len(scope.layers.comm.intersect(scope.window)):
                yield missing(name, run.why_no_stragglers, PROFILE_RANKS)
            else:
                yield inapplicable(name, NO_COLLECTIVE)
        return
    yield value("comm_wait_share", mine.wait_ns / max(1, mine.comm_ns), "all ranks together")
    yield value("straggler_share", run.latest_share, "all ranks together")
    yield value("straggler_wait", scope.per_step(run.mean_wait_ns), "all ranks together")
    yield value("is_straggler", int(scope.rank in run.late_ranks), "all ranks together")


def backward_collective_wait(scope: Scope) -> int:
    """ns of the backward passes in the window in which a collective of CPU tensors was under way and no operator ran: DDP's
    reducer waits there, for the other ranks or their messages. 0 where no such collective was recorded."""
    ops = scope.cpu_ops
    under_way = named(scope.ranges, scope.names, CPU_COLLECTIVE).intersect(scope.window)
    waiting = under_way.intersect(named(scope.ranges, scope.names, BACKWARD_PASS))
    if not len(waiting) or ops is None:
        return 0
    return waiting.subtract(Intervals.union_of(ops.start, ops.end)).total()


def _one_rank(scope: Scope) -> Iterator[Value]:
    assert scope.layers is not None
    comm = scope.layers.comm.intersect(scope.window)
    yield value("comm_time", scope.per_step(comm.total()), "gpu_ops")
    if len(comm):
        yield value("comm_overlap_share", comm.intersect(scope.layers.compute).total() / comm.total(), "gpu_ops")
    else:
        yield inapplicable("comm_overlap_share", NO_COLLECTIVE)
    parallel = named(scope.cpu_ops, scope.names, DATA_PARALLEL).union(named(scope.ranges, scope.names, DATA_PARALLEL))
    yield value("dataparallel_time", scope.per_step(parallel.intersect(scope.window).total()), "cpu_ops, ranges")
    ops, calls = scope.window_ops, scope.timeline.api_calls
    backward = named(scope.ranges, scope.names, BACKWARD_PASS).intersect(scope.window)
    updates = named(scope.ranges, scope.names, OPTIMIZER).intersect(scope.window)  # zero_grad is no update
    if calls is None or not len(backward) or not len(updates):
        yield missing("grad_syncs_per_update", "no backward and optimizer ranges were recorded", PROFILE)
        return
    reductions = (ops.kind == Kind.COMM) & scope.names.rows(ops.name, REDUCTION) & (scope.window_calls >= 0)
    launched = np.sort(calls.start[scope.window_calls[reductions]])
    held = np.searchsorted(launched, backward.end) > np.searchsorted(launched, backward.start)
    yield value("grad_syncs_per_update", int(held.sum()) / len(updates), "ranges, gpu_ops")
