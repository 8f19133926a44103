"""Cases of kernels, launches and compilation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cases.case import Case
from cases.loading import LOADER, STEPS
from cases.sim import FP32_GEMM, MS, TENSOR_GEMM, US, S, Sim, host, samples
from gpudiag.timeline import Kind, Timeline

LAUNCHING = ("launch_bound", "tiny_kernels", "graph_candidate")
FP16_WITHOUT_CORES = "void gemm_kernel2x2_core<__half, 128, 16, 2, 4, 4, false, false, false, true>(__half*)"
CONV_FP32 = "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int)"
ADAM = "void at::native::vectorized_elementwise_kernel<4, at::native::addcmul_cuda_scalar_tensor2_kernel(at::TensorIterator&)>(int)"


def many_small_updates() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(2 * MS, count=20)
            run.idle_until_device()
            with run.phase("optimizer"):
                run.launch(2 * US, ADAM, count=1500, think=8 * US, op="aten::addcmul_")
    return run.timeline(
        host=host(debug_switches=("a debugger or tracer is attached (sys.settrace)",)),
        optimizer_params=(500, 2_000_000),
    )


def hidden_optimizer() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(4 * MS, count=25)
            with run.phase("optimizer"):
                run.launch(2 * US, ADAM, count=300, think=8 * US, op="aten::addcmul_")
            run.now = max(run.now, run.free - 60 * MS)
    return run.timeline(host=host(), optimizer_params=(100, 2_000_000))


def new_shapes_compile() -> Timeline:
    run = Sim()
    for i in range(20):
        with run.step():
            if i % 4 == 0:
                with run.phase("compile"):
                    run.think(400 * MS)
            run.launch(2 * MS, count=10)
            run.idle_until_device()
    return run.timeline(host=host())


def two_gpus_one_process() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            begin = run.now
            run.kernel(begin, begin + 8 * MS, "ncclDevKernel_Broadcast_RING_LL(ncclDevComm*)", device=1, kind=Kind.COMM)
            run.launch(8 * MS, "ncclDevKernel_Broadcast_RING_LL(ncclDevComm*)", kind=Kind.COMM)
            run.idle_until_device()
            run.operator(begin, run.now, "Broadcast")
            start = run.now
            run.launch(1_000 * US, count=12)
            for i in range(12):
                run.kernel(start + i * 1_000 * US + 10 * US, start + i * 1_000 * US + 990 * US, TENSOR_GEMM, device=1)
            run.idle_until_device()
            begin = run.now
            run.kernel(
                begin, begin + 4 * MS, "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevComm*)", device=1, kind=Kind.COMM
            )
            run.launch(4 * MS, "ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevComm*)", kind=Kind.COMM)
            run.idle_until_device()
            run.operator(begin, run.now, "Gather")
    return run.timeline(host=host())


def gemms(name: str, share: float = 0.8) -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(int(10 * MS * share), name, count=5)
            run.launch(int(10 * MS * (1 - share)), TENSOR_GEMM, count=5)
            run.idle_until_device()
    return run.timeline(host=host())


def convolutions() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(8 * MS, CONV_FP32, count=6, op="aten::cudnn_convolution")
            run.launch(
                4 * MS,
                "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(float)",
                count=4,
                op="aten::batch_norm",
            )
            run.idle_until_device()
    return run.timeline(host=host())


def tuning_each_shape() -> Timeline:
    """Every fifth step brings a new size: cuDNN tries its algorithms, the device runs them, nothing waits for data."""
    run = Sim()
    for i in range(30):
        with run.step():
            run.load(100 * US, fetch=3 * MS, worker=0)
            if i % 5 == 0:
                run.launch(10 * MS, CONV_FP32, count=150, op="aten::cudnn_convolution")
                run.sync()
            run.launch(2 * MS, CONV_FP32, count=10, op="aten::cudnn_convolution")
            run.idle_until_device()
    return run.timeline(host=host(), log_steps=True)


def few_blocks() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(1 * MS, TENSOR_GEMM, count=40)
            run.idle_until_device()
    timeline = run.timeline(host=host())
    assert timeline.gpu_ops is not None
    return replace(timeline, gpu_ops=replace(timeline.gpu_ops, blocks=np.full(len(timeline.gpu_ops), 4, np.int64)))


def growing_work() -> Timeline:
    run = Sim()
    for i in range(40):
        with run.step():
            run.launch((1 + i // 8) * MS, TENSOR_GEMM, count=10)
            run.idle_until_device()
    times = [rows[0] for rows in run.step_rows]
    return run.timeline(samples=samples(times, temperature_c=70.0), host=host())


def collecting_and_emptying() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(10 * MS, count=16)
            run.idle_until_device()
            with run.phase("gc"):
                run.think(170 * MS)
            for _ in range(10):
                run.api("cudaFree", 3 * MS)
            for _ in range(10):
                run.api("cudaMalloc", 2 * MS)
    return run.timeline(host=host())


def retries() -> Timeline:
    run = Sim()
    for i in range(40):
        with run.step():
            run.launch(2 * MS, count=8)
            if i % 6 == 5:
                run.sync("cudaDeviceSynchronize")
                for _ in range(30):
                    run.api("cudaFree", 800 * US)
                for _ in range(10):
                    run.api("cudaMalloc", 1200 * US)
            run.launch(2 * MS, count=8)
            run.idle_until_device()
    return run.timeline(host=host())


def module_load_first() -> Timeline:
    run = Sim()
    with run.step():
        run.api("cuModuleLoadData", 57 * S)
        run.launch(2 * MS, count=10)
        run.idle_until_device()
    for _ in range(15):
        with run.step():
            run.launch(2 * MS, count=10)
            run.idle_until_device()
    return run.timeline(host=host())


def with_the_observer(slowdown: float | None) -> Timeline:
    """Kernels of 12 us, each launched after 22 us of host time, of which the recorder is the larger part."""
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(17 * US, TENSOR_GEMM, count=1000, think=26 * US)
            run.idle_until_device()
    return run.timeline(host=host(), observer_slowdown=slowdown)


def checkpoints() -> Timeline:
    run = Sim()
    for i in range(40):
        with run.step():
            run.launch(2 * MS, count=10)
            run.idle_until_device()
            if i % 10 == 9:
                with run.phase("checkpoint"):
                    run.think(900 * MS)
    return run.timeline(host=host(), log_steps=True)


CASES = (
    Case("launch-adamw-dtensor", many_small_updates, ("optimizer_unfused", *LAUNCHING), ("debug_switches_on",), LOADER,
         says=("settrace",)),
    Case("launch-fused-no-gain", hidden_optimizer, silent=("optimizer_unfused", *LAUNCHING), says_not=("fused=true",),
         status="healthy"),
    Case("compile-dynamic-shapes", new_shapes_compile, ("compile_in_steps",), silent=("step_jitter", "periodic_stall", *LAUNCHING)),
    Case("launch-dataparallel-gil", two_gpus_one_process, ("dataparallel_used",), silent=("straggler_rank",)),
    Case("tf32-off", lambda: gemms(FP32_GEMM), ("tf32_off",), says=("set_float32_matmul_precision",), bound_by="compute"),
    Case("odd-vocab", lambda: gemms(FP16_WITHOUT_CORES), ("odd_shapes",), silent=("tf32_off",)),
    Case("odd-shape-no-gain", lambda: gemms(TENSOR_GEMM), silent=("odd_shapes", "tensor_cores_unused", "tf32_off"), status="healthy"),
    Case("odd-vocab:small share", lambda: gemms(FP16_WITHOUT_CORES, 0.01), silent=("odd_shapes",), status="healthy"),
    Case("channels-last-slower", convolutions, ("tf32_off", "tensor_cores_unused"), silent=("layout_conversions",)),
    Case("cudnn-benchmark-variable", tuning_each_shape, ("step_jitter", "periodic_stall", "tf32_off"), silent=LOADER),
    Case("util-100-lies", few_blocks, ("too_few_blocks",), bound_by="compute"),
    Case("slowdown-by-design", growing_work, silent=("thermal_throttled", "power_capped", "memory_growth"), says_not=("throttl",)),
    Case("mem-empty-cache-gc", collecting_and_emptying, ("gc_in_steps",), ("allocator_in_loop",), ("memory_fragmented",)),
    Case("mem-alloc-retries", retries, ("allocator_in_loop",), silent=("sync_idle", "step_jitter", "periodic_stall")),
    Case("ptx-jit-first-run", module_load_first, silent=("compile_in_steps", "step_jitter"), status="healthy"),
    Case("prof-overhead", lambda: with_the_observer(1.71), silent=LAUNCHING, says=("longer",)),
    Case("prof-overhead:plain", lambda: with_the_observer(1.0), LAUNCHING),
    Case("ckpt-pause", checkpoints, ("checkpoint_log_stall",), silent=(*LOADER, "step_jitter", "periodic_stall"), bound_by="host"),
)  # fmt: skip
