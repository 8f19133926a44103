"""Columns of a SQLite recording as numpy arrays, at the speed of SQLite itself, from files that may be damaged or altered.

Large tables go through the ADBC driver (Arrow batches, no Python object a row), split by rowid over the cores; small ones
through `Database.rows`. Everything that SQLite refuses becomes GpudiagError.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import adbc_driver_manager
import adbc_driver_sqlite
import nanoarrow
import numpy as np
import numpy.typing as npt
from nanoarrow.c_array import CArray

from gpudiag.read._sqlite import Database, integer, quoted

ABSENT = np.iinfo(np.int64).min  # what a time that is NULL or not a number reads as
Array = npt.NDArray[Any]
Intern = Callable[[bytes], int]

_BATCH_ROWS = (
    16384  # 2 M rows x 13 columns: 1.10 s with the driver's default of 1024, 0.98 s with this, 1.16 s with 262144
)
_CHUNK_ROWS = 500_000  # small enough to balance two cores, large enough that opening the file again costs nothing
_SMALLEST_ROW = 8  # bytes; no row with a start and an end is smaller, so a file cannot hold more rows than size / this


@dataclass(frozen=True)
class Column:
    """One output column. sources: recorded columns; combine: `first` that is not NULL, `*` of all, or `+` of those there are.

    dtype: of the result; values that do not fit read as `missing`, as do NULL and text. intern: for text, gives its code.
    """

    sources: tuple[str, ...]
    dtype: type[np.generic] = np.int64
    missing: int = -1
    combine: str = "first"
    intern: Intern | None = None


@dataclass(frozen=True)
class Job:
    """Columns of one table to fetch. where: an SQL condition without parameters, or empty."""

    table: str
    columns: Mapping[str, Column]
    where: str = ""


def fetch(database: Database, jobs: Sequence[Job]) -> list[dict[str, Array]]:
    """The columns of every job, as arrays of its table's length in the table's order. Tables are read side by side."""
    with ThreadPoolExecutor(max_workers=min(8, len(os.sched_getaffinity(0)))) as pool:
        plans = [_Plan(database, job, strict=False) for job in jobs]
        running = [[pool.submit(plan.read, chunk) for chunk in plan.chunks] for plan in plans]
        results = []
        for plan, futures in zip(plans, running, strict=True):
            counts = []
            failed = False
            for future in futures:
                try:
                    counts.append(future.result())
                except (adbc_driver_manager.Error, _RefusedError, OSError):
                    failed = True
            if failed:
                # A text, a real or a blob among the integers, or damage: read again with every value's type checked.
                plan = _Plan(database, plan.job, strict=True)
                try:
                    counts = list(pool.map(plan.read, plan.chunks))
                except (adbc_driver_manager.Error, _RefusedError, OSError) as error:
                    raise database.damaged(error) from None
            results.append(plan.finish(counts))
    return results


class _RefusedError(Exception):
    """The stream ended in an error, or a column came in a type that is not the expected one."""


@dataclass(frozen=True)
class _Chunk:
    condition: str
    offset: int
    capacity: int


class _Plan:
    """Where each chunk of a job's rows goes: the arrays are allocated once and filled side by side."""

    def __init__(self, database: Database, job: Job, strict: bool) -> None:
        self.database, self.job = database, job
        self.table = quoted(job.table)
        have = database.tables[job.table]
        self.select = {name: _expression(column, have, strict) for name, column in job.columns.items()}
        self.chunks = self._split()
        total = sum(chunk.capacity for chunk in self.chunks)
        self.out = {name: np.empty(total, column.dtype) for name, column in job.columns.items()}

    def _split(self) -> list[_Chunk]:
        most = self.database.size // _SMALLEST_ROW + 1
        where = f" WHERE {self.job.where}" if self.job.where else ""
        rowids = self.database.rowids(self.job.table)
        # The order in which the table lies: stating it costs nothing, and an index that someone added cannot change it.
        self.order = " ORDER BY rowid" if rowids else ""
        low, high = rowids or (0, most)
        if low is None:
            return []
        dense = isinstance(low, int) and isinstance(high, int) and 0 <= high - low < most
        if not dense or where or any(column.intern for column in self.job.columns.values()):
            # Codes are given in the order of the rows, and rows of few rowids cannot be placed in advance: one chunk.
            rows = self.database.rows(f"SELECT count(*) FROM {self.table}{where}")[0][0]
            return [_Chunk(where, 0, integer(rows))] if rows else []
        assert isinstance(low, int) and isinstance(high, int)
        return [
            _Chunk(
                f" WHERE rowid BETWEEN {at} AND {min(at + _CHUNK_ROWS - 1, high)}",
                at - low,
                min(_CHUNK_ROWS, high - at + 1),
            )
            for at in range(low, high + 1, _CHUNK_ROWS)
        ]

    def read(self, chunk: _Chunk) -> int:
        """Fill the chunk's part of the arrays; the number of rows."""
        columns = [(self.out[name], column) for name, column in self.job.columns.items()]
        listed = ", ".join(f"{sql} AS c{i}" for i, sql in enumerate(self.select.values()))
        row = 0
        sql = f"SELECT {listed} FROM {self.table}{chunk.condition}{self.order}"
        for batch in _batches(self.database.uri, sql):
            if row + batch.length > chunk.capacity:
                raise _RefusedError("more rows than the table's index says")
            view = batch.view()
            at = slice(chunk.offset + row, chunk.offset + row + batch.length)
            for i, (out, column) in enumerate(columns):
                out[at] = _values(view.child(i), batch.length, column)
            row += batch.length
        return row

    def finish(self, counts: Sequence[int]) -> dict[str, Array]:
        """The filled arrays, closed up where a chunk had fewer rows than rowids."""
        total = sum(counts)
        if any(count < chunk.capacity for count, chunk in zip(counts, self.chunks, strict=True)):
            for out in self.out.values():
                at = 0
                for count, chunk in zip(counts, self.chunks, strict=True):
                    out[at : at + count] = out[chunk.offset : chunk.offset + count]
                    at += count
        return {name: compact(self.out.pop(name)[:total]) for name in self.job.columns}


