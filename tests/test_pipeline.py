"""The main job on real recordings: figures against an independent program, verdicts against what is known of each file."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

import pytest
from conftest import SHARED

from gpudiag.diagnosis import Diagnosis, Finding, from_json, to_json
from gpudiag.errors import GpudiagError
from gpudiag.pipeline import diagnose

TRACES = SHARED / "traces"


@functools.cache
def diagnosis_of(name: str) -> Diagnosis:
    return diagnose([TRACES / name])


def reference() -> list[dict[str, str]]:
    path = TRACES / "REFERENCE.tsv"
    if not path.is_file():
        return []
    with path.open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


ROWS = reference()
needs_traces = pytest.mark.skipif(not ROWS, reason=f"no shared recordings at {SHARED} (set GPUDIAG_SHARED)")
HEALTHY = (
    "nsys/healthy_1pct_idle.sqlite",
    "nsys/h100_2gpu_train_before.sqlite",
)


def serious(diagnosis: Diagnosis) -> list[Finding]:
    """Findings of warning or above that stand for themselves."""
    return [finding for finding in diagnosis.findings if finding.severity != "info" and not finding.caused_by]


@needs_traces
@pytest.mark.parametrize("row", ROWS, ids=[f"{row['file']}:{row['device']}" for row in ROWS])
def test_figures_of_every_device_equal_the_reference_to_the_nanosecond(row: dict[str, str]) -> None:
    diagnosis = diagnosis_of(row["file"])
    (figures,) = [figures for figures in diagnosis.devices if figures.device == int(row["device"])]
    wanted = {name: int(text) for name, text in row.items() if name not in ("file", "device")}
    assert {name: getattr(figures, name) for name in wanted} == wanted


@needs_traces
@pytest.mark.parametrize("name", sorted({row["file"] for row in ROWS} | {"kineto/cpu_only.json.gz"}))
def test_accounts_sum_and_findings_never_promise_more_than_the_step(name: str) -> None:
    diagnosis = diagnosis_of(name)
    for account in diagnosis.accounts:
        assert sum(account.parts.values()) == account.total_ns
        if account.per_step:
            assert sum(sum(step.values()) for step in account.per_step) == account.total_ns
    step = diagnosis.metrics["step_time"].value
    assert step is not None
    assert sum(finding.bound_ns for finding in diagnosis.findings) <= step * 1.000001
    assert from_json(to_json(diagnosis)) == diagnosis


@needs_traces
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_silent(name: str) -> None:
    diagnosis = diagnosis_of(name)
    assert diagnosis.verdict.status == "healthy"
    assert serious(diagnosis) == []


@needs_traces
def test_streamed_weights_are_a_transfer_case_from_pinned_memory_and_nothing_else() -> None:
    diagnosis = diagnosis_of("nsys/h100_2gpu_streamed_weights.sqlite")
    assert (diagnosis.verdict.status, diagnosis.verdict.bound_by) == ("bottleneck", "transfer")
    for account in diagnosis.accounts:
        copies = sum(ns for part, ns in account.parts.items() if part.startswith("copy_exposed"))
        idle = sum(ns for part, ns in account.parts.items() if part.startswith("idle"))
        assert copies / account.total_ns == pytest.approx(0.970, abs=0.001)
        assert idle / account.total_ns < 0.01
    assert diagnosis.metrics["h2d_pinned_rate"].value == pytest.approx(27.7e9, rel=0.01)
    assert {finding.category for finding in serious(diagnosis)} == {"transfer"}
    assert "pageable_h2d" not in {finding.rule for finding in diagnosis.findings}
    advice = " ".join(fix.change + fix.code for finding in diagnosis.findings for fix in finding.fixes)
    assert "pin_memory" not in advice
    assert "pinned" in diagnosis.verdict.headline


@needs_traces
def test_a_compute_bound_fp32_run_hears_of_tensor_cores_only() -> None:
    diagnosis = diagnosis_of("kineto/v100_ns_resolution.json.gz")
    assert (diagnosis.verdict.status, diagnosis.verdict.bound_by) == ("bottleneck", "compute")
    assert [finding.rule for finding in serious(diagnosis)] == ["tensor_cores_unused"]


@needs_traces
@pytest.mark.parametrize("name", ["kineto/h100_qwen_inference.json.gz", "kineto/mi300_qwen_inference.json.gz"])
def test_eager_inference_at_eight_percent_idle_hears_of_its_kernels_only(name: str) -> None:
    assert {finding.step for finding in serious(diagnosis_of(name))} <= {"compute"}


@needs_traces
def test_two_kernels_cannot_be_judged() -> None:
    assert diagnosis_of("nsys/two_kernels_only.sqlite").verdict.status == "cannot_judge"
    assert diagnosis_of("kineto/a100_event_sync.json.gz").verdict.status == "cannot_judge"


@needs_traces
def test_no_workers_is_input_bound_and_both_shares_are_said_and_the_idle_one_counted() -> None:
    diagnosis = diagnosis_of("kineto/v100_resnet50_workers0.json.gz")
    assert diagnosis.verdict.bound_by == "input"
    step = diagnosis.metrics["step_time"].value
    assert step is not None
    assert (diagnosis.metrics["loader_time"].value or 0) / step == pytest.approx(0.40, abs=0.01)
    assert (diagnosis.metrics["idle_input"].value or 0) / step == pytest.approx(0.27, abs=0.01)
    assert "27 %" in diagnosis.verdict.headline
    assert "40 %" in diagnosis.verdict.headline
    first = next(finding for finding in diagnosis.findings if not finding.caused_by)
    assert first.category == "input"
    assert first.share == pytest.approx(0.27, abs=0.01)


@needs_traces
def test_four_workers_are_not_input_bound() -> None:
    diagnosis = diagnosis_of("kineto/v100_resnet50_workers4.json.gz")
    assert diagnosis.verdict.bound_by == "launch"
    assert not [finding for finding in diagnosis.findings if finding.category == "input"]


@needs_traces
@pytest.mark.parametrize(
    ("name", "bound_by"),
    [
        ("kineto/early2021_resnet50_workers0.json.gz", "input"),
        ("kineto/h100_owlv2.json.gz", "input"),
        ("kineto/b200_eager_8rank_rank.json.gz", "launch"),
        ("kineto/a100_nccl_2024.json.gz", "launch"),
        ("kineto/megatron_tp8/rank0.json.gz", "communication"),
        ("nsys/a100_saxpy_old_schema.sqlite", "transfer"),
    ],
)
def test_what_binds_the_run_is_what_is_known_of_it(name: str, bound_by: str) -> None:
    assert diagnosis_of(name).verdict.bound_by == bound_by


@needs_traces
def test_a_recording_with_python_stacks_says_that_they_inflate_the_host_time() -> None:
    assert any("Python stacks" in warning for warning in diagnosis_of("kineto/b200_eager_8rank_rank.json.gz").warnings)


@needs_traces
def test_a_sync_after_each_kernel_counts_the_idle_time_after_it_not_the_wait() -> None:
    diagnosis = diagnosis_of("nsys/a100_sync_after_each_kernel.sqlite")
    (finding,) = [finding for finding in diagnosis.findings if finding.rule == "sync_idle"]
    waits = diagnosis.metrics["sync_time"].value
    idle = diagnosis.devices[0].idle_ns
    assert waits is not None
    assert waits > 0.8 * diagnosis.devices[0].span_ns
    assert 0 < finding.bound_ns <= idle


@needs_traces
def test_the_ranks_that_arrive_last_are_named() -> None:
    diagnosis = diagnose([TRACES / "kineto" / "megatron_tp8"])
    assert len(diagnosis.accounts) == 8
    assert diagnosis.source.path == str(TRACES / "kineto" / "megatron_tp8")  # no one rank's file
    assert [row["rank"] for row in diagnosis.ranks if row["late"]] == [0, 6]
    assert diagnosis.verdict.bound_by == "communication"
    assert "ranks 0, 6 arrive last" in diagnosis.verdict.headline


@needs_traces
def test_the_same_recording_gives_the_same_bytes() -> None:
    path = TRACES / "kineto" / "a100_nccl_2024.json.gz"
    assert to_json(diagnose([path])) == to_json(diagnose([path]))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.json.gz", b"", "empty"),
        ("text.sqlite", b"no database", "not a recording"),
        ("cut.json.gz", b"\x1f\x8b\x08\x00", ""),
    ],
)
def test_bad_files_give_one_line_and_a_next_step(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(GpudiagError) as caught:
        diagnose([path])
    assert said in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint


def test_a_missing_file_says_so() -> None:
    with pytest.raises(GpudiagError, match="no such file"):
        diagnose([Path("/nonexistent/trace.json")])
