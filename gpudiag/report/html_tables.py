"""The tables of the HTML report as plain rows of text: kernels, devices, ranks, loaders, metrics, environment."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpudiag.diagnosis import Diagnosis, MetricValue
from gpudiag.report.facts import about_gpu_work, device_label, grouped, merged_kernels
from gpudiag.report.text import clean, short_kernel
from gpudiag.units import format_bytes, format_ns, format_percent, format_rate

MAX_KERNELS = 40
MAX_ROWS = 256
_WORDS = {
    "num": "number of",
    "ns": "",
    "gpu": "GPU",
    "cpu": "CPU",
    "cpus": "CPUs",
    "cuda": "CUDA",
    "gpus": "GPUs",
    "shm": "/dev/shm",
}


def kernel_rows(diagnosis: Diagnosis) -> tuple[list[dict[str, Any]], str]:
    """The longest kernels, and a sentence that says what is shown."""
    devices = len({(row.rank, row.device) for row in diagnosis.kernels})
    ranked = merged_kernels(diagnosis.kernels)
    shown = ranked[:MAX_KERNELS]
    rows = [
        {
            "name": clean(row.name, 2000),
            "short": short_kernel(row.name, 70),
            "what": row.what if row.what.isalpha() else "other",
            "tensor_cores": row.tensor_cores,
            "count": row.count,
            "average_ns": row.average_ns,
            "average": format_ns(row.average_ns),
            "total_ns": row.total_ns,
            "total": format_ns(row.total_ns),
            "share_raw": row.share,
            "share": format_percent(row.share),
            "width": round(100 * min(max(row.share, 0.0), 1.0), 1),
        }
        for row in shown
    ]
    of = "the device" if devices == 1 else f"all {devices} devices together"
    lead = f"Shares are of the kernel time of {of}. Open a name to see it in full."
    if len(ranked) > len(shown):
        lead = f"The {len(shown)} longest of {len(ranked)} kernels. {lead}"
    return rows, lead


def missing_groups(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """What could not be judged, by the command that would record it: what is missing, and for which rules."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for rules, missing, record_with in grouped(diagnosis.not_judged):
        item = {
            "what": clean(missing, 600) or "not recorded",
            "rules": [clean(rule, 80) for rule in rules],
            "folded": about_gpu_work(rules, missing),
        }
        groups.setdefault(clean(record_with, 600), []).append(item)
    return [
        {"record_with": how, "is_command": how.startswith("gpudiag "), "missing": items}
        for how, items in groups.items()
    ]


