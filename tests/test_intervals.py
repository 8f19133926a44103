"""Intervals against a bitmap oracle: a set of integers per interval set, and Python's set operators."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.intervals import Intervals

pairs = st.lists(st.tuples(st.integers(-40, 40), st.integers(-40, 40)), max_size=12)


def build(raw: list[tuple[int, int]]) -> Intervals:
    array = np.array(raw, np.int64).reshape(-1, 2)
    return Intervals.union_of(array[:, 0], array[:, 1])


def points(raw: list[tuple[int, int]]) -> set[int]:
    return {point for start, end in raw for point in range(start, end)}


def members(intervals: Intervals) -> set[int]:
    starts, ends = intervals.start.tolist(), intervals.end.tolist()
    assert all(s < e for s, e in zip(starts, ends, strict=True)), "an interval is empty"
    assert all(e < s for e, s in zip(ends, starts[1:], strict=False)), "intervals touch or overlap"
    return {point for start, end in zip(starts, ends, strict=True) for point in range(start, end)}


@given(pairs)
def test_union_of_covers_the_same_points(raw: list[tuple[int, int]]) -> None:
    assert members(build(raw)) == points(raw)
    assert build(raw).total() == len(points(raw))


@given(pairs, pairs)
def test_set_operations_equal_pythons(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    a, b = build(first), build(second)
    assert members(a.union(b)) == points(first) | points(second)
    assert members(a.intersect(b)) == points(first) & points(second)
    assert members(a.subtract(b)) == points(first) - points(second)


@given(pairs, st.integers(-45, 45), st.integers(-45, 45))
def test_clip_and_gaps_split_a_window(raw: list[tuple[int, int]], start: int, end: int) -> None:
    a, window = build(raw), set(range(start, end))
    assert members(a.clip(start, end)) == points(raw) & window
    assert members(a.gaps(start, end)) == window - points(raw)


@given(pairs, st.lists(st.integers(-50, 50), min_size=1, max_size=8))
def test_queries_at_times(raw: list[tuple[int, int]], at: list[int]) -> None:
    a, covered = build(raw), points(raw)
    times = np.array(at, np.int64)
    assert a.contains(times).tolist() == [t in covered for t in at]
    assert a.covered_before(times).tolist() == [sum(point < t for point in covered) for t in at]


def test_intervals_are_not_hashable() -> None:
    with pytest.raises(TypeError):
        hash(Intervals.empty())


@given(pairs, st.lists(st.tuples(st.integers(0, 400), st.integers(1, 12)), max_size=3))
def test_a_short_set_is_cut_out_of_a_long_one(holes: list[tuple[int, int]], few: list[tuple[int, int]]) -> None:
    many = [(i * 5, i * 5 + 3) for i in range(80) if not any(start <= i < end for start, end in holes)]
    cuts = [(start, start + length) for start, length in few]
    assert members(build(many).subtract(build(cuts))) == points(many) - points(cuts)
