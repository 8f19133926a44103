"""One document for a pre-deployment meeting: what the script does a second, what limits it, what the next three fixes bring, and
which GPU is enough. It joins a diagnosis, a benchmark and a dry run; nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gpudiag.bench.fit import RESERVE_GB, Fit, largest_batch, usable_bytes
from gpudiag.bench.gpu_table import GpuSpec
from gpudiag.bench.health import findings
from gpudiag.bench.rank import ASSUMED_SHARE, Price, index_of, peak_of
from gpudiag.bench.result import BenchResult, FlopCount, ModelResult
from gpudiag.bench.tables import NOTHING, Table, rate, rounds_text
from gpudiag.diagnosis import Diagnosis, Finding, MetricValue
from gpudiag.units import format_bytes, format_ns, format_percent

SCHEMA = "gpudiag.review/1"
FIXES = 3
ROWS = 12


class Review(msgspec.Struct, frozen=True):
    """The parts that it was made from, whole, so that each report can be drawn again. need: images/s asked for, or None."""

    schema: str
    script: tuple[str, ...]
    diagnosis: Diagnosis
    bench: BenchResult
    fits: tuple[Fit, ...]
    batch: int
    need: float | None
    prices: dict[str, float] = {}


def tables_of(review: Review, specs: Sequence[GpuSpec]) -> list[Table]:
    return [what_it_does(review), what_limits_it(review), next_fixes(review), which_gpu(review, specs)]


def what_it_does(review: Review) -> Table:
    """The script's own steps, and the model alone as the benchmark ran it: the gap between them is what the script loses."""
    steps = review.diagnosis.steps
    rows = []
    if steps.median_ns:
        rows.append(
            (
                "the script",
                f"{1e9 / steps.median_ns:.2f} steps/s",
                f"median {format_ns(steps.median_ns)}, p99 {format_ns(steps.p99_ns or 0)}",
            )
        )
    else:
        rows.append(("the script", NOTHING, "no steps were found in the recording"))
    model = _model(review)
    for run in model.runs if model else ():
        if run.training:
            rows.append(
                (
                    f"{model.model}, {run.mode}, training" if model else "",
                    f"{rounds_text(run.training.images_per_s)} images/s",
                    f"batch {run.training.batch}, {run.training.data}",
                )
            )
        if run.latency:
            rows.append(
                (
                    f"{run.mode}, one input",
                    f"{format_ns(run.latency.p50.ns)}",
                    f"p99 {format_ns(run.latency.p99.ns)} of {run.latency.samples} samples",
                )
            )
    for cpu in model.cpu.runs if model and model.cpu else ():
        rows.append(
            (
                f"CPU, {cpu.runtime}, {cpu.kind}",
                f"{rounds_text(cpu.images_per_s)} images/s",
                f"inference, batch {cpu.batch}",
            )
        )
    for up in model.speedups if model else ():
        rows.append((f"GPU against {up.against}", f"{up.factor:.1f}x", f"{up.mode}, batch {up.batch}"))
    note = "The benchmark was quick: its figures are a first look." if review.bench.quick else "! unstable."
    if not (model and model.speedups):
        note += " No GPU was measured: there is no speed-up to show."
    return Table("What it does a second", ("", "rate", "how"), tuple(rows), note)


def what_limits_it(review: Review) -> Table:
    d = review.diagnosis
    rows = [("verdict", f"{d.verdict.status.replace('_', ' ')}, bound by {d.verdict.bound_by}")]
    for account in d.accounts[:1]:
        largest = sorted(account.parts.items(), key=lambda item: (-item[1], item[0]))[:4]
        rows += [
            (name, f"{format_percent(ns / account.total_ns)} of the time")
            for name, ns in largest
            if ns and account.total_ns
        ]
    model = _model(review)
    for roof in model.rooflines if model else ():
        share = format_percent(roof.peak_share) if roof.peak_share is not None else "an unknown share"
        rows.append((f"the model, {roof.dtype}", f"{roof.bound}-bound; {share} of the peak of {roof.device}"))
    rows += [(f"health, {where}", f"{finding.title}: {finding.summary}") for where, finding in findings(review.bench)]
    return Table("What limits it", ("", ""), tuple(rows), d.verdict.headline)


