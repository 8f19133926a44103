"""The Kineto reader against real recordings, the reference figures, and damage."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from gpudiag.intervals import Intervals
from gpudiag.read.kineto import read_kineto
from gpudiag.timeline import GpuOps, Kind

KERNELS = (Kind.KERNEL, Kind.GRAPH)


def _union(ops: GpuOps, *kinds: Kind) -> Intervals:
    rows = np.isin(ops.kind, kinds)
    return Intervals.union_of(ops.start[rows], ops.end[rows])


def _figures(ops: GpuOps) -> dict[str, int]:
    """The columns of REFERENCE.tsv, for the rows of one device."""
    compute, comm = _union(ops, *KERNELS), _union(ops, Kind.COMM)
    copies, memsets = _union(ops, Kind.MEMCPY), _union(ops, Kind.MEMSET)
    busy = _union(ops, *Kind)
    first, last = int(ops.start.min()), int(ops.end.max())
    gaps = busy.gaps(first, last)
    return {
        "span_ns": last - first,
        "busy_ns": busy.total(),
        "idle_ns": last - first - busy.total(),
        "compute_union_ns": compute.total(),
        "comm_union_ns": comm.total(),
        "comm_exposed_ns": comm.subtract(compute).total(),
        "copy_union_ns": copies.total(),
        "copy_exposed_ns": copies.subtract(compute.union(comm)).total(),
        "memset_exposed_ns": memsets.subtract(compute.union(comm).union(copies)).total(),
        "kernels": int(np.isin(ops.kind, (Kind.KERNEL, Kind.COMM, Kind.GRAPH)).sum()),
        "comm_kernels": int((ops.kind == Kind.COMM).sum()),
        "copies": int((ops.kind == Kind.MEMCPY).sum()),
        "gaps_over_1ms": int(((gaps.end - gaps.start) > 1_000_000).sum()),
    }


def test_device_figures_equal_an_independent_programs_to_the_nanosecond(traces: Path) -> None:
    with (traces / "REFERENCE.tsv").open() as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["file"].startswith("kineto/")]
    assert len(rows) > 20
    for row in rows:
        ops = read_kineto(traces / row["file"]).gpu_ops
        assert ops is not None
        assert np.unique(ops.device).tolist() == [int(row["device"])]
        assert _figures(ops) == {name: int(row[name]) for name in row if name not in ("file", "device")}, row["file"]
