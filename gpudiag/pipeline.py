"""The whole program in one place: recordings -> scopes -> metrics -> rules -> diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from gpudiag import __version__
from gpudiag.diagnosis import (
    SCHEMA,
    AccountInfo,
    Diagnosis,
    Finding,
    KernelRow,
    MetricValue,
    NotJudged,
    SourceInfo,
    StepsInfo,
)
from gpudiag.errors import GpudiagError
from gpudiag.evidence import cannot_judge, warnings_of
from gpudiag.kernels import classify
from gpudiag.metrics import measure
from gpudiag.metrics.across import RunFacts, run_facts
from gpudiag.metrics.base import Metric, Missing
from gpudiag.metrics.make import PROFILE
from gpudiag.metrics.run import step_lengths
from gpudiag.metrics.texts import texts_of
from gpudiag.read import Recordings, open_recordings
from gpudiag.rules import Judgement, Outcome, RuleSet, judge, load_rules, merge
from gpudiag.savings import with_estimates
from gpudiag.scope import Scope, room_of, scopes_of, working
from gpudiag.timeline import Kind
from gpudiag.units import format_ns
from gpudiag.verdict import verdict_of
from gpudiag.views import make_views

TOP_KERNELS = 20
Values = Mapping[str, Metric | Missing]


def diagnose(
    paths: Sequence[Path], *, rules_dirs: Sequence[Path] = (), progress: Callable[[str], None] | None = None
) -> Diagnosis:
    """Diagnose what was recorded: files, folders of ranks or a bundle. Raises GpudiagError."""
    recordings = open_recordings(paths, progress)
    diagnosis = diagnose_recordings(recordings, load_rules(rules_dirs), progress)
    if len(recordings.timelines) < 2:
        return diagnosis
    given = ", ".join(str(path) for path in paths)  # no one rank's file stands for the run
    return msgspec.structs.replace(diagnosis, source=msgspec.structs.replace(diagnosis.source, path=given))


def diagnose_recordings(
    recordings: Recordings, rules: RuleSet, progress: Callable[[str], None] | None = None
) -> Diagnosis:
    """Each rank and device is judged by itself; findings of the same rule are then merged."""
    tell = progress or (lambda _text: None)
    scopes: list[Scope] = []
    for timeline in recordings.timelines:
        tell(f"accounting rank {timeline.rank}")
        scopes += scopes_of(timeline)
    if not scopes:
        source = recordings.timelines[0].source
        said = "; ".join(recordings.timelines[0].diagnostics[:3])
        raise GpudiagError(
            f"{source.path}: the recording holds no GPU work, no steps and no operators"
            + (f" ({said})" if said else ""),
            "record again with `gpudiag profile SCRIPT`, or trace CUDA and NVTX",
        )
    facts = run_facts(scopes)
    tell("judging")
    values = [measure(scope, facts) for scope in scopes]
    judgeable = working(scopes)
    main = _main_scope(scopes, values, judgeable)
    scope, metrics = scopes[main], values[main]
    judged = merge(
        [
            _judge(rules, each, known, facts, judgeable)
            for each, known in zip(scopes, values, strict=True)
            if any(each is one for one in judgeable) or each is scope
        ],
        scope.account.total // scope.count,
    )
    timeline = scope.timeline
    return Diagnosis(
        schema=SCHEMA,
        gpudiag=__version__,
        source=SourceInfo(timeline.source.kind, timeline.source.path, timeline.source.recorder, timeline.incomplete),
        verdict=verdict_of(scopes, main, metrics, judged, facts),
        steps=_steps_info(scope),
        accounts=tuple(_account_info(scope) for scope in scopes),
        devices=tuple(scope.figures for scope in scopes if scope.figures is not None),
        metrics={name: _metric_value(metric) for name, metric in metrics.items()},
        findings=judged.findings,
        not_judged=judged.not_judged,
        warnings=_warnings(recordings, scopes, values, judged, rules, facts),
        kernels=tuple(row for scope in scopes for row in kernel_rows(scope)),
        rules=dict(judged.outcomes),
        rule_steps={rule.id: rule.step for rule in rules},
        ranks=_rank_rows(scopes, facts),
        loaders=tuple(msgspec.to_builtins(vars(info)) for info in timeline.loaders),
        environment=dict(recordings.bundle.manifest.environment) if recordings.bundle else {},
        views=make_views(timeline, scope.account),
    )


def _judge(rules: RuleSet, scope: Scope, metrics: Values, facts: RunFacts, others: Sequence[Scope]) -> Judgement:
    count = scope.count
    judged = judge(
        rules,
        metrics,
        step_time_ns=scope.account.total // count,
        parts={part: ns / count for part, ns in scope.parts.items()},
        texts=texts_of(scope, facts),
        rank=scope.rank,
        device=scope.device,
    )
    reason = cannot_judge(scope, metrics)
    if reason:
        return _withheld(judged, rules, reason)
    findings = with_estimates(judged.findings, rules, scope, metrics)
    return replace(judged, findings=tuple(_within_room(findings, rules, scope, others)))


def _within_room(
    findings: Sequence[Finding], rules: RuleSet, scope: Scope, others: Sequence[Scope]
) -> Iterator[Finding]:
    """No device's idle time can be won back below the time for which another device of the run has work of its own."""
    room = room_of(scope, others)
    step = scope.account.total / scope.count
    for finding in findings:
        idle = any(part.startswith(("idle.", "*")) for part in finding.parts)
        if not idle or finding.share <= room:
            yield finding
            continue
        severity = rules.rules[finding.rule].severity.of(room)
        if severity is None:
            continue
        bound = min(finding.bound_ns, int(room * step))
        estimate = None if finding.estimate_ns is None else min(finding.estimate_ns, bound)
        yield msgspec.structs.replace(finding, bound_ns=bound, estimate_ns=estimate, share=room, severity=severity)


