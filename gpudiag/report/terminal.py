"""The report as text: the verdict, the account as one bar, the four steps in order, the top kernels, what to type next.

Readable without colour at 80 columns; plain ASCII where the terminal cannot show more. `render` is a pure function.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.diagnosis import SEVERITY_ORDER, STEP_ORDER, Diagnosis, Finding, Fix, Severity, StepName
from gpudiag.report import facts, method
from gpudiag.report.device_table import WIDE, device_lines
from gpudiag.report.page import BLUE, BOLD, CYAN, DIM, GREEN, MAGENTA, MOST_LINES, YELLOW, Page
from gpudiag.report.text import apportion, clean, clean_code, columns, cut_start, short_kernel
from gpudiag.units import counted, format_ns

_SEVERITY_STYLE: dict[Severity, str] = {"critical": "1;31", "warning": "1;33", "info": "1;36"}
_VERDICT_STYLE = {"bottleneck": "1;31", "healthy": "1;32", "cannot_judge": "1;33"}
_BUSY_STYLES = (GREEN, MAGENTA, YELLOW, BLUE, CYAN)
_IDLE_STYLES = ("91", "95", "93", "96", "94")

# These are shown with evidence and their whole first fix, the rest with their share and the change: a screen is short.
_FULL_FINDINGS = 2
_MOST_EVIDENCE = 6
_CRUMB = 0.005  # share of the window below which a part has no cell of its own in a bar of 76
_MOST_CODE_LINES = 8
_MOST_WARNINGS = 5
_MOST_NOT_JUDGED = 3


def render(
    diagnosis: Diagnosis, *, width: int = 80, color: bool = False, ascii_only: bool = False, inputs: Sequence[str] = ()
) -> str:
    """The whole report, ending in a newline. color: ANSI colours; ascii_only: for terminals that are not UTF-8;
    inputs: the paths as the user typed them, for the commands to type next.
    """
    page = Page(width, color, ascii_only)
    _verdict(page, diagnosis)
    _account(page, diagnosis)
    _steps(page, diagnosis)
    _kernels(page, diagnosis)
    _not_judged(page, diagnosis)
    _warnings(page, diagnosis.warnings)
    _next(page, diagnosis, inputs)
    return page.text()


def _verdict(page: Page, diagnosis: Diagnosis) -> None:
    verdict, source = diagnosis.verdict, diagnosis.source
    recordings = len({account.rank for account in diagnosis.accounts})
    end = f"{f', {recordings} recordings' if recordings > 1 else ''}  {clean(source.recorder, 30)}"
    start = f"gpudiag {clean(diagnosis.gpudiag, 20)}  "
    path = cut_start(clean(source.path), page.width - len(start) - columns(end))
    page.add(page.paint(start + path + end, DIM))
    page.add()
    label = facts.verdict_label(diagnosis).upper()
    page.prose(
        facts.headline(diagnosis), 0, f"{label}: ", style=BOLD, lead_style=_VERDICT_STYLE[verdict.status], hang=2
    )
    page.prose(verdict.margin, 2)
    page.prose(facts.steps_line(diagnosis), 2)


def _account(page: Page, diagnosis: Diagnosis) -> None:
    accounts = diagnosis.accounts
    parts = _without_crumbs(facts.ordered_parts(facts.summed(accounts)))
    if not parts:
        return
    many_ranks = len({account.rank for account in accounts}) > 1
    if len(accounts) == 1:
        place = (accounts[0].rank, accounts[0].device)
        model = next((clean(d.name, 30) for d in diagnosis.devices if (d.rank, d.device) == place), "")
        title = facts.device_label(*place, many_ranks) + (f", {model}" if model else "")
    else:
        title = f"{facts.devices_word(accounts)} together"
    steps = accounts[0].steps or diagnosis.steps.count
    scope = counted(steps, "steady step") if accounts[0].scope == "steps" else "whole recording"
    page.add()
    page.heading(facts.account_heading(diagnosis), f"{title}: {scope}, {format_ns(max(a.total_ns for a in accounts))}")
    values = [value for _, value, _ in parts]
    drawn = _glyphs([name for name, _, _ in parts], page.ascii_only)
    cells = apportion(values, page.width - 4)
    page.add("  " + "".join(page.paint(glyph * n, style) for (glyph, style), n in zip(drawn, cells, strict=True)))
    shares = apportion(values, 1000)  # tenths of a percent
    _legend(
        page,
        [
            (page.paint(glyph, style), f"{share / 10:5.1f} % {label}")
            for (glyph, style), share, (_, _, label) in zip(drawn, shares, parts, strict=True)
            if share
        ],
    )
    _meanings(page, diagnosis, parts)
    if len(accounts) > 1:
        for line in device_lines(accounts, page.width >= WIDE):
            page.add(f"  {line}")


def _without_crumbs(parts: Sequence[tuple[str, int]]) -> list[tuple[str, int, str]]:
    """(name, ns, label) of each part; those too small for a cell of the bar are one part at its end, if there are several."""
    whole = sum(value for _, value in parts)
    crumbs = [value for _, value in parts if value < _CRUMB * whole]
    if len(crumbs) < 2:
        return [(name, value, facts.part_label(name)) for name, value in parts]
    kept = [(name, value, facts.part_label(name)) for name, value in parts if value >= _CRUMB * whole]
    return [*kept, ("", sum(crumbs), f"in {len(crumbs)} smaller parts")]


def _glyphs(names: Sequence[str], ascii_only: bool) -> list[tuple[str, str]]:
    """(character, style) for each part: dense ones for work, light ones for idle time, no two alike while they last."""
    busy = "#%=+*" if ascii_only else "█▓▒▚▤"
    idle = ".:-~^" if ascii_only else "░·:-~"
    counts = {True: 0, False: 0}
    drawn = []
    for name in names:
        if not name:
            drawn.append(("'", DIM))
            continue
        is_idle = name.startswith("idle.") or name == "host.input"
        i = min(counts[is_idle], 4)
        counts[is_idle] += 1
        drawn.append((idle[i], _IDLE_STYLES[i]) if is_idle else (busy[i], _BUSY_STYLES[i]))
    return drawn


def _legend(page: Page, entries: Sequence[tuple[str, str]]) -> None:
    """In two columns where the longest label fits into one, down the left column first: the order of the bar."""
    cell = (page.width - 2) // 2
    if any(columns(text) > cell - 3 for _, text in entries):
        for glyph, text in entries:
            page.add(f"  {glyph} {text}")
        return
    half = (len(entries) + 1) // 2
    for i in range(half):
        pair = [entries[i], *entries[half + i : half + i + 1]]
        page.add("  " + "".join(f"{glyph} {text:<{cell - 2}}" for glyph, text in pair))


def _meanings(page: Page, diagnosis: Diagnosis, parts: Sequence[tuple[str, int, str]]) -> None:
    whole = sum(value for _, value, _ in parts)
    for name, value, label in parts:
        if name in facts.PART_MEANINGS and value >= facts.NOTABLE_PART * whole:
            page.prose(
                facts.PART_MEANINGS[name], 2, f"{label.removeprefix('idle: ')}: ", style=DIM, lead_style=DIM, hang=4
            )


def _steps(page: Page, diagnosis: Diagnosis) -> None:
    own = {step: method.findings_of(diagnosis, step) for step in STEP_ORDER}
    serious = [f for f in diagnosis.findings if f.severity != "info" and f in own[f.step]]
    after_finding = True
    for step in method.shown_steps(diagnosis):
        if own[step] or after_finding:
            page.add()
        after_finding = bool(own[step])
        title = (
            facts.STEP_TITLES[step]
            if step == "environment"
            else f"{method.step_number(step)}  {facts.STEP_TITLES[step]}"
        )
        page.heading(title, method.step_status(diagnosis, step), _status_style(diagnosis, step, own[step]))
        for finding in own[step]:
            _finding(page, diagnosis, finding, serious.index(finding) if finding in serious else None)


def _status_style(diagnosis: Diagnosis, step: StepName, findings: Sequence[Finding]) -> str:
    if findings:
        return _SEVERITY_STYLE[min((f.severity for f in findings), key=SEVERITY_ORDER.index)]
    if any(f.step == step for f in diagnosis.findings):
        return ""
    return GREEN if method.is_clear(diagnosis, step) else YELLOW


def _finding(page: Page, diagnosis: Diagnosis, finding: Finding, place: int | None) -> None:
    """place: among the findings of warning or above, largest first; None for a hint. The first ones are told in full.

    The line below the title begins with the rule's id, always there.
    """
    full = place is not None and place < _FULL_FINDINGS
    rule, title, label = clean(finding.rule, 30), clean(finding.title, 200), f"  {finding.severity.upper():<8} "
    style, bound = _SEVERITY_STYLE[finding.severity], facts.bound_line(diagnosis, finding)
    page.prose(title, 0, label, style=BOLD, lead_style=style)
    if place is None:  # a hint
        said = [bound, finding.summary if finding.bound_ns <= 0 else "", *(fix.change for fix in finding.fixes[:1])]
        text = "; ".join(piece.rstrip(".") for piece in said if piece)
        page.prose(text or "a hint", 4, f"{rule}: ", lead_style=DIM, hang=4, lines=4)
        _relations(page, diagnosis, finding)
        return
    bound = bound or ("" if finding.ends_run else f"a {finding.severity} without a time of its own")
    page.prose(bound or "what ended the run", 4, f"{rule}: ", lead_style=DIM, hang=4)
    if full:
        page.prose(finding.summary, 4)
        shown = finding.evidence if len(finding.evidence) <= _MOST_EVIDENCE else finding.evidence[: _MOST_EVIDENCE - 1]
        evidence = "; ".join(f"{item.label}: {item.value}" for item in shown)
        more = len(finding.evidence) - len(shown)
        page.prose(evidence + (f"; {more} more in --html" if more else ""), 4, "evidence ", lead_style=DIM)
    if finding.fixes:
        _fix(page, finding.fixes[0], full)
    for fix in finding.fixes[1:3] if place == 0 else ():
        condition = f" (only if {fix.only_if})" if fix.only_if else ""
        page.prose(fix.change + condition, 4, "or       ", lead_style=GREEN, lines=5)
    _relations(page, diagnosis, finding)


def _relations(page: Page, diagnosis: Diagnosis, finding: Finding) -> None:
    """What this finding explains, and what is not worth a look before it is dealt with."""
    for word, under, note in method.relations(diagnosis, finding):
        said = f"{under[0].title} ({under[0].rule})" if len(under) == 1 else ", ".join(e.rule for e in under)
        page.prose(said + (f": {note}" if note else ""), 4, f"{word:<9}", lead_style=DIM, lines=3)


def _fix(page: Page, fix: Fix, full: bool) -> None:
    """The change never without its condition; for the largest findings the proof and the code as well."""
    lines = MOST_LINES if full else 2
    page.prose(fix.change, 4, "change   ", lead_style=GREEN, lines=lines)
    page.prose(fix.only_if, 4, "only if  ", lead_style=DIM, lines=lines)
    if not full:
        return
    page.prose(fix.proof, 4, "proof    ", lead_style=DIM)
    code = clean_code(fix.code) if fix.code.strip() else []
    for line in code[:_MOST_CODE_LINES]:
        page.add(f"      {page.paint('│', DIM)} {page.paint(line, CYAN)}")  # not cut: it is there to be copied
    if len(code) > _MOST_CODE_LINES:
        page.add(f"      {page.paint('│', DIM)} … {len(code) - _MOST_CODE_LINES} more lines in --json")


def _kernels(page: Page, diagnosis: Diagnosis) -> None:
    rows = facts.merged_kernels(diagnosis.kernels)[: 3 if diagnosis.verdict.status == "healthy" else 5]
    if not rows:
        return
    page.add()
    page.heading("Top kernels", "TC: tensor cores used" if page.width >= WIDE else "")
    wide = page.width >= WIDE
    page.add(page.paint(f"  Time %   Total Instances     Avg  {'What        TC  ' * wide}Name", DIM))
    for row in rows:
        cores = "yes" if row.tensor_cores else "no" if row.what in ("gemm", "conv", "attention") else "-"
        what = "collective" if row.what == "communication" else clean(row.what, 11)
        left = f"  {row.share * 100:6.1f} {format_ns(row.total_ns):>7} {row.count:>9,} {format_ns(row.average_ns):>7}  "
        left += f"{what:<11} {cores:<3} " if wide else ""
        page.add(left + short_kernel(row.name, page.width - len(left)))


def _not_judged(page: Page, diagnosis: Diagnosis) -> None:
    groups = list(facts.grouped(diagnosis.not_judged))
    if not groups:
        return
    page.add()
    count = len(diagnosis.not_judged)
    page.heading("Not judged", f"{counted(count, 'rule')}: unknown, not healthy", YELLOW)
    if gpu_rules := facts.about_gpu_work(*groups[0][:2]):
        page.prose(f"{gpu_rules}: {groups.pop(0)[1]}", 2, hang=4)
    counts: dict[str, int] = {}
    for names, _, how in groups:
        counts[how] = counts.get(how, 0) + len(names)
    ways = sorted(counts, key=lambda how: (not how, -counts[how]))  # what judges most comes first
    for how in ways[:_MOST_NOT_JUDGED]:
        rules = [rule for names, _, by in groups if by == how for rule in names]
        reasons = "; ".join(dict.fromkeys(missing for _, missing, by in groups if by == how))
        start = f"{how.rstrip('.')}: " if how else ""
        if len(rules) <= 2:
            page.prose(f"{start}{', '.join(rules)} ({reasons})", 2, hang=4, lines=2)
        elif sum(by == how for _, _, by in groups) == 1:
            page.prose(f"{start}{len(rules)} rules ({reasons})", 2, hang=4, lines=2)
        else:
            page.prose(f"{start}{len(rules)} rules ({', '.join(rules)})", 2, hang=4, lines=1)
    if left := sum(counts[how] for how in ways[_MOST_NOT_JUDGED:]):
        page.add(f"  and {left} more: --html and --json list them with what records each")


def _warnings(page: Page, warnings: Sequence[str]) -> None:
    if not warnings:
        return
    page.add()
    for warning in warnings[:_MOST_WARNINGS]:
        page.prose(warning, 0, "! ", lead_style=YELLOW)
    if len(warnings) > _MOST_WARNINGS:
        page.add(f"  and {len(warnings) - _MOST_WARNINGS} more warnings: --json lists them")


def _next(page: Page, diagnosis: Diagnosis, inputs: Sequence[str]) -> None:
    page.add()
    for i, (command, purpose) in enumerate(facts.next_commands(diagnosis, inputs)):
        lead = "Next: " if i == 0 else "      "
        comment = f"   # {purpose}" if len(lead) + columns(command) + len(purpose) + 5 <= page.width else ""
        page.add(page.paint(lead, BOLD) + page.paint(command, CYAN) + page.paint(comment, DIM))
