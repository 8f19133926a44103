"""Whole-file figures of each device: the `devices` of the diagnosis (definitions of traces/REFERENCE.tsv)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpudiag.diagnosis import DeviceFigures
from gpudiag.intervals import Intervals
from gpudiag.timeline import Bool, CopyKind, GpuOps, Kind, Timeline
from gpudiag.units import NS_PER_MS

COPY_PARTS: tuple[tuple[str, tuple[CopyKind, ...]], ...] = (
    ("h2d", (CopyKind.H2D,)),
    ("d2h", (CopyKind.D2H,)),
    ("d2d", (CopyKind.D2D,)),
    ("p2p", (CopyKind.P2P,)),
    ("managed", (CopyKind.MANAGED,)),
    ("other", (CopyKind.UNKNOWN, CopyKind.H2H, CopyKind.NONE)),
)


@dataclass(frozen=True, eq=False)
class Layers:
    """What one device did, as unions by rank: compute > communication > copies > memsets.

    Each `*_exposed` is what is left of a union when all higher ranks are taken out; `busy` is the union of all.
    """

    compute: Intervals
    comm: Intervals
    comm_exposed: Intervals
    copies: Intervals
    copies_exposed: dict[str, Intervals]
    memset_exposed: Intervals
    busy: Intervals


def device_layers(ops: GpuOps) -> Layers:
    """The layers of the operations of one device (pass the rows of that device only)."""
    compute = _union(ops, (ops.kind == Kind.KERNEL) | (ops.kind == Kind.GRAPH))
    comm = _union(ops, ops.kind == Kind.COMM)
    comm_exposed = comm.subtract(compute)
    taken = compute.union(comm)
    is_copy = ops.kind == Kind.MEMCPY
    copies = _union(ops, is_copy)
    exposed: dict[str, Intervals] = {}
    copied = ops.take(np.flatnonzero(is_copy))
    for label, kinds in COPY_PARTS:
        mine = _union(copied, np.isin(copied.copy_kind, kinds))
        exposed[label] = mine.subtract(taken)
        taken = taken.union(mine)
    memsets = _union(ops, ops.kind == Kind.MEMSET)
    memset_exposed = memsets.subtract(taken)
    return Layers(compute, comm, comm_exposed, copies, exposed, memset_exposed, taken.union(memsets))


def device_figures(timeline: Timeline, device: int, ops: GpuOps, layers: Layers) -> DeviceFigures:
    """The figures of one device over the whole file. ops: its rows only, at least one."""
    span = int(ops.end.max() - ops.start.min())
    busy = layers.busy
    between = busy.start[1:] - busy.end[:-1]
    info = timeline.devices.get(device)
    return DeviceFigures(
        rank=timeline.rank,
        device=device,
        name=info.name if info else "",
        span_ns=span,
        busy_ns=busy.total(),
        idle_ns=span - busy.total(),
        compute_union_ns=layers.compute.total(),
        comm_union_ns=layers.comm.total(),
        comm_exposed_ns=layers.comm_exposed.total(),
        copy_union_ns=layers.copies.total(),
        copy_exposed_ns=sum(part.total() for part in layers.copies_exposed.values()),
        memset_exposed_ns=layers.memset_exposed.total(),
        kernels=int(np.isin(ops.kind, (Kind.KERNEL, Kind.COMM, Kind.GRAPH)).sum()),
        comm_kernels=int((ops.kind == Kind.COMM).sum()),
        copies=int((ops.kind == Kind.MEMCPY).sum()),
        gaps_over_1ms=int((between > NS_PER_MS).sum()),
    )


def split_by_device(ops: GpuOps) -> dict[int, GpuOps]:
    """The rows of each device, by rising device number."""
    if (ops.device == ops.device[0]).all():
        return {int(ops.device[0]): ops}
    devices = np.unique(ops.device)
    return {int(device): ops.take(ops.device == device) for device in devices}


def _union(ops: GpuOps, mask: Bool) -> Intervals:
    if mask.all():
        return Intervals.union_of(ops.start, ops.end)
    return Intervals.union_of(ops.start[mask], ops.end[mask])
