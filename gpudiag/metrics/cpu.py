"""Metrics of the host's CPUs: who waited for one, and how busy the machine was."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpudiag.intervals import Int64
from gpudiag.metrics.loading import batches_a_step, main_loader
from gpudiag.metrics.make import PROFILE, PROFILE_LONGER, Value, missing, value
from gpudiag.scope import Scope
from gpudiag.timeline import LoaderBatches

NOT_KNOWN = "the training thread's wait for a CPU was not recorded"


def measure(scope: Scope) -> Iterator[Value]:
    waits = _waits(scope)
    if waits is None:
        for name in ("cpu_wait_time", "cpu_wait_lost", "cpu_wait_excess"):
            yield missing(name, NOT_KNOWN, PROFILE)
    else:
        waited = float(waits.mean() if len(scope.steps) else waits.sum())
        elsewhere = max(0.0, waited - _in_own_fetches(scope))
        yield value("cpu_wait_time", waited, "gpudiag's step records")
        yield value("cpu_wait_lost", min(elsewhere, _can_lose(scope)), "gpudiag's step and loader records, account")
        yield value("cpu_wait_excess", max(0.0, float(waits.mean() - np.median(waits))), "gpudiag's step records")
    yield from _loader(scope)
    host = scope.timeline.host
    for name in ("load_average", "cpu_pressure", "other_cpus"):
        read = getattr(host, name)
        if read is None:
            yield missing(name, "the machine's load was not recorded, or for too short a time", PROFILE_LONGER)
        else:
            yield value(name, read, "/proc, read when the recording began and when it ended")


def _waits(scope: Scope) -> Int64 | None:
    """The training thread's wait for a CPU in each step of the window that has it, ns; None where none has."""
    log = scope.timeline.step_log
    if log is None:
        return None
    rows = (log.cpu_wait_ns >= 0) & scope.window.contains((log.start + log.end) // 2)
    return np.asarray(log.cpu_wait_ns[rows], np.int64) if rows.any() else None


def _in_own_fetches(scope: Scope) -> float:
    """Of it the wait while the training thread itself fetched batches (DataLoaders without workers), ns a step."""
    batches = scope.timeline.loader
    if batches is None:
        return 0.0
    own = (batches.worker < 0) & (batches.io_ns >= 0) & scope.window.contains(batches.fetch_end)
    return scope.per_step(float(_queued(batches.take(own)).sum()))


def _queued(fetched: LoaderBatches) -> Int64:
    """Time that each fetch was queued for a CPU, ns; of fetches with all their times."""
    queued: Int64 = fetched.fetch_end - fetched.fetch_start - fetched.cpu_ns - fetched.io_ns
    return queued.clip(min=0)


def _can_lose(scope: Scope) -> float:
    """What a wait of the training thread can cost, ns a step: beside GPU work only time in which the device idles."""
    if scope.ops is None:
        return scope.per_step(scope.account.total)
    return scope.per_step(sum(ns for part, ns in scope.parts.items() if part.startswith("idle.")))


def _loader(scope: Scope) -> Iterator[Value]:
    batches, loader = scope.timeline.loader, main_loader(scope)
    if batches is not None and loader is not None:
        batches = batches.take(batches.loader == loader.loader)
    fetched = batches.take((batches.fetch_end >= 0) & (batches.io_ns >= 0)) if batches is not None else None
    if loader is None or fetched is None or len(fetched) < 3:
        for name in ("loader_queue_share", "loader_queue_lost", "loader_cpus_needed"):
            yield missing(name, "how a DataLoader's fetches spent their time was not recorded", PROFILE)
        return
    total = max(1.0, float((fetched.fetch_end - fetched.fetch_start).sum()))
    share = float(_queued(fetched).sum()) / total
    yield value("loader_queue_share", share, "loader records")
    lost = scope.per_step(scope.input_lost.total())
    host = scope.timeline.host
    if host.other_cpus is None or not host.usable_cpus:
        yield missing("loader_queue_lost", "what other programs took of the CPUs was not recorded", PROFILE_LONGER)
    else:
        theirs = min(1.0, host.other_cpus / host.usable_cpus)
        yield value("loader_queue_lost", lost * share * theirs, "loader records, account, /proc")
    rest = scope.per_step(scope.account.total) - lost
    if rest > 0:
        worked = float(np.median(fetched.cpu_ns)) * batches_a_step(scope)
        yield value("loader_cpus_needed", worked / rest, "loader records, account")
    else:
        yield missing("loader_cpus_needed", "the step holds nothing but loading", PROFILE)
