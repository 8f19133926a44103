"""The HTML report: one file that opens from disk, loads nothing, and is read from top to bottom or by keyboard."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gpudiag.diagnosis import SEVERITY_ORDER, AccountInfo, Diagnosis, Finding, Severity
from gpudiag.report import facts, method
from gpudiag.report.html_tables import environment_rows, kernel_rows, metric_rows, missing_groups, run_tables
from gpudiag.report.palette import ALL_STYLES, part_style
from gpudiag.report.picture import Picture, in_page_order, pictures, script_data
from gpudiag.report.step_chart import MAX_BARS, step_chart
from gpudiag.report.text import apportion, clean, clean_code
from gpudiag.units import counted, format_ns, format_percent

TEMPLATES = Path(__file__).parent / "templates"
MAX_ACCOUNTS = 16
MAX_CHARTS = 8
_UNIT = re.compile(r"(?<=\d) (?=(?:%|[nuµm]?s|min|[kMGT]?B(?:/s)?)(?:\W|$))")  # a number stays with its unit
STATUS = {"bottleneck": "Bottleneck", "healthy": "Healthy", "cannot_judge": "Cannot judge"}
GLYPHS = {"bottleneck": "▲", "healthy": "✓", "cannot_judge": "?"}
SEVERITY_GLYPHS: dict[Severity, str] = {"critical": "▲", "warning": "◆", "info": "●"}


def render(diagnosis: Diagnosis) -> str:
    """The whole document. Every text of the recording is escaped, and what would turn or hide text is spelled out."""
    shown = pictures(diagnosis)
    script = _source("timeline.js") + _source("report.js")
    status = STATUS[diagnosis.verdict.status]
    if diagnosis.verdict.status == "bottleneck" and diagnosis.verdict.bound_by != "none":
        status += f": {diagnosis.verdict.bound_by}"
    kernels, more_kernels = kernel_rows(diagnosis)
    findings = [
        _finding(diagnosis, number, finding, shown) for number, finding in enumerate(in_page_order(diagnosis), 1)
    ]
    path = _path(diagnosis, findings)
    page = _environment().get_template("report.html")
    text = page.render(
        d=diagnosis,
        name=clean(re.split(r"[/\\]", diagnosis.source.path.rstrip("/\\"))[-1], 90) or "recording",
        status=status,
        glyph=GLYPHS[diagnosis.verdict.status],
        css=Markup(_environment().get_template("report.css").render(parts=ALL_STYLES)),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=script_data(diagnosis, shown),
        first=_first(diagnosis, findings),
        figures=_figures(diagnosis),
        accounts=_accounts(diagnosis),
        more_accounts=max(0, len(diagnosis.accounts) - MAX_ACCOUNTS),
        path=path,
        views=shown,
        step_charts=_step_charts(diagnosis),
        findings_lead=_findings_lead(diagnosis),
        kernels=kernels,
        kernels_lead=more_kernels,
        not_judged=missing_groups(diagnosis),
        tables=run_tables(diagnosis),
        metrics=metric_rows(diagnosis),
        environment=environment_rows(diagnosis),
    )
    # Lone surrogates (bytes that were no UTF-8) cannot be written to a file.
    return text.encode("utf-8", "replace").decode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clean"] = clean
    environment.filters["joined"] = lambda text: _UNIT.sub("\u00a0", text)
    return environment


@cache
def _source(name: str) -> str:
    return (TEMPLATES / name).read_text("utf-8")


def account_title(diagnosis: Diagnosis, account: AccountInfo) -> str:
    many = len({a.rank for a in diagnosis.accounts}) > 1
    label = facts.device_label(account.rank, account.device, many)
    label = _upper(label)
    name = next((d.name for d in diagnosis.devices if (d.rank, d.device) == (account.rank, account.device)), "")
    return f"{label}, {clean(name, 60)}" if name else label


def _first(diagnosis: Diagnosis, findings: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The best fix of the finding with most to win, when the verdict names a bottleneck."""
    if diagnosis.verdict.status != "bottleneck" or not diagnosis.findings or not diagnosis.findings[0].fixes:
        return None
    number = in_page_order(diagnosis).index(diagnosis.findings[0]) + 1
    return {"number": number, "change": findings[number - 1]["fixes"][0]["change"]}


