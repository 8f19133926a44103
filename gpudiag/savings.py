"""The second number of a finding: what its fix would bring, by replaying the recording with the change made.

`bound` is what the account allows; `estimate` is what is left of it when everything else stays as recorded, so it never
exceeds the bound. Where the graph does not give back the recorded time, there is no estimate, and the finding says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import msgspec
import numpy as np

from gpudiag.diagnosis import Finding
from gpudiag.intervals import Intervals
from gpudiag.metrics.base import Metric, Missing
from gpudiag.metrics.kernel_work import slow_cpu_ops
from gpudiag.metrics.loading import batches_a_step, loader_waits
from gpudiag.replay import Edit, Graph, build, replay, trusted
from gpudiag.rules import RuleSet
from gpudiag.scope import Scope
from gpudiag.timeline import CopyKind, Kind
from gpudiag.units import format_ns, format_percent

Values = Mapping[str, Metric | Missing]
READBACK_RULES = frozenset({"readback_each_step"})
NOTHING_SAVED = "with this change alone the replay gets no shorter: something else in the step takes as long"
MOSTLY_WAITING = 0.5  # of a fetch: such workers need few CPUs
COPY_CALL_RULES = frozenset({"blocking_copy"})


def with_estimates(findings: Sequence[Finding], rules: RuleSet, scope: Scope, values: Values) -> tuple[Finding, ...]:
    """The findings of one scope with `estimate_ns` where a replay can tell, else with the reason why not."""
    graph: Graph | str | None = None
    done = []
    for finding in findings:
        edit_name = rules.rules[finding.rule].edit if finding.rule in rules.rules else ""
        if not edit_name or finding.caused_by or not finding.bound_ns:
            done.append(finding)
            continue
        if scope.ops is None:
            saved = _host_saving(finding, edit_name, scope, values)
        else:
            if graph is None:
                graph = _trusted_graph(scope)
            saved = graph if isinstance(graph, str) else _device_saving(finding, edit_name, scope, values, graph)
        if isinstance(saved, str):
            done.append(msgspec.structs.replace(finding, estimate_reason=saved))
        elif saved < 1:
            done.append(msgspec.structs.replace(finding, estimate_reason=NOTHING_SAVED))
        else:
            done.append(msgspec.structs.replace(finding, estimate_ns=int(min(saved, finding.bound_ns))))
    return tuple(done)


def _trusted_graph(scope: Scope) -> Graph | str:
    graph = build(scope)
    if isinstance(graph, str):
        return graph
    good, error = trusted(graph)
    if not good:
        return f"replaying the recording unchanged misses its length by {format_percent(error)}"
    return graph


def _device_saving(finding: Finding, edit_name: str, scope: Scope, values: Values, graph: Graph) -> float | str:
    """ns a step, or why there is no telling."""
    edit = _edit(finding, edit_name, scope, values, graph)
    if isinstance(edit, str):
        return edit
    plain = replay(graph)
    share = max(0.0, plain - replay(graph, edit)) / plain
    return share * scope.per_step(scope.account.total)


def _edit(finding: Finding, name: str, scope: Scope, values: Values, graph: Graph) -> Edit | str:
    assert scope.host is not None
    if name == "more_workers":
        waits = loader_waits(scope) or Intervals.empty()
        return Edit(drop=waits, floor_ns=(_loader_floor(values, 0.0, batches_a_step(scope)) or 0.0) * graph.steps)
    if name == "remove_pause":
        return Edit(drop=scope.host.checkpoint_log)
    if name == "remove_part":
        return Edit(drop=reduce(Intervals.union, map(scope.account.owned_by, finding.parts), Intervals.empty()))
    if name == "remove_idle":
        if finding.rule == "cpu_ops_in_step":
            return Edit(drop=slow_cpu_ops(scope)[0])
        part = scope.per_step(scope.parts.get("idle.input", 0))
        return Edit(drop=scope.account.owned_by("idle.input"), drop_share=min(1.0, finding.bound_ns / max(1.0, part)))
    if name == "overlap_copy":
        return Edit(overlap_copies=True)
    if name == "shrink_launch":
        pauses = scope.host.input.union(scope.host.checkpoint_log).union(scope.host.compile).union(scope.host.gc)
        return Edit(free_launch=scope.host.active.subtract(pauses))
    if name == "remove_sync":
        waiting = graph.wait_for >= 0
        if finding.rule in READBACK_RULES:
            return Edit(no_wait=waiting & _waits_of_readbacks(scope, graph))
        if finding.rule in COPY_CALL_RULES:
            return Edit(no_wait=waiting & graph.is_copy_call)
        return Edit(no_wait=waiting & ~graph.is_copy_call)
    return f"no replay is defined for {name}"


def _waits_of_readbacks(scope: Scope, graph: Graph) -> np.ndarray:
    """Events in which a small copy to the host finished."""
    assert scope.ops is not None
    ops = scope.ops
    ends = np.sort(ops.end[(ops.kind == Kind.MEMCPY) & (ops.copy_kind == CopyKind.D2H) & (ops.bytes <= 1024)])
    following = np.searchsorted(ends, graph.begin)
    near = np.zeros(graph.begin.size, bool)
    inside = following < ends.size
    # the copy ends while the call waits: its end lies between the call's start and its return
    returns = np.append(graph.think_start[1:], graph.end)
    near[inside] = ends[following[inside]] <= returns[inside]
    return near


def _host_saving(finding: Finding, edit_name: str, scope: Scope, values: Values) -> float | str:
    """A run without GPU work is one line of host time: what is taken out is saved, less what must still be waited for."""
    step = scope.per_step(scope.account.total)
    if edit_name == "more_workers":
        if _number(values, "dataset_in_memory"):
            return "the data lie in memory already: workers would only copy them"
        if (scope.timeline.host.torch_threads or 1) > 1 and (_number(values, "loader_io_share") or 0) < MOSTLY_WAITING:
            return (
                "without a GPU the training's own threads take the CPUs that workers would need, and what they would "
                "leave is not in the recording"
            )
        rest = step - scope.per_step(scope.parts.get("host.input", 0))
        floor = _loader_floor(values, rest, batches_a_step(scope))
        if floor is None:
            return "the time to fetch a batch was not recorded"
        if floor >= step:
            return (
                f"more workers alone bring nothing here: fetching and the rest of the step together need "
                f"{format_ns(floor)} of the usable CPUs, as long as the step takes or longer"
            )
        return step - max(rest, floor)
    if edit_name in ("remove_pause", "remove_idle", "remove_part"):
        return float(finding.bound_ns)
    return "on a run without GPU work only waits for data and pauses can be replayed"


def _loader_floor(values: Values, rest: float, batches: int) -> float | None:
    """Least step time, ns, with the workers that the advice leads to: as many as needed and at most one a usable CPU.

    Each delivers a batch a fetch time, and a step takes `batches`; all of them and the main process (`rest` of CPU time a step) share the CPUs. None where
    the time to fetch was not recorded.
    """
    fetch, needed, usable = (
        _number(values, name) for name in ("loader_fetch_time", "num_workers_needed", "usable_cpus")
    )
    if fetch is None or needed is None:
        return None
    fetch *= batches
    if usable is None:
        return fetch / needed
    # What a fetch spent queued for a CPU is neither work nor waiting for storage; the CPU floor below stands for it.
    blocked = _number(values, "loader_io_share") or 0.0
    workers = min(
        needed, max(1.0, usable / max(1 - blocked, 0.05))
    )  # workers that wait for storage need no CPU meanwhile
    return max(fetch / workers, (fetch * (1 - blocked) + rest) / usable)


def _number(values: Values, name: str) -> float | None:
    metric = values[name]
    return None if isinstance(metric, Missing) else float(metric.value)
