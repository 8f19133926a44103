"""One rank and one device over its window, with everything that the metrics need, worked out once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gpudiag.account import HOST_DEVICE, Account, device_account, host_account
from gpudiag.diagnosis import DeviceFigures
from gpudiag.epochs import EpochStart, epoch_start, without_epoch_start
from gpudiag.figures import Layers, device_figures, device_layers, split_by_device
from gpudiag.host import STALL_NS, HostWork, Launches, host_work, join_launches, named, of_processes
from gpudiag.intervals import Int64, Intervals
from gpudiag.kernels import KernelTable
from gpudiag.names import EVAL, Names
from gpudiag.steps import MIN_STEPS, find_steps
from gpudiag.timeline import CpuOps, GpuOps, Ranges, Steps, Timeline


@dataclass(frozen=True, eq=False)
class Scope:
    """device -1: the host of a run without GPU work; then ops, layers, host, launches and figures are None.

    all_steps: warm-up included. window: the steady steps without evaluation, else the span. ops: all operations of the
    device; launches: their join to timeline.api_calls.
    """

    timeline: Timeline
    names: Names
    device: int
    all_steps: Steps
    window: Intervals
    account: Account
    ops: GpuOps | None = None
    launches: Launches | None = None
    layers: Layers | None = None
    host: HostWork | None = None
    figures: DeviceFigures | None = None

    @property
    def rank(self) -> int:
        return self.timeline.rank

    @property
    def steps(self) -> Steps:
        """The steady steps; empty when the account is over the span."""
        return self.account.steps

    @property
    def count(self) -> int:
        """What a total is divided by to be 'a step': the steady steps, or 1 for the span."""
        return max(1, len(self.steps))

    def per_step(self, total: float) -> float:
        return total / self.count

    @property
    def evaluation(self) -> tuple[int, float]:
        """Evaluation within the steady steps, as they lie in the recording: ns, and its share of them. The account is without it."""
        if not len(self.steps):
            return 0, 0.0
        # a step that begins an epoch may be left out between them
        stretch = int((self.steps.end - self.steps.start).sum())
        apart = stretch - self.account.total
        return apart, apart / max(1, stretch)

    @cached_property
    def parts(self) -> dict[str, int]:
        return self.account.parts

    @cached_property
    def left_out(self) -> EpochStart | None:
        """The start of an epoch that is not among `steps`."""
        return epoch_start(self.timeline, self.all_steps.steady())

    @cached_property
    def input_lost(self) -> Intervals:
        """The time that the account gives to waiting for input."""
        return self.account.owned_by("idle.input" if self.ops is not None else "host.input")

    @property
    def own_work(self) -> float:
        """Share of the window in which the device does work of its own: kernels, copies, memsets; waiting in collectives is none."""
        mine = sum(
            ns for part, ns in self.parts.items() if part.startswith(("compute", "copy_exposed", "memset_exposed"))
        )
        return mine / max(1, self.account.total)

    @cached_property
    def in_window(self) -> slice | npt.NDArray[np.intp]:
        """Which operations start inside the window: rows of ops."""
        assert self.ops is not None
        if len(self.window) == 1:
            low, high = np.searchsorted(self.ops.start, [self.window.start[0], self.window.end[0]])
            return slice(int(low), int(high))
        return np.flatnonzero(self.window.contains(self.ops.start))

    @cached_property
    def window_ops(self) -> GpuOps:
        assert self.ops is not None
        return self.ops.take(self.in_window)

    @cached_property
    def window_calls(self) -> npt.NDArray[np.int32]:
        """For each of window_ops its row in timeline.api_calls, -1 none."""
        assert self.launches is not None
        return self.launches.call_of[self.in_window]

    @cached_property
    def feeding(self) -> npt.NDArray[np.bool_]:
        """The rows of timeline.api_calls made by the threads that feed this device."""
        calls = self.timeline.api_calls
        assert calls is not None and self.host is not None
        return self.host.made_by_feeding(calls)

    @cached_property
    def kernels(self) -> KernelTable:
        """The kernels of the window that are no communication."""
        return KernelTable.of(self.window_ops, self.timeline.strings)

    @cached_property
    def _processes(self) -> Int64:
        """The processes that launched the work of this device; empty when that is not known, or without a GPU."""
        return np.unique(self.ops.process[self.ops.process > 0]) if self.ops is not None else np.empty(0, np.int64)

    @cached_property
    def ranges(self) -> Ranges | None:
        """timeline.ranges of the processes that work on this device: one file may hold several ranks."""
        return of_processes(self.timeline.ranges, self._processes)

    @cached_property
    def cpu_ops(self) -> CpuOps | None:
        """timeline.cpu_ops of the processes that work on this device."""
        return of_processes(self.timeline.cpu_ops, self._processes)

    @property
    def before_first(self) -> Intervals:
        """The window before the first recorded operation of the device: see account.device_account."""
        assert self.layers is not None
        return (
            self.window.clip(int(self.window.start[0]), int(self.layers.busy.start[0]))
            if len(self.window)
            else self.window
        )

    @property
    def idle_while_queued(self) -> Intervals:
        """Idle time of the window in which launched work had not started (HostWork.stalled), in pieces of at least STALL_NS."""
        assert self.host is not None
        return self.idle.intersect(self.host.stalled).at_least(STALL_NS)

    @cached_property
    def idle(self) -> Intervals:
        """Idle time of the device in the window."""
        assert self.layers is not None
        return self.window.subtract(self.layers.busy)


IDLE_DEVICE = 0.1  # a device with under a tenth of the busiest one's work takes no part in the run's speed


def working(scopes: Sequence[Scope]) -> list[Scope]:
    """The devices that have a real share of the work; the host scopes of runs without GPU work where there is no other."""
    on_gpu = [scope for scope in scopes if scope.ops is not None]
    if not on_gpu:
        return list(scopes)
    most = max(scope.own_work for scope in on_gpu)
    return [scope for scope in on_gpu if scope.own_work >= IDLE_DEVICE * most]


def room_of(scope: Scope, others: Sequence[Scope]) -> float:
    """Share of the step that is left beside the busiest other device's own work: all that idle time here can be worth."""
    return 1 - max((one.own_work for one in others if one is not scope and one.ops is not None), default=0.0)


