"""A busy machine is recognised: who waited for a CPU is measured, and what that lengthens is not blamed on others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import Recorder, loader_batches, loader_info, measured

from gpudiag.collect.inject import cpu_wait
from gpudiag.diagnosis import Diagnosis, Finding
from gpudiag.metrics.base import Missing
from gpudiag.pipeline import diagnose_recordings
from gpudiag.read import Recordings
from gpudiag.read.loader_log import read_process_log
from gpudiag.read.log_attach import attach
from gpudiag.rules import load_rules
from gpudiag.timeline import HostInfo, StepLog, Timeline

MS = 1_000_000
MAIN, WORKER = 100, 200
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how long a thread waited for a CPU")


def cpu_run(lengths: list[int]) -> Recorder:
    """Steps of these lengths in ms on a run without GPU: forward in the first 10 ms, the script's own code after that."""
    recorder, at = Recorder(), 0
    for number, length in enumerate(lengths):
        recorder.mark(at * MS, (at + length) * MS, f"gpudiag::step#{number}")
        recorder.mark(at * MS, (at + 10) * MS, "gpudiag::forward")
        at += length
    return recorder


def log_of(lengths: list[int], waits: list[int]) -> StepLog:
    end = np.cumsum(lengths) * MS
    return StepLog(
        end - np.array(lengths) * MS, end, np.arange(len(lengths)), np.array(waits) * (MS if max(waits) >= 0 else 1)
    )


def diagnosed(timeline: Timeline) -> Diagnosis:
    return diagnose_recordings(Recordings((timeline,)), load_rules())


def finding(diagnosis: Diagnosis, rule: str) -> Finding | None:
    return next((found for found in diagnosis.findings if found.rule == rule), None)


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_the_wait_for_a_cpu_is_the_mean_over_the_steps_of_the_window() -> None:
    lengths, waits = [20] * 6, [0, 4, 4, 4, 4, 9]
    got = measured(cpu_run(lengths[:5]), step_log=log_of(lengths, waits))
    assert got["steps"].value == 5
    assert got["cpu_wait_time"].value == pytest.approx(16 / 5 * MS), "the sixth step is after the window"
    assert got["cpu_wait_lost"].value == got["cpu_wait_time"].value


def test_a_log_without_waits_is_missing_and_never_zero() -> None:
    plain = StepLog(*[column[:] for column in (np.arange(5) * 20 * MS, np.arange(1, 6) * 20 * MS, np.arange(5))])
    assert plain.cpu_wait_ns.tolist() == [-1] * 5
    assert plain.take(slice(0, 2)).cpu_wait_ns.tolist() == [-1, -1]
    for log in (None, plain):
        got = measured(cpu_run([20] * 5), step_log=log)
        assert isinstance(got["cpu_wait_time"], Missing)
        assert isinstance(got["cpu_wait_lost"], Missing)


def test_beside_gpu_work_a_wait_costs_at_most_the_time_in_which_the_device_idles() -> None:
    recorder = Recorder()
    recorder.steps(5, 20 * MS)
    for step in range(5):
        recorder.launch(step * 20 * MS + MS, step * 20 * MS + 20 * MS)
    got = measured(recorder, step_log=log_of([20] * 5, [8] * 5))
    assert got["cpu_wait_time"].value == 8 * MS
    assert got["cpu_wait_lost"].value == pytest.approx(1 * MS)


def waiting_for_workers(**host: Any) -> dict[str, Any]:
    """Steps of 100 ms of which 60 wait for a batch; a fetch of 120 ms is on a CPU for 24, in I/O for 12, queued for 84."""
    recorder, rows = Recorder(), []
    for step in range(5):
        at = step * 100 * MS
        recorder.mark(at, at + 100 * MS, f"gpudiag::step#{step}")
        recorder.mark(at, at + 60 * MS, "gpudiag::data_wait")
        rows.append(
            {
                "start": at,
                "end": at + 60 * MS,
                "fetch_start": at - 60 * MS,
                "fetch_end": at + 60 * MS,
                "cpu_ns": 24 * MS,
            }
            | {"io_ns": 12 * MS, "worker": 0, "batch": step}
        )
    return measured(recorder, loader=loader_batches(*rows), loaders=(loader_info(),), host=HostInfo(**host))


def test_cpus_needed_are_those_of_the_cpu_time_and_not_of_the_whole_fetch() -> None:
    got = waiting_for_workers(usable_cpus=2, other_cpus=1.0)
    assert got["num_workers_needed"].value == 3
    assert got["loader_cpus_needed"].value == pytest.approx(24 / 40)
    assert got["loader_queue_share"].value == pytest.approx(0.7)


def test_workers_that_queue_behind_other_programs_lose_as_much_as_those_take() -> None:
    assert waiting_for_workers(usable_cpus=2, other_cpus=1.0)["loader_queue_lost"].value == pytest.approx(21 * MS)
    assert waiting_for_workers(usable_cpus=2, other_cpus=0.0)["loader_queue_lost"].value == 0
    assert isinstance(waiting_for_workers(usable_cpus=2)["loader_queue_lost"], Missing)


