"""A comparison as one page that opens from disk, loads nothing and runs no script: the look of the diagnosis's report."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from gpudiag.comparison import Comparison, SideInfo
from gpudiag.report import compare_text as words
from gpudiag.report.html import _environment
from gpudiag.report.palette import ALL_STYLES, part_style
from gpudiag.report.text import clean
from gpudiag.units import format_ns

_GLYPHS = {"faster": "✓", "slower": "▲", "no_change": "=", "not_settled": "?", "cannot_judge": "?"}
_CLASSES = {"faster": "healthy", "slower": "bottleneck"}  # green and red of the report's stylesheet
_MOST_DOTS = 400
_HALF = 46.0  # percent of the cell that the longest change takes to its side


def render(comparison: Comparison) -> str:
    """The whole document. Every text of the recordings is escaped, and what would turn or hide text is spelled out."""
    environment = _environment()
    sides = (("before", comparison.before), ("after", comparison.after))
    parts, rest = words.shown_parts(comparison)
    longest = max((sum(p.before_ns for p in comparison.account), sum(p.after_ns for p in comparison.account), 1))
    text = environment.get_template("compare.html").render(
        c=comparison,
        css=Markup(environment.get_template("report.css").render(parts=ALL_STYLES)),
        status=words.OUTCOMES[comparison.outcome],
        status_class=_CLASSES.get(comparison.outcome, ""),
        glyph=_GLYPHS[comparison.outcome],
        gate=words.gate_sentence(comparison),
        moved="" if comparison.blockers else words.moved_sentence(comparison),
        gain=words.gain_sentence(comparison),
        sides=[_side(name, side) for name, side in sides],
        changes=[
            words.change_text(getattr(comparison.before, field), getattr(comparison.after, field))
            for field in ("median_ns", "p99_ns", "mean_ns")
        ],
        strip=_strip(comparison),
        bars=[
            {
                "name": name,
                "width": round(100 * sum(getattr(p, field) for p in comparison.account) / longest, 2),
                "time": format_ns(sum(getattr(p, field) for p in comparison.account)),
                "parts": [_segment(p.part, getattr(p, field)) for p in parts if getattr(p, field)],
            }
            for name, field in (("Before", "before_ns"), ("After", "after_ns"))
        ],
        parts=_part_rows(comparison),
        rest=words.delta_text(rest) if rest else "",
        whole=[
            *(format_ns(sum(getattr(p, field) for p in comparison.account)) for field in ("before_ns", "after_ns")),
            words.delta_text(sum(p.change_ns for p in comparison.account)),
        ],
        scope="mean step" if comparison.before.scope == comparison.after.scope == "steps" else "recording",
        findings=[
            {
                "status": words.STATUSES[finding.status],
                "state": {"gone": "clear", "new": "critical"}.get(finding.status, ""),
                "title": finding.title,
                "rule": finding.rule,
                "says": words.bound_text(finding),
                "caused_by": finding.caused_by,
            }
            for finding in words.sorted_findings(comparison)
        ],
        metrics=[
            {
                "name": m.name,
                "unit": m.unit,
                "before": f"{m.before:,.6g}",
                "after": f"{m.after:,.6g}",
                "change": words.change_text(m.before, m.after),
            }
            for m in comparison.metrics
            if m.before != m.after
        ],
    )
    return text.encode("utf-8", "replace").decode()


def _side(name: str, side: SideInfo) -> dict[str, Any]:
    return {
        "name": name,
        "path": clean(side.paths[side.shown], 200),
        "about": words.side_sentence(side),
        "verdict": side.headline,
        "gpus": ", ".join(dict.fromkeys(side.gpus)),
        "times": [format_ns(ns) if ns is not None else "–" for ns in (side.median_ns, side.p99_ns, side.mean_ns)],
    }


def _segment(part: str, ns: int) -> dict[str, Any]:
    style = part_style(part)
    return {"css": style.css, "idle": style.idle, "label": style.label, "ns": ns, "time": format_ns(ns)}


def _part_rows(comparison: Comparison) -> list[dict[str, Any]]:
    parts, _ = words.shown_parts(comparison)
    most = max((abs(p.change_ns) for p in parts), default=0) or 1
    return [
        {
            **_segment(p.part, p.before_ns),
            "before": format_ns(p.before_ns),
            "after": format_ns(p.after_ns),
            "change": words.delta_text(p.change_ns),
            "width": round(_HALF * abs(p.change_ns) / most, 2),
            "less": p.change_ns < 0,
        }
        for p in parts
    ]


def _strip(comparison: Comparison) -> dict[str, Any] | None:
    """Each step (or round) as a dot on one time axis from zero, the median as a line: the spread as one sees it."""
    samples = [comparison.before.sample_ns, comparison.after.sample_ns]
    if min(len(sample) for sample in samples) < 2:
        return None
    most = 1.05 * max(max(sample) for sample in samples)
    rows = []
    for place, (name, side) in enumerate((("before", comparison.before), ("after", comparison.after))):
        every = -(-len(side.sample_ns) // _MOST_DOTS)
        dots = [round(1000 * ns / most, 1) for ns in side.sample_ns[::every]]
        median = round(1000 * (side.median_ns or 0) / most, 1)
        rows.append({"name": name, "y": 26 + 44 * place, "dots": dots, "median": median})
    unit = "rounds" if comparison.step.sample == "rounds" else "steps"
    spoken = "; ".join(
        f"{name}: {len(side.sample_ns)} {unit} from {format_ns(min(side.sample_ns))} to {format_ns(max(side.sample_ns))}"
        for name, side in (("before", comparison.before), ("after", comparison.after))
    )
    return {"rows": rows, "end": format_ns(most), "spoken": spoken, "unit": unit}
