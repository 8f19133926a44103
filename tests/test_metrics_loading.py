"""The wait for data and why: every figure from rows written by hand."""

from __future__ import annotations

import pytest
from builders import Recorder, loader_batches, loader_info, measured

from gpudiag.metrics.base import Missing
from gpudiag.metrics.loading import BATCH_NAMES
from gpudiag.timeline import HostInfo

US = 1_000
MS = 1_000_000


def training(steps: int = 4, wait: int = 40) -> Recorder:
    """Steps of 100 ms: the host waits for data in the first `wait` ms with the device idle, a kernel in the last 50."""
    recorder = Recorder()
    recorder.steps(steps, 100 * MS)
    for step in range(steps):
        at = step * 100 * MS
        recorder.launch(at, at + MS)
        recorder.mark(at + MS, at + (1 + wait) * MS, "gpudiag::data_wait")
        recorder.launch(at + 50 * MS, at + 100 * MS)
    return recorder


def batch(step: int, **more: int) -> dict[str, int]:
    """The wait of `training`, and a fetch of 30 ms: 20 in the dataset, 10 in collate; 24 on a CPU, 6 in I/O."""
    at = step * 100 * MS
    plain = {
        "start": at + MS, "end": at + 41 * MS, "fetch_start": at, "fetch_end": at + 30 * MS, "dataset_ns": 20 * MS,
        "collate_ns": 10 * MS, "pin_ns": 2 * MS, "cpu_ns": 24 * MS, "io_ns": 6 * MS, "worker": 0, "batch": step,
    }  # fmt: skip
    return {**plain, **more}


def recorded(*rows: dict[str, int], steps: int = 4, **info):
    return measured(training(steps), loader=loader_batches(*rows), loaders=(loader_info(**info),))


def test_figures_of_a_fetch_are_means_and_shares_of_all_batches() -> None:
    got = recorded(*[batch(step) for step in range(3)], batch(3, fetch_end=390 * MS, cpu_ns=30 * MS, io_ns=48 * MS))
    wanted = {
        "loader_fetch_time": 45 * MS, "loader_fetch_p95": 90 * MS, "loader_dataset_time": 20 * MS,
        "loader_collate_time": 10 * MS, "loader_pin_time": 2 * MS, "loader_cpu_share": 102 / 180, "loader_io_share": 66 / 180,
        "loader_sample_time": 20 * MS / 32, "loader_time": 40 * MS, "first_batch_wait": 40 * MS, "loader_epochs": 1,
        "worker_restart_time": 0,
    }  # fmt: skip
    assert {name: got[name].value for name in wanted} == pytest.approx(wanted)


def test_the_wait_for_a_late_batch_is_what_it_cost() -> None:
    got = recorded(*[batch(step) for step in range(3)], batch(3, fetch_end=390 * MS))
    assert got["input_lost"].value == 40 * MS
    assert got["loader_late_batch_wait"].value == 10 * MS


def test_workers_needed_deliver_as_fast_as_the_rest_of_the_step() -> None:
    rows = [batch(step, fetch_end=step * 100 * MS + 150 * MS) for step in range(4)]
    assert recorded(*rows)["num_workers_needed"].value == 3, "150 ms a batch, 60 ms for the rest of the step"


def test_a_step_of_two_batches_needs_twice_the_workers() -> None:
    rows = []
    for step in range(4):
        for half in range(2):
            at = step * 100 * MS + half * 20 * MS
            rows.append(batch(step, start=at + MS, end=at + 21 * MS - 1, fetch_start=at, fetch_end=at + 150 * MS))
    assert recorded(*rows)["num_workers_needed"].value == 5, "2 x 150 ms a step, 60 ms for the rest of it"


