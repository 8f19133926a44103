"""The history for other programs: nested JSON, or one CSV row a run."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from gpudiag.report.tables import _cell

Row = dict[str, Any]


def as_json(value: Any) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def nested(row: Row, parts: dict[str, list[Row]]) -> Row:
    def without_run(rows: list[Row]) -> list[Row]:
        return [{key: value for key, value in item.items() if key != "run_id"} for item in rows]

    return {
        **row,
        "metrics": {item.pop("name"): item for item in without_run(parts["metrics"])},
        "findings": without_run(parts["findings"]),
        "environment": {item["name"]: item["value"] for item in parts["environment"]},
    }


def as_csv(rows: list[Row], parts: list[dict[str, list[Row]]]) -> bytes:
    """No cell is a formula or holds what a terminal obeys."""
    values = [{item["name"]: item["value"] for item in part["metrics"] if item["value"] is not None} for part in parts]
    names = sorted({name for row in values for name in row})
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = list(rows[0]) if rows else ["id"]
    writer.writerow([_cell(name) for name in (*heads, *names)])
    for row, measured in zip(rows, values, strict=True):
        cells = [row[head] for head in heads] + [measured.get(name) for name in names]
        writer.writerow([_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return out.getvalue().encode()
