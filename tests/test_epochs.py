"""Epochs that are longer than what was recorded: their starts are not counted many-fold."""

from __future__ import annotations

import numpy as np
import pytest
from builders import Recorder, loader_batches, loader_info, measured, scopes

from gpudiag.epochs import epoch_start
from gpudiag.evidence import warnings_of

MS = 1_000_000
STEP = 10 * MS


def run(epoch: int, recorded: range, wait: int = 40 * MS) -> tuple[Recorder, dict[str, object]]:
    """Steps of 10 ms, one batch each; every `epoch` steps the first batch of an epoch is waited for `wait` longer."""
    recorder, rows, at = Recorder(), [], 0
    for number in range(3 * epoch):
        begins = number % epoch == 0
        length = STEP + (wait if begins and number else 0)
        rows.append(
            {
                "start": at, "end": at + length - 9 * MS, "epoch": number // epoch, "batch": number % epoch, "worker": 0,
                "fetch_start": at, "fetch_end": at + MS, "dataset_ns": MS,
            }
        )  # fmt: skip
        if number in recorded:
            recorder.mark(at, at + length, f"gpudiag::step#{number}")
            recorder.mark(at, at + length - 9 * MS, "gpudiag::data_wait")
            recorder.mark(at + length - 9 * MS, at + length, "gpudiag::forward")
        at += length
    return recorder, {"loader": loader_batches(*rows), "loaders": (loader_info(batches=3 * epoch),)}


def test_a_start_among_fewer_steps_than_an_epoch_has_is_left_out_and_spread_over_an_epoch() -> None:
    recorder, more = run(100, range(190, 210))
    got = measured(recorder, **more)
    assert got["steps"].value == 19
    assert got["step_time"].value == STEP
    assert got["worker_restart_time"].value == pytest.approx(40 * MS / 100)
    (scope,) = scopes(recorder, **more)
    assert any("begins an epoch of 100 steps and is left out" in text for text in warnings_of(scope, got))
    assert not any("evaluation" in text for text in warnings_of(scope, got))


def test_epochs_that_fit_into_the_window_count_as_recorded() -> None:
    recorder, more = run(5, range(3, 15))
    got = measured(recorder, **more)
    assert got["steps"].value == 12
    assert got["worker_restart_time"].value == pytest.approx(2 * 40 * MS / 12, rel=0.1)


def test_the_first_epochs_start_and_runs_without_records_are_left_as_they_are() -> None:
    recorder, more = run(100, range(20))
    (scope,) = scopes(recorder, **more)
    assert epoch_start(scope.timeline, scope.all_steps) is None
    (bare,) = scopes(recorder)
    assert epoch_start(bare.timeline, bare.all_steps) is None
    assert np.array_equal(bare.steps.start, scope.steps.start)