# -- findings --------------------------------------------------------------------------------------------------------

UNEVEN = [20, 20, 20, 20, 80] * 4


def test_uneven_steps_of_a_busy_machine_are_the_machines_and_it_is_said() -> None:
    timeline = cpu_run(UNEVEN).timeline(step_log=log_of(UNEVEN, [ms - 20 for ms in UNEVEN]))
    diagnosis = diagnosed(timeline)
    cause = finding(diagnosis, "cpu_contended")
    assert cause is not None
    assert cause.severity == "critical"
    assert 10 * MS <= cause.bound_ns <= 12 * MS, "12, less what code outside the phases claims of the same time"
    assert finding(diagnosis, "step_jitter") is None, "the waits make up all of the unevenness"
    stall = finding(diagnosis, "periodic_stall")
    assert stall is not None
    assert stall.caused_by == "cpu_contended"
    assert any("waited 38 % of the time for a CPU" in said for said in diagnosis.warnings)


def test_a_loader_that_queues_behind_other_programs_is_theirs_and_one_that_waits_for_storage_is_not() -> None:
    def judged(io_ns: int) -> Diagnosis:
        recorder, rows = cpu_run([100] * 12), []
        for number in range(12):
            at = number * 100 * MS
            recorder.mark(at + 10 * MS, at + 90 * MS, "gpudiag::data_wait")
            rows.append(
                {"start": at + 10 * MS, "end": at + 90 * MS, "fetch_start": at + 10 * MS, "fetch_end": at + 90 * MS}
                | {"cpu_ns": 10 * MS, "io_ns": io_ns, "worker": -1, "batch": number}
            )
        queued = 70 - io_ns // MS
        return diagnosed(
            recorder.timeline(
                loader=loader_batches(*rows), loaders=(loader_info(num_workers=0),), step_log=log_of([100] * 12, [queued] * 12),
                host=HostInfo(usable_cpus=2, machine_cpus=2, other_cpus=2.0),
            )
        )  # fmt: skip

    taken = judged(io_ns=0)
    cause, effect = finding(taken, "loader_cpus_taken"), finding(taken, "loader_workers_zero")
    assert cause is not None
    assert cause.bound_ns == 70 * MS
    assert effect is not None
    assert effect.caused_by == "loader_cpus_taken"
    assert finding(taken, "cpu_contended") is None, "all of the wait is in the fetches"
    storage = judged(io_ns=68 * MS)
    assert finding(storage, "loader_cpus_taken") is None
    alone = finding(storage, "loader_workers_zero")
    assert alone is not None
    assert not alone.caused_by


def test_the_same_steps_on_free_cpus_blame_no_machine() -> None:
    diagnosis = diagnosed(cpu_run(UNEVEN).timeline(step_log=log_of(UNEVEN, [0] * 20)))
    assert finding(diagnosis, "cpu_contended") is None
    assert any(found.rule in ("step_jitter", "periodic_stall") and not found.caused_by for found in diagnosis.findings)
    assert not any("busy" in said for said in diagnosis.warnings)


def test_uneven_steps_are_named_by_their_numbers() -> None:
    lengths = [20] * 20
    lengths[3] = lengths[8] = lengths[15] = lengths[16] = 80
    found = finding(diagnosed(cpu_run(lengths).timeline(step_log=log_of(lengths, [0] * 20))), "step_jitter")
    assert found is not None
    assert ("3, 8, 15 and 16") in [fact.value for fact in found.evidence]


def test_workers_that_no_cpu_is_left_for_bring_nothing_and_it_is_said_why() -> None:
    """A batch takes 170 ms of CPU time and the rest of the step 40: 105 on each of two CPUs, and the step takes 100."""
    recorder, rows = cpu_run([100] * 12), []
    for number in range(12):
        at = number * 100 * MS
        recorder.mark(at + 10 * MS, at + 70 * MS, "gpudiag::data_wait")
        rows.append(
            {"start": at + 10 * MS, "end": at + 70 * MS, "fetch_start": at - 100 * MS, "fetch_end": at + 70 * MS}
            | {"cpu_ns": 170 * MS, "io_ns": 0, "worker": 0, "batch": number}
        )
    host = HostInfo(usable_cpus=2, machine_cpus=2, other_cpus=0.0)
    timeline = recorder.timeline(loader=loader_batches(*rows), loaders=(loader_info(num_workers=1),), host=host)
    found = finding(diagnosed(timeline), "loader_too_few_workers")
    assert found is not None
    assert found.estimate_ns is None
    assert "more workers alone bring nothing here" in found.estimate_reason


# -- gpudiag's own records ---------------------------------------------------------------------------------------------


def records(path: Path, *more: dict[str, Any], pid: int = MAIN, role: str = "main") -> Path:
    facts = {"k": "process", "pid": pid, "ppid": 1, "role": role, "rank": 0, "world": 1, "python": "3.12.1"}
    facts |= {"torch": "2.14.1", "cuda": None, "threads": 2, "mono": 0, "wall": 0}
    path.write_text("".join(json.dumps(record) + "\n" for record in (facts, *more)))
    return path


