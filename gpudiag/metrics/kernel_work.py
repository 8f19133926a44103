"""Metrics of kernels: what the time goes to, tensor cores, number formats, grids, optimizer and CPU operators."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from gpudiag.host import named
from gpudiag.intervals import Int64, Intervals
from gpudiag.kernels import KernelTable
from gpudiag.metrics.busy import NO_GPU
from gpudiag.metrics.make import ON_GPU, PROFILE, PROFILE_TORCH, Value, missing, value
from gpudiag.metrics.peaks import peaks_of
from gpudiag.names import INPUT, OPTIMIZER
from gpudiag.scope import Scope
from gpudiag.timeline import Kind
from gpudiag.units import NS_PER_MS

SHORT_NS = 10_000  # nsys-ai's and RULES.md C5's limit of a short kernel
NARROW = re.compile(r"align[12](?!\d)", re.I)  # CUTLASS's alignment in elements; align16 is the widest, not align1
# (simt kernels of cuBLAS are all align1, and an FP64 element is as wide as two FP32 ones: neither says anything of sizes.)
# These take no tensor cores whatever the size: a matrix-vector product, and the sum of a split product's parts.
NO_PRODUCT = re.compile(r"gemv|splitk_?reduce|dot_kernel", re.I)
LAYOUT = re.compile(r"nchwtonhwc|nhwctonchw|nchw2nhwc|nhwc2nchw|transpose", re.I)
NAMES = (
    "kernel_time", "kernels_per_step", "kernel_median_time", "kernel_short_share", "hot_kernel_share", "gemm_time",
    "gemm_fp32_time", "tensor_core_share", "tensor_core_speedup", "tf32_speedup", "elementwise_time", "elementwise_chain",
    "optimizer_time", "optimizer_kernels", "optimizer_idle", "attention_unfused_time", "layout_time", "odd_gemm_time",
    "few_block_time", "few_block_waste", "fp64_time", "fp64_rate_ratio", "cpu_op_idle",
)  # fmt: skip
# Classes of torch.optim by the forms that their `fused` and `foreach` arguments choose (torch 2.14; on a CPU the same have fused).
FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
FOREACH = FUSED | {"Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adafactor"}


def measure(scope: Scope) -> Iterator[Value]:
    yield from _optimizer_ops(scope)
    if scope.ops is None:
        for name in NAMES:
            yield missing(name, NO_GPU, ON_GPU)
        return
    table = scope.kernels
    total = float(table.length.sum())
    yield value("kernel_time", scope.per_step(total), "gpu_ops")
    yield value("kernels_per_step", scope.per_step(len(table)), "gpu_ops")
    if not len(table):
        for name in NAMES[2:]:
            yield missing(name, "no kernel ran in the window", PROFILE)
        return
    yield value("kernel_median_time", float(np.median(table.length)), "gpu_ops")
    yield value("kernel_short_share", float(np.mean(table.length < SHORT_NS)), "gpu_ops")
    yield value("hot_kernel_share", float(table.time_of.max()) / max(1.0, total), "gpu_ops")
    yield from _matrix_work(scope, table)
    yield from _small_work(scope, table)
    yield from _grids(scope, table)
    yield from _optimizer(scope)
    yield from _cpu_ops(scope)


def _matrix_work(scope: Scope, table: KernelTable) -> Iterator[Value]:
    matrix = [c.family in ("gemm", "conv") for c in table.classes]
    gemm = table.time(matrix)
    fp32 = [m and not c.tensor_cores and c.format == "fp32" for m, c in zip(matrix, table.classes, strict=True)]
    cores = [m and c.tensor_cores for m, c in zip(matrix, table.classes, strict=True)]
    yield value("gemm_time", scope.per_step(gemm), "kernel names")
    yield value("gemm_fp32_time", scope.per_step(table.time(fp32)), "kernel names")
    if gemm:
        yield value("tensor_core_share", table.time(cores) / gemm, "kernel names")
    else:
        yield missing("tensor_core_share", "no matrix product or convolution ran", PROFILE)
    peaks = peaks_of(scope.timeline.devices.get(scope.device))
    if peaks is None:
        for name in ("tensor_core_speedup", "tf32_speedup", "fp64_rate_ratio"):
            yield missing(name, "the recording does not say which GPU it was, or the table does not know it", PROFILE)
    else:
        for name, number in (
            ("tensor_core_speedup", peaks.half),
            ("tf32_speedup", peaks.tf32),
            ("fp64_rate_ratio", peaks.fp64),
        ):
            if number is None:
                yield missing(name, f"{peaks.source} gives no such rate", PROFILE)
            else:
                yield value(name, number if name == "fp64_rate_ratio" else max(1.0, number), peaks.source)
    odd = [
        m
        and c.format != "fp64"
        and (
            (NARROW.search(n) is not None and "simt" not in n)
            or (c.format == "half" and not c.tensor_cores and not NO_PRODUCT.search(n))
        )
        for m, c, n in zip(matrix, table.classes, table.names, strict=True)
    ]
    yield value("odd_gemm_time", scope.per_step(table.time(odd)), "kernel names")
    yield value("fp64_time", scope.per_step(table.time([c.format == "fp64" for c in table.classes])), "kernel names")
    convolutions = any(c.family == "conv" for c in table.classes)
    layout = [
        c.family == "copy" and LAYOUT.search(n) is not None for c, n in zip(table.classes, table.names, strict=True)
    ]
    yield value("layout_time", scope.per_step(table.time(layout) if convolutions else 0.0), "kernel names")
    yield value("attention_unfused_time", scope.per_step(_unfused_attention(table)), "kernel names")


def _unfused_attention(table: KernelTable) -> float:
    """Softmax kernels with a matrix product before and after them on the same stream, and those products; 0 where a fused
    attention kernel ran."""
    if any(c.family == "attention" for c in table.classes):
        return 0.0
    softmax = table.mask(["softmax" in n.lower() for n in table.names])
    product = table.mask([c.family == "gemm" for c in table.classes])
    if not softmax.any():
        return 0.0
    counted = np.zeros(len(table), bool)
    streams = table.stream
    for stream in np.unique(streams[softmax]):
        rows = np.flatnonzero(streams == stream)
        products = rows[product[rows]]
        for row in rows[softmax[rows]]:
            at = int(np.searchsorted(products, row))
            # scaling, masking and dropout may lie between: the nearest product within four kernels on either side
            before = products[at - 1] if at and row - products[at - 1] <= 4 else -1
            after = products[at] if at < products.size and products[at] - row <= 4 else -1
            if before >= 0 and after >= 0:
                counted[[before, row, after]] = True
    return float(table.length[counted].sum())


def _small_work(scope: Scope, table: KernelTable) -> Iterator[Value]:
    small = table.mask(
        [
            c.family in ("elementwise", "reduction") and "triton" not in n
            for c, n in zip(table.classes, table.names, strict=True)
        ]
    )
    yield value("elementwise_time", scope.per_step(float(table.length[small].sum())), "kernel names")
    runs, kernels = 0, int(small.sum())
    streams = table.stream
    for stream in np.unique(streams[small]):
        mine = small[streams == stream]
        runs += int((mine & ~np.append(False, mine[:-1])).sum())
    yield value("elementwise_chain", kernels / runs if runs else 1.0, "kernel names")


def _grids(scope: Scope, table: KernelTable) -> Iterator[Value]:
    info = scope.timeline.devices.get(scope.device)
    blocks = table.blocks
    if info is None or not info.sm_count or (blocks < 0).all():
        reason = "the recording lacks the grid sizes or the number of SMs"
        yield missing("few_block_time", reason, PROFILE)
        yield missing("few_block_waste", reason, PROFILE)
        return
    few = (blocks > 0) & (blocks < info.sm_count) & (table.length >= SHORT_NS)
    yield value("few_block_time", scope.per_step(float(table.length[few].sum())), "grid sizes")
    waste = table.length[few] * (1 - blocks[few] / info.sm_count)
    yield value("few_block_waste", scope.per_step(float(waste.sum())), "grid sizes")


def _optimizer(scope: Scope) -> Iterator[Value]:
    calls = scope.timeline.api_calls
    inside = named(scope.ranges, scope.names, OPTIMIZER)
    if not len(inside) or calls is None or scope.launches is None:
        for name in ("optimizer_time", "optimizer_kernels", "optimizer_idle"):
            yield missing(name, "no optimizer range was recorded", PROFILE)
        return
    ops, call = scope.window_ops, scope.window_calls
    mine = (ops.kind == Kind.KERNEL) & (call >= 0)
    mine[mine] = inside.contains(calls.start[call[mine]])
    yield value("optimizer_time", scope.per_step(float((ops.end - ops.start)[mine].sum())), "ranges, gpu_ops")
    yield value("optimizer_kernels", scope.per_step(int(mine.sum())), "ranges, gpu_ops")
    yield value("optimizer_idle", scope.per_step(inside.intersect(scope.idle).total()), "ranges, account")


def _optimizer_ops(scope: Scope) -> Iterator[Value]:
    ops = scope.cpu_ops
    inside = named(scope.ranges, scope.names, OPTIMIZER).intersect(scope.window)
    if ops is None or not len(inside):
        yield missing("optimizer_ops", "no optimizer range or no operators were recorded", PROFILE_TORCH)
    else:
        yield value("optimizer_ops", scope.per_step(int(inside.contains(ops.start).sum())), "cpu_ops")
    kind = scope.timeline.optimizer_name
    for name, kinds in (("optimizer_has_fused", FUSED), ("optimizer_has_foreach", FOREACH)):
        if kind:
            yield value(name, int(kind in kinds), "gpudiag's collector")
        else:
            yield missing(name, "the optimizer's class was not recorded", PROFILE)
    params = scope.timeline.optimizer_params
    if params is None:
        yield missing("optimizer_params", "the optimizer's parameters were not recorded", PROFILE)
        yield missing("optimizer_ideal_time", "the optimizer's parameters were not recorded", PROFILE)
        return
    count, size = params
    yield value("optimizer_params", count, "gpudiag's collector")
    info = scope.timeline.devices.get(scope.device)
    if info is None or not info.memory_bandwidth:
        yield missing("optimizer_ideal_time", "the memory bandwidth of the GPU was not recorded", PROFILE)
    else:
        # Adam reads gradient, parameter and two moments and writes three of them: at most 7 passes; SGD fewer.
        yield value(
            "optimizer_ideal_time", 7 * size / info.memory_bandwidth * 1e9, "parameter sizes; device properties"
        )


def slow_cpu_ops(scope: Scope) -> tuple[Intervals, Int64]:
    """Operators of at least 1 ms that made no CUDA call at all, and their rows in scope.cpu_ops."""
    ops, calls = scope.cpu_ops, scope.timeline.api_calls
    if ops is None or not len(ops):
        return Intervals.empty(), np.empty(0, np.int64)
    long = np.flatnonzero((ops.end - ops.start >= NS_PER_MS) & ~scope.names.rows(ops.name, INPUT))
    if calls is not None and len(calls) and long.size:
        key, thread = (
            (calls.process << 32) | (calls.thread & 0xFFFFFFFF),
            (ops.process << 32) | (ops.thread & 0xFFFFFFFF),
        )
        quiet = np.ones(long.size, bool)
        for one in np.unique(thread[long]):
            starts = np.sort(calls.start[key == one])
            rows = thread[long] == one
            made = np.searchsorted(starts, ops.end[long[rows]]) - np.searchsorted(starts, ops.start[long[rows]])
            quiet[rows] = made == 0
        long = long[quiet]
    return Intervals.union_of(ops.start[long], ops.end[long]), long


def _cpu_ops(scope: Scope) -> Iterator[Value]:
    if scope.timeline.cpu_ops is None:
        yield missing("cpu_op_idle", "framework operators were not recorded", PROFILE_TORCH)
        return
    under, _ = slow_cpu_ops(scope)
    free = scope.account.owned_by("idle.launch").union(scope.account.owned_by("idle.host"))
    yield value("cpu_op_idle", scope.per_step(under.intersect(free).total()), "cpu_ops, account")
