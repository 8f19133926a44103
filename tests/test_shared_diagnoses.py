"""Each shared script gets the diagnosis that its header expects, and none of those that the header calls wrong."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_profile import profiled, run

from gpudiag.bundle import read_bundle
from gpudiag.diagnosis import Diagnosis, Finding, from_json
from gpudiag.read.nsys_report import find_nsys

pytest.importorskip("torch")
pytestmark = pytest.mark.live


@dataclass(frozen=True)
class Expected:
    """What a header asks for. first: the finding with most to win; absent: what must not be a finding above a hint."""

    words: tuple[str, ...]
    bound_by: tuple[str, ...]
    first: str = ""
    absent: tuple[str, ...] = ()
    headline: str = ""


LOADER = ("loader_wait", "loader_workers_zero", "loader_cpu_bound", "loader_too_few_workers")
SYNC = ("sync_idle", "readback_each_step", "sync_each_step")
SLOW_SAMPLES = ("loader_cpu_bound", "loader_storage_bound", "loader_too_few_workers", "loader_collate_bound")
EXPECTED = {
    "01": Expected(
        ("01_slow_getitem.py",),
        ("input",),
        "loader_workers_zero",
        ("optimizer_host_loop", "launch_bound", "host_code_outside_phases"),
    ),
    "01 cured as far as the cores go": Expected(
        ("01_slow_getitem.py", "--workers", "2"), ("input",), "loader_cpu_bound", ("loader_workers_zero",)
    ),
    "02": Expected(
        ("02_worker_restart_every_epoch.py",),
        ("input",),
        "loader_workers_not_persistent",
        (*SLOW_SAMPLES, "loader_workers_zero"),
    ),
    "02 cured": Expected(
        ("02_worker_restart_every_epoch.py", "--persistent"),
        ("host", "none"),
        absent=("loader_workers_not_persistent", *SLOW_SAMPLES),
    ),
    "04": Expected(
        ("04_in_memory_collate.py",),
        ("input",),
        "loader_per_sample_in_memory",
        ("loader_workers_zero", "loader_too_few_workers", "loader_cpu_bound"),
    ),
    "10": Expected(("10_many_small_params.py",), ("launch",), "optimizer_host_loop", LOADER, "optimizer's many small"),
    "13": Expected(("13_checkpoint_pauses.py",), ("host",), "checkpoint_log_stall", LOADER, "saving and logging"),
    "16": Expected(
        ("16_logging_every_step.py",),
        ("host",),
        "log_arguments_costly",
        (*LOADER, "optimizer_host_loop", *SYNC),
        "the arguments of log calls",
    ),
    "16 cured": Expected(
        ("16_logging_every_step.py", "--off"),
        ("none",),
        absent=(*LOADER, "log_arguments_costly", "checkpoint_log_stall", "host_code_outside_phases"),
    ),
}
# nsys records no operators, so it cannot count those of the optimizer
CASES = [("torch", name) for name in EXPECTED] + [("nsys", name) for name in EXPECTED if name != "10"]


def judged(shared: Path, tmp_path: Path, recorder: str, words: tuple[str, ...]) -> Diagnosis:
    if recorder == "nsys" and find_nsys() is None:
        pytest.skip("nsys is not installed")
    got = profiled(list(words), shared / "scripts", tmp_path, "--no-save", "--with", recorder)
    assert got.code == 0, got.err
    assert got.bundle is not None
    return from_json((got.bundle / "diagnosis.json").read_bytes())


def serious(diagnosis: Diagnosis) -> dict[str, Finding]:
    """The findings above a hint, without what the machine does meanwhile."""
    return {f.rule: f for f in diagnosis.findings if f.severity != "info" and f.step != "environment"}


@pytest.mark.slow
@pytest.mark.parametrize(("recorder", "name"), CASES, ids=[" ".join(case) for case in CASES])
def test_a_shared_script_gets_the_diagnosis_of_its_header(
    shared: Path, tmp_path: Path, recorder: str, name: str
) -> None:
    expected = EXPECTED[name]
    diagnosis = judged(shared, tmp_path, recorder, expected.words)
    found = serious(diagnosis)
    roots = [rule for rule, finding in found.items() if not finding.caused_by]
    if expected.bound_by == ("none",) and any(finding.rule == "cpu_contended" for finding in diagnosis.findings):
        pytest.skip("other programs have the CPUs, and the report says that first")
    assert diagnosis.verdict.bound_by in expected.bound_by, diagnosis.verdict
    assert not found.keys() & set(expected.absent)
    assert not found.keys() & set(SYNC)
    if expected.first:
        assert roots[0] == expected.first, roots
    assert expected.headline in diagnosis.verdict.headline
    script = expected.words[0]
    where = found[expected.first].where if expected.first else ""
    assert where.startswith(f"{script}:") or expected.first in ("", "optimizer_host_loop")


@pytest.mark.slow
def test_the_advice_is_the_one_of_the_headers(shared: Path, tmp_path: Path) -> None:
    """In memory: whole batches; small parameters: what the step gains, not the optimizer."""
    in_memory = serious(judged(shared, tmp_path / "04", "torch", EXPECTED["04"].words))["loader_per_sample_in_memory"]
    changes = " ".join(fix.change for fix in in_memory.fixes)
    assert "whole batches" in changes
    assert "more workers" not in changes
    assert "batch_size=None" in " ".join(fix.code for fix in in_memory.fixes)
    optimizer = serious(judged(shared, tmp_path / "10", "torch", EXPECTED["10"].words))["optimizer_host_loop"]
    assert "fused=True" in optimizer.fixes[0].code
    assert 0.3 < optimizer.share < 0.8  # of the step; of the optimizer it would be all


@pytest.mark.slow
@pytest.mark.parametrize("recorder", ["torch", "nsys"])
def test_the_period_of_checkpoints_is_noticed(shared: Path, tmp_path: Path, recorder: str) -> None:
    diagnosis = judged(shared, tmp_path, recorder, EXPECTED["13"].words)
    (evidence,) = (e for e in serious(diagnosis)["checkpoint_log_stall"].evidence if e.label == "recurs every")
    assert evidence.value == "10 steps"
    assert diagnosis.metrics["periodic_stall_period"].value == 10


@pytest.mark.parametrize("recorder", ["torch", "nsys"])
def test_a_script_without_torch_is_said_to_have_none_and_nothing_is_claimed(
    shared: Path, tmp_path: Path, recorder: str
) -> None:
    if recorder == "nsys" and find_nsys() is None:
        pytest.skip("nsys is not installed")
    words = ["08_sync_is_not_the_culprit.py"]
    got = profiled(words, shared / "scripts", tmp_path, "--with", recorder)
    assert (got.code, "with per-step read" in got.out) == (0, True)
    first, last = got.err.strip().splitlines()
    assert first == f"gpudiag: {recorder}: {words[0]} did not import torch: there is nothing to record"
    assert last.startswith("gpudiag: nothing to judge")
    assert got.bundle is not None
    assert not (got.bundle / "diagnosis.json").exists()


def test_work_in_children_is_not_called_an_idle_script(shared: Path, tmp_path: Path) -> None:
    got = profiled(["19_spawn_processes.py"], shared / "scripts", tmp_path)
    assert got.code == 0
    assert got.bundle is not None
    (note,) = (n for n in read_bundle(got.bundle).manifest.captures[0].notes if "child" in n)
    assert "most of the work ran in 2 child processes" in note
    assert note in got.err
    assert "idle" not in got.err


@pytest.mark.slow
def test_the_gate_and_its_cure(shared: Path, tmp_path: Path) -> None:
    """What is fixed passes a gate that the fault fails."""
    for words, code in (
        (["02_worker_restart_every_epoch.py"], 3),
        (["02_worker_restart_every_epoch.py", "--persistent"], 0),
    ):
        command = [sys.executable, "-m", "gpudiag", "profile", "--no-save", "--with", "torch", "--fail-on", "critical"]
        got = run([*command, "-o", str(tmp_path / f"b{code}"), *words], shared / "scripts")
        assert got.code == code, got.err
