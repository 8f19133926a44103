"""A benchmark, or several side by side, as one self-contained page: no script, no request, no web font."""

from __future__ import annotations

from collections.abc import Sequence

import jinja2

from gpudiag.bench.check import checklist
from gpudiag.bench.compare import Row
from gpudiag.bench.health import findings
from gpudiag.bench.result import BenchResult
from gpudiag.bench.tables import (
    Table,
    headline,
    loss_lines,
    rate,
    rules_text,
    tables_of,
    unstable_batches,
    unstable_lines,
)
from gpudiag.bench.terminal import reasons_of
from gpudiag.diagnosis import Finding
from gpudiag.report.text import clean

BAR = 360  # px of the longest bar
CHART = (560, 220)


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gpudiag.bench", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clean"] = clean
    return environment


def render(result: BenchResult) -> str:
    return (
        _environment()
        .get_template("bench.html")
        .render(
            title="Benchmark",
            headline=headline(result),
            rules=rules_text(result),
            started=result.started,
            version=result.gpudiag,
            quick=result.quick,
            tables=tables_of(result),
            charts=[*sweep_charts(result)],
            bars=throughput_bars(result),
            lists=[
                ("Losses that are not finite", loss_lines(result.models)),
                ("Unstable: refused by comparisons", unstable_lines(result)),
                (
                    "Health of the machine meanwhile",
                    [f"{where}: {finding.title}. {finding.summary}" for where, finding in findings(result)],
                ),
                ("Not measured", [f"{key}: {why}" for key, why in reasons_of(result)]),
                ("Notes", list(result.warnings)),
            ],
            checks=checklist(result),
        )
    )


def render_comparison(
    rows: Sequence[Row], table: Table, names: Sequence[str], found: Sequence[Finding], version: str
) -> str:
    return (
        _environment()
        .get_template("bench.html")
        .render(
            title="Benchmarks side by side",
            headline=f"{len(names)} results: {', '.join(names)}",
            rules="",
            started="",
            version=version,
            quick=False,
            tables=[table],
            charts=[],
            bars=comparison_bars(rows, names),
            lists=[("The machines", [f"{finding.title}. {finding.summary}" for finding in found])],
            checks=[],
        )
    )


def render_tables(title: str, headline_: str, tables: Sequence[Table]) -> str:
    """Any tables as a page of the same look."""
    from gpudiag import __version__

    return (
        _environment()
        .get_template("bench.html")
        .render(
            title=title,
            headline=headline_,
            rules="",
            started="",
            version=__version__,
            quick=False,
            tables=tables,
            charts=[],
            bars=[],
            lists=[],
            checks=[],
        )
    )


def _bars(title: str, values: Sequence[tuple[str, float, str]], unit: str) -> dict[str, object]:
    """values: (label, value, what must be said beside it or "")."""
    longest = max((value for _, value, _ in values), default=0.0) or 1.0
    return {
        "title": title,
        "bars": [
            {"label": label, "width": round(BAR * value / longest, 1), "text": f"{rate(value)} {unit}{note}"}
            for label, value, note in values
        ],
    }


def throughput_bars(result: BenchResult) -> list[dict[str, object]]:
    values = [
        (
            f"{model.model}, {run.mode}",
            run.training.images_per_s.median,
            "" if run.training.images_per_s.stable else ", unstable",
        )
        for model in result.models
        for run in model.runs
        if run.training
    ]
    return [_bars("Training throughput", values, "images/s")] if values else []


def comparison_bars(rows: Sequence[Row], names: Sequence[str]) -> list[dict[str, object]]:
    """One group a throughput, a bar a result."""
    groups = []
    for row in rows:
        if row.unit == "images/s":
            values = [(name, value, "") for name, value in zip(names, row.values, strict=True) if value is not None]
            groups.append(_bars(f"{row.model}, {row.quantity}", values, row.unit))
    return groups


def sweep_charts(result: BenchResult) -> list[dict[str, object]]:
    """Rate over batch (log2 axis) with the knee marked; odd sizes as hollow points off the line."""
    import math

    charts = []
    width, height = CHART
    for model in result.models:
        for sweep in model.sweeps:
            points = [
                (p.batch, p.images_per_s, p.odd_of is not None) for p in sweep.points if p.images_per_s is not None
            ]
            if len(points) < 2:
                continue
            most = max(value for _, value, _ in points)
            uncertain = ", uncertain" if unstable_batches(sweep, result.rules.unstable_over) else ""
            last = math.log2(max(2, points[-1][0]))
            placed = [
                {
                    "x": round(40 + (width - 60) * math.log2(batch) / last, 1),
                    "y": round(height - 24 - (height - 44) * value / most, 1),
                    "odd": odd,
                    "knee": batch == sweep.knee,
                    "batch": batch,
                    "text": f"batch {batch}: {rate(value)} images/s",
                }
                for batch, value, odd in points
            ]
            line = " ".join(f"{p['x']},{p['y']}" for p in placed if not p["odd"])
            charts.append(
                {
                    "title": f"{model.model}: {sweep.what} over batch, {sweep.mode} on {sweep.device}",
                    "width": width,
                    "height": height,
                    "line": line,
                    "points": placed,
                    "note": f"knee at batch {sweep.knee}{uncertain}" if sweep.knee else "",
                }
            )
    return charts
