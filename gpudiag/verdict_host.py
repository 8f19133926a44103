"""The verdict of a run without GPU work: one line of host time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpudiag.diagnosis import BoundBy, Verdict
from gpudiag.evidence import Values, number
from gpudiag.metrics.communication import backward_collective_wait
from gpudiag.rules import Judgement
from gpudiag.scope import Scope
from gpudiag.units import format_percent
from gpudiag.verdict_shares import LOSS, THIN, WORDS, average_shares, in_sentence, margin_of, mean, per_step

# A loss on a CPU without a GPU below this share of its work does not name the run: won back whole, it saves under a third.
BESIDE = 0.5

# What a host without GPU work can lose its time to, as the headline says it: the parts of OWNER "host".
_HOST_WORDS = {
    "host.checkpoint_log": "saving and logging",
    "host.compile": "compiling",
    "host.gc": "garbage collection",
    "host.other": "code that was not recorded, or waits for other processes",
}


def host_verdict(
    scopes: Sequence[Scope], scope: Scope, ranked: Sequence[tuple[BoundBy, float]], judged: Judgement, metrics: Values
) -> Verdict:
    shares = average_shares(scopes)
    work = sum(shares.get(f"host.{phase}", 0.0) for phase in ("forward", "backward", "optimizer", "framework", "h2d"))
    other = shares.get("host.other", 0.0)
    step = per_step(scope)
    waited = mean(backward_collective_wait(one) / max(1, one.account.total) for one in scopes)
    waiting = f"{format_percent(waited)} of {step} passes in the backward pass in waiting for collectives"
    waits = (
        f", beside {format_percent(waited)} in the backward pass that wait for collectives" if waited >= LOSS else ""
    )
    work -= waited

    def computing(of: str) -> str:
        return (
            f"forward, backward, optimizer and other operators take {format_percent(work)} of {of} on the CPU{waits}; "
            f"no GPU work was recorded"
        )

    unseen = f"; {format_percent(other)} pass in {_HOST_WORDS['host.other']}" if other >= LOSS else ""
    # A share of plain user code is no loss by itself: without a finding nothing says that it could be less.
    causes = [f for f in judged.findings if f.severity != "info" and not f.caused_by and f.category != "none"]
    if not len(scope.steps):  # start-up, or a launcher that waits for its children, is no loss of a training step
        causes = [f for f in causes if f.parts != ("host.other",)]
        if not causes and other > 0.5:
            known = "too few" if len(scope.all_steps) else "no"
            headline = f"Cannot judge: {known} steps are known, and {computing(step)}{unseen}."
            return Verdict("cannot_judge", "none", headline)
    owner, share = ranked[0] if ranked else ("none", 0.0)
    if owner == "host" and not any(f.category in ("host", "checkpoint", "log", "compile") for f in causes):
        others = [item for item in ranked if item[0] != "host"]
        owner, share = others[0] if others else ("none", 0.0)

    def beside(bound: BoundBy, clause: str) -> Verdict:
        return Verdict("bottleneck", bound, f"Mostly compute: {computing(step)}; {clause}.", margin_of(ranked))

    little = LOSS <= share < BESIDE * work
    if owner not in ("none", "host") and little and causes:
        clause = f"the largest loss beside it is {WORDS[owner]}, {format_percent(share)}{unseen}"
        return beside(owner, clause)
    if owner == "host" and share >= LOSS and causes:
        arguments = (number(metrics, "host_log_arguments") or 0.0) / max(1.0, scope.per_step(scope.account.total))
        if little:
            return beside(owner, _host_parts(shares, arguments, "it"))
        headline = f"Bound by host: {_host_parts(shares, arguments, step)}; {computing('it')}."  # `unseen` is among these parts
        return Verdict("bottleneck", owner, headline, margin_of(ranked))
    if owner != "none" and share >= LOSS and causes:
        headline = (
            f"Bound by {owner}: {WORDS[owner]} takes {format_percent(share)} of {step}; {computing('it')}{unseen}."
        )
        return Verdict("bottleneck", owner, headline, margin_of(ranked))
    if causes:
        first = causes[0]
        if first.step != "compute" and first.category != "launch" and first.share < BESIDE * work:
            share_of = f" ({format_percent(first.share)})" if first.share else ""
            return beside("host", f"{in_sentence(first)}{share_of}{unseen}")
        bound: BoundBy = "launch" if first.category == "launch" else "compute" if first.step == "compute" else "host"
        return Verdict("bottleneck", bound, f"Bound by {bound}: {in_sentence(first)}; {computing(step)}{unseen}.")
    if waited >= LOSS:
        if waited < BESIDE * work:
            return beside("communication", f"no cause was found for the waiting{unseen}")
        return Verdict("bottleneck", "communication", f"Bound by communication: {waiting}; {computing('it')}{unseen}.")
    if other >= LOSS:
        return Verdict("healthy", "none", f"Healthy: as far as the recording shows, {computing(step)}{unseen}.")
    nothing_else = f"no cause outside them costs {format_percent(LOSS)}"
    return Verdict("healthy", "none", f"Healthy: {computing(step)}, and {nothing_else}.")


def _host_parts(shares: Mapping[str, float], arguments: float, step: str) -> str:
    """`55 % of the 8.6 ms step goes into saving and logging, 17 % into ...`, the largest first, without small change."""
    known = {**shares, "host.other": max(0.0, shares.get("host.other", 0.0) - arguments)}
    parts = [(known.get(part, 0.0), words) for part, words in _HOST_WORDS.items()]
    lost = sorted([*parts, (arguments, "the arguments of log calls")], reverse=True)
    (most, where), *rest = [lost[0], *(item for item in lost[1:] if item[0] >= THIN)]
    more = "".join(f", {format_percent(share)} into {words}" for share, words in rest)
    return f"{format_percent(most)} of {step} goes into {where}{more}"
