"""The history as text: a table of runs, one metric over the runs as bars, and the same as an SVG of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gpudiag.report.page import BOLD, CYAN, DIM, GREEN, RED, YELLOW, Page
from gpudiag.report.text import clean, columns, cut, cut_end
from gpudiag.units import format_bytes, format_ns, format_percent, format_rate

Row = Mapping[str, Any]
_STATUS_STYLE = {"bottleneck": RED, "healthy": GREEN, "faster": GREEN, "slower": RED}
_CHART = (720, 240)
_MARGIN = (64, 16, 26, 28)  # left, right, top, bottom


def table(rows: Sequence[Row], *, width: int = 80, color: bool = False, ascii_only: bool = False) -> str:
    """One line a run: id, when, kind, name, median step, what came of it."""
    page = Page(width, color, ascii_only)
    names = [clean(row["name"], 60) for row in rows]
    most = min(max([4, *map(columns, names)]), width - 60)
    page.add(page.paint(f"{'run':>5}  {'when (UTC)':<16}  {'kind':<7}  {'name':<{most}}  {'step':>8}  result", DIM))
    for row, name in zip(rows, names, strict=True):
        step = "-" if row["step_median_ns"] is None else format_ns(row["step_median_ns"])
        result = result_text(row)
        shown = cut(name, most)
        left = f"{row['id']:>5}  {when(row['created'])}  {row['kind']:<7}  {shown}{' ' * (most - columns(shown))}  {step:>8}  "
        if columns(left) + columns(result) > width:
            result = result.partition(",")[0].removesuffix("-bound")  # the verdict alone
        page.add(left + page.paint(cut_end(result, width - columns(left)), _STATUS_STYLE.get(row["status"], YELLOW)))
    return page.text()


def result_text(row: Row) -> str:
    """`input-bound, 3 findings`"""
    said = clean(row["status"], 30).replace("_", " ")
    if row["status"] == "bottleneck" and row["bound_by"] != "none":
        said = f"{clean(row['bound_by'], 20)}-bound"
    count = row["findings"]
    return f"{said}, {count} finding{'s' if count != 1 else ''}" if count else said


def when(created: str) -> str:
    """`2026-11-30 12:04` of an ISO time."""
    return clean(created).replace("T", " ")[:16]


def header(row: Row, *, width: int = 80, color: bool = False, ascii_only: bool = False) -> str:
    """What stands over a stored diagnosis."""
    page = Page(width, color, ascii_only)
    about = f"{when(row['created'])} UTC, {row['kind']}, {clean(row['name'], 60)}, {clean(row['path'], 200)}"
    page.prose(about, 0, f"run {row['id']}: ", style=DIM, lead_style=BOLD, hang=2)
    return page.text() + "\n"


def trend(rows: Sequence[Row], metric: str, *, width: int = 80, color: bool = False, ascii_only: bool = False) -> str:
    """One bar a run, to scale from zero, with the change against the run before it. rows: oldest first, at least one."""
    page = Page(width, color, ascii_only)
    values = [float(row["value"]) for row in rows]
    names = list(dict.fromkeys(clean(row["name"], 40) for row in rows))
    page.heading(clean(metric, 40), ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""))
    most = max(map(abs, values)) or 1.0
    room = max(width - 52, 10)
    full = "#" if ascii_only else "█"
    page.add(page.paint(f"{'run':>5}  {'when (UTC)':<16}  {'value':>10}  {'change':>8}", DIM))
    for i, (row, value) in enumerate(zip(rows, values, strict=True)):
        change = change_text(values[i - 1], value) if i else ""
        bar = full * round(room * abs(value) / most)
        text = value_text(value, row["unit"])
        page.add(f"{row['id']:>5}  {when(row['created'])}  {text:>10}  {change:>8}  {page.paint(bar or '.', CYAN)}")
    if len(values) > 1:
        ends = f"first to last {change_text(values[0], values[-1]) or 'no change'}"
        low, high = min(values), max(values)
        page.prose(
            f"{ends}; least {value_text(low, rows[0]['unit'])}, most {value_text(high, rows[0]['unit'])} of {len(values)} runs",
            2,
        )
    return page.text()


def change_text(before: float, after: float) -> str:
    if not before or before == after:
        return ""
    change = after / before - 1
    return f"{'+' if change > 0 else '-'}{format_percent(abs(change))}"


def value_text(value: float, unit: str) -> str:
    """A metric's value as people read it; the unit's name where there is no better way."""
    if unit == "ns":
        return format_ns(value)
    if unit == "bytes":
        return format_bytes(value)
    if unit == "bytes/s":
        return format_rate(value)
    if unit == "fraction":
        return format_percent(value)
    number = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return number if unit in ("", "count") else f"{number} {clean(unit, 12)}"


def trend_svg(rows: Sequence[Row], metric: str) -> str:
    """The same as a picture that needs nothing else: a line from zero, a point a run. rows: oldest first, at least one."""
    width, height = _CHART
    left, right, top, bottom = _MARGIN
    values = [float(row["value"]) for row in rows]
    low, high = min(0.0, *values), max(0.0, *values)
    high = high if high > low else low + 1.0
    across = (width - left - right) / max(len(values) - 1, 1)
    points = [
        (round(left + i * across, 1), round(top + (height - top - bottom) * (high - value) / (high - low), 1))
        for i, value in enumerate(values)
    ]
    title = escape(f"{clean(metric, 60)} over {len(rows)} run{'s' if len(rows) != 1 else ''}")
    zero = round(top + (height - top - bottom) * high / (high - low), 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{title}</title>",
        "<style>svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#55575f}.t{font-weight:600;fill:#1d1e22}</style>",
        f'<text class="t" x="8" y="16">{title}</text>',
        f'<line x1="{left}" y1="{zero}" x2="{width - right}" y2="{zero}" stroke="#c9c5bc"/>',
    ]
    unit = rows[0]["unit"]
    for value in dict.fromkeys((low, high)):
        y = round(top + (height - top - bottom) * (high - value) / (high - low) + 4, 1)
        lines.append(f'<text x="{left - 8}" y="{y}" text-anchor="end">{escape(value_text(value, unit))}</text>')
    if len(points) > 1:
        lines.append(
            f'<polyline fill="none" stroke="#2f74b5" stroke-width="2" points="{" ".join(f"{x},{y}" for x, y in points)}"/>'
        )
    for row, (x, y), value in zip(rows, points, values, strict=True):
        said = escape(f"run {row['id']}, {when(row['created'])}, {clean(row['name'], 60)}: {value_text(value, unit)}")
        lines.append(f'<circle cx="{x}" cy="{y}" r="4" fill="#2f74b5"><title>{said}</title></circle>')
    ends = [(rows[0], points[0], "start" if len(rows) > 1 else "middle")]
    ends += [(rows[-1], points[-1], "end")] if len(rows) > 1 else []
    for row, (x, _), anchor in ends:
        label = escape(f"run {row['id']}, {when(row['created'])[:10]}")
        lines.append(f'<text x="{x}" y="{height - 8}" text-anchor="{anchor}">{label}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
