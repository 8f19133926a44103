"""The measurements of one job, inside its own process. The clock work is loop.py's; here is what one iteration does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpudiag.bench import modes, onnx_cpu, roofline
from gpudiag.bench.device import is_out_of_memory, open_device, usable_threads
from gpudiag.bench.flops import count_model, counting
from gpudiag.bench.job import Answer, Job, Message, first_line, spec_of
from gpudiag.bench.latency import latency_of
from gpudiag.bench.loop import Device, Loop, NoWatch, Watch
from gpudiag.bench.models import build_model, call, move, sample
from gpudiag.bench.power import PowerWatch, open_nvml, summarise_power
from gpudiag.bench.result import (
    CpuRun,
    InferenceThroughput,
    Latency,
    MeasuringRules,
    ModeResult,
    SweepPoint,
)
from gpudiag.bench.sweep import odd_of, point_of, run_sweep
from gpudiag.bench.training import TrainingStep, measure_training

Doing = Callable[[str], None]
Send = Callable[[Message], None]
OnPoint = Callable[[SweepPoint], None]
ALL_PARTS = ("flops", "latency", "inference", "roofline", "training")


def settled_model(job: Job) -> Any:
    """The model on the CPU. Built-in models get batch-norm statistics from one random batch: with the initial ones (mean 0,
    variance 1) an untrained ResNet's outputs grow with every block, and fp16 overflows for no reason of the mode's."""
    import torch

    spec = spec_of(job)
    model = build_model(spec, job.rules.seed)
    if spec.weights.startswith("random"):
        norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        if norms:
            momenta = [norm.momentum for norm in norms]
            for norm in norms:
                norm.momentum = 1.0
            with torch.no_grad():
                call(model.train(), sample(spec, 4, job.rules.seed)[0])
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
    return model


def open_watch(device: str) -> tuple[Watch, PowerWatch | None]:
    if device == "cpu":
        return NoWatch(), None
    import torch

    source, _why = open_nvml(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    if source is None:
        return NoWatch(), None
    watch = PowerWatch(source)
    return watch, watch


def make_loop(rules: MeasuringRules, device: Device, watch: Watch) -> Loop:
    return Loop(device, rules.rounds, rules.warm_up, rules.pause_s, rules.unstable_over, usable_threads(), watch=watch)


def inference_step(job: Job, model: Any = None) -> Callable[[], Any]:
    """One forward pass in inference mode with the input already on the device, returning its output."""
    import torch

    precision = modes.precision_of(job.mode, job.device, job.rules.amp_dtype)
    if model is None:
        model = settled_model(job).eval().to(job.device)
    inputs = move(sample(spec_of(job), job.batch, job.rules.seed)[0], job.device)
    kind = job.device.split(":")[0]

    def step() -> Any:
        with torch.inference_mode():
            return modes.forward(model, inputs, precision, kind)

    return step


def measure_latency(loop: Loop, step: Callable[[], Any], batch: int, rules: MeasuringRules) -> Latency:
    samples, loads = loop.latencies(step, rules.latency_iterations)
    return latency_of(samples, loads, batch, rules, loop.cores)


def mode_job(job: Job, doing: Doing, _point: OnPoint) -> Answer:
    """One model in one mode on one device: the parts asked for, each failing on its own."""
    started = time.perf_counter()
    device = open_device(job.device)
    watch, power = open_watch(job.device)
    loop = make_loop(job.rules, device, watch)
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        doing(name)
        try:
            yield
        except (
            RuntimeError,
            MemoryError,
        ) as error:  # torch's and its compilers' errors; others are bugs, ours or the model's
            failed[name] = "out of memory" if is_out_of_memory(error) else first_line(error)
            device.release()

    doing("build")
    model = settled_model(job)
    answer: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }
    if "flops" in job.parts:
        with part("flops"):
            answer["flops"] = count_model(model, spec_of(job), job.rules.batch, job.rules.seed)
    model = model.to(job.device)
    precision = modes.precision_of(job.mode, job.device, job.rules.amp_dtype)
    compiled = modes.is_compiled(job.mode)
    if {"latency", "inference", "roofline"} & set(job.parts):
        with part("outputs"):
            _inference_parts(job, model, loop, part, found, answer)
    if "training" in job.parts:
        device.release()
        with part("training"):
            step = TrainingStep(job, model.train(), modes.prepare(model, job.mode))
            device.reset_peak()
            if compiled:
                found["compile_training_s"] = modes.compile_seconds(step, lambda s: loop._timed(s, 1))
            if power is not None:
                power.rounds.clear()
            found["training"] = measure_training(loop, step, job.rules)
            found["training_memory"] = device.peak()
            if power is not None:
                found["power"] = summarise_power(power.rounds, job.batch * job.rules.train_iterations)
    result = ModeResult(
        mode=job.mode,
        device=job.device,
        dtype=precision.name,
        threads=job.threads if job.device == "cpu" else None,
        failed=failed,
        wall_s=time.perf_counter() - started,
        **found,
    )
    return Answer(mode=result, **answer)


def _inference_parts(
    job: Job, model: Any, loop: Loop, part: Any, found: dict[str, Any], answer: dict[str, Any]
) -> None:
    rules, kind = job.rules, job.device.split(":")[0]
    precision = modes.precision_of(job.mode, job.device, rules.amp_dtype)
    model.eval()
    prepared = modes.prepare(model, job.mode)
    single = at_batch(job, 1)
    step = inference_step(single, prepared)
    loop.device.reset_peak()
    if modes.is_compiled(job.mode):
        found["compile_inference_s"] = modes.compile_seconds(step, lambda s: loop._timed(s, 1))
    if job.mode != "eager":
        found["agreement"] = modes.agreement(step(), inference_step(at_mode(single), model)(), job.mode, rules)
    if "latency" in job.parts:
        with part("latency"):
            found["latency"] = measure_latency(loop, step, 1, rules)
    if "inference" in job.parts:
        rates: list[InferenceThroughput] = []
        for batch in rules.inference_batches:
            name = f"inference batch {batch}"
            rate = None
            with part(name):
                larger = inference_step(at_batch(job, batch), prepared)
                larger()  # compiled code for this size is made here, not in the measurement
                rate = loop.throughput(larger, batch, rules.inference_iterations)
            rates.append(InferenceThroughput(batch, rate, "" if rate else "failed, see the failed parts"))
        found["inference"] = tuple(rates)
    found["inference_memory"] = loop.device.peak()
    if "roofline" in job.parts and job.peaks is not None:
        with part("roofline"):
            answer["roofline"] = _roofline(job, model, prepared, precision, kind)


def _roofline(job: Job, model: Any, prepared: Any, precision: modes.Precision, kind: str) -> Any:
    import torch

    assert job.peaks is not None
    inputs = move(sample(spec_of(job), job.batch, job.rules.seed)[0], job.device)
    with torch.no_grad(), counting() as counted, precision.context(kind):
        call(model, inputs)
    seconds = roofline.timed_forward(
        prepared, inputs, lambda: precision.context(kind), job.threads, job.rules.roofline_s
    )
    has_tf32 = kind == "cuda" and torch.cuda.get_device_capability(job.device)[0] >= 8
    dtypes = roofline.dtype_of_kind(
        precision.name,
        has_tf32,
        torch.get_float32_matmul_precision() != "highest",
        torch.backends.cudnn.allow_tf32,
    )
    name = torch.cuda.get_device_name(job.device) if kind == "cuda" else f"CPU, {job.threads} thread(s)"
    found = roofline.judge(counted, job.batch, seconds, dtypes, job.peaks, name)
    disturbed = found.peak_gflops is None and set(dtypes.values()) <= set(job.peaks.gflops)
    if disturbed and job.peaks.gflops_source.startswith("measured"):
        peaks = roofline.undisturbed(job.peaks, tuple(set(dtypes.values())), job.threads, job.rules.roofline_s)
        found = roofline.judge(counted, job.batch, seconds, dtypes, peaks, name)
    return found


def at_batch(job: Job, batch: int) -> Job:
    import msgspec

    return msgspec.structs.replace(job, batch=batch)


def at_mode(job: Job) -> Job:
    import msgspec

    return msgspec.structs.replace(job, mode="eager")


def peaks_job(job: Job, doing: Doing, _point: OnPoint) -> Answer:
    doing("peak by matrix product, bandwidth by a + b")
    dtypes = ("fp32", "bf16") if job.device == "cpu" else ("fp32", "bf16", "fp16")
    return Answer(peaks=roofline.measure_peaks(job.device, dtypes, job.threads, job.rules.roofline_s))


def cpu_job(job: Job, doing: Doing, _point: OnPoint) -> Answer:
    """The CPU baseline of one model, as far as one process can measure it; job.parts: of `one thread`, `all threads`, `onnx`,
    `onnx latency`. Inference at `batch`, latency at 1. An ONNX part that fails leaves torch's numbers standing."""
    import torch

    loop = make_loop(job.rules, open_device("cpu"), NoWatch())
    model = settled_model(job).eval()
    runs: list[CpuRun] = []
    for kind, threads in (("one thread", 1), ("all threads", job.threads)):
        if kind not in job.parts:
            continue
        doing(f"torch, {threads} thread(s)")
        torch.set_num_threads(threads)
        rate = loop.throughput(inference_step(job, model), job.batch, job.rules.inference_iterations)
        latency = measure_latency(loop, inference_step(at_batch(job, 1), model), 1, job.rules)
        runs.append(CpuRun(kind, "torch", job.batch, threads, 1, rate, latency))
    if "onnx" not in job.parts:
        return Answer(cpu=tuple(runs))
    torch.set_num_threads(job.threads)
    with_latency = "onnx latency" in job.parts
    check, more, failed = onnx_cpu.measure(
        model, spec_of(job), job.rules, loop, job.threads, job.batch, with_latency, doing
    )
    return Answer(cpu=(*runs, *more), onnx=check, failed=failed)