def next_fixes(review: Review) -> Table:
    """The findings that stand for themselves, largest bound first as the diagnosis orders them."""
    step = review.diagnosis.metrics.get(
        "step_time", MetricValue()
    ).value  # the mean of the window, which bounds refer to
    rows = []
    for number, finding in enumerate(fixes_of(review.diagnosis), 1):
        estimate = format_ns(finding.estimate_ns) if finding.estimate_ns is not None else NOTHING
        faster = ""
        if step and finding.estimate_ns and finding.estimate_ns < step:
            faster = f"{step / (step - finding.estimate_ns):.2f}x"
        rows.append(
            (
                f"{number}. {finding.title}",
                f"at most {format_ns(finding.bound_ns)}",
                estimate,
                faster,
                finding.fixes[0].change,
            )
        )
    note = "Bound: all that this cause costs a step. Expected: replayed, where it can be. Fix one, profile again: they overlap."
    if not rows:
        rows = [("nothing to fix was found", "", "", "", "")]
    return Table(
        f"What the next {FIXES} fixes bring", ("fix", "bound", "expected", "step then", "change"), tuple(rows), note
    )


def fixes_of(diagnosis: Diagnosis) -> list[Finding]:
    return [f for f in diagnosis.findings if f.fixes and not f.caused_by and f.bound_ns > 0][:FIXES]


def which_gpu(review: Review, specs: Sequence[GpuSpec]) -> Table:
    """GPUs whose memory trains the batch, smallest memory first; rates are estimates from the dense peak and say so."""
    training = next(fit for fit in review.fits if fit.what == "training")
    model = _model(review)
    enough = []
    for spec in specs:
        if spec.memory is None or largest_batch(training, usable_bytes(spec.memory)) < review.batch:
            continue
        dtype = next((name for name in ("bf16", "fp16", "fp32") if peak_of(spec, name)), None)
        peak = peak_of(spec, dtype) if dtype else None
        images = estimated_rate(model.flops if model else None, peak, spec.bandwidth)
        if review.need is not None and (images is None or images < review.need):
            continue
        enough.append((spec, dtype, peak, images))
    priced = review.prices
    enough.sort(key=lambda item: (item[0].name not in priced, item[0].memory or 0, item[3] or 0, item[0].name))
    rows = [
        (
            spec.name,
            f"{spec.memory:g}",
            f"{largest_batch(training, usable_bytes(spec.memory or 0)):,}",
            f"~{rate(images)} ({dtype})" if images is not None else NOTHING,
            _index(spec, peak, review.prices),
        )
        for spec, dtype, peak, images in enough[:ROWS]
    ]
    need = f" and an estimated {review.need:g} images/s" if review.need is not None else ""
    note = (
        f"Enough for training at batch {review.batch}{need}: {len(enough)} of {len(specs)} GPUs, those with a price and then "
        "the smallest memory first. Peak there: "
        f"{format_bytes(training.peak_at(review.batch))} and {RESERVE_GB:g} GB reserve. Rates are estimates at "
        f"{format_percent(ASSUMED_SHARE)} of the dense peak or of the bandwidth, whichever is slower, without loading; index needs prices."
    )
    if not rows:
        rows = [("none of the table", "", "", "", "")]
    return Table("Which GPU is enough", ("GPU", "GB", "largest batch", "training images/s", "index"), tuple(rows), note)


def estimated_rate(count: FlopCount | None, peak_gflops: float | None, bandwidth_gbs: float | None) -> float | None:
    """Training images/s at the assumed share of the roof. The step moves three times the forward's bytes (as its FLOPs: backward
    does both gradients); None when a figure is missing."""
    if count is None or not count.flops_training or not peak_gflops or not bandwidth_gbs:
        return None
    compute = count.flops_training / (peak_gflops * 1e9)
    memory = 3 * count.bytes_ops / (bandwidth_gbs * 1e9)
    return ASSUMED_SHARE / max(compute, memory)


def _index(spec: GpuSpec, peak: float | None, prices: Mapping[str, float]) -> str:
    if spec.name not in prices or peak is None or spec.tdp is None:
        return NOTHING
    return f"{index_of(peak * ASSUMED_SHARE, 1.0, prices[spec.name], spec.tdp, 0.0):,.1f}"


def _model(review: Review) -> ModelResult | None:
    return review.bench.models[0] if review.bench.models else None


def price_amounts(prices: Mapping[str, Price]) -> dict[str, float]:
    return {name: price.amount for name, price in prices.items()}
