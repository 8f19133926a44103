"""A comparison as text: what came of it, step time, where the time moved, findings gone and new. 80 columns, no colour needed."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.comparison import Comparison, FindingChange, FindingStatus, PartChange, SideInfo
from gpudiag.report.facts import PART_LABELS, part_label
from gpudiag.report.page import BOLD, CYAN, DIM, GREEN, RED, YELLOW, Page
from gpudiag.report.text import clean, columns, cut, cut_start
from gpudiag.units import format_ns, format_percent

OUTCOMES = {
    "faster": "Faster",
    "slower": "Slower",
    "no_change": "No change",
    "not_settled": "Not settled",
    "cannot_judge": "Cannot judge",
}
STATUSES: dict[FindingStatus, str] = {
    "gone": "gone",
    "new": "new",
    "unchanged": "still there",
    "unknown": "not judged on both sides",
}
_STYLE = {"faster": "1;32", "slower": "1;31", "no_change": BOLD, "not_settled": "1;33", "cannot_judge": "1;33"}
_CRUMB = 0.005  # of the longer step: a part smaller than that on both sides, or a move, is not worth a line
_MOST_FINDINGS = 8


def render(comparison: Comparison, *, width: int = 80, color: bool = False, ascii_only: bool = False) -> str:
    """The whole report, ending in a newline; a pure function as `terminal.render`."""
    page = Page(width, color, ascii_only)
    _verdict(page, comparison)
    _times(page, comparison)
    _work(page, comparison)
    _account(page, comparison)
    _findings(page, comparison)
    _notes(page, comparison)
    return page.text()


def change_text(before: float | None, after: float | None) -> str:
    """`-28 %`, `58x` for much more, or nothing where a side has no value."""
    if not before or after is None:
        return ""
    change = after / before - 1
    if change >= 9:
        return f"{after / before:.0f}x"
    text = format_percent(abs(change))
    return text if change == 0 else f"{'+' if change > 0 else '-'}{text}"


def delta_text(ns: int) -> str:
    return f"+{format_ns(ns)}" if ns > 0 else format_ns(ns)


def shown_parts(comparison: Comparison) -> tuple[list[PartChange], int]:
    """The parts worth a line, in the account's order, and how much the others together changed."""
    whole = max(sum(p.before_ns for p in comparison.account), sum(p.after_ns for p in comparison.account))
    order = {name: place for place, name in enumerate(PART_LABELS)}
    kept = [p for p in comparison.account if max(p.before_ns, p.after_ns) >= _CRUMB * whole]
    rest = sum(p.change_ns for p in comparison.account if p not in kept)
    return sorted(kept, key=lambda p: (order.get(p.part, len(order)), p.part)), rest


def moved_sentence(comparison: Comparison) -> str:
    """Where most of the change lies: `idle: waits for input -47.3 ms, idle: launch cost +10.7 ms`."""
    whole = max((side.mean_ns or 0) for side in (comparison.before, comparison.after))
    moves = sorted(comparison.account, key=lambda p: (-abs(p.change_ns), p.part))
    said = [p for p in moves if abs(p.change_ns) >= 0.02 * whole][:3]
    return ", ".join(f"{part_label(p.part)} {delta_text(p.change_ns)}" for p in said)


def gain_sentence(comparison: Comparison) -> str:
    """What the findings that are gone promised, beside what was measured; empty when none that promised is gone."""
    gain, mean = comparison.gain, comparison.before.mean_ns
    if gain.predicted_ns is None or gain.measured_ns is None or not mean or comparison.blockers:
        return ""
    per = "mean step" if comparison.before.scope == "steps" else "recording"
    measured = (
        f"{format_ns(gain.measured_ns)} ({format_percent(gain.measured_ns / mean)})"
        if gain.measured_ns > 0
        else f"none: {format_ns(-gain.measured_ns)} longer"
    )
    return f"predicted {format_ns(gain.predicted_ns)} ({format_percent(gain.predicted_ns / mean)}) of the {per}, measured {measured}"


def gate_sentence(comparison: Comparison) -> str:
    gate = comparison.gate
    if gate is None:
        return ""
    why = "" if gate.reason in comparison.headline else f": {gate.reason}"  # the headline has said it
    return f"gate {gate.percent:g} %: {gate.result.replace('_', ' ')}{why}"


