"""A comparison as GitHub-flavoured Markdown, for a pull-request comment. Escaped like every report of a recording."""

from __future__ import annotations

from gpudiag.comparison import Comparison
from gpudiag.report import compare_text as words
from gpudiag.report.facts import part_label
from gpudiag.report.markdown import code, escape
from gpudiag.units import format_ns

_SIGN = {"faster": "🟢", "slower": "🔴", "no_change": "⚪", "not_settled": "🟡", "cannot_judge": "⚪"}


def render(comparison: Comparison) -> str:
    """The comment, ending in a newline."""
    headline = comparison.headline
    lines = [
        f"### {_SIGN[comparison.outcome]} gpudiag compare: {words.OUTCOMES[comparison.outcome].lower()}",
        "",
        f"**{escape(headline[:1].upper() + headline[1:])}**",
        "",
    ]
    if comparison.gate is not None:
        lines += [escape(words.gate_sentence(comparison)), ""]
    lines += ["| | Median | p99 | Mean | Recording |", "|---|--:|--:|--:|---|"]
    sides = (("before", comparison.before), ("after", comparison.after))
    for name, side in sides:
        cells = [format_ns(ns) if ns is not None else "–" for ns in (side.median_ns, side.p99_ns, side.mean_ns)]
        about = f"{code(side.paths[side.shown])} {escape(words.side_sentence(side))}"
        lines.append(f"| {name} | {' | '.join(cells)} | {about} |")
    before, after = comparison.before, comparison.after
    pairs = ((before.median_ns, after.median_ns), (before.p99_ns, after.p99_ns), (before.mean_ns, after.mean_ns))
    lines += [f"| change | {' | '.join(words.change_text(a, b) for a, b in pairs)} | |", ""]
    for difference in comparison.differences:
        said = f"{difference.before} before, {difference.after} after" if difference.before else difference.after
        lines.append(f"- not the same work: {escape(difference.what)}: {escape(said)}")
    lines += [""] if comparison.differences else []
    lines += _account(comparison) + _findings(comparison)
    lines += [f"> ⚠️ {escape(note)}\n" for note in comparison.notes]
    lines.append(f"<sub>gpudiag {escape(comparison.gpudiag)}</sub>")
    return "\n".join(lines) + "\n"


def _account(comparison: Comparison) -> list[str]:
    parts, rest = words.shown_parts(comparison)
    if not parts:
        return []
    lines = ["| Where the time went | Before | After | Change |", "|---|--:|--:|--:|"]
    for part in parts:
        times = f"{format_ns(part.before_ns)} | {format_ns(part.after_ns)} | {words.delta_text(part.change_ns)}"
        lines.append(f"| {escape(part_label(part.part))} | {times} |")
    if rest:
        lines.append(f"| smaller parts together | | | {words.delta_text(rest)} |")
    return [*lines, ""]


def _findings(comparison: Comparison) -> list[str]:
    own = [f for f in words.sorted_findings(comparison) if not f.caused_by]
    if not own:
        return []
    lines = ["| Finding | | |", "|---|---|---|"]
    for finding in own:
        status = words.STATUSES[finding.status]
        lines.append(
            f"| {escape(finding.title)} ({code(finding.rule)}) | {status} | {escape(words.bound_text(finding))} |"
        )
    gain = words.gain_sentence(comparison)
    return [*lines, "", *([f"Gain: {escape(gain)}", ""] if gain else [])]