def run_tables(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Tables as {id, title, lead, head, numeric, rows}; those without rows are left out."""
    many_ranks = len({device.rank for device in diagnosis.devices}) > 1
    columns = ["Device", "Model", "Span", "Busy", "Compute", "Collectives", "exposed", "Copies", "exposed ", "Kernels"]
    devices = [
        [
            device_label(d.rank, d.device, many_ranks),
            clean(d.name, 60) or "–",
            format_ns(d.span_ns),
            f"{format_ns(d.busy_ns)} ({format_percent(d.busy_ns / d.span_ns)})" if d.span_ns else "–",
            format_ns(d.compute_union_ns),
            format_ns(d.comm_union_ns),
            format_ns(d.comm_exposed_ns),
            format_ns(d.copy_union_ns),
            format_ns(d.copy_exposed_ns),
            f"{d.kernels:,}",
        ]
        for d in diagnosis.devices[:MAX_ROWS]
    ]
    about = "Over the whole file, from the first GPU operation to the last."
    if any(account.scope == "steps" for account in diagnosis.accounts):
        about += " The account above is over the steady steps."
    tables = [
        _table("devices", "Devices", about, columns, devices, set(columns[2:])),
        _dicts("ranks", "Ranks", "One row a rank of the job.", [_named(row) for row in diagnosis.ranks]),
        _dicts("loaders", "Data loaders", "How each DataLoader was built.", [_built(row) for row in diagnosis.loaders]),
        _dicts("transforms", "Transforms", "Over the whole run, in all workers together.", _transforms(diagnosis)),
    ]
    return [table for table in tables if table["rows"]]


def _built(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without what has a table of its own, and without columns that say that nothing happened."""
    return {key: value for key, value in row.items() if key != "transforms" and value != ""}


def _transforms(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    rows = []
    for loader in diagnosis.loaders:
        timed = loader.get("transforms") or ()
        total = max(1, sum(length for _, _, length in timed))
        for name, calls, length in timed:
            shown = {
                "loader": loader.get("where"),
                "transform": clean(str(name), 80),
                "calls": calls,
                "total_ns": length,
            }
            rows.append({**shown, "a_call_ns": length / max(1, calls), "share": length / total})
    return rows


def _named(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A rank without GPU work has no device number."""
    return {**row, "device": "CPU"} if row.get("device") == -1 else row


def metric_rows(diagnosis: Diagnosis) -> list[dict[str, str]]:
    return [
        {
            "name": clean(name, 80),
            "value": _metric(metric),
            "missing": clean(metric.missing, 400),
            "record_with": clean(metric.record_with, 400),
        }
        for name, metric in diagnosis.metrics.items()
    ]


def environment_rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """The environment flattened: `gpus.0.name` becomes one row a leaf."""
    rows = [
        ("Recording", diagnosis.source.path),
        ("Format", diagnosis.source.kind),
        ("Recorder", diagnosis.source.recorder),
    ]
    rows += _leaves("", diagnosis.environment)
    return [(clean(name, 80), clean(value, 400)) for name, value in rows[:MAX_ROWS] if value]


def _leaves(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [leaf for key, inner in value.items() for leaf in _leaves(f"{prefix} {_words(str(key))}".strip(), inner)]
    return [(prefix, _value("", value))]


def _metric(metric: MetricValue) -> str:
    if metric.missing or metric.value is None:
        return "missing"
    value = metric.value
    by_unit: dict[str, Callable[[float], str]] = {
        "ns": format_ns,
        "bytes": format_bytes,
        "B": format_bytes,
        "bytes/s": format_rate,
        "B/s": format_rate,
        "ratio": lambda v: f"{v:.3g}" if abs(v) > 1 else format_percent(v),
        "fraction": format_percent,
        "flag": lambda v: "yes" if v else "no",
    }
    if metric.unit in by_unit:
        return by_unit[metric.unit](value)
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return text if metric.unit == "count" else f"{text} {clean(metric.unit, 20)}".strip()


def _table(
    name: str, title: str, lead: str, head: list[str], rows: Sequence[Sequence[str]], numeric: set[str]
) -> dict[str, Any]:
    return {"id": name, "title": title, "lead": lead, "head": head, "rows": rows, "numeric": numeric}


def _dicts(name: str, title: str, lead: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table of records: one column a key, in the order of first mention."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    rows = [[_value(key, record.get(key)) for key in keys] for record in records[:MAX_ROWS]]
    numeric = {
        _words(key)
        for key in keys[1:]
        if all(isinstance(r.get(key), int | float | None) and not isinstance(r.get(key), bool) for r in records)
    }
    return _table(name, title, lead, [_words(key) for key in keys], rows, numeric)


def _words(key: str) -> str:
    """`num_workers` as `number of workers`, `wait_ns` as `wait`."""
    words = " ".join(filter(None, (_WORDS.get(word, word) for word in clean(key, 60).split("_"))))
    return words[:1].upper() + words[1:]


def _value(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if key.endswith("_ns"):
            return format_ns(value)
        if key.endswith("_bytes"):
            return format_bytes(value)
        if key.endswith(("share", "busy")):
            return format_percent(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    if isinstance(value, str):
        return clean(value, 400)
    if isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(clean(str(item), 200) for item in value)
    return clean(json.dumps(value, default=str), 400)
