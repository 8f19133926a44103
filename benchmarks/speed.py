"""The whole of `gpudiag analyze`, from start to printed diagnosis, against only reading the file: the table of the README.

    python benchmarks/speed.py nsys /tmp/speed            5 M kernels + 5 M API calls, against fetching the columns into Arrow
    python benchmarks/speed.py kineto /tmp/speed TRACE    a 900 MB trace made of TRACE repeated, against decoding it with msgspec
    python benchmarks/speed.py growth /tmp/speed          0.1 to 10 M kernels: cost per million
    python benchmarks/speed.py ranks /tmp/speed TRACE     1 and 8 ranks of 100 MB, on one CPU and on all

Files are made once in the given folder. Each measurement is a process of its own, start-up included; both ways take turns, the
best of --runs counts, since other programs can only lengthen a run. Ratios are of wall time within one call of this program.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ANALYZE = (sys.executable, "-m", "gpudiag", "analyze")
GIB = 2**30


def measure(command: tuple[str, ...], cpus: int | None = None) -> dict[str, float]:
    """Seconds of the clock, of CPU (children included), and the peak resident bytes of the largest process."""
    allowed = sorted(os.sched_getaffinity(0))
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=(lambda: os.sched_setaffinity(0, allowed[:cpus])) if cpus else None,
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{' '.join(command)}: {said.decode()}")
    wall = time.perf_counter() - began
    return {"wall": wall, "cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss * 1024}


def best(commands: dict[str, tuple[str, ...]], runs: int) -> dict[str, dict[str, float]]:
    """The best figures of each command, run in turn."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            results[name].append(measure(command))
    return {name: {key: min(run[key] for run in of) for key in of[0]} for name, of in results.items()}


def against_bare(path: Path, bare: str, runs: int, limit: float) -> None:
    got = best(
        {"bare": (sys.executable, str(HERE / bare), str(path), "--only", "bare"), "analyze": (*ANALYZE, str(path))},
        runs,
    )
    for name, run in got.items():
        print(f"{name:8} {run['wall']:6.2f} s  {run['cpu']:6.2f} s CPU  {run['rss'] / GIB:5.2f} GiB peak")
    ratio = got["analyze"]["wall"] / got["bare"]["wall"]
    print(f"analyze / bare = {ratio:.2f} (limit {limit}), CPU {got['analyze']['cpu'] / got['bare']['cpu']:.2f}; "
          f"peak / file = {got['analyze']['rss'] / path.stat().st_size:.2f}")  # fmt: skip


def made_nsys(folder: Path, events: int) -> Path:
    path = folder / f"nsys_{events}.sqlite"
    if not path.exists():
        subprocess.run([sys.executable, str(HERE / "make_nsys.py"), str(path), "--events", str(events)], check=True)
    return path


def made_kineto(folder: Path, trace: Path, megabytes: int, name: str = "kineto") -> Path:
    path = folder / f"{name}_{megabytes}.json"
    if not path.exists():
        command = [sys.executable, str(HERE / "make_kineto.py"), str(trace), str(path), "--mb", str(megabytes)]
        subprocess.run(command, check=True)
    return path


def growth(folder: Path, runs: int) -> None:
    print("kernels + calls     wall      CPU   CPU a million   peak")
    for events in (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000):
        run = best({"analyze": (*ANALYZE, str(made_nsys(folder, events)))}, runs)["analyze"]
        print(
            f"{events / 1e6:6.1f} M + same {run['wall']:8.2f} s {run['cpu']:6.2f} s {run['cpu'] / events * 1e6:10.2f} s {run['rss'] / GIB:8.2f} GiB"
        )


def ranks(folder: Path, trace: Path) -> None:
    one = made_kineto(folder, trace, 100)
    together = folder / "ranks"
    together.mkdir(exist_ok=True)
    text = one.read_text()
    for rank in range(8):
        path = together / f"rank{rank}.json"
        if not path.exists():
            head, rest = text[:20_000], text[20_000:]
            path.write_text(head.replace('"rank": 0', f'"rank": {rank}', 1) + rest)
    del text
    single = measure((*ANALYZE, str(one)), 1)["wall"]
    print(f"1 rank, one CPU   {single:6.2f} s")
    for cpus in (1, len(os.sched_getaffinity(0))):
        wall = measure((*ANALYZE, str(together)), cpus)["wall"]
        print(f"8 ranks, {cpus} CPU{'s' if cpus > 1 else ' '}  {wall:6.2f} s = {wall / single:.1f} x one rank")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("nsys", "kineto", "growth", "ranks"))
    parser.add_argument("folder", type=Path, help="where the large files are made and kept")
    parser.add_argument("trace", type=Path, nargs="?", help="a real torch.profiler trace to repeat")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.what in ("kineto", "ranks") and options.trace is None:
        parser.error(f"{options.what} needs a TRACE to repeat")
    print(json.dumps({"cpus": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}))
    if options.what == "nsys":
        against_bare(made_nsys(options.folder, 5_000_000), "read_nsys.py", options.runs, 2.5)
    elif options.what == "kineto":
        against_bare(made_kineto(options.folder, options.trace, 900), "read_kineto.py", options.runs, 3.5)
    elif options.what == "growth":
        growth(options.folder, options.runs)
    else:
        ranks(options.folder, options.trace)


if __name__ == "__main__":
    main()
