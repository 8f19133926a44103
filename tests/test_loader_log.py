"""gpudiag's own records: read whatever is left of them, and joined to a timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from gpudiag.read.loader_join import join_batches
from gpudiag.read.loader_log import read_process_log
from gpudiag.read.log_attach import attach
from gpudiag.timeline import Ranges, Source, Timeline

MAIN, MS = 100, 1_000_000
WALL = 1_700_000_000_000_000_000


def process(pid: int = MAIN, role: str = "main", rank: int = 0) -> dict[str, Any]:
    facts = {"k": "process", "pid": pid, "ppid": 1, "role": role, "rank": rank, "world": 1, "python": "3.12.1"}
    return {**facts, "torch": "2.14.1", "cuda": None, "threads": 2, "mono": 0, "wall": WALL}


def step(index: int, start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"k": "step", "i": index, "s": start, "e": end, "o": "optimizer", **more}


def write(path: Path, *records: dict[str, Any], tail: bytes = b"") -> Path:
    path.write_bytes(b"".join(json.dumps(record).encode() + b"\n" for record in records) + tail)
    return path


def timeline(*steps: tuple[int, int, int], base: int | None = WALL) -> Timeline:
    """A timeline with our step ranges (index, start, end)."""
    names = [f"gpudiag::step#{index}" for index, _, _ in steps]
    count = len(steps)
    fill = np.ones(count, np.int64)
    ranges = Ranges(
        start=np.array([s for _, s, _ in steps], np.int64),
        end=np.array([e for _, _, e in steps], np.int64),
        process=fill * MAIN,
        thread=fill * 7,
        name=np.arange(count, dtype=np.int32),
        domain=np.full(count, count, np.int32),
        index=-fill,
    )
    return Timeline(Source("kineto", "x.json", "torch"), [*names, ""], ranges=ranges, time_base_ns=base)


def test_a_line_cut_off_or_foreign_costs_itself_only(tmp_path: Path) -> None:
    file = write(
        tmp_path / "a.jsonl", process(), step(1, 0, 5), {"x": 1}, tail=b'{"k":"step","i":2,"s":\n\xff\xfe\n{"k":"st'
    )
    log = read_process_log([file, tmp_path / "gone.jsonl", write(tmp_path / "empty.jsonl")])
    assert [p.pid for p in log.processes] == [MAIN]
    assert len(log.processes[0].of("step")) == 1
    assert log.damaged == 4


def test_step_cost_leaves_out_starts_checkpoints_and_half_recorded_steps(tmp_path: Path) -> None:
    steps = [step(i, i * 100, i * 100 + 90) for i in range(3)]  # start-up
    steps += [step(3, 300, 310), step(4, 400, 410), step(5, 500, 590, p={"checkpoint": 80}), step(6, 600, 680, mixed=1)]
    steps += [step(7, 700, 715, r=1), step(8, 800, 815, r=1), step(9, 900, 999, partial=1)]
    log = read_process_log([write(tmp_path / "a.jsonl", process(), *steps)])
    assert log.step_cost() == (10, 15)


def test_waiting_for_workers_is_not_the_observers_cost(tmp_path: Path) -> None:
    """Storage that stalls every other step: which kind of step the window's median hits is chance."""
    loader = {"k": "loader", "l": 0, "where": "a.py:1", "num_workers": 2}
    waits = [0, 0, 0, 130, 1, 130, 1, 1, 130, 1, 130, 130]
    steps = [
        step(
            i,
            i * 1000,
            i * 1000 + 10 + wait + (5 if i > 7 else 0),
            p={"data_wait": wait},
            **({"r": 1} if i > 7 else {}),
        )
        for i, wait in enumerate(waits)
    ]
    log = read_process_log([write(tmp_path / "a.jsonl", process(), loader, *steps)])
    assert log.step_cost() == (62, 67)


