"""The verdict: one word for what binds the run, one sentence with its numbers, and how clear it is."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.diagnosis import BoundBy, Finding, Verdict
from gpudiag.evidence import UNTRUSTED_SLOWDOWN, Values, cannot_judge, number
from gpudiag.metrics.across import RunFacts
from gpudiag.rules import Judgement
from gpudiag.scope import Scope
from gpudiag.units import format_ns, format_percent, format_rate

BUSY_TARGET = 0.80  # the method's own rule of thumb: below it, look at data and host first
LOSS = 0.10  # severity `warning` (DESIGN 5)
THIN = 0.05  # two owners within five points of the step are called a near tie

# Which part of the account speaks for which cause. What compute is made of is for the compute rules to say.
OWNER: dict[str, BoundBy] = {
    "communication_exposed": "communication",
    "copy_exposed.h2d": "transfer",
    "copy_exposed.d2h": "transfer",
    "copy_exposed.d2d": "transfer",
    "copy_exposed.p2p": "transfer",
    "copy_exposed.managed": "transfer",
    "copy_exposed.other": "transfer",
    "memset_exposed": "memory",
    "idle.input": "input",
    "idle.sync": "sync",
    "idle.launch": "launch",
    "idle.allocator": "memory",
    "idle.compile": "host",
    "idle.checkpoint_log": "host",
    "idle.gc": "host",
    "idle.host": "host",
    "idle.unknown": "none",
    "host.input": "input",
    "host.checkpoint_log": "host",
    "host.compile": "host",
    "host.gc": "host",
    "host.other": "host",
}
WORDS: dict[BoundBy, str] = {
    "input": "waiting for input data",
    "transfer": "exposed copies",
    "launch": "launching work (framework code on the host)",
    "sync": "idle after waits of the host for the device",
    "communication": "exposed communication",
    "memory": "memory management",
    "host": "other host code",
    "power": "power or heat limits",
    "none": "causes that were not recorded",
}


def verdict_of(scopes: Sequence[Scope], main: int, metrics: Values, judged: Judgement, facts: RunFacts) -> Verdict:
    """The verdict on the run; `main` is the scope that the report shows."""
    scope = scopes[main]
    reason = cannot_judge(scope, metrics)
    if reason or "not_enough_evidence" in {f.rule for f in judged.findings}:
        return Verdict("cannot_judge", "none", f"Cannot judge: {reason or _gate_text(judged)}.")
    scopes = [one for one in scopes if (one.ops is None) == (scope.ops is None)]  # a host's account is no device's
    total = max(1, sum(s.account.total for s in scopes))
    lost: dict[BoundBy, int] = {}
    for one in scopes:
        for part, ns in one.parts.items():
            if part in OWNER:
                lost[OWNER[part]] = lost.get(OWNER[part], 0) + ns
    unknown = lost.pop("none", 0)
    recorded = dict(lost)
    slowdown = max(1.0, number(metrics, "observer_slowdown") or 1.0) if scope.ops is not None else 1.0
    _take_off(lost, int(total * (1 - 1 / slowdown)))
    ranked = sorted(lost.items(), key=lambda item: (-item[1], item[0]))
    if scope.ops is None:
        return _host_verdict(scopes, scope, ranked, judged, total)
    busy = 1 - sum(ns for s in scopes for p, ns in s.parts.items() if p.startswith("idle.")) / total
    compute = sum(s.parts.get("compute", 0) for s in scopes) / total
    owner, ns = ranked[0] if ranked else ("none", 0)
    share = ns / total
    what = f"the GPU{'s are' if len(scopes) > 1 else ' is'} busy {format_percent(busy)} of the time"
    if slowdown >= UNTRUSTED_SLOWDOWN:
        what += f" ({format_percent(min(1.0, busy * slowdown))} without what recording added)"
    step = _per_step(scope)
    hints = [f for f in judged.findings if f.step == "compute" and f.severity != "info" and not f.caused_by]
    late = _late(facts, owner)
    blind = (
        f"; {format_percent(unknown / total)} is idle for causes that this recording does not show"
        if unknown / total >= LOSS
        else ""
    )
    profiler = sum(s.parts.get("idle.profiler", 0) for s in scopes) / total
    if profiler >= LOSS:
        blind += f"; {format_percent(profiler)} is idle for the recorder's own work"
    if share >= LOSS:
        detail = _detail(owner, scopes, metrics, share)
        if format_percent(recorded[owner] / total) != format_percent(share):
            detail += f" ({format_percent(recorded[owner] / total)} as recorded, less what recording added)"
        known = " as far as the recording shows" if unknown > ns else ""
        headline = f"Bound by {owner}{known}: {detail}{late}; {what}{blind}."
        return Verdict("bottleneck", owner, headline, _margin(ranked, total))
    if unknown / total >= LOSS or profiler >= LOSS:
        return Verdict("bottleneck", "none", f"{what[0].upper()}{what[1:]}{blind}.")
    powers = [f for f in judged.findings if f.category == "power" and f.severity != "info" and not f.caused_by]
    if powers and (not hints or powers[0].bound_ns >= hints[0].bound_ns):
        headline = f"Bound by power: {what}, kernels run {format_percent(compute)} of it; {_lower(powers[0])}."
        return Verdict("bottleneck", "power", headline)
    if hints:
        headline = f"Bound by compute: {what}, kernels run {format_percent(compute)} of it; {_lower(hints[0])}."
        return Verdict("bottleneck", "compute", headline)
    return Verdict("healthy", "none", f"Healthy: {what}, and no cause costs {format_percent(LOSS)} of {step}.")


def _take_off(lost: dict[BoundBy, int], added: int) -> None:
    """Take what recording added to the steps off the owners that it falls on: launches first, other host code then."""
    for owner in ("launch", "host"):
        if owner in lost:
            part = min(lost[owner], added)
            lost[owner] -= part
            added -= part


def _gate_text(judged: Judgement) -> str:
    return next((f.summary for f in judged.findings if f.rule == "not_enough_evidence"), "").rstrip(".")


def _lower(finding: Finding) -> str:
    title = finding.title
    return title if title[:2].isupper() else title[0].lower() + title[1:]  # FP32, GPU


def _per_step(scope: Scope) -> str:
    if len(scope.steps):
        if scope.steps.source == "inferred":
            return f"the {format_ns(scope.per_step(scope.account.total))} repeat"
        return f"the {format_ns(scope.per_step(scope.account.total))} step"
    return f"the {format_ns(scope.account.total)} span"


def _detail(owner: BoundBy, scopes: Sequence[Scope], metrics: Values, share: float) -> str:
    scope = scopes[0] if len(scopes) == 1 else max(scopes, key=lambda s: s.account.total)
    step = _per_step(scope)
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
        rate = number(metrics, "h2d_pinned_rate")
        pinned, exposed = number(metrics, "h2d_pinned_exposed"), number(metrics, "copy_exposed_h2d")
        extra = ""
        if rate and pinned and exposed and pinned > 0.5 * exposed:
            extra = f", host to device from pinned memory at {format_rate(rate)}"
        elif (
            exposed
            and number(metrics, "h2d_pageable_exposed")
            and (number(metrics, "h2d_pageable_exposed") or 0) > 0.5 * exposed
        ):
            slow = number(metrics, "h2d_pageable_rate")
            extra = ", host to device from pageable memory" + (f" at {format_rate(slow)}" if slow else "")
        return f"copies that nothing hides take {format_percent(share)} of {step}{extra}"
    if owner == "launch":
        cost = number(metrics, "launch_cost")
        per_step = number(metrics, "kernels_per_step")
        extra = f" ({per_step:.0f} kernels{' a step' if len(scope.steps) else ''}" if per_step else ""
        extra += f", {format_ns(cost)} a launch call)" if extra and cost else ")" if extra else ""
        return f"{idle} while the host prepares launches{extra}"
    if owner == "sync":
        waits = number(metrics, "syncs_per_step")
        extra = f" ({waits:.0f} synchronising calls{' a step' if len(scope.steps) else ''})" if waits else ""
        return f"{idle} after waits of the host for it{extra}"
    if owner == "communication":
        return f"collectives that nothing hides take {format_percent(share)} of {step}"
    return f"{WORDS[owner]} takes {format_percent(share)} of {step}"


def _late(facts: RunFacts, owner: BoundBy) -> str:
    if owner != "communication" or not facts.late_ranks:
        return ""
    ranks = ", ".join(map(str, facts.late_ranks))
    return f", and rank{'s' if len(facts.late_ranks) > 1 else ''} {ranks} arrive{'' if len(facts.late_ranks) > 1 else 's'} last"


def _margin(ranked: Sequence[tuple[BoundBy, int]], total: int) -> str:
    if len(ranked) < 2:
        return ""
    (first, most), (second, next_most) = ranked[0], ranked[1]
    if (most - next_most) / total >= THIN or next_most / total < LOSS:
        return ""
    return f"{first} ({format_percent(most / total)}) and {second} ({format_percent(next_most / total)}) are close"


def _host_verdict(
    scopes: Sequence[Scope], scope: Scope, ranked: Sequence[tuple[BoundBy, int]], judged: Judgement, total: int
) -> Verdict:
    work, other = (
        sum(one.parts.get(f"host.{phase}", 0) for one in scopes for phase in phases) / total
        for phases in (("forward", "backward", "optimizer", "framework", "h2d"), ("other",))
    )
    step = _per_step(scope)
    computing = (
        f"forward, backward, optimizer and other operators take {format_percent(work)} of {step} on the CPU; "
        f"no GPU work was recorded"
    )
    if other >= LOSS:
        computing += f"; {format_percent(other)} pass in code that was not recorded, or in waits for other processes"
    # A share of plain user code is no loss by itself: without a finding nothing says that it could be less.
    causes = [f for f in judged.findings if f.severity != "info" and not f.caused_by and f.category != "none"]
    if not len(scope.steps):  # start-up, or a launcher that waits for its children, is no loss of a training step
        causes = [f for f in causes if f.parts != ("host.other",)]
        if not causes and other > 0.5:
            return Verdict("cannot_judge", "none", f"Cannot judge: no steps are known, and {computing}.")
    owner, ns = ranked[0] if ranked else ("none", 0)
    if owner == "host" and not any(f.category in ("host", "checkpoint", "log", "compile") for f in causes):
        others = [item for item in ranked if item[0] != "host"]
        owner, ns = others[0] if others else ("none", 0)
    if owner != "none" and ns / total >= LOSS and causes:
        return Verdict(
            "bottleneck",
            owner,
            f"Bound by {owner}: {WORDS[owner]} takes {format_percent(ns / total)} of {step}; {computing}.",
            _margin(ranked, total),
        )
    if causes:
        first = causes[0]
        bound: BoundBy = "compute" if first.step == "compute" else "launch" if first.category == "launch" else "host"
        return Verdict("bottleneck", bound, f"Bound by {bound}: {_lower(first)}; {computing}.")
    if other >= LOSS:
        return Verdict("healthy", "none", f"Healthy as far as the recording shows: {computing}.")
    return Verdict("healthy", "none", f"Healthy: {computing}, and no cause outside them costs {format_percent(LOSS)}.")
