"""What recording costs the application: run length and step time with and without it, as ratios from one sitting.

    python benchmarks/observer.py [--rounds 3] [--with torch,nsys] [--samples healthy,slow_loader]

Runs are interleaved (plain, recorded, plain, recorded, ...), so that a machine that slows down does so for both. CPU time is
given beside wall time: on a busy machine it is the steadier of the two. Limits (issue 4.6), for steps of 10 ms or more: 5 %
outside the recorded window, 15 % inside it; exit code 3 when one is broken. Steps in which a recording starts or is saved
belong to neither side, but to the run's length.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpudiag.bundle import read_bundle
from gpudiag.read.nsys_report import find_nsys

ROOT = Path(__file__).resolve().parents[1]
STEPS, WARM_UP, WINDOW = 120, 10, 20
OUTSIDE, INSIDE = 1.05, 1.15
SETTLED = 10  # the first steps of each run are left out


@dataclass
class Times:
    """Wall and CPU ns a step, and the length of each run in s."""

    wall: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)
    runs: list[float] = field(default_factory=list)

    def add(self, steps: list[list[int]]) -> None:
        self.wall += [wall for wall, _ in steps]
        self.cpu += [cpu for _, cpu in steps]


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--with", dest="recorders", default="torch,nsys" if find_nsys() else "torch")
    arguments.add_argument("--samples", default="healthy,slow_loader,checkpoint_log")
    asked = arguments.parse_args()
    broken = False
    with tempfile.TemporaryDirectory() as folder:
        for recorder in asked.recorders.split(","):
            broken |= steps_of_10_ms(recorder, asked.rounds, Path(folder))
            for sample in filter(None, asked.samples.split(",")):
                length_of_sample(recorder, sample, asked.rounds, Path(folder))
    return 3 if broken else 0


def steps_of_10_ms(recorder: str, rounds: int, folder: Path) -> bool:
    plain, outside, inside = Times(), Times(), Times()
    script, out = ROOT / "benchmarks" / "observer_steps.py", folder / "times.json"
    words = [str(script), str(out), str(STEPS)]
    for number in range(rounds):
        plain.runs.append(timed([sys.executable, *words]))
        plain.add(json.loads(out.read_text())[SETTLED:])
        bundle = folder / f"{recorder}{number}"
        outside.runs.append(profiled(recorder, bundle, words))
        steps = json.loads(out.read_text())
        recorded, neither = window_of(bundle)
        inside.add([step for i, step in enumerate(steps, 1) if i in recorded])
        outside.add([s for i, s in enumerate(steps, 1) if i > SETTLED and i not in recorded | neither])
    base = typical(plain.wall)
    print(f"{recorder}: steps of {base / 1e6:.1f} ms, {rounds} runs each way, {len(inside.wall)} steps recorded")
    broken = False
    for name, times, limit in (("outside the window", outside, OUTSIDE), ("inside the window", inside, INSIDE)):
        wall = typical(times.wall) / base
        cpu = typical(times.cpu) / typical(plain.cpu)
        over = wall > limit and cpu > limit
        broken |= over and base >= 10e6
        print(f"  {name:20} {wall:.3f} x wall, {cpu:.3f} x CPU   limit {limit} {'BROKEN' if over else 'held'}")
    print(f"  {'run length':20} {ratio(outside.runs, plain.runs):.3f} x ({STEPS} steps, start-up and saving included)")
    claims(folder / f"{recorder}{rounds - 1}")
    return broken


def claims(bundle: Path) -> None:
    """What the report itself says the recording cost."""
    capture = read_bundle(bundle).manifest.captures[0]
    diagnosis = json.loads((bundle / "diagnosis.json").read_text())
    value = diagnosis["metrics"].get("observer_slowdown", {}).get("value")
    warned = [text for text in diagnosis["warnings"] if "recording made steps" in text]
    if capture.plain_step_ns and capture.recorded_step_ns:
        inside = f"{capture.recorded_step_ns / capture.plain_step_ns:.3f} x"
        print(
            f"  the report says      {inside} in its last run (observer_slowdown {value}); warning: {warned or 'none'}"
        )


def length_of_sample(recorder: str, sample: str, rounds: int, folder: Path) -> None:
    plain, recorded, slowdowns = [], [], []
    variants = [ROOT / "samples" / sample / f"{variant}.py" for variant in ("slow", "fast")]
    script = next(path for path in variants if path.is_file())
    for number in range(rounds):
        plain.append(timed([sys.executable, str(script)]))
        bundle = folder / f"{recorder}-{sample}{number}"
        recorded.append(profiled(recorder, bundle, [str(script)]))
        capture = read_bundle(bundle).manifest.captures[0]
        if capture.plain_step_ns and capture.recorded_step_ns:
            slowdowns.append(capture.recorded_step_ns / capture.plain_step_ns)
    step = f"inside/outside {statistics.median(slowdowns):.3f} x" if slowdowns else "no step outside the window"
    print(
        f"{recorder}: {sample}/{script.name}: run length {ratio(recorded, plain):.3f} x of {min(plain):.1f} s, {step}"
    )


def window_of(bundle: Path) -> tuple[set[int], set[int]]:
    """Which of the script's steps were recorded whole in the planned window, and which are neither that nor plain."""
    recorded, neither = set(), set()
    number, window = -1, ""
    (log,) = (file for file in bundle.glob("*/rank0.*.jsonl") if '"role":"main"' in file.read_text())
    for record in map(json.loads, log.read_text().splitlines()):
        if record["k"] == "clock":
            window = record["window"] if record["event"] == "start" else ""
        elif record["k"] == "step" and record["o"] == "optimizer" and not record.get("partial"):
            number += 1
            if record.get("r") and window == "steps" and not record.get("mixed"):
                recorded.add(number)
            elif record.get("r") or record.get("mixed"):
                neither.add(number)
    # a recording is opened and saved between two steps: the script's own clock sees that in the step that follows
    edges = {min(recorded, default=0), max(recorded, default=0) + 1}
    return recorded - edges, neither | edges


def profiled(recorder: str, bundle: Path, words: list[str]) -> float:
    """Run under gpudiag; the length is the application's, without the analysis that follows."""
    options = ["--with", recorder, "--warmup", str(WARM_UP), "--steps", str(WINDOW), "--no-save", "-o", str(bundle)]
    timed([sys.executable, "-m", "gpudiag", "profile", *options, *words])
    return read_bundle(bundle).manifest.captures[0].wall_s or 0.0


def timed(command: list[str]) -> float:
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, env=dict(os.environ))
    return time.monotonic() - began


def typical(steps: list[int]) -> float:
    """The lower quartile: what disturbs a step only makes it longer."""
    return statistics.quantiles(steps, n=4)[0]


def ratio(recorded: list[float], plain: list[float]) -> float:
    """Of the fastest runs: what disturbs a run only makes it longer."""
    return min(recorded) / min(plain)


if __name__ == "__main__":
    sys.exit(main())