def test_the_optimizer_is_the_one_with_most_parameters(tmp_path: Path) -> None:
    kinds = [{"k": "optimizer", "name": n, "params": c, "bytes": 1} for n, c in (("SGD", 2), ("LBFGS", 9), ("Adam", 4))]
    log = read_process_log([write(tmp_path / "a.jsonl", process(), *kinds)])
    assert (log.optimizer_name(0), log.optimizer_name(1)) == ("LBFGS", "")


def cost(path: Path, *records: dict[str, Any]) -> tuple[int | None, int | None]:
    return read_process_log([write(path / "a.jsonl", process(), *records)]).step_cost()


def test_a_cold_first_epoch_is_not_the_observers_cost(tmp_path: Path) -> None:
    """The recorded steps and a few plain ones read from storage, without workers, and all work is slower meanwhile; the many
    of the second epoch find their files in memory. The recorder's 3 of 20 remain."""
    steps, batches = [], []
    for i in range(60):
        cold, kept = i < 20, 3 <= i < 12
        wait, work = (300, 20) if cold else (10, 10)
        length = wait + work + (3 if kept else 0)
        steps.append(step(i, i * 1000, i * 1000 + length, p={"data_wait": wait}, **({"r": 1} if kept else {})))
        batches.append({"k": "batch", "l": 0, "e": int(not cold), "s": i * 1000, "t": i * 1000 + wait})
    loader = {"k": "loader", "l": 0, "where": "a.py:1", "num_workers": 0}
    assert cost(tmp_path, loader, *batches, *steps) == (320, 323)


def test_compiling_logging_and_evaluating_are_not_the_observers_cost(tmp_path: Path) -> None:
    parts = [{"compile": 900}, {"log": 50}, {"eval": 400}, {}, {"compile": 900}, {"compile": 900}, {"eval": 400}]
    window = [step(10 + i, i * 9000, i * 9000 + 25 + sum(p.values()), r=1, p=p) for i, p in enumerate(parts)]
    plain = [step(i, i * 100, i * 100 + 20) for i in range(10)]
    assert cost(tmp_path, *plain, *window) == (20, 25)
    assert cost(tmp_path, *plain, *window[:1]) == (20, None), "of steps that compile nothing is known"


def test_steps_of_a_weaker_sign_do_not_count_once_an_optimizer_was_seen(tmp_path: Path) -> None:
    records = [
        step(0, 0, 9) | {"o": "loader"},
        {"k": "source", "source": "optimizer", "at": 9, "from": 1},
        step(1, 9, 20),
    ]
    log = read_process_log([write(tmp_path / "a.jsonl", process(), *records)])
    assert log.step_count(MAIN) == 1


def test_times_are_joined_by_common_steps_before_clocks(tmp_path: Path) -> None:
    log = read_process_log([write(tmp_path / "a.jsonl", process(), step(1, 1000, 1900), step(2, 2000, 2900))])
    by_steps = attach(timeline((1, 51_000, 51_900), (2, 52_000, 52_900), base=None), log)
    assert by_steps.step_log is not None
    assert by_steps.step_log.start.tolist() == [51_000, 52_000]
    by_clock = attach(timeline((77, 0, 1), base=WALL - 5), log)
    assert by_clock.step_log is not None
    assert by_clock.step_log.start.tolist() == [1005, 2005]


def test_collections_become_ranges_on_the_training_thread(tmp_path: Path) -> None:
    log = read_process_log(
        [
            write(
                tmp_path / "a.jsonl",
                process(),
                step(1, 0, 900),
                {"k": "gc", "s": 100, "e": 200, "g": 2},
                {"k": "gc", "s": 5000, "e": 5100},
            )
        ]
    )
    got = attach(timeline((1, 10_000, 10_900)), log)
    assert got.ranges is not None
    rows = [i for i, code in enumerate(got.ranges.name) if got.strings[code] == "gpudiag::gc"]
    assert [(int(got.ranges.start[i]), int(got.ranges.end[i]), int(got.ranges.thread[i])) for i in rows] == [
        (10_100, 10_200, 7)
    ]
    assert np.all(np.diff(got.ranges.start) >= 0)


