"""What the loader's time goes into: transforms, storage, helper threads, the way to the training process, shared memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpudiag.intervals import Int64
from gpudiag.metrics.loading import NO_LOADER, main_loader, rows_of, window_batches
from gpudiag.metrics.make import PROFILE, PROFILE_LONGER, Value, missing, value
from gpudiag.scope import Scope
from gpudiag.timeline import LoaderBatches, LoaderInfo

PROFILE_TRANSFORMS = "gpudiag profile --transforms SCRIPT"
LEAST = 3  # batches that a mean is of
LEAST_STATES = 10  # samples of worker processes that a share is of
NAMES = (
    "loader_transform_time", "slowest_transform_time", "loader_read_bytes", "loader_disk_wait", "loader_helper_share",
    "loader_busy_cpus", "worker_threads", "worker_cpus", "loader_workers_working", "loader_transfer_time", "loader_unpickle_time",
    "loader_unpickle_lost", "loader_message_bytes", "first_epoch_fetch_time", "later_epochs_fetch_time", "first_epoch_read_bytes",
    "later_epochs_read_bytes", "window_in_first_epoch", "shm_size", "shm_free", "shm_needed", "shm_errors",
)  # fmt: skip


def measure(scope: Scope) -> Iterator[Value]:
    loader = main_loader(scope)
    rows = rows_of(scope, loader)
    if loader is None or rows is None:
        for name in NAMES:
            yield missing(name, NO_LOADER, PROFILE)
        return
    fetched = rows.take((rows.fetch_start >= 0) & (rows.fetch_end >= 0))
    yield from _transforms(window_batches(scope, fetched), loader)
    yield from _storage(scope, fetched)
    yield from _workers(scope, fetched, loader)
    yield from _handing_over(scope, window_batches(scope, rows), loader)
    yield from _epochs(scope, fetched, loader)
    yield from _shared_memory(scope, loader)


def _mean(name: str, column: Int64, reason: str) -> Value:
    known = column[column >= 0]
    if known.size < LEAST:
        return missing(name, reason, PROFILE)
    return value(name, float(known.mean()), "loader records")


def _transforms(fetched: LoaderBatches, loader: LoaderInfo) -> Iterator[Value]:
    yield _mean("loader_transform_time", fetched.transform_ns, "the dataset's transforms are no Compose that is known")
    if loader.transforms and len(fetched):
        share = loader.transforms[0][2] / max(1, sum(length for _, _, length in loader.transforms))
        whole = fetched.transform_ns[fetched.transform_ns >= 0].mean() if (fetched.transform_ns >= 0).any() else 0
        yield value("slowest_transform_time", float(share * whole), "loader records")
    else:
        yield missing("slowest_transform_time", "transforms were not timed one by one", PROFILE_TRANSFORMS)


def _storage(scope: Scope, fetched: LoaderBatches) -> Iterator[Value]:
    inside = fetched.take(scope.window.contains(fetched.fetch_end))
    read = inside.read_bytes[inside.read_bytes >= 0]
    if read.size:
        yield value("loader_read_bytes", float(read.mean()), "loader records")
    else:
        yield missing("loader_read_bytes", "the system does not count what a thread reads from storage", PROFILE)
    states = scope.timeline.host.worker_states
    samples = sum(states.values())
    if samples >= LEAST_STATES:
        yield value("loader_disk_wait", states.get("D", 0) / samples, "/proc, sampled while recording")
    else:
        yield missing("loader_disk_wait", "no or too few samples of worker processes were taken", PROFILE_LONGER)


def _workers(scope: Scope, fetched: LoaderBatches, loader: LoaderInfo) -> Iterator[Value]:
    known = fetched.take((fetched.process_cpu_ns > 0) & (fetched.cpu_ns >= 0) & (fetched.worker >= 0))
    if len(known) >= LEAST:
        share = max(0.0, 1 - float(known.cpu_ns.sum()) / float(known.process_cpu_ns.sum()))
        yield value("loader_helper_share", share, "loader records")
        busy = float(known.process_cpu_ns.sum()) / max(1, int((known.fetch_end - known.fetch_start).sum()))
        yield value("loader_busy_cpus", busy * max(1, loader.num_workers), "loader records")
    else:
        for name in ("loader_helper_share", "loader_busy_cpus"):
            yield missing(name, "the CPU time of the workers' threads was not recorded", PROFILE)
    for name, number in (("worker_threads", loader.worker_os_threads), ("worker_cpus", loader.worker_cpus)):
        if number is None:
            yield missing(name, "no worker fetched two batches while it was recorded", PROFILE)
        else:
            yield value(name, number, "loader records")
    inside = fetched.take(scope.window.contains(fetched.end) & (fetched.worker >= 0))
    if loader.num_workers and len(inside) >= 2 * loader.num_workers:
        busiest = np.unique(inside.worker, return_counts=True)[1].max()
        yield value("loader_workers_working", len(inside) / float(busiest), "loader records")
    else:
        yield missing("loader_workers_working", "fewer than two batches a worker were recorded", PROFILE_LONGER)


def _handing_over(scope: Scope, rows: LoaderBatches, loader: LoaderInfo) -> Iterator[Value]:
    reason = "how batches came from the workers was not recorded" if loader.num_workers else "the loader has no workers"
    yield _mean("loader_transfer_time", rows.transfer_ns, "no batch was waited for, or " + reason)
    yield _mean("loader_unpickle_time", rows.unpickle_ns, reason)
    yield _mean("loader_message_bytes", rows.message_bytes, reason)
    known = rows.take(rows.unpickle_ns >= 0)
    if len(known):
        lost = scope.input_lost
        under = lost.covered_in(np.maximum(known.start, known.end - known.unpickle_ns), known.end)
        spent = 0.0 if loader.pin_memory else float(under.sum())
        yield value("loader_unpickle_lost", scope.per_step(spent), "loader records, account")
    else:
        yield missing("loader_unpickle_lost", reason, PROFILE)


def _epochs(scope: Scope, fetched: LoaderBatches, loader: LoaderInfo) -> Iterator[Value]:
    # the first batches of a worker hold its own start: imports, opening files
    settled = fetched.take(fetched.batch >= max(1, loader.num_workers))
    first, later = settled.take(settled.epoch == 0), settled.take(settled.epoch > 0)
    reason = "the loader was not iterated twice, for some batches each"
    for epochs, rows in (("first_epoch", first), ("later_epochs", later)):
        if len(later) < LEAST or len(first) < LEAST:
            yield missing(f"{epochs}_fetch_time", reason, PROFILE)
            yield missing(f"{epochs}_read_bytes", reason, PROFILE)
            continue
        yield value(f"{epochs}_fetch_time", float(np.median(rows.fetch_end - rows.fetch_start)), "loader records")
        read = rows.read_bytes[rows.read_bytes >= 0]
        if read.size:
            yield value(f"{epochs}_read_bytes", float(read.mean()), "loader records")
        else:
            yield missing(f"{epochs}_read_bytes", "the system does not count what a thread reads from storage", PROFILE)
    inside = fetched.epoch[scope.window.contains(fetched.end)]
    if inside.size:
        yield value("window_in_first_epoch", int(np.median(inside) == 0), "loader records")
    else:
        yield missing("window_in_first_epoch", "no batch came in the recorded window", PROFILE_LONGER)


def _shared_memory(scope: Scope, loader: LoaderInfo) -> Iterator[Value]:
    for name, size in (("shm_size", loader.shm_bytes), ("shm_free", loader.shm_free_bytes)):
        if size is None:
            yield missing(name, "the machine has no /dev/shm, or it was not recorded", PROFILE)
        else:
            yield value(name, size, "loader records")
    if loader.batch_bytes is not None and loader.num_workers:
        # what the workers have prepared, and the batch that the training still holds
        batches = loader.num_workers * (loader.prefetch_factor or 2) + 1
        yield value("shm_needed", loader.batch_bytes * batches, "loader records")
    else:
        yield missing("shm_needed", "the size of a worker's batch was not recorded", PROFILE)
    yield value("shm_errors", sum(bool(info.shm_error) for info in scope.timeline.loaders), "loader records")
