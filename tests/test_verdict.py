"""The verdict: each word can be reached, its numbers are the account's, ties are said, and nothing is blamed without a cause."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from builders import Recorder, samples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpudiag.diagnosis import AccountInfo, Diagnosis
from gpudiag.pipeline import diagnose_recordings
from gpudiag.read import Recordings
from gpudiag.report.facts import headline, verdict_label
from gpudiag.report.terminal import render
from gpudiag.rules import RuleSet, load_rules
from gpudiag.timeline import CopyKind, HostInfo, Kind, MemKind, StepLog, Timeline
from gpudiag.units import format_percent
from gpudiag.verdict_shares import OWNER

US = 1_000
MS = 1_000_000


@pytest.fixture(scope="module", name="rules")
def _rules() -> RuleSet:
    return load_once()


@functools.cache
def load_once() -> RuleSet:
    return load_rules()


def diagnosed(rules: RuleSet, *timelines: Timeline) -> Diagnosis:
    return diagnose_recordings(Recordings(timelines), rules)


def run(*, busy: int = 40, name: str = "kernel", steps: int = 6, device: int = 0, process: int = 100) -> Recorder:
    """Steps of 100 ms; each launches 20 kernels of `busy` / 20 ms in a row from its beginning on."""
    recorder = Recorder()
    add_run(recorder, busy=busy, name=name, steps=steps, device=device, process=process)
    return recorder


def add_run(recorder: Recorder, *, busy: int, name: str, steps: int, device: int, process: int) -> None:
    for step in range(steps):
        at = step * 100 * MS
        recorder.mark(at, at + 100 * MS, f"ProfilerStep#{step}", process=process, thread=process)
        length = busy * MS // 20
        for i in range(20):
            begin = at + 10 * US + i * length
            recorder.launch(begin, begin + length, name, device=device, process=process)


def marked(recorder: Recorder, start: int, end: int, name: str, steps: int = 6, **more: Any) -> Recorder:
    for step in range(steps):
        recorder.mark(step * 100 * MS + start * MS, step * 100 * MS + end * MS, name, **more)
    return recorder


def input_bound() -> Timeline:
    return marked(run(), 41, 99, "gpudiag::data_wait").timeline()


def transfer_bound() -> Timeline:
    recorder = run()
    for step in range(6):
        recorder.copy(step * 100 * MS + 42 * MS, step * 100 * MS + 99 * MS, 10**9, memory=MemKind.PAGEABLE)
    return recorder.timeline()


def launch_bound() -> Timeline:
    recorder = Recorder()
    recorder.steps(6, 100 * MS)
    for step in range(6):
        for i in range(990):
            begin = step * 100 * MS + i * 100 * US
            recorder.launch(begin + 50 * US, begin + 80 * US, lead=20 * US)
    return recorder.timeline()


def sync_bound() -> Timeline:
    recorder = run()
    for step in range(6):
        recorder.call(step * 100 * MS + 1 * MS, step * 100 * MS + 90 * MS, "cudaDeviceSynchronize")
    return recorder.timeline()


def communication_bound() -> Timeline:
    recorder = run()
    for step in range(6):
        recorder.kernel(
            step * 100 * MS + 41 * MS, step * 100 * MS + 99 * MS, "ncclDevKernel_AllReduce", kind=Kind.COMM, stream=9
        )
    return recorder.timeline()


def memory_bound() -> Timeline:
    recorder = run()
    for step in range(6):
        for i in range(10):
            begin = step * 100 * MS + (42 + 5 * i) * MS
            recorder.call(begin, begin + 5 * MS, "cudaMalloc")
    return recorder.timeline()


def host_bound() -> Timeline:
    return marked(run(), 41, 99, "gpudiag::checkpoint").timeline()


def compute_bound() -> Timeline:
    return run(busy=98, name="ampere_sgemm_128x64_tn").timeline()


def power_bound() -> Timeline:
    hot = [
        {"at": i * 10 * MS, "reasons": 0x20, "sm_clock_mhz": 700, "sm_clock_max_mhz": 1400, "temperature_c": 93}
        for i in range(60)
    ]
    return run(busy=98).timeline(samples=samples(*hot))


def unknown_bound() -> Timeline:
    return replace(run().timeline(), api_calls=None)


CASES = {
    "input": (input_bound, "waits for data"),
    "transfer": (transfer_bound, "copies that nothing hides"),
    "launch": (launch_bound, "prepares launches"),
    "sync": (sync_bound, "after waits of the host"),
    "communication": (communication_bound, "collectives that nothing hides"),
    "memory": (memory_bound, "memory management"),
    "host": (host_bound, "host code"),
    "compute": (compute_bound, "FP32"),
    "power": (power_bound, "hot"),
    "none": (unknown_bound, "does not show"),
}


@pytest.mark.parametrize("bound", CASES)
def test_each_word_can_be_reached_and_says_why(bound: str, rules: RuleSet) -> None:
    build, words = CASES[bound]
    verdict = diagnosed(rules, build()).verdict
    assert (verdict.status, verdict.bound_by) == ("bottleneck", bound)
    assert words in verdict.headline
    assert verdict.headline.endswith(".") and verdict.headline[0].isupper()


def test_a_busy_run_is_healthy_and_a_short_one_is_not_judged(rules: RuleSet) -> None:
    assert diagnosed(rules, run(busy=98).timeline()).verdict.status == "healthy"
    recorder = Recorder()
    recorder.kernel(0, 10)
    assert diagnosed(rules, recorder.timeline()).verdict.status == "cannot_judge"


def test_what_ended_the_run_is_the_verdict_and_stands_first(rules: RuleSet) -> None:
    """Before what its steps lose time to, however much that is; the loss stays beside it."""
    begin = np.arange(6) * 100 * MS
    died = replace(
        input_bound(),
        host=HostInfo(torch_threads=2, out_of_memory={"gpu": "CUDA out of memory. Tried to allocate 2 GiB."}),
        step_log=StepLog(begin, begin + 100 * MS, np.arange(6) + 37),
    )
    diagnosis = diagnosed(rules, died)
    assert diagnosis.verdict.headline.startswith(
        "Run ended: the GPU's memory ran out, after 43 steps. Before that: bound by"
    )
    assert (diagnosis.verdict.status, diagnosis.verdict.bound_by) == ("bottleneck", "memory")
    assert [f.rule for f in diagnosis.findings if f.ends_run] == [diagnosis.findings[0].rule] == ["gpu_out_of_memory"]
    assert len(diagnosis.findings) > 1
    report = render(diagnosis)
    assert report.index("RUN ENDED: ") < report.index("Machine ") < report.index("1  Overall timeline ")


def test_a_run_that_ended_too_early_to_be_judged_says_why_and_is_not_compared(rules: RuleSet) -> None:
    recorder = Recorder()
    recorder.kernel(0, 10)
    verdict = diagnosed(
        rules, recorder.timeline(host=HostInfo(torch_threads=2, out_of_memory={"host": "MemoryError"}))
    ).verdict
    assert verdict.headline.startswith("Run ended: the host's memory ran out. Before that: cannot judge: ")
    assert verdict.status == "cannot_judge"


def shares(accounts: tuple[AccountInfo, ...], *chosen: str) -> float:
    total = sum(account.total_ns for account in accounts)
    return sum(ns for account in accounts for part, ns in account.parts.items() if part.startswith(chosen)) / total


def allowed(diagnosis: Diagnosis) -> set[str]:
    """Every percentage that the accounts can give, of all devices or of those that work: owners, busy, compute, the known work
    of the CPU, each of its losses, own work of each device, the threshold."""
    numbers = {0.1}
    some = [chosen for n in range(1, len(diagnosis.accounts) + 1) for chosen in combinations(diagnosis.accounts, n)]
    for accounts in some:
        for owner in set(OWNER.values()):
            parts = {part for account in accounts for part in account.parts if OWNER.get(part) == owner}
            numbers.add(sum(shares(accounts, part) for part in parts))
        work = sum(
            shares(accounts, f"host.{phase}") for phase in ("forward", "backward", "optimizer", "framework", "h2d")
        )
        numbers |= {1 - shares(accounts, "idle."), shares(accounts, "compute"), shares(accounts, "idle.unknown"), work,
                    shares(accounts, "idle.profiler"), shares(accounts, "host.other")}  # fmt: skip
        numbers.add(sum(shares(accounts, part) for part in ("compute", "copy_exposed", "memset_exposed")))
        numbers |= {shares(accounts, f"host.{part}") for part in ("checkpoint_log", "compile", "gc")}
    loader, step = diagnosis.metrics["loader_time"].value, diagnosis.metrics["step_time"].value
    if loader is not None and step:
        numbers.add(loader / step)
    for name in ("idle_before_first", "idle_queued"):
        part = (diagnosis.metrics[name].value or 0) / (step or 1)
        numbers |= {part, *(shares([account], "idle.unknown") - part for account in diagnosis.accounts)}
    # summed in another order a half may round the other way
    return {format_percent(number + hair) for number in numbers for hair in (-1e-9, 0.0, 1e-9)}


def percentages(text: str) -> set[str]:
    return set(re.findall(r"<?\d+(?:\.\d+)? %", text))


@pytest.mark.parametrize("bound", CASES)
def test_the_headlines_numbers_are_the_accounts(bound: str, rules: RuleSet) -> None:
    diagnosis = diagnosed(rules, CASES[bound][0]())
    assert percentages(diagnosis.verdict.headline) <= allowed(diagnosis)


spans = st.tuples(st.integers(0, 99), st.integers(1, 60))


@settings(max_examples=60, deadline=None)
@given(
    kernels=st.lists(st.tuples(spans, st.sampled_from([Kind.KERNEL, Kind.COMM]), st.integers(0, 2)), min_size=1, max_size=4),
    copies=st.lists(spans, max_size=2),
    calls=st.lists(st.tuples(spans, st.sampled_from(["cudaEventRecord", "cudaStreamSynchronize", "cudaMalloc"])), max_size=4),
    marks=st.lists(st.tuples(spans, st.sampled_from(["gpudiag::data_wait", "gpudiag::checkpoint", "gpudiag::gc", "x"])), max_size=3),
    on_cpu=st.booleans(),
)  # fmt: skip
def test_no_headline_names_a_share_that_the_account_does_not_have(kernels, copies, calls, marks, on_cpu) -> None:
    recorder = Recorder()
    recorder.steps(5, 100 * MS)
    for step in range(5):
        at = step * 100 * MS
        if not on_cpu:
            for (start, length), kind, device in kernels:
                recorder.launch(at + start * MS, at + (start + length) * MS, kind=kind, device=device)
            for start, length in copies:
                recorder.copy(at + start * MS, at + (start + length) * MS, 10)
            for (start, length), name in calls:
                recorder.call(at + start * MS, at + (start + length) * MS, name)
        for (start, length), name in marks:
            recorder.mark(at + start * MS, at + (start + length) * MS, name)
    diagnosis = diagnosed(load_once(), recorder.timeline())
    if diagnosis.verdict.status == "cannot_judge":  # its numbers are of what was lost
        return
    assert percentages(diagnosis.verdict.headline + diagnosis.verdict.margin) <= allowed(diagnosis)
    if diagnosis.verdict.status == "healthy" and len(diagnosis.accounts) == 1 and not on_cpu:
        total = sum(account.total_ns for account in diagnosis.accounts)
        owned: dict[str, int] = {}
        for account in diagnosis.accounts:
            for part, ns in account.parts.items():
                if part in OWNER:
                    owned[OWNER[part]] = owned.get(OWNER[part], 0) + ns
        assert max(owned.values(), default=0) < 0.1 * total


def test_two_causes_within_five_points_are_said_to_be_close(rules: RuleSet) -> None:
    recorder = marked(run(), 41, 71, "gpudiag::data_wait")
    close = diagnosed(rules, marked(recorder, 71, 99, "gpudiag::checkpoint").timeline()).verdict
    assert close.bound_by == "input"
    assert close.margin == "input (30 %) and host (28 %) are close"
    clear = diagnosed(
        rules, marked(marked(run(), 41, 80, "gpudiag::data_wait"), 80, 99, "gpudiag::checkpoint").timeline()
    )
    assert clear.verdict.margin == ""


def test_a_cause_that_is_small_itself_is_no_tie(rules: RuleSet) -> None:
    recorder = marked(run(busy=80), 81, 92, "gpudiag::data_wait")
    verdict = diagnosed(rules, marked(recorder, 92, 99, "gpudiag::checkpoint").timeline()).verdict
    assert (verdict.bound_by, verdict.margin) == ("input", "")


def test_several_devices_are_spoken_of_as_several(rules: RuleSet) -> None:
    recorder = Recorder()
    for device, busy in ((0, 40), (1, 80)):
        add_run(recorder, busy=busy, name="kernel", steps=6, device=device, process=100 + device)
        marked(recorder, busy + 1, 99, "gpudiag::data_wait", process=100 + device, thread=100 + device)
    diagnosis = diagnosed(rules, recorder.timeline())
    assert len(diagnosis.accounts) == 2
    idle = shares(diagnosis.accounts, "idle.input")
    assert f"on average the 2 GPUs are idle {format_percent(idle)} of the 100 ms step" in diagnosis.verdict.headline
    assert f"the GPUs are busy {format_percent(1 - shares(diagnosis.accounts, 'idle.'))}" in diagnosis.verdict.headline


def test_a_rank_on_the_cpu_beside_one_on_a_gpu_does_not_make_it_look_busier(rules: RuleSet) -> None:
    host = Recorder()
    host.steps(6, 100 * MS)
    marked(host, 0, 99, "gpudiag::forward")
    alone, both = (
        diagnosed(rules, *ranks) for ranks in ((input_bound(),), (input_bound(), replace(host.timeline(), rank=1)))
    )
    assert both.verdict == alone.verdict


def test_late_ranks_are_named_beside_communication(rules: RuleSet) -> None:
    def rank(number: int, length: int) -> Timeline:
        recorder = run()
        for step in range(6):
            end = step * 100 * MS + 99 * MS
            recorder.launch(end - length * MS, end, "ncclDevKernel_AllReduce", kind=Kind.COMM, stream=9)
        return replace(recorder.timeline(), rank=number, world_size=3)

    verdict = diagnosed(rules, rank(0, 58), rank(1, 20), rank(2, 58)).verdict
    assert verdict.bound_by == "communication"
    assert "rank 1 arrives last" in verdict.headline


def test_the_recorders_own_time_is_not_called_unexplained(rules: RuleSet) -> None:
    recorder = run()
    for step in range(6):
        recorder.overhead(step * 100 * MS + 41 * MS, step * 100 * MS + 99 * MS, "Buffer flush")
    verdict = diagnosed(rules, recorder.timeline()).verdict
    assert verdict.bound_by == "none"
    assert "58 % is idle for the recorder's own work" in verdict.headline
    assert "does not show" not in verdict.headline


def test_a_larger_unknown_is_said_in_the_same_breath(rules: RuleSet) -> None:
    timeline = marked(run(), 41, 56, "gpudiag::data_wait").timeline()
    headline = diagnosed(rules, replace(timeline, api_calls=None)).verdict.headline
    assert headline.startswith("Bound by input as far as the recording shows: the GPU is idle 15 %")
    assert "45 % is idle for causes that this recording does not show" in headline


def test_what_recording_added_is_taken_off_and_said(rules: RuleSet) -> None:
    verdict = diagnosed(rules, replace(launch_bound(), observer_slowdown=1.25)).verdict
    assert verdict.bound_by == "launch"
    assert "as recorded, less what recording added" in verdict.headline


def cpu_run(*phases: tuple[int, int, str], steps: int = 6) -> Recorder:
    recorder = Recorder()
    recorder.steps(steps, 100 * MS)
    for start, end, name in phases:
        marked(recorder, start, end, f"gpudiag::{name}", steps)
    return recorder


def test_a_cpu_run_that_computes_is_healthy(rules: RuleSet) -> None:
    verdict = diagnosed(
        rules, cpu_run((0, 30, "forward"), (30, 90, "backward"), (90, 98, "optimizer")).timeline()
    ).verdict
    assert verdict.status == "healthy"
    assert "take 98 % of the 100 ms step on the CPU" in verdict.headline
    assert "GPU is" not in verdict.headline


def test_a_cpu_run_that_waits_for_data_is_input_bound(rules: RuleSet) -> None:
    verdict = diagnosed(rules, cpu_run((0, 60, "data_wait"), (60, 99, "forward")).timeline()).verdict
    assert verdict.bound_by == "input"
    assert "takes 60 % of the 100 ms step" in verdict.headline


@pytest.mark.parametrize(("phase", "bound"), [("data_wait", "input"), ("checkpoint", "host")])
def test_a_loss_that_is_small_beside_the_cpus_work_does_not_name_the_run(
    phase: str, bound: str, rules: RuleSet
) -> None:
    """Below half of the work it is called what it is, a loss beside the work; from there on the run is bound by it."""
    small = diagnosed(rules, cpu_run((0, 25, phase), (25, 99, "forward")).timeline())
    assert small.verdict.headline.startswith(
        "Mostly compute: forward, backward, optimizer and other operators take 74 %"
    )
    assert "25 %" in small.verdict.headline and "Bound by" not in small.verdict.headline
    assert (small.verdict.status, small.verdict.bound_by, verdict_label(small)) == (
        "bottleneck",
        bound,
        "mostly compute",
    )
    assert "Mostly" not in headline(small), "the label says it"
    large = diagnosed(rules, cpu_run((0, 40, phase), (40, 99, "forward")).timeline())
    assert large.verdict.headline.startswith(f"Bound by {bound}: ") and verdict_label(large) == f"{bound}-bound"


def gloo_run() -> Recorder:
    """The backward pass from 20 to 99 ms runs operators up to 40; a collective is under way from 30 to 95 on another thread."""
    recorder = cpu_run((0, 20, "forward"), (20, 99, "backward"))
    for step in range(6):
        at = step * 100 * MS
        recorder.operator(at + 20 * MS, at + 40 * MS, "aten::mm")
        recorder.mark(at + 30 * MS, at + 95 * MS, "gloo:all_reduce", thread=77)
    return recorder


def test_waiting_for_other_ranks_is_not_called_the_backward_passs_work(rules: RuleSet) -> None:
    """Nor is what operators of the pass hide called waiting."""
    diagnosis = diagnosed(rules, gloo_run().timeline())
    assert diagnosis.metrics["backward_collective_wait"].value == 55 * MS
    assert diagnosis.verdict.bound_by == "communication"
    assert (
        "55 % of the 100 ms step passes in the backward pass in waiting for collectives" in diagnosis.verdict.headline
    )
    assert "operators take 44 % of it" in diagnosis.verdict.headline
    alone = diagnosed(rules, cpu_run((0, 20, "forward"), (20, 99, "backward")).timeline()).verdict
    assert (alone.status, "collectives" in alone.headline) == ("healthy", False)


def test_ranks_on_the_cpu_are_summed_with_their_own_work(rules: RuleSet) -> None:
    timeline = cpu_run((0, 98, "forward")).timeline()
    verdict = diagnosed(rules, timeline, replace(timeline, rank=1)).verdict
    assert "take 98 % of" in verdict.headline


def launcher() -> Timeline:
    """A process that starts others and waits: a few operators at its start, then nothing for a minute, then one more."""
    recorder = Recorder()
    recorder.operator(0, 5 * MS, "aten::empty")
    recorder.mark(0, 60_000 * MS, "main")
    recorder.operator(59_990 * MS, 60_000 * MS, "aten::empty")
    return recorder.timeline()


def test_a_process_that_only_waits_for_its_children_is_not_judged(rules: RuleSet) -> None:
    verdict = diagnosed(rules, launcher()).verdict
    assert (verdict.status, verdict.bound_by) == ("cannot_judge", "none")
    assert "idle" not in verdict.headline
    assert "waits for other processes" in verdict.headline


def test_steps_spent_in_code_that_was_not_recorded_are_not_called_computing(rules: RuleSet) -> None:
    verdict = diagnosed(rules, cpu_run((0, 20, "forward")).timeline()).verdict
    assert (
        "80 % of the 100 ms step goes into code that was not recorded, or waits for other processes" in verdict.headline
    )
    assert "no cause outside them" not in verdict.headline


def test_what_the_host_loses_is_named_part_by_part_and_once(rules: RuleSet) -> None:
    for phases, expected in (
        (
            ((0, 55, "checkpoint"), (55, 80, "forward")),
            "55 % of the 100 ms step goes into saving and logging, 20 % into",
        ),
        (((0, 20, "forward"),), "80 % of the 100 ms step goes into code that was not recorded"),
    ):
        headline = diagnosed(rules, cpu_run(*phases).timeline()).verdict.headline
        assert headline.startswith(f"Bound by host: {expected}")
        shares_said = [word for word in headline.split(" ") if word.isdecimal() and int(word) < 100]
        assert len(shares_said) == len(set(shares_said)) == len(phases) + 1  # no share is told twice
        assert "other host code" not in headline


def test_an_optimizer_of_many_small_operations_is_bound_by_launching_them(rules: RuleSet) -> None:
    recorder = cpu_run((0, 20, "forward"), (30, 90, "optimizer"))
    for step in range(6):
        for i in range(600):
            at = step * 100 * MS + 30 * MS + i * 100 * US
            recorder.operator(at, at + 90 * US, "aten::mul_")
    verdict = diagnosed(rules, replace(recorder.timeline(), optimizer_params=(20, 80))).verdict
    assert verdict.bound_by == "launch"
    assert "the optimizer's many small operations" in verdict.headline


def test_copies_to_the_host_that_bind_name_no_upload_rate(rules: RuleSet) -> None:
    recorder = run()
    for step in range(6):
        recorder.copy(step * 100 * MS + 42 * MS, step * 100 * MS + 99 * MS, 10**9, CopyKind.D2H, MemKind.PINNED)
    verdict = diagnosed(rules, recorder.timeline()).verdict
    assert verdict.bound_by == "transfer"
    assert "host to device" not in verdict.headline