def test_costly_lines_are_summed_over_the_run_and_reads_of_cpu_tensors_kept_apart(tmp_path: Path) -> None:
    steps = [
        step(
            1,
            0,
            9,
            w=[["checkpoint", "a.py:3", 1, 40], ["forward", "a.py:9", 1, 5]],
            y=[["Tensor.item", "a.py:5", 2, 10]],
        ),
        step(2, 9, 20, w=[["checkpoint", "a.py:3", 1, 50]], y=[["cpu:Tensor.tolist", "a.py:7", 1, 30]]),
    ]
    got = attach(timeline((1, 0, 9)), read_process_log([write(tmp_path / "a.jsonl", process(), *steps)]))
    assert [(s.kind, s.what, s.where, s.count, s.total_ns) for s in got.sites] == [
        ("checkpoint", "checkpoint", "a.py:3", 2, 90),
        ("read", "Tensor.tolist", "a.py:7", 1, 30),
        ("readback", "Tensor.item", "a.py:5", 2, 10),
    ]


def test_a_rank_that_the_log_does_not_know_is_left_alone(tmp_path: Path) -> None:
    log = read_process_log([write(tmp_path / "a.jsonl", process(rank=3))])
    before = timeline((1, 0, 9))
    assert attach(before, log) is before


def test_without_a_loader_there_is_no_table_and_with_an_unused_one_it_is_empty(tmp_path: Path) -> None:
    none = attach(timeline((1, 0, 9)), read_process_log([write(tmp_path / "a.jsonl", process())]))
    assert none.loader is None
    built = {
        "k": "loader",
        "l": 0,
        "where": "a.py:1",
        "num_workers": 2,
        "batch_size": 4,
        "pin_memory": False,
        "length": None,
    }
    built |= {
        "prefetch_factor": 2,
        "persistent_workers": False,
        "start_method": "fork",
        "dataset": "a.D",
        "in_memory": False,
    }
    one = attach(timeline((1, 0, 9)), read_process_log([write(tmp_path / "b.jsonl", process(), built)]))
    assert one.loader is not None
    assert len(one.loader) == 0
    assert (one.loaders[0].where, one.loaders[0].batches) == ("a.py:1", 0)


def fetch(number: int, worker: int, start: int, end: int, fetcher: int = 1, **more: int) -> dict[str, Any]:
    return {
        "k": "fetch",
        "f": fetcher,
        "n": 0,
        "b": number,
        "w": worker,
        "s": start,
        "e": end,
        "c": 2,
        "cpu": 3,
        "q": 1,
        **more,
    }


def batch(number: int, start: int, end: int, epoch: int = 0, count: int = 0, **more: Any) -> dict[str, Any]:
    return {"k": "batch", "l": 0, "it": 0, "e": epoch, "n": count, "b": number, "s": start, "t": end, **more}


def test_a_batch_is_joined_to_its_fetch_in_the_right_epoch_of_a_persistent_worker() -> None:
    """A forked worker has inherited the parent's count of fetchers, so only their order tells the epoch."""
    fetches = {
        201: [fetch(0, 0, 10, 20, fetcher=5), fetch(0, 0, 110, 130, fetcher=6)],
        202: [fetch(1, 1, 10, 25, fetcher=5), fetch(1, 1, 110, 140, fetcher=6)],
    }
    batches = [
        batch(0, 5, 22, pids=[201, 202]),
        batch(1, 23, 26, count=1),
        batch(0, 105, 131, epoch=1),
        batch(1, 132, 141, epoch=1, count=1),
    ]
    got = join_batches(batches, fetches, (), MAIN)
    assert got.fetch_end.tolist() == [20, 25, 130, 140]
    assert got.worker_pid.tolist() == [201, 202, 201, 202]
    assert got.epoch.tolist() == [0, 0, 1, 1]
    assert got.dataset_ns.tolist() == [8, 13, 18, 28]
    assert got.io_ns.tolist() == [6, 11, 16, 26]  # the fetch less 3 on a CPU and 1 waiting for one


