"""Small timelines written by hand: what a test states is what it holds. Times in ns unless a name says us."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpudiag.metrics import measure
from gpudiag.metrics.across import run_facts
from gpudiag.scope import Scope, scopes_of
from gpudiag.timeline import (
    ApiCalls,
    CopyKind,
    CpuOps,
    DeviceInfo,
    GpuOps,
    Kind,
    LoaderBatches,
    LoaderInfo,
    MemKind,
    Overheads,
    Ranges,
    Samples,
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
    costs: list[tuple[Any, ...]] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)
    launched: int = 1_000_000

    def code(self, name: str) -> int:
        if name not in self.strings:
            self.strings.append(name)
        return self.strings.index(name)

    def kernel(
        self, start: int, end: int, name: str = "kernel", *, correlation: int = -1, device: int = 0, stream: int = 7,
        kind: Kind = Kind.KERNEL, process: int = PROCESS, blocks: int = -1,
    ) -> None:  # fmt: skip
        self.ops.append(
            (start, end, device, stream, kind, self.code(name), -1, CopyKind.NONE, 0, 0, correlation, process, blocks)
        )

    def copy(
        self, start: int, end: int, size: int, kind: CopyKind = CopyKind.H2D, memory: MemKind = MemKind.PINNED, *,
        correlation: int = -1, device: int = 0, stream: int = 7, process: int = PROCESS,
    ) -> None:  # fmt: skip
        source, target = (memory, MemKind.DEVICE) if kind == CopyKind.H2D else (MemKind.DEVICE, memory)
        self.ops.append(
            (
                start,
                end,
                device,
                stream,
                Kind.MEMCPY,
                self.code(f"Memcpy {kind.name}"),
                size,
                kind,
                source,
                target,
                correlation,
                process,
                -1,
            )
        )

    def memset(self, start: int, end: int, size: int = 1024, *, device: int = 0) -> None:
        code = self.code("Memset")
        self.ops.append((start, end, device, 7, Kind.MEMSET, code, size, CopyKind.NONE, 0, 0, -1, PROCESS, -1))

    def call(
        self, start: int, end: int, name: str = "cudaLaunchKernel", *, correlation: int = -1, thread: int = THREAD,
        process: int = PROCESS,
    ) -> None:  # fmt: skip
        self.calls.append((start, end, process, thread, self.code(name), correlation))

    def launch(self, start: int, end: int, name: str = "kernel", *, lead: int = 5_000, **more: Any) -> None:
        """A kernel and its launch call, which begins `lead` ns before and lasts 2 us. more: of `kernel`."""
        self.launched += 1
        process = more.get("process", PROCESS)
        self.call(start - lead, start - lead + 2_000, correlation=self.launched, process=process, thread=process)
        self.kernel(start, end, name, correlation=self.launched, **more)

    def mark(
        self,
        start: int,
        end: int,
        name: str,
        *,
        domain: str = "",
        index: int = -1,
        thread: int = THREAD,
        process: int = PROCESS,
    ) -> None:
        self.marks.append((start, end, process, thread, self.code(name), self.code(domain), index))

    def operator(self, start: int, end: int, name: str, *, thread: int = THREAD, process: int = PROCESS) -> None:
        self.operators.append((start, end, process, thread, self.code(name), -1))

    def overhead(self, start: int, end: int, name: str, *, process: int = PROCESS) -> None:
        self.costs.append((start, end, process, THREAD, self.code(name), name == "COMMAND_BUFFER_FULL"))

    def steps(self, count: int, length: int) -> None:
        """`count` steps of `length` ns from 0 on."""
        for step in range(count):
            self.mark(step * length, (step + 1) * length, f"ProfilerStep#{step}")

    def timeline(self, **more: Any) -> Timeline:
        """Tables without rows are None (not recorded), unless given."""
        tables: dict[str, Any] = {
            "source": Source("kineto", "test", "test"),
            "gpu_ops": gpu_ops(self.ops) if self.ops else None,
            "api_calls": _table(ApiCalls, self.calls),
            "ranges": _table(Ranges, self.marks),
            "cpu_ops": _table(CpuOps, self.operators),
            "overheads": _table(Overheads, self.costs),
            "devices": {0: DeviceInfo("NVIDIA Test", 100, (8, 0), 40 << 30, 1_555_000_000_000)},
        }
        return Timeline(strings=self.strings, **{**tables, **more})


def gpu_ops(rows: Sequence[tuple[Any, ...]]) -> GpuOps:
    ordered = sorted(rows, key=lambda row: (row[0], row[1]))
    columns = list(zip(*ordered, strict=True)) if ordered else [()] * 13
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
    *others, blocks = columns
    first = [np.array(column, kind) for column, kind in zip(others, kinds, strict=True)]
    return GpuOps(
        *first,
        blocks=np.array(blocks, np.int64),
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
    types = [_TYPES.get(name, np.int64) for name in kind.__dataclass_fields__]
    return kind(*[np.array(column, dtype) for column, dtype in zip(columns, types, strict=True)])


_TYPES: dict[str, Any] = {"name": np.int32, "domain": np.int32, "shapes": np.int32, "is_queue_full": bool}


def loader_batches(*rows: dict[str, int]) -> LoaderBatches:
    """Rows by column; what a row leaves out was not measured (-1), except loader, epoch and batch: 0."""
    names = list(LoaderBatches.__dataclass_fields__)
    absent = {name: 0 if name in ("loader", "epoch", "batch") else -1 for name in names}
    table = [{**absent, **row} for row in sorted(rows, key=lambda row: row["start"])]
    return LoaderBatches(**{name: np.array([row[name] for row in table], np.int64) for name in names})


def loader_info(**more: Any) -> LoaderInfo:
    plain: dict[str, Any] = {
        "loader": 0, "where": "train.py:7", "num_workers": 2, "batch_size": 32, "pin_memory": False, "prefetch_factor": 2,
        "persistent_workers": False, "start_method": "fork", "dataset": "Images", "dataset_length": 1000, "in_memory": False,
        "batches": 10,
    }  # fmt: skip
    return LoaderInfo(**{**plain, **more})


def samples(*rows: dict[str, float]) -> Samples:
    """Rows by column, `at` for the moment; what a row leaves out was not read; the GPU is busy unless `gpu_util` says no."""
    columns: dict[str, Any] = {}
    for name, text in Samples.__annotations__.items():
        kind = {"Int64": np.int64, "Int32": np.int32, "Float32": np.float32}[text]
        absent = {"device": 0, "gpu_util": 1.0}.get(name, np.nan if kind is np.float32 else -1)
        columns[name] = np.array([row.get(name, absent) for row in rows], kind)
    columns["start"] = columns["end"] = np.array([row["at"] for row in rows], np.int64)
    return Samples(**columns)


def scopes(recorder: Recorder, **more: Any) -> list[Scope]:
    return list(scopes_of(recorder.timeline(**more)))


def measured(recorder: Recorder, place: int = 0, **more: Any) -> dict[str, Any]:
    """The metrics of one scope (the first unless told) of a timeline with `more` in it."""
    found = scopes(recorder, **more)
    return measure(found[place], run_facts(found))
