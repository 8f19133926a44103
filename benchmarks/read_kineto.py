"""Time and memory of reading a Kineto trace, against only decoding it with msgspec into typed structs.

    python benchmarks/read_kineto.py /tmp/large.json [--runs 3]

Each measurement is a process of its own, the two kinds in turn; the best CPU time of each counts, since other programs on the
machine can only lengthen it. Limits (the project's): the whole analysis at most 3.5 times bare decoding, and 3 times the file
in memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import msgspec

BARE = "bare msgspec decode"
READ = "gpudiag.read_kineto"


class Args(msgspec.Struct, gc=False):
    device: int | None = None
    stream: int | str | None = None
    correlation: int | None = None
    bytes: int | str | None = None


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: Args | None = None


class Trace(msgspec.Struct):
    traceEvents: list[Event]  # noqa: N815


def bare(path: Path) -> int:
    """Decode the whole file at once into structs with the fields that an analysis needs; the number of events."""
    return len(msgspec.json.Decoder(Trace).decode(path.read_bytes()).traceEvents)


def read(path: Path) -> int:
    from gpudiag.read.kineto import read_kineto

    timeline = read_kineto(path)
    tables = (
        timeline.gpu_ops,
        timeline.api_calls,
        timeline.cpu_ops,
        timeline.ranges,
        timeline.py_calls,
        timeline.overheads,
    )
    return sum(len(table) for table in tables if table is not None)


def measure(kind: str, path: Path) -> dict[str, float]:
    """Seconds of CPU and of the clock, and peak resident bytes, of one run in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, str(path), "--only", "bare" if kind == BARE else "reader"],
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("path", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=("bare", "reader"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        clock, cpu = time.perf_counter(), time.process_time()
        rows = (bare if options.only == "bare" else read)(options.path)
        usage = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - clock, "rows": rows}
        print(json.dumps(usage | {"rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
        return
    size = options.path.stat().st_size
    results: dict[str, list[dict[str, float]]] = {BARE: [], READ: []}
    for _ in range(options.runs):
        for kind, runs in results.items():
            runs.append(measure(kind, options.path))
    print(f"{options.path.name}: {size / 1e6:.0f} MB")
    best = {kind: {key: min(run[key] for run in runs) for key in runs[0]} for kind, runs in results.items()}
    for kind, run in best.items():
        print(
            f"{kind:>22}: {run['cpu_s']:5.2f} s CPU, {run['wall_s']:5.2f} s, {run['rss'] / 1e6:5.0f} MB peak ({run['rss'] / size:.2f} x file), {run['rows']:.0f} rows"
        )
    print(
        f"{'ratio':>22}: {best[READ]['cpu_s'] / best[BARE]['cpu_s']:.2f} x CPU, {best[READ]['wall_s'] / best[BARE]['wall_s']:.2f} x clock"
    )


if __name__ == "__main__":
    main()
