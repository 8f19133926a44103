"""A complete benchmark result made by hand: one model on a GPU in two modes, with baseline, speed-up, roofline and sweep."""

from __future__ import annotations

import msgspec

from gpudiag.bench.cpu import speed_ups
from gpudiag.bench.latency import percentile
from gpudiag.bench.result import (
    SCHEMA,
    Agreement,
    BenchResult,
    CpuBaseline,
    CpuRun,
    FlopCount,
    Gpu,
    InferenceThroughput,
    Latency,
    Machine,
    MeasuringRules,
    Memory,
    ModelResult,
    ModeResult,
    OpKind,
    Power,
    Roofline,
    RoundLoad,
    Rounds,
    SweepPoint,
    Training,
)
from gpudiag.bench.stability import summarise
from gpudiag.bench.sweep import summarise_sweep

LOAD = RoundLoad(
    load_before=0.1, load_after=0.3, others=0.01, gpu_mhz=1980.0, gpu_celsius=60.0, gpu_watts=500.0, gpu_processes=1
)


def rounds(*values: float, unit: str = "images/s", load: RoundLoad = LOAD) -> Rounds:
    return summarise(values, unit, 0.10, [load] * len(values), 16)


def latency(median_ns: int = 5_000_000, samples: int = 3000) -> Latency:
    values = [median_ns + (i % 100) * 1000 for i in range(samples)]
    return Latency(
        1, samples, percentile(values, 0.5), percentile(values, 0.99), rounds(5e6, 5.01e6, 5.02e6, unit="ns")
    )


def mode(name: str, rate: float) -> ModeResult:
    return ModeResult(
        mode=name,  # type: ignore[arg-type]
        device="cuda:0",
        dtype="fp32" if name == "eager" else "bf16",
        training=Training(32, rounds(rate, rate * 1.01, rate * 0.99), 660, 0, 0, 6.9, 6.5, "in memory"),
        latency=latency(),
        inference=(InferenceThroughput(32, rounds(rate * 3, rate * 3.01, rate * 3.02)),),
        training_memory=Memory(allocated=3_000_000_000, reserved=3_500_000_000, source="torch"),
        power=Power(500.0, 600.0, 60.0, 65.0, 0.5, "NVML energy counter", 100, pcie_share=1.0),
        agreement=None if name == "eager" else Agreement(0.004, 0.05, True),
    )


def result(**changes: object) -> BenchResult:
    cpu = (
        CpuRun("one thread", "torch", 32, 1, 1, rounds(10, 10, 10)),
        CpuRun("all threads", "torch", 32, 16, 1, rounds(100, 100, 100)),
        CpuRun("instances", "torch", 32, 1, 16, rounds(150, 150, 150)),
        CpuRun("one thread", "onnxruntime", 32, 1, 1, rounds(20, 20, 20)),
    )
    model = ModelResult(
        model="resnet50",
        weights="random, seeded",
        input_shape=(3, 224, 224),
        parameters=25_557_032,
        parameter_bytes=102_228_128,
        runs=(mode("eager", 400.0), mode("amp", 900.0)),
        flops=FlopCount(
            4_089_184_256,
            8_178_368_512,
            24_299_077_632,
            32,
            10**8,
            10**7,
            81.8,
            818.0,
            {"convolution": OpKind(8, 1, 53)},
            "torch",
        ),
        rooflines=(
            Roofline(
                "NVIDIA H200",
                "tf32",
                32,
                50_000.0,
                494_500.0,
                "data sheet, dense",
                4800.0,
                "data sheet",
                0.101,
                103.0,
                "memory",
                0.6,
                1e-4,
                2e-4,
            ),
        ),
        cpu=CpuBaseline("A CPU", 16, cpu, None, {"onnxruntime": "onnx not installed: pip install 'gpudiag[onnx]'"}),
        speedups=tuple(speed_ups("eager", 32, 1200.0, cpu)),
        sweeps=(
            summarise_sweep(
                [
                    SweepPoint(1, 50.0, 0.01, 10**9),
                    SweepPoint(7, 250.0, 0.01, 10**9, odd_of=8),
                    SweepPoint(8, 380.0, 0.01, 10**9),
                    SweepPoint(16, 400.0, 0.01, 2 * 10**9),
                    SweepPoint(32, None, None, None, out_of_memory=True),
                ],
                "training",
                "cuda:0",
                "eager",
            ),
        ),
    )
    gpu = Gpu(
        0,
        "NVIDIA H200",
        141 * 10**9,
        "550.1",
        700.0,
        1980.0,
        1980.0,
        40.0,
        5,
        5,
        16,
        16,
        18,
        1,
        measured=True,
        nvlinks=18,
    )
    machine = Machine(
        cpu="A CPU", cores=16, cores_usable=16, cpu_quota=None, memory_bytes=1 << 37, system="Linux", python="3.11.7", torch="2.14.1",
        torchvision="0.29.1", torch_cuda="13.0", cudnn="92400", driver="550.1", governor="performance", load_before=0.1, load_after=0.5,
        gpus=(gpu,), settings={"float32_matmul_precision": "highest"},
    )  # fmt: skip
    base = BenchResult(
        SCHEMA, "0.1.0", False, "2026-11-30T12:00:00+00:00", 100.0, "cuda:0", MeasuringRules(), machine, (model,)
    )
    return msgspec.structs.replace(base, **changes)


def with_rates(made: BenchResult, *values: float) -> BenchResult:
    """The same with other training rates in eager mode."""
    (model,) = made.models
    eager = model.runs[0]
    assert eager.training is not None
    training = msgspec.structs.replace(eager.training, images_per_s=rounds(*values))
    runs = (msgspec.structs.replace(eager, training=training), *model.runs[1:])
    return msgspec.structs.replace(made, models=(msgspec.structs.replace(model, runs=runs),))
