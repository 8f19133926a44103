"""The verdict: one word for what binds the run, one sentence with its numbers, and how clear it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpudiag.diagnosis import BoundBy, Finding, Verdict
from gpudiag.evidence import TOLD_EVALUATION, UNTRUSTED_SLOWDOWN, Values, cannot_judge, number
from gpudiag.metrics.across import RunFacts
from gpudiag.rules import Judgement
from gpudiag.scope import Scope, working
from gpudiag.units import counted, format_ns, format_percent, format_rate
from gpudiag.verdict_host import host_verdict
from gpudiag.verdict_shares import (
    LOSS,
    WORDS,
    average_shares,
    by_owner,
    in_sentence,
    margin_of,
    mean,
    per_step,
    winnable_shares,
)

BUSY_TARGET = 0.80  # the method's own rule of thumb: below it, look at data and host first
MOST = 0.8  # of the exposed copies: then one direction speaks for them


def verdict_of(scopes: Sequence[Scope], main: int, metrics: Values, judged: Judgement, facts: RunFacts) -> Verdict:
    """The verdict on the run; `main` is the scope that the report shows."""
    fatal = next((finding for finding in judged.findings if finding.ends_run), None)
    losses = replace(judged, findings=tuple(finding for finding in judged.findings if not finding.ends_run))
    verdict = _with_evaluation(_verdict_of(scopes, main, metrics, losses, facts), scopes[main], losses)
    return verdict if fatal is None else _ended(verdict, fatal, scopes[main])


def _with_evaluation(verdict: Verdict, scope: Scope, judged: Judgement) -> Verdict:
    """The steps and all shares are those of training alone: much evaluation beside it is said in the same breath, and where
    a rule finds it too much, healthy steps do not make a healthy run."""
    ns, share = scope.evaluation
    if share < TOLD_EVALUATION:
        return verdict
    aside = f"valuation inside training takes {format_percent(share)} of the time, {format_ns(scope.per_step(ns))} for each step"
    if verdict.status == "healthy" and any(finding.rule == "evaluation_costly" for finding in judged.findings):
        headline = f"E{aside}. The steps of training are healthy: {verdict.headline.removeprefix('Healthy: ')}"
        return Verdict("bottleneck", "none", headline, verdict.margin)
    headline = f"{verdict.headline} E{aside}, and is not counted in these."
    return Verdict(verdict.status, verdict.bound_by, headline, verdict.margin)


def _ended(verdict: Verdict, fatal: Finding, scope: Scope) -> Verdict:
    """What the run died of, how far it had come, and then only what its recorded steps say. What cannot be judged stays so:
    nobody may compare by it."""
    log = scope.timeline.step_log
    steps = f", after {counted(int(log.index.max()) + 1, 'step')}" if log is not None and len(log) else ""
    headline = (
        f"Run ended: {in_sentence(fatal)}{steps}. Before that: {verdict.headline[0].lower()}{verdict.headline[1:]}"
    )
    if verdict.status == "cannot_judge":
        return Verdict("cannot_judge", "none", headline)
    return Verdict("bottleneck", _BOUND_BY.get(fatal.category, "none"), headline, verdict.margin)


def _verdict_of(scopes: Sequence[Scope], main: int, metrics: Values, judged: Judgement, facts: RunFacts) -> Verdict:
    scope = scopes[main]
    reason = cannot_judge(scope, metrics)
    here = (scope.rank, scope.device)
    if reason or any(f.rule == "not_enough_evidence" and here in f.devices for f in judged.findings):
        return Verdict("cannot_judge", "none", f"Cannot judge: {reason or _gate_text(judged)}.")
    everything = scopes
    scopes = [one for one in working(scopes) if (one.ops is None) == (scope.ops is None)] or [scope]
    shares = average_shares(scopes)
    recorded = by_owner(shares)
    lost = by_owner(winnable_shares(scopes))
    unknown = recorded.pop("none", 0.0)
    lost.pop("none", None)
    slowdown = max(1.0, number(metrics, "observer_slowdown") or 1.0) if scope.ops is not None else 1.0
    lost = _less_recording(lost, slowdown)
    ranked = sorted(lost.items(), key=lambda item: (-item[1], item[0]))
    if scope.ops is None:
        return host_verdict(scopes, scope, ranked, judged, metrics)
    busy = 1 - mean(
        sum(ns for p, ns in s.parts.items() if p.startswith("idle.")) / max(1, s.account.total) for s in scopes
    )
    compute = mean(s.parts.get("compute", 0) / max(1, s.account.total) for s in scopes)
    owner, share = ranked[0] if ranked else ("none", 0.0)
    what = f"the GPU{'s are' if len(scopes) > 1 else ' is'} busy {format_percent(busy)} of the time"
    if slowdown >= UNTRUSTED_SLOWDOWN:
        what += f" ({format_percent(min(1.0, busy * slowdown))} without what recording added)"
    what += _idle_devices(everything, scopes)
    step = per_step(scope)
    hints = [f for f in judged.findings if f.step == "compute" and f.severity != "info" and not f.caused_by]
    late = _late(facts, owner)
    blind = _blind(scopes, unknown)
    profiler = shares.get("idle.profiler", 0.0)
    if profiler >= LOSS:
        blind += f"; {format_percent(profiler)} is idle for the recorder's own work"
    if share >= LOSS:
        added = recorded[owner] - _less_recording(recorded, slowdown)[owner]
        detail = _detail(owner, scopes, metrics, recorded[owner] - added)
        if format_percent(recorded[owner]) != format_percent(recorded[owner] - added):
            detail += f" ({format_percent(recorded[owner])} as recorded, less what recording added)"
        known = " as far as the recording shows" if unknown > share else ""
        headline = f"Bound by {owner}{known}: {detail}{late}; {what}{blind}."
        stated = _less_recording(recorded, slowdown)
        return Verdict("bottleneck", owner, headline, margin_of([(name, stated[name]) for name, _ in ranked]))
    uneven = _uneven(scopes, everything, judged)
    if uneven:
        return Verdict("bottleneck", "compute", f"Bound by {uneven}; {what}{blind}.")
    if unknown >= LOSS or profiler >= LOSS:
        return Verdict("bottleneck", "none", f"{what[0].upper()}{what[1:]}{blind}.")
    powers = [f for f in judged.findings if f.category == "power" and f.severity != "info" and not f.caused_by]
    if powers and (not hints or powers[0].bound_ns >= hints[0].bound_ns):
        headline = f"Bound by power: {what} ({format_percent(compute)} in kernels); {in_sentence(powers[0])}."
        return Verdict("bottleneck", "power", headline)
    if hints:
        headline = f"Bound by compute: {what} ({format_percent(compute)} in kernels); {in_sentence(hints[0])}."
        return Verdict("bottleneck", "compute", headline)
    others = [f for f in judged.findings if f.severity != "info" and not f.caused_by and f.category in _BOUND_BY]
    if others:  # on one of several devices, where the average hides it
        first = others[0]
        bound: BoundBy = _BOUND_BY[first.category]
        return Verdict("bottleneck", bound, f"Bound by {bound}: {in_sentence(first)} ({_places(first)}); {what}.")
    return Verdict("healthy", "none", f"Healthy: {what}, and no cause costs {format_percent(LOSS)} of {step}.")


_BOUND_BY: dict[str, BoundBy] = {
    name: name for name in ("input", "transfer", "launch", "sync", "communication", "memory", "host")
}


def _places(finding: Finding) -> str:
    return ", ".join(f"rank {rank}, {'CPU' if device < 0 else f'GPU {device}'}" for rank, device in finding.devices)


def _label(scope: Scope, scopes: Sequence[Scope]) -> str:
    return f"rank {scope.rank}" if len({one.rank for one in scopes}) > 1 else f"GPU {scope.device}"


def _idle_devices(everything: Sequence[Scope], scopes: Sequence[Scope]) -> str:
    idle = [one for one in everything if one.ops is not None and not any(one is mine for mine in scopes)]
    if not idle:
        return ""
    names = ", ".join(_label(one, everything) for one in idle)
    return f"; {names} {'has' if len(idle) == 1 else 'have'} almost no work"


def _uneven(scopes: Sequence[Scope], everything: Sequence[Scope], judged: Judgement) -> str:
    """The busiest device, where the rule on uneven GPUs fired; "" elsewhere."""
    if not any(finding.rule == "gpus_uneven" and not finding.caused_by for finding in judged.findings):
        return ""
    busiest = max(scopes, key=lambda one: one.own_work)
    others = [one for one in everything if one.ops is not None and one is not busiest]
    least = min(others, key=lambda one: one.own_work)
    if busiest.own_work < BUSY_TARGET:
        return ""
    return (
        f"compute on {_label(busiest, everything)}: it works {format_percent(busiest.own_work)} of the time and "
        f"{_label(least, everything)} {format_percent(least.own_work)}, so the load is uneven"
    )


def _blind(scopes: Sequence[Scope], unknown: float) -> str:
    """What is idle for no cause that was recorded, told apart by what is known of it."""
    if unknown < LOSS:
        return ""
    said = []
    if len(scopes) == 1:
        total = max(1, scopes[0].account.total)
        early, stalled = scopes[0].before_first.total() / total, scopes[0].idle_while_queued.total() / total
        if early >= 0.5 * unknown:
            said.append(f"{format_percent(early)} lies before the first recorded GPU work")
            unknown -= early
        elif stalled >= 0.5 * unknown:
            said.append(
                f"{format_percent(stalled)} is idle although work is queued: it waits for another stream or GPU, or for "
                f"work that the recording lost"
            )
            unknown -= stalled
    if unknown >= LOSS:
        said.append(f"{format_percent(unknown)} is idle for causes that this recording does not show")
    return "".join(f"; {clause}" for clause in said)


def _less_recording(lost: dict[BoundBy, float], slowdown: float) -> dict[BoundBy, float]:
    """Without what recording added to the steps, which falls on launches first and other host code then."""
    left, added = dict(lost), 1 - 1 / slowdown
    for owner in ("launch", "host"):
        if owner in left:
            part = min(left[owner], added)
            left[owner] -= part
            added -= part
    return left


def _gate_text(judged: Judgement) -> str:
    return next((f.summary for f in judged.findings if f.rule == "not_enough_evidence"), "").rstrip(".")


def _detail(owner: BoundBy, scopes: Sequence[Scope], metrics: Values, share: float) -> str:
    scope = scopes[0] if len(scopes) == 1 else max(scopes, key=lambda s: s.account.total)
    step = per_step(scope)
    idle = f"the GPU is idle {format_percent(share)} of {step}"
    if len(scopes) > 1:
        idle = f"on average the {len(scopes)} GPUs are idle {format_percent(share)} of {step}"
    if owner == "input":
        waiting = number(metrics, "loader_time")
        held = number(metrics, "step_time")
        extra = ""
        if waiting is not None and held and waiting / held - share > 0.02:
            extra = f" (the loader's next takes {format_percent(waiting / held)} of it)"
        return f"{idle} while the host waits for data{extra}"
    if owner == "transfer":
        return f"copies that nothing hides take {format_percent(share)} of {step}{_direction(metrics)}"
    if owner == "launch":
        cost = number(metrics, "launch_cost")
        kernels = number(metrics, "kernels_per_step")
        extra = f" ({counted(kernels, 'kernel')}{' a step' if len(scope.steps) else ''}" if kernels else ""
        extra += f", {format_ns(cost)} a launch call)" if extra and cost else ")" if extra else ""
        return f"{idle} while the host prepares launches{extra}"
    if owner == "sync":
        waits = number(metrics, "syncs_per_step")
        extra = f" ({counted(waits, 'synchronising call')}{' a step' if len(scope.steps) else ''})" if waits else ""
        return f"{idle} after waits of the host for it{extra}"
    if owner == "communication":
        return f"collectives that nothing hides take {format_percent(share)} of {step}"
    return f"{WORDS[owner]} takes {format_percent(share)} of {step}"


def _direction(metrics: Values) -> str:
    """Which way most of the exposed copies go, from which memory and how fast; both shares where neither is most."""
    whole, h2d, d2h = (
        number(metrics, name) or 0.0 for name in ("copy_exposed", "copy_exposed_h2d", "copy_exposed_d2h")
    )
    if not whole:
        return ""
    if h2d < MOST * whole:
        if d2h >= MOST * whole:
            return ", device to host"
        return f", {format_percent(h2d / whole)} of it host to device and {format_percent(d2h / whole)} device to host"
    for memory in ("pinned", "pageable"):
        if (number(metrics, f"h2d_{memory}_exposed") or 0.0) > 0.5 * h2d:
            rate = number(metrics, f"h2d_{memory}_rate")
            return f", host to device from {memory} memory" + (f" at {format_rate(rate)}" if rate else "")
    return ", host to device"


def _late(facts: RunFacts, owner: BoundBy) -> str:
    if owner != "communication" or not facts.late_ranks:
        return ""
    ranks = ", ".join(map(str, facts.late_ranks))
    return f", and rank{'s' if len(facts.late_ranks) > 1 else ''} {ranks} arrive{'' if len(facts.late_ranks) > 1 else 's'} last"
