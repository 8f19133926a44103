"""What gpudiag promises for each slow sample beside what its cure brings.

    python benchmarks/estimates.py [--repeat N] [NAME...]

Needs an otherwise idle machine: both sides are times of the CPU. Predicted: the first finding of `gpudiag profile slow.py`, its
estimate (replay) and bound (account) as shares of the recorded step. Measured: slow.py and fast.py run plainly in turn, the mean
step of each run (start-up left out), the median over the runs. Samples that need a GPU are left out where there is none.
"""

from __future__ import annotations

import argparse
import os
import runpy
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START_UP = 10  # steps: first batches, allocation, compilation
BUSY_LOAD = 0.5  # runnable processes a CPU besides ours; above it the times are not to be trusted


@dataclass(frozen=True)
class Row:
    """gain, estimate, bound: shares of the slow step; None where no estimate was given. Times in ns a step."""

    sample: str
    rule: str
    slow: float
    fast: float
    recorded: float
    estimate: float | None
    bound: float
    why: str = ""

    @property
    def gain(self) -> float:
        return 1 - self.fast / self.slow

    @property
    def error(self) -> float | None:
        return None if self.estimate is None else self.estimate - self.gain


def child(script: str) -> None:
    """Run a script as it is and print the mean time between its optimizer's steps, ns, as the last line of stderr."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    moments: list[int] = []
    register_optimizer_step_post_hook(lambda *_: moments.append(time.perf_counter_ns()))
    sys.path[0] = str(Path(script).parent)
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")
    steady = moments[min(START_UP, len(moments) // 4) :]
    print(f"\n{(steady[-1] - steady[0]) / (len(steady) - 1)}", file=sys.stderr)


def plain_step(script: Path) -> float:
    """Mean step of one plain run, ns. Raises CalledProcessError when the script fails."""
    command = [sys.executable, "-W", "ignore", __file__, "--child", str(script)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return float(done.stderr.strip().splitlines()[-1])


def samples(gpu: bool, names: Sequence[str]) -> list[Path]:
    found = []
    for file in sorted((ROOT / "samples").glob("*/expect.toml")):
        expected = tomllib.loads(file.read_text())
        both = {"slow", "fast"} <= set(expected) and expected["slow"]["must_find"]
        if both and (gpu or expected["slow"].get("needs") != "gpu") and (not names or file.parent.name in names):
            found.append(file.parent)
    return found


def measured(folder: Path, repeat: int) -> Row:
    from accuracy import profile
    from cases.case import standing

    diagnosis = profile(folder / "slow.py")
    main = next((f for f in standing(diagnosis) if f.severity != "info"), None)
    recorded = float(diagnosis.metrics["step_time"].value or 1)
    slow, fast = [], []
    for _ in range(repeat):
        slow.append(plain_step(folder / "slow.py"))
        fast.append(plain_step(folder / "fast.py"))
    times = statistics.median(slow), statistics.median(fast)
    if main is None:
        return Row(folder.name, "nothing found", *times, recorded, None, 0.0, "no finding")
    estimate = None if main.estimate_ns is None else main.estimate_ns / recorded
    return Row(folder.name, main.rule, *times, recorded, estimate, main.bound_ns / recorded, main.estimate_reason)


def line(row: Row) -> str:
    estimate = f"{row.estimate:9.1%}" if row.estimate is not None else f"{'none':>9}"
    error = f"{row.error:+8.1%}" if row.error is not None else f"{'':>8}"
    over = "" if row.gain <= row.bound + 0.02 else "  more than the bound"
    return (
        f"{row.sample:22}{row.rule:30}{row.slow / 1e6:8.2f}{row.fast / 1e6:8.2f}{row.recorded / 1e6:10.2f}"
        f"{row.gain:9.1%}{estimate}{row.bound:8.1%}{error}{over}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="samples [all]")
    parser.add_argument("--repeat", type=int, default=3, help="plain runs of each side [3]")
    parser.add_argument("--child", metavar="SCRIPT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests"), str(ROOT)]
    import torch

    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if load > BUSY_LOAD:
        print(f"The machine is busy (load {load:.1f} a CPU): these times are not to be trusted.", file=sys.stderr)
    print(f"{'':52}{'step in ms, plain':>16}{'':10}{'share of the step':>26}")
    print(
        f"{'sample':22}{'first finding':30}{'slow':>8}{'fast':>8}{'recorded':>10}{'gained':>9}{'estimate':>9}{'bound':>8}{'error':>8}"
    )
    rows = []
    for folder in samples(torch.cuda.is_available(), arguments.names):
        rows.append(measured(folder, arguments.repeat))
        print(line(rows[-1]), flush=True)
    errors = [abs(row.error) for row in rows if row.error is not None]
    if errors:
        print(
            f"\n{len(errors)} estimates: median error {statistics.median(errors):.1%} of the step, worst {max(errors):.1%}"
        )


if __name__ == "__main__":
    main()
