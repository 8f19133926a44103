"""Events to columns, piece by piece: the little that is done in Python for each event is done here."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpudiag.intervals import Int64
from gpudiag.read._kineto_events import NO_ARGS, Args, Event, Instant, MemoryArgs
from gpudiag.read._kineto_times import INVALID, exact_ns
from gpudiag.timeline import Bool

# The category of an event to the table it goes to. Capitals: until 2021.
TABLES = {
    "cpu_op": "cpu_op",
    "Operator": "cpu_op",
    "user_annotation": "range",
    "cuda_runtime": "api",
    "cuda_driver": "api",
    "Runtime": "api",
    "kernel": "kernel",
    "Kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "Memcpy": "memcpy",
    "gpu_memset": "memset",
    "Memset": "memset",
    "python_function": "python",
    "overhead": "overhead",
    "Overhead": "overhead",
}
GPU_TABLES = ("kernel", "memcpy", "memset")
NO_TIME = "events without a time (ts 0)"
BAD_TIME = "events whose time or length is no number"
NEGATIVE = "events of negative length, taken as 0"

# Operators whose input shapes say whether a matrix product, convolution or attention fits the tensor cores; the shapes of
# all others are not kept.
_SHAPED = re.compile(r"(?:^|::)_?(?:addmm|mm|bmm|baddbmm|matmul|linear|scaled_mm)|conv|attention")
_DIGITS = re.compile(r"0[xX][0-9a-fA-F]{1,15}|[1-9]\d{0,17}|0")


class Codes(dict[str, int]):
    """Text to its number, given out in the order of first sight; texts holds them in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def __missing__(self, text: str) -> int:
        code = self[text] = len(self.texts)
        self.texts.append(text)
        return code

    def distinct(self, codes: npt.NDArray[Any]) -> dict[int, str]:
        """The distinct codes of a column and their texts."""
        return {int(code): self.texts[code] for code in np.flatnonzero(np.bincount(codes))}


