"""Percentiles by order statistics, with how sure they are. No interpolation: a reported latency is one that happened."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpudiag.bench.result import Latency, MeasuringRules, Percentile, RoundLoad
from gpudiag.bench.stability import summarise


def percentile(samples: Sequence[int], q: float) -> Percentile:
    """Nearest-rank percentile of `samples` (ns), 0 < q < 1, with its 95 % interval.

    The number of samples below the true quantile is binomial(n, q), whatever the distribution (Conover, Practical
    Nonparametric Statistics, 3.2); so ranks l and u with P(l <= B < u) >= 0.95 bound it. For q = 0.99 an upper bound exists
    from 368 samples (0.99^368 < 0.025).
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    n = len(ordered)
    low, high = _ranks(n, q)
    return Percentile(
        q=q,
        ns=ordered[rank(n, q) - 1],
        low_ns=ordered[low - 1],
        high_ns=ordered[high - 1] if high else None,
        enough=high is not None,
        samples_needed=samples_needed(q),
    )


def latency_of(
    samples: Sequence[Sequence[int]], loads: Sequence[RoundLoad], batch: int, rules: MeasuringRules, cores: int
) -> Latency:
    """samples: ns, a list a round. Stability is judged by the rounds' p50; the percentiles are of all samples together."""
    medians = [float(percentile(each, 0.5).ns) for each in samples]
    everything = [ns for each in samples for ns in each]
    rounds = summarise(medians, "ns", rules.unstable_over, loads, cores)
    return Latency(batch, len(everything), percentile(everything, 0.5), percentile(everything, 0.99), rounds)


def rank(n: int, q: float) -> int:
    """1-based nearest rank: the smallest r with r/n >= q. The tiny shrink keeps 0.99 x 100 at 99 in binary fractions."""
    return max(1, math.ceil(q * n * (1 - 1e-12)))


def samples_needed(q: float) -> int:
    """The smallest n whose largest sample lies above the quantile with 97.5 % confidence: q^n <= 0.025."""
    return math.ceil(math.log(0.025) / math.log(q))


def _ranks(n: int, q: float) -> tuple[int, int | None]:
    """1-based ranks of the interval; the upper one is None when even the largest sample is not surely above."""
    low, high = 1, None
    cumulative = 0.0
    for k in range(n + 1):
        cumulative += _binomial(n, k, q)  # P(B <= k)
        if cumulative <= 0.025:
            low = min(n, k + 1)  # P(x_(k+1) > quantile) = P(B <= k)
        if cumulative >= 0.975:
            high = k + 1 if k < n else None  # P(x_(k+1) <= quantile) = P(B >= k+1) <= 0.025
            break
    return low, high


def _binomial(n: int, k: int, q: float) -> float:
    log = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(q) + (n - k) * math.log1p(-q)
    return math.exp(log)
