"""A fault and its cure, both simulated: what a replay of the first predicts is held against the second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cases.sim import ADD, MS, TENSOR_GEMM, US, Sim, host, loader_info
from gpudiag.timeline import MemKind, Timeline

STEPS = 20


@dataclass(frozen=True)
class Pair:
    """rule: whose estimate is held against the difference of the two steps. tolerance: of the step, of the error."""

    name: str
    rule: str
    slow: Callable[[], Timeline]
    fast: Callable[[], Timeline]
    tolerance: float = 0.02


def reading(read: bool, think: int = 3 * MS) -> Timeline:
    """Four micro-steps: host work, then kernels; with or without reading the loss after each."""
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            for _ in range(4):
                run.think(think)
                run.launch(500 * US, count=10)
                if read:
                    run.item()
            run.now = max(run.now, run.free - 10 * MS)  # the launch queue holds no more
    return run.timeline(host=host())


def loading(workers: int, fetch: int = 40 * MS, work: int = 12 * MS) -> Timeline:
    """Workers that need no CPU of the loop's: each makes a batch in `fetch`, two ahead."""
    run = Sim()
    ready = [run.now + fetch * (i // workers + 1) for i in range(workers * 2)]
    for i in range(STEPS * 2):
        with run.step():
            wait = max(20 * US, ready[i] - run.now)
            run.load(wait, fetch=fetch, cpu=0.95, io=0.0, worker=i % workers)
            ready.append(max(ready[len(ready) - workers], run.now) + fetch)
            run.launch(work // 10, count=10)
            run.sync()
    return run.timeline(loader=loader_info(workers, persistent=True), host=host(), log_steps=True)


def copying(ahead: bool) -> Timeline:
    """A pinned batch of 100 MB, 4 ms on the link, copied before the kernels or beside those of the step before."""
    run = Sim()
    for i in range(STEPS):
        with run.step():
            if not ahead or i == 0:
                run.transfer(100_000_000, 25e9)
            run.launch(1 * MS, count=12)
            if ahead:  # on a stream of its own, while the kernels run
                begin = run.now
                run.next += 1
                run.call(begin, begin + 4 * US, "cudaMemcpyAsync", correlation=run.next)
                run.copy(begin + 10 * US, begin + 10 * US + 4 * MS, 100_000_000, correlation=run.next)
            run.sync()
    return run.timeline(host=host())


def launching(graph: bool) -> Timeline:
    """800 kernels of 3 us, launched every 12 us, or as one graph."""
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            if graph:
                run.launch(3 * US, ADD)
                for _ in range(799):
                    run.kernel(run.free + 1 * US, run.free + 4 * US, ADD, correlation=run.next)
                    run.free += 4 * US
            else:
                run.launch(3 * US, ADD, count=800, think=8 * US, op="aten::add")
            run.sync()
    return run.timeline(host=host())


def saving(save: bool) -> Timeline:
    run = Sim()
    for i in range(STEPS * 2):
        with run.step():
            run.launch(1 * MS, count=10)
            run.sync()
            if save and i % 5 == 4:
                with run.phase("checkpoint"):
                    run.think(100 * MS)
    return run.timeline(host=host())


def blocked(pinned: bool) -> Timeline:
    """A pageable batch, 60 MB at 6 GB/s, that the host waits for; or pinned and copied ahead."""
    if pinned:
        return copying_ahead_of(TENSOR_GEMM)
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.transfer(60_000_000, 6e9, memory=MemKind.PAGEABLE, wait=True)
            run.launch(1500 * US, count=20)
            run.sync()
    return run.timeline(host=host())


def copying_ahead_of(kernel: str) -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(1500 * US, kernel, count=20)
            begin = run.now
            run.next += 1
            run.call(begin, begin + 4 * US, "cudaMemcpyAsync", correlation=run.next)
            run.copy(begin + 10 * US, begin + 10 * US + 2_400 * US, 60_000_000, correlation=run.next)
            run.sync()
    return run.timeline(host=host())


PAIRS = (
    Pair("reads of the loss", "readback_each_step", lambda: reading(True), lambda: reading(False)),
    Pair("reads that cost the device's time", "readback_each_step", lambda: reading(True, 8 * MS), lambda: reading(False, 8 * MS)),
    Pair("too few workers", "loader_too_few_workers", lambda: loading(1), lambda: loading(4)),
    Pair("two workers of four", "loader_too_few_workers", lambda: loading(2), lambda: loading(4)),
    Pair("pinned copies before the kernels", "copy_not_overlapped", lambda: copying(False), lambda: copying(True)),
    Pair("pageable copies", "pageable_h2d", lambda: blocked(False), lambda: blocked(True)),
    Pair("launches", "tiny_kernels", lambda: launching(False), lambda: launching(True)),
    Pair("checkpoints", "checkpoint_log_stall", lambda: saving(True), lambda: saving(False)),
)  # fmt: skip
