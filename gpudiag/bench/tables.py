"""A result as tables of text, shared by the terminal and the HTML report, so that both say the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpudiag.bench.result import (
    BenchResult,
    CpuRun,
    InferenceThroughput,
    Latency,
    Memory,
    ModelResult,
    ModeResult,
    Percentile,
    Rounds,
    Sweep,
    measured_gpu,
    rounds_of,
)
from gpudiag.units import format_bytes, format_ns, format_percent

NOTHING = "–"
UNSTABLE = "!"


@dataclass(frozen=True)
class Table:
    """columns[0] is a label, the others are right-aligned. note: what the reader must know to use the numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables_of(result: BenchResult) -> list[Table]:
    """Every table that has rows, in reading order."""
    made = [
        _modes(result),
        _compiled(result),
        _power(result),
        _cpu(result),
        _speedups(result),
        _flops(result),
        _roofline(result),
        *_sweeps(result),
    ]
    return [table for table in made if table.rows]


def headline(result: BenchResult) -> str:
    machine = result.machine
    gpu = measured_gpu(result)
    device = gpu.name if gpu else result.device
    where = f"{machine.cpu}, {machine.cores_usable} usable core(s)" if result.device == "cpu" else device
    quick = "quick: not for comparison. " if result.quick else ""
    return f"{quick}{len(result.models)} model(s) on {where}, torch {machine.torch}, in {result.wall_s:.0f} s"


def rules_text(result: BenchResult) -> str:
    """The measuring rules in one sentence."""
    r = result.rules
    return (
        f"{r.rounds} rounds with {r.pause_s:g} s between, warm-up before each: {r.warm_up}; iterations a round: {r.train_iterations} of "
        f"training (batch {r.batch}, {r.optimizer}, data {r.data}), {r.latency_iterations} for latency (batch 1), {r.inference_iterations} of "
        f"inference (batch {', '.join(map(str, r.inference_batches))}); median of the rounds, unstable above {format_percent(r.unstable_over)} spread; "
        f"seed {r.seed}"
    )


