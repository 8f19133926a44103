"""Metrics of the data pipeline: the wait in the loader, and why it waits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from gpudiag.host import named
from gpudiag.intervals import Int64, Intervals
from gpudiag.metrics.make import PROFILE, PROFILE_LONGER, Value, missing, value
from gpudiag.names import COPY_CALL, FORWARD, H2D, INPUT, LAUNCH
from gpudiag.scope import Scope
from gpudiag.steps import OUR_STEP
from gpudiag.timeline import Bool, LoaderBatches, LoaderInfo, main_loader_of

# A row of a TensorDataset takes 7 us here with the profiler on. A dataset that holds a table as long as itself (paths, labels)
# and takes longer than this a sample does more than index it.
ROW_NS = 200_000
ENOUGH = 10  # fetches in the window that means are of; with fewer, those of the whole run
SINGLE, MULTI = "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"
NO_LOADER = "no DataLoader was recorded from inside"
BATCH_NAMES = (
    "loader_fetch_time", "loader_fetch_p95", "loader_dataset_time", "loader_collate_time", "loader_pin_time", "loader_cpu_share",
    "loader_io_share", "loader_late_batch_wait", "loader_slow_share", "loader_sample_time", "num_workers_needed",
    "loader_epochs", "worker_restart_time", "first_batch_wait",
)  # fmt: skip


def measure(scope: Scope) -> Iterator[Value]:
    waiting = loader_waits(scope)
    if waiting is None:
        yield missing("loader_time", "no loader call was recorded", PROFILE)
    else:
        yield value("loader_time", scope.per_step(waiting.intersect(scope.window).total()), "ranges")
    yield _before_launch(scope, waiting)
    loader = main_loader(scope)
    yield from _settings(scope, loader)
    yield from _machine(scope, loader)
    rows = rows_of(scope, loader)
    if rows is None or not len(rows):
        for name in BATCH_NAMES:
            yield missing(name, NO_LOADER, PROFILE)
    else:
        yield from _batches(scope, rows, loader)


def loader_waits(scope: Scope) -> Intervals | None:
    """Time of the process in the loader's next; None when nothing of the kind can be in the recording.

    torch marks the loader's next as an operator, gpudiag as a range beside its step ranges; ranges of others need not hold it.
    """
    loader = scope.timeline.loader
    waits = named(scope.ranges, scope.names, INPUT).union(named(scope.cpu_ops, scope.names, INPUT))
    if loader is not None and len(loader):
        waits = waits.union(Intervals.union_of(loader.start, loader.end))
    if len(waits) or loader is not None or scope.cpu_ops is not None or len(named(scope.ranges, scope.names, OUR_STEP)):
        return waits
    return None


def _before_launch(scope: Scope, waiting: Intervals | None) -> Value:
    name = "before_launch_lost"
    if waiting is None or not len(waiting):
        return missing(name, "no loader call was recorded", PROFILE)
    if scope.ops is None:
        begun = named(scope.ranges, scope.names, FORWARD).union(named(scope.ranges, scope.names, H2D)).start
        parts = ("host.other", "host.framework")
    else:
        calls = scope.timeline.api_calls
        if calls is None:
            return missing(name, "API calls were not recorded", PROFILE)
        uses = scope.names.rows(calls.name, LAUNCH) | scope.names.rows(calls.name, COPY_CALL)
        begun = np.sort(calls.start[scope.feeding & uses])
        parts = ("idle.host", "idle.launch")
    if not begun.size:
        return missing(name, "no use of a batch was recorded", PROFILE)
    after = np.searchsorted(begun, waiting.end)
    used = np.append(begun, np.iinfo(np.int64).max)[after]
    # a batch that is not used before the next is asked for is put by (accumulated, skipped): that is no way to a launch
    used = np.where(used <= np.append(waiting.start[1:], np.iinfo(np.int64).max - 1), used, waiting.end)
    between = Intervals.union_of(waiting.end, used).intersect(scope.window)
    lost = scope.account.owned_by(parts[0]).union(scope.account.owned_by(parts[1]))
    return value(name, scope.per_step(between.intersect(lost).total()), "account, ranges")


def main_loader(scope: Scope) -> LoaderInfo | None:
    """The DataLoader that delivered most batches."""
    return main_loader_of(scope.timeline.loaders)


def rows_of(scope: Scope, loader: LoaderInfo | None) -> LoaderBatches | None:
    """The batches of one DataLoader; of all where none is known."""
    batches = scope.timeline.loader
    if batches is None or loader is None:
        return batches
    return batches.take(batches.loader == loader.loader)


def window_batches(scope: Scope, rows: LoaderBatches) -> LoaderBatches:
    """The batches of the window; with fewer than ENOUGH all of them. The loss is the window's: batches of another epoch differ."""
    inside = scope.window.contains(rows.end)
    return rows.take(inside) if inside.sum() >= ENOUGH else rows


def _settings(scope: Scope, loader: LoaderInfo | None) -> Iterator[Value]:
    if loader is not None:
        yield value("num_workers", loader.num_workers, "loader records")
        yield value("pin_memory", int(loader.pin_memory), "loader records")
        yield value("persistent_workers", int(loader.persistent_workers), "loader records")
        worked = _sample_time(scope, loader)
        only_rows = loader.in_memory and (worked is None or worked <= ROW_NS)
        yield value("dataset_in_memory", int(only_rows), "loader records")
        return
    single = any(SINGLE in text for text in scope.timeline.strings)
    if single and not any(MULTI in text for text in scope.timeline.strings):
        yield value("num_workers", 0, "name of the loader's iterator")
    else:
        yield missing("num_workers", NO_LOADER, PROFILE)
    for name in ("pin_memory", "persistent_workers", "dataset_in_memory"):
        yield missing(name, NO_LOADER, PROFILE)


