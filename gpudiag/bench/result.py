"""The result of a benchmark: plain data, schema `gpudiag.bench/1`. Units are in the field names; None = not measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from gpudiag.errors import GpudiagError

SCHEMA = "gpudiag.bench/1"

Mode = Literal["eager", "amp", "compile", "compile+amp"]
MODES: tuple[Mode, ...] = ("eager", "amp", "compile", "compile+amp")
DataKind = Literal["synthetic", "memory", "folder"]


class MeasuringRules(msgspec.Struct, frozen=True):
    """How it was measured; every field is an option of `gpudiag bench` and is recorded with the numbers.

    warm_up: iterations before *each* round, so that a clock that fell in the pause is up again.
    roofline_s: the least time that torch.utils.benchmark spends on each of its measurements.
    omp_wait_policy: "" leaves the OpenMP runtime's default, which spins while it waits. On two cores shared with others that
    made one ResNet-50 pass take 2-6 s instead of 60 ms (measured), so the quick rules wait passively.
    """

    batch: int = 32
    train_iterations: int = 200
    latency_iterations: int = 1000
    inference_batches: tuple[int, ...] = (8, 32, 128)
    inference_iterations: int = 50
    warm_up: int = 20
    rounds: int = 3
    pause_s: float = 5.0
    unstable_over: float = 0.10
    instance_s: float = 10.0
    roofline_s: float = 1.0
    tolerance_fp32: float = 1e-3
    tolerance_low: float = 5e-2
    seed: int = 0
    data: DataKind = "memory"
    folder: str = ""
    workers: int = 0
    optimizer: str = "sgd"
    learning_rate: float = 0.01
    amp_dtype: str = "auto"
    threads: int | None = None
    omp_wait_policy: str = ""


QUICK = MeasuringRules(
    batch=8,
    train_iterations=1,
    latency_iterations=10,
    inference_batches=(8,),
    inference_iterations=2,
    warm_up=1,
    rounds=2,
    pause_s=0.1,
    instance_s=1.0,
    roofline_s=0.2,
    omp_wait_policy="PASSIVE",
)


class RoundLoad(msgspec.Struct, frozen=True):
    """The machine during one round. others: share (0-1) of the CPUs that we may run on used by other processes; steal: taken by the hypervisor."""

    load_before: float | None = None
    load_after: float | None = None
    others: float | None = None
    steal: float | None = None
    cpu_mhz: float | None = None
    gpu_mhz: float | None = None
    gpu_celsius: float | None = None
    gpu_watts: float | None = None
    gpu_events: tuple[str, ...] = ()
    gpu_processes: int | None = None


class Rounds(msgspec.Struct, frozen=True):
    """One quantity over the rounds. median of `values`; spread = (largest - smallest) / median; stable: spread within the rule.

    reasons: for an unstable result, the likely causes, most likely first; empty when stable.
    """

    unit: str
    values: tuple[float, ...]
    median: float
    spread: float
    stable: bool
    reasons: tuple[str, ...] = ()
    loads: tuple[RoundLoad, ...] = ()


class Percentile(msgspec.Struct, frozen=True):
    """An order statistic of all samples (nearest rank), and its distribution-free 95 % interval.

    high_ns None: the sample has no order statistic above the true percentile with 95 % confidence; enough is then False.
    """

    q: float
    ns: int
    low_ns: int
    high_ns: int | None
    enough: bool
    samples_needed: int


class Latency(msgspec.Struct, frozen=True):
    """Inference at `batch`, every iteration timed on its own with the device synchronised. p50 per round in ns, p50/p99 over all rounds."""

    batch: int
    samples: int
    p50: Percentile
    p99: Percentile
    p50_rounds: Rounds


class InferenceThroughput(msgspec.Struct, frozen=True):
    """error: why there is no number (out of memory), or ""."""

    batch: int
    images_per_s: Rounds | None
    error: str = ""


class Memory(msgspec.Struct, frozen=True):
    """Peaks in bytes. CUDA: torch's allocated and reserved. CPU: resident set of the measuring process, and before the model existed."""

    allocated: int | None = None
    reserved: int | None = None
    resident: int | None = None
    resident_before: int | None = None
    source: str = ""


