"""What a recording lost or bent, and what can therefore not be said from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from gpudiag.metrics.base import Metric, Missing
from gpudiag.names import LAUNCH
from gpudiag.scope import Scope
from gpudiag.steps import MIN_STEPS
from gpudiag.timeline import Kind
from gpudiag.units import counted, format_ns, format_percent

LOST_LAUNCHES = 0.01  # issue 3: over 1 % missing is said
UNTRUSTED_SLOWDOWN = 1.15  # RULES.md O7, nsys-ai: 15 % is contaminated
NOTABLE_SLOWDOWN = 1.05
BUSY_MACHINE = 0.05  # of a step: from here on rule cpu_contended counts it
LEAST_OPERATIONS = 50
LEAST_WORK_NS = 1_000_000  # a few microseconds of work in a recording of milliseconds are chance
TOLD_EVALUATION = 0.10  # from here on the headline tells it, from twice that on rule evaluation_costly
NOTABLE_EVALUATION = 0.02  # the least share that any finding is told of
LEAST_HOST_NS = 1_000_000_000  # without steps: start-up alone (lazy loading, first calls) takes most of a second
LOST_ROWS = 0.05  # a twentieth of the rows gone moves shares by more than the smallest finding
UNTRUSTED_SKEW = 0.10  # then the host's side cannot be laid against the device's
SKEW_SHARE = 0.01  # share of kernels that start before their launch call began

Values = Mapping[str, Metric | Missing]


def number(values: Values, name: str) -> float | None:
    """The value of a metric, None when it is missing."""
    metric = values[name]
    return None if isinstance(metric, Missing) else float(metric.value)


def cannot_judge(scope: Scope, values: Values) -> str:
    """Why nothing can be said of this scope, as a clause with numbers; "" when it can be judged."""
    timeline = scope.timeline
    if timeline.incomplete:
        return f"{timeline.incomplete}, and the missing part may be any of it"
    lost_rows = max(
        (repair for repair in timeline.repairs if repair.lost), key=lambda r: r.count / max(1, r.total), default=None
    )
    if lost_rows is not None and lost_rows.count > LOST_ROWS * lost_rows.total:
        return f"{lost_rows.count} of {lost_rows.total} rows of the recording were lost: {lost_rows.what}"
    if scope.ops is None:
        calls = timeline.api_calls
        launched = int(scope.names.rows(calls.name, LAUNCH).sum()) if calls is not None else 0
        if launched:
            return f"{launched} launches of GPU work were recorded but no GPU activity: the capture failed"
        if len(scope.steps) < MIN_STEPS and not len(scope.window):
            return "nothing that repeats was recorded"
        if len(scope.steps) < MIN_STEPS and scope.window.total() < LEAST_HOST_NS:
            return (
                f"{format_ns(scope.window.total())} on the CPU with {_steady(len(scope.steps))} are start-up, from which"
                " nothing follows for a run"
            )
        return ""
    operations, busy = len(scope.window_ops), scope.window.intersect(scope.layers.busy).total() if scope.layers else 0
    if operations < LEAST_OPERATIONS and busy < LEAST_WORK_NS and len(scope.steps) < MIN_STEPS:
        return (
            f"{counted(operations, 'GPU operation')} with {format_ns(busy)} of work "
            f"{'is' if operations == 1 else 'are'} too few to tell a habit from an accident"
        )
    lost = number(values, "launches_missing_share")
    if lost is not None and lost > 0.5:
        return f"{format_percent(lost)} of the launched work has no GPU record: busy time is a lower bound far off"
    skewed = clock_skew(scope)
    if skewed > UNTRUSTED_SKEW:
        return (
            f"{format_percent(skewed)} of the kernels start before their launch call: CPU and GPU clocks do not agree"
        )
    return ""


def _steady(steps: int) -> str:
    return f"{steps or 'no'} steady step{'s' * (steps != 1)}"


def warnings_of(scope: Scope, values: Values) -> Iterator[str]:
    """One sentence for each thing that limits what can be said of this scope."""
    timeline = scope.timeline
    yield from timeline.warnings
    if timeline.incomplete:
        yield f"{timeline.incomplete}; the figures are those of what could be read"
    for repair in timeline.repairs:
        yield f"{repair.count} of {repair.total} rows: {repair.what}"
    if 0 < len(scope.all_steps) < MIN_STEPS:
        yield (
            f"{len(scope.all_steps)} {'step is' if len(scope.all_steps) == 1 else 'steps are'} too few to judge by step: "
            f"the figures are those of the whole span, start-up included"
        )
    elif not len(scope.all_steps) and scope.ops is not None:
        yield "no steps are known: the figures are those of the whole span, start-up included"
    elif scope.all_steps.source == "inferred":
        yield (
            f"no step was marked; steps are inferred from kernels that repeat ({format_percent(scope.all_steps.confidence)} alike)"
        )
    left_out = scope.left_out if len(scope.steps) else None
    if left_out is not None:
        yield (
            f"a recorded step begins an epoch of {left_out.steps} steps and is left out: among {len(scope.steps)} it would "
            f"count {left_out.steps / (len(scope.steps) + left_out.rows.size):.0f}-fold"
        )
    apart, share = scope.evaluation
    if NOTABLE_EVALUATION < share < TOLD_EVALUATION:
        yield (
            f"evaluation inside training is kept apart: {format_ns(apart)}, {format_percent(share)} of the "
            f"recorded stretch, is in no step"
        )
    lost = number(values, "launches_missing_share")
    if lost is not None and lost > LOST_LAUNCHES:
        yield f"{format_percent(lost)} of the launch calls have no GPU record: busy time is a lower bound"
    orphans = number(values, "kernels_without_launch_share")
    if orphans is not None and orphans > LOST_LAUNCHES:
        yield f"{format_percent(orphans)} of the kernels have no launch call in the recording: host causes are only partly known"
    slowdown = number(values, "observer_slowdown")
    if slowdown is not None and slowdown >= UNTRUSTED_SLOWDOWN:
        yield f"recording made steps {format_percent(slowdown - 1)} longer: host and launch shares are inflated"
    elif slowdown is not None and slowdown >= NOTABLE_SLOWDOWN:
        yield f"recording made steps {format_percent(slowdown - 1)} longer"
    waited, step = number(values, "cpu_wait_time"), number(values, "step_time")
    if waited is not None and step and waited >= BUSY_MACHINE * step:
        yield (
            f"the machine was busy: the training thread waited {format_percent(min(1.0, waited / step))} of the time for a CPU; "
            f"the host's figures are inflated"
        )
    if timeline.with_stack:
        yield "recorded with Python stacks, which lengthens host code between launches: launch and host shares are inflated"
    skewed = clock_skew(scope)
    if skewed > SKEW_SHARE:
        yield f"{format_percent(skewed)} of the kernels start before their launch call: CPU and GPU clocks do not agree"
    if scope.ops is not None and (scope.ops.kind == Kind.GRAPH).any():
        yield (
            "CUDA graphs were recorded as whole launches: rules about single kernels do not see inside them "
            "(record with --cuda-graph-trace=node)"
        )


def clock_skew(scope: Scope) -> float:
    """Share of joined kernels that begin before their launch call does. 0.0 where nothing can be joined."""
    calls = scope.timeline.api_calls
    if calls is None or scope.launches is None or scope.ops is None:
        return 0.0
    joined = scope.launches.call_of >= 0
    if not joined.any():
        return 0.0
    return float(np.mean(scope.ops.start[joined] < calls.start[scope.launches.call_of[joined]]))