def rate(value: float) -> str:
    """Images per second: three digits are what a benchmark can hold."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rounds_text(rounds: Rounds | None) -> str:
    """`median ±half the spread`, with `!` where unstable."""
    if rounds is None:
        return NOTHING
    mark = "" if rounds.stable else f" {UNSTABLE}"
    spread = f" ±{format_percent(rounds.spread / 2)}" if len(rounds.values) > 1 else ""
    return f"{rate(rounds.median)}{spread}{mark}"


def percentile_text(value: Percentile) -> str:
    """A percentile that the sample cannot hold is marked with ~."""
    return format_ns(value.ns) if value.enough else f"~{format_ns(value.ns)}"


def memory_text(memory: Memory | None) -> str:
    if memory is None:
        return NOTHING
    if memory.allocated is not None:
        reserved = f" ({format_bytes(memory.reserved)} reserved)" if memory.reserved is not None else ""
        return format_bytes(memory.allocated) + reserved
    return f"{format_bytes(memory.resident)} RSS" if memory.resident is not None else NOTHING


def best_inference(run: ModeResult) -> InferenceThroughput | None:
    measured = [i for i in run.inference if i.images_per_s is not None]
    return max(measured, key=lambda i: i.images_per_s.median if i.images_per_s else 0.0, default=None)


def _modes(result: BenchResult) -> Table:
    rows = []
    for model in result.models:
        for run in model.runs:
            best = best_inference(run)
            rows.append(
                (
                    model.model,
                    f"{run.mode} {run.dtype}",
                    rounds_text(run.training.images_per_s) if run.training else _why(run, "training"),
                    _p50(run.latency) if run.latency else _why(run, "latency"),
                    percentile_text(run.latency.p99) if run.latency else NOTHING,
                    f"{rounds_text(best.images_per_s)} at {best.batch}" if best else _why(run, "inference"),
                    memory_text(run.training_memory),
                )
            )
        rows += [(model.model, mode, f"failed: {why}", "", "", "", "") for mode, why in model.failed.items()]
    samples = {
        run.latency.samples for m in result.models for run in m.runs if run.latency and not run.latency.p99.enough
    }
    note = f"{UNSTABLE} unstable. "
    if any(run.training_memory and run.training_memory.resident for m in result.models for run in m.runs):
        note += "RSS: the whole process, Python and torch included. "
    if samples:
        needed = next(r.latency.p99.samples_needed for m in result.models for r in m.runs if r.latency)
        note += f"~ too few samples for a p99 ({min(samples)}; {needed} needed). "
    return Table(
        f"Training (batch {result.rules.batch}, end to end) and inference",
        ("model", "mode", "train img/s", "latency p50", "p99", "infer img/s", "peak memory, training"),
        tuple(rows),
        note
        + f"Images per second with half the spread of {result.rules.rounds} rounds. Weights are random: no accuracy is claimed.",
    )


def _p50(latency: Latency) -> str:
    return percentile_text(latency.p50) + ("" if latency.p50_rounds.stable else f" {UNSTABLE}")


def _why(run: ModeResult, part: str) -> str:
    for name in (part, "outputs"):
        if name in run.failed:
            return run.failed[name][:60]
    return NOTHING


def _compiled(result: BenchResult) -> Table:
    rows = []
    for model in result.models:
        for run in model.runs:
            if run.mode == "eager":
                continue
            check = run.agreement
            error = NOTHING if check is None else ("not finite" if check.error is None else f"{check.error:.1e}")
            verdict = NOTHING if check is None else ("agrees" if check.agrees else "DOES NOT AGREE")
            training = run.training
            rows.append(
                (
                    model.model,
                    run.mode,
                    f"{run.compile_inference_s:.1f} s" if run.compile_inference_s is not None else NOTHING,
                    f"{run.compile_training_s:.1f} s" if run.compile_training_s is not None else NOTHING,
                    error,
                    f"{check.tolerance:.0e}" if check else NOTHING,
                    verdict,
                    f"{training.losses_not_finite} ({training.steps_skipped} skipped)" if training else NOTHING,
                )
            )
    return Table(
        "Modes against eager fp32",
        (
            "model",
            "mode",
            "compile, inference",
            "compile, training",
            "output error",
            "tolerance",
            "verdict",
            "losses not finite",
        ),
        tuple(rows),
        "Error: largest difference over the largest value, same weights and input. Compile time is not in the rates above.",
    )


def _power(result: BenchResult) -> Table:
    rows = [
        (
            model.model,
            run.mode,
            f"{run.power.mean_watts:.0f} W",
            f"{run.power.max_watts:.0f} W",
            f"{run.power.mean_celsius:.0f} C" if run.power.mean_celsius is not None else NOTHING,
            f"{run.power.joules_per_image:.3g} J" if run.power.joules_per_image is not None else NOTHING,
            run.power.energy_source,
        )
        for model in result.models
        for run in model.runs
        if run.power is not None
    ]
    columns = ("model", "mode", "mean power", "most", "temperature", "energy per image", "from")
    return Table("Power while training, steady part", columns, tuple(rows))


def _cpu(result: BenchResult) -> Table:
    rows = []
    for model in result.models:
        if model.cpu is None:
            continue
        runs = {(run.runtime, run.kind): run for run in model.cpu.runs}
        check = model.cpu.onnx
        agrees = NOTHING if check is None else ("agrees" if check.agrees else "DOES NOT AGREE")
        rows.append(
            (
                model.model,
                *(_cpu_rate(runs.get(("torch", kind))) for kind in ("one thread", "all threads", "instances")),
                *(_cpu_rate(runs.get(("onnxruntime", kind))) for kind in ("one thread", "all threads")),
                agrees,
            )
        )
    threads = next((model.cpu.cores_usable for model in result.models if model.cpu), 0)
    missing = {why: None for model in result.models if model.cpu for why in model.cpu.not_measured.values()}
    return Table(
        f"CPU baseline: inference at batch {result.rules.batch}, images/s",
        (
            "model",
            "torch, 1 thread",
            f"torch, {threads} threads",
            f"{threads} pinned instances",
            "ONNX Runtime, 1",
            f"ONNX Runtime, {threads}",
            "ONNX output",
        ),
        tuple(rows),
        "; ".join(missing),
    )


def _cpu_rate(run: CpuRun | None) -> str:
    return rounds_text(run.images_per_s) if run else NOTHING


def _speedups(result: BenchResult) -> Table:
    rows = [
        (
            model.model,
            s.mode,
            s.against,
            f"{s.factor:.1f}x",
            rate(s.gpu_images_per_s),
            f"{rate(s.cpu_images_per_s)} ({s.cpu_run})",
        )
        for model in result.models
        for s in model.speedups
    ]
    return Table(
        f"Speed-up of the GPU, inference at batch {result.rules.batch}",
        ("model", "mode", "against", "factor", "GPU img/s", "CPU img/s"),
        tuple(rows),
        "Against one core: what the parallel hardware gives the algorithm. Against all cores: what choosing the GPU gives.",
    )


def _flops(result: BenchResult) -> Table:
    rows = [
        (
            model.model,
            f"{model.parameters / 1e6:.1f} M",
            f"{f.macs_forward / 1e9:.2f} G",
            f"{f.flops_forward / 1e9:.2f} G",
            f"{f.flops_training / 1e9:.1f} G" if f.flops_training else NOTHING,
            format_bytes(f.bytes_ops),
            format_bytes(f.bytes_least),
            f"{f.intensity_ops:.1f}",
        )
        for model in result.models
        if (f := model.flops) is not None
    ]
    return Table(
        "Work per image",
        ("model", "parameters", "MAC", "FLOP", "FLOP, training", "bytes, each op", "bytes, least", "FLOP/byte"),
        tuple(rows),
        "1 multiply-add (MAC) = 2 FLOP. Bytes: every operation reading and writing memory; least: weights, input and output once.",
    )


def _roofline(result: BenchResult) -> Table:
    rows = []
    notes: dict[str, None] = {}
    for model in result.models:
        for roof in model.rooflines:
            rows.append(
                (
                    model.model,
                    roof.dtype,
                    f"{roof.achieved_gflops:,.0f}",
                    f"{roof.peak_gflops:,.0f}" if roof.peak_gflops else "unknown",
                    format_percent(roof.peak_share) if roof.peak_share is not None else NOTHING,
                    f"{roof.ridge:.1f}" if roof.ridge else NOTHING,
                    roof.bound,
                    format_percent(roof.memory_share) if roof.memory_share is not None else NOTHING,
                )
            )
            notes[f"Peak: {roof.peak_source}; bandwidth: {roof.bandwidth_source}"] = None
    return Table(
        f"Roofline, inference at batch {result.rules.batch}",
        (
            "model",
            "dtype",
            "achieved GFLOP/s",
            "dense peak",
            "share",
            "ridge FLOP/byte",
            "bound by",
            "ideal time in memory",
        ),
        tuple(rows),
        ". ".join(notes),
    )


def _sweeps(result: BenchResult) -> list[Table]:
    made = []
    for model in result.models:
        for sweep in model.sweeps:
            loose = unstable_batches(sweep, result.rules.unstable_over)

            def mark(batch: int | None, loose: frozenset[int] = loose) -> str:
                return f" {UNSTABLE}" if batch in loose else ""

            rows = [
                (
                    f"{p.batch}" + (" (odd)" if p.odd_of else ""),
                    "out of memory" if p.out_of_memory else rate(p.images_per_s or 0.0),
                    f"{format_percent(p.spread)}{mark(p.batch)}" if p.spread is not None else NOTHING,
                    format_bytes(p.memory_bytes) if p.memory_bytes is not None else NOTHING,
                    f"{sweep.odd_penalties[str(p.batch)]:.2f}x of batch {p.odd_of}{mark(p.batch) or mark(p.odd_of)}"
                    if str(p.batch) in sweep.odd_penalties
                    else "",
                )
                for p in sweep.points
            ]
            knee = (
                f"Knee: batch {sweep.knee} is the smallest with 90 % of the best rate (batch {sweep.best_batch})."
                if sweep.knee
                else ""
            )
            if loose:
                limit = format_percent(result.rules.unstable_over)
                knee += f" {UNSTABLE} unstable: the spread of {len(loose)} of {len(rows)} batches is over {limit}, so knee and odd sizes are uncertain."
            made.append(
                Table(
                    f"{model.model}: batch sweep, {sweep.what}, {sweep.mode} on {sweep.device}",
                    ("batch", "images/s", "spread", "peak memory", "odd size"),
                    tuple(rows),
                    " ".join(text for text in (knee, sweep.stopped) if text),
                )
            )
    return made


def unstable_batches(sweep: Sweep, limit: float) -> frozenset[int]:
    return frozenset(p.batch for p in sweep.points if p.spread is not None and p.spread > limit)


def unstable_lines(result: BenchResult) -> list[str]:
    """One line for each unstable number: what, how far apart, and the likely reason."""
    lines = []
    for model in result.models:
        for label, rounds in rounds_of(model):
            if not rounds.stable:
                why = "; ".join(rounds.reasons)
                lines.append(f"{model.model}, {label}: spread {format_percent(rounds.spread)} ({why})")
    return lines


def loss_lines(models: Sequence[ModelResult]) -> list[str]:
    return [
        f"{model.model}, {run.mode} {run.dtype}: {run.training.losses_not_finite} of {run.training.losses} losses are not finite"
        for model in models
        for run in model.runs
        if run.training and run.training.losses_not_finite
    ]
