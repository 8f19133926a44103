"""A benchmark on the terminal: tables that fit the width, then what was not measured, what is unstable and why."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.bench.check import Item
from gpudiag.bench.health import findings
from gpudiag.bench.result import BenchResult
from gpudiag.bench.tables import Table, headline, loss_lines, rules_text, tables_of, unstable_lines
from gpudiag.diagnosis import Finding
from gpudiag.report.page import BOLD, DIM, GREEN, RED, YELLOW, Page
from gpudiag.report.text import clean, columns

GAP = 2
UNSTABLE_SHOWN = 8


def render(result: BenchResult, width: int, color: bool, ascii_only: bool, next_commands: Sequence[str] = ()) -> str:
    page = Page(width, color, ascii_only)
    page.heading("gpudiag bench", result.started)
    page.prose(headline(result), 2, style=BOLD)
    page.prose(f"Rules: {rules_text(result)}.", 2, style=DIM)
    for table in tables_of(result):
        page.add()
        add_table(page, table)
    _list(page, "Not finite", loss_lines(result.models), RED)
    unstable = unstable_lines(result)
    more = [f"... and {len(unstable) - UNSTABLE_SHOWN} more, all in the JSON"] if len(unstable) > UNSTABLE_SHOWN else []
    _list(page, f"Unstable ({len(unstable)}), refused by comparisons", unstable[:UNSTABLE_SHOWN] + more, YELLOW)
    health = [f"{where}: {finding.title}. {finding.summary}" for where, finding in findings(result)]
    _list(page, "Health of the machine meanwhile", health, YELLOW)
    _list(page, "Not measured", [f"{key}: {why}" for key, why in reasons_of(result)], "")
    _list(page, "Note", result.warnings, "")
    _list(page, "Next", next_commands, "")
    return page_text(page)


def render_comparison(table: Table, found: Sequence[Finding], width: int, color: bool, ascii_only: bool) -> str:
    """found: what only the machines side by side show."""
    page = Page(width, color, ascii_only)
    add_table(page, table)
    _list(page, "The machines", [f"{finding.title}. {finding.summary}" for finding in found], YELLOW)
    return page_text(page)


def render_tables(tables: Sequence[Table], width: int, color: bool, ascii_only: bool) -> str:
    page = Page(width, color, ascii_only)
    for number, table in enumerate(tables):
        if number:
            page.add()
        add_table(page, table)
    return page_text(page)


def render_check(items: Sequence[Item], name: str, width: int, color: bool, ascii_only: bool) -> str:
    page = Page(width, color, ascii_only)
    missing = sum(item.outcome == "missing" for item in items)
    page.heading(f"Can another person get these numbers? {clean(name, 60)}", "")
    styles = {"ok": GREEN, "warn": YELLOW, "missing": RED}
    for item in items:
        page.prose(item.text, 2, lead=f"{item.outcome:8}{item.name:24}", lead_style=styles[item.outcome], hang=34)
    page.add()
    page.prose(
        "Nothing on the list stands in the way."
        if not missing
        else f"{missing} item(s) would keep another person from it.",
        2,
        style=BOLD,
    )
    return page_text(page)


def page_text(page: Page) -> str:
    text = "\n".join(page.lines) + "\n"
    if page.ascii_only:
        text = (
            text.replace("±", "+-")
            .replace("–", "-")
            .replace("─", "-")
            .replace("…", "~")
            .encode("ascii", "replace")
            .decode()
        )
    return text


def add_table(page: Page, table: Table) -> None:
    """Headers wrap at words so that the cells decide the width; a first column that repeats is printed once."""
    page.heading(clean(table.title, page.width - 4), "")
    rows = [[clean(cell, 60) for cell in row] for row in table.rows]
    widths = [
        max([columns(row[i]) for row in rows] + [columns(word) for word in name.split()] or [0])
        for i, name in enumerate(table.columns)
    ]
    room = page.width - 2 - sum(widths) - GAP * (len(widths) - 1)
    for i, name in enumerate(table.columns):  # what is left goes to headers that would wrap
        extra = min(max(0, columns(name) - widths[i]), max(0, room))
        widths[i] += extra
        room -= extra
    headers = [_wrapped(name, widths[i]) for i, name in enumerate(table.columns)]
    for line in range(max(len(header) for header in headers)):
        cells = [
            header[line - max(map(len, headers)) + len(header)] if line >= max(map(len, headers)) - len(header) else ""
            for header in headers
        ]
        page.add(page.paint(_line(cells, widths), DIM))
    before = ""
    for row in rows:
        shown = list(row)
        if row[0] == before and len(table.columns) > 2:
            shown[0] = ""
        before = row[0]
        page.add(_line(shown, widths))
    page.prose(table.note, 2, style=DIM)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    parts = [
        cell + " " * (width - columns(cell)) if i == 0 else " " * (width - columns(cell)) + cell
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  " + (" " * GAP).join(parts)


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if lines[-1] and columns(lines[-1]) + 1 + columns(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _list(page: Page, title: str, lines: Sequence[str], style: str) -> None:
    if not lines:
        return
    page.add()
    page.add(page.paint(title, BOLD))
    for line in lines:
        page.prose(line, 2, style=style)


def reasons_of(result: BenchResult) -> list[tuple[str, str]]:
    """The whole run's reasons, then those of single parts that failed."""
    found = list(result.not_measured.items())
    for model in result.models:
        found += [(f"{model.model}, {mode}", why) for mode, why in model.failed.items()]
        for run in model.runs:
            found += [(f"{model.model}, {run.mode}, {part}", why) for part, why in run.failed.items()]
        if model.cpu:
            found += [(f"{model.model}, CPU, {part}", why) for part, why in model.cpu.not_measured.items()]
    seen: dict[str, str] = {}
    for key, why in found:  # the same reason for every model is said once
        if why not in seen.values():
            seen[key] = why
    return list(seen.items())
