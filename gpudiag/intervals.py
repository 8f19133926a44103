"""Sets of disjoint half-open intervals [start, end) in int ns, as two sorted arrays. Pure numpy, no Python loops over events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

_EMPTY: Int64 = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Intervals:
    """Disjoint, non-touching, non-empty intervals in rising order: `start[i] < end[i] < start[i+1]`.

    Build with `Intervals.union_of`; the plain constructor trusts its arrays.
    start, end: int64 arrays of shape (n,), ns.
    """

    start: Int64
    end: Int64

    @classmethod
    def empty(cls) -> Intervals:
        return cls(_EMPTY, _EMPTY)

    @classmethod
    def single(cls, start: int, end: int) -> Intervals:
        """The one interval [start, end), or nothing when end <= start."""
        if end <= start:
            return cls.empty()
        return cls(np.array([start], np.int64), np.array([end], np.int64))

    @classmethod
    def union_of(cls, start: Int64, end: Int64) -> Intervals:
        """The union of n intervals in any order; those with end <= start are dropped. O(n log n), O(n) when sorted."""
        keep = end > start
        if not keep.all():
            start, end = start[keep], end[keep]
        if start.size == 0:
            return cls.empty()
        if np.any(start[1:] < start[:-1]):
            order = np.argsort(start, kind="stable")
            start, end = start[order], end[order]
        reach = np.maximum.accumulate(end)
        first = np.empty(start.size, bool)
        first[0] = True
        np.greater(start[1:], reach[:-1], out=first[1:])
        begins = np.flatnonzero(first)
        last = np.append(begins[1:] - 1, start.size - 1)
        return cls(start[begins], reach[last])

    def __len__(self) -> int:
        return int(self.start.size)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Intervals):
            return NotImplemented
        return np.array_equal(self.start, other.start) and np.array_equal(self.end, other.end)

    def __hash__(self) -> int:
        raise TypeError("Intervals hold arrays and cannot be hashed")

    def total(self) -> int:
        """The covered length in ns."""
        return int((self.end - self.start).sum())

    def union(self, other: Intervals) -> Intervals:
        if not len(other):
            return self
        if not len(self):
            return other
        return Intervals.union_of(np.concatenate([self.start, other.start]), np.concatenate([self.end, other.end]))

    def intersect(self, other: Intervals) -> Intervals:
        """Points in both. O((n + m) log m)."""
        if not len(self) or not len(other):
            return Intervals.empty()
        if len(other) == 1:
            return self._within(int(other.start[0]), int(other.end[0]))
        if len(self) == 1:
            return other._within(int(self.start[0]), int(self.end[0]))
        if len(other) < len(self):  # the search and the trimming are cheaper from the smaller side
            return other.intersect(self)
        # For each of mine, the others that overlap it are a contiguous run [low, high).
        low = np.searchsorted(other.end, self.start, side="right")
        count = np.searchsorted(other.start, self.end, side="left") - low
        hit = np.flatnonzero(count)
        low, count = low[hit], count[hit]
        first = np.cumsum(count) - count
        theirs = np.arange(int(count.sum()), dtype=np.int32)  # 2**31 intervals would fill 32 GiB
        theirs += np.repeat((low - first).astype(np.int32), count)
        start, end = other.start[theirs], other.end[theirs]
        last = first + count - 1
        start[first] = np.maximum(start[first], self.start[hit])
        end[last] = np.minimum(end[last], self.end[hit])
        return Intervals(start, end)

    def _within(self, start: int, end: int) -> Intervals:
        """The part inside one window: a slice, with the two pieces at the rim cut."""
        low = int(np.searchsorted(self.end, start, side="right"))
        high = int(np.searchsorted(self.start, end, side="left"))
        if low >= high:
            return Intervals.empty()
        starts, ends = self.start[low:high], self.end[low:high]
        if starts[0] < start:
            starts = starts.copy()
            starts[0] = start
        if ends[-1] > end:
            ends = ends.copy()
            ends[-1] = end
        return Intervals(starts, ends)

    def gaps(self, start: int, end: int) -> Intervals:
        """What is left of [start, end) outside this set."""
        return Intervals.single(start, end).subtract(self)

    def subtract(self, other: Intervals) -> Intervals:
        """Points of mine that are not in the other."""
        if not len(self) or not len(other):
            return self
        if len(self) == 1:
            other = other._within(int(self.start[0]), int(self.end[0]))
            if not len(other):
                return self
        if 8 * len(other) < len(self):
            return self._subtract_few(other)
        low, high = int(min(self.start[0], other.start[0])) - 1, int(max(self.end[-1], other.end[-1])) + 1
        hole_start = np.empty(len(other) + 1, np.int64)
        hole_start[0], hole_start[1:] = low, other.end
        hole_end = np.empty(len(other) + 1, np.int64)
        hole_end[:-1], hole_end[-1] = other.start, high
        return self.intersect(Intervals(hole_start, hole_end))

    def _subtract_few(self, other: Intervals) -> Intervals:
        """Much shorter other: only my intervals that it touches are cut, the rest is moved as it is."""
        low = np.searchsorted(self.end, other.start, side="right")
        high = np.searchsorted(self.start, other.end, side="left")
        touched = np.zeros(len(self) + 1, np.int32)  # +1 at the first touched, -1 behind the last
        np.add.at(touched, low[high > low], 1)
        np.add.at(touched, high[high > low], -1)
        mask = np.cumsum(touched[:-1], dtype=np.int32) > 0
        if not mask.any():
            return self
        mine = Intervals(self.start[mask], self.end[mask])
        edge = int(mine.start[0]) - 1, int(mine.end[-1]) + 1
        holes = Intervals(
            np.append(min(edge[0], int(other.start[0]) - 1), other.end),
            np.append(other.start, max(edge[1], int(other.end[-1]) + 1)),
        )
        cut = mine.intersect(holes)
        at = np.searchsorted(self.start, cut.start, side="right") - 1  # the interval that each piece came from
        keep = ~mask
        place = np.cumsum(keep)  # how many kept intervals lie before; pieces follow those
        where = place[at]
        return Intervals(np.insert(self.start[keep], where, cut.start), np.insert(self.end[keep], where, cut.end))

    def clip(self, start: int, end: int) -> Intervals:
        return self._within(start, end) if end > start else Intervals.empty()

    def at_least(self, length: int) -> Intervals:
        """Only those that are at least `length` ns long."""
        keep = self.end - self.start >= length
        return self if keep.all() else Intervals(self.start[keep], self.end[keep])

    def covered_in(self, starts: Int64, ends: Int64) -> Int64:
        """For each of m windows [starts, ends) (they may overlap), how many ns of it this set covers. Shape (m,)."""
        return self.covered_before(ends) - self.covered_before(starts)

    def covered_before(self, at: Int64) -> Int64:
        """Covered ns in (-inf, at) for each of m times. Shape (m,)."""
        if not len(self):
            return np.zeros(np.shape(at), np.int64)
        done = np.concatenate([[0], np.cumsum(self.end - self.start)])
        index = np.searchsorted(self.start, at, side="right")
        inside = np.clip(self.end[np.maximum(index - 1, 0)] - at, 0, None)
        return np.asarray(np.where(index > 0, done[index] - inside, 0), np.int64)

    def contains(self, at: Int64) -> npt.NDArray[np.bool_]:
        """For each of m times, whether it lies inside. Shape (m,)."""
        if not len(self):
            return np.zeros(np.shape(at), bool)
        index = np.searchsorted(self.start, at, side="right") - 1
        return np.asarray((index >= 0) & (at < self.end[np.maximum(index, 0)]), bool)
