"""Ranks side by side: who comes last, how long the others wait in the open, and when nothing can be said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import Recorder

from gpudiag.metrics import measure
from gpudiag.metrics.across import RunFacts, run_facts
from gpudiag.metrics.base import Missing
from gpudiag.scope import Scope, scopes_of
from gpudiag.timeline import Kind, Timeline

US = 1_000
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def rank_of(
    rank: int, lengths: list[int], *, offset: int = 0, kernel: str = REDUCE, cover: int = 0, skip: int = 0
) -> Timeline:
    """Steps of 1000 us with one collective each that ends at 900 us and took `lengths` us; compute covers `cover` us of it."""
    recorder = Recorder()
    for step, length in enumerate(lengths):
        at = offset + step * 1000 * US
        recorder.mark(at, at + 1000 * US, f"ProfilerStep#{step}")
        recorder.launch(at + 10 * US, at + 100 * US)
        if step >= skip:
            recorder.launch(at + (900 - length) * US, at + 900 * US, kernel, kind=Kind.COMM, stream=9)
        if cover:
            recorder.launch(at + (900 - length) * US, at + (900 - length + cover) * US)
    return replace(recorder.timeline(), rank=rank, world_size=4)


def facts_of(*timelines: Timeline) -> tuple[RunFacts, list[Scope]]:
    scopes = [scope for timeline in timelines for scope in scopes_of(timeline)]
    return run_facts(scopes), scopes


LATE, EARLY = [100] * 10, [300] * 10


def test_the_rank_whose_collectives_are_shortest_comes_last() -> None:
    facts, scopes = facts_of(rank_of(0, EARLY), rank_of(1, LATE), rank_of(2, EARLY), rank_of(3, EARLY))
    assert facts.late_ranks == (1,)
    assert (facts.latest_rank, facts.latest_share, facts.collectives) == (1, 1.0, 10)
    values = [measure(scope, facts) for scope in scopes]
    assert [value["is_straggler"].value for value in values] == [0, 1, 0, 0]
    assert [value["straggler_share"].value for value in values] == [1.0] * 4
    assert [value["straggler_wait"].value for value in values] == [200 * US] * 4
    assert values[0]["comm_wait_share"].value == pytest.approx(2 / 3)
    assert values[1]["comm_wait_share"].value == 0


def test_clocks_that_differ_between_ranks_change_nothing() -> None:
    same = facts_of(rank_of(0, EARLY), rank_of(1, LATE), rank_of(2, EARLY))[0]
    shifted = facts_of(rank_of(0, EARLY), rank_of(1, LATE, offset=7_000_000_123), rank_of(2, EARLY, offset=-5_000_000))[
        0
    ]
    assert replace(shifted, alignment=None) == replace(same, alignment=None)
    assert shifted.alignment is not None
    assert shifted.alignment.offset_ns == {0: 0, 1: -7_000_000_123, 2: 5_000_000}


def test_a_wait_under_compute_is_not_exposed() -> None:
    facts, scopes = facts_of(rank_of(0, EARLY, cover=150), rank_of(1, LATE))
    assert facts.late_ranks == (1,)
    assert measure(scopes[0], facts)["straggler_wait"].value == 150 * US
    assert measure(scopes[0], facts)["comm_wait_share"].value == pytest.approx(2 / 3), "of all of it"


def test_collectives_outside_the_steady_steps_are_matched_but_not_judged() -> None:
    def with_warm_up(rank: int, lengths: list[int], first: int) -> Timeline:
        recorder = Recorder()
        recorder.launch(-5000 * US, -5000 * US + first * US, REDUCE, kind=Kind.COMM, stream=9)
        for step, length in enumerate(lengths):
            at = step * 1000 * US
            recorder.mark(at, at + 1000 * US, f"ProfilerStep#{step}")
            recorder.launch(at + (900 - length) * US, at + 900 * US, REDUCE, kind=Kind.COMM, stream=9)
        return replace(recorder.timeline(), rank=rank)

    facts, _ = facts_of(with_warm_up(0, [200] * 8, 4000), with_warm_up(1, [100] * 8, 10))
    assert facts.collectives == 8
    assert facts.mean_wait_ns == 8 * 100 * US, "the 3990 us of start-up are not in it"


def test_uneven_numbers_of_collectives_are_compared_as_far_as_they_go() -> None:
    facts, _ = facts_of(rank_of(0, EARLY), rank_of(1, [100] * 7))
    assert (facts.collectives, facts.late_ranks) == (7, (1,))


def test_ranks_without_enough_common_collectives_are_not_compared() -> None:
    for other in (
        rank_of(1, LATE, kernel="ncclDevKernel_AllGather_RING_LL"),
        rank_of(1, LATE, skip=7),
        rank_of(1, LATE, skip=10),
    ):
        facts, scopes = facts_of(rank_of(0, EARLY), other)
        assert facts.stragglers == {}
        assert facts.why_no_stragglers == "the ranks share too few collectives to compare"
        item = measure(scopes[0], facts)["straggler_wait"]
        assert isinstance(item, Missing)
        assert item.reason == facts.why_no_stragglers


def test_protocols_of_one_collective_are_the_same_collective() -> None:
    facts, _ = facts_of(rank_of(0, EARLY), rank_of(1, LATE, kernel="ncclKernel_AllReduce_TREE_LL128_Sum_float"))
    assert facts.collectives == 10


def test_ranks_that_take_turns_are_no_stragglers() -> None:
    turns = [100, 300] * 5
    facts, scopes = facts_of(rank_of(0, turns), rank_of(1, turns[::-1]))
    assert facts.late_ranks == ()
    assert facts.latest_share == 0.5
    assert measure(scopes[0], facts)["is_straggler"].value == 0


def test_a_hair_between_ranks_is_nobody_late() -> None:
    facts, _ = facts_of(rank_of(0, [300] * 10), rank_of(1, [299] * 10), rank_of(2, [300] * 10))
    assert facts.late_ranks == ()


def test_two_devices_in_one_rank_are_not_taken_for_two_ranks() -> None:
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    for step in range(4):
        at = step * 1000 * US
        for device, length in ((0, 100), (1, 800)):
            recorder.launch(at + 10 * US, at + (10 + length) * US, device=device)
    facts, scopes = facts_of(recorder.timeline(), rank_of(1, LATE))
    assert facts.devices == 3
    assert facts.why_no_stragglers == "several devices belong to one rank"
    assert facts.busy_spread is not None  # of own work: the rank beside them may have least
    assert measure(scopes[0], facts)["devices"].value == 3


def test_one_device_has_no_spread_and_a_cpu_run_no_devices() -> None:
    facts, (scope,) = facts_of(rank_of(0, EARLY))
    assert (facts.devices, facts.busy_spread) == (1, None)
    assert measure(scope, facts)["busy_spread"].reason == "one device was recorded"
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    facts, (scope,) = facts_of(recorder.timeline())
    assert facts.devices == 0
    assert measure(scope, facts)["busy_spread"].reason == "no GPU work was recorded"
    assert isinstance(measure(scope, facts)["devices"], Missing)
