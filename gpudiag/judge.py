"""Rules and metrics in, findings out: outcome a rule, root cause before symptom, and no nanosecond promised twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from gpudiag.diagnosis import SEVERITY_ORDER, Evidence, Finding, Fix, NotJudged, Relation, Severity
from gpudiag.expr import Env, MetricError, Unknown, evaluate
from gpudiag.metrics.spec import Metric, Missing
from gpudiag.rule import Outcome, Rule
from gpudiag.template import Template, render
from gpudiag.units import format_ns

T = TypeVar("T")

# Outcomes over several devices: the first of these that any device has. "Could not look" is not "healthy".
_OVER_DEVICES: tuple[Outcome, ...] = ("fired", "error", "not_judged", "clear")


@dataclass(frozen=True)
class Judgement:
    """What the rules say of one scope (rank, device) or, merged, of the run.

    outcomes: by rule id. errors: one line for each rule whose outcome is error. step_time_ns: of the (longest) scope.
    """

    findings: tuple[Finding, ...]
    not_judged: tuple[NotJudged, ...]
    outcomes: dict[str, Outcome]
    errors: tuple[str, ...]
    step_time_ns: int


@dataclass(frozen=True)
class Claim:
    """A rule that fired, before causes are weighed. ns: the time it could win back a step, by itself."""

    rule: Rule
    ns: int


@dataclass(frozen=True)
class Grant:
    """ns: what is left of a claim. takers: ns that earlier claims had taken of its parts, by rule id."""

    ns: int
    takers: dict[str, int] = field(default_factory=dict)


def judge(
    rules: Iterable[Rule],
    metrics: Env,
    *,
    step_time_ns: int,
    parts: Mapping[str, float],
    texts: Mapping[str, str] | None = None,
    rank: int = 0,
    device: int = 0,
) -> Judgement:
    """Judge one scope. parts: the account a step (or of the span), ns by part. texts: recorded names by TextSpec name."""
    texts = _phrases(metrics, step_time_ns) | dict(texts or {})
    rules = sorted(rules, key=lambda rule: (not rule.gate, rule.id))
    outcomes: dict[str, Outcome] = {}
    not_judged: list[NotJudged] = []
    errors: list[str] = []
    claims: list[Claim] = []
    closed: Rule | None = None
    for rule in rules:
        if closed and not rule.gate and not rule.always:
            outcomes[rule.id] = "not_judged"
            not_judged.append(NotJudged(rule.id, f"{closed.title[0].lower()}{closed.title[1:]}", _remedy(closed)))
            continue
        try:
            result = _outcome(rule, metrics, texts, step_time_ns)
        except MetricError as error:
            outcomes[rule.id] = "error"
            errors.append(f"rule {rule.id} could not be evaluated: {error}")
            continue
        if isinstance(result, Unknown):
            outcomes[rule.id] = "not_judged"
            not_judged.append(_not_judged(rule.id, result.missing))
        elif result is None:
            outcomes[rule.id] = "clear"
        else:
            outcomes[rule.id] = "fired"
            claims.append(result)
            if rule.gate:
                closed = rule
    findings = _findings(claims, metrics, texts, step_time_ns, parts, (rank, device))
    return Judgement(tuple(findings), tuple(not_judged), outcomes, tuple(errors), step_time_ns)


def _phrases(metrics: Env, step_time_ns: int) -> dict[str, str]:
    """How texts speak of what the times are of."""
    steps = metrics.get("steps")
    if isinstance(steps, Metric) and not steps.value:
        return {"the_step": f"the {format_ns(step_time_ns)} span", "per_step": "in the span"}
    return {"the_step": f"each {format_ns(step_time_ns)} step", "per_step": "a step"}


def _remedy(rule: Rule) -> str:
    change = render(rule.fixes[0].change, {}, {})
    return change if isinstance(change, str) else ""


def _not_judged(rule_id: str, missing: Sequence[Missing]) -> NotJudged:
    reasons = "; ".join(f"{m.name}: {m.reason}" for m in missing)
    return NotJudged(rule_id, reasons, next((m.record_with for m in missing if m.record_with), ""))


def _outcome(rule: Rule, metrics: Env, texts: Mapping[str, str], step_time_ns: int) -> Claim | Unknown | None:
    """A claim when it fires, None when it is clear. Raises MetricError."""
    holds = evaluate(rule.when, metrics)
    if holds is False:
        return None
    # A guard is judged even where the condition cannot be: a run to which the rule does not apply lacks nothing.
    if any(evaluate(guard, metrics) is True for guard in rule.unless):
        return None
    if isinstance(holds, Unknown):
        return holds
    bound = _first([evaluate(expr, metrics) for expr in rule.bound])
    if isinstance(bound, Unknown):
        return bound
    summary = _first([render(template, metrics, texts) for template in rule.summary])
    if isinstance(summary, Unknown):
        return summary
    ns = int(min(max(float(bound), 0.0), step_time_ns))
    if rule.severity.of(ns / step_time_ns if step_time_ns else 0.0) is None:
        return None
    return Claim(rule, ns)


def _first(values: Sequence[T | Unknown]) -> T | Unknown:
    """The first alternative that is known, else the first Unknown."""
    return next((value for value in values if not isinstance(value, Unknown)), values[0])


def cap_bounds(claims: Sequence[Claim], parts: Mapping[str, float]) -> dict[str, Grant]:
    """Grant each claim what is left of its parts; causes take before their symptoms. By rule id.

    The grants of all claims together never exceed the parts, and the grants on a part never exceed that part. A rule
    without parts promises no time, and a claim of "*" takes from any part, last of all.
    """
    left = {name: int(ns) for name, ns in parts.items()}
    taken: dict[str, dict[str, int]] = {name: {} for name in parts}
    grants: dict[str, Grant] = {}
    for claim in in_order(claims):
        names = list(parts) if "*" in claim.rule.part else [name for name in claim.rule.part if name in parts]
        takers: dict[str, int] = {}
        need = claim.ns
        for name in names:
            for taker, ns in taken[name].items():
                takers[taker] = takers.get(taker, 0) + ns
            take = min(need, left[name])
            if take:
                left[name] -= take
                need -= take
                taken[name][claim.rule.id] = take
        grants[claim.rule.id] = Grant(claim.ns - need, takers)
    return grants


def in_order(claims: Sequence[Claim]) -> list[Claim]:
    """Causes before what they explain; else claims on fewer parts first, then the larger, then by id."""
    by_id = {claim.rule.id: claim for claim in claims}
    out: dict[str, Claim] = {}

    def visit(claim: Claim, above: frozenset[str]) -> None:
        for cause in claim.rule.explained_by:
            if cause in by_id and cause not in above and cause not in out:
                visit(by_id[cause], above | {cause})
        out.setdefault(claim.rule.id, claim)

    def breadth(claim: Claim) -> int:
        return 1000 if "*" in claim.rule.part else len(claim.rule.part)

    for claim in sorted(claims, key=lambda c: (breadth(c), -c.ns, c.rule.id)):
        visit(claim, frozenset({claim.rule.id}))
    return list(out.values())


def _findings(
    claims: Sequence[Claim],
    metrics: Env,
    texts: Mapping[str, str],
    step_time_ns: int,
    parts: Mapping[str, float],
    scope: tuple[int, int],
) -> list[Finding]:
    """Explained findings keep the share and severity that they would have alone, and promise nothing (bound 0). Those
    that an earlier step of the method puts off (`after`), and their effects, become info."""
    causes = {claim.rule.id: _declared_cause(claim, claims) for claim in claims}
    notes = {claim.rule.id for claim in claims if not causes[claim.rule.id] and _earlier(claim, claims, step_time_ns)}
    causes |= {claim.rule.id: _earlier(claim, claims, step_time_ns) for claim in claims if claim.rule.id in notes}
    standing = [claim for claim in claims if not causes[claim.rule.id]]
    grants = cap_bounds(standing, parts)
    for claim in standing:
        grant = grants[claim.rule.id]
        if grant.takers and grant.ns * 2 < claim.ns:
            causes[claim.rule.id] = max(sorted(grant.takers), key=grant.takers.__getitem__)
    findings = []
    for claim in claims:
        *below, top = _chain(claim.rule.id, causes)
        relation: Relation = "" if not below else "after" if notes.intersection(below) else "effect"
        ns = claim.ns if below else grants[claim.rule.id].ns
        share = ns / step_time_ns if step_time_ns else 0.0
        severity = "info" if relation == "after" else claim.rule.severity.of(share) or "info"
        finding = _finding(claim.rule, metrics, texts, severity, share, scope)
        if below:
            finding = msgspec.structs.replace(finding, caused_by=top, relation=relation)
        else:
            finding = msgspec.structs.replace(finding, bound_ns=ns)
        findings.append(finding)
    return sort_findings(findings)


def _declared_cause(claim: Claim, claims: Sequence[Claim]) -> str:
    """The largest fired rule of `explained_by` with about this claim's time or more; between equals the first listed.

    About: 80 %, since two measures of one loss differ a little; half for a claim on any part ("*"), which is measured on
    the steps' lengths and holds whatever else varies.
    """
    fired = {other.rule.id: other.ns for other in claims}
    least = max(claim.ns * (0.5 if "*" in claim.rule.part else 0.8), 1)
    able = [rule_id for rule_id in claim.rule.explained_by if fired.get(rule_id, -1) >= least]
    return max(able, key=lambda rule_id: fired[rule_id], default="")


def _earlier(claim: Claim, claims: Sequence[Claim], step_time_ns: int) -> str:
    """The largest rule of `after` that is a warning by itself."""
    able = {
        other.rule.id: other.ns
        for other in claims
        if other.rule.id in claim.rule.after
        and other.rule.severity.of(other.ns / step_time_ns if step_time_ns else 0.0) in ("warning", "critical")
    }
    return max(sorted(able), key=able.__getitem__, default="")


def _chain(rule_id: str, causes: Mapping[str, str]) -> list[str]:
    """The rule, what it is shown under, and so on up to what stands for itself. Ends on a circle."""
    seen = [rule_id]
    while (cause := causes.get(seen[-1], "")) and cause not in seen:
        seen.append(cause)
    return seen


def _finding(
    rule: Rule,
    metrics: Env,
    texts: Mapping[str, str],
    severity: Severity,
    share: float,
    scope: tuple[int, int],
) -> Finding:
    """Without its place among the others (bound, cause)."""
    summary = _first([render(template, metrics, texts) for template in rule.summary])
    evidence = [
        (item.label, render(item.value, metrics, texts))
        for item in rule.evidence
        if item.when is None or evaluate(item.when, metrics) is True
    ]
    return Finding(
        rule=rule.id,
        step=rule.step,
        category=rule.category,
        severity=severity,
        share=share,
        bound_ns=0,
        estimate_ns=None,
        title=rule.title,
        summary=summary if isinstance(summary, str) else rule.title,
        evidence=tuple(Evidence(label, value) for label, value in evidence if isinstance(value, str)),
        where=next((texts[name] for name in rule.where if name in texts), ""),
        fixes=_fixes(rule, metrics, texts),
        why=rule.why,
        basis=rule.basis,
        wrong_when=rule.wrong_when,
        references=rule.references,
        devices=(scope,),
        estimate_reason=rule.no_estimate,
        parts=rule.part,
        ends_run=rule.ends_run,
    )


def _fixes(rule: Rule, metrics: Env, texts: Mapping[str, str]) -> tuple[Fix, ...]:
    """Those that fit what was recorded: their `when` holds and all that they quote is known."""

    def text(template: Template) -> str:
        value = render(template, metrics, texts)
        return value if isinstance(value, str) else ""

    fixes: list[Fix] = []
    for fix in sorted(rule.fixes, key=lambda fix: fix.fallback):
        if fix.fallback and fixes:
            break
        if fix.when and evaluate(fix.when, metrics) is not True:
            continue
        change, only_if, proof = text(fix.change), text(fix.only_if), text(fix.proof)
        if change and only_if and proof:
            fixes.append(Fix(change, only_if, proof, text(fix.code)))
    return tuple(fixes)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """What ended the run, then by bound, then severity, then id (DESIGN 6)."""
    return sorted(findings, key=lambda f: (not f.ends_run, -f.bound_ns, SEVERITY_ORDER.index(f.severity), f.rule))


def merge(judgements: Sequence[Judgement], step_time_ns: int | None = None) -> Judgement:
    """The same rule over devices becomes one finding: the text of the worst device, all devices listed.

    Bounds are cut so that they sum to no more than step_time_ns (that of the scope which the report shows; default the
    longest scope's); shares stay those of the worst device.
    """
    by_rule: dict[str, list[Finding]] = {}
    for judgement in judgements:
        for finding in judgement.findings:
            by_rule.setdefault(finding.rule, []).append(finding)
    merged = []
    for group in by_rule.values():
        worst = max(group, key=lambda f: (not f.caused_by, f.share))
        devices = tuple(sorted({scope for finding in group for scope in finding.devices}))
        merged.append(msgspec.structs.replace(worst, devices=devices))
    if step_time_ns is None:
        step_time_ns = max((j.step_time_ns for j in judgements), default=0)
    left = step_time_ns
    findings = []
    for finding in sort_findings(merged):
        ns = min(finding.bound_ns, left)
        left -= ns
        estimate = None if finding.estimate_ns is None else min(finding.estimate_ns, ns)
        findings.append(msgspec.structs.replace(finding, bound_ns=ns, estimate_ns=estimate))
    outcomes: dict[str, Outcome] = {}
    for rule_id in sorted({rule_id for j in judgements for rule_id in j.outcomes}):
        seen = {j.outcomes[rule_id] for j in judgements if rule_id in j.outcomes}
        outcomes[rule_id] = next(outcome for outcome in _OVER_DEVICES if outcome in seen)
    missing: dict[str, NotJudged] = {}
    for judgement in judgements:
        for item in judgement.not_judged:
            if outcomes[item.rule] == "not_judged":
                missing.setdefault(item.rule, item)
    errors = dict.fromkeys(error for judgement in judgements for error in judgement.errors)
    return Judgement(
        tuple(sort_findings(findings)),
        tuple(missing[rule_id] for rule_id in sorted(missing)),
        outcomes,
        tuple(errors),
        step_time_ns,
    )