def test_a_fetch_in_the_main_process_lies_inside_its_wait_and_a_lost_one_is_not_measured() -> None:
    fetches = {MAIN: [fetch(-1, -1, 11, 19), fetch(-1, -1, 31, 39, q=-1, cpu=4)]}
    batches = [batch(-1, 10, 20), batch(-1, 21, 22, count=1), batch(-1, 30, 40, count=2)]
    got = join_batches(batches, fetches, (), MAIN)
    assert got.fetch_start.tolist() == [11, -1, 31]
    assert got.io_ns.tolist() == [4, -1, -1]
    assert got.cpu_ns.tolist() == [3, -1, 4]
    assert got.worker.tolist() == [-1, -1, -1]


def test_pinning_counts_for_the_batch_it_delivered() -> None:
    pins = [{"k": "pin", "b": 0, "s": 21, "e": 24}, {"k": "pin", "b": 0, "s": 121, "e": 125}]
    fetches = {201: [fetch(0, 0, 10, 20), fetch(0, 0, 110, 120, fetcher=2)]}
    got = join_batches([batch(0, 5, 26, pids=[201]), batch(0, 105, 126, epoch=1)], fetches, pins, MAIN)
    assert got.pin_ns.tolist() == [3, 4]


def test_steps_that_are_replays_of_a_cuda_graph_are_not_called_calls_of_the_model(tmp_path: Path) -> None:
    def sign(*phases: str) -> str:
        source = {"k": "source", "source": "forward", "at": 0, "from": 0}
        steps = [step(n, n * MS, (n + 1) * MS, p={name: 5}) | {"o": "forward"} for n, name in enumerate(phases)]
        log = read_process_log([write(tmp_path / "rank0.100.jsonl", process(), source, *steps)])
        return attach(timeline(*((n, n * MS, (n + 1) * MS) for n in range(len(phases)))), log).step_source

    assert sign("forward", "graph_replay", "graph_replay") == "replay"
    assert sign("forward", "forward", "graph_replay") == "forward"


def test_the_allocators_figures_become_memory_events_with_the_peaks_last(tmp_path: Path) -> None:
    def alloc(at: int, allocated: int, peak: int) -> dict[str, Any]:
        return {"k": "alloc", "at": at, "d": 0, "a": allocated, "r": 90, "pa": peak, "pr": 100}

    records = [process(), step(0, 0, 10), alloc(11, 40, 70), step(1, 12, 20), alloc(21, 50, 80)]
    log = read_process_log([write(tmp_path / "rank0.100.jsonl", *records)])
    memory = attach(timeline((0, 1000, 1010), (1, 1012, 1020)), log).memory
    assert memory is not None
    assert memory.start.tolist() == [1011, 1021, 1021]
    assert memory.allocated.tolist() == [40, 50, 80]
    assert memory.reserved.tolist() == [90, 90, 100]


def test_reads_are_counted_over_whole_steps_without_the_first_and_looks_come_on_the_timelines_clock(
    tmp_path: Path,
) -> None:
    def reads(count: int) -> list[list[Any]]:
        return [["Tensor.item", "train.py:9", count, count * MS]]

    steps = [step(n, n * MS, (n + 1) * MS, y=reads(40 if n == 0 else 2)) for n in range(6)]
    rest = step(6, 6 * MS, 9 * MS, y=reads(100), partial=1)
    looked = {"k": "looks", "places": ["a.py:1", "b.py:2"], "at": [2 * MS, 5, 6], "n": [1, 0, 1]}
    log = read_process_log([write(tmp_path / "rank0.100.jsonl", process(), *steps, rest, looked)])
    got = attach(timeline((0, 1000 * MS, 1001 * MS)), log)
    (site,) = got.sites
    assert (site.kind, site.count, site.total_ns, site.steps) == ("readback", 10, 10 * MS, 5)
    assert got.looks is not None
    assert got.looks.at.tolist() == [1002 * MS, 1002 * MS + 5, 1002 * MS + 11]
    assert [got.looks.places[n] for n in got.looks.place] == ["b.py:2", "a.py:1", "b.py:2"]
    assert got.looks.process == MAIN
