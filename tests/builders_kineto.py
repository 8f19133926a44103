"""Small Kineto traces by hand, laid out as each epoch of torch.profiler writes them (SCHEMAS: the table of epochs)."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Epoch = Literal["2021", "2022", "2024-absolute", "2024"]

_CATEGORIES_2021 = {
    "cpu_op": "Operator",
    "user_annotation": "Operator",
    "kernel": "Kernel",
    "gpu_memcpy": "Memcpy",
    "gpu_memset": "Memset",
    "cuda_runtime": "Runtime",
}
PROCESS = 4711
# Wall-clock ns of time 0 in the traces: 19 digits, as in real ones.
ORIGIN = 1_712_195_495_000_000_000


@dataclass
class KinetoTrace:
    """Collects events; all times in ns from the start of the trace (2021 and 2022 keep whole microseconds only).

    top: further top-level keys, or replacements of the usual ones (None removes one).
    """

    epoch: Epoch = "2024"
    top: dict[str, Any] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)

    def add(self, cat: str, name: str, start: int, length: int, pid: Any, tid: Any, **args: Any) -> KinetoTrace:
        """One row of any category; args as Kineto names them, `_` for a space (`External_id`)."""
        row: dict[str, Any] = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid}
        if self.epoch == "2021":
            row["cat"] = _CATEGORIES_2021.get(cat, cat)
            row["tid"] = f"stream {tid}" if cat in ("kernel", "gpu_memcpy", "gpu_memset") else str(tid)
        head = json.dumps(row)[1:-1]
        body = json.dumps({key.replace("_", " "): value for key, value in args.items()})
        base = 0 if self.epoch == "2024" else ORIGIN
        self.events.append(
            f'  {{\n    {head},\n    "ts": {self._us(base + start)}, "dur": {self._us(length)},\n    "args": {body}\n  }}'
        )
        return self

    def kernel(self, name: str, start: int, length: int, correlation: int = 0, **args: Any) -> KinetoTrace:
        device, stream = args.pop("device", 0), args.pop("stream", 7)
        return self.add(
            "kernel", name, start, length, device, stream, device=device, stream=stream, correlation=correlation, **args
        )

    def copy(
        self, name: str, start: int, length: int, correlation: int = 0, bytes: int = 4096, **args: Any
    ) -> KinetoTrace:
        return self.add(
            "gpu_memcpy", name, start, length, 0, 7, device=0, stream=7, correlation=correlation, bytes=bytes, **args
        )

    def call(self, name: str, start: int, length: int, correlation: int = 0, cat: str = "cuda_runtime") -> KinetoTrace:
        return self.add(cat, name, start, length, PROCESS, PROCESS, cbid=211, correlation=correlation)

    def op(self, name: str, start: int, length: int, **args: Any) -> KinetoTrace:
        return self.add("cpu_op", name, start, length, PROCESS, PROCESS, **args)

    def annotation(self, name: str, start: int, length: int) -> KinetoTrace:
        return self.add("user_annotation", name, start, length, PROCESS, PROCESS)

    def raw(self, event: str) -> KinetoTrace:
        """An event as text, however wrong."""
        self.events.append("  " + event)
        return self

    def text(self) -> str:
        top: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [
                {
                    "id": 0,
                    "name": "NVIDIA T4",
                    "computeMajor": 7,
                    "computeMinor": 5,
                    "numSms": 40,
                    "totalGlobalMem": 15828320256,
                }
            ],
        }
        if self.epoch == "2024":
            top |= {"displayTimeUnit": "ms", "baseTimeNanoseconds": ORIGIN}
        top |= self.top
        head = "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in top.items() if value is not None)
        return "{\n" + head + '  "traceEvents": [\n' + ",\n".join(self.events) + '\n  ],\n  "traceName": "t"\n}\n'

    def write(self, path: Path) -> Path:
        """The file, gzipped when its name ends in .gz."""
        data = self.text().encode()
        path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
        return path

    def _us(self, ns: int) -> str:
        return f"{ns // 1000}.{ns % 1000:03}" if self.epoch.startswith("2024") else str(ns // 1000)
