"""Events to columns, piece by piece: the little that is done in Python for each event is done here."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from gpudiag.read._kineto_events import NO_ARGS, Args, Event
from gpudiag.read._kineto_times import INVALID, exact_ns

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
NO_TIME = "events without a time (ts and dur 0)"
BAD_TIME = "events whose time or length is no number"
NEGATIVE = "events of negative length, taken as 0"

# Operators whose input shapes say whether a matrix product, convolution or attention fits the tensor cores; the shapes of
# all others are not kept.
_SHAPED = re.compile(r"(?:^|::)_?(?:addmm|mm|bmm|baddbmm|matmul|linear|scaled_mm)|conv|attention")
_DIGITS = re.compile(r"0[xX][0-9a-fA-F]{1,15}|[1-9]\d{0,17}|0")


class Codes(dict[str, int]):
    """Text to its number, given out in the order of first sight."""

    def __missing__(self, text: str) -> int:
        code = self[text] = len(self)
        return code


class _Ids(dict[int | str, int]):
    """A pid or tid as recorded (25738, "25738", "stream 7", "Spans") to a number, 0 for one without."""

    def __missing__(self, text: int | str) -> int:
        self[text] = number = max(0, _number(text)) if isinstance(text, str) else text
        return number


class Columns:
    """The columns of all tables while the file is read.

    names: text to code. parts[table][column]: a list of arrays, one a piece. seen: events a category. repairs: rows not
    taken as recorded. window: the instants that Kineto writes at the start and the end of a recording, ns.
    """

    def __init__(self) -> None:
        self.names = Codes()
        self.parts: dict[str, dict[str, list[npt.NDArray[np.generic]]]] = defaultdict(lambda: defaultdict(list))
        self.seen: Counter[str] = Counter()
        self.repairs: Counter[str] = Counter()
        self.window: list[int] = []
        self.call_stacks = False
        self._ids = _Ids()
        self._wanted: dict[int, bool] = {}

    def add(self, events: Iterable[Event]) -> None:
        """Append the events of one piece."""
        by_category: dict[str, list[Event]] = defaultdict(list)
        for event in events:
            by_category[event.cat].append(event)
        for category, rows in by_category.items():
            self.seen[category] += len(rows)
            table = TABLES.get(category)
            if table:
                self._append(table, rows)
            elif category in ("", "Trace"):
                self._note_window(rows)

    def _append(self, table: str, events: list[Event]) -> None:
        start = exact_ns([event.ts for event in events])
        length = exact_ns([event.dur for event in events])
        keep = (start != INVALID) & (length != INVALID)
        empty = keep & (start == 0) & (length == 0)
        self.repairs[BAD_TIME] += int((~keep).sum())
        self.repairs[NO_TIME] += int(empty.sum())
        self.repairs[NEGATIVE] += int((keep & (length < 0)).sum())
        keep &= ~empty
        count = len(events)
        names, ids = self.names, self._ids
        new: dict[str, npt.NDArray[np.generic]] = {
            "start": start,
            "end": start + np.maximum(length, 0),
            "name": np.fromiter([names[event.name] for event in events], np.int32, count),
            "process": np.fromiter([ids[event.pid] for event in events], np.int64, count),
            "thread": np.fromiter([ids[event.tid] for event in events], np.int64, count),
        }
        if table in GPU_TABLES or table == "api":
            args = [event.args or NO_ARGS for event in events]
            new["correlation"] = _column(args, lambda a: a.correlation)
            if table != "api":
                new |= _gpu_columns(args)
        elif table == "cpu_op":
            new["shapes"] = self._shapes(events, new["name"])
        every = bool(keep.all())
        for column, values in new.items():
            self.parts[table][column].append(values if every else values[keep])

    def _shapes(self, events: list[Event], names: npt.NDArray[np.generic]) -> npt.NDArray[np.int32]:
        shapes = np.full(len(events), -1, np.int32)
        codes = np.unique(names)
        if any(int(code) not in self._wanted for code in codes):
            text = list(self.names)
            self._wanted |= {int(code): _SHAPED.search(text[code]) is not None for code in codes}
        wanted = [code for code in codes if self._wanted[int(code)]]
        for row in np.flatnonzero(np.isin(names, wanted)):
            args = events[row].args
            if args is not None:
                dims = bytes(args.dims if bytes(args.dims) != b"null" else args.dims_2021)
                if dims.startswith(b"[") and len(dims) < 4096:
                    shapes[row] = self.names[" ".join(dims.decode(errors="replace").split())]
        return shapes

    def _note_window(self, events: list[Event]) -> None:
        marks = [e for e in events if e.name == "Record Window End" or e.name.startswith("Iteration Start: ")]
        if marks:
            at = exact_ns([event.ts for event in marks])
            self.window += [int(ns) for ns in at if ns not in (INVALID, 0)]


def _gpu_columns(args: Sequence[Args]) -> dict[str, npt.NDArray[np.generic]]:
    grid = [a.grid or (-1, 1, 1) for a in args]
    block = [a.block or (-1, 1, 1) for a in args]
    return {
        "device": _column(args, lambda a: a.device),
        "stream": _column(args, lambda a: _number(a.stream)),
        "bytes": _column(args, lambda a: _number(a.bytes)),
        "blocks": np.fromiter([min(x * y * z, 1 << 62) for x, y, z in grid], np.int64, len(args)),
        "threads": np.fromiter([min(x * y * z, 1 << 62) for x, y, z in block], np.int64, len(args)),
        "registers": _column(args, lambda a: a.registers),
        "shared_bytes": _column(args, lambda a: a.shared),
        "graph": _column(args, lambda a: a.graph),
        "occupancy": np.fromiter([a.occupancy for a in args], np.float64, len(args)),
    }


def _number(value: int | str) -> int:
    """7 of 7, "7", "stream 7" or "0x7"; -1 of text without a number."""
    if isinstance(value, int):
        return value
    found = _DIGITS.search(value)
    return int(found[0], 0) if found else -1


def _column(args: Sequence[Args], value: Callable[[Args], int]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(value, args), np.int64, len(args))