def compact(column: Array) -> Array:
    """The same column, without memory of its own where all its values are equal."""
    if column.size > 1 and column[0] == column[-1] and bool((column == column[0]).all()):
        return np.broadcast_to(column[0].copy(), column.size)
    return column


def _expression(column: Column, have: Sequence[str], strict: bool) -> str:
    names = [quoted(c) for c in column.sources if c in have]
    if column.intern:
        return f"CAST(coalesce({names[0]}, '') AS TEXT)" if names else "''"
    if not names or (column.combine == "*" and len(names) < len(column.sources)):
        return "NULL"
    terms = [_checked(name) for name in names] if strict else names
    if len(terms) == 1:
        return terms[0]
    if column.combine == "first":
        return f"coalesce({', '.join(terms)})"
    combined = column.combine.join(terms)
    # Products of damaged numbers overflow into reals.
    return f"CASE WHEN typeof({combined}) = 'integer' THEN {combined} END" if strict else combined


def _checked(name: str) -> str:
    return (
        f"CASE typeof({name}) WHEN 'integer' THEN {name} WHEN 'real' THEN CAST({name} AS INTEGER) WHEN 'text' THEN "
        f"CASE WHEN {name} GLOB '[0-9]*' AND NOT {name} GLOB '*[^0-9]*' THEN CAST({name} AS INTEGER) END END"
    )


class _ArrowStream(ctypes.Structure):
    """The head of the Arrow C stream interface's ArrowArrayStream."""

    _fields_ = (
        ("get_schema", ctypes.c_void_p),
        ("get_next", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)),
        ("get_last_error", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)),
    )


def _batches(uri: str, sql: str):  # type: ignore[no-untyped-def]
    """Arrow batches of a query.

    get_next is called through ctypes because that releases the GIL and nanoarrow's own does not: two threads then read
    2 M rows x 13 columns in 0.57 s instead of 1.05 s.
    """
    with (
        adbc_driver_sqlite.connect(uri) as driver,
        adbc_driver_manager.AdbcConnection(driver) as connection,
        adbc_driver_manager.AdbcStatement(connection) as statement,
    ):
        statement.set_options(**{adbc_driver_sqlite.StatementOptions.BATCH_ROWS.value: str(_BATCH_ROWS)})
        statement.set_sql_query(sql)
        handle, _ = statement.execute_query()
        stream = nanoarrow.c_array_stream(handle)
        try:
            schema = stream.get_schema()
        except RuntimeError as error:  # NanoarrowException, which nanoarrow does not export
            raise _RefusedError(str(error)) from None
        address = stream._addr()
        raw = _ArrowStream.from_address(address)
        try:
            while True:
                batch = CArray.allocate(schema)
                if raw.get_next(address, batch._addr()):
                    raise _RefusedError((raw.get_last_error(address) or b"").decode("utf-8", "replace"))
                if not batch.is_valid():
                    return
                yield batch
        finally:
            stream.release()


def _values(view, length: int, column: Column) -> Array:  # type: ignore[no-untyped-def]
    """One column of a batch: int64 values with what is missing filled in, or codes of its texts."""
    if column.intern:
        if view.n_buffers != 3:
            raise _RefusedError("a text column is not text")
        ends = np.frombuffer(view.buffer(1), np.int32)[: length + 1].tolist()
        text = bytes(view.buffer(2))
        intern = column.intern
        return np.array([intern(text[a:b]) for a, b in pairwise(ends)], np.int64)
    if view.storage_type != "int64":
        raise _RefusedError("a number column holds text")
    values = np.frombuffer(view.buffer(1), np.int64)[:length]
    if view.null_count:
        valid = np.unpackbits(np.frombuffer(view.buffer(0), np.uint8), count=length, bitorder="little")
        values = np.where(valid, values, column.missing)
    if column.dtype is not np.int64 and length:
        bounds = np.iinfo(column.dtype)  # type: ignore[type-var]
        if values.min() < bounds.min or values.max() > bounds.max:
            values = np.where((values < bounds.min) | (values > bounds.max), column.missing, values)
    return values
