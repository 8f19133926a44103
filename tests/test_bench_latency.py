"""Percentiles are samples that happened, with how sure they are."""

from __future__ import annotations

import random

import pytest

from gpudiag.bench.latency import percentile, rank, samples_needed


def test_a_percentile_is_the_nearest_rank_of_the_ordered_samples() -> None:
    samples = list(range(1, 101))
    random.Random(1).shuffle(samples)
    assert percentile(samples, 0.5).ns == 50
    assert percentile(samples, 0.99).ns == 99  # 0.99 x 100 is 99.00000000000001 in binary and must not become rank 100
    assert percentile([7], 0.99).ns == 7
    assert [rank(n, 0.99) for n in (1, 99, 100, 101, 1000)] == [1, 99, 99, 100, 990]


def test_numpy_agrees_on_the_nearest_rank() -> None:
    import numpy as np

    generator = np.random.default_rng(5)
    for n in (3, 10, 99, 368, 1000):
        samples = generator.integers(0, 10**9, n)
        for q in (0.5, 0.9, 0.99):
            assert percentile(samples.tolist(), q).ns == int(np.quantile(samples, q, method="inverted_cdf"))


def test_a_p99_needs_368_samples_before_its_upper_bound_exists() -> None:
    assert samples_needed(0.99) == 368
    assert not percentile(list(range(367)), 0.99).enough
    assert percentile(list(range(368)), 0.99).enough


def test_the_interval_covers_the_true_percentile_in_at_least_95_of_100_experiments() -> None:
    generator = random.Random(3)
    covered = 0
    for _ in range(400):
        found = percentile([int(generator.random() * 1e9) for _ in range(400)], 0.9)
        covered += found.low_ns <= 0.9e9 <= (found.high_ns or 0)
    assert covered / 400 > 0.93  # 0.95 less three standard errors


def test_no_samples_are_an_error() -> None:
    with pytest.raises(ValueError):
        percentile([], 0.5)
