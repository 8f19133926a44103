"""`gpudiag bench`: which jobs, in which order, put together into one result. A reader who opens this sees the whole benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from gpudiag import __version__
from gpudiag.bench import onnx_cpu
from gpudiag.bench.cpu import run_instances, speed_ups
from gpudiag.bench.device import choose_device, usable_threads
from gpudiag.bench.job import Answer, Job, JobError, run_job
from gpudiag.bench.machine import cpu_name, describe_machine
from gpudiag.bench.measure import ALL_PARTS
from gpudiag.bench.models import ModelSpec
from gpudiag.bench.result import (
    MODES,
    SCHEMA,
    BenchResult,
    CpuBaseline,
    CpuRun,
    MeasuringRules,
    Mode,
    ModelResult,
    ModeResult,
    Roofline,
    SpeedUp,
    Sweep,
    SweepPoint,
)
from gpudiag.bench.roofline import Peaks, table_peaks
from gpudiag.bench.stability import load_average
from gpudiag.bench.sweep import plan, summarise_sweep

Doing = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to measure. cpu: also the CPU baseline. sweep: training | inference | "" (none), up to sweep_largest."""

    models: Sequence[ModelSpec]
    modes: Sequence[Mode]
    device: str
    rules: MeasuringRules
    quick: bool = False
    cpu: bool = True
    onnx: bool = True
    instances: bool = True
    sweep: str = ""
    sweep_largest: int = 1024
    parts: tuple[str, ...] = ALL_PARTS


@dataclass
class _State:
    """What accumulates: reasons for what is missing, and what to warn of."""

    not_measured: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def bench(plan_: Plan, doing: Doing) -> BenchResult:
    """Runs the plan. doing: called with what is going on, for a progress line. Raises GpudiagError before the first job only:
    a model that fails is reported in its own row."""
    started = datetime.now(UTC)
    clock = time.perf_counter()
    device, why_cpu = choose_device(plan_.device)
    machine, why_no_gpu = describe_machine(device)
    state = _State()
    if device == "cpu":
        state.not_measured["gpu"] = f"every GPU figure: {why_cpu}"
        state.not_measured["power"] = "mean power, temperature, energy per image: no GPU was measured"
        state.not_measured["speed-up"] = (
            "over one CPU core and over all cores: no GPU was measured, so there is neither"
        )
    elif why_no_gpu:
        state.not_measured["power"] = f"mean power, temperature, energy per image: {why_no_gpu}"
    absent = [mode for mode in MODES if mode not in plan_.modes]
    if absent:
        state.not_measured["modes"] = f"{', '.join(absent)}: not asked for (--modes)"
    if not plan_.sweep:
        state.not_measured["batch sweep"] = "not asked for (--sweep training or inference)"
    if not plan_.cpu:
        state.not_measured["CPU baseline"] = "switched off (--no-cpu-baseline), and with it the speed-ups"
    threads = plan_.rules.threads or usable_threads()
    peaks = _peaks(plan_, device, threads, machine.gpus, doing, state)
    models = tuple(_model(plan_, spec, device, threads, peaks, doing, state) for spec in plan_.models)
    return BenchResult(
        schema=SCHEMA,
        gpudiag=__version__,
        quick=plan_.quick,
        started=started.isoformat(timespec="seconds"),
        wall_s=round(time.perf_counter() - clock, 3),
        device=device,
        rules=plan_.rules,
        machine=msgspec.structs.replace(machine, load_after=load_average()),
        models=models,
        not_measured=state.not_measured,
        warnings=tuple(state.warnings),
    )


def _job(plan_: Plan, spec: ModelSpec, task: str, device: str, threads: int, **more: Any) -> Job:
    values: dict[str, Any] = {"mode": "eager", "batch": plan_.rules.batch, **more}
    return Job(
        task=task,
        model=spec.name,
        input_shape=spec.input_shape,
        sample_batch=spec.sample_batch,
        device=device,
        rules=plan_.rules,
        threads=threads,
        **values,
    )


def _peaks(plan_: Plan, device: str, threads: int, gpus: Sequence[Any], doing: Doing, state: _State) -> Peaks | None:
    """From the data sheet where the table knows the GPU, else measured by a matrix product."""
    if "roofline" not in plan_.parts:
        state.not_measured["roofline"] = "switched off (--no-roofline)"
        return None
    if device != "cpu":
        import torch

        known = table_peaks(device, torch.cuda.get_device_name(device))
        if known is not None:
            return known
        state.warnings.append(
            f"{torch.cuda.get_device_name(device)} is not in the GPU table: its peak is measured, not the data sheet's"
        )
    try:
        return run_job(_job(plan_, plan_.models[0], "peaks", device, threads), doing).peaks
    except JobError as error:
        state.not_measured["roofline"] = f"peak of {device}: {error.message}"
        return None


