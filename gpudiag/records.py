"""What of a result goes into the history: flat rows for queries, and the whole document."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from gpudiag import __version__, comparison, diagnosis
from gpudiag.comparison import Comparison
from gpudiag.diagnosis import Diagnosis, spelled

Kind = Literal["profile", "analyze", "compare", "bench"]
Row = dict[str, Any]
_MADE_BY_PROFILE = re.compile(r"gpudiag-(.+)-\d{8}-\d{6}$")


@dataclass(frozen=True)
class Record:
    """run: the columns of `runs` but the id; the rows of the other tables lack `run_id`. document: JSON of `schema`."""

    run: Row
    schema: str
    document: bytes
    metrics: list[Row] = field(default_factory=list)
    findings: list[Row] = field(default_factory=list)
    environment: list[Row] = field(default_factory=list)


def of_diagnosis(result: Diagnosis, kind: Kind, name: str = "") -> Record:
    """name: what was run, by default the name of the recording without its extensions."""
    steps = result.steps
    counted = [account for account in result.accounts if account.steps]
    mean = sum(a.total_ns for a in counted) / sum(a.steps for a in counted) if counted else None
    run = _run(kind, name or stem(result.source.path), result.source.path, result.source.recorder)
    run |= {
        "status": result.verdict.status,
        "bound_by": result.verdict.bound_by,
        "headline": result.verdict.headline,
        "gpu": ", ".join(dict.fromkeys(figures.name for figures in result.devices)),
        "gpus": len(result.devices),
        "steps": steps.count,
        "step_median_ns": steps.median_ns,
        "step_p99_ns": steps.p99_ns,
        "step_mean_ns": None if mean is None else round(mean),
        "findings": len(result.findings),
    }
    return Record(
        run=spelled(run),
        schema=result.schema,
        document=diagnosis.to_json(result),
        metrics=[metric_row(name, m.value, m.unit, m.missing) for name, m in result.metrics.items()],
        findings=[
            spelled(
                {
                    "place": place,
                    "rule": finding.rule,
                    "step": finding.step,
                    "category": finding.category,
                    "severity": finding.severity,
                    "share": finding.share,
                    "bound_ns": finding.bound_ns,
                    "estimate_ns": finding.estimate_ns,
                    "title": finding.title,
                    "at": finding.where,
                    "caused_by": finding.caused_by,
                }
            )
            for place, finding in enumerate(result.findings)
        ],
        environment=[{"name": n, "value": v} for n, v in flat(spelled(result.environment)).items()],
    )


def of_comparison(result: Comparison) -> Record:
    """The run stands for the side after; its metrics are the change and its interval."""
    after, step = result.after, result.step
    name = f"{stem(result.before.paths[0])} - {stem(after.paths[0])}"
    run = _run("compare", name, after.paths[after.shown], after.recorder)
    run |= {
        "status": result.outcome,
        "bound_by": after.bound_by,
        "headline": result.headline,
        "gpu": ", ".join(dict.fromkeys(after.gpus)),
        "gpus": len(after.gpus),
        "steps": after.steps,
        "step_median_ns": after.median_ns,
        "step_p99_ns": after.p99_ns,
        "step_mean_ns": after.mean_ns,
        "findings": sum(finding.status in ("new", "unchanged") for finding in result.findings),
    }
    values = {"change": step.change, "change_low": step.low, "change_high": step.high, "mean_change": step.mean_change}
    return Record(
        run=spelled(run),
        schema=result.schema,
        document=comparison.to_json(result),
        metrics=[metric_row(n, v, "fraction", "" if v is not None else "no sample") for n, v in values.items()],
    )


def of_bench(name: str, path: str, headline: str, schema: str, document: bytes, metrics: list[Row]) -> Record:
    """A benchmark. metrics: rows of `metric_row`, one a model, mode and quantity."""
    run = _run("bench", name, path, "gpudiag bench")
    run |= {
        "status": "measured",
        "bound_by": "none",
        "headline": headline,
        "gpu": "",
        "gpus": 0,
        "steps": 0,
        "findings": 0,
    }
    return Record(run=spelled(run), schema=schema, document=document, metrics=metrics)


def metric_row(name: str, value: float | int | None, unit: str, missing: str = "") -> Row:
    """A value that is not finite is none: neither SQL nor JSON can hold it."""
    if value is not None and not math.isfinite(value):
        value, missing = None, missing or "not finite"
    row = {"name": name, "value": None if value is None else float(value), "unit": unit, "missing": missing}
    return spelled(row)  # type: ignore[no-any-return]


def stem(path: str) -> str:
    """`train` of `/tmp/train.json.gz` and of `gpudiag-train-20261130-120000`, the folder that `profile` makes."""
    name = Path(path).name or path
    for suffix in (".gz", ".json", ".sqlite", ".nsys-rep", ".qdrep", ".qdstrm", ".nvvp", ".nvprof"):
        name = name.removesuffix(suffix)
    made = _MADE_BY_PROFILE.match(name)
    return made[1] if made else name or "recording"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested facts as `gpus.0.name: A100`; what is not known is left out."""
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, (list, tuple)) and any(isinstance(item, (dict, list, tuple)) for item in value):
            value = {str(place): item for place, item in enumerate(value)}
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, (list, tuple)):
            found[f"{prefix}{key}"] = ", ".join(str(item) for item in value)
        elif value is not None:
            found[f"{prefix}{key}"] = str(value)
    return found


def _run(kind: Kind, name: str, path: str, recorder: str) -> Row:
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"created": created, "kind": kind, "name": name, "path": path, "recorder": recorder, "gpudiag": __version__}