def _step_charts(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """The first device in full, a few more with fewer bars."""
    shown = [account for account in diagnosis.accounts if len(account.per_step) > 1][:MAX_CHARTS]
    bars = (MAX_BARS, *[MAX_BARS // 6] * MAX_CHARTS)
    return [
        step_chart(account, account_title(diagnosis, account), most) for account, most in zip(shown, bars, strict=False)
    ]


def _figures(diagnosis: Diagnosis) -> list[dict[str, str]]:
    """The few numbers that a reader wants before anything else."""
    found = []
    steps = diagnosis.steps
    if steps.median_ns is not None:
        note = f"of {counted(steps.count, 'steady step')}"
        found.append({"label": "Median step", "value": format_ns(steps.median_ns), "note": note})
        if steps.p99_ns is not None and steps.count > 1:
            found.append({"label": "Step, 99th percentile", "value": format_ns(steps.p99_ns), "note": ""})
    gpus = [account for account in diagnosis.accounts if account.device >= 0]
    total = sum(account.total_ns for account in gpus)
    if total:
        parts = facts.summed(gpus)
        idle = sum(ns for name, ns in parts.items() if name.startswith("idle."))
        found.append({"label": "GPU computes", "value": format_percent(parts.get("compute", 0) / total), "note": ""})
        found.append({"label": "GPU idle", "value": format_percent(idle / total), "note": ""})
    if diagnosis.findings and diagnosis.findings[0].bound_ns:
        first = diagnosis.findings[0]
        found.append({"label": "Most to win", "value": format_ns(first.bound_ns), "note": _per(diagnosis, first)})
    return found


def _per(diagnosis: Diagnosis, finding: Finding) -> str:
    """What a finding's time is per: a step, or the span of the devices that it holds for."""
    scopes = {
        account.scope
        for account in diagnosis.accounts
        if not finding.devices or (account.rank, account.device) in finding.devices
    }
    return "a step" if "steps" in scopes else "of the recording"


def _accounts(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    shown = [
        _account(
            *_account_words(diagnosis, account),
            account.parts,
            compact=len(diagnosis.accounts) > 1,
        )
        for account in diagnosis.accounts[:MAX_ACCOUNTS]
        if account.total_ns
    ]
    if len(diagnosis.accounts) > 1:
        about = f"{len(diagnosis.accounts)} added up"
        everything = facts.summed(diagnosis.accounts)
        if sum(everything.values()):
            shown.insert(0, _account("All devices", about, everything, compact=False))
    return shown


def _account_words(diagnosis: Diagnosis, account: AccountInfo) -> tuple[str, str]:
    """What stands over a bar: alone in full, among others in short."""
    time = format_ns(account.total_ns)
    if len(diagnosis.accounts) > 1:
        many = len({a.rank for a in diagnosis.accounts}) > 1
        return _upper(facts.device_label(account.rank, account.device, many)), time
    over = f"over {counted(account.steps, 'steady step')}" if account.scope == "steps" else "over the whole recording"
    if diagnosis.source.incomplete:
        over = over.replace("the whole recording", "all of it") + " in what could be read"
    return account_title(diagnosis, account), f"{over}, {time}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _account(title: str, about: str, parts: dict[str, int], compact: bool) -> dict[str, Any]:
    ordered = facts.ordered_parts(parts)
    total = sum(ns for _, ns in ordered)
    # Tenths of a percent by largest remainder, so that the printed ones sum to 100.
    tenths = apportion([ns for _, ns in ordered], 1000)
    rows = []
    for (name, ns), share in zip(ordered, tenths, strict=True):
        style = part_style(name)
        rows.append(
            {
                "label": style.label,
                "css": style.css,
                "idle": style.idle,
                "ns": ns,
                "share": ns / total,
                "percent": f"{share / 10:.1f} %" if share else "<0.1 %",
                "time": format_ns(ns),
            }
        )
    meanings = [
        (part_style(name).label.removeprefix("idle: "), facts.PART_MEANINGS[name])
        for name, ns in ordered
        if name in facts.PART_MEANINGS and ns >= facts.NOTABLE_PART * total and not compact
    ]
    return {"title": title, "about": about, "parts": rows, "compact": compact, "meanings": meanings}


def _path(diagnosis: Diagnosis, findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of the method with what was found in each. state: critical | warning | info | elsewhere | clear
    | blind."""
    path: list[dict[str, Any]] = []
    state: str
    for step in method.shown_steps(diagnosis):
        mine = [finding for finding in findings if finding["step"] == step]
        standing = method.findings_of(diagnosis, step)
        if standing:
            worst = min((f.severity for f in standing), key=SEVERITY_ORDER.index)
            state, glyph = worst, SEVERITY_GLYPHS[worst]
        elif mine:
            state, glyph = "elsewhere", "↳"
        else:
            clear = method.is_clear(diagnosis, step)
            state, glyph = ("clear", "✓") if clear else ("blind", "?" if method.not_judged_of(diagnosis, step) else "–")
        says = method.step_status(diagnosis, step)
        path.append(
            {
                "id": step,
                "number": method.step_number(step) if step != "environment" else "+",
                "title": facts.STEP_TITLES[step],
                "state": state,
                "glyph": glyph,
                "says": clean(says, 160),
                "findings": mine,
            }
        )
    return path


def _findings_lead(diagnosis: Diagnosis) -> str:
    clear = sum(outcome == "clear" for outcome in diagnosis.rules.values())
    judged = f" {clear} {'rule was' if clear == 1 else 'rules were'} judged and found nothing." if clear else ""
    if not diagnosis.findings:
        return f"No rule fired.{judged}"
    return (
        "“At most” is the time that would be won if this cost were gone entirely; “estimate” replays the step without it. "
        f"Mend earlier steps first: they often explain what shows up later.{judged}"
    )


def _finding(diagnosis: Diagnosis, number: int, finding: Finding, shown: list[Picture]) -> dict[str, Any]:
    causes = {f.rule: n for n, f in reversed(list(enumerate(in_page_order(diagnosis), 1)))}
    many_ranks = len({account.rank for account in diagnosis.accounts}) > 1
    devices = [facts.device_label(rank, device, many_ranks) for rank, device in finding.devices]
    evidence = []
    for item in finding.evidence:
        place = next((found for picture in shown if (found := picture.place(finding, item))), None)
        view, start, end = place or (None, 0, 0)
        evidence.append(
            {"label": clean(item.label, 300), "value": clean(item.value, 600), "view": view, "start": start, "end": end}
        )
    around = next((found for picture in shown if (found := picture.longest(finding))), None)
    return {
        "number": number,
        "around": None if any(item["view"] is not None for item in evidence) else around,
        "step": finding.step,
        "severity": finding.severity,
        "glyph": SEVERITY_GLYPHS[finding.severity],
        "rule": clean(finding.rule, 80),
        "title": clean(finding.title, 300),
        "summary": clean(finding.summary, 2000),
        "where": clean(finding.where, 200),
        "caused_by": clean(finding.caused_by, 80),
        "cause": causes.get(finding.caused_by),
        "relation": method.relation_sentence(finding, "\0").split("\0") if finding.caused_by else None,
        "bound": format_ns(finding.bound_ns) if finding.bound_ns else "",
        "per": _per(diagnosis, finding),
        "share": format_percent(finding.share),
        "width": round(100 * min(max(finding.share, 0.0), 1.0), 1),
        "estimate": format_ns(finding.estimate_ns) if finding.estimate_ns is not None else "",
        "estimate_reason": clean(finding.estimate_reason, 300) if finding.bound_ns else "",
        "evidence": evidence,
        "fixes": [
            {
                "change": clean(fix.change, 600),
                "only_if": clean(fix.only_if, 600),
                "proof": clean(fix.proof, 600),
                "code": "\n".join(clean_code(fix.code)) if fix.code else "",
            }
            for fix in finding.fixes
        ],
        "why": clean(finding.why, 3000),
        "basis": clean(finding.basis, 2000),
        "wrong_when": clean(finding.wrong_when, 2000),
        "references": [
            {"text": clean(text, 400), "link": text.startswith(("https://", "http://"))} for text in finding.references
        ],
        "devices": ", ".join(devices[:16]) + (f" and {len(devices) - 16} more" if len(devices) > 16 else ""),
    }