def _model(
    plan_: Plan, spec: ModelSpec, device: str, threads: int, peaks: Peaks | None, doing: Doing, state: _State
) -> ModelResult:
    def say(text: str) -> None:
        doing(f"{spec.name}: {text}")

    runs: list[ModeResult] = []
    rooflines: list[Roofline] = []
    failed: dict[str, str] = {}
    count: Answer = Answer()
    for mode in plan_.modes:
        parts = tuple(part for part in plan_.parts if part != "flops" or count.flops is None)
        job = _job(plan_, spec, "mode", device, threads, mode=mode, parts=parts, peaks=peaks)
        try:
            answer = run_job(job, lambda text, mode=mode: say(f"{mode}, {text}"))  # type: ignore[misc]
        except JobError as error:
            failed[mode] = error.message
            continue
        if answer.parameters and (count.flops is None):
            count = answer
        if answer.mode is not None:
            runs.append(answer.mode)
        if answer.roofline is not None:
            rooflines.append(answer.roofline)
    baseline = _cpu_baseline(plan_, spec, threads, runs, say) if plan_.cpu else None
    sweeps = tuple(_sweep(plan_, spec, device, threads, mode, say) for mode in plan_.modes if plan_.sweep)
    speedups: list[SpeedUp] = []
    if device != "cpu" and baseline is not None:
        for run in runs:
            for rate in run.inference:
                if rate.images_per_s is not None and rate.batch == plan_.rules.batch:
                    speedups += speed_ups(run.mode, rate.batch, rate.images_per_s.median, baseline.runs)
    return ModelResult(
        model=spec.name,
        weights=_weights(spec),
        input_shape=spec.input_shape,
        parameters=count.parameters,
        parameter_bytes=count.parameter_bytes,
        runs=tuple(runs),
        flops=count.flops,
        rooflines=tuple(rooflines),
        cpu=baseline,
        speedups=tuple(speedups),
        sweeps=sweeps,
        failed=failed,
    )


def _weights(spec: ModelSpec) -> str:
    if spec.weights.startswith("random"):
        return "random, seeded; batch-norm statistics from one random batch; nothing downloaded"
    return spec.weights


def _cpu_baseline(
    plan_: Plan, spec: ModelSpec, threads: int, measured: Sequence[ModeResult], say: Doing
) -> CpuBaseline:
    """measured: the modes' results; where they are the CPU's, eager at this batch is the run on all threads, measured already."""
    batch = plan_.rules.batch
    runs: list[CpuRun] = []
    check = None
    missing: dict[str, str] = {}
    known = _as_cpu_run(measured, batch, threads)
    parts = ["one thread"]
    if known is not None:
        runs.append(known)
    elif threads > 1:
        parts.append("all threads")
    absent = onnx_cpu.missing()
    if not plan_.onnx:
        missing["onnxruntime"] = "switched off (--no-onnx)"
    elif absent:
        missing["onnxruntime"] = absent
    else:
        parts += ["onnx"] if plan_.quick else ["onnx", "onnx latency"]
    try:
        answer = run_job(_job(plan_, spec, "cpu", "cpu", threads, parts=tuple(parts)), say)
        runs += answer.cpu
        check = answer.onnx
        missing.update(answer.failed)
    except JobError as error:
        missing["baseline"] = error.message
    if threads == 1:
        missing["instances"] = "one usable core: several pinned instances have no room"
    elif plan_.instances:
        try:
            runs.append(run_instances(_job(plan_, spec, "instance", "cpu", 1, batch=batch), threads, say))
        except JobError as error:
            missing["instances"] = error.message
    return CpuBaseline(cpu_name(), threads, tuple(runs), check, missing)


def _as_cpu_run(measured: Sequence[ModeResult], batch: int, threads: int) -> CpuRun | None:
    for run in measured:
        if run.device == "cpu" and run.mode == "eager" and run.threads == threads and threads > 1:
            for rate in run.inference:
                if rate.batch == batch and rate.images_per_s is not None:
                    return CpuRun("all threads", "torch", batch, threads, 1, rate.images_per_s, run.latency)
    return None


def _sweep(plan_: Plan, spec: ModelSpec, device: str, threads: int, mode: Mode, say: Doing) -> Sweep:
    """The points come one by one: a process that the system ends for memory marks the batch it was at."""
    sizes = plan(plan_.sweep_largest)
    points: list[SweepPoint] = []
    stopped = ""
    job = _job(plan_, spec, "sweep", device, threads, mode=mode, what=plan_.sweep, sizes=tuple(sizes))
    try:
        run_job(job, lambda text: say(f"sweep, {text}"), points.append)
    except JobError as error:
        stopped = error.message
        if error.killed and len(points) < len(sizes):
            points.append(SweepPoint(sizes[len(points)], None, None, None, out_of_memory=True))
    return summarise_sweep(points, plan_.sweep, device, mode, stopped)
