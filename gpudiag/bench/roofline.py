"""Where a model stands under the roof of its device: dense peak of the dtype in use, memory bandwidth, arithmetic intensity.

Roofline: Williams, Waterman, Patterson, CACM 52(4), 2009. Achieved rates and the CPU's peak are timed with
torch.utils.benchmark, which synchronises and warms up; its default of one thread is overridden on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gpudiag.bench.flops import CONV, Counted
from gpudiag.bench.gpu_table import GpuSpec, find_gpu, load_gpus
from gpudiag.bench.result import Roofline

MATRIX_SIZES = (512, 1024, 2048)  # the best of these is the peak: small ones fit the caches, large ones amortise
STREAM_BYTES = 1 << 28  # per array: three make 805 MB, above the last-level caches of today's servers


class Peaks(msgspec.Struct, frozen=True):
    """gflops: by dtype name (fp32, tf32, bf16, fp16). bandwidth_gbs: memory. sources say measured or table."""

    device: str
    threads: int | None
    gflops: dict[str, float]
    gflops_source: str
    bandwidth_gbs: float | None
    bandwidth_source: str


def measure_peaks(device: str, dtypes: tuple[str, ...], threads: int, min_s: float) -> Peaks:
    """By a square matrix product per dtype, and by a + b -> c over arrays far larger than the caches (STREAM's add: 3 arrays moved).

    On a CPU the product is tried twice, as torch.mm (MKL) and as a 1x1 convolution (oneDNN), which is the same product: on an AMD
    EPYC with two threads oneDNN reached 389 GFLOP/s where MKL stayed at 111, so models passed a "peak" of torch.mm alone.
    """
    import torch
    from torch.utils.benchmark import Timer

    def seconds(statement: str, names: dict[str, Any]) -> float:
        """The best single run of at least `min_s` of them: a short run can fall between two interruptions, an average cannot."""
        timer = Timer(statement, globals={"torch": torch, **names}, num_threads=threads)
        timer.timeit(1)
        best, spent = float("inf"), 0.0
        while spent < min_s:
            once = float(timer.timeit(1).mean)
            best, spent = min(best, once), spent + once
        return best

    gflops: dict[str, float] = {}
    for name in dtypes:
        dtype = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        best = 0.0
        for size in MATRIX_SIZES if device == "cpu" else (4096, 8192):
            a = torch.randn(size, size, device=device).to(dtype)
            b = torch.randn(size, size, device=device).to(dtype)
            best = max(best, 2 * size**3 / seconds("torch.mm(a, b)", {"a": a, "b": b}) / 1e9)
            if device == "cpu":
                image = a.reshape(1, size, 32, size // 32).contiguous(memory_format=torch.channels_last)
                names = {"x": image, "w": b.reshape(size, size, 1, 1)}
                best = max(best, 2 * size**3 / seconds("torch.nn.functional.conv2d(x, w)", names) / 1e9)
        gflops[name] = best
    count = STREAM_BYTES // 4
    x, y, z = (torch.ones(count, device=device) for _ in range(3))
    bandwidth = 3 * STREAM_BYTES / seconds("torch.add(x, y, out=z)", {"x": x, "y": y, "z": z}) / 1e9
    return Peaks(
        device,
        threads if device == "cpu" else None,
        gflops,
        f"measured here: matrix product (torch.mm or as 1x1 convolution), best of {', '.join(map(str, MATRIX_SIZES))}, {threads} thread(s)"
        if device == "cpu"
        else "measured here: matrix product",
        bandwidth,
        f"measured here: a + b into c, {STREAM_BYTES >> 20} MiB each",
    )


def table_peaks(device: str, name: str, specs: tuple[GpuSpec, ...] | None = None) -> Peaks | None:
    """The data sheet's dense peaks of a GPU by the name that the driver gives; None when the table does not know it."""
    spec = find_gpu(name, specs or load_gpus())
    if spec is None:
        return None
    known = {"fp32": spec.fp32, "tf32": spec.tf32, "bf16": spec.bf16, "fp16": spec.fp16 or spec.fp16_vector}
    return Peaks(
        device,
        None,
        {dtype: value * 1e3 for dtype, value in known.items() if value is not None},
        f"data sheet, dense ({spec.name})",
        spec.bandwidth,
        f"data sheet ({spec.name})",
    )


def dtype_of_kind(precision: str, device_has_tf32: bool, matmul_tf32: bool, conv_tf32: bool) -> dict[str, str]:
    """Which dtype's units do the work, by kind: fp32 convolutions run in TF32 on Ampere and newer unless switched off, fp32
    matrix products do not unless switched on (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision)."""
    if precision != "fp32":
        return {"": precision}
    return {
        "": "tf32" if device_has_tf32 and matmul_tf32 else "fp32",
        CONV: "tf32" if device_has_tf32 and conv_tf32 else "fp32",
    }


def undisturbed(peaks: Peaks, dtypes: tuple[str, ...], threads: int, min_s: float) -> Peaks:
    """Measured peaks, measured again and the better kept: a peak below what the model just achieved was taken on a busy machine."""
    again = measure_peaks(peaks.device, dtypes, threads, min_s)
    return msgspec.structs.replace(
        peaks,
        gflops={name: max(value, again.gflops.get(name, 0.0)) for name, value in peaks.gflops.items()},
        bandwidth_gbs=max(peaks.bandwidth_gbs or 0.0, again.bandwidth_gbs or 0.0),
    )


def judge(
    counted: Counted,
    batch: int,
    seconds: float,
    dtypes: Mapping[str, str],
    peaks: Peaks,
    device: str,
) -> Roofline:
    """counted: one forward pass at `batch`; seconds: its measured time.

    peak: FLOPs over the time that each kind would need at the peak of its own dtype. ideal: every operation at the roof, one
    after another. memory-bound when more than half of the ideal time lies in operations below the ridge: a whole-model
    intensity would call a network of large convolutions and many large elementwise layers compute-bound.
    """
    flops = counted.flops
    achieved = flops / seconds / 1e9
    names = sorted({dtypes.get(kind, dtypes[""]) for kind, count, _ in counted.ops if count}) or [dtypes[""]]
    at_peak = 0.0
    ideal = memory_part = 0.0
    complete = peaks.bandwidth_gbs is not None
    for kind, count, size in counted.ops:
        peak = peaks.gflops.get(dtypes.get(kind, dtypes[""]))
        if count and peak is None:
            complete = False
            continue
        compute = count / (peak * 1e9) if count and peak else 0.0
        at_peak += compute
        memory = size / (peaks.bandwidth_gbs * 1e9) if peaks.bandwidth_gbs else 0.0
        ideal += max(compute, memory)
        if memory > compute:
            memory_part += memory
    known = all(name in peaks.gflops for name in names) and at_peak > 0
    peak_gflops = flops / at_peak / 1e9 if known else None
    source = peaks.gflops_source if known else f"no peak is known for {'+'.join(names)} here"
    if peak_gflops is not None and achieved > peak_gflops and source.startswith("measured"):
        # not a share above 100 %: the product was slower than the model, so it is no peak
        peak_gflops, complete = None, False
        source = "not known: the matrix product ran slower than the model (a busy machine)"
    share = memory_part / ideal if complete and ideal else None
    bound: Literal["compute", "memory", "unknown"] = "unknown"
    if share is not None:
        bound = "memory" if share > 0.5 else "compute"
    return Roofline(
        device=device,
        dtype="+".join(names),
        batch=batch,
        achieved_gflops=achieved,
        peak_gflops=peak_gflops,
        peak_source=source,
        bandwidth_gbs=peaks.bandwidth_gbs,
        bandwidth_source=peaks.bandwidth_source,
        peak_share=achieved / peak_gflops if peak_gflops else None,
        ridge=peak_gflops / peaks.bandwidth_gbs if peak_gflops and peaks.bandwidth_gbs else None,
        bound=bound,
        memory_share=share,
        ideal_s_per_image=ideal / batch if complete else None,
        measured_s_per_image=seconds / batch,
    )


def timed_forward(model: Any, inputs: Any, context: Any, threads: int, min_s: float) -> float:
    """Median seconds of one forward pass by torch.utils.benchmark (synchronises CUDA)."""
    import torch
    from torch.utils.benchmark import Timer

    from gpudiag.bench.models import call

    def run() -> None:
        with torch.inference_mode(), context():
            call(model, inputs)

    return float(Timer("run()", globals={"run": run}, num_threads=threads).blocked_autorange(min_run_time=min_s).median)