def _withheld(judged: Judgement, rules: RuleSet, reason: str) -> Judgement:
    """A recording that cannot be judged leaves only what needs no recording of the work: gates and the environment."""
    kept = {rule.id for rule in rules if rule.gate or rule.step == "environment"}
    outcomes: dict[str, Outcome] = {
        rule: outcome if rule in kept else "not_judged" for rule, outcome in judged.outcomes.items()
    }
    unjudged = tuple(
        NotJudged(rule, reason, PROFILE)
        for rule in outcomes
        if rule not in kept and judged.outcomes[rule] != "not_judged"
    )
    return replace(
        judged,
        findings=tuple(finding for finding in judged.findings if finding.rule in kept),
        not_judged=(*judged.not_judged, *unjudged),
        outcomes=outcomes,
    )


def _main_scope(scopes: Sequence[Scope], values: Sequence[Values], judgeable: Sequence[Scope]) -> int:
    """The device whose metrics and steps the report shows: of those that work and can be judged the one with the least
    compute in its window (the most to win); between equals the first."""

    def rank(i: int) -> tuple[bool, bool, float, int]:
        scope = scopes[i]
        lost = 1 - scope.parts.get("compute", 0) / max(1, scope.account.total)
        return any(scope is one for one in judgeable), not cannot_judge(scope, values[i]), round(lost, 3), -i

    return max(range(len(scopes)), key=rank)


def _steps_info(scope: Scope) -> StepsInfo:
    lengths = step_lengths(scope)
    known = scope.all_steps
    return StepsInfo(
        count=len(scope.steps) or len(known),
        median_ns=int(np.median(lengths)) if lengths.size else None,
        p99_ns=int(np.quantile(lengths, 0.99, method="higher")) if lengths.size else None,
        source=known.source,
        warm_up=int(known.warm_up.sum()),
        confidence=known.confidence,
        durations_ns=tuple(int(ns) for ns in lengths[:10_000]),
    )


def _account_info(scope: Scope) -> AccountInfo:
    account = scope.account
    window = account.window
    return AccountInfo(
        rank=scope.rank,
        device=scope.device,
        scope="steps" if len(account.steps) else "span",
        window_ns=(int(window.start[0]), int(window.end[-1])) if len(window) else (0, 0),
        total_ns=account.total,
        parts=scope.parts,
        steps=len(account.steps),
        per_step=tuple(account.per_step[:2_000]),
    )


def _metric_value(metric: Metric | Missing) -> MetricValue:
    if isinstance(metric, Missing):
        return MetricValue(missing=metric.reason, record_with=metric.record_with)
    number = metric.value
    return MetricValue(value=round(number, 6) if isinstance(number, float) else number, unit=metric.unit)


