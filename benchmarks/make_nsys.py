"""Write a large Nsight Systems export to measure the reader with: N kernels, N launches, copies, syncs and NVTX steps.

    python benchmarks/make_nsys.py /tmp/big.sqlite --events 5000000

The schema is that of exporter 2025.5 (every column of it, since SQLite has to step over those that nobody reads). Each step
copies a batch in, launches 500 kernels that queue up behind the host, and ends in a cudaStreamSynchronize. Same N, same file.
"""

from __future__ import annotations

import argparse
import sqlite3
import time
from pathlib import Path

import numpy as np

KERNEL = (
    "start end deviceId contextId greenContextId streamId correlationId globalPid demangledName shortName mangledName launchType "
    "cacheConfig registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory dynamicSharedMemory "
    "localMemoryPerThread localMemoryTotal gridId sharedMemoryExecuted graphNodeId sharedMemoryLimitConfig qmdBulkReleaseDone "
    "qmdPreexitDone qmdLastCtaDone graphId clusterX clusterY clusterZ clusterSchedulingPolicy maxPotentialClusterSize "
    "maxActiveClusters"
)
MEMCPY = (
    "start end deviceId contextId greenContextId streamId correlationId globalPid bytes copyKind deprecatedSrcId srcKind dstKind "
    "srcDeviceId srcContextId dstDeviceId dstContextId migrationCause graphNodeId virtualAddress copyCount"
)
RUNTIME = "start end eventClass globalTid correlationId nameId returnValue callchainId"
SYNC = "start end deviceId contextId greenContextId streamId correlationId globalPid deprecatedSyncType syncType eventId eventSyncId"
NVTX = (
    "start end eventType rangeId category color text globalTid endGlobalTid textId domainId uint64Value int64Value doubleValue "
    "uint32Value int32Value floatValue jsonTextId jsonText"
)

KERNELS_A_STEP = 500
PID = 4242
GLOBAL_PID = (1 << 48) | (PID << 24)
GLOBAL_TID = GLOBAL_PID | PID
LAUNCH_NS, HOST_NS, LATENCY_NS = 4_000, 2_000, 3_000
NAMES = [
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int, float)",
    "ampere_sgemm_128x64_tn",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int>(cudnnTensorStruct)",
    "sm80_xmma_fprop_implicit_gemm_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(at::native::ReduceOp<float>)",
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
]
# device, context, green context, stream; local memory per thread and in all; and what comes after gridId.
PLACE, LOCAL, REST = (0, 1, 0, 7), (0, 250871808), (32768, None, 0, None, None, None, None, 0, 0, 0, 1, 0, 0)
API = ["cudaLaunchKernel_v7000", "cudaMemcpyAsync_v3020", "cudaStreamSynchronize_v3020"]
RANGES = ["forward", "backward", "optimizer"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000, help="kernels, and as many launches")
    options = parser.parse_args()
    began = time.perf_counter()
    write(options.file, options.events)
    print(f"{options.file}: {options.file.stat().st_size / 1e6:.0f} MB in {time.perf_counter() - began:.0f} s")


