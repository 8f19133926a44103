"""What a picture of the recording shows: a typical steady step and the worst one, as lanes of events of bounded number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gpudiag.account import PARTS, Account
from gpudiag.diagnosis import Lane, TimelineView
from gpudiag.intervals import Int64
from gpudiag.timeline import ApiCalls, CpuOps, GpuOps, Int32, Kind, LoaderBatches, PyCalls, Ranges, Timeline
from gpudiag.units import format_ns

# Two views of this many events take about 0.7 MB as indented JSON (55 bytes an event) and 0.2 MB inside the HTML,
# which leaves both well under their 2 MB. A screen 4,000 px wide with 15 lanes shows no more.
MAX_EVENTS = 12_000
MAX_STREAMS = 12
MAX_THREADS = 3
MAX_WORKERS = 8
WORTH_A_LANE = 0.005  # of the view: below, a further thread is a sliver or two
RANGE_LEVELS = 3
OP_LEVELS = 2
# Text of the names of one view, characters: templates of CUDA libraries run to thousands a name.
NAMES_BUDGET = 150_000
NAME_LIMIT = 400

Index = npt.NDArray[np.intp]
HostTable = ApiCalls | CpuOps | PyCalls | Ranges
T = TypeVar("T", ApiCalls, CpuOps, PyCalls, Ranges)


@dataclass(frozen=True, eq=False)
class _Events:
    """A lane before merging. start, end: absolute ns, sorted by start; name: codes into `_Names`."""

    label: str
    kind: str
    start: Int64
    end: Int64
    name: Int32


def make_views(timeline: Timeline, account: Account, *, max_events: int = MAX_EVENTS) -> tuple[TimelineView, ...]:
    """A typical steady step (`_typical`) and the longest one; the whole window when no steps are known.

    max_events: of all views together. Events too short to see at that number are merged (`Lane.detail`, `Lane.count`).
    """
    windows = list(_windows(account))
    return tuple(
        _view(timeline, account, title, start, end, max_events // len(windows)) for title, start, end in windows
    )


def _windows(account: Account) -> Iterator[tuple[str, int, int]]:
    steps = account.steps.steady()
    if not len(steps):
        if len(account.window):
            yield "The whole recording", int(account.window.start[0]), int(account.window.end[-1])
        return
    length = steps.end - steps.start
    typical = _typical(account, length)
    worst = int(length.argmax())
    for what, i in (("Typical", typical), ("Longest", worst)):
        if what == "Typical" or worst != typical:
            title = f"{what} step, number {steps.index[i]}: {format_ns(int(length[i]))}"
            yield title, int(steps.start[i]), int(steps.end[i])


def _typical(account: Account, length: Int64) -> int:
    """The step nearest the median in length and in how its time is owned: nearness of length alone may pick an odd one."""
    parts = np.array([[step.get(part, 0) for part in PARTS] for step in account.per_step], np.int64)
    if len(parts) != length.size:  # the account's steps are not only the steady ones
        return int(np.abs(length - np.median(length)).argmin())
    away = np.abs(parts - np.median(parts, axis=0)).sum(axis=1) + np.abs(length - np.median(length))
    return int(away.argmin())


def _view(timeline: Timeline, account: Account, title: str, start: int, end: int, max_events: int) -> TimelineView:
    lanes = [
        replace(lane, start=np.clip(lane.start, start, end), end=np.clip(lane.end, start, end))
        for lane in _lanes(timeline, account, start, end)
        if lane.start.size
    ]
    width = _merge_width(lanes, start, end, max_events)
    names = _Names([*timeline.strings, *PARTS])
    return TimelineView(
        title=title,
        rank=account.rank,
        device=account.device,
        start_ns=start,
        end_ns=end,
        lanes=tuple(_drawn(lane, start, width, names) for lane in lanes),
        names=names.texts(),
    )


def _lanes(timeline: Timeline, account: Account, start: int, end: int) -> Iterator[_Events]:
    """Every lane in the order in which it is drawn: owners, the host from the outside in, then the device."""
    first_part = len(timeline.strings)
    seg_start, seg_end, owner = account.segments(start, end)
    yield _Events("Who owns the time", "owner", seg_start, seg_end, owner.astype(np.int32) + first_part)

    ops = timeline.gpu_ops
    if ops is not None:
        ops = ops.take(_within(ops.start, ops.end, start, end))
        ops = ops.take(ops.device == account.device)
    process = _launcher(ops)
    threads = _threads(timeline, process, start, end)
    yield from _range_lanes(timeline, process, threads, start, end)
    yield from _loader_lanes(timeline, start, end)
    for position, thread in enumerate(threads):
        name = "Main thread" if position == 0 else f"Thread {thread}"
        mine: HostTable | None = None
        if timeline.cpu_ops is not None:
            mine = _on_thread(timeline.cpu_ops, process, thread, start, end)
        elif timeline.py_calls is not None:
            mine = _on_thread(timeline.py_calls, process, thread, start, end)
        if mine is not None:
            for level, index in enumerate(_levels(mine, OP_LEVELS)):
                yield _Events(name if level == 0 else f"{name}, inside", "host", *_columns(mine, index))
        if timeline.api_calls is not None:
            calls = _on_thread(timeline.api_calls, process, thread, start, end)
            for index in _levels(calls, 1):
                yield _Events(f"{name}: CUDA calls", "launch", *_columns(calls, index))
    if ops is not None:
        yield from _stream_lanes(ops)


def _launcher(ops: GpuOps | None) -> int | None:
    """The process with the most operations on the device; None when there is none to tell by."""
    if ops is None or not len(ops):
        return None
    process, count = np.unique(ops.process, return_counts=True)
    return int(process[count.argmax()]) or None


def _threads(timeline: Timeline, process: int | None, start: int, end: int) -> list[int]:
    """The busiest host threads in a window: by launches first, then by operators."""
    found: dict[int, None] = {}
    for table in (timeline.api_calls, timeline.cpu_ops, timeline.py_calls, timeline.ranges):
        if table is None:
            continue
        mine = table.take(_within(table.start, table.end, start, end))
        if process is not None:
            mine = mine.take(mine.process == process)
        thread, inverse = np.unique(mine.thread, return_inverse=True)
        busy = np.bincount(inverse, weights=(mine.end - mine.start).astype(float), minlength=thread.size)
        weight = np.bincount(inverse, minlength=thread.size) if table is timeline.api_calls else busy
        for i in np.lexsort((thread, -weight)):
            if not found or busy[i] >= WORTH_A_LANE * (end - start):
                found.setdefault(int(thread[i]))
    return list(found)[:MAX_THREADS]


def _range_lanes(
    timeline: Timeline, process: int | None, threads: list[int], start: int, end: int
) -> Iterator[_Events]:
    if timeline.ranges is None or not threads:
        return
    # Ranges of the thread that has most of them: steps and phases are marked where the training loop runs.
    mine = max((_on_thread(timeline.ranges, process, thread, start, end) for thread in threads), key=len)
    for level, index in enumerate(_levels(mine, RANGE_LEVELS)):
        yield _Events("Ranges" if level == 0 else f"Ranges, level {level + 1}", "range", *_columns(mine, index))


def _loader_lanes(timeline: Timeline, start: int, end: int) -> Iterator[_Events]:
    loader = timeline.loader
    if loader is None:
        return
    first = len(timeline.strings) + len(PARTS)
    waits = loader.take(_within(loader.start, loader.end, start, end))
    yield _Events("Waits for the loader", "loader", waits.start, waits.end, _batch_names(waits, first + 0))
    fetched = loader.take(loader.fetch_end > loader.fetch_start)
    fetched = fetched.take(_within(fetched.fetch_start, fetched.fetch_end, start, end))
    for worker in np.unique(fetched.worker)[:MAX_WORKERS]:
        rows = fetched.take(fetched.worker == worker)
        rows = rows.take(np.argsort(rows.fetch_start, kind="stable"))
        label = f"Loader worker {worker}" if worker >= 0 else "Loading in the main process"
        yield _Events(label, "loader", rows.fetch_start, rows.fetch_end, _batch_names(rows, first + 1))


def _batch_names(rows: LoaderBatches, code: int) -> Int32:
    return np.full(len(rows), code, np.int32)


def _stream_lanes(ops: GpuOps) -> Iterator[_Events]:
    """Kernels, collectives and copies of each stream; beyond MAX_STREAMS the least busy share one lane."""
    stream, inverse = np.unique(ops.stream, return_inverse=True)
    if not stream.size:
        return
    busy = np.bincount(inverse, weights=(ops.end - ops.start).astype(float), minlength=stream.size)
    shown = np.sort(stream[np.lexsort((stream, -busy))[:MAX_STREAMS]])
    groups = (
        ("kernels", "stream", (Kind.KERNEL, Kind.GRAPH)),
        ("collectives", "comm", (Kind.COMM,)),
        ("copies", "copy", (Kind.MEMCPY, Kind.MEMSET)),
    )
    for number in shown:
        for what, kind, kinds in groups:
            index = np.flatnonzero((ops.stream == number) & np.isin(ops.kind, kinds))
            yield _Events(f"Stream {number}: {what}", kind, *_columns(ops, index))
    rest = np.flatnonzero(~np.isin(ops.stream, shown))
    if rest.size:
        yield _Events(f"{stream.size - shown.size} more streams", "stream", *_columns(ops, rest))


def _columns(table: HostTable | GpuOps, index: Index) -> tuple[Int64, Int64, Int32]:
    return table.start[index], table.end[index], table.name[index]


def _within(starts: Int64, ends: Int64, start: int, end: int) -> npt.NDArray[np.bool_]:
    return (starts < end) & (ends > start)


def _on_thread(table: T, process: int | None, thread: int, start: int, end: int) -> T:
    keep = _within(table.start, table.end, start, end) & (table.thread == thread)
    if process is not None:
        keep &= table.process == process
    return table.take(keep)


def _levels(table: HostTable, count: int) -> Iterator[Index]:
    """Rows by depth of nesting: the outermost, then those directly inside them, ... A row that only overlaps goes a level down."""
    left = np.lexsort((-table.end, table.start))
    for _ in range(count):
        if not left.size:
            return
        reach = np.maximum.accumulate(table.end[left])
        outer = np.ones(left.size, bool)
        outer[1:] = table.start[left][1:] >= reach[:-1]
        yield left[outer]
        left = left[~outer]


def _merge_width(lanes: list[_Events], start: int, end: int, max_events: int) -> int:
    """The smallest power of two of ns at which all lanes together have at most max_events; 0 when they do as they are."""
    width = 0
    while sum(_merged(lane, start, width)[0].size for lane in lanes) > max_events:
        width = max(2 * width, max(1, (end - start) >> 20))
    return width


def _merged(lane: _Events, origin: int, width: int) -> tuple[Int64, Int64, Int32, Int64]:
    """(start, length, name, count) of what is drawn: neighbours shorter than `width` that start in one cell of it are one.

    A merged one is as long as the time that it stands for, so that a lane's total stays true, and bears the name that
    fills most of it. The owners of a cell stay apart, one piece each: the picture's account is the account.
    """
    length = lane.end - lane.start
    one = np.ones(lane.start.size, np.int64)
    if width == 0 or not lane.start.size:
        return lane.start, length, lane.name, one
    short = length < width
    cell = (lane.start - origin) // width
    begins = np.ones(lane.start.size, bool)
    begins[1:] = ~(short[1:] & short[:-1] & (cell[1:] == cell[:-1]))
    group = np.cumsum(begins) - 1
    first = np.flatnonzero(begins)
    # Per group and name: the time and the number.
    by_name = np.lexsort((lane.name, group))
    changes = np.ones(by_name.size, bool)
    changes[1:] = (np.diff(group[by_name]) != 0) | (np.diff(lane.name[by_name]) != 0)
    pieces = np.flatnonzero(changes)
    piece_group, piece_name = group[by_name][pieces], lane.name[by_name][pieces]
    piece_time = np.add.reduceat(length[by_name], pieces)
    if lane.kind == "owner":
        before = np.cumsum(piece_time) - piece_time
        in_group = before - before[np.searchsorted(piece_group, piece_group)]
        return lane.start[first][piece_group] + in_group, piece_time, piece_name, np.add.reduceat(one[by_name], pieces)
    most = np.lexsort((piece_name, -piece_time, piece_group))
    name = piece_name[most[np.searchsorted(piece_group[most], np.arange(first.size))]]
    extent = np.maximum.reduceat(lane.end, first) - lane.start[first]
    time = np.minimum(np.add.reduceat(length, first), extent)  # events of one lane may overlap
    return lane.start[first], time, name, np.add.reduceat(one, first)


class _Names:
    """Codes of the timeline's strings, made dense for one view in order of first use."""

    def __init__(self, strings: list[str]) -> None:
        self.strings = [*strings, "wait for the next batch", "fetch a batch"]
        self.dense: dict[int, int] = {}

    def code(self, name: int) -> int:
        return self.dense.setdefault(name, len(self.dense))

    def texts(self) -> tuple[str, ...]:
        """The names in order, shortened in the middle until they fit NAMES_BUDGET; bytes that are no UTF-8 become `?`."""
        texts = [self.strings[name].encode("utf-8", "replace").decode() for name in self.dense]
        limit = NAME_LIMIT
        while limit > 40 and sum(min(len(text), limit) for text in texts) > NAMES_BUDGET:
            limit //= 2
        return tuple(text if len(text) <= limit else f"{text[: limit - 12]}…{text[-11:]}" for text in texts)


def _drawn(lane: _Events, origin: int, width: int, names: _Names) -> Lane:
    start, length, name, count = _merged(lane, origin, width)
    merged = bool((count > 1).any())
    return Lane(
        label=lane.label,
        kind=lane.kind,
        start_ns=tuple((start - origin).tolist()),
        length_ns=tuple(length.tolist()),
        name=tuple(names.code(code) for code in name.tolist()),
        detail=f"merged {width} ns" if merged else "exact",
        count=tuple(count.tolist()) if merged else (),
    )