def _sample_time(scope: Scope, loader: LoaderInfo | None) -> float | None:
    """The dataset's time a sample, ns; None where it or the batch size is not known."""
    rows = rows_of(scope, loader)
    if rows is None or loader is None or not loader.batch_size or not (rows.dataset_ns >= 0).any():
        return None
    return float(np.median(rows.dataset_ns[rows.dataset_ns >= 0])) / loader.batch_size


def _machine(scope: Scope, loader: LoaderInfo | None) -> Iterator[Value]:
    host = scope.timeline.host
    cpus = (("usable_cpus", host.usable_cpus), ("machine_cpus", host.machine_cpus), ("process_cpus", host.process_cpus))
    for name, number in cpus:
        if number is None:
            yield missing(name, "the recording does not describe the machine", PROFILE)
        else:
            yield value(name, number, "environment record")
    if loader is None or host.torch_threads is None:
        reason = NO_LOADER if loader is None else "the recording does not say how many threads torch used"
        yield missing("cpu_demand", reason, PROFILE)
    else:
        # A worker of torch's DataLoader runs with one intra-op thread (torch.set_num_threads(1) in _worker_loop).
        threads = loader.num_workers * max(1, loader.worker_threads) + host.torch_threads
        yield value("cpu_demand", threads, "loader records")


def _batches(scope: Scope, rows: LoaderBatches, loader: LoaderInfo | None) -> Iterator[Value]:
    fetched = (rows.fetch_end >= 0) & (rows.fetch_start >= 0)
    if fetched.sum() >= 3:
        yield from _fetches(scope, window_batches(scope, rows.take(fetched)), loader)
        yield _slow_share(rows.take(fetched))
    else:
        for name in BATCH_NAMES[:11]:
            yield missing(name, "fewer than three fetched batches were recorded", PROFILE_LONGER)
    epochs = np.unique(rows.epoch[scope.window.contains(rows.end)])
    yield value("loader_epochs", int(epochs.size), "loader records")
    wait = rows.end - rows.start
    typical = float(np.median(wait))
    first = (rows.batch == 0) & (rows.epoch > rows.epoch.min())
    lost = scope.input_lost
    # The old workers end in the epoch's last next, which brings no batch, and the new ones start before the first next.
    began = np.append(rows.start[:1], rows.end[:-1])[first]
    beyond = np.maximum(0, lost.covered_in(np.minimum(began, rows.start[first]), rows.end[first]) - typical)
    left_out = scope.left_out
    restart = left_out.wait_ns / left_out.steps if left_out is not None else scope.per_step(float(beyond.sum()))
    yield value("worker_restart_time", restart, "loader records, account")
    yield value("first_batch_wait", float(wait[np.argmin(rows.start)]), "loader records")


def _fetches(scope: Scope, rows: LoaderBatches, loader: LoaderInfo | None) -> Iterator[Value]:
    length: Int64 = rows.fetch_end - rows.fetch_start
    mean = float(length.mean())  # what workers deliver over time goes by the mean, slow batches included
    yield value("loader_fetch_time", mean, "loader records")
    yield value("loader_fetch_p95", float(np.quantile(length, 0.95, method="higher")), "loader records")
    for name, column in (
        ("loader_dataset_time", rows.dataset_ns),
        ("loader_collate_time", rows.collate_ns),
        ("loader_pin_time", rows.pin_ns),
    ):
        known: Bool = column >= 0
        if known.any():
            yield value(name, float(column[known].mean()), "loader records")
        else:
            yield missing(name, "the loader's records lack it", PROFILE)
    for name, column in (("loader_cpu_share", rows.cpu_ns), ("loader_io_share", rows.io_ns)):
        known = column >= 0
        if known.any():
            yield value(
                name, min(1.0, float(column[known].sum()) / max(1.0, float(length[known].sum()))), "loader records"
            )
        else:
            yield missing(name, "the worker's CPU and I/O time were not recorded", PROFILE)
    lost = scope.input_lost
    late = length > 2 * np.median(length)
    yield value(
        "loader_late_batch_wait",
        scope.per_step(float(lost.covered_in(rows.start, rows.end)[late].sum())),
        "loader records, account",
    )
    sample = _sample_time(scope, loader)
    if sample is not None:
        yield value("loader_sample_time", sample, "loader records")
    else:
        yield missing("loader_sample_time", "the batch size or the dataset's time is not known", PROFILE)
    input_lost = scope.per_step(lost.total())
    rest = scope.per_step(scope.account.total) - input_lost
    if rest > 0:
        needed = max(1, math.ceil(batches_a_step(scope) * mean / rest))
        yield value("num_workers_needed", needed, "loader records, account")
    else:
        yield missing("num_workers_needed", "the step holds nothing but loading", PROFILE)


def _slow_share(fetched: LoaderBatches) -> Value:
    """Over the whole run: of few batches none is the slowest hundredth."""
    length = np.sort(fetched.fetch_end - fetched.fetch_start)
    if length.size < 100:
        return missing("loader_slow_share", "fewer than 100 batches were fetched", "gpudiag profile --steps 200 SCRIPT")
    slowest = length[-max(1, length.size // 100) :]
    return value("loader_slow_share", float(slowest.sum()) / max(1.0, float(length.sum())), "loader records")


def batches_a_step(scope: Scope) -> int:
    """Batches of the main DataLoader that a step takes: several with gradient accumulation. At least 1."""
    rows = rows_of(scope, main_loader(scope))
    if rows is None or not len(rows):
        return 1
    # rounded: the window's rim may cut one
    return max(1, round(scope.per_step(int(scope.window.contains(rows.end).sum()))))
