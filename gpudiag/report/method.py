"""The steps of the method as every report tells them: which findings stand in a step, which are shown under others, and how."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.diagnosis import STEP_ORDER, Diagnosis, Finding, NotJudged, StepName
from gpudiag.report.facts import STEP_TITLES, reason
from gpudiag.report.text import clean
from gpudiag.units import counted


def findings_of(diagnosis: Diagnosis, step: StepName) -> list[Finding]:
    """The findings of a step that stand for themselves, in the diagnosis's order. Those explained by another are `effects_of` it."""
    present = {finding.rule for finding in diagnosis.findings}
    return [f for f in diagnosis.findings if f.step == step and (f.caused_by not in present or f.caused_by == f.rule)]


def effects_of(diagnosis: Diagnosis, cause: Finding) -> list[Finding]:
    """What is shown under a finding, whatever their relation."""
    return [f for f in diagnosis.findings if f.caused_by == cause.rule != f.rule]


def relations(diagnosis: Diagnosis, cause: Finding) -> list[tuple[str, list[Finding], str]]:
    """What is shown under a finding as (word, findings, note): those that it explains, those without a time of their own
    that belong to it, and those that the method puts after it."""
    explained, beside, later = _by_relation(effects_of(diagnosis, cause))
    groups = [
        ("explains", explained, ""),
        ("see also", beside, ""),
        ("later", later, "look again when the GPU is busy"),
    ]
    return [(word, findings, note) for word, findings, note in groups if findings]


def _by_relation(under: Sequence[Finding]) -> tuple[list[Finding], list[Finding], list[Finding]]:
    """Explained by another finding, without a time of their own, put off until after another."""
    later = [f for f in under if f.relation == "after"]
    explained = [f for f in under if f not in later and f.share > 0]
    return explained, [f for f in under if f not in later and f not in explained], later


def relation_sentence(finding: Finding, cause: str) -> str:
    """How a finding stands to the one that it is shown under; cause: what the report calls that one."""
    if finding.relation == "after":
        return f"Comes after {cause}: mend that first, and look again when the GPU is busy."
    if finding.share > 0:
        return f"Explained by {cause}: mend that first, then look again. Its time is counted there."
    return f"Belongs to {cause}, and costs no time of its own."


def not_judged_of(diagnosis: Diagnosis, step: StepName) -> list[NotJudged]:
    return [n for n in diagnosis.not_judged if diagnosis.rule_steps.get(n.rule) == step]


def clear_count(diagnosis: Diagnosis, step: StepName) -> int:
    """How many rules of a step were judged and found nothing."""
    return sum(
        1 for rule, outcome in diagnosis.rules.items() if outcome == "clear" and diagnosis.rule_steps.get(rule) == step
    )


def is_clear(diagnosis: Diagnosis, step: StepName) -> bool:
    """Whether rules of a step were judged and found nothing. Of a run that cannot be judged only the machine can be clear:
    what else was judged is that it cannot be."""
    judged = diagnosis.verdict.status != "cannot_judge" or step == "environment"
    return clear_count(diagnosis, step) > 0 and (judged or not not_judged_of(diagnosis, step))


def step_status(diagnosis: Diagnosis, step: StepName) -> str:
    """What is known of a step in a few words: `2 findings`, `1 finding, explained under step 4`,
    `all clear (7 rules), 1 not judged`, `cannot judge: no copies recorded`."""
    own = findings_of(diagnosis, step)
    under = [f for f in diagnosis.findings if f.step == step and f not in own]
    clear, blind = clear_count(diagnosis, step), not_judged_of(diagnosis, step)
    unseen = f", {len(blind)} not judged" if blind else ""
    if own or under:
        count = len(own) + len(under)
        clauses = [counted(count, "finding")]
        explained, beside, later = _by_relation(under)
        for some, word, other in (
            (explained, "explained under", "explained by another"),
            (beside, "shown under", "shown under another"),
            (later, "put off by", "put off by another"),
        ):
            if some:
                number = "" if len(some) == count else f"{len(some)} "
                place = _place_of_causes(diagnosis, some, step)
                clauses.append(f"{number}{word} {place}" if place else number + other)
        return ", ".join(clauses) + unseen
    if is_clear(diagnosis, step):
        return f"all clear ({counted(clear, 'rule')}){unseen}"
    if blind:  # of half a file nothing is known to be absent
        return f"cannot judge: {clean(diagnosis.source.incomplete) or reason(blind[0].missing)}"
    return "cannot judge" if diagnosis.verdict.status == "cannot_judge" else "no finding"


def _place_of_causes(diagnosis: Diagnosis, findings: Sequence[Finding], here: StepName) -> str:
    """`step 4`, `steps 1 and 4`; "" where all lie in this step itself."""
    causes = {finding.caused_by for finding in findings}
    places = {f.step for f in diagnosis.findings if f.rule in causes}
    if places == {here}:
        return ""
    numbers = [str(i) for i, step in enumerate(STEP_ORDER, 1) if step in places and step != "environment"]
    names = [f"step{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)}"] if numbers else []
    names += [STEP_TITLES["environment"]] if "environment" in places else []
    return " and ".join(names)


def shown_steps(diagnosis: Diagnosis) -> list[StepName]:
    """The four steps, and the machine where any rule about it was judged or tried; the step with what ended the run first."""
    tried = {*diagnosis.rule_steps.values(), *(f.step for f in diagnosis.findings)}
    shown = [step for step in STEP_ORDER if step != "environment" or step in tried]
    fatal = {f.step for f in diagnosis.findings if f.ends_run}
    return sorted(shown, key=lambda step: step not in fatal)


def step_number(step: StepName) -> int:
    """A step's number in the method, whatever is shown first."""
    return STEP_ORDER.index(step) + 1
