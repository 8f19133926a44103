"""The report on the terminal, as a reader sees it."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import sample_diagnosis
from hostile import assert_harmless, hostile_diagnosis
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.diagnosis import NO_GPU_WORK, AccountInfo, Diagnosis, KernelRow, NotJudged, Verdict
from gpudiag.report.facts import merged_kernels, shell_word
from gpudiag.report.terminal import render
from gpudiag.report.text import apportion, clean, columns, short_kernel

ALL = [
    sample_diagnosis.bottleneck,
    sample_diagnosis.healthy,
    sample_diagnosis.cannot_judge,
    sample_diagnosis.eight_ranks,
]


@pytest.mark.parametrize("make", ALL)
def test_a_report_fits_80_columns_and_one_screen(make: object) -> None:
    text = render(make())  # type: ignore[operator]
    assert max(map(columns, text.splitlines())) <= 80
    assert text.count("\n") <= 64
    assert "\x1b" not in text
    assert text.endswith("\n") and not text.endswith("\n\n")


def test_the_verdict_comes_first_with_its_numbers() -> None:
    lines = render(sample_diagnosis.bottleneck()).splitlines()
    assert lines[2].startswith("INPUT-BOUND: the GPU is idle 41 % of each step")


def test_the_bar_fills_its_width_and_the_legend_sums_to_100_percent() -> None:
    text = render(sample_diagnosis.bottleneck())
    bar = next(line for line in text.splitlines() if line.startswith("  ██"))
    assert len(bar) == 78
    shown = [float(number) for number in re.findall(r"[█▓▒▚▤░·:~-] +(\d+\.\d) %", text)]
    assert len(shown) == 4
    assert sum(shown) == pytest.approx(100)


@given(st.lists(st.integers(0, 10**12), max_size=20), st.integers(1, 2000))
def test_apportioned_shares_sum_to_the_whole_and_are_off_by_less_than_one(values: list[int], total: int) -> None:
    shares = apportion(values, total)
    whole = sum(values)
    assert sum(shares) == (total if whole else 0)
    assert all(abs(s * whole - v * total) < whole for s, v in zip(shares, values, strict=True) if whole)


def test_the_four_steps_stand_in_order_each_with_what_is_known() -> None:
    lines = render(sample_diagnosis.bottleneck()).splitlines()
    steps = [line for line in lines if re.match(r"\d  ", line)]
    assert [line[:4].strip() for line in steps] == ["1  O", "2  D", "3  C", "4  L"]
    assert steps[0].endswith("2 findings, 1 explained by another")
    assert steps[1].endswith("all clear (2 rules), 1 not judged")
    assert steps[2].endswith("all clear (3 rules)")


def test_a_finding_says_its_bound_its_place_and_how_to_know_that_the_fix_worked() -> None:
    text = " ".join(render(sample_diagnosis.bottleneck()).split())
    assert "CRITICAL The GPU waits for the DataLoader loader_wait: at most 16.9 ms" in text
    assert "at most 16.9 ms of 41.2 ms per step (41 %), at train.py:42" in text
    assert "change raise num_workers from 1 to 5" in text
    assert "only if the host has CPUs to spare" in text
    assert "proof idle.input falls from 41 % to under 2 % of the step" in text
    assert "num_workers=5, persistent_workers=True)" in text


def test_an_effect_stands_under_its_cause_and_nowhere_else() -> None:
    text = render(sample_diagnosis.bottleneck())
    assert text.count("gpu_idle") == 1
    assert "explains The GPU is idle 48 % of the time (gpu_idle)" in text


def test_what_comes_later_in_the_method_is_not_called_an_effect() -> None:
    later = sample_diagnosis.finding("hot_kernel", bound_ns=0, caused_by="loader_wait", relation="after", title="Hot")
    text = render(sample_diagnosis.bottleneck(findings=(sample_diagnosis.finding(), later)))
    assert "later    Hot (hot_kernel): look again when the GPU is busy" in text
    assert "explains" not in text


def test_a_step_whose_findings_stand_elsewhere_is_not_all_clear() -> None:
    """It says how many and where: the HTML report lists them in that step."""
    cause = sample_diagnosis.finding("launch_bound")
    effect = sample_diagnosis.finding("gpu_idle", bound_ns=0, caused_by="launch_bound", relation="effect")
    later = sample_diagnosis.finding("hot_kernel", bound_ns=0, caused_by="launch_bound", relation="after")
    lines = render(sample_diagnosis.bottleneck(findings=(cause, effect, later))).splitlines()
    steps = [line for line in lines if re.match(r"\d  ", line)]
    assert steps[0].endswith("1 finding, explained under step 4")
    assert steps[2].endswith("1 finding, put off by step 4")
    assert steps[3].endswith(" 1 finding")
    beside = sample_diagnosis.finding("clocks_throttled", share=0.0, bound_ns=0, caused_by="launch_bound")
    text = render(sample_diagnosis.bottleneck(findings=(cause, beside)))
    assert "1 finding, shown under step 4" in text and "explained" not in text


def test_a_finding_whose_cause_is_absent_stands_for_itself() -> None:
    alone = sample_diagnosis.finding("gpu_idle", caused_by="no_such_finding")
    assert "loader" in render(sample_diagnosis.bottleneck(findings=(alone,)))


def test_an_estimate_is_printed_beside_the_bound() -> None:
    found = sample_diagnosis.finding(estimate_ns=14_200_000)
    assert "at most 16.9 ms of 41.2 ms per step (41 %), estimate 14.2 ms" in render(
        sample_diagnosis.bottleneck(findings=(found,))
    )


def test_a_healthy_run_gets_a_short_calm_report() -> None:
    text = render(sample_diagnosis.healthy())
    assert text.count("\n") <= 26
    assert text.count("all clear") == 5  # the four steps and the machine
    assert "CRITICAL" not in text and "WARNING" not in text


def test_cannot_judge_is_said_aloud_with_how_to_record_it() -> None:
    text = render(sample_diagnosis.cannot_judge())
    assert "CANNOT JUDGE: 2 kernels" in text
    assert text.count("cannot judge: fewer than 3 steps") == 5
    assert "  gpudiag profile --steps 20 SCRIPT: 13 rules (fewer than 3 steps)\n" in text
    assert "all clear" not in text


def test_several_ranks_are_listed_with_their_shares() -> None:
    text = render(sample_diagnosis.eight_ranks())
    rows = re.findall(r"^ +(\d)    0 +(\d+ %) +(\d+ %)", text, re.MULTILINE)
    assert len(rows) == 8
    assert rows[6] == ("6", "87 %", "10 %")


def test_a_run_without_gpu_work_is_accounted_to_the_host() -> None:
    host = AccountInfo(0, -1, "span", (0, 1000), 1000, {"host.input": 700, "host.forward": 300})
    text = render(sample_diagnosis.bottleneck(accounts=(host,), devices=()))
    assert "CPU: whole recording, 1.00 us" in text
    assert re.search(r"70\.0 % waits for input", text)


def test_kernels_of_one_name_are_added_up_over_ranks() -> None:
    rows = [KernelRow("gemm", "gemm", 2, 60, 30, 0.6, True, rank) for rank in (0, 1)]
    rows += [KernelRow("add", "elementwise", 4, 40, 10, 0.4, False, rank) for rank in (0, 1)]
    merged = merged_kernels(rows)
    assert [(row.name, row.count, row.total_ns, row.average_ns) for row in merged] == [
        ("gemm", 4, 120, 30),
        ("add", 8, 80, 10),
    ]
    assert [row.share for row in merged] == pytest.approx([0.6, 0.4])


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn"),
        (
            "void (anonymous namespace)::softmax_warp_forward<float, float, 8>(float*, int)",
            "softmax_warp_forward<float, float, 8>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int, float*)",
            "vectorized_elementwise_kernel<4, AddFunctor<float>>",
        ),
        ("a" * 50 + "_tail", "a" * 26 + "…" + "a" * 8 + "_tail"),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long)",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        ),
        ("(weird)", "(weird)"),
        ("std::enable_if<(((8) > (0)) && true), void>::type vllm::norm_kernel<8>(float*)", "norm_kernel<8>"),
        ("void at::native::reduce_kernel<(int)512, (bool)1>(R)", "reduce_kernel<512, 1>"),
    ],
)
def test_kernel_names_are_shortened_to_what_one_would_say(name: str, short: str) -> None:
    limit = 40 if name.startswith("a" * 9) else 60
    assert short_kernel(name, limit) == short


def test_only_the_report_itself_colours() -> None:
    text = render(hostile_diagnosis(), color=True)
    assert_harmless(re.sub(r"\x1b\[[\d;]+m", "", text))
    assert "[31mred" in text  # the hostile escape lost its escape character


def test_colour_changes_nothing_but_colour() -> None:
    diagnosis = sample_diagnosis.bottleneck()
    assert re.sub(r"\x1b\[[\d;]+m", "", render(diagnosis, color=True)) == render(diagnosis)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_hostile_names_can_do_nothing(ascii_only: bool) -> None:
    text = render(hostile_diagnosis(), ascii_only=ascii_only)
    assert_harmless(text)
    assert text.isascii() or not ascii_only
    assert "k" * 1_000 not in re.sub(r"\s", "", text)


def test_a_terminal_without_utf8_gets_plain_ascii() -> None:
    text = render(sample_diagnosis.eight_ranks(), ascii_only=True)
    assert text.isascii()
    assert "#" * 40 in text


@given(st.text())
def test_cleaned_text_is_one_visible_line(text: str) -> None:
    cleaned = clean(text)
    assert cleaned == clean(cleaned)
    assert "\n" not in cleaned
    assert_harmless(cleaned)


def test_many_findings_and_gaps_stay_within_bounds() -> None:
    findings = tuple(sample_diagnosis.finding(f"rule_{i}", severity="warning", step="compute") for i in range(6))
    diagnosis: Diagnosis = sample_diagnosis.bottleneck(findings=findings, warnings=("w",) * 40)
    text = render(diagnosis)
    assert "and 35 more warnings" in text
    assert len(re.findall("^    proof  ", text, re.MULTILINE)) == 2  # the two largest are told in full,
    assert len(re.findall("^    only if", text, re.MULTILINE)) == 6  # but no change goes without its condition


def test_parts_too_small_for_the_bar_are_one_entry() -> None:
    parts = {"compute": 9_960, "memset_exposed": 20, "idle.gc": 19, "idle.host": 1}
    host = AccountInfo(0, 0, "span", (0, 10_000), 10_000, parts)
    text = render(sample_diagnosis.bottleneck(accounts=(host,)))
    assert re.search(r"█ +99\.6 % compute +' +0\.4 % in 3 smaller parts", text)


def test_rules_that_miss_metrics_for_one_reason_are_one_entry() -> None:
    blind = tuple(
        NotJudged(
            rule,
            f"{metric}: no steps are known; other_{metric}: no steps are known",
            "gpudiag profile SCRIPT",
        )
        for rule, metric in (("exposed_copy", "copy_exposed"), ("gpu_idle", "gpu_busy"))
    )
    text = render(sample_diagnosis.bottleneck(not_judged=blind))
    assert "  gpudiag profile SCRIPT: exposed_copy, gpu_idle (no steps are known)\n" in text


def test_the_gpu_rules_of_a_run_without_gpu_work_are_one_line() -> None:
    blind = tuple(NotJudged(f"rule_{i}", f"m{i}: {NO_GPU_WORK}; n: NVML was not sampled", "") for i in range(30))
    other = NotJudged("other", "x: not sampled", "gpudiag profile SCRIPT")
    text = render(sample_diagnosis.bottleneck(not_judged=(*blind, other)))
    assert "  30 rules about GPU work: no GPU work was recorded\n  gpudiag profile SCRIPT: other" in text
    assert "rule_7" not in text


def test_the_unjudged_rules_of_the_steps_add_up_to_the_total() -> None:
    blind = [NotJudged(rule, "x: not sampled", "") for rule in ("gpu_idle", "clocks_throttled")]
    text = render(sample_diagnosis.healthy(not_judged=tuple(blind)))
    assert "2 rules: unknown" in text
    assert sum(int(n) for n in re.findall(r", (\d+) not judged$", text, re.MULTILINE)) == 2


def test_many_rules_that_one_command_would_judge_are_counted() -> None:
    blind = tuple(NotJudged(f"rule_number_{i}", f"reason {i}", "gpudiag profile SCRIPT") for i in range(12))
    text = render(sample_diagnosis.bottleneck(not_judged=blind))
    assert "  gpudiag profile SCRIPT: 12 rules (rule_number_0, rule_number_1, …\n" in text


def test_the_next_command_names_what_the_user_named() -> None:
    text = render(sample_diagnosis.eight_ranks(), inputs=["my ranks", "b.gz"])
    assert "gpudiag analyze 'my ranks' b.gz --html report.html" in text


@pytest.mark.parametrize(
    "name", ["plain.json", "a b", "a  b", "new\nline", "quote'\\s", "bytes\udcff", "\u202eright", "é"]
)
def test_the_next_command_names_the_same_file_whatever_its_name(name: str) -> None:
    word = shell_word(name)
    assert word.isprintable()
    named = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True).stdout
    assert named == os.fsencode(name)
    assert f"gpudiag analyze {word} --html" in render(sample_diagnosis.bottleneck(), inputs=[name])


@pytest.mark.parametrize(
    "title", ["Short", "A title so long that the id of its rule would have no room beside it, at all"]
)
def test_the_id_of_a_rule_stands_in_one_place_whatever_the_title(title: str) -> None:
    text = render(sample_diagnosis.bottleneck(findings=(sample_diagnosis.finding(title=title),)))
    assert re.search(r"^    loader_wait: at most .* at train\.py:42$", text, re.MULTILINE)


def test_a_close_call_is_said() -> None:
    close = Verdict("bottleneck", "input", "input 41 %", "launch cost is nearly as large: 39 %")
    assert "launch cost is nearly as large: 39 %" in render(sample_diagnosis.bottleneck(verdict=close))


@pytest.mark.parametrize("make", ALL)
def test_a_narrow_terminal_cuts_no_label_and_no_status(make: object) -> None:
    text = render(make(), width=60)  # type: ignore[operator]
    assert max(columns(line) for line in text.splitlines() if "gpudiag " not in line) <= 60  # commands are to be copied
    for line in text.splitlines():
        assert not re.search(r"^  \S +\d+\.\d %.*…", line), line
        assert not re.match(r"(\d  |Machine).*…", line), line