def side_sentence(side: SideInfo) -> str:
    """`3 rounds (spread 2.1 %), 20 steady steps each, torch.profiler (Kineto)`"""
    pieces = []
    if side.rounds > 1:
        spread = "" if side.spread is None else f" (spread {format_percent(side.spread)})"
        pieces.append(f"{side.rounds} rounds{spread}")
    if side.scope == "steps":
        pieces.append(
            f"{side.steps} steady step{'s' if side.steps != 1 else ''}" + (" each" if side.rounds > 1 else "")
        )
    else:
        pieces.append("one span, no steps")
    return ", ".join([*pieces, clean(side.recorder, 30)])


def sorted_findings(comparison: Comparison) -> list[FindingChange]:
    """Gone, new, unknown, then those still there; an effect of another finding after those that stand for themselves."""
    order = ("gone", "new", "unknown", "unchanged")
    ranked = enumerate(comparison.findings)
    return [
        f for _, f in sorted(ranked, key=lambda item: (order.index(item[1].status), bool(item[1].caused_by), item[0]))
    ]


def bound_text(finding: FindingChange) -> str:
    if finding.predicted_ns is not None:
        return f"{finding.predicted_by} {format_ns(finding.predicted_ns)}"
    before, after = finding.before_bound_ns, finding.after_bound_ns
    if before and after:
        return f"at most {format_ns(before)}, now {format_ns(after)}"
    if finding.status == "unknown":
        where = "before" if before is None else "after"
        return f"not judged {where}" if finding.elsewhere == "not_judged" else f"{finding.elsewhere} {where}"
    return f"at most {format_ns(after)}" if after else ""


def counts_sentence(comparison: Comparison) -> str:
    counts = [sum(f.status == status for f in comparison.findings) for status in STATUSES]
    said = [f"{count} {STATUSES[status]}" for status, count in zip(STATUSES, counts, strict=True) if count]
    return ", ".join(said) or "none on either side"


def _verdict(page: Page, comparison: Comparison) -> None:
    page.add(page.paint(f"gpudiag {clean(comparison.gpudiag, 20)}  compare", DIM))
    page.add()
    lead = f"{OUTCOMES[comparison.outcome].upper()}: "
    page.prose(comparison.headline, 0, lead, style=BOLD, lead_style=_STYLE[comparison.outcome], hang=2)
    if not comparison.blockers and (moved := moved_sentence(comparison)):
        page.prose(moved, 2, "Moved: ", hang=2)
    page.prose(gate_sentence(comparison), 2, hang=2)
    page.add()
    for name, side in (("before", comparison.before), ("after", comparison.after)):
        about = side_sentence(side)
        room = page.width - 12 - columns(about)
        path = clean(side.paths[side.shown])
        if room >= 24:
            page.add(f"  {name:<7} {cut_start(path, room):<{room}}  {page.paint(about, DIM)}")
        else:
            page.add(f"  {name:<7} {cut_start(path, page.width - 10)}")
            page.prose(about, 10, style=DIM)


def _times(page: Page, comparison: Comparison) -> None:
    before, after = comparison.before, comparison.after
    page.add()
    what = "Step time" if before.scope == after.scope == "steps" else "Time"
    page.heading(what, "")
    page.add(page.paint(f"  {'':<8}{'median':>10}{'p99':>10}{'mean':>10}   bound by", DIM))
    for name, side in (("before", before), ("after", after)):
        cells = [format_ns(ns) if ns is not None else "-" for ns in (side.median_ns, side.p99_ns, side.mean_ns)]
        verdict = side.bound_by if side.status == "bottleneck" else side.status.replace("_", " ")
        page.add(f"  {name:<8}" + "".join(f"{cell:>10}" for cell in cells) + f"   {verdict}")
    pairs = ((before.median_ns, after.median_ns), (before.p99_ns, after.p99_ns), (before.mean_ns, after.mean_ns))
    page.add(f"  {'change':<8}" + "".join(f"{change_text(a, b):>10}" for a, b in pairs))
    for name, side in (("before", before), ("after", after)):
        if side.rounds > 1:
            page.prose(", ".join(format_ns(ns) for ns in side.round_ns), 2, f"rounds {name}: ")