def test_a_restart_of_the_workers_costs_the_first_wait_of_each_later_epoch_beyond_the_usual() -> None:
    recorder = Recorder()
    recorder.steps(6, 100 * MS)
    rows = []
    for step in range(6):
        at, wait = step * 100 * MS, 50 if step in (0, 3) else 10
        recorder.launch(at, at + MS)
        recorder.mark(at + MS, at + (1 + wait) * MS, "gpudiag::data_wait")
        recorder.launch(at + 60 * MS, at + 100 * MS)
        rows.append(batch(step % 3, start=at + MS, end=at + (1 + wait) * MS, epoch=step // 3))
    got = measured(recorder, loader=loader_batches(*rows), loaders=(loader_info(),))
    assert got["loader_epochs"].value == 2
    assert got["worker_restart_time"].value == pytest.approx(40 * MS / 6), "the first epoch's start is not a restart"
    assert got["first_batch_wait"].value == 50 * MS


def test_workers_that_end_and_start_between_the_batches_belong_to_the_restart() -> None:
    """The epoch's last next brings no batch, and the new workers start before the first next: both are waits for input."""
    recorder = Recorder()
    recorder.steps(6, 100 * MS)
    rows = []
    for step in range(6):
        at = step * 100 * MS
        recorder.launch(at, at + MS)
        recorder.mark(at + MS, at + 11 * MS, "gpudiag::data_wait")
        recorder.launch(at + 40 * MS, at + (70 if step == 2 else 100) * MS)
        rows.append(batch(step % 3, start=at + MS, end=at + 11 * MS, epoch=step // 3))
    recorder.mark(2 * 100 * MS + 70 * MS, 2 * 100 * MS + 95 * MS, "gpudiag::data_wait")
    got = measured(recorder, loader=loader_batches(*rows), loaders=(loader_info(),))
    assert got["worker_restart_time"].value == pytest.approx(25 * MS / 6)


def test_epochs_before_the_window_are_not_counted() -> None:
    got = recorded(
        *[batch(step - 5, start=(step - 5) * 100 * MS, epoch=0) for step in range(3)],
        *[batch(s, epoch=1) for s in range(4)],
    )
    assert got["loader_epochs"].value == 1


def test_the_slowest_percent_needs_a_hundred_batches() -> None:
    assert isinstance(recorded(*[batch(step) for step in range(99)])["loader_slow_share"], Missing)
    rows = [batch(step) for step in range(99)] + [batch(99, fetch_end=99 * 100 * MS + 9900 * MS)]
    assert recorded(*rows)["loader_slow_share"].value == pytest.approx(9900 / (99 * 30 + 9900))


def test_the_loader_with_most_batches_is_the_one_meant() -> None:
    got = measured(
        training(),
        loader=loader_batches(*[batch(s, loader=1) for s in range(4)], *[batch(s, loader=0, fetch_end=s * 100 * MS + MS) for s in range(3)]),
        loaders=(loader_info(loader=0, batches=3, num_workers=9), loader_info(loader=1, batches=100, num_workers=4, pin_memory=True)),
    )  # fmt: skip
    assert (got["num_workers"].value, got["pin_memory"].value) == (4, 1)
    assert got["loader_fetch_time"].value == 30 * MS


def test_a_dataset_that_holds_a_table_of_paths_is_not_in_memory() -> None:
    """It is as long as the table, and takes far longer for a sample than a row takes."""
    got = recorded(*[batch(step) for step in range(4)], in_memory=True)
    assert got["dataset_in_memory"].value == 0


def test_settings_of_the_loader() -> None:
    got = recorded(*[batch(step) for step in range(4)], persistent_workers=True, in_memory=True, batch_size=4096)
    wanted = {"num_workers": 2, "pin_memory": 0, "persistent_workers": 1, "dataset_in_memory": 1}
    assert {name: got[name].value for name in wanted} == wanted


def test_the_machine_and_what_is_asked_of_it() -> None:
    host = HostInfo(usable_cpus=3.5, machine_cpus=64, torch_threads=4)
    got = measured(training(), loaders=(loader_info(num_workers=6, worker_threads=2),), host=host)
    wanted = {"usable_cpus": 3.5, "machine_cpus": 64, "cpu_demand": 16}
    assert {name: got[name].value for name in wanted} == wanted
    bare = measured(training(), loaders=(loader_info(),))
    assert "torch" in bare["cpu_demand"].reason
    assert isinstance(bare["usable_cpus"], Missing)


def test_what_a_record_lacks_is_missing_by_itself() -> None:
    rows = [batch(s, pin_ns=-1, io_ns=-1, dataset_ns=-1) for s in range(4)]
    got = recorded(*rows)
    for name in ("loader_pin_time", "loader_io_share", "loader_dataset_time", "loader_sample_time"):
        assert isinstance(got[name], Missing)
    assert got["loader_cpu_share"].value == pytest.approx(0.8)
    assert isinstance(recorded(*[batch(s) for s in range(4)], batch_size=None)["loader_sample_time"], Missing)


def test_batches_without_their_fetch_give_waits_but_no_fetch_times() -> None:
    got = recorded(*[batch(s, fetch_start=-1, fetch_end=-1) for s in range(4)])
    assert "fewer than three" in got["loader_fetch_time"].reason
    assert got["first_batch_wait"].value == 40 * MS


def test_without_loader_records_the_iterators_name_still_tells_no_workers() -> None:
    recorder = training()
    assert isinstance(measured(recorder)["num_workers"], Missing)
    recorder.operator(MS, 2 * MS, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    got = measured(recorder)
    assert got["num_workers"].value == 0
    assert all(isinstance(got[name], Missing) for name in BATCH_NAMES)
    recorder.operator(MS, 2 * MS, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    assert isinstance(measured(recorder)["num_workers"], Missing)


def test_time_in_the_loader_is_of_the_window_and_of_this_process() -> None:
    recorder = training()
    recorder.mark(-900 * MS, -1, "gpudiag::data_wait")
    recorder.mark(0, 400 * MS, "gpudiag::data_wait", process=200, thread=200)
    recorder.operator(0, MS, "aten::mm")
    loading = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    recorder.operator(0, 400 * MS, loading, process=200, thread=200)
    got = measured(recorder)
    assert got["loader_time"].value == got["input_lost"].value == 40 * MS


def test_a_wait_hidden_by_queued_work_is_loader_time_but_not_lost() -> None:
    recorder = training()
    for step in range(4):
        recorder.mark(step * 100 * MS + 60 * MS, step * 100 * MS + 90 * MS, "gpudiag::data_wait")
    got = measured(recorder)
    assert (got["loader_time"].value, got["input_lost"].value) == (70 * MS, 40 * MS)


def test_ranges_of_others_do_not_say_that_nothing_was_loaded() -> None:
    recorder = Recorder()
    for step in range(4):
        recorder.mark(step * MS, (step + 1) * MS, f"step {step}")
        recorder.kernel(step * MS, (step + 1) * MS - 9)
    assert isinstance(measured(recorder)["loader_time"], Missing)
    ours = Recorder()
    for step in range(4):
        ours.mark(step * MS, (step + 1) * MS, "gpudiag::step", index=step)
        ours.kernel(step * MS, (step + 1) * MS - 9)
    assert measured(ours)["loader_time"].value == 0


def test_on_a_cpu_run_the_hosts_wait_is_what_is_lost() -> None:
    recorder = Recorder()
    recorder.steps(4, 100 * MS)
    for step in range(4):
        recorder.mark(step * 100 * MS, step * 100 * MS + 40 * MS, "gpudiag::data_wait")
    rows = [
        batch(s, start=s * 100 * MS, end=s * 100 * MS + 40 * MS, fetch_end=s * 100 * MS + 150 * MS) for s in range(3)
    ]
    rows.append(batch(3, start=300 * MS, end=340 * MS, fetch_end=700 * MS))
    got = measured(recorder, loader=loader_batches(*rows), loaders=(loader_info(),))
    assert got["input_lost"].value == 40 * MS
    assert got["num_workers_needed"].value == 4, "by the mean: what workers deliver over time goes by it"
    assert got["loader_late_batch_wait"].value == 10 * MS
