"""Cases of copies and waits."""

from __future__ import annotations

from cases.case import Case
from cases.loading import LOADER, STEPS, SYNCS, train
from cases.sim import ADD, ALL_REDUCE, MS, US, Sim, host, samples
from gpudiag.timeline import CallSite, CopyKind, Kind, MemKind, Timeline

TRANSFER = (
    "exposed_copy", "pageable_h2d", "blocking_copy", "copy_not_overlapped", "large_readback", "reupload_each_step",
    "slow_link", "small_copies",
)  # fmt: skip
COMMUNICATION = ("exposed_communication", "low_comm_overlap", "waits_in_collectives", "grad_sync_each_microstep")
MB, GB = 10**6, 10**9


def offload() -> Timeline:
    run = Sim()
    for _ in range(4):
        with run.step():
            train(run, 100 * MS)
            for _ in range(510):
                run.transfer(4_940 * MB // 510, 1.8e9, CopyKind.D2H, MemKind.PAGEABLE, wait=True)
    return run.timeline(host=host())


def tiny_blocking_copy() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(2 * MS, count=10)
            run.transfer(2048, 1e9, memory=MemKind.PAGEABLE, wait=True)
            run.think(6 * MS)
            run.launch(2 * MS, count=10)
            run.transfer(2048, 1e9, memory=MemKind.PAGEABLE, wait=True)
            run.think(6 * MS)
    return run.timeline(host=host())


def link(idle_gen: int, busy_gen: int, width: int, rate: float) -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.transfer(int(rate / 100), rate)  # 10 ms
            run.launch(2 * MS, count=8)
            run.idle_until_device()
    times = [rows[0] for rows in run.step_rows]
    gens = [idle_gen, *[busy_gen] * (len(times) - 1)]
    busy = [0.0, *[0.99] * (len(times) - 1)]
    return run.timeline(samples=samples(times, pcie_gen=gens, pcie_width=width, gpu_util=busy), host=host())


def waits_on_transfers() -> Timeline:
    run = Sim()
    for _ in range(4):
        with run.step():
            run.launch(10 * MS, count=10)
            for _ in range(100):
                run.transfer(300 * MB, 25e9, memory=MemKind.PINNED)
                run.sync()
    return run.timeline(host=host())


def metric_before_the_copy() -> Timeline:
    run = Sim()
    for _ in range(6):
        with run.step():
            run.launch(10 * MS, count=3)
            run.launch(
                1500 * MS,
                "void at::native::(anonymous namespace)::kernelHistogram1D<long, long, int>(int)",
                op="aten::bincount",
            )
            run.transfer(2 * MB, 6e9, memory=MemKind.PAGEABLE, wait=True)
    return run.timeline(host=host())  # fmt: skip


def read_per_task() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            for _ in range(15):  # 45 % of 154 ms idle after 15 reads
                run.launch(560 * US, count=10)
                run.launch(20 * US, ALL_REDUCE, kind=Kind.COMM)
                run.item()
                run.think(4600 * US)
    return run.timeline(host=host(), world_size=8)


def clipping() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(2 * MS, count=10)
            for _ in range(3):
                run.launch(50 * US, ADD, count=40)
                run.item()
                run.think(2 * MS)
    sites = (CallSite("readback", "Tensor.__bool__", "clip.py:31", 3 * STEPS, 3 * STEPS * 7 * MS),)
    return run.timeline(host=host(), sites=sites)


def micro_batches() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            for _ in range(4):
                run.launch(1 * MS, count=6)
                run.item()
                run.think(5 * MS)
    return run.timeline(host=host())


def copies_inside_next() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            with run.phase("data_wait"):
                run.transfer(120 * MB, 6e9, memory=MemKind.PAGEABLE, wait=True)
            run.launch(2 * MS, count=10)
            run.idle_until_device()
    return run.timeline(host=host())


CASES = (
    Case("h2d-pageable-offload", offload, ("large_readback",), silent=(*SYNCS, "blocking_copy", "pageable_h2d"), bound_by="transfer"),
    Case("h2d-bn-stats-to-cuda", tiny_blocking_copy, ("sync_idle", "blocking_copy"), silent=("exposed_copy", "pageable_h2d"),
         bound_by="sync"),
    Case("pcie-idle-reading:healthy", lambda: link(1, 4, 16, 25e9), ("copy_not_overlapped",), silent=("slow_link",)),
    Case("pcie-idle-reading:riser", lambda: link(4, 4, 4, 3e9), also=("slow_link",), first=TRANSFER),
    Case("sync-waits-on-transfer", waits_on_transfers, TRANSFER, silent=SYNCS, bound_by="transfer"),
    Case("sync-bincount-blamed-on-transfer", metric_before_the_copy, also=("hot_kernel",), silent=(*TRANSFER, *SYNCS),
         says=("histogram",)),
    Case("sync-per-task-loss", read_per_task, SYNCS, silent=COMMUNICATION, bound_by="sync"),
    Case("sync-clip-grad", clipping, SYNCS, says=("clip.py:31",), bound_by="sync"),
    Case("sync-microbatch", micro_batches, SYNCS, says_not=("non_blocking=true",), bound_by="sync"),
    Case("h2d-zero-means-unmeasured", copies_inside_next, ("pageable_h2d",), silent=LOADER, bound_by="transfer"),
)  # fmt: skip
