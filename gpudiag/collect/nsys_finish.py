"""The end of an nsys recording: find the report, export it, and verify that it holds what was asked for.

A report without a kernel table, or without our own ranges, leaves nsys with exit status 0: only looking tells.
"""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gpudiag.collect.inject.nvtx_emit import DOMAIN
from gpudiag.errors import GpudiagError
from gpudiag.read.nsys_report import export_report

REPORT_SUFFIXES = (".nsys-rep", ".qdrep", ".qdstrm")


def log_of(output: Path) -> Path:
    """Where nsys's own words about the recording `output` are kept."""
    return output.with_name(output.name + ".nsys.log")


@dataclass(frozen=True)
class FinishedReport:
    """What a recording came to. sqlite None = nothing usable, and `failed` says why.

    ranges: rows of domain "gpudiag"; kernels: rows of the kernel table, None = there is no such table.
    notes: what had to be done (the importer run by hand); warnings: what the report lacks, and what nsys said of it.
    """

    report: Path | None
    sqlite: Path | None
    ranges: int = 0
    kernels: int | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    failed: str = ""


def finish_report(output: Path, *, gpu: bool, timeout_s: float = 20.0) -> FinishedReport:
    """Find the report that nsys wrote for `output`, export it to SQLite beside it and verify that it can be used.

    gpu: whether the application was expected to use one (then a missing kernel table is a warning). timeout_s: how
    long to wait for the report of an nsys that was killed. Never raises for a bad report: `failed` says what is wrong.
    """
    log = log_of(output)
    said = log.read_text(errors="replace") if log.is_file() else ""
    report = _wait_for_report(output, said, timeout_s)
    if report is None:
        return FinishedReport(None, None, failed=_why_no_report(said))
    try:
        sqlite = export_report(report, output.parent)
        ranges, kernels, warnings = _verify(sqlite)
    except (GpudiagError, sqlite3.DatabaseError) as error:
        hint = f"; {error.hint}" if isinstance(error, GpudiagError) and error.hint else ""
        return FinishedReport(report, None, failed=f"{error}{hint}")
    notes = []
    if report.suffix == ".qdstrm":
        notes.append("nsys left a .qdstrm (its importer was not beside it); finished with QdstrmImporter")
    if kernels is None and gpu:
        warnings.append("the nsys report holds no kernel: the application used no GPU, or CUPTI was not permitted")
    if not ranges:
        warnings.append(
            'the nsys report holds no range of domain "gpudiag": phases and steps of the script are unknown'
        )
    return FinishedReport(report, sqlite, ranges, kernels, tuple(notes), tuple(warnings))


def _wait_for_report(output: Path, said: str, timeout_s: float) -> Path | None:
    """The newest kind of report at `output`, or where nsys says it left it when it could not write there."""
    candidates = [output.with_name(output.name + suffix) for suffix in REPORT_SUFFIXES]
    candidates += [Path(line.strip()) for line in said.splitlines() if line.strip().endswith(REPORT_SUFFIXES)]
    finished = "Generated:" in said
    deadline = time.monotonic() + timeout_s
    size = -1
    while True:
        found = next((path for path in candidates if path.is_file() and path.stat().st_size), None)
        if found and (finished or found.stat().st_size == size):
            return found
        if finished or time.monotonic() > deadline:
            return None
        size = found.stat().st_size if found else -1  # an agent without its nsys may still be writing
        time.sleep(0.5)


def _why_no_report(said: str) -> str:
    if "Generated:" in said and "Capture range started" not in said:
        return (
            "nsys recorded nothing: the window never opened (fewer steps than --warmup, or ranges did not arrive); "
            "--with torch records from the start"
        )
    words = [line for line in said.splitlines() if line.strip() and not line.startswith("Generat")]
    return "nsys wrote no report" + (f": {words[-1].strip()}" if words else " (was it killed?)")


def _verify(sqlite: Path) -> tuple[int, int | None, list[str]]:
    """Ranges in our domain, kernels (None = no table), and warnings that nsys put into the report."""
    with closing(sqlite3.connect(f"{sqlite.absolute().as_uri()}?mode=ro", uri=True)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        ranges = 0
        if "NVTX_EVENTS" in tables:
            # domain ids are per process, whose id is in bits 24-47 of globalTid; 75 = domain created, 59/60 = ranges
            (ranges,) = db.execute(
                "WITH ours AS (SELECT DISTINCT domainId AS id, globalTid >> 24 AS process FROM NVTX_EVENTS e"
                " LEFT JOIN StringIds s ON s.id = e.textId WHERE eventType = 75 AND COALESCE(text, value) = ?)"
                " SELECT COUNT(*) FROM NVTX_EVENTS e JOIN ours ON domainId = ours.id AND globalTid >> 24 = process"
                " WHERE eventType IN (59, 60)",
                (DOMAIN,),
            ).fetchone()
        kernels = None
        for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"):
            if table in tables:
                kernels = (kernels or 0) + db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
        warnings = []
        if "DIAGNOSTIC_EVENT" in tables:
            severe = db.execute(
                "SELECT DISTINCT text FROM DIAGNOSTIC_EVENT WHERE severity >= 2 AND text <> '' ORDER BY text"
            )
            warnings = [f"nsys: {text}" for (text,) in severe]
    return ranges, kernels, warnings