def scopes_of(timeline: Timeline) -> Iterator[Scope]:
    """The scopes of one timeline: one a device that did anything, else one for the host if steps or operators are known."""
    names = Names(timeline.strings)
    ops = timeline.gpu_ops
    if ops is None or not len(ops):
        scope = _host_scope(timeline, names)
        if scope is not None:
            yield scope
        return
    for device, mine in split_by_device(ops).items():
        launches = join_launches(mine, timeline.api_calls) if timeline.api_calls is not None else None
        layers = device_layers(mine)
        processes = np.unique(mine.process[mine.process > 0])
        steps = find_steps(timeline, mine, int(processes[0]) if processes.size == 1 else None)
        steady = without_epoch_start(timeline, steps.steady())
        if len(steady) >= MIN_STEPS:
            window = _window(of_processes(timeline.ranges, processes), names, steady)
        else:
            steady, window = Steps.none(), Intervals.single(int(mine.start.min()), int(mine.end.max()))
        host = host_work(timeline, mine, launches, names)
        account = device_account(timeline.rank, device, window, layers, host, steady)
        figures = device_figures(timeline, device, mine, layers)
        yield Scope(timeline, names, device, steps, window, account, mine, launches, layers, host, figures)


def _window(ranges: Ranges | None, names: Names, steady: Steps) -> Intervals:
    """From the first steady step to the end of the last, without evaluation (by the ranges of the same processes)."""
    window = Intervals.union_of(steady.start, steady.end)
    without = window.subtract(named(ranges, names, EVAL))
    return without if len(without) else window


def _host_scope(timeline: Timeline, names: Names) -> Scope | None:
    """The run without GPU work: its steps, or the stretch in which operators or ranges were recorded."""
    steps = find_steps(timeline, None)
    steady = without_epoch_start(timeline, steps.steady())
    if len(steady) >= MIN_STEPS:
        window = _window(timeline.ranges, names, steady)
    else:
        steady = Steps.none()
        tables = [t for t in (timeline.cpu_ops, timeline.ranges) if t is not None and len(t)]
        if not tables:
            return None
        window = Intervals.single(min(int(t.start.min()) for t in tables), max(int(t.end.max()) for t in tables))
    account = host_account(timeline, names, window, steady, None)
    return Scope(timeline, names, HOST_DEVICE, steps, window, account)