def step(number: int, length: int, queued: int | None = None, **more: Any) -> dict[str, Any]:
    record = {"k": "step", "i": number, "s": number * 1000, "e": number * 1000 + length, "o": "optimizer", **more}
    return record if queued is None else record | {"q": queued}


def test_waits_come_back_by_step_and_what_was_not_told_is_unknown(tmp_path: Path) -> None:
    log = read_process_log([records(tmp_path / "a", step(0, 90, 7), step(1, 90), step(2, 90, 0))])
    timeline = attach(replace(cpu_run([1]).timeline(), time_base_ns=0), log)
    assert timeline.step_log is not None
    assert timeline.step_log.cpu_wait_ns.tolist() == [7, -1, 0]


def test_a_wait_for_a_cpu_is_no_cost_of_the_recorder(tmp_path: Path) -> None:
    plain = [step(number, 100, 0) for number in range(10)]
    busy = [step(number, 1000, 880, r=1) for number in range(10, 20)]
    quiet = [step(number, 125, 4, r=1) for number in range(10, 20)]
    contended = read_process_log([records(tmp_path / "a", *plain, *busy)])
    assert contended.step_cost() == (100, 120)
    assert attach(cpu_run([1]).timeline(), contended).observer_slowdown is None, "its helpers were held up as well"
    throughout = [
        step(number, 1000, 400 if number < 10 else 380, **({"r": 1} if number > 9 else {})) for number in range(20)
    ]
    held_up = read_process_log([records(tmp_path / "c", *throughout)])
    assert attach(cpu_run([1]).timeline(), held_up).observer_slowdown is None, "much contention, before and after alike"
    alone = read_process_log([records(tmp_path / "b", *plain, *quiet)])
    assert attach(cpu_run([1]).timeline(), alone).observer_slowdown == pytest.approx(1.21)


def test_other_programs_are_what_the_machine_works_beyond_the_run_and_its_workers(tmp_path: Path) -> None:
    start = {"at": 0, "own": 50 * MS, "busy": 7000 * MS, "pressure": 100, "load": 1.0, "cpus": 4}
    stop = {"at": 1000 * MS, "own": 850 * MS, "busy": 10_000 * MS, "pressure": 250_100, "load": 5.5, "cpus": 4}
    end = {"file": "x", "window": "steps", "reason": "complete", "steps": 1, "from": 0, "to": 1}
    clocks = [
        {"k": "clock", "mono": 0, "wall": 0, "event": "start", "machine": start},
        {"k": "clock", "mono": 0, "wall": 0, "event": "stop", "machine": stop, **end},
    ]
    fetch = {"k": "fetch", "f": 1, "n": 0, "b": 0, "w": 0, "s": 0, "c": -1, "q": 0, "cpu": 400 * MS}
    inside, after = fetch | {"e": 900 * MS}, fetch | {"e": 1100 * MS, "b": 1}
    log = read_process_log(
        [
            records(tmp_path / "a", *clocks, step(0, 90, 7)),
            records(tmp_path / "b", inside, after, pid=WORKER, role="forked"),
        ]
    )
    host = attach(cpu_run([1]).timeline(), log).host
    assert host.load_average == 5.5
    assert host.cpu_pressure == pytest.approx(0.25)
    assert host.other_cpus == pytest.approx(3.0 - 0.8 - 0.4)


# -- inside the user's process ---------------------------------------------------------------------------------------------


def test_where_the_kernel_does_not_say_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*_arguments: Any, **_named: Any) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", no_file)
    monkeypatch.setattr("builtins.open", no_file)
    assert cpu_wait.CpuWait().queued() == -1
    assert set(cpu_wait.machine()) <= {"at", "own", "cpus"}


CONTENDED = """
import json, os, time
from gpudiag.collect.inject.tracker import Tracker
cpu = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cpu})
rival = os.fork()
if rival == 0:
    until = time.monotonic() + 20
    while time.monotonic() < until and os.getppid() != 1:
        pass
    os._exit(0)
class Log:
    lines = []
    def write(self, record, flush=False):
        self.lines.append(record)
tracker = Tracker(Log(), lambda count, source: None)
for _ in range(20):
    until = time.thread_time() + 0.02
    while time.thread_time() < until:
        pass
    tracker.turn("optimizer", 1)
os.kill(rival, 9)
os.waitpid(rival, 0)
steps = [line for line in Log.lines if line["k"] == "step"]
print(json.dumps([sum(s["q"] for s in steps) / 1e9, sum(s["e"] - s["s"] for s in steps) / 1e9]))
"""


@pytest.mark.live
@linux
def test_a_rival_on_the_same_cpu_shows_as_the_wait_for_it() -> None:
    """What a step of 20 ms of CPU time takes beyond them is what the kernel says it waited, whoever else is about."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CONTENDED], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    waited, total = json.loads(done.stdout)
    assert waited > 0.25 * total, "two take turns on one CPU"
    assert waited == pytest.approx(total - 19 * 0.02, abs=0.15 * total)
