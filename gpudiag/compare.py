"""Two sides, one or several recordings each: is it the same work, is it faster, and where did the time go?

The step time is the median. Its uncertainty comes from what there is: with several rounds a side from the rounds, else from
the steps of the one recording, which knows nothing of the spread from run to run (and `notes` says so). A spread of the
rounds over 10 % is not settled (the method's threshold, the same as the benchmark's).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from gpudiag import __version__
from gpudiag.comparison import (
    SCHEMA,
    Comparison,
    FindingChange,
    Gain,
    MetricChange,
    Outcome,
    PartChange,
    SideInfo,
    StepChange,
)
from gpudiag.diagnosis import Diagnosis, Finding
from gpudiag.errors import GpudiagError
from gpudiag.same_work import differences_of
from gpudiag.step_change import LEAST_STEPS, SETTLED_SPREAD, interval_text, judge_gate, signed, step_change
from gpudiag.units import format_ns, format_percent

MOST_SAMPLES = 2_000


def compare(before: Sequence[Diagnosis], after: Sequence[Diagnosis], *, gate: float | None = None) -> Comparison:
    """before, after: one diagnosis a round, in any order. gate: percent that `after` may be slower.

    Raises GpudiagError when a side holds no diagnosis.
    """
    for name, side in (("before", before), ("after", after)):
        if not side:
            raise GpudiagError(f"the {name} side holds no recording", "name at least one recording a side")
        if len(set(_fingerprints(side))) < len(side):
            raise GpudiagError(f"the {name} side holds one recording twice", "name each round once")
    infos = side_info(before), side_info(after)
    by_round = all(info.rounds > 1 for info in infos)
    samples = _samples(before, infos[0], by_round), _samples(after, infos[1], by_round)
    shown = before[infos[0].shown], after[infos[1].shown]
    differences = differences_of(*infos, *shown)
    on_cpu = not any(_has_gpu_work(d) for d in (*before, *after))
    blockers = (*_unfit("before", infos[0], before, on_cpu), *_unfit("after", infos[1], after, on_cpu))
    blockers = blockers or tuple(f"{d.what}: {d.before} before, {d.after} after" for d in differences if d.blocks)
    same = _fingerprints(before) == _fingerprints(after)  # then nothing is measured
    step = step_change(
        infos,
        samples,
        (_mean_samples(before, infos[0], by_round), _mean_samples(after, infos[1], by_round)),
        same,
    )
    outcome = _outcome(step, blockers)
    account = _account(*shown)
    findings = _findings(*shown)
    known = all(info.kernels_per_step is not None for info in infos)
    result = Comparison(
        schema=SCHEMA,
        gpudiag=__version__,
        outcome=outcome,
        headline=_headline(outcome, infos, step, blockers, same),
        before=msgspec.structs.replace(infos[0], sample_ns=samples[0][:MOST_SAMPLES]),
        after=msgspec.structs.replace(infos[1], sample_ns=samples[1][:MOST_SAMPLES]),
        same_work="differs" if differences else "same" if known or same else "unknown",
        differences=differences,
        step=step,
        account=account,
        findings=findings,
        gain=_gain(infos, findings),
        metrics=_metrics(*shown),
        blockers=blockers,
        notes=_notes(infos, shown, step, same),
    )
    return result if gate is None else msgspec.structs.replace(result, gate=judge_gate(result, gate))


def side_info(rounds: Sequence[Diagnosis]) -> SideInfo:
    """What one side is: its medians over the rounds, and the round that stands for it."""
    scope = "steps" if all(_has_steps(d) for d in rounds) else "span"
    times = [_time(d, scope) for d in rounds]
    known = [ns for ns in times if ns is not None]
    median = float(np.median(known)) if known else None
    shown = min(
        range(len(rounds)), key=lambda i: (abs((times[i] or 0) - (median or 0)) if times[i] is not None else 1e30, i)
    )
    diagnosis = rounds[shown]
    return SideInfo(
        paths=tuple(d.source.path for d in rounds),
        recorder=diagnosis.source.recorder,
        scope="steps" if scope == "steps" else "span",
        status=diagnosis.verdict.status,
        bound_by=diagnosis.verdict.bound_by,
        headline=diagnosis.verdict.headline,
        rounds=len(rounds),
        shown=shown,
        round_ns=tuple(known),
        spread=(max(known) - min(known)) / median if median and len(known) > 1 else None,
        steps=diagnosis.steps.count if scope == "steps" else 0,
        median_ns=None if median is None else round(median),
        p99_ns=diagnosis.steps.p99_ns if scope == "steps" else None,
        mean_ns=_mean(diagnosis, scope),
        gpus=tuple(f.name for f in diagnosis.devices),
        ranks=len({a.rank for a in diagnosis.accounts}),
        kernels=sum(f.kernels for f in diagnosis.devices),
        kernels_per_step=_value(diagnosis, "kernels_per_step") if scope == "steps" else None,
        batch_size=_batch_size(diagnosis),
    )


def _has_steps(diagnosis: Diagnosis) -> bool:
    return diagnosis.steps.median_ns is not None and any(a.scope == "steps" for a in diagnosis.accounts)


def _time(diagnosis: Diagnosis, scope: str) -> int | None:
    """The median step; without steps the length of what was recorded."""
    if scope == "steps":
        return diagnosis.steps.median_ns
    return max((a.total_ns for a in diagnosis.accounts), default=0) or None


def _mean(diagnosis: Diagnosis, scope: str) -> int | None:
    if scope == "span":
        return _time(diagnosis, scope)
    counted = [a for a in diagnosis.accounts if a.steps]
    return round(sum(a.total_ns for a in counted) / sum(a.steps for a in counted)) if counted else None


def _value(diagnosis: Diagnosis, name: str) -> float | None:
    metric = diagnosis.metrics.get(name)
    return None if metric is None or metric.value is None else float(metric.value)


def _batch_size(diagnosis: Diagnosis) -> int | None:
    """Of the DataLoader that delivered most: a second one is usually for validation."""
    loaders = [loader for loader in diagnosis.loaders if isinstance(loader.get("batch_size"), int)]
    best = max(loaders, key=lambda loader: loader.get("batches") or 0, default=None)
    return None if best is None else int(best["batch_size"])


def _unfit(name: str, side: SideInfo, rounds: Sequence[Diagnosis], on_cpu: bool) -> tuple[str, ...]:
    """on_cpu: neither side holds GPU work, which does not keep their steps from being compared."""
    for number, diagnosis in enumerate(rounds, 1):
        which = f"round {number} of the {name} side" if len(rounds) > 1 else f"the {name} side"
        if on_cpu and side.scope != "steps":
            return (f"{which} holds no GPU work and no steps",)
        if not on_cpu and not _has_gpu_work(diagnosis):
            return (f"{which} holds no GPU work",)
        if diagnosis.verdict.status == "cannot_judge":
            return (f"{which} cannot be judged by itself: {diagnosis.verdict.headline}",)
    return () if side.median_ns else (f"the {name} side has no step time",)


def _has_gpu_work(diagnosis: Diagnosis) -> bool:
    return any(figures.busy_ns for figures in diagnosis.devices)


def _fingerprints(side: Sequence[Diagnosis]) -> list[str]:
    """What tells recordings apart, whatever they are called: no two runs agree in every time to the ns."""
    return sorted(repr((d.steps.durations_ns, [a.window_ns for a in d.accounts], d.devices)) for d in side)


def _samples(rounds: Sequence[Diagnosis], side: SideInfo, by_round: bool) -> tuple[int, ...]:
    if by_round or side.scope == "span":
        return side.round_ns
    return rounds[side.shown].steps.durations_ns


def _mean_samples(rounds: Sequence[Diagnosis], side: SideInfo, by_round: bool) -> tuple[int, ...]:
    if by_round and side.scope == "steps":
        return tuple(round(float(np.mean(d.steps.durations_ns))) for d in rounds if d.steps.durations_ns)
    return _samples(rounds, side, by_round)


def _outcome(step: StepChange, blockers: Sequence[str]) -> Outcome:
    if blockers:
        return "cannot_judge"
    if not step.settled:
        return "not_settled"
    if step.low is None or step.high is None or step.low <= 0 <= step.high:
        return "no_change"
    return "faster" if step.high < 0 else "slower"


def _headline(
    outcome: Outcome, sides: tuple[SideInfo, SideInfo], step: StepChange, blockers: Sequence[str], same: bool
) -> str:
    if blockers:
        return "; ".join(blockers)
    old, new = sides[0].median_ns, sides[1].median_ns
    assert old is not None and new is not None and step.change is not None, "a side without a time is a blocker"
    what = "median step" if sides[0].scope == "steps" else "recording"
    times = f"the {what} goes from {format_ns(old)} to {format_ns(new)}, {signed(step.change)}"
    if same:
        return f"both sides are the same recording: the {what} takes {format_ns(old)}"
    if outcome == "not_settled":
        noisy = [
            f"the {name} side's rounds differ by {format_percent(side.spread)}"
            for name, side in zip(("before", "after"), sides, strict=True)
            if side.spread is not None and side.spread > SETTLED_SPREAD
        ]
        few = f"fewer than {LEAST_STEPS} steps a side do" if sides[0].scope == "steps" else "one recording a side does"
        why = " and ".join(noisy) or f"{few} not show the spread"
        return f"{times}, but {why}"
    if outcome == "no_change":
        return f"{times}, which cannot be told from none ({interval_text(step)})"
    kind = "rounds from" if step.sample == "rounds" else f"{round(step.confidence * 100)} % interval"
    return f"{times} ({kind} {interval_text(step)})"


def _account(before: Diagnosis, after: Diagnosis) -> tuple[PartChange, ...]:
    old, new = _parts(before), _parts(after)
    names = sorted({*old, *new})
    changes = [PartChange(n, a := round(old.get(n, 0)), b := round(new.get(n, 0)), b - a) for n in names]
    return tuple(c for c in changes if c.before_ns or c.after_ns)


def _parts(diagnosis: Diagnosis) -> dict[str, float]:
    """Each part in ns a step and device; of the span a device where there are no steps."""
    accounts = [a for a in diagnosis.accounts if a.steps] if _has_steps(diagnosis) else diagnosis.accounts
    count = sum(a.steps for a in accounts) or max(1, len(accounts))
    parts: dict[str, float] = {}
    for account in accounts:
        for name, ns in account.parts.items():
            parts[name] = parts.get(name, 0) + ns / count
    return parts


def _findings(before: Diagnosis, after: Diagnosis) -> tuple[FindingChange, ...]:
    """In the order of the sides: what was found before, largest first, then what is new."""
    old, new = {f.rule: f for f in before.findings}, {f.rule: f for f in after.findings}
    changes = []
    for rule in [*old, *(rule for rule in new if rule not in old)]:
        was, now = old.get(rule), new.get(rule)
        found = was or now
        assert found is not None
        elsewhere = "fired" if was and now else (after if was else before).rules.get(rule, "not_judged")
        gone = was is not None and now is None and elsewhere == "clear"
        status = "unchanged" if was and now else "unknown" if elsewhere != "clear" else "gone" if was else "new"
        predicted, by = _predicted(was) if was is not None and gone else (None, "")
        changes.append(
            FindingChange(
                rule=rule,
                title=found.title,
                status=status,  # type: ignore[arg-type]
                elsewhere=elsewhere,
                before_bound_ns=None if was is None else was.bound_ns,
                after_bound_ns=None if now is None else now.bound_ns,
                predicted_ns=predicted,
                predicted_by=by,
                caused_by=(now or found).caused_by,
            )
        )
    return tuple(changes)


def _predicted(finding: Finding) -> tuple[int | None, str]:
    if finding.caused_by or finding.bound_ns <= 0:
        return None, ""
    if finding.estimate_ns is not None:
        return finding.estimate_ns, "estimate"
    return finding.bound_ns, "bound"


def _gain(sides: tuple[SideInfo, SideInfo], findings: Sequence[FindingChange]) -> Gain:
    old, new = sides[0].mean_ns, sides[1].mean_ns
    promised = [f.predicted_ns for f in findings if f.predicted_ns is not None]
    predicted = min(sum(promised), old) if promised and old is not None else None
    return Gain(predicted, old - new if old is not None and new is not None else None)


def _metrics(before: Diagnosis, after: Diagnosis) -> tuple[MetricChange, ...]:
    changes = []
    for name, metric in before.metrics.items():
        other = after.metrics.get(name)
        if metric.value is not None and other is not None and other.value is not None and metric.unit == other.unit:
            changes.append(MetricChange(name, metric.unit, float(metric.value), float(other.value)))
    return tuple(changes)


def _notes(
    sides: tuple[SideInfo, SideInfo], shown: tuple[Diagnosis, Diagnosis], step: StepChange, same: bool
) -> tuple[str, ...]:
    notes = []
    single = [name for name, side in zip(("before", "after"), sides, strict=True) if side.rounds == 1]
    if single and not same:
        where = "one recording a side" if len(single) == 2 else f"one recording of the {single[0]} side"
        what = "the steps are the sample" if step.sample == "steps" else "there is no sample to take a spread from"
        notes.append(f"{where}: {what}, and the spread from run to run is not known")
    if not same and not any(_has_gpu_work(d) for d in shown):
        notes.append("no GPU work was recorded on either side: what else runs on the CPUs lengthens the steps")
    stacks = [_value(d, "recorded_with_stacks") for d in shown]
    if None not in stacks and stacks[0] != stacks[1]:
        which = "before" if stacks[0] else "after"
        notes.append(f"only the {which} side was recorded with Python stacks, which lengthen its host code")
    if sides[0].recorder != sides[1].recorder:
        notes.append(f"recorded by {sides[0].recorder} before, {sides[1].recorder} after: each costs its own time")
    mean, median = step.mean_change, step.change
    if mean is not None and median is not None and abs(mean - median) > 0.05:
        notes.append(
            f"the mean step changes by {signed(mean)}, the median by {signed(median)}: a few steps are unlike the rest"
        )
    return tuple(notes)
