"""A host that launches and a device that runs in order, so that a case states what a script does and the timeline follows.

run = Sim()
for _ in range(10):
    with run.step():
        run.load(50 * MS)
        run.launch(5 * MS, count=8)
        run.sync()
timeline = run.timeline()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from builders import PROCESS, Recorder

from gpudiag.timeline import (
    CopyKind,
    HostInfo,
    Kind,
    LoaderBatches,
    LoaderInfo,
    MemKind,
    Samples,
    StepLog,
    Timeline,
)

US, MS, S = 1_000, 1_000_000, 1_000_000_000
LAUNCH, LATENCY = 4 * US, 5 * US  # an eager launch call, and from its start to that of the kernel on a free device
TENSOR_GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn"
FP32_GEMM = "ampere_sgemm_128x64_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> >(int)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long)"


class Sim(Recorder):
    """now: the host's time; free: when the device has done all that was launched. Both in ns."""

    def __init__(self, operators: bool = True) -> None:
        super().__init__()
        self.now = self.free = 100 * S
        self.operators_too, self.next, self.steps = operators, 0, 0
        self.batches: list[tuple[int, ...]] = []
        self.step_rows: list[tuple[int, int, int]] = []
        self.blocks: dict[int, int] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        begin = self.now
        yield
        self.mark(begin, self.now, f"gpudiag::step#{self.steps}")
        self.step_rows.append((begin, self.now, self.steps))
        self.steps += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self.now
        yield
        self.mark(begin, self.now, f"gpudiag::{name}")

    def think(self, ns: int) -> None:
        """The script's own code, which no operator covers."""
        self.now += ns

    def load(self, ns: int, *, fetch: int | None = None, cpu: float = 0.97, io: float = 0.01, collate: float = 0.05,
             worker: int = -1, epoch: int = 0, batch: int | None = None) -> None:  # fmt: skip
        """The loader's next: `ns` of waiting, for a batch that took `fetch` to make (the same, in the main process)."""
        begin = self.now
        self.now += ns
        self.mark(begin, self.now, "gpudiag::data_wait")
        took = ns if fetch is None else fetch
        number = len(self.batches) if batch is None else batch
        self.batches.append(
            (begin, self.now, self.now - took, self.now, int(took * (1 - collate)), int(took * collate), -1,
             int(took * cpu), int(took * io), worker, PROCESS + 1 + worker, epoch, number, 0)
        )  # fmt: skip

    def launch(self, ns: int, name: str = TENSOR_GEMM, *, count: int = 1, think: int = 0, op: str = "aten::mm",
               kind: Kind = Kind.KERNEL, stream: int = 7, late: int = 0, cost: int = LAUNCH) -> None:  # fmt: skip
        """`count` kernels of `ns`. think: host time before each, inside its operator; late: device time before it starts."""
        for _ in range(count):
            begin = self.now
            self.now += think
            self.next += 1
            self.call(self.now, self.now + cost, correlation=self.next)
            start = max(self.now + LATENCY, self.free) + late
            self.free = start + ns
            self.kernel(start, self.free, name, correlation=self.next, kind=kind, stream=stream)
            self.now += cost
            if self.operators_too:
                self.operator(begin, self.now, op)

    def transfer(self, size: int, rate: float, kind: CopyKind = CopyKind.H2D, memory: MemKind = MemKind.PINNED, *,
                 wait: bool = False, name: str = "cudaMemcpyAsync") -> None:  # fmt: skip
        """A copy of `size` bytes at `rate` bytes a second. wait: the call returns when it is done, as for pageable memory."""
        self.next += 1
        start = max(self.now + LATENCY, self.free)
        self.free = start + max(1_500, int(size / rate * 1e9))
        self.copy(start, self.free, size, kind, memory, correlation=self.next)
        done = self.free + 2 * US if wait else self.now + LAUNCH
        self.call(self.now, done, name, correlation=self.next)
        if self.operators_too:
            self.operator(self.now, done, "aten::copy_")
        self.now = done

    def sync(self, name: str = "cudaStreamSynchronize") -> None:
        done = max(self.now + 2 * US, self.free + 2 * US)
        self.call(self.now, done, name)
        self.now = done

    def item(self) -> None:
        """tensor.item(): four bytes to pageable memory, and the wait for them."""
        begin = self.now
        held, self.operators_too = self.operators_too, False
        self.transfer(4, 1e9, CopyKind.D2H, MemKind.PAGEABLE)
        self.sync()
        self.operators_too = held
        if held:
            self.operator(begin, self.now, "aten::_local_scalar_dense")

    def api(self, name: str, ns: int) -> None:
        self.call(self.now, self.now + ns, name)
        self.now += ns

    def idle_until_device(self) -> None:
        """The host's next moment at which the device has nothing left to do."""
        self.now = max(self.now, self.free)

    def timeline(self, *, loader: LoaderInfo | None = None, log_steps: bool = False, **more: Any) -> Timeline:
        if self.batches:
            columns = [np.array(column, np.int64) for column in zip(*self.batches, strict=True)]
            more = {"loader": LoaderBatches(*columns), "loaders": (loader or loader_info(),), **more}
        if log_steps:
            more["step_log"] = StepLog(*[np.array(column, np.int64) for column in zip(*self.step_rows, strict=True)])
        return super().timeline(**more)


def loader_info(num_workers: int = 0, *, in_memory: bool = False, persistent: bool = False, **more: Any) -> LoaderInfo:
    usual: dict[str, Any] = {
        "loader": 0,
        "where": "train.py:42",
        "num_workers": num_workers,
        "batch_size": 32,
        "pin_memory": False,
        "prefetch_factor": 2 if num_workers else None,
        "persistent_workers": persistent,
        "start_method": "fork" if num_workers else None,
        "dataset": "data.Images",
        "dataset_length": 100_000,
        "in_memory": in_memory,
        "batches": 100,
    }
    return LoaderInfo(**{**usual, **more})


def host(cpus: float = 16, machine: int = 16, **more: Any) -> HostInfo:
    return HostInfo(**{"usable_cpus": cpus, "machine_cpus": machine, "torch_threads": 1, "torch": "2.14.1",
                       "cuda": "12.8", "gpu_present": True, **more})  # fmt: skip


def samples(times: list[int], **columns: Any) -> Samples:
    """NVML rows of device 0 at these times; a column is one value or one a row."""
    usual = {
        "device": 0, "gpu_util": 0.99, "memory_used": 20 << 30, "memory_total": 40 << 30, "power_w": 250.0,
        "power_limit_w": 400.0, "temperature_c": 60.0, "sm_clock_mhz": 1410.0, "sm_clock_max_mhz": 1410.0, "reasons": 0,
        "pcie_gen": 4, "pcie_gen_max": 4, "pcie_width": 16, "pcie_width_max": 16, "other_processes": 0, "other_memory": 0,
        **columns,
    }  # fmt: skip
    floats = {"gpu_util", "power_w", "power_limit_w", "temperature_c", "sm_clock_mhz", "sm_clock_max_mhz"}
    longs = {"memory_used", "memory_total", "reasons", "other_memory"}
    moments = np.array(times, np.int64)

    def column(name: str) -> Any:
        kind = np.float32 if name in floats else np.int64 if name in longs else np.int32
        return np.broadcast_to(np.array(usual[name], kind), moments.shape).copy()

    return Samples(moments, moments, **{name: column(name) for name in usual})
