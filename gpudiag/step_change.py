"""How much the step time changed, how sure that is, and what a gate says to it. numpy only; same samples, same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpudiag.comparison import Comparison, Gate, SideInfo, StepChange
from gpudiag.units import format_percent

SETTLED_SPREAD = 0.10  # of the rounds, (max - min) / median: the method's threshold, as in the benchmark
CONFIDENCE = 0.95
LEAST_STEPS = 5  # of a side: the whole range of n values covers the median with 1 - 2^(1-n), which is 94 % for 5
LEAST_ROUNDS = 2
RESAMPLES = 10_000
MEAN_RESAMPLES = 2_000
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def step_change(
    sides: tuple[SideInfo, SideInfo],
    medians: tuple[Sequence[int], Sequence[int]],
    means: tuple[Sequence[int], Sequence[int]],
    same: bool,
) -> StepChange:
    """medians, means: the samples of a side: its steps, or with rounds on both sides the median and the mean step of each
    round. Rounds are few, so that their interval is the range: from the fastest against the slowest to the reverse.

    same: both sides are one recording, so there is nothing to be unsure about.
    """
    old, new = sides[0].median_ns, sides[1].median_ns
    change = new / old - 1 if old and new else None
    rounds = all(side.rounds > 1 for side in sides)
    settled = not any(side.spread is not None and side.spread > SETTLED_SPREAD for side in sides)
    if same:
        return StepChange(change, None, None, "none", settled, mean_change=change)
    least = LEAST_ROUNDS if rounds else LEAST_STEPS
    if change is None or min(len(medians[0]), len(medians[1])) < least:
        return StepChange(change, None, None, "none", settled=False)
    if rounds:
        low, high = _extremes(medians)
        mean_low, mean_high = _extremes(means)
        mean = float(np.median(means[1]) / np.median(means[0])) - 1
        return StepChange(change, low, high, "rounds", settled, mean, mean_low, mean_high)
    rng = np.random.default_rng(0)  # one for both sides: the same draws twice would make them move together
    low, high = interval(_medians(medians[0], rng), _medians(medians[1], rng))
    mean_low, mean_high = interval(_means(means[0], rng), _means(means[1], rng))
    mean = float(np.mean(means[1]) / np.mean(means[0])) - 1
    return StepChange(change, low, high, "steps", settled, mean, mean_low, mean_high, CONFIDENCE)


def _extremes(samples: tuple[Sequence[int], Sequence[int]]) -> tuple[float, float]:
    before, after = samples
    return min(after) / max(before) - 1, max(after) / min(before) - 1


def interval(before: Floats, after: Floats, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The percentile interval of after / before - 1, from a statistic's values over resamples of each side."""
    tail = (1 - confidence) / 2
    low, high = np.quantile(after / before - 1, (tail, 1 - tail))
    return float(low), float(high)


def _medians(sample: Sequence[int], rng: np.random.Generator) -> Floats:
    """The medians of bootstrap resamples, drawn as what they are: order statistics of uniform draws (Beta distributed; David
    and Nagaraja, Order Statistics, 2.2). 10,000 steps cost no more than six.
    """
    values = np.sort(np.asarray(sample, np.float64))
    n = values.size
    half = n // 2
    if n % 2:
        lower = upper = rng.beta(half + 1, half + 1, RESAMPLES)
    else:
        lower = rng.beta(half, half + 1, RESAMPLES)
        upper = 1 - (1 - lower) * rng.random(RESAMPLES) ** (1 / half)  # the least of the `half` draws above `lower`
    places = [np.minimum((draws * n).astype(np.int64), n - 1) for draws in (lower, upper)]
    return (values[places[0]] + values[places[1]]) / 2


def _means(sample: Sequence[int], rng: np.random.Generator) -> Floats:
    values = np.asarray(sample, np.float64)
    return np.array([values[rng.integers(0, values.size, values.size)].mean() for _ in range(MEAN_RESAMPLES)])


def judge_gate(comparison: Comparison, percent: float) -> Gate:
    """pass, fail or cannot_judge, and the exit code. A doubt is never a pass: neither an interval that holds both no change
    and a slow-down beyond the gate, nor a mean step that is surely slower than the gate while the median is not."""
    step, limit = comparison.step, percent / 100
    if comparison.blockers:
        return Gate(percent, "cannot_judge", 4, comparison.blockers[0])
    if step.change is None or not step.settled:
        return Gate(percent, "cannot_judge", 4, comparison.headline)
    says = f"{signed(step.change)} against a gate of {percent:g} %"
    if (
        step.sample == "steps"
        and step.low is not None
        and step.high is not None
        and step.low <= 0
        and limit < step.high
    ):
        return Gate(
            percent,
            "cannot_judge",
            4,
            f"{says}, but the interval {interval_text(step)} holds both no change and a slow-down beyond the gate",
        )
    if step.change > limit:
        return Gate(percent, "fail", 3, says)
    if step.mean_change is not None and step.mean_low is not None and step.mean_change > limit and step.mean_low > 0:
        return Gate(
            percent,
            "cannot_judge",
            4,
            f"{says} for the median, but the mean step changes by {signed(step.mean_change)}",
        )
    return Gate(percent, "pass", 0, says)


def signed(change: float) -> str:
    """`+5.0 %`, `-28 %`, `0.0 %`"""
    text = format_percent(change)
    return f"-{text}" if change < 0 and text.startswith("<") else f"+{text}" if change > 0 else text


def interval_text(step: StepChange) -> str:
    assert step.low is not None and step.high is not None
    return f"{signed(step.low)} to {signed(step.high)}"
