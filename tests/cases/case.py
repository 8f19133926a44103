"""What a case is, and what is wrong with a diagnosis of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from gpudiag.diagnosis import Diagnosis, Finding
from gpudiag.timeline import Timeline

Built = Timeline | tuple[Timeline, ...]
Status = Literal["bottleneck", "healthy", "cannot_judge"]


@dataclass(frozen=True)
class Case:
    """One case of CASES.jsonl (id; a suffix after `:` tells variants apart) as timelines.

    first: rules of which one must be the first finding that stands for itself; empty: none of warning or above may be there.
    also: must be among the findings, under whatever cause. silent: must not stand for themselves. status, bound_by: of the
    verdict, where they matter. says: must be in the report's text; says_not: must not be (both in lower case).
    """

    id: str
    build: Callable[[], Built]
    first: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    status: Status | None = None
    bound_by: str | None = None
    says: tuple[str, ...] = ()
    says_not: tuple[str, ...] = ()


def standing(diagnosis: Diagnosis) -> list[Finding]:
    """Findings that stand for themselves, in the report's order."""
    return [finding for finding in diagnosis.findings if not finding.caused_by]


def first_named(diagnosis: Diagnosis) -> str:
    """The first cause that a reader meets: of warning or above, or else one that claims no time but is no mere note."""
    found = [finding for finding in standing(diagnosis) if finding.severity != "info"]
    return found[0].rule if found else ""


def text_of(diagnosis: Diagnosis) -> str:
    parts = [diagnosis.verdict.headline, diagnosis.verdict.margin, *diagnosis.warnings]
    for finding in standing(diagnosis):
        parts += [finding.title, finding.summary, finding.where]
        parts += [text for fix in finding.fixes for text in (fix.change, fix.code)]
    return "\n".join(parts).lower()


def faults(case: Case, diagnosis: Diagnosis) -> list[str]:
    """What the diagnosis gets wrong, a line each; empty when all is as the case says."""
    wrong = []
    named = first_named(diagnosis)
    if case.first and named not in case.first:
        wrong.append(f"first named: {named or 'nothing'}, not {' or '.join(case.first)}")
    if not case.first and named:
        wrong.append(f"nothing is to be named, but {named} is")
    found = {finding.rule for finding in diagnosis.findings}
    alone = {finding.rule for finding in standing(diagnosis)}
    wrong += [f"{rule} is missing" for rule in case.also if rule not in found]
    wrong += [f"{rule} is said" for rule in case.silent if rule in alone]
    if case.status and diagnosis.verdict.status != case.status:
        wrong.append(f"verdict {diagnosis.verdict.status}, not {case.status}")
    if case.bound_by and diagnosis.verdict.bound_by != case.bound_by:
        wrong.append(f"bound by {diagnosis.verdict.bound_by}, not {case.bound_by}")
    text = text_of(diagnosis)
    wrong += [f"the text lacks {words!r}" for words in case.says if words not in text]
    wrong += [f"the text says {words!r}" for words in case.says_not if words in text]
    return wrong
