"""Which fetch in which worker made the batch that the main process waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpudiag.timeline import LoaderBatches

Record = dict[str, Any]
COLUMNS = (
    *("start", "end", "fetch_start", "fetch_end", "dataset_ns", "collate_ns", "pin_ns", "cpu_ns", "io_ns"),
    *("worker", "worker_pid", "epoch", "batch", "loader"),
    *("process_cpu_ns", "read_bytes", "transform_ns", "transfer_ns", "unpickle_ns", "message_bytes"),
)


def join_batches(
    batches: Sequence[Record], fetches: Mapping[int, Sequence[Record]], pins: Sequence[Record], main_pid: int
) -> LoaderBatches:
    """One row a delivered batch, by start. Record kinds as in read/loader_log.py; fetches: by pid; times as recorded.

    A worker numbers its batches per epoch, and a persistent worker makes a new fetcher each epoch, so a fetch is known by
    (pid, which of the pid's fetchers, batch number). In the main process it is the fetch inside the wait.
    """
    by_key = {
        (pid, order, record["b"]): (record, pid)
        for pid, records in fetches.items()
        for order, record in _with_order(records)
        if record["w"] >= 0
    }
    own = [record for record in fetches.get(main_pid, ()) if record["w"] < 0]
    pinned: dict[int, list[Record]] = defaultdict(list)
    for record in pins:
        pinned[record["b"]].append(record)
    epochs: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    pids_of: dict[int, Sequence[int]] = {}
    rows: list[tuple[int, ...]] = []
    position = 0
    for batch in batches:
        epoch = epochs[batch["l"]].setdefault((batch["it"], batch["e"]), len(epochs[batch["l"]]))
        pids_of[batch["it"]] = batch.get("pids") or pids_of.get(batch["it"], ())
        found: tuple[Record, int] | None = None
        if batch["b"] >= 0:
            candidates = (by_key.get((pid, max(batch["e"], 0), batch["b"])) for pid in pids_of[batch["it"]])
            found = next((candidate for candidate in candidates if candidate), None)
        else:
            while position < len(own) and own[position]["e"] < batch["s"]:
                position += 1
            if position < len(own) and own[position]["s"] <= batch["t"]:
                found = own[position], main_pid
                position += 1
        fetch, pid = found or (None, -1)
        pin = _pin(pinned.get(batch["b"], ()), batch, fetch)
        rows.append((batch["s"], batch["t"], *_fetch_columns(fetch), pin, *_cpu_columns(fetch), *_who(fetch, pid)))
        rows[-1] += (epoch, batch["n"], batch["l"], *_work_columns(fetch), *_transfer_columns(batch, fetch))
    table = np.array(rows, np.int64).reshape(-1, len(COLUMNS))
    table = table[np.lexsort((table[:, 1], table[:, 0]))]
    return LoaderBatches(**{name: table[:, column] for column, name in enumerate(COLUMNS)})


def _with_order(records: Sequence[Record]) -> list[tuple[int, Record]]:
    """Each fetch with the ordinal of its fetcher in that process: 0 for the first that fetched anything."""
    order: dict[int, int] = {}
    return [(order.setdefault(record["f"], len(order)), record) for record in records]


def _fetch_columns(fetch: Record | None) -> tuple[int, int, int, int]:
    if fetch is None:
        return -1, -1, -1, -1
    collate = fetch["c"]
    return fetch["s"], fetch["e"], fetch["e"] - fetch["s"] - max(collate, 0), collate


def _cpu_columns(fetch: Record | None) -> tuple[int, int]:
    """CPU time, and the time that was neither on a CPU nor waiting for one: sleeping in I/O (or on a lock)."""
    if fetch is None:
        return -1, -1
    if fetch["q"] < 0:
        return fetch["cpu"], -1
    return fetch["cpu"], max(0, fetch["e"] - fetch["s"] - fetch["cpu"] - fetch["q"])


def _work_columns(fetch: Record | None) -> tuple[int, int, int]:
    return (-1, -1, -1) if fetch is None else (fetch.get("pc", -1), fetch.get("rd", -1), fetch.get("x", -1))


def _transfer_columns(batch: Record, fetch: Record | None) -> tuple[int, int, int]:
    """A message that was ready before it was asked for has lain in the pipe: how long it took to get there is not known."""
    arrived = batch.get("r", -1)
    waited_for = fetch is not None and arrived >= 0 and batch["s"] <= fetch["e"] <= arrived
    return arrived - fetch["e"] if waited_for and fetch else -1, batch.get("u", -1), batch.get("m", -1)


def _who(fetch: Record | None, pid: int) -> tuple[int, int]:
    return (-1, -1) if fetch is None else (fetch["w"], pid)


def _pin(candidates: Sequence[Record], batch: Record, fetch: Record | None) -> int:
    earliest = fetch["e"] if fetch is not None else batch["s"]
    for record in candidates:
        if record["s"] >= earliest and record["e"] <= batch["t"]:
            return int(record["e"] - record["s"])
    return -1
