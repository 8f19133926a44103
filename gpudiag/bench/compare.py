"""Several results side by side. Like is compared with like: a quick or unstable result, or other measuring rules, are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gpudiag.bench.result import BenchResult, ModelResult, unstable_parts
from gpudiag.bench.tables import NOTHING, Table, rate
from gpudiag.errors import GpudiagError
from gpudiag.units import format_bytes, format_ns, format_percent

# What may differ between machines without making the numbers different things.
FREE_RULES = {"threads", "seed", "pause_s", "instance_s", "roofline_s", "workers", "folder"}


@dataclass(frozen=True)
class Row:
    """One quantity of one model. values: one a result, None where it was not measured. better: higher or lower."""

    model: str
    quantity: str
    unit: str
    values: tuple[float | None, ...]
    better: str


def objections(results: Sequence[BenchResult], names: Sequence[str]) -> list[str]:
    """Why these results must not be compared; empty when they may."""
    found: list[str] = []
    for name, result in zip(names, results, strict=True):
        if result.quick:
            found.append(f"{name} is a quick run")
        unstable = unstable_parts(result)
        if unstable:
            found.append(f"{name} has {len(unstable)} unstable number(s), first: {unstable[0]}")
        not_finite = [
            m.model for m in result.models for run in m.runs if run.training and run.training.losses_not_finite
        ]
        if not_finite:
            found.append(f"{name} has losses that are not finite ({not_finite[0]})")
    first = msgspec.structs.asdict(results[0].rules)
    for name, result in zip(names[1:], results[1:], strict=True):
        other = msgspec.structs.asdict(result.rules)
        differing = [key for key, value in first.items() if key not in FREE_RULES and other[key] != value]
        if differing:
            listed = ", ".join(f"{key} {first[key]} and {other[key]}" for key in differing)
            found.append(f"{name} was measured by other rules than {names[0]}: {listed}")
    return found


def compare(results: Sequence[BenchResult], names: Sequence[str], anyway: bool = False) -> list[Row]:
    """Raises GpudiagError when there is an objection and `anyway` is not set, or when no model is in two of them."""
    against = objections(results, names)
    if against and not anyway:
        raise GpudiagError(
            "; ".join(against), "measure again with `gpudiag bench`, or see the table all the same with --anyway"
        )
    by_key: dict[tuple[str, str, str, str], list[float | None]] = {}
    for index, result in enumerate(results):
        for model in result.models:
            for quantity, unit, value, better in quantities(model):
                by_key.setdefault((model.model, quantity, unit, better), [None] * len(results))[index] = value
    rows = [
        Row(model, quantity, unit, tuple(values), better) for (model, quantity, unit, better), values in by_key.items()
    ]
    if not any(sum(value is not None for value in row.values) > 1 for row in rows):
        raise GpudiagError(
            "these results have no model and mode in common", "run the same models and modes on each machine"
        )
    return rows


def quantities(model: ModelResult) -> list[tuple[str, str, float, str]]:
    """(quantity, unit, value, better) in reading order."""
    found: list[tuple[str, str, float, str]] = []
    for run in model.runs:
        if run.training:
            found.append((f"{run.mode}: training", "images/s", run.training.images_per_s.median, "higher"))
        if run.latency:
            found.append((f"{run.mode}: latency p50", "ns", float(run.latency.p50.ns), "lower"))
            if run.latency.p99.enough:
                found.append((f"{run.mode}: latency p99", "ns", float(run.latency.p99.ns), "lower"))
        for rates in run.inference:
            if rates.images_per_s is not None:
                found.append(
                    (f"{run.mode}: inference, batch {rates.batch}", "images/s", rates.images_per_s.median, "higher")
                )
        memory = run.training_memory
        if memory is not None and (memory.allocated or memory.resident):
            kind = "allocated" if memory.allocated is not None else "resident"
            found.append(
                (f"{run.mode}: peak memory, {kind}", "bytes", float(memory.allocated or memory.resident or 0), "lower")
            )
        if run.power is not None and run.power.joules_per_image is not None:
            found.append((f"{run.mode}: energy per image", "J", run.power.joules_per_image, "lower"))
    for roof in model.rooflines:
        if roof.peak_share is not None:
            found.append((f"share of the {roof.dtype} peak", "", roof.peak_share, "higher"))
    for cpu in model.cpu.runs if model.cpu else ():
        if cpu.images_per_s is not None:
            found.append((f"CPU, {cpu.runtime}, {cpu.kind}", "images/s", cpu.images_per_s.median, "higher"))
    return found


def differences(results: Sequence[BenchResult], names: Sequence[str]) -> list[str]:
    """What differs between the machines besides the hardware, and may be the reason for a difference: software versions."""
    found = []
    for label, field in (("torch", "torch"), ("driver", "driver"), ("CUDA", "torch_cuda"), ("cuDNN", "cudnn")):
        values = [str(getattr(result.machine, field)) for result in results]
        if len(set(values)) > 1:
            found.append(
                f"{label} differs: " + ", ".join(f"{n} {v or 'none'}" for n, v in zip(names, values, strict=True))
            )
    return found


def as_table(rows: Sequence[Row], names: Sequence[str], against: Sequence[str], differing: Sequence[str] = ()) -> Table:
    """Each value with its ratio to the first result; above 1.00x is better, whichever way the quantity goes."""
    body = []
    for row in rows:
        base = row.values[0]
        cells = [_cell(row.unit, row.values[0])]
        for value in row.values[1:]:
            ratio = ""
            if value and base:
                ratio = f" ({value / base if row.better == 'higher' else base / value:.2f}x)"
            cells.append(_cell(row.unit, value) + ratio)
        body.append((row.model, row.quantity, *cells))
    note = f"In brackets: how many times better than {names[0]}."
    note += "".join(f" {text[0].upper()}{text[1:]}." for text in differing)
    if against:
        note += " NOT a fair comparison: " + "; ".join(against) + "."
    return Table("Benchmarks side by side", ("model", "quantity", *names), tuple(body), note)


def _cell(unit: str, value: float | None) -> str:
    if value is None:
        return NOTHING
    if unit == "ns":
        return format_ns(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "":
        return format_percent(value)
    return f"{rate(value)} {unit}" if unit != "J" else f"{value:.3g} J"
