"""The rules themselves: each file's own examples, what real recordings say, and that an installation finds them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from gpudiag.diagnosis import Diagnosis, Finding
from gpudiag.pipeline import diagnose
from gpudiag.rule import Rule
from gpudiag.rules import builtin_dir, check_rules, judge, load_rules

ROOT = Path(__file__).resolve().parents[1]
RULES = list(load_rules())
BY_ID = {rule.id: rule for rule in RULES}
_SHELL = re.compile(r"^(?:[A-Z_]+=|gpudiag |nvidia-smi|sudo |py-spy |docker |ncu |python |env )")


def test_every_example_of_every_rule_comes_out_as_it_says() -> None:
    assert [str(problem) for problem in check_rules(builtin_dir())] == []


def test_a_rule_lies_in_the_folder_of_its_step() -> None:
    assert [rule.id for rule in RULES if rule.path.parent.name != rule.step] == []


def test_names_and_aliases_are_unique() -> None:
    names = [name for rule in RULES for name in (rule.id, *rule.aliases)]
    assert len(names) == len(set(names))


def test_causes_do_not_run_in_circles() -> None:
    def above(rule_id: str, seen: tuple[str, ...]) -> None:
        assert rule_id not in seen, " <- ".join((*seen, rule_id))
        for cause in BY_ID[rule_id].explained_by:
            above(cause, (*seen, rule_id))

    for rule in RULES:
        above(rule.id, ())


def firing(rule: Rule) -> list[Finding]:
    found = []
    for example in rule.examples:
        if example.outcome == "fired":
            step = int(example.metrics["step_time"].value) if "step_time" in example.metrics else 10**9
            parts = dict.fromkeys(rule.part, step)
            found += judge([rule], example.metrics, step_time_ns=step, parts=parts, texts=example.texts).findings
    return found


@pytest.mark.parametrize("rule", RULES, ids=[rule.id for rule in RULES])
def test_advice_says_what_when_and_how_it_is_proved_in_code_that_parses(rule: Rule) -> None:
    for finding in firing(rule):
        assert finding.fixes
        for fix in finding.fixes:
            assert fix.change
            assert fix.only_if
            assert fix.proof
            if fix.code and not _SHELL.match(fix.code):
                ast.parse(fix.code.replace("...", "**{}") if "(..., " in fix.code and "=" not in fix.code else fix.code)
            if "pin_memory=True" in fix.code:
                assert "non_blocking=True" in fix.code  # each alone brings little


@pytest.mark.parametrize("rule", [r for r in RULES if r.part], ids=[r.id for r in RULES if r.part])
def test_a_rule_about_time_says_how_far_which_number_must_move(rule: Rule) -> None:
    assert any(not fix.proof.is_constant for fix in rule.fixes), "no fix's proof quotes a measured value"


@pytest.fixture(scope="session")
def diagnosed(traces: Path) -> dict[str, Diagnosis]:
    """Diagnoses by file name, made when first asked for."""

    class Cache(dict[str, Diagnosis]):
        def __missing__(self, name: str) -> Diagnosis:
            self[name] = diagnose([traces / name])
            return self[name]

    return Cache()


def standing(diagnosis: Diagnosis) -> dict[str, Finding]:
    """The findings that no other one explains."""
    return {finding.rule: finding for finding in diagnosis.findings if not finding.caused_by}


def loud(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {rule: finding for rule, finding in standing(diagnosis).items() if finding.severity != "info"}


def test_streamed_weights_are_a_matter_of_copies_and_nobody_is_told_to_pin(diagnosed: dict[str, Diagnosis]) -> None:
    diagnosis = diagnosed["nsys/h100_2gpu_streamed_weights.sqlite"]
    assert {finding.category for finding in loud(diagnosis).values()} == {"transfer"}
    copies = standing(diagnosis)["exposed_copy"]
    assert copies.share == pytest.approx(0.97, abs=0.005)
    advice = " ".join(f"{fix.change} {fix.code}" for finding in diagnosis.findings for fix in finding.fixes)
    assert "pin" not in advice.lower()
    assert "copy_stream" in advice
    for rule in ("launch_bound", "sync_idle", "gpu_idle", "pageable_h2d"):
        assert diagnosis.rules[rule] == "clear"
    waits = next(finding for finding in diagnosis.findings if finding.rule == "wait_is_a_copy")
    assert (waits.caused_by, waits.bound_ns) == ("exposed_copy", 0)


def test_a_healthy_recording_has_no_finding_at_all(diagnosed: dict[str, Diagnosis]) -> None:
    assert diagnosed["nsys/healthy_1pct_idle.sqlite"].findings == ()


def test_idle_time_without_an_owner_is_not_answered_with_a_look_at_its_owner(diagnosed: dict[str, Diagnosis]) -> None:
    """Work waits in a queue in the one, nothing shows the host in the other."""
    queued = standing(diagnosed["kineto/a100_negative_queue.json.gz"])["gpu_idle"]
    blind = standing(diagnosed["nsys/a100_saxpy_old_schema.sqlite"])["gpu_idle"]
    assert "queued work waits" in queued.fixes[0].change
    assert "Record the host side" in blind.fixes[0].change
    assert "largest owner" not in " ".join(fix.change for finding in (queued, blind) for fix in finding.fixes)
    assert [item.label for item in queued.evidence][-1] == "work queued, but not started"
    assert "owner not recorded" in [item.label for item in blind.evidence]
    assert not any(item.value.startswith("0 ns") for item in (*queued.evidence, *blind.evidence))


def test_code_to_copy_fits_a_terminal_of_80_columns() -> None:
    lines = [(rule.id, line) for rule in RULES for fix in rule.fixes for line in fix.code.text.splitlines()]
    assert [item for item in lines if len(item[1]) > 72] == []


def test_two_kernels_are_not_judged(diagnosed: dict[str, Diagnosis]) -> None:
    diagnosis = diagnosed["nsys/two_kernels_only.sqlite"]
    assert set(standing(diagnosis)) == {"not_enough_evidence"}
    assert diagnosis.rules["gpu_idle"] == "not_judged"


def test_fp32_on_a_busy_v100_leads_to_tensor_cores_and_nothing_else(diagnosed: dict[str, Diagnosis]) -> None:
    diagnosis = diagnosed["kineto/v100_ns_resolution.json.gz"]
    assert set(loud(diagnosis)) == {"tensor_cores_unused"}
    code = " ".join(fix.code for fix in standing(diagnosis)["tensor_cores_unused"].fixes)
    assert "float16" in code  # a V100 has neither BF16 nor TF32
    assert "bfloat16" not in code


@pytest.mark.parametrize(
    "name",
    [
        "kineto/v100_resnet50_workers0.json.gz",
        "kineto/early2021_resnet50_workers0.json.gz",
        "kineto/h100_owlv2.json.gz",
    ],
)
def test_a_loader_in_the_main_process_is_the_first_finding_and_faster_kernels_wait(
    diagnosed: dict[str, Diagnosis], name: str
) -> None:
    diagnosis = diagnosed[name]
    first = diagnosis.findings[0]
    assert (first.rule, first.severity) == ("loader_workers_zero", "critical")
    assert set(loud(diagnosis)) == {"loader_workers_zero"}
    loss = next(finding for finding in diagnosis.findings if finding.rule == "loader_wait")
    assert (loss.caused_by, loss.share) == ("loader_workers_zero", first.share)
    assert first.bound_ns < 0.95 * (diagnosis.metrics["loader_time"].value or 0)  # part of the wait was hidden


def test_four_workers_later_input_is_no_finding(diagnosed: dict[str, Diagnosis]) -> None:
    diagnosis = diagnosed["kineto/v100_resnet50_workers4.json.gz"]
    assert not [finding.rule for finding in diagnosis.findings if finding.category == "input"]
    assert diagnosis.rules["loader_workers_zero"] == "clear"


def test_an_eager_model_on_a_b200_is_bound_by_launches_with_the_warning_about_stacks(
    diagnosed: dict[str, Diagnosis],
) -> None:
    diagnosis = diagnosed["kineto/b200_eager_8rank_rank.json.gz"]
    assert set(loud(diagnosis)) == {"launch_bound"}
    assert "without Python stacks" in standing(diagnosis)["launch_bound"].fixes[0].change


def test_after_syncs_only_the_idle_time_counts(diagnosed: dict[str, Diagnosis]) -> None:
    diagnosis = diagnosed["nsys/a100_sync_after_each_kernel.sqlite"]
    finding = standing(diagnosis)["sync_idle"]
    assert 0 < finding.bound_ns <= diagnosis.devices[0].idle_ns
    assert finding.bound_ns < 0.5 * (diagnosis.metrics["sync_time"].value or 0)
    assert "launch_bound" not in loud(diagnosis)


def test_pageable_copies_are_named_where_they_dominate(diagnosed: dict[str, Diagnosis]) -> None:
    diagnosis = diagnosed["nsys/a100_saxpy_old_schema.sqlite"]
    assert "pageable_h2d" in standing(diagnosis)
    assert next(f for f in diagnosis.findings if f.rule == "exposed_copy").caused_by == "pageable_h2d"


def test_late_ranks_are_named_before_the_collectives_that_wait_for_them(traces: Path) -> None:
    diagnosis = diagnose([traces / "kineto" / "megatron_tp8"])
    assert diagnosis.findings[0].rule == "straggler_rank"
    assert "(by rank: 0, 6)" in diagnosis.findings[0].summary
    assert next(f for f in diagnosis.findings if f.rule == "exposed_communication").caused_by == "straggler_rank"


def test_data_parallel_training_has_communication_first(diagnosed: dict[str, Diagnosis]) -> None:
    assert set(loud(diagnosed["kineto/a100_ddp_overlap_control.json.gz"])) == {"exposed_communication"}


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


COUNT = "from gpudiag.rules import builtin_dir, load_rules; print(len(load_rules()), builtin_dir())"


def test_a_checkout_uses_its_own_rules(tmp_path: Path) -> None:
    out = run(sys.executable, "-c", COUNT, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert out.split() == [str(len(RULES)), str(ROOT / "rules")]


@pytest.mark.slow
def test_sdist_and_wheel_carry_the_rules(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path), cwd=ROOT)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert sum(name.endswith(".toml") and "/rules/" in name for name in archive.getnames()) == len(RULES)
    run(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index",
        "-w", str(tmp_path), str(sdist), cwd=tmp_path,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    out = run(sys.executable, "-c", COUNT, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert out.split() == [str(len(RULES)), str(tmp_path / "site" / "gpudiag" / "_rules")]


def test_the_rule_that_the_readme_adds_works(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (builtin_dir() / "README.md").read_text(), re.DOTALL)
    (tmp_path / "big_batches_from_pageable_memory.toml").write_text(text)
    assert [str(problem) for problem in check_rules(tmp_path)] == []


FIRED_BY_RECORDINGS = {
    "attention_unfused", "blocking_copy", "compile_off", "cpu_ops_in_step", "device_copies", "elementwise_bound",
    "exposed_communication", "exposed_copy", "gpu_idle", "hot_kernel", "large_readback", "launch_bound",
    "loader_wait", "loader_workers_zero", "long_gaps", "low_comm_overlap", "not_enough_evidence", "odd_shapes",
    "pageable_h2d", "small_copies", "straggler_rank", "sync_idle", "tensor_cores_unused", "wait_is_a_copy",
    "waits_in_collectives",
}  # fmt: skip


@pytest.mark.slow
def test_these_rules_are_reached_by_real_recordings(diagnosed: dict[str, Diagnosis], traces: Path) -> None:
    """The others need what no shared recording holds (loader records, NVML samples, several captures): live samples."""
    names = [str(path.relative_to(traces)) for kind in ("kineto/*.gz", "nsys/*.sqlite") for path in traces.glob(kind)]
    fired = {finding.rule for name in names for finding in diagnosed[name].findings}
    fired |= {finding.rule for finding in diagnose([traces / "kineto" / "megatron_tp8"]).findings}
    assert fired >= FIRED_BY_RECORDINGS
    assert fired <= set(BY_ID)


def test_a_proof_that_names_where_a_number_comes_from_says_where_it_must_go() -> None:
    """`falls from 94 %` alone is true of any change at all. The loader's rules are measured against its own need."""
    target = re.compile(
        r" to (?:under|about|some|a|near|all|most|at|few|\{)|under \d|below|at most|vanish|by a factor|from \{\S+ to \S+"
    )
    proofs = [
        (rule.id, fix.proof.text)
        for rule in RULES
        if not rule.id.startswith(("loader_", "cpus_"))
        for fix in rule.fixes
    ]
    vague = {rule for rule, proof in proofs if re.search(r"\bfalls? from \{", proof) and not target.search(proof)}
    assert vague == set()