def kernel_rows(scope: Scope) -> list[KernelRow]:
    """The kernels with most time in the window, communication included; at most TOP_KERNELS."""
    if scope.ops is None:
        return []
    ops = scope.window_ops
    mask = np.isin(ops.kind, (Kind.KERNEL, Kind.COMM, Kind.GRAPH))
    if not mask.any():
        return []
    names, length = ops.name[mask], (ops.end - ops.start)[mask]
    count = np.bincount(names)
    codes = np.flatnonzero(count)
    count = count[codes]
    total = np.rint(np.bincount(names, weights=length)[codes]).astype(np.int64)  # exact below 2**53 ns
    strings = scope.timeline.strings
    order = sorted(range(codes.size), key=lambda i: (-total[i], strings[int(codes[i])]))[:TOP_KERNELS]
    everything = max(1, int(total.sum()))
    rows = []
    for i in order:
        name = strings[codes[i]]
        kind = classify(name)
        rows.append(
            KernelRow(
                name=name,
                what=kind.family,
                count=int(count[i]),
                total_ns=int(total[i]),
                average_ns=int(total[i] // count[i]),
                share=int(total[i]) / everything,
                tensor_cores=kind.tensor_cores,
                rank=scope.rank,
                device=scope.device,
            )
        )
    return rows


def _rank_rows(scopes: Sequence[Scope], facts: RunFacts) -> tuple[dict[str, object], ...]:
    """One row a rank and device when there are several."""
    if len(scopes) < 2:
        return ()
    rows: list[dict[str, object]] = []
    for scope in scopes:
        row: dict[str, object] = {
            "rank": scope.rank,
            "device": scope.device,
            "step_ns": scope.account.total // scope.count,
        }
        if scope.ops is not None:
            idle = sum(ns for part, ns in scope.parts.items() if part.startswith("idle."))
            row["busy"] = 1 - idle / max(1, scope.account.total)
        if facts.alignment is not None and scope.rank in facts.alignment.offset_ns:
            row |= {"clock_offset_ns": facts.alignment.offset_ns[scope.rank], "aligned_by": facts.alignment.source}
        mine = facts.stragglers.get(scope.rank)
        if mine is not None:
            row |= {
                "comm_ns": mine.comm_ns,
                "comm_wait_ns": mine.wait_ns,
                "came_last": mine.last,
                "collectives": facts.collectives,
                "late": scope.rank in facts.late_ranks,
            }
        rows.append(row)
    return tuple(rows)


def _places(some: Sequence[Scope], scopes: Sequence[Scope]) -> str:
    """What a sentence about some of several devices calls them: by rank where there are several, and by device."""
    if len(some) > 8:
        return f"{len(some)} of {len(scopes)} devices"
    if len({one.rank for one in scopes}) == 1:
        return ", ".join("CPU" if one.ops is None else f"GPU {one.device}" for one in some)
    named = []
    for rank in dict.fromkeys(one.rank for one in some):
        mine = [one for one in some if one.rank == rank]
        whole = len(mine) == sum(one.rank == rank for one in scopes)
        named += [f"rank {rank}"] if whole else [f"rank {rank}, GPU {one.device}" for one in mine]
    return "; ".join(named)


def _warnings(
    recordings: Recordings,
    scopes: Sequence[Scope],
    values: Sequence[Values],
    judged: Judgement,
    rules: RuleSet,
    facts: RunFacts,
) -> tuple[str, ...]:
    said = list(recordings.warnings)
    said_by: dict[str, list[Scope]] = {}
    for scope, metrics in zip(scopes, values, strict=True):
        for warning in dict.fromkeys(warnings_of(scope, metrics)):
            said_by.setdefault(warning, []).append(scope)
    for warning, some in said_by.items():
        said.append(warning if len(some) == len(scopes) else f"{_places(some, scopes)}: {warning}")
    clocks = facts.alignment
    if clocks is not None and clocks.source == "collectives" and clocks.disagree_ns is not None:
        said.append(
            f"the ranks' clocks disagree by up to {format_ns(clocks.disagree_ns)}: ranks are aligned by their collectives"
        )
    said += judged.errors
    said += rules.notes
    return tuple(dict.fromkeys(said))
