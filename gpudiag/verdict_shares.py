"""What the verdicts of GPU runs and of CPU-only runs have in common: shares of the account by cause, and their words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpudiag.diagnosis import BoundBy, Finding
from gpudiag.scope import Scope, room_of
from gpudiag.units import format_ns, format_percent

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


def average_shares(scopes: Sequence[Scope]) -> dict[str, float]:
    """The share of each part, averaged over the devices, so that a long recording of one rank does not outweigh another's."""
    return _averaged(scopes, [1.0] * len(scopes))


def winnable_shares(scopes: Sequence[Scope]) -> dict[str, float]:
    """Likewise, with the idle time of each device up to the room that the others leave: what one must work, another may wait."""
    scales = []
    for scope in scopes:
        idle = sum(ns for part, ns in scope.parts.items() if part.startswith("idle.")) / max(1, scope.account.total)
        scales.append(min(1.0, room_of(scope, scopes) / idle) if idle else 1.0)
    return _averaged(scopes, scales)


def _averaged(scopes: Sequence[Scope], idle_scales: Sequence[float]) -> dict[str, float]:
    shares: dict[str, float] = {}
    for scope, scale in zip(scopes, idle_scales, strict=True):
        for part, ns in scope.parts.items():
            share = ns / max(1, scope.account.total) * (scale if part.startswith("idle.") else 1.0)
            shares[part] = shares.get(part, 0.0) + share / len(scopes)
    return shares


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def by_owner(shares: dict[str, float]) -> dict[BoundBy, float]:
    owned: dict[BoundBy, float] = {}
    for part, share in shares.items():
        if part in OWNER:
            owned[OWNER[part]] = owned.get(OWNER[part], 0.0) + share
    return owned


def in_sentence(finding: Finding) -> str:
    title = finding.title
    return (
        title if title[:2].isalpha() and title[:2].isupper() else title[0].lower() + title[1:]
    )  # FP32, GPU; not `A run`


def per_step(scope: Scope) -> str:
    if len(scope.steps):
        return f"the {format_ns(scope.per_step(scope.account.total))} step"
    return f"the {format_ns(scope.account.total)} span"


def margin_of(ranked: Sequence[tuple[BoundBy, float]]) -> str:
    """Two owners within THIN of each other are a near tie."""
    if len(ranked) < 2:
        return ""
    (first, most), (second, next_most) = ranked[0], ranked[1]
    if most - next_most >= THIN or next_most < LOSS:
        return ""
    return f"{first} ({format_percent(most)}) and {second} ({format_percent(next_most)}) are close"
