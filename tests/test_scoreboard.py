"""The scoreboard's figures must not fall, and every rule can be fired by something, or it is said why not."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import SHARED

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from accuracy import Score, measure, text  # noqa: E402

from gpudiag.rules import load_rules  # noqa: E402

RIGHT = 1.0  # of all labelled inputs, in every point; the goal is 0.95
WORST_ESTIMATE = 0.03  # of the step, over the simulated pairs; 2.4 % when this was written
HAS_TRACES = (SHARED / "traces" / "REFERENCE.tsv").is_file()

# Rules that no recording, case or sample fires, and why. Whoever adds a rule adds what fires it, or a line here.
NOT_FIRED = {
    "memory_fragmented": "no recording here has a nearly full GPU; tests/test_metrics_machine.py fires it",
    "nvlinks_down": "no recording here has NVLink states; tests/test_nvml.py fires it",
    "gpu_out_of_memory": "no recording here ran out of a GPU's memory; tests/test_metrics_run.py fires it, tests/test_gpu.py on one",
    "host_out_of_memory": "no recording here ran out of memory; tests/test_loader_inside.py fires it on a run that does",
    "log_arguments_costly": "the samples have no such log call; tests/test_shared_diagnoses.py fires it",
    "evaluation_costly": "no recording here evaluates for long; tests/test_evidence.py fires it",
    "drivers_differ": "no recording here has ranks of two machines; tests/test_bench_result.py fires it",
}
# Fired by a sample that needs a running script; its live test holds it.
BY_SAMPLE = {"optimizer_host_loop": "many_small_params/slow"}
# Fired by scripts of tests/test_loader_inside.py, which run live.
LIVE = dict.fromkeys(
    (
        "loader_one_transform", "loader_few_workers_work", "loader_threads_oversubscribed", "loader_cold_cache",
        "loader_unpickling", "shm_full", "shm_too_small", "batch_work_in_main_thread",
        "loader_workers_pinned",
    ),
    "tests/test_loader_inside.py",
)  # fmt: skip
# A share of the host's own code that no phase covers: every live sample shows some of it, none must.
NOTES = {"host_code_outside_phases": "fired by live runs, as a note"}


@pytest.fixture(scope="module")
def score() -> Iterator[Score]:
    yield measure()


def test_the_first_named_cause_is_right(score: Score) -> None:
    wrong = [f"{item.name}: {'; '.join(item.wrong)}" for item in score.judged if item.wrong]
    assert score.right >= RIGHT, wrong
    assert len(score.judged) >= (99 if HAS_TRACES else 80)


def test_healthy_input_hears_nothing(score: Score) -> None:
    assert sum(item.healthy for item in score.judged) >= 15
    assert score.on_healthy == 0, [(item.name, item.false_alarms) for item in score.judged if item.healthy]


def test_no_rule_was_named_where_it_had_to_be_silent(score: Score) -> None:
    assert [(item.name, item.false_alarms) for item in score.judged if item.false_alarms] == []


def test_estimates_agree_with_the_simulated_cure(score: Score) -> None:
    assert all(estimate.predicted is not None for estimate in score.estimates), score.estimates
    assert score.worst_error <= WORST_ESTIMATE


def test_every_rule_can_be_fired_or_it_is_said_why_not(score: Score) -> None:
    rules = load_rules().rules
    listed = {**NOT_FIRED, **BY_SAMPLE, **LIVE, **NOTES}
    silent = set(rules) - score.fired
    if not HAS_TRACES:  # some rules are fired by real recordings alone
        silent -= {
            "attention_unfused",
            "gpus_uneven",
            "device_copies",
            "blocking_copy",
            "not_enough_evidence",
            "cpu_ops_in_step",
        }
    assert silent <= set(listed), "add a recording, a case or a sample that fires it, or say here why nothing can"
    assert set(listed) <= set(rules)
    assert not set(listed) & score.fired, "these are fired now: take them off the list"
    for rule, sample in BY_SAMPLE.items():
        name, _, variant = sample.partition("/")
        assert rule in tomllib.loads((ROOT / "samples" / name / "expect.toml").read_text())[variant]["must_find"]


def test_the_scoreboard_prints_every_rule_with_a_figure_and_the_totals(score: Score) -> None:
    printed = text(score, load_rules())
    for rule in ("loader_workers_zero", "straggler_rank", "tf32_off"):
        assert f"\n{rule} " in printed
    for words in ("goal 95 %", "findings on healthy input", "worst error of an estimate", "skipped: samples"):
        assert words in printed
