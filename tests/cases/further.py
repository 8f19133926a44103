"""Faults that no case of the field tells of, so that the rules about them are held, too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cases.case import Case
from cases.loading import STEPS, train
from cases.sim import ADD, ALL_REDUCE, MS, TENSOR_GEMM, US, Sim, host, loader_info, samples
from gpudiag.timeline import CopyKind, DeviceInfo, Kind, MemKind, Timeline

FP64 = "void cutlass::Kernel<cutlass_80_simt_dgemm_128x64_8x5_nn_align1>(double)"
TRANSPOSE = "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true>(int)"


def own_code() -> Timeline:
    """The script's own Python between two halves of the step."""
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            train(run)
            run.think(9 * MS)
    return run.timeline(host=host())


def loader(workers: int, waits: list[int], fetches: list[int], **more: object) -> Timeline:
    run = Sim()
    for i in range(len(waits)):
        with run.step():
            run.load(waits[i], fetch=fetches[i], worker=i % max(1, workers), **more)  # type: ignore[arg-type]
            train(run)
    return run.timeline(loader=loader_info(workers, persistent=True), host=host(4, 4))


def tiny_copies() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            for _ in range(200):
                run.transfer(4096, 2e9, memory=MemKind.PAGEABLE, wait=True)
            train(run)
    return run.timeline(host=host())


def slow_first_steps() -> Timeline:
    """Start-up is left out by itself where it leads; here the second step is the slow one."""
    run = Sim()
    for i in range(STEPS):
        with run.step():
            run.launch(8 * MS if i == 1 else 1 * MS, count=10)
            run.idle_until_device()
    return run.timeline(host=host())


def kernels_beside(name: str, ns: int, **more: object) -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(ns, name, count=5)
            run.launch(
                1 * MS, "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x32", count=8
            )
            run.idle_until_device()
    return run.timeline(host=host(), **more)


def migrations() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.transfer(200_000_000, 25e9, CopyKind.MANAGED, MemKind.MANAGED)
            train(run)
    return run.timeline(host=host())


def reduced_each_microstep() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            for _ in range(4):
                run.launch(1 * MS, count=5)
                with run.phase("backward"):
                    run.launch(1 * MS, count=5)
                    run.launch(2 * MS, ALL_REDUCE, kind=Kind.COMM)
            with run.phase("optimizer"):
                run.launch(200 * US, ADD, count=5)
            run.idle_until_device()
    return run.timeline(host=host(), world_size=8)


def watched(launch_bound: bool = False, **columns: object) -> Timeline:
    run = Sim()
    for _ in range(40):
        with run.step():
            if launch_bound:
                run.launch(20 * US, TENSOR_GEMM, count=200, think=40 * US)
            train(run)
    times = [rows[0] for rows in run.step_rows]
    return run.timeline(samples=samples(times, **columns), host=host())


def growing() -> Timeline:
    return watched(memory_used=np.linspace(10 << 30, 30 << 30, 40).astype(np.int64))


def denied() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            train(run)
    return replace(run.timeline(host=host()), diagnostics=("ERR_NVGPUCTRPERM: no permission to read GPU counters",))


def restarted() -> Timeline:
    run = Sim()
    for i in range(40):
        with run.step():
            run.load(300 * MS if i % 10 == 0 else 100 * US, fetch=2 * MS, worker=0, epoch=i // 10, batch=i % 10)
            train(run)
    return run.timeline(loader=loader_info(1), host=host())


def uneven_stages() -> Timeline:
    """Two devices of one program: the second has a third of the first one's work and no collective to wait in."""
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            begin = run.now
            train(run, 30 * MS)
            for i in range(10):
                run.next += 1
                run.call(begin + i * 10 * US, begin + i * 10 * US + 4 * US, correlation=run.next)
                run.kernel(
                    begin + i * 3 * MS + MS, begin + i * 3 * MS + 2 * MS, TENSOR_GEMM, device=1, correlation=run.next
                )
    return run.timeline(host=host())


def crowded() -> Timeline:
    run = Sim()
    for i in range(STEPS):
        with run.step():
            run.load(60 * MS, fetch=1100 * MS, cpu=0.04, io=0.02, worker=i % 16)
            train(run)
    return run.timeline(loader=loader_info(16, worker_threads=8), host=host(2, 2))


CASES = (
    Case("rule:host_code_bound", own_code, ("host_code_bound",)),
    Case("rule:loader_collate_bound", lambda: loader(4, [40 * MS] * 20, [180 * MS] * 20, collate=0.8), ("loader_collate_bound",)),
    Case("rule:loader_jitter", lambda: loader(6, [100 * US] * 7 + [60 * MS] + [100 * US] * 8 + [60 * MS] + [100 * US] * 3,
                                              [30 * MS] * 7 + [150 * MS] + [30 * MS] * 8 + [150 * MS] + [30 * MS] * 3), ("loader_jitter",)),
    Case("rule:loader_skewed_batches", lambda: loader(2, [50 * US] * 60 + [400 * MS] + [50 * US] * 60, [2 * MS] * 60 + [420 * MS] + [2 * MS] * 60),
         ("loader_skewed_batches",)),
    Case("rule:loader_too_few_workers", lambda: loader(1, [40 * MS] * 20, [50 * MS] * 20), ("loader_too_few_workers",)),
    Case("rule:loader_workers_not_persistent", restarted, ("loader_workers_not_persistent",)),
    Case("rule:loader_too_many_workers", crowded, ("loader_too_many_workers",)),
    Case("rule:gpus_uneven", uneven_stages, also=("gpus_uneven",)),
    Case("rule:small_copies", tiny_copies, ("small_copies",), silent=("sync_idle", "launch_bound")),
    Case("rule:warm_up_in_window", slow_first_steps, also=("warm_up_in_window",), silent=("step_jitter",)),
    Case("rule:layout_conversions", lambda: kernels_beside(TRANSPOSE, 500 * US), ("layout_conversions",)),
    Case("rule:fp64_used", lambda: kernels_beside(FP64, 1 * MS, devices={0: DeviceInfo("NVIDIA A40", 84, (8, 6), 48 << 30, 696_000_000_000)}), first=("fp64_used",), silent=("odd_shapes",)),
    Case("rule:tf32_off", lambda: kernels_beside("cutlass_80_simt_sgemm_128x64_8x5_nn_align1", 2 * MS), ("tf32_off",), silent=("odd_shapes",)),
    Case("rule:memsets_each_step", lambda: kernels_beside("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, 1>(int)", 400 * US),
         ("memsets_each_step",)),
    Case("rule:managed_memory_thrash", migrations, ("managed_memory_thrash",)),
    Case("rule:grad_sync_each_microstep", reduced_each_microstep, ("grad_sync_each_microstep",)),
    Case("rule:clocks_locked", lambda: watched(reasons=0x2, sm_clock_mhz=1000.0), also=("clocks_locked",), status="healthy"),
    Case("rule:memory_near_full", lambda: watched(memory_used=39 << 30), also=("memory_near_full",), status="healthy"),
    Case("rule:memory_growth", growing, also=("memory_growth",), status="healthy"),
    Case("rule:memory_room_for_batch", lambda: watched(True, memory_used=4 << 30), ("launch_bound", "graph_candidate", "tiny_kernels"), ("memory_room_for_batch",)),
    Case("rule:counters_denied", denied, also=("counters_denied",), status="healthy"),
)  # fmt: skip