def _work(page: Page, comparison: Comparison) -> None:
    page.add()
    said = {"same": "yes", "differs": "no, or not quite", "unknown": "not known"}[comparison.same_work]
    style = GREEN if comparison.same_work == "same" else YELLOW
    detail = ""
    if comparison.before.kernels_per_step is not None and comparison.after.kernels_per_step is not None:
        detail = (
            f"{comparison.before.kernels_per_step:,.0f} and {comparison.after.kernels_per_step:,.0f} kernels a step"
        )
    page.heading("Same work?", f"{said}{f' ({detail})' if detail and comparison.same_work == 'same' else ''}", style)
    for difference in comparison.differences:
        values = f"{difference.before} before, {difference.after} after" if difference.before else difference.after
        mark = "  (times cannot be compared)" if difference.blocks else ""
        page.prose(f"{difference.what}: {values}{mark}", 2, hang=4)


def _account(page: Page, comparison: Comparison) -> None:
    parts, rest = shown_parts(comparison)
    if not parts:
        return
    page.add()
    steps = comparison.before.scope == comparison.after.scope == "steps"
    gpus = max(len(comparison.before.gpus), len(comparison.after.gpus))
    page.heading(
        "Where the time went", ("mean step" if steps else "whole recording") + (" of a GPU" if gpus > 1 else "")
    )
    page.add(page.paint(f"  {'':<28}{'before':>9}{'after':>10}{'change':>11}", DIM))
    most = max(max(abs(p.change_ns) for p in parts), 1)
    room = max(page.width - 63, 0) // 2
    for part in parts:
        cells = round(room * abs(part.change_ns) / most)
        bar = " " * (room - cells) + "─" * cells + "│" if part.change_ns < 0 else " " * room + "│" + "─" * cells
        style = GREEN if part.change_ns < 0 else RED
        page.add(
            f"  {cut(part_label(part.part), 27):<28}{format_ns(part.before_ns):>9}{format_ns(part.after_ns):>10}"
            f"{delta_text(part.change_ns):>11}  {page.paint(bar, style if cells else DIM)}"
        )
    if rest:
        page.add(f"  {'smaller parts together':<28}{'':>19}{delta_text(rest):>11}")
    whole = [sum(getattr(p, field) for p in comparison.account) for field in ("before_ns", "after_ns", "change_ns")]
    total = f"  {'all':<28}{format_ns(whole[0]):>9}{format_ns(whole[1]):>10}{delta_text(whole[2]):>11}"
    page.add(page.paint(total, BOLD))


def _findings(page: Page, comparison: Comparison) -> None:
    page.add()
    page.heading("Findings", counts_sentence(comparison))
    own = [f for f in sorted_findings(comparison) if not f.caused_by]
    for finding in own[:_MOST_FINDINGS]:
        mark = {"gone": "gone ", "new": "new  ", "unchanged": "still", "unknown": "?    "}[finding.status]
        style = {"gone": GREEN, "new": RED, "unchanged": YELLOW, "unknown": DIM}[finding.status]
        rule = clean(finding.rule, 30)
        title = clean(finding.title, 200)
        bound = bound_text(finding)
        page.prose(title, 2, f"{mark} ", lead_style=style)
        page.prose(bound, 8, f"{rule}: " if bound else rule, lead_style=DIM, hang=8)
    if len(own) > _MOST_FINDINGS:
        page.add(f"  and {len(own) - _MOST_FINDINGS} more: --json lists them")
    _effects(page, [f for f in comparison.findings if f.caused_by])
    if gain := gain_sentence(comparison):
        page.prose(gain, 2, "Gain: ", lead_style=CYAN)


def _effects(page: Page, effects: Sequence[FindingChange]) -> None:
    said = []
    for status in ("gone", "new", "unchanged", "unknown"):
        rules = [clean(f.rule, 30) for f in effects if f.status == status]
        if rules:
            said.append(f"{STATUSES[status]} {', '.join(rules)}")
    page.prose("; ".join(said), 2, "shown under these: ", lead_style=DIM, hang=4, lines=3)


def _notes(page: Page, comparison: Comparison) -> None:
    if comparison.notes:
        page.add()
    for note in comparison.notes:
        page.prose(note, 0, "! ", lead_style=YELLOW)