class Columns:
    """The columns of all tables while the file is read.

    names: text to code. parts[table][column]: a list of arrays, one a piece. seen: events a category. repairs: rows not
    taken as recorded. window: the instants that Kineto writes at the start and the end of a recording, ns. call_stacks: whether
    operators carry Python stacks (2021; later traces have python_function events).
    """

    def __init__(self) -> None:
        self.names = Codes()
        self.parts: dict[str, dict[str, list[npt.NDArray[np.generic]]]] = defaultdict(lambda: defaultdict(list))
        self.seen: Counter[str] = Counter()
        self.repairs: Counter[str] = Counter()
        self.window: list[int] = []
        self.call_stacks = False
        self._wanted: dict[int, bool] = {}

    def add(self, events: Iterable[object]) -> None:
        """Append the events of one piece. Whole columns at a time: a call into numpy costs as much as 50 events."""
        by_category: dict[str, list[Event]] = defaultdict(list)
        memory: list[tuple[Instant, MemoryArgs]] = []
        for event in events:
            if type(event) is Event:
                by_category[event.cat].append(event)
            elif type(event) is Instant and event.name == "[memory]":
                args = event.args
                if args is not None and args.kind > 0 and args.device >= 0 and args.reserved >= args.allocated >= 0:
                    memory.append((event, args))
            elif type(event) is Instant and (
                event.name == "Record Window End" or event.name.startswith("Iteration Start")
            ):
                self.window += [int(ns) for ns in exact_ns([event.ts]) if ns not in (INVALID, 0)]
        if memory:
            self._append_memory(memory)
        rows: list[Event] = []
        spans: list[tuple[str, slice]] = []
        for category, found in by_category.items():
            self.seen[category] += len(found)
            if category in TABLES:
                spans.append((TABLES[category], slice(len(rows), len(rows) + len(found))))
                rows += found
        if rows:
            self._append(rows, spans)

    def _append_memory(self, events: list[tuple[Instant, MemoryArgs]]) -> None:
        start = exact_ns([event.ts for event, _ in events])
        usable = (start != INVALID) & (start > 0)
        columns = {
            "start": start,
            "device": np.array([args.device for _, args in events], np.int64),
            "allocated": np.array([args.allocated for _, args in events], np.int64),
            "reserved": np.array([args.reserved for _, args in events], np.int64),
        }
        for column, values in columns.items():
            self.parts["memory"][column].append(values[usable])

    def _append(self, rows: list[Event], spans: list[tuple[str, slice]]) -> None:
        count = len(rows)
        times = exact_ns([row.ts for row in rows] + [row.dur for row in rows])
        start, length = times[:count], times[count:]
        names = self.names
        columns: dict[str, npt.NDArray[np.generic]] = {
            "start": start,
            "end": start + np.maximum(length, 0),
            "name": np.array([names[row.name] for row in rows], np.int32),
            "process": self._ids([row.pid for row in rows]),
            "thread": self._ids([row.tid for row in rows]),
        }
        keep = self._usable(start, length)
        for table, span in spans:
            new = {column: values[span] for column, values in columns.items()}
            if table == "cpu_op":
                new["shapes"] = self._shapes(rows[span], new["name"])
            elif table == "api" or table in GPU_TABLES:
                args = [row.args or NO_ARGS for row in rows[span]]
                new["correlation"] = np.array([a.correlation for a in args], np.int64)
                if table != "api":
                    new |= _gpu_columns(args)
            for column, values in new.items():
                self.parts[table][column].append(values if keep is None else values[keep[span]])

    def _usable(self, start: Int64, length: Int64) -> Bool | None:
        """Which rows have a time; None when all have. Counts the others, and negative lengths."""
        if start.min() > 0 and length.min() >= 0:
            return None
        numbers = (start != INVALID) & (length != INVALID)
        empty = numbers & (start == 0) & (length == 0)
        self.repairs[BAD_TIME] += int((~numbers).sum())
        self.repairs[NO_TIME] += int(empty.sum())
        self.repairs[NEGATIVE] += int((numbers & (length < 0)).sum())
        usable: Bool = numbers & ~empty
        return usable

    def _ids(self, values: list[int | str]) -> Int64:
        """pids or tids as recorded (25738, "25738", "stream 7", "Spans") as numbers, 0 for one without."""
        kinds = set(map(type, values))
        if kinds == {int}:
            return np.array(values, np.int64)
        numbers = {value: max(0, _number(value)) if isinstance(value, str) else value for value in set(values)}
        return np.array([numbers[value] for value in values], np.int64)

    def _shapes(self, events: list[Event], names: npt.NDArray[np.generic]) -> npt.NDArray[np.int32]:
        shapes = np.full(len(events), -1, np.int32)
        codes = [int(code) for code in np.unique(names)]
        for code in codes:
            if code not in self._wanted:
                self._wanted[code] = _SHAPED.search(self.names.texts[code]) is not None
        wanted = [code for code in codes if self._wanted[code]]
        for row in np.flatnonzero(np.isin(names, wanted)):
            args = events[row].args
            if args is not None:
                dims = bytes(args.dims if bytes(args.dims) != b"null" else args.dims_2021)
                if dims.startswith(b"[") and len(dims) < 4096:
                    shapes[row] = self.names[" ".join(dims.decode(errors="replace").split())]
        return shapes


def _gpu_columns(args: Sequence[Args]) -> dict[str, npt.NDArray[np.generic]]:
    integers = {
        "device": [a.device for a in args],
        "stream": [_number(a.stream) for a in args],
        "bytes": [_number(a.bytes) for a in args],
        "blocks": [_product(a.grid) for a in args],
        "threads": [_product(a.block) for a in args],
        "registers": [a.registers for a in args],
        "shared_bytes": [a.shared for a in args],
        "graph": [a.graph for a in args],
    }
    columns: dict[str, npt.NDArray[np.generic]] = {
        name: np.array(values, np.int64) for name, values in integers.items()
    }
    columns["occupancy"] = np.array([a.occupancy for a in args], np.float64)
    return columns


def _product(extent: tuple[int, int, int] | None) -> int:
    return min(extent[0] * extent[1] * extent[2], 1 << 62) if extent else -1


def _number(value: int | str) -> int:
    """7 of 7, "7", "stream 7" or "0x7"; -1 of text without a number."""
    if isinstance(value, int):
        return value
    found = _DIGITS.search(value)
    return int(found[0], 0) if found else -1
