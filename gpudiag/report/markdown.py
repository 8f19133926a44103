"""The diagnosis as GitHub-flavoured Markdown, for a pull-request comment: a verdict, two small tables, the rest folded away.

Whatever comes from the recording is escaped: it can neither format, link, mention, close a fold nor leave its table cell.
"""

from __future__ import annotations

import re

from gpudiag.diagnosis import STEP_ORDER, Diagnosis, Finding
from gpudiag.report import facts, method
from gpudiag.report.text import apportion, clean, clean_code, short_kernel
from gpudiag.units import counted, format_ns, format_percent

_SIGN = {"critical": "🔴", "warning": "🟡", "info": "🔵"}
_VERDICT_SIGN = {"bottleneck": "🔴", "healthy": "🟢", "cannot_judge": "⚪"}
_MOST_KERNELS = 10
_LONGEST = 1_000  # characters of one text; GitHub refuses a comment of more than 65,536
_PUNCTUATION = re.compile(r"([\\`*_\[\]|~$])")
_LINE_START = re.compile(r"^(\d*)([-+#=.)])")  # would make a list, a heading or a rule of a line
# GitHub turns these into links and mentions even inside plain text; an empty comment keeps the letters and breaks the spell.
_SPELL = re.compile(r"@(?=\w)|#(?=\d)|\bGH-(?=\d)|\b(?:www|https?|ftp|mailto|xmpp)(?=[.:])", re.IGNORECASE)
_SHELL = ("gpudiag ", "nsys ", "export ", "pip ", "torchrun ", "python ", "sudo ", "nvidia-smi", "$ ", "#!")


def render(diagnosis: Diagnosis) -> str:
    """The comment, ending in a newline."""
    verdict, sentence = diagnosis.verdict, facts.headline(diagnosis)
    lines = [
        f"### {_VERDICT_SIGN[verdict.status]} gpudiag: {facts.verdict_label(diagnosis)}",
        "",
        f"**{escape(sentence[:1].upper() + sentence[1:])}**",
        "",
    ]
    if verdict.margin:
        lines += [escape(verdict.margin), ""]
    lines += [
        f"{escape(facts.steps_line(diagnosis))} · {code(diagnosis.source.path)} · {escape(diagnosis.source.recorder)}",
        "",
    ]
    lines += _account(diagnosis)
    lines += ["| Step | Result |", "|---|---|"]
    for step in method.shown_steps(diagnosis):
        title = (
            facts.STEP_TITLES[step]
            if step == "environment"
            else f"{method.step_number(step)} {facts.STEP_TITLES[step]}"
        )
        lines.append(f"| {title} | {escape(method.step_status(diagnosis, step))} |")
    lines.append("")
    roots = [f for step in STEP_ORDER for f in method.findings_of(diagnosis, step)]
    for finding in [f for f in diagnosis.findings if f in roots]:
        lines += _finding(diagnosis, finding)
    lines += _kernels(diagnosis)
    if diagnosis.not_judged:
        entries = [
            f"- {facts.about_gpu_work(rules, missing) or ', '.join(code(rule) for rule in rules)}: {escape(missing)}"
            + (f"; record: {code(how)}" if how else "")
            for rules, missing, how in facts.grouped(diagnosis.not_judged)
        ]
        lines += _folded(f"Not judged: {counted(len(diagnosis.not_judged), 'rule')} (unknown, not healthy)", entries)
    lines += [f"> ⚠️ {escape(warning)}\n" for warning in diagnosis.warnings]
    lines.append(f"<sub>gpudiag {escape(diagnosis.gpudiag)}</sub>")
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Plain text that Markdown, HTML and GitHub leave alone, also at the start of a line."""
    return _LINE_START.sub(r"\1\\\2", _PUNCTUATION.sub(r"\\\1", escape_html(text)))


def escape_html(text: str) -> str:
    """Plain text inside an HTML block, where Markdown's backslashes would be seen."""
    text = clean(text, _LONGEST).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPELL.sub(r"\g<0><!-- -->", text)


def code(text: str) -> str:
    """A code span, safe inside a table cell as well."""
    text = clean(text, 300).replace("|", "\\|")
    if not text:
        return ""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text[0] in "` " or text[-1] in "` " else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _account(diagnosis: Diagnosis) -> list[str]:
    parts = facts.ordered_parts(facts.summed(diagnosis.accounts))
    if not parts:
        return []
    accounts = diagnosis.accounts
    steps = sum(account.steps for account in accounts)
    together = facts.devices_word(accounts)
    each = f" and {together.split()[1].rstrip('s')} ({together})" if len(accounts) > 1 else ""
    per = f"Per step{each}" if steps else "Recorded"
    lines = [f"| {facts.account_heading(diagnosis)} | Share | {per} |", "|---|--:|--:|"]
    for (name, value), tenths in zip(parts, apportion([value for _, value in parts], 1000), strict=True):
        if tenths:
            lines.append(
                f"| {escape(facts.part_label(name))} | {tenths / 10:.1f} % | {format_ns(value / steps if steps else value)} |"
            )
    return [*lines, ""]


def _finding(diagnosis: Diagnosis, finding: Finding) -> list[str]:
    body = [escape(finding.summary), ""]
    body += [f"- {escape(item.label)}: {escape(item.value)}" for item in finding.evidence]
    for fix in finding.fixes:
        body += ["", f"**Change:** {escape(fix.change)}  "]
        body += [f"**Only if:** {escape(fix.only_if)}  "] if fix.only_if else []
        body += [f"**Proof:** {escape(fix.proof)}"] if fix.proof else []
        body += ["", *_block(fix.code)] if fix.code.strip() else []
    for word, under, note in method.relations(diagnosis, finding):
        listed = "; ".join(f"{escape(one.title)} ({code(one.rule)})" for one in under)
        body += ["", f"{word.capitalize()}: {listed}" + (f" ({note})" if note else "")]
    if finding.wrong_when:
        body += ["", f"Wrong when: {escape(finding.wrong_when)}"]
    summary = f"{_SIGN[finding.severity]} <b>{escape_html(finding.title)}</b>: {escape_html(facts.bound_line(diagnosis, finding))}"
    return _folded(summary, body, opened=finding.severity == "critical")


def _folded(summary: str, body: list[str], opened: bool = False) -> list[str]:
    return [f"<details{' open' if opened else ''}><summary>{summary}</summary>", "", *body, "", "</details>", ""]


def _block(text: str) -> list[str]:
    lines = clean_code(text)
    fence = "`" * max(3, 1 + max((len(run) for line in lines for run in re.findall("`+", line)), default=0))
    return [f"{fence}{'sh' if lines[0].startswith(_SHELL) else 'python'}", *lines, fence]


def _kernels(diagnosis: Diagnosis) -> list[str]:
    rows = facts.merged_kernels(diagnosis.kernels)[:_MOST_KERNELS]
    if not rows:
        return []
    body = ["| Time % | Total | Instances | Avg | What | Tensor cores | Name |", "|--:|--:|--:|--:|---|---|---|"]
    for row in rows:
        body.append(
            f"| {format_percent(row.share)} | {format_ns(row.total_ns)} | {row.count:,} | {format_ns(row.average_ns)} "
            f"| {escape(row.what)} | {'yes' if row.tensor_cores else 'no'} | {code(short_kernel(row.name, 100))} |"
        )
    return _folded("Top kernels", body)