def sweep_job(job: Job, doing: Doing, on_point: OnPoint) -> Answer:
    """The curve of training or inference over `sizes`; every point is sent as it comes, so that a killed process leaves the curve."""
    import torch

    device = open_device(job.device)
    loop = make_loop(job.rules, device, open_watch(job.device)[0])
    model = settled_model(job).to(job.device)

    def measure(batch: int) -> SweepPoint:
        doing(f"batch {batch}")
        device.release()
        device.reset_peak()
        torch.compiler.reset()
        this = at_batch(job, batch)
        try:
            if job.what == "training":
                rate = loop.throughput(
                    TrainingStep(this, model.train(), modes.prepare(model, job.mode)), batch, job.rules.train_iterations
                )
            else:
                step = inference_step(this, modes.prepare(model.eval(), job.mode))
                rate = loop.throughput(step, batch, job.rules.inference_iterations)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            model.zero_grad(set_to_none=True)
            return SweepPoint(batch, None, None, None, out_of_memory=True, odd_of=odd_of(batch))
        peak = device.peak()
        return point_of(batch, rate, peak.allocated if peak.allocated is not None else peak.resident)

    run_sweep(job.sizes, measure, on_point)
    return Answer()


TASKS: dict[str, Callable[[Job, Doing, OnPoint], Answer]] = {
    "mode": mode_job,
    "peaks": peaks_job,
    "cpu": cpu_job,
    "sweep": sweep_job,
}
