"""Make a large Kineto trace out of a real one: its events over and over, with times and ids moved on.

    python benchmarks/make_kineto.py ../shared/traces/kineto/a100_nccl_2024.json.gz /tmp/large.json --mb 900

Each repetition starts where the one before ended; correlation and External id go on counting, so that launches still meet
their kernels.
"""

from __future__ import annotations

import argparse
import gzip
import re
from decimal import Decimal
from pathlib import Path

TIME = re.compile(rb'("ts": )(-?\d+(?:\.\d+)?)')
ID = re.compile(rb'("(?:correlation|External id|external id|id)": )(\d+)')
START = re.compile(rb'"traceEvents"\s*:\s*\[')
END = re.compile(rb"\}\s*\]\s*(?:,\s*\"|\}\s*$)")


def make(source: Path, target: Path, size: int) -> int:
    """Write a trace of about size bytes; returns the number of repetitions."""
    data = source.read_bytes()
    data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    start = START.search(data)
    ends = list(END.finditer(data))
    if start is None or not ends:
        raise SystemExit(f"{source} has no traceEvents")
    head, events, tail = data[: start.end()], data[start.end() : ends[-1].start() + 1], data[ends[-1].start() + 1 :]
    times = [Decimal(found[2].decode()) for found in TIME.finditer(events)]
    period = max(times) - min(times) + 1000
    ids = 1 + max(int(found[2]) for found in ID.finditer(events))
    repetitions = max(1, round(size / len(events)))
    with target.open("wb") as file:
        file.write(head)
        for turn in range(repetitions):
            moved = TIME.sub(lambda f, by=turn * period: f[1] + str(Decimal(f[2].decode()) + by).encode(), events)
            file.write(b"," * (turn > 0) + ID.sub(lambda f, by=turn * ids: f[1] + str(int(f[2]) + by).encode(), moved))
        file.write(tail)
    return repetitions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("source", type=Path, help="a real trace, .json or .json.gz")
    parser.add_argument("target", type=Path, help="the .json to write")
    parser.add_argument("--mb", type=int, default=900, help="size of the target")
    options = parser.parse_args()
    repetitions = make(options.source, options.target, options.mb * 1_000_000)
    print(
        f"{options.target}: {options.target.stat().st_size / 1e6:.0f} MB, {repetitions} repetitions of {options.source.name}"
    )


if __name__ == "__main__":
    main()
