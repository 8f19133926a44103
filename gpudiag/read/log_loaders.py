"""The DataLoaders of a process, out of its own records and its workers' (read/loader_log.py)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from gpudiag.intervals import Int64
from gpudiag.read.loader_join import join_batches
from gpudiag.read.loader_log import Process, ProcessLog, Record
from gpudiag.timeline import LoaderBatches, LoaderInfo


def loader_records(log: ProcessLog, process: Process) -> tuple[tuple[LoaderInfo, ...], LoaderBatches]:
    """How each DataLoader was built and what its workers were like, and one row a batch; times as recorded."""
    workers = [other for other in log.processes if other.pid != process.pid and other.role in ("forked", "spawned")]
    fetches = {worker.pid: worker.of("fetch") for worker in (process, *workers)}
    batches = join_batches(process.of("batch"), fetches, process.of("pin"), process.pid)
    of_loader: dict[int, set[int]] = defaultdict(set)
    for pid, number in zip(batches.worker_pid.tolist(), batches.loader.tolist(), strict=True):
        of_loader[number].add(pid)
    infos = []
    for record in process.of("loader"):
        number = record["l"]
        mine = [
            worker.of("worker")[-1] for worker in workers if worker.pid in of_loader[number] and worker.of("worker")
        ]
        shm = record.get("shm") or (None, None)
        infos.append(
            LoaderInfo(
                loader=number,
                where=record["where"],
                num_workers=record["num_workers"],
                batch_size=record["batch_size"],
                pin_memory=record["pin_memory"],
                prefetch_factor=record["prefetch_factor"],
                persistent_workers=record["persistent_workers"],
                start_method=record["start_method"],
                dataset=record["dataset"],
                dataset_length=record["length"],
                in_memory=record["in_memory"],
                batches=int((batches.loader == number).sum()),
                worker_threads=_largest(mine, "threads") or 1,
                worker_os_threads=_largest(mine, "tasks"),
                worker_cpus=len({cpu for record in mine for cpu in record.get("cpus", ())}) or None,
                batch_bytes=_batch_bytes(process, number),
                shm_bytes=shm[0],
                shm_free_bytes=shm[1],
                shm_error=_shm_error(process, number),
                transforms=_transforms([record for pid in of_loader[number] for record in fetches.get(pid, ())]),
            )
        )
    return tuple(infos), batches


def _largest(records: Sequence[Record], name: str) -> int | None:
    return max((record[name] for record in records if name in record), default=None)


def _batch_bytes(process: Process, loader: int) -> int | None:
    sizes = [record["sz"] for record in process.of("batch") if record["l"] == loader and "sz" in record]
    return int(median(sizes)) if sizes else None


def _shm_error(process: Process, loader: int) -> str:
    """An error that struck outside of every loader's next belongs to whichever loader was in use: to the last one asked."""
    last = max(process.of("batch"), key=lambda record: record["t"], default={"l": -1})["l"]
    for record in process.of("shm_error"):
        if record["l"] == loader or (record["l"] < 0 and loader == last):
            return str(record["said"])
    return ""


def _transforms(fetches: Sequence[Record]) -> tuple[tuple[str, int, int], ...]:
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for record in fetches:
        for name, (calls, length) in record.get("xs", {}).items():
            found[name][0] += calls
            found[name][1] += length
    longest = sorted(found.items(), key=lambda item: (-item[1][1], item[0]))
    return tuple((name, calls, length) for name, (calls, length) in longest)


def worker_states(process: Process) -> Mapping[str, int]:
    """Samples of the worker processes in the last recorded window, by state."""
    return Counter(process.of("states")[-1]["seen"]) if process.of("states") else {}


def shifted(batches: LoaderBatches, offset: int) -> LoaderBatches:
    def moved(column: Int64) -> Int64:
        return np.where(column >= 0, column + offset, -1)

    return replace(
        batches,
        start=batches.start + offset,
        end=batches.end + offset,
        fetch_start=moved(batches.fetch_start),
        fetch_end=moved(batches.fetch_end),
    )