class Power(msgspec.Struct, frozen=True):
    """Over the steady part (warm-up left out). joules_per_image: from NVML's energy counter where it counts, else
    power integrated over time. event_shares: share of the samples with each clocks event reason. pcie_share: best PCIe rate seen while
    training / the most that GPU and slot can do; None too where the samples were few or the clock was down."""

    mean_watts: float
    max_watts: float
    mean_celsius: float | None
    max_celsius: float | None
    joules_per_image: float | None
    energy_source: str
    samples: int
    mean_mhz: float | None = None
    event_shares: dict[str, float] = {}
    pcie_share: float | None = None


class Training(msgspec.Struct, frozen=True):
    """End to end: loading, copy, forward, backward, update. losses: of all steps of the rounds, warm-up included; steps_skipped: by
    the loss scaler, of these."""

    batch: int
    images_per_s: Rounds
    losses: int
    losses_not_finite: int
    steps_skipped: int
    first_loss: float | None
    last_loss: float | None
    data: str


class Agreement(msgspec.Struct, frozen=True):
    """Outputs of a mode against eager fp32, same weights and input. error: max |a-b| / max |b|; None when it is not finite."""

    error: float | None
    tolerance: float
    agrees: bool


class ModeResult(msgspec.Struct, frozen=True):
    """One model in one mode on one device, measured in a process of its own. failed: why parts are missing, by part name.

    compile_s: wall time of the first call(s) minus a steady call, forward for inference and the first step for training.
    """

    mode: Mode
    device: str
    dtype: str
    threads: int | None = None
    training: Training | None = None
    latency: Latency | None = None
    inference: tuple[InferenceThroughput, ...] = ()
    training_memory: Memory | None = None
    inference_memory: Memory | None = None
    power: Power | None = None
    compile_inference_s: float | None = None
    compile_training_s: float | None = None
    agreement: Agreement | None = None
    failed: dict[str, str] = {}
    wall_s: float = 0.0


class OpKind(msgspec.Struct, frozen=True):
    """FLOPs and bytes of one kind of operation (convolution, matmul, attention, other), one image, forward."""

    flops: int
    bytes: int
    calls: int


class FlopCount(msgspec.Struct, frozen=True):
    """One image. flops = 2 x macs. bytes_ops: every operation reads its inputs and writes its outputs (no fusion, batch `batch`);
    bytes_least: weights once per batch, input and output once. intensity: FLOP per byte, both ways."""

    macs_forward: int
    flops_forward: int
    flops_training: int | None
    batch: int
    bytes_ops: int
    bytes_least: int
    intensity_ops: float
    intensity_least: float
    kinds: dict[str, OpKind]
    counter: str


class Roofline(msgspec.Struct, frozen=True):
    """Inference at `batch` on this device. peak: dense peak of the dtype in use. ideal_s: sum over operations of the larger of
    compute and memory time; memory_share: part of ideal_s in operations that memory limits."""

    device: str
    dtype: str
    batch: int
    achieved_gflops: float
    peak_gflops: float | None
    peak_source: str
    bandwidth_gbs: float | None
    bandwidth_source: str
    peak_share: float | None
    ridge: float | None
    bound: Literal["compute", "memory", "unknown"]
    memory_share: float | None
    ideal_s_per_image: float | None
    measured_s_per_image: float


class CpuRun(msgspec.Struct, frozen=True):
    """kind: one thread | all threads | instances; runtime: torch or onnxruntime. Rates are inference, images per second."""

    kind: str
    runtime: str
    batch: int
    threads: int
    instances: int
    images_per_s: Rounds | None
    latency: Latency | None = None
    note: str = ""


class OnnxCheck(msgspec.Struct, frozen=True):
    """The exported model against torch's output. error as in Agreement; None also for outputs of different shapes."""

    opset: int
    error: float | None
    tolerance: float
    agrees: bool
    runtime: str


class CpuBaseline(msgspec.Struct, frozen=True):
    cpu: str
    cores_usable: int
    runs: tuple[CpuRun, ...]
    onnx: OnnxCheck | None
    not_measured: dict[str, str] = {}


class SpeedUp(msgspec.Struct, frozen=True):
    """against: `one CPU core (the algorithm on parallel hardware)` or `all CPU cores (the choice of hardware)`. Inference, same batch."""

    against: str
    mode: str
    batch: int
    gpu_images_per_s: float
    cpu_images_per_s: float
    factor: float
    cpu_run: str


class SweepPoint(msgspec.Struct, frozen=True):
    """out_of_memory: this batch did not fit. odd_of: the even batch that this odd one stands beside."""

    batch: int
    images_per_s: float | None
    spread: float | None
    memory_bytes: int | None
    out_of_memory: bool = False
    odd_of: int | None = None