def write(path: Path, events: int) -> None:
    """The file, anew."""
    path.unlink(missing_ok=True)
    db = sqlite3.connect(path)
    db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA page_size = 4096;")
    for table, columns in (
        ("CUPTI_ACTIVITY_KIND_KERNEL", KERNEL),
        ("CUPTI_ACTIVITY_KIND_MEMCPY", MEMCPY),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", RUNTIME),
        ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", SYNC),
        ("NVTX_EVENTS", NVTX),
    ):
        kinds = {"text": "TEXT", "jsonText": "TEXT", "doubleValue": "REAL", "floatValue": "REAL"}
        typed = ", ".join(f"{name} {kinds.get(name, 'INTEGER')}" for name in columns.split())
        db.execute(f"CREATE TABLE {table} ({typed})")
    db.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)")
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate([*NAMES, *API]))
    db.execute("CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT)")
    db.executemany(
        "INSERT INTO META_DATA_EXPORT VALUES (?, ?)",
        [("EXPORT_PRODUCT_VERSION", "2025.5.2.266"), ("EXPORT_SCHEMA_VERSION", "3.24.0")],
    )
    random = np.random.default_rng(7)
    clock = gpu_free = 1_000_000_000
    correlation = 100
    for first in range(0, events, KERNELS_A_STEP):
        count = min(KERNELS_A_STEP, events - first)
        clock, gpu_free, correlation = _step(db, first // KERNELS_A_STEP, count, clock, gpu_free, correlation, random)
    db.execute(
        "CREATE TABLE ANALYSIS_DETAILS (globalVid INTEGER, duration INTEGER, startTime INTEGER, stopTime INTEGER)"
    )
    db.execute("INSERT INTO ANALYSIS_DETAILS VALUES (0, ?, 0, ?)", (clock, clock))
    db.commit()
    db.close()


def _step(
    db: sqlite3.Connection,
    step: int,
    count: int,
    clock: int,
    gpu_free: int,
    correlation: int,
    random: np.random.Generator,
) -> tuple[int, int, int]:
    """One step's rows; (host clock, when the GPU is free, next correlation id) after it."""
    began = clock
    # The copy of the batch.
    _rows(
        db, "CUPTI_ACTIVITY_KIND_RUNTIME", [(clock, clock + 8_000, 0, GLOBAL_TID, correlation, len(NAMES) + 1, 0, None)]
    )
    copy_start = max(clock + 6_000, gpu_free)
    gpu_free = copy_start + 400_000
    _rows(
        db,
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        [(copy_start, gpu_free, 0, 1, None, 7, correlation, GLOBAL_PID, 10_000_000, 1, None, 1, 2, *[None] * 7, 1)],
    )
    clock += 10_000
    launch = clock + np.arange(count, dtype=np.int64) * (LAUNCH_NS + HOST_NS)
    length = random.integers(2_000, 16_000, count)
    # A kernel starts when it has arrived and the stream is free: start[i] = max(arrival[i], end[i-1] + 1 us).
    busy = np.cumsum(length + 1_000)
    arrival = launch + LAUNCH_NS + LATENCY_NS
    end = np.maximum.accumulate(np.maximum(arrival, gpu_free) - (busy - length - 1_000)) + busy - 1_000
    start = end - length
    names = random.integers(0, len(NAMES), count)
    ids = np.arange(correlation + 1, correlation + 1 + count)
    grid = random.integers(1, 4_000, count)
    _rows(
        db,
        "CUPTI_ACTIVITY_KIND_KERNEL",
        [
            (s, e, *PLACE, i, GLOBAL_PID, n, n, n, 1, 1, 32 + 8 * n, g, 2, 1, 256, 1, 1, 0, 1024 * n, *LOCAL, i, *REST)
            for s, e, i, n, g in zip(
                start.tolist(), end.tolist(), ids.tolist(), names.tolist(), grid.tolist(), strict=True
            )
        ],
    )
    _rows(
        db,
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        [
            (s, s + LAUNCH_NS, 0, GLOBAL_TID, i, len(NAMES), 0, None)
            for s, i in zip(launch.tolist(), ids.tolist(), strict=True)
        ],
    )
    clock = int(launch[-1]) + LAUNCH_NS + HOST_NS
    forward, backward = clock - (clock - began) * 2 // 3, clock - (clock - began) // 10
    correlation += count + 1
    gpu_free = int(end[-1])
    waited = max(clock + 5_000, gpu_free + 2_000)
    _rows(db, "CUPTI_ACTIVITY_KIND_RUNTIME", [(clock, waited, 0, GLOBAL_TID, correlation, len(NAMES) + 2, 0, None)])
    _rows(
        db,
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        [(clock, waited, 0, 1, None, 7, correlation, GLOBAL_PID, None, 3, 4294967295, 4294967295)],
    )
    clock = waited + 50_000
    parts = [
        ("step", began, clock, step),
        *zip(RANGES, (began, forward, backward), (forward, backward, waited), [None] * 3, strict=True),
    ]
    _rows(
        db,
        "NVTX_EVENTS",
        [
            (s, e, 59, None, None, None, text, GLOBAL_TID, None, None, 0, None, index, *[None] * 6)
            for text, s, e, index in parts
        ],
    )
    return clock, gpu_free, correlation + 1


def _rows(db: sqlite3.Connection, table: str, rows: list[tuple[object, ...]]) -> None:
    db.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)


if __name__ == "__main__":
    main()
