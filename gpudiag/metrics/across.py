"""What only all ranks together can tell: who comes last at the collectives, how evenly the devices work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gpudiag.align import Alignment, align
from gpudiag.intervals import Int64
from gpudiag.scope import Scope
from gpudiag.timeline import Kind

MIN_COLLECTIVES = 5  # fewer common collectives say nothing of who is usually late
LATE_MARGIN = 0.9  # a rank whose collective lasts under 90 % of the ranks' median arrived clearly later than most
LATE_SHARE = 0.2  # of the collectives at which somebody was clearly late; with 8 ranks chance alone gives 0.125


@dataclass(frozen=True)
class RankWait:
    """comm_ns: time in the common collectives; wait_ns: of it beyond the shortest rank's, exposed_ns of that with no compute
    at the same time; last: collectives it came last to; short: those to which it came clearly later than most."""

    comm_ns: int
    wait_ns: int
    exposed_ns: int
    last: int
    short: int


@dataclass(frozen=True)
class RunFacts:
    """devices: with work; busy_spread of their own work (no collectives) over them, None with one. stragglers: by rank, empty when it cannot be told.

    late_ranks: ranks that were clearly late in LATE_SHARE or more of the collectives at which any rank was, latest first;
    none where that is most of the ranks, which then take turns. latest_share: of the time that ranks waited
    for the last one, that at collectives to which one of the late ranks came last (without any: the most frequent last rank);
    by time, since a rank that is late once a step holds the others up at one of many collectives only. mean_wait_ns: exposed, mean over the other ranks. alignment: the ranks' clocks. drivers: the versions
    of the ranks' machines, sorted, as far as recorded.
    """

    devices: int
    busy_spread: float | None
    stragglers: dict[int, RankWait] = field(default_factory=dict)
    late_ranks: tuple[int, ...] = ()
    latest_rank: int | None = None
    latest_share: float = 0.0
    mean_wait_ns: float = 0.0
    collectives: int = 0
    why_no_stragglers: str = "one rank was given"
    alignment: Alignment | None = None
    drivers: tuple[str, ...] = ()


def run_facts(scopes: Sequence[Scope]) -> RunFacts:
    """Facts over all scopes of an analysis."""
    on_gpu = [scope for scope in scopes if scope.ops is not None]
    busy = [scope.own_work for scope in on_gpu]
    spread = max(busy) - min(busy) if len(busy) > 1 else None
    ranks = {scope.rank: scope for scope in on_gpu}
    drivers = tuple(sorted({scope.timeline.host.driver for scope in scopes if scope.timeline.host.driver}))
    if len(ranks) < 2 or len(ranks) != len(on_gpu):
        why = "one rank was given" if len(ranks) < 2 else "several devices belong to one rank"
        return RunFacts(len(on_gpu), spread, why_no_stragglers=why, drivers=drivers)
    return replace(_stragglers(ranks, len(on_gpu), spread), drivers=drivers)


def _stragglers(ranks: dict[int, Scope], devices: int, spread: float | None) -> RunFacts:
    """The n-th collective of a kind is the same one on every rank. A collective ends for all at about the same time, so the
    rank with the shortest duration arrived last, whatever the ranks' clocks say; how much longer the others took is their wait.
    """
    sequences = {rank: _collectives(scope) for rank, scope in ranks.items()}
    common = _common_prefix([names for names, _ in sequences.values()])
    order = sorted(ranks)
    starts, durations, exposed = (
        np.stack([getattr(sequences[rank][1], column)[:common] for rank in order])
        for column in ("start", "length", "exposed")
    )
    ends = {rank: starts[i] + durations[i] for i, rank in enumerate(order)}
    alignment = align({rank: ranks[rank].timeline.time_base_ns for rank in order}, ends)
    # Counted from the recording's beginning, so that every rank means the same one; judged inside every rank's window.
    inside = np.logical_and.reduce([ranks[rank].window.contains(starts[i]) for i, rank in enumerate(order)])
    durations, exposed, common = durations[:, inside], exposed[:, inside], int(inside.sum())
    if common < MIN_COLLECTIVES:
        why = "the ranks share too few collectives to compare"
        return RunFacts(devices, spread, why_no_stragglers=why, alignment=alignment)
    shortest = durations.min(axis=0)
    last = durations.argmin(axis=0)
    short = durations < LATE_MARGIN * np.median(durations, axis=0)
    waits = durations - shortest
    found = {
        rank: RankWait(
            int(durations[i].sum()),
            int(waits[i].sum()),
            int(np.minimum(waits[i], exposed[i]).sum()),
            int((last == i).sum()),
            int(short[i].sum()),
        )
        for i, rank in enumerate(order)
    }
    uneven = max(1, int(short.any(axis=0).sum()))
    by_last = sorted(order, key=lambda rank: (-found[rank].short, -found[rank].last, rank))
    late = tuple(rank for rank in by_last if found[rank].short >= max(MIN_COLLECTIVES, LATE_SHARE * uneven))
    if 2 * len(late) > len(order):
        late = ()
    latest = late[0] if late else max(order, key=lambda rank: (found[rank].last, -rank))
    blamed = np.isin(last, [order.index(rank) for rank in (late or (latest,))])
    others = [found[rank].exposed_ns for rank in order if rank not in (late or (latest,))]
    return RunFacts(
        devices,
        spread,
        found,
        late,
        latest,
        float(waits[:, blamed].sum()) / max(1.0, float(waits.sum())),
        float(np.mean(others)) if others else 0.0,
        common,
        "",
        alignment,
    )


@dataclass(frozen=True, eq=False)
class _Collectives:
    """start, length, and the length without compute at the same time, ns; by start."""

    start: Int64
    length: Int64
    exposed: Int64


def _collectives(scope: Scope) -> tuple[list[str], _Collectives]:
    """The kinds of the collectives of a device, and their times."""
    assert scope.ops is not None and scope.layers is not None
    rows = np.flatnonzero(scope.ops.kind == Kind.COMM)
    names = [_kind(scope.timeline.strings[code]) for code in scope.ops.name[rows]]
    start, end = scope.ops.start[rows], scope.ops.end[rows]
    return names, _Collectives(start, end - start, scope.layers.comm_exposed.covered_in(start, end))


def _kind(name: str) -> str:
    match = re.search(
        r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|send_?recv|reduce|generic", name, re.I
    )
    return match.group(0).lower().replace("_", "") if match else name


def _common_prefix(sequences: list[list[str]]) -> int:
    count = 0
    for together in zip(*sequences, strict=False):
        if len(set(together)) > 1:
            break
        count += 1
    return count
