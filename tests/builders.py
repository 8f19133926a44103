"""Small timelines written by hand: what a test states is what it holds. Times in ns unless a name says us."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpudiag.timeline import (
    ApiCalls,
    CopyKind,
    CpuOps,
    DeviceInfo,
    GpuOps,
    Kind,
    MemKind,
    Ranges,
    Source,
    Timeline,
)

PROCESS, THREAD = 100, 100


@dataclass
class Recorder:
    """Collects rows and makes a Timeline of them; every row goes to process 100, thread 100, device 0 unless told."""

    ops: list[tuple[Any, ...]] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    marks: list[tuple[Any, ...]] = field(default_factory=list)
    operators: list[tuple[Any, ...]] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)

    def code(self, name: str) -> int:
        if name not in self.strings:
            self.strings.append(name)
        return self.strings.index(name)

    def kernel(
        self, start: int, end: int, name: str = "kernel", *, correlation: int = -1, device: int = 0, stream: int = 7,
        kind: Kind = Kind.KERNEL, process: int = PROCESS,
    ) -> None:  # fmt: skip
        self.ops.append(
            (start, end, device, stream, kind, self.code(name), -1, CopyKind.NONE, 0, 0, correlation, process)
        )

    def copy(
        self, start: int, end: int, size: int, kind: CopyKind = CopyKind.H2D, memory: MemKind = MemKind.PINNED, *,
        correlation: int = -1, device: int = 0,
    ) -> None:  # fmt: skip
        source, target = (memory, MemKind.DEVICE) if kind == CopyKind.H2D else (MemKind.DEVICE, memory)
        self.ops.append(
            (
                start,
                end,
                device,
                7,
                Kind.MEMCPY,
                self.code(f"Memcpy {kind.name}"),
                size,
                kind,
                source,
                target,
                correlation,
                PROCESS,
            )
        )

    def call(
        self, start: int, end: int, name: str = "cudaLaunchKernel", *, correlation: int = -1, thread: int = THREAD
    ) -> None:
        self.calls.append((start, end, PROCESS, thread, self.code(name), correlation))

    def mark(self, start: int, end: int, name: str, *, index: int = -1, thread: int = THREAD) -> None:
        self.marks.append((start, end, PROCESS, thread, self.code(name), self.code(""), index))

    def operator(self, start: int, end: int, name: str, *, thread: int = THREAD) -> None:
        self.operators.append((start, end, PROCESS, thread, self.code(name), -1))

    def timeline(self, **more: Any) -> Timeline:
        """Tables without rows are None (not recorded), unless given."""
        return Timeline(
            source=Source("kineto", "test", "test"),
            strings=self.strings,
            gpu_ops=gpu_ops(self.ops) if self.ops else None,
            api_calls=_table(ApiCalls, self.calls),
            ranges=_table(Ranges, self.marks),
            cpu_ops=_table(CpuOps, self.operators),
            **{"devices": {0: DeviceInfo("NVIDIA Test", 100, (8, 0), 40 << 30, 1_555_000_000_000)}, **more},
        )


def gpu_ops(rows: Sequence[tuple[Any, ...]]) -> GpuOps:
    ordered = sorted(rows, key=lambda row: (row[0], row[1]))
    columns = list(zip(*ordered, strict=True)) if ordered else [()] * 12
    n = len(ordered)
    kinds = (
        np.int64,
        np.int64,
        np.int32,
        np.int64,
        np.int8,
        np.int32,
        np.int64,
        np.int8,
        np.int8,
        np.int8,
        np.int64,
        np.int64,
    )
    first = [np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]
    return GpuOps(
        *first,
        blocks=np.full(n, -1, np.int64),
        threads=np.full(n, -1, np.int32),
        registers=np.full(n, -1, np.int32),
        shared_bytes=np.full(n, -1, np.int64),
        local_bytes=np.full(n, -1, np.int64),
        occupancy=np.full(n, np.nan, np.float32),
        graph=np.zeros(n, np.int64),
    )


def _table(kind: Any, rows: list[tuple[Any, ...]]) -> Any:
    if not rows:
        return None
    columns = list(zip(*sorted(rows, key=lambda row: (row[0], row[1])), strict=True))
    types = [np.int32 if name in ("name", "domain", "shapes") else np.int64 for name in kind.__dataclass_fields__]
    return kind(*[np.array(column, dtype) for column, dtype in zip(columns, types, strict=True)])
