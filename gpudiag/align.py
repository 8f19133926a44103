"""One clock for several ranks: from the recordings' wall-clock base, or from the collectives that all of them ran.

A collective ends on all ranks at about the same moment, so the median difference of the ends of the same collectives is
the difference of two ranks' clocks, whatever their bases say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpudiag.intervals import Int64

MIN_COMMON = 5  # fewer collectives leave the median to chance
AGREE_NS = (
    1_000_000  # clocks kept by NTP on one network agree within about 1 ms; beyond it the collectives are believed
)


@dataclass(frozen=True)
class Alignment:
    """offset_ns: by rank, to add to its times to get those of the lowest rank. source: how it was found. disagree_ns: the
    largest difference between what the bases and what the collectives say, None when only one of them is known."""

    offset_ns: dict[int, int]
    source: Literal["baseTimeNanoseconds", "collectives", "none"]
    disagree_ns: int | None = None


def align(bases: Mapping[int, int | None], ends: Mapping[int, Int64]) -> Alignment:
    """bases: the wall-clock ns of each rank's time 0, None unknown. ends: the ends of the collectives that all ranks have in
    common, in the same order, each in its rank's own time, ns; equal lengths."""
    ranks = sorted(bases)
    first = ranks[0]
    by_base: dict[int, int] | None = None
    known = {rank: base for rank, base in bases.items() if base is not None}
    if len(known) == len(ranks):
        by_base = {rank: known[rank] - known[first] for rank in ranks}
    by_collective: dict[int, int] | None = None
    if len(ends) == len(ranks) and all(ends[rank].size >= MIN_COMMON for rank in ranks):
        by_collective = {rank: int(np.median(ends[first] - ends[rank])) for rank in ranks}
    if by_base is None and by_collective is None:
        return Alignment(dict.fromkeys(ranks, 0), "none")
    if by_base is None or by_collective is None:
        offsets = by_base or by_collective or {}
        return Alignment(offsets, "baseTimeNanoseconds" if by_base else "collectives")
    disagree = max(abs(by_base[rank] - by_collective[rank]) for rank in ranks)
    if disagree > AGREE_NS:
        return Alignment(by_collective, "collectives", disagree)
    return Alignment(by_base, "baseTimeNanoseconds", disagree)
