"""What reading an Nsight Systems export costs, against only fetching its columns: seconds and peak memory of each.

    python benchmarks/make_nsys.py /tmp/big.sqlite --events 5000000
    python benchmarks/read_nsys.py /tmp/big.sqlite

Each way runs in a process of its own, so that the peak is its own; of the runs the fastest counts, since others slow a run and nothing hastens it. `bare` fetches the recorded columns that the reader
needs, one table after the other, into Arrow batches that stay in memory; `reader` is `read_nsys_sqlite`.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

COLUMNS = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, streamId, correlationId, globalPid, demangledName, gridX, gridY, gridZ, "
    "blockX, blockY, blockZ, registersPerThread, staticSharedMemory, dynamicSharedMemory, localMemoryPerThread, graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, deviceId, streamId, correlationId, globalPid, bytes, copyKind, srcKind, dstKind",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, globalTid, correlationId, nameId",
    "NVTX_EVENTS": "start, end, globalTid, textId, domainId, int64Value",
}


def bare(path: Path) -> int:
    """Rows fetched."""
    import adbc_driver_manager
    import adbc_driver_sqlite
    import nanoarrow

    held = []
    with (
        adbc_driver_sqlite.connect(f"file:{path}?mode=ro&immutable=1") as driver,
        adbc_driver_manager.AdbcConnection(driver) as connection,
    ):
        for table, columns in COLUMNS.items():
            with adbc_driver_manager.AdbcStatement(connection) as statement:
                statement.set_options(**{"adbc.sqlite.query.batch_rows": "16384"})
                statement.set_sql_query(f"SELECT {columns} FROM {table}")
                held += list(nanoarrow.c_array_stream(statement.execute_query()[0]))
    return sum(batch.length for batch in held)


def reader(path: Path) -> int:
    """Rows of the timeline."""
    from gpudiag.read.nsys_sqlite import read_nsys_sqlite

    timeline = read_nsys_sqlite(path)
    return sum(len(t) for t in (timeline.gpu_ops, timeline.api_calls, timeline.ranges) if t is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=("bare", "reader"), help="run one way here and print its figures")
    options = parser.parse_args()
    if options.only:
        began = time.perf_counter()
        rows = {"bare": bare, "reader": reader}[options.only](options.file)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(time.perf_counter() - began, time.process_time(), peak, rows)
        return
    seconds = {}
    for way in ("bare", "reader"):
        runs = []
        for _ in range(options.repeat):
            command = [sys.executable, __file__, str(options.file), "--only", way]
            runs.append(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
        seconds[way] = min(float(run[0]) for run in runs)
        cpu = min(float(run[1]) for run in runs)
        peak = max(int(run[2]) for run in runs) / 2**20
        print(f"{way:8} {seconds[way]:6.2f} s  {cpu:6.2f} s of CPU  {peak:5.2f} GiB peak  {int(runs[0][3]):,} rows")
    print(f"reader / bare = {seconds['reader'] / seconds['bare']:.2f}")


if __name__ == "__main__":
    main()
