"""Where the steps are: our ranges, ProfilerStep, hand-made names, optimizer calls, loader calls, repeating kernels.

A step here runs from one start to the next, so that what a script does between its own step ranges (loading, logging)
is inside a step too. Warm-up steps are marked, not removed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpudiag.intervals import Int64
from gpudiag.timeline import GpuOps, Kind, Ranges, StepLog, Steps, Timeline

MIN_STEPS = 3  # nsys-ai's and RULES.md O6's floor for a statement about steps

OUR_DOMAIN = "gpudiag"
OUR_STEP = re.compile(r"^(?:gpudiag::)?step(?:#(\d+))?$")
OUR_WINDOW = re.compile(r"^(?:gpudiag::)?capture$")
PROFILER_STEP = re.compile(r"^ProfilerStep\*?#(\d+)$")
# "step 31", "iteration_7", "train_step", "training_step 4", "Iter: 12", "batch 3"; Lightning's own annotation.
HAND_MADE = re.compile(
    r"^(?:\[pl\]\[profile\])?(?:run_)?(?:train(?:ing)?[\s_-]*)?(?:step|iter(?:ation)?|(?:mini[\s_-]*)?batch)"
    r"(?:[\s_#:=\-]*(\d+))?$",
    re.IGNORECASE,
)
OPTIMIZER = re.compile(r"^(?:gpudiag::)?optimizer$|^Optimizer\.step#|^optimizer[_ ]step$", re.IGNORECASE)
LOADER_NEXT = re.compile(r"^enumerate\(DataLoader\)#|^(?:gpudiag::)?data_wait$")

WHOLE_RUN = re.compile(
    r"epoch|train|fit|loop|main|run|profil(?!erstep)|benchmark", re.IGNORECASE
)  # ranges that hold many steps

WARM_UP_FACTOR = 1.5  # a leading step this far off the median is start-up (gpuprof uses 3x for the first step alone)
GAP_SHARE = 0.02  # ranges with larger gaps between them are taken from start to start
RARE = 3  # an anchor kernel must occur this often to speak of repetition
MIN_REPEATS = 5  # fewer equal stretches of unmarked kernels are as likely layers as steps
MATCH = 0.9  # share of kernels that must equal the one a period later (RULES.md S11)


def find_steps(timeline: Timeline, ops: GpuOps | None, process: int | None = None) -> Steps:
    """The steps of one device's run, best source first; `Steps.none()` when nothing repeats.

    ops: the GPU operations of the device, for the last resort. process: take ranges of this process only (None: of any).
    A better source with fewer than MIN_STEPS steps gives way to a weaker one with more.
    """
    ranges = timeline.ranges
    found: list[Steps] = []
    if ranges is not None and process:
        ranges = ranges.take(ranges.process == process)
    if ranges is not None and len(ranges):
        names = _NameTable(timeline, ranges)
        # Of ours, one that is no whole step (the script died in it) is none by its bare name either.
        theirs = ranges.take(ranges.domain != _our_domain(timeline))
        sources: tuple[Callable[[], Steps], ...] = (
            lambda: _from_ranges(ranges, names, OUR_STEP, timeline.step_source or _marked(timeline), timeline.step_log),
            lambda: _from_ranges(ranges, names, PROFILER_STEP, "ProfilerStep"),
            lambda: _from_ranges(theirs, _NameTable(timeline, theirs), HAND_MADE, _marked(timeline)),
            lambda: _between(ranges, names, OPTIMIZER, "optimizer", at_end=True),
            lambda: _between(ranges, names, LOADER_NEXT, "loader", at_end=False),
        )
        log = timeline.step_log
        for source in sources:
            # Our log weighed calls of optimizers and loaders already: where it has few steps, each of those is none.
            if source in sources[3:] and log is not None and len(log) and len(found[0]):
                break
            steps = source()
            if len(steps.steady()) >= MIN_STEPS:
                return steps
            found.append(steps)
    if ops is not None and len(ops):
        inferred = _from_kernels(ops)
        if len(inferred.steady()) >= MIN_REPEATS and not _inside_one_range(inferred, timeline, ranges):
            return inferred
    return max(found, key=len, default=Steps.none())


def mark_warm_up(start: Int64, end: Int64) -> npt.NDArray[np.bool_]:
    """Leading steps whose length is over 1.5x or under 1/1.5 of the median of all; at most half, none of fewer than 5."""
    length = end - start
    mask = np.zeros(length.size, bool)
    if length.size < MIN_STEPS + 2:
        return mask
    median = float(np.median(length))
    for i in range(length.size // 2):
        if median / WARM_UP_FACTOR <= length[i] <= median * WARM_UP_FACTOR:
            break
        mask[i] = True
    return mask


@dataclass(frozen=True)
class _NameTable:
    """Matches a pattern against each distinct range name once."""

    timeline: Timeline
    ranges: Ranges

    def rows(self, pattern: re.Pattern[str]) -> tuple[npt.NDArray[np.intp], Int64]:
        """Row numbers whose name matches, and the number in the name (-1 none)."""
        codes, inverse = np.unique(self.ranges.name, return_inverse=True)
        number = np.full(codes.size, -2, np.int64)
        for i, code in enumerate(codes):
            match = pattern.match(self.timeline.strings[code])
            if match:
                group = match.group(1) if pattern.groups else None
                number[i] = int(group) if group and len(group) < 18 else -1
        per_row = number[inverse]
        rows = np.flatnonzero(per_row > -2)
        return rows, per_row[rows]


def _from_ranges(
    ranges: Ranges, names: _NameTable, pattern: re.Pattern[str], source: str, log: StepLog | None = None
) -> Steps:
    """log: the steps that ended as steps do; others (what follows the last one, those in which recording began) are none."""
    rows, number = names.rows(pattern)
    if log is not None and len(log) and rows.size:
        kept = np.isin(np.where(ranges.index[rows] >= 0, ranges.index[rows], number), log.index)
        rows, number = rows[kept], number[kept]
    if not rows.size:
        return Steps.none()
    rows, number = _busiest_thread(ranges, rows, number)
    start, end = ranges.start[rows], ranges.end[rows]
    index = np.where(ranges.index[rows] >= 0, ranges.index[rows], number)
    outer = np.empty(start.size, bool)  # a step inside a step (nested ranges) is not a second one
    outer[0] = True
    outer[1:] = start[1:] >= np.maximum.accumulate(end)[:-1]
    start, end, index = start[outer], end[outer], index[outer]
    if pattern is OUR_STEP and _closed_by_the_end(ranges, names, end[-1]):
        start, end, index = start[:-1], end[:-1], index[:-1]
    return _contiguous(start, end, index, source)


def _closed_by_the_end(ranges: Ranges, names: _NameTable, end: np.int64) -> bool:
    """Whether a step ends with the window around it, to the nanosecond: the process ended without a word (os._exit, a kill), its
    last events were lost, and nsys has closed what was open when its recording ended."""
    windows, _ = names.rows(OUR_WINDOW)
    return bool(np.any(ranges.end[windows] == end))


def _contiguous(start: Int64, end: Int64, index: Int64, source: str) -> Steps:
    """Steps from start to start; the last keeps its own end unless the ranges leave gaps, then it is dropped."""
    if start.size < 2:
        return _make(start, end, index, source)
    period = float(np.median(np.diff(start)))
    gaps = float(np.median(start[1:] - end[:-1]))
    if gaps > GAP_SHARE * period:
        return _make(start[:-1], start[1:], index[:-1], source)
    return _make(start, np.append(start[1:], end[-1]), index, source)


def _between(ranges: Ranges, names: _NameTable, pattern: re.Pattern[str], source: str, *, at_end: bool) -> Steps:
    """Steps cut at each occurrence of a range: at its end (optimizer) or at its start (loader)."""
    rows, _ = names.rows(pattern)
    if rows.size < 2:
        return Steps.none()
    rows, _ = _busiest_thread(ranges, rows, rows)
    if at_end:  # several optimizers take turns: the one that is called least closes the cycle
        codes, counts = np.unique(ranges.name[rows], return_counts=True)
        rows = rows[ranges.name[rows] == codes[np.argmin(counts)]]
    cuts = np.sort(ranges.end[rows] if at_end else ranges.start[rows])
    cuts = cuts[np.append(True, np.diff(cuts) > 0)]
    if cuts.size < 2:
        return Steps.none()
    return _make(cuts[:-1], cuts[1:], np.arange(cuts.size - 1), source)


def _busiest_thread(ranges: Ranges, rows: npt.NDArray[np.intp], number: Int64) -> tuple[npt.NDArray[np.intp], Int64]:
    """Of the rows those on the thread that has most; ranks in one file must not be mixed."""
    key = ranges.process[rows] * (1 << 32) + ranges.thread[rows]
    threads, counts = np.unique(key, return_counts=True)
    if threads.size == 1:
        return rows, number
    keep = key == threads[np.argmax(counts)]
    return rows[keep], number[keep]


def _make(start: Int64, end: Int64, index: Int64, source: str, confidence: float = 1.0) -> Steps:
    return Steps(start, end, np.asarray(index, np.int64), mark_warm_up(start, end), source, confidence)


def _from_kernels(ops: GpuOps) -> Steps:
    """The repetition of the kernel sequence on the busiest stream: an anchor kernel whose occurrences are equally far apart.

    confidence: share of kernels that equal the kernel one period later. Below MATCH nothing is claimed.
    """
    kernels = np.isin(ops.kind, (Kind.KERNEL, Kind.GRAPH))
    if not kernels.any():
        return Steps.none()
    streams, counts = np.unique(ops.stream[kernels], return_counts=True)
    rows = np.flatnonzero(kernels & (ops.stream == streams[np.argmax(counts)]))
    name = ops.name[rows].astype(np.int64)
    _, inverse, occurrences = np.unique(name, return_inverse=True, return_counts=True)
    best: tuple[float, npt.NDArray[np.intp]] | None = None
    candidates = np.flatnonzero(occurrences >= RARE)
    for code in candidates[np.argsort(occurrences[candidates], kind="stable")][:32]:
        at = np.flatnonzero(inverse == code)
        distance = np.diff(at)
        period = int(np.median(distance))
        if period < 2 or at.size < RARE or np.mean(distance == period) < MATCH:
            continue
        stretch = name[at[0] : at[-1]]
        match = float(np.mean(stretch[:-period] == stretch[period:])) if stretch.size > period else 0.0
        if match >= MATCH and (best is None or match > best[0]):
            best = (match, at)
    if best is None:
        return Steps.none()
    cuts = ops.start[rows[best[1]]]
    return _make(cuts[:-1], cuts[1:], np.arange(cuts.size - 1), "inferred", round(best[0], 3))


def _inside_one_range(steps: Steps, timeline: Timeline, ranges: Ranges | None) -> bool:
    """Whether some range holds several of the repeats: then they are layers or micro-steps of what the range marks, not steps."""
    if ranges is None or not len(ranges):
        return False
    held = np.searchsorted(steps.end, ranges.end, side="right") - np.searchsorted(
        steps.start, ranges.start, side="left"
    )
    return any(not WHOLE_RUN.search(timeline.strings[int(code)]) for code in np.unique(ranges.name[held >= 2]))


def _our_domain(timeline: Timeline) -> int:
    """The code of our domain among the strings, -1 where no range is ours."""
    return timeline.strings.index(OUR_DOMAIN) if OUR_DOMAIN in timeline.strings else -1


def _marked(timeline: Timeline) -> str:
    return "nvtx" if timeline.source.recorder.startswith("nsys") else "annotation"
