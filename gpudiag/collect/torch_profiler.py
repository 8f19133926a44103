"""The outer half of recording with torch.profiler: get `inject/` into the user's processes, and gather what they left."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpudiag import __version__
from gpudiag.bundle import CaptureInfo
from gpudiag.collect.launch import Outcome
from gpudiag.read.loader_log import Process, ProcessLog, read_process_log

BOOTSTRAP = Path(__file__).resolve().parent / "inject" / "bootstrap"
FINISH_S = 3.0  # how long a recording may take to be saved before a signal is passed on
NOT_INSIDE = (
    "gpudiag could not get inside the script: no process that imports torch was reached (python -I, -E or -S, or a "
    "PYTHONPATH of its own)"
)
ENDED_EARLY = (
    "the script was ended before it had imported torch, or gpudiag could not get inside it: nothing was recorded"
)
NO_TORCH = "{}{} did not import torch: there is nothing to record"
RUNS_ON = "the script still ran when this was judged: the report is written again when it has ended"


@dataclass(frozen=True)
class Request:
    """mode: torch | nsys (ranges as NVTX, no torch.profiler). warmup None: adaptive. steps None: the default.

    transforms: each transform of a dataset is timed by itself.
    """

    folder: Path
    mode: str
    warmup: int | None = None
    steps: int | None = None
    transforms: bool = False


def environment(request: Request, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the application: `base`, our bootstrap first on PYTHONPATH, and what is asked for."""
    asked = {
        "dir": str(request.folder.resolve()),
        "mode": request.mode,
        "warmup": request.warmup,
        "steps": request.steps,
        "transforms": request.transforms,
    }
    path = [str(BOOTSTRAP), *([base["PYTHONPATH"]] if base.get("PYTHONPATH") else [])]
    return {**base, "PYTHONPATH": os.pathsep.join(path), "GPUDIAG_CAPTURE": json.dumps(asked)}


def save_recordings(folder: Path) -> None:
    """Have every running recording saved now, since a signal is about to end the processes. Waits FINISH_S at most."""
    if not any(folder.glob("recording.*")):
        return
    with contextlib.suppress(OSError):  # the disk is full
        (folder / "finish").touch()
    deadline = time.monotonic() + FINISH_S
    while any(folder.glob("recording.*")) and time.monotonic() < deadline:
        time.sleep(0.02)


def captured(folder: Path) -> Callable[[], bool]:
    """Whether the planned window of every process that records has been saved (`--stop-after-capture`)."""

    def check() -> bool:
        return any(folder.glob("captured.*")) and not any(folder.glob("recording.*"))

    return check


def finish(folder: Path, outcome: Outcome, kind: str = "torch", warmup: int | None = None) -> CaptureInfo:
    """Read the processes' own records, keep one trace a rank, compress it, and say what is wrong with the capture.

    warmup: the steps that were to come before the window, as asked for.
    """
    log = read_process_log(sorted(folder.glob("rank*.jsonl")))
    notes = [*_notes(folder, log, outcome), *_unopened(log, warmup)]
    traces = _keep_traces(folder, log) if kind == "torch" else {}
    for leftover in (
        *folder.glob("recording.*"),
        *folder.glob("captured.*"),
        *folder.glob("*.part*"),  # Kineto writes to .part.tmp
        folder / "finish",
    ):
        leftover.unlink(missing_ok=True)
    failed = ""
    if not log.processes:
        failed = ENDED_EARLY if outcome.killed_by else NOT_INSIDE
        if log.without_torch:
            ended = f" ended with exit code {outcome.exit_code} and" if outcome.exit_code else ""
            failed = NO_TORCH.format(", ".join(log.without_torch), ended)
    elif kind == "torch" and not traces:
        failed = "no recording was saved: the process ended (killed?) before one was complete"
    return _capture(folder, kind, log, traces, outcome.wall_s, notes, failed)


def so_far(folder: Path, kind: str, wall_s: float) -> CaptureInfo:
    """The capture of an application that runs on, its window saved `wall_s` after the start; nothing is moved or removed."""
    log = read_process_log(sorted(folder.glob("rank*.jsonl")))
    traces = _best_traces(folder, log) if kind == "torch" else {}
    return _capture(folder, kind, log, traces, wall_s, [*log.notes, RUNS_ON])