class Sweep(msgspec.Struct, frozen=True):
    """what: training or inference. knee: the smallest batch with 90 % of the best rate. penalties: odd batch -> rate / even rate."""

    what: str
    device: str
    mode: Mode
    points: tuple[SweepPoint, ...]
    best_batch: int | None
    knee: int | None
    odd_penalties: dict[str, float] = {}
    stopped: str = ""


class ModelResult(msgspec.Struct, frozen=True):
    model: str
    weights: str
    input_shape: tuple[int, ...]
    parameters: int
    parameter_bytes: int
    runs: tuple[ModeResult, ...]
    flops: FlopCount | None = None
    rooflines: tuple[Roofline, ...] = ()
    cpu: CpuBaseline | None = None
    speedups: tuple[SpeedUp, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    failed: dict[str, str] = {}


class Gpu(msgspec.Struct, frozen=True):
    """State of one GPU at the start, from NVML; what NVML does not say is None. index: NVML's. measured: the one that was measured,
    known by its UUID, since CUDA_VISIBLE_DEVICES and CUDA's order give it another number."""

    index: int
    name: str
    memory_bytes: int | None = None
    driver: str | None = None
    power_limit_w: float | None = None
    sm_mhz: float | None = None
    sm_mhz_max: float | None = None
    celsius: float | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks_active: int | None = None
    processes: int | None = None
    events: tuple[str, ...] = ()
    measured: bool = False
    nvlinks: int | None = None


class Machine(msgspec.Struct, frozen=True):
    """No host name, user or path: a result is made to be passed on."""

    cpu: str
    cores: int
    cores_usable: int
    cpu_quota: float | None
    memory_bytes: int | None
    system: str
    python: str
    torch: str
    torchvision: str
    torch_cuda: str
    cudnn: str
    driver: str
    governor: str
    load_before: float | None
    load_after: float | None
    gpus: tuple[Gpu, ...]
    settings: dict[str, Any] = {}


class BenchResult(msgspec.Struct, frozen=True):
    """What `gpudiag bench --json` prints. quick: small counts, not for comparison. not_measured: quantity -> reason."""

    schema: str
    gpudiag: str
    quick: bool
    started: str
    wall_s: float
    device: str
    rules: MeasuringRules
    machine: Machine
    models: tuple[ModelResult, ...]
    not_measured: dict[str, str] = {}
    warnings: tuple[str, ...] = ()


def to_json(result: BenchResult) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def read_result(path: Path) -> BenchResult:
    """Raises GpudiagError when the file is unreadable, no bench result, or of another schema."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except OSError as error:
        raise GpudiagError(
            f"{path}: {error.strerror or error}", "give a file written by `gpudiag bench --json`"
        ) from error
    except msgspec.MsgspecError as error:
        raise GpudiagError(
            f"{path}: not a benchmark result ({error})", "give a file written by `gpudiag bench --json FILE`"
        ) from error
    if result.schema != SCHEMA:
        raise GpudiagError(
            f"{path}: schema {result.schema!r}, this gpudiag reads {SCHEMA!r}", "use the gpudiag that wrote it"
        )
    return result


def measured_gpu(result: BenchResult) -> Gpu | None:
    return next((gpu for gpu in result.machine.gpus if gpu.measured), None)


def unstable_parts(result: BenchResult) -> list[str]:
    """`model mode quantity` of every unstable number, in order."""
    found: list[str] = []
    for model in result.models:
        for label, rounds in rounds_of(model):
            if not rounds.stable:
                found.append(f"{model.model} {label}")
    return found


def rounds_of(model: ModelResult) -> list[tuple[str, Rounds]]:
    """Every quantity of a model that was measured in rounds, with its label."""
    found: list[tuple[str, Rounds]] = []
    for run in model.runs:
        where = f"{run.mode} on {run.device}"
        if run.training:
            found.append((f"{where}, training", run.training.images_per_s))
        if run.latency:
            found.append((f"{where}, latency p50", run.latency.p50_rounds))
        found += [(f"{where}, inference batch {i.batch}", i.images_per_s) for i in run.inference if i.images_per_s]
    for cpu in model.cpu.runs if model.cpu else ():
        if cpu.images_per_s:
            found.append((f"cpu {cpu.runtime} {cpu.kind}", cpu.images_per_s))
    return found
