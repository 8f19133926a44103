"""The batch sweep: the curve, its knee, memory along it, the end at out of memory, odd sizes beside their even neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpudiag.bench.result import Mode, Sweep, SweepPoint

KNEE = 0.90
MAX_BATCH = 1024


def plan(largest: int = MAX_BATCH) -> list[int]:
    """Powers of two up to `largest`, and from 8 on the odd size below each: 1 2 4 7 8 15 16 31 32 ..."""
    sizes: list[int] = []
    size = 1
    while size <= largest:
        if size >= 8:
            sizes.append(size - 1)
        sizes.append(size)
        size *= 2
    return sizes


def run_sweep(
    sizes: Iterable[int], measure: Callable[[int], SweepPoint], report: Callable[[SweepPoint], None]
) -> list[SweepPoint]:
    """Ascending; ends after the first batch that does not fit (an odd one's even neighbour would not either)."""
    points: list[SweepPoint] = []
    for size in sizes:
        point = measure(size)
        points.append(point)
        report(point)
        if point.out_of_memory:
            break
    return points


def summarise_sweep(points: Sequence[SweepPoint], what: str, device: str, mode: Mode, stopped: str = "") -> Sweep:
    """knee: the smallest *even* (or 1) batch whose rate reaches 90 % of the best; the odd ones are there for their penalty."""
    rates = {point.batch: point.images_per_s for point in points if point.images_per_s is not None}
    regular = {batch: rate for batch, rate in rates.items() if batch == 1 or batch % 2 == 0}
    best = max(regular, key=lambda batch: (regular[batch], -batch), default=None)
    knee = None
    if best is not None:
        knee = min(batch for batch, rate in regular.items() if rate >= KNEE * regular[best])
    penalties = {
        str(point.batch): rates[point.batch] / rates[point.odd_of]
        for point in points
        if point.odd_of is not None and point.batch in rates and point.odd_of in rates
    }
    return Sweep(what, device, mode, tuple(points), best, knee, penalties, stopped)


def odd_of(batch: int) -> int | None:
    return batch + 1 if batch % 2 and batch > 1 else None


def point_of(batch: int, rounds: Any, memory: int | None) -> SweepPoint:
    return SweepPoint(batch, rounds.median, rounds.spread, memory, odd_of=odd_of(batch))
