"""From raw columns to a Timeline's tables: strings, times that lie, sorting, joining. Shared by the SQLite readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gpudiag.intervals import Int64
from gpudiag.read._columns import ABSENT, Array, compact
from gpudiag.timeline import Bool, Repair, Table

# Wall-clock ns reach 4e18 in the year 2096; what lies beyond is no time, and sums of it would overflow.
FARTHEST_NS = 4 * 10**18
# No profiler records a single operation of a week; a start of 0 with a wall-clock end does look like decades.
LONGEST_NS = 7 * 24 * 3600 * 10**9
# Events may lie a little outside the stated recording (buffers flushed late, clock conversion).
_SLACK_NS = 60 * 10**9

_DTYPES = {"Int64": np.int64, "Int32": np.int32, "Int8": np.int8, "Float32": np.float32, "Bool": np.bool_}
_T = TypeVar("_T", bound=Table)


class Strings:
    """Each text once, with its code."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, text: str) -> int:
        code = self._codes.setdefault(text, len(self.texts))
        if code == len(self.texts):
            self.texts.append(text)
        return code


def distinct(values: Array) -> list[int]:
    """The different values of an integer column, rising. Linear for small non-negative ids, as StringIds are."""
    if not values.size:
        return []
    low, high = int(values.min()), int(values.max())
    if high - low > 20_000_000:
        return [int(v) for v in np.unique(values)]
    seen = np.zeros(high - low + 1, bool)
    seen[np.asarray(values, np.int64) - low] = True
    return [int(v) + low for v in np.flatnonzero(seen)]


def recode(values: Array, mapping: Mapping[int, int], dtype: type[np.signedinteger] = np.int32) -> Array:
    """mapping[value] for each value; every value must be in the mapping."""
    keys = np.array(sorted(mapping), np.int64)
    codes = np.array([mapping[int(k)] for k in keys], dtype)
    if not keys.size:
        return np.empty(0, dtype)
    if keys[-1] - keys[0] <= 20_000_000:
        table = np.zeros(int(keys[-1] - keys[0]) + 1, dtype)
        table[keys - keys[0]] = codes
        return np.asarray(table[np.asarray(values, np.int64) - keys[0]], dtype)
    return np.asarray(codes[np.searchsorted(keys, values)], dtype)


def check_times(
    what: str, start: Int64, end: Int64, recorded: tuple[int, int] | None
) -> tuple[Bool | None, list[Repair]]:
    """Which rows have times that can be true (None = all), and what is said of the others.

    recorded: the stated extent of the recording; rows far outside are left out only when nearly all others lie inside.
    """
    total = int(start.size)
    if not total:
        return None, []
    repairs = []
    keep = np.ones(total, bool)

    def leave_out(bad: Bool, why: str) -> None:
        count = int(np.count_nonzero(bad & keep))
        if count:
            repairs.append(Repair(f"{what} left out: {why}", count, total, lost=True))
            keep[bad] = False

    first, last = int(start.min()), int(end.max())
    if first == ABSENT or int(end.min()) == ABSENT:
        leave_out((start == ABSENT) | (end == ABSENT), "no start or no end")
    if first <= 0:
        leave_out((start == 0) & (end == 0), "time stamps of zero, which mean that none was taken")
    if first < -FARTHEST_NS or last > FARTHEST_NS:
        far = (start < -FARTHEST_NS) | (start > FARTHEST_NS) | (end < -FARTHEST_NS) | (end > FARTHEST_NS)
        leave_out(far, "times beyond any clock")
    leave_out(end < start, "an end before its start")
    if last - max(first, -FARTHEST_NS) > LONGEST_NS:
        sane = keep & (end >= start)
        leave_out(sane & (np.where(sane, end, 0) - np.where(sane, start, 0) > LONGEST_NS), "longer than a week")
    if recorded is not None:
        low, high = recorded[0] - _SLACK_NS, recorded[1] + _SLACK_NS
        if first < low or last > high:
            outside = keep & ((start < low) | (end > high))
            if np.count_nonzero(outside) * 100 < np.count_nonzero(keep):
                leave_out(outside, "far outside the recording")
    return (None if not repairs else keep), repairs


def constant(value: int | float | bool, size: int, dtype: npt.DTypeLike) -> Array:
    """A column that holds one value and takes no memory."""
    return np.broadcast_to(np.asarray(value, dtype), size)


def order_of(start: Int64, end: Int64) -> npt.NDArray[np.intp] | None:
    """The index that sorts by (start, end), equal rows in their given order; None when sorted already."""
    if start.size < 2 or (not bool((start[1:] < start[:-1]).any()) and not _ties_out_of_order(start, end)):
        return None
    # Stable sorting of one nearly sorted key merges runs; lexsort of two would cost ten times as much.
    order = np.argsort(start, kind="stable")
    return np.lexsort((end, start)) if _ties_out_of_order(start[order], end[order]) else order


def _ties_out_of_order(start: Int64, end: Int64) -> bool:
    """Whether two neighbours of one start stand with the later end first."""
    ties = np.flatnonzero(start[1:] == start[:-1])
    return bool((end[ties + 1] < end[ties]).any())


def assemble(table: type[_T], parts: Sequence[dict[str, Array | int | float]], counts: Sequence[int]) -> _T:
    """One sorted table of several parts; each gives a column or a constant for every field. Parts are emptied on the way."""
    total = sum(counts)
    dtypes = {f.name: _DTYPES[str(f.type)] for f in fields(table)}  # type: ignore[arg-type]

    def joined(name: str) -> Array:
        values = [part.pop(name) for part in parts]
        dtype = dtypes[name]
        used = [v for v, n in zip(values, counts, strict=True) if n]
        if not any(isinstance(v, np.ndarray) for v in used):
            same = {repr(v) for v in used}
            if len(same) <= 1:
                return constant(used[0] if used else 0, total, dtype)  # type: ignore[arg-type]
        if len(used) == 1:
            return np.asarray(used[0], dtype)
        out: Array = np.empty(total, dtype)
        at = 0
        for value, count in zip(values, counts, strict=True):
            out[at : at + count] = value
            at += count
        return out

    start, end = joined("start"), joined("end")
    order = order_of(np.asarray(start, np.int64), np.asarray(end, np.int64))

    def sorted_(column: Array) -> Array:
        if order is None:
            return column
        return constant(column[0], total, column.dtype) if column.strides == (0,) else column[order]

    columns = {"start": sorted_(start), "end": sorted_(end)}
    del start, end
    rest = [name for name in dtypes if name not in columns]
    # numpy gathers without the GIL; two at a time, because each column in the making is memory on top.
    with ThreadPoolExecutor(max_workers=2) as pool:
        columns |= zip(rest, pool.map(lambda name: sorted_(compact(joined(name))), rest), strict=True)
    return table(**columns)
