"""Epochs of a DataLoader that are longer than what was recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpudiag.intervals import Int64
from gpudiag.timeline import Steps, Timeline, main_loader_of


@dataclass(frozen=True)
class EpochStart:
    """The start of an epoch in the recorded steps, where an epoch has more steps than those.

    rows: of the steps in which an epoch starts; steps: of an epoch; wait_ns: for its first batch, beyond the typical wait.
    """

    rows: Int64
    steps: int
    wait_ns: float


def epoch_start(timeline: Timeline, steps: Steps) -> EpochStart | None:
    """None where no epoch but the first starts in these steps, or epochs are so short that the steps hold their share of starts."""
    batches, main = timeline.loader, main_loader_of(timeline.loaders)
    if batches is None or main is None or len(steps) < 2:
        return None
    rows = batches.take(batches.loader == main.loader)
    counts = np.bincount(rows.epoch) if len(rows) else np.empty(0, np.int64)
    inside = (rows.end > steps.start[0]) & (rows.end <= steps.end[-1])
    per_step = max(1, round(int(inside.sum()) / len(steps)))
    if counts.size < 2 or int(counts[0]) // per_step <= len(steps):
        return None
    first = (rows.batch == 0) & (rows.epoch > 0)
    at = np.searchsorted(steps.start, rows.end[first], side="right") - 1
    within = (at >= 0) & (rows.end[first] <= steps.end[np.maximum(at, 0)])
    if not within.any():
        return None
    wait = (rows.end - rows.start).astype(float)
    beyond = np.maximum(0.0, wait[first] - np.median(wait))
    return EpochStart(np.unique(at[within]), int(counts[0]) // per_step, float(beyond.mean()))


def without_epoch_start(timeline: Timeline, steps: Steps) -> Steps:
    """The steps but for those in which an epoch starts, where they would stand for more starts than an epoch has."""
    start = epoch_start(timeline, steps)
    if start is None:
        return steps
    keep = np.ones(len(steps), bool)
    keep[start.rows] = False
    return steps.where(keep)
