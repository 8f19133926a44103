"""The DataLoaders of a process, out of its own records and its workers' (read/loader_log.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpudiag.intervals import Int64
from gpudiag.read.loader_join import join_batches
from gpudiag.read.loader_log import Process, ProcessLog
from gpudiag.timeline import LoaderBatches, LoaderInfo


def loader_records(log: ProcessLog, process: Process) -> tuple[tuple[LoaderInfo, ...], LoaderBatches]:
    built = process.of("loader")
    workers = [other for other in log.processes if other.pid != process.pid and other.role in ("forked", "spawned")]
    batches = join_batches(
        process.of("batch"),
        {process.pid: process.of("fetch"), **{worker.pid: worker.of("fetch") for worker in workers}},
        process.of("pin"),
        process.pid,
    )
    infos = []
    for record in built:
        number = record["l"]
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
            )
        )
    return tuple(infos), batches


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
