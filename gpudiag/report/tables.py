"""The diagnosis as tables for a spreadsheet or a notebook: kernels.csv, steps.csv, account.csv. Times are ns, shares 0-1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpudiag.diagnosis import Diagnosis
from gpudiag.report import facts
from gpudiag.report.text import clean

if TYPE_CHECKING:
    from pandas import DataFrame


def kernels(diagnosis: Diagnosis) -> DataFrame:
    """One row a kernel name and device: rank, device, name, what, count, total_ns, average_ns, share, tensor_cores."""
    from pandas import DataFrame

    rows = [
        (
            row.rank,
            row.device,
            _cell(row.name),
            _cell(row.what),
            row.count,
            row.total_ns,
            row.average_ns,
            row.share,
            row.tensor_cores,
        )
        for row in diagnosis.kernels
    ]
    names = ["rank", "device", "name", "what", "count", "total_ns", "average_ns", "share", "tensor_cores"]
    return DataFrame(rows, columns=names)


def steps(diagnosis: Diagnosis) -> DataFrame:
    """One row a steady step and device: rank, device, step (0 = the first steady one), duration_ns, then a column a part (ns).

    The parts of a row sum to its duration. Without an account the durations alone, for rank 0 and no device.
    """
    from pandas import DataFrame

    per_step = [(a, i, parts) for a in diagnosis.accounts for i, parts in enumerate(a.per_step)]
    if not per_step:
        bare = [(0, None, i, ns) for i, ns in enumerate(diagnosis.steps.durations_ns)]
        return DataFrame(bare, columns=["rank", "device", "step", "duration_ns"])
    names = [name for name, _ in facts.ordered_parts({name: 1 for _, _, parts in per_step for name in parts})]
    rows = [
        (a.rank, a.device, i, sum(parts.values()), *(parts.get(name, 0) for name in names)) for a, i, parts in per_step
    ]
    return DataFrame(rows, columns=["rank", "device", "step", "duration_ns", *map(_cell, names)])


def account(diagnosis: Diagnosis) -> DataFrame:
    """One row a part and device, zeros left out: rank, device, scope, part, ns, share. The rows of a device sum to its window."""
    from pandas import DataFrame

    rows = [
        (a.rank, a.device, a.scope, _cell(name), ns, ns / a.total_ns)
        for a in diagnosis.accounts
        for name, ns in facts.ordered_parts(a.parts)
    ]
    return DataFrame(rows, columns=["rank", "device", "scope", "part", "ns", "share"])


TABLES: dict[str, Callable[[Diagnosis], DataFrame]] = {"kernels": kernels, "steps": steps, "account": account}


def csv_files(diagnosis: Diagnosis) -> dict[str, bytes]:
    """File name -> content, UTF-8, a header line, `\\n` line ends."""
    return {
        f"{name}.csv": table(diagnosis).to_csv(index=False, lineterminator="\n").encode()
        for name, table in TABLES.items()
    }


def _cell(text: str) -> str:
    """A name that a spreadsheet takes for text: control characters spelled out, and no formula (OWASP, CSV injection)."""
    text = clean(text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