def _capture(
    folder: Path,
    kind: str,
    log: ProcessLog,
    traces: Mapping[int, Path],
    wall_s: float,
    notes: Sequence[str],
    failed: str = "",
) -> CaptureInfo:
    files = {"log": [file.name for file in sorted(folder.glob("rank*.jsonl"))]}
    if traces:
        files["trace"] = [traces[rank].name for rank in sorted(traces)]
    if (folder / "nvml.jsonl").is_file():
        files["nvml"] = ["nvml.jsonl"]
    torch = next((process.torch for process in log.processes if process.torch), "")
    plain, recorded = log.step_cost()
    return CaptureInfo(
        name=folder.name,
        kind=kind,
        files={role: [f"{folder.name}/{name}" for name in names] for role, names in files.items()},
        collector=f"torch.profiler of torch {torch}, gpudiag {__version__}" if torch else f"gpudiag {__version__}",
        wall_s=round(wall_s, 3),
        plain_step_ns=plain,
        recorded_step_ns=recorded,
        failed=failed,
        notes=tuple(notes),
    )


def _unopened(log: ProcessLog, warmup: int | None) -> Iterator[str]:
    """A window of steps that never opened: what was recorded instead is the first seconds of the script."""
    steps = max((log.step_count(process.pid) for process in log.processes), default=0)
    opened = (record.get("window") for process in log.processes for record in process.of("clock"))
    if not steps or "steps" in opened:
        return
    wanted = f"--warmup {warmup}" if warmup is not None else "the warm-up (5 steps and 0.5 s, at most 25 steps)"
    if steps > (25 if warmup is None else warmup) + 2:
        return  # there is another reason, and a note of its own
    yield (
        f"the window never opened: the script took {steps} step{'s' * (steps > 1)}, no more than {wanted} asks for; what"
        " was recorded are its first seconds, start-up included"
    )


def _best_traces(folder: Path, log: ProcessLog) -> dict[int, Path]:
    """rank -> the trace of the process of that rank that took most steps."""
    best: dict[int, tuple[tuple[int, int], Path]] = {}
    for window in log.windows:
        trace = folder / window.file
        if not trace.is_file():
            continue
        weight = (log.step_count(window.pid), trace.stat().st_size)
        if window.rank not in best or weight > best[window.rank][0]:
            best[window.rank] = (weight, trace)
    return {rank: trace for rank, (_, trace) in best.items()}


def _keep_traces(folder: Path, log: ProcessLog) -> dict[int, Path]:
    """The same compressed; the others are dropped."""
    kept = _best_traces(folder, log)
    for trace in folder.glob("rank*.kineto.json"):
        if trace not in kept.values():
            trace.unlink()
    return {rank: _compressed(trace, folder / f"rank{rank}.kineto.json.gz") for rank, trace in kept.items()}


def _compressed(trace: Path, target: Path) -> Path:
    """The trace as .gz; as it is when the disk has no room for a second copy."""
    try:
        with trace.open("rb") as plain, gzip.open(target, "wb", compresslevel=4) as packed:
            shutil.copyfileobj(plain, packed, 1 << 20)
    except OSError:
        with contextlib.suppress(OSError):
            target.unlink()
        return trace
    trace.unlink()
    return target


def _notes(folder: Path, log: ProcessLog, outcome: Outcome) -> list[str]:
    notes = list(log.notes)
    for failure in sorted(folder.glob("failed.*.txt")):
        said = failure.read_text(errors="replace").strip()
        notes.append(f"gpudiag's part in process {failure.name.split('.')[1]} failed: {said}")
        failure.unlink()
    if log.own_profiler:
        notes.append(
            f"the script runs a torch.profiler of its own ({log.own_profiler}): ours stayed off meanwhile, and GPU records"
            " may be missing; profile again with the script's profiler turned off"
        )
    children = [p for p in log.processes if p.role == "spawned" and p.cpu_s and not _is_loader_worker(p)]
    own = sum(process.cpu_s or 0 for process in log.processes if process.role in ("main", "rank"))
    theirs = sum(process.cpu_s or 0 for process in children)
    if children and theirs > own:
        notes.append(
            f"most of the work ran in {len(children)} child processes ({theirs:.1f} s of CPU, against {own:.1f} s in the"
            " process that was recorded): conclusions cover the recorded process only"
        )
    if outcome.orphans:
        count = len(outcome.orphans)
        pids = ", ".join(map(str, outcome.orphans))
        notes.append(f"{count} process{'es' * (count > 1)} of the script still ran when it had ended: {pids}")
    return notes


def _is_loader_worker(process: Process) -> bool:
    """What a DataLoader's worker does is judged by its own records of it."""
    return any(fetch["w"] >= 0 for fetch in process.of("fetch"))
