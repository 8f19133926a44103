"""From what the user typed to a bundle on disk: one pass over the application a recorder and round."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gpudiag import __version__
from gpudiag.bundle import MANIFEST, SCHEMA, CaptureInfo, Manifest, write_manifest
from gpudiag.collect import launch, torch_profiler
from gpudiag.collect.early import Early
from gpudiag.collect.environment import describe, mask_command
from gpudiag.collect.nvml import NvmlSampler
from gpudiag.collect.plan import Pass, Plan, command_of, has_gpu, interpreter_of, make_folder, passes_of
from gpudiag.collect.stdin import Stdin
from gpudiag.collect.watching import Watch
from gpudiag.errors import GpudiagError

FULL_BYTES = 1 << 20  # less than that is left: what the processes wrote is cut off, and no reason for anything
WRITTEN_S = 2.0  # nsys and its agent have ended by then: what they wrote is there
Tell = Callable[[str], None]
Judging = Callable[[Path, str, str, float], list[str]]  # bundle, name and kind of the capture, s since its start
Status = Callable[[], AbstractContextManager[Tell | None]]  # entered, it gives what shows a text until it is left


@dataclass(frozen=True)
class Ran:
    """exit_code: the application's, of the last pass that ran. bundle: the folder."""

    exit_code: int
    manifest: Manifest
    bundle: Path


def record(
    plan: Plan,
    tell: Tell,
    env: Mapping[str, str] | None = None,
    *,
    beside: Status = nullcontext,
    working: Status = nullcontext,
    judging: Judging | None = None,
) -> Ran:
    """Run the application once a recorder and round, and leave a bundle with a manifest, whatever happens to the application.

    tell: lines that stay. beside: a status while the application runs; working: one while its recording is made ready.
    judging: the command line that judges a recording whose application runs on.
    Raises GpudiagError before anything is started when it cannot be: no such script, no interpreter, no room, a folder in
    the way. The manifest is written before and after each pass, so that a killed gpudiag leaves what was recorded so far.
    A disk that is full by then costs the recording, which is told, and nothing else.
    """
    env = dict(os.environ if env is None else env)
    python = interpreter_of(plan)
    argv = command_of(plan, python)
    passes = passes_of(plan)
    plan = replace(plan, bundle=make_folder(plan))
    stdin = Stdin(len(passes), plan.bundle)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    script = Path(plan.words[0]) if plan.kind == "script" else None
    manifest = Manifest(
        schema=SCHEMA,
        gpudiag=__version__,
        command=mask_command(argv),
        started=started,
        exit_code=None,
        captures=(),
        asked={
            "with": plan.collectors,
            "warmup": plan.warmup,
            "steps": plan.steps,
            "rounds": plan.rounds,
            "transforms": plan.transforms,
            "passes": [each.name for each in passes],
        },
        environment=describe(python, script, env),
    )
    _keep(plan, manifest, tell)
    code = 0
    for number, each in enumerate(passes, 1):
        try:
            capture, outcome = _pass(plan, each, argv, env, stdin, beside, working, judging)
        except (GpudiagError, OSError) as error:
            if number == 1:
                raise
            tell(f"{each.name}: not started: {error}")
            break
        code = 0 if outcome.stopped_by_us else outcome.exit_code
        ending = tuple(_ending(outcome))
        manifest = _with(manifest, capture, code, ending)
        _keep(plan, manifest, None if capture.failed else tell)
        for note in capture.notes:
            tell(note)
        if capture.failed:
            tell("; ".join((f"{each.name}: {capture.failed}", *ending)))
        if number < len(passes):
            if outcome.signals:
                tell(f"interrupted: {len(passes) - number} of {len(passes)} runs left out")
                break
            if code and plan.rounds > 1:
                tell(f"the script ended with exit code {code}: {len(passes) - number} of {len(passes)} runs left out")
                break
            if stdin.lost:
                tell(f"stdin is too long to be given again: {len(passes) - number} of {len(passes)} runs left out")
                break
    return Ran(code, manifest, plan.bundle)


def _keep(plan: Plan, manifest: Manifest, tell: Tell | None) -> None:
    """tell: of a disk that is full, unless that has been told."""
    try:
        write_manifest(plan.bundle, manifest)
    except OSError as error:
        if tell is not None:
            tell(f"{plan.bundle / MANIFEST}: cannot be written ({error.strerror}); the script is not affected")


def _ending(outcome: launch.Outcome) -> Iterator[str]:
    """How the application ended, where a signal had to do with it."""
    sent = ", ".join(outcome.signals)
    if outcome.stopped_by_us:
        return
    if outcome.killed_by:
        name = signal.Signals(outcome.killed_by).name if outcome.killed_by in set(signal.Signals) else "real-time"
        after = f", after {sent}" if sent and set(outcome.signals) != {name} else ""
        yield f"the script was ended by signal {outcome.killed_by} ({name}){after}"
    elif outcome.signals:
        yield f"the script got {sent} and ended by itself with exit code {outcome.exit_code}"


def _with(manifest: Manifest, capture: CaptureInfo, code: int, notes: tuple[str, ...]) -> Manifest:
    return msgspec.structs.replace(
        manifest, captures=(*manifest.captures, capture), exit_code=code, warnings=(*manifest.warnings, *notes)
    )


def _pass(
    plan: Plan,
    each: Pass,
    argv: list[str],
    env: Mapping[str, str],
    stdin: Stdin,
    beside: Status,
    working: Status,
    judging: Judging | None,
) -> tuple[CaptureInfo, launch.Outcome]:
    folder = plan.bundle / each.name
    folder.mkdir()
    request = torch_profiler.Request(folder, each.kind, plan.warmup, plan.steps, plan.transforms)
    inside = torch_profiler.environment(request, env)
    sampler = NvmlSampler(folder / "nvml.jsonl", env=env)
    notes: list[str] = []

    def start() -> launch.Application:
        sampler.start()  # here, where signals are held: its thread must not be the one that takes them
        source = stdin.take()
        if each.kind == "nsys":
            application = _start_nsys(argv, folder, inside, source, plan.stdout, notes)
        else:
            application = launch.spawn(argv, inside, stdin=source, stdout=plan.stdout)
        stdin.feed()
        return application

    captured = torch_profiler.captured(folder)
    early = Early(captured, lambda wall_s: judging(plan.bundle, each.name, each.kind, wall_s)) if judging else None
    with beside() as show:
        watch = Watch(folder, plan.steps)

        def meanwhile() -> None:
            if early is not None:
                early.look()
            if show:
                show(each.label + watch.text(judged=early is not None and early.judged))

        outcome = launch.run(
            start,
            before_signal=lambda: torch_profiler.save_recordings(folder),
            should_stop=captured if plan.stop_after_capture else lambda: False,
            meanwhile=meanwhile,
            ended=early.end if early is not None else lambda: None,
        )
    stdin.release()
    sampler.stop()
    with working() as show:
        if show:
            show(f"{each.label}{'exporting the nsys report' if each.kind == 'nsys' else 'packing the trace'}")
        try:
            capture = torch_profiler.finish(folder, outcome, each.kind, plan.warmup)
            if each.kind == "nsys":
                capture = with_nsys_report(capture, folder, timeout_s=WRITTEN_S)
                capture = msgspec.structs.replace(capture, notes=(*notes, *capture.notes))
        except OSError as error:
            failed = f"the recording could not be kept: {error.strerror}"
            capture = CaptureInfo(each.name, each.kind, {}, wall_s=round(outcome.wall_s, 3), failed=failed)
        if capture.failed and shutil.disk_usage(plan.bundle).free < FULL_BYTES:
            full = "the disk ran full while the script ran; it is not affected, the recording is lost"
            capture = msgspec.structs.replace(capture, failed=full, notes=())
    return capture, outcome


def _start_nsys(
    argv: list[str], folder: Path, env: Mapping[str, str], stdin: int | None, stdout: int, notes: list[str]
) -> launch.Application:
    """notes: what is to be said of nsys itself is added to it."""
    from gpudiag.collect import nsys

    # nsys inherits the signal mask of whoever starts it, and its application from it
    held = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        process = nsys.start(argv, folder / "report", gpu=has_gpu(), window=True, env=env, stdin=stdin, stdout=stdout)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    status: list[int] = []

    def poll() -> int | None:
        if not status:
            code = process.poll()
            if code is None:
                return None
            if process.wait() is None:
                notes.append(f"nsys was ended by signal {-process.process.returncode}; the script ran on without it")
            status.append(code)
        return status[0]

    return launch.Application(
        poll,
        lambda signum: process.forward(signum, group=signum == signal.SIGINT),
        process.kill,
        shell_status=True,
    )


def with_nsys_report(capture: CaptureInfo, folder: Path, timeout_s: float) -> CaptureInfo:
    """The capture with what nsys wrote, exported; `failed` says what is wrong with it. timeout_s: for nsys to write it."""
    from gpudiag.collect import nsys
    from gpudiag.read.nsys_report import find_nsys

    report = nsys.finish_report(folder / "report", gpu=has_gpu(), timeout_s=timeout_s)
    files: dict[str, Any] = dict(capture.files)
    if report.sqlite is not None:
        files["trace"] = [f"{folder.name}/{report.sqlite.name}"]
    if report.report is not None:
        files["report"] = [f"{folder.name}/{report.report.name}"]
    return msgspec.structs.replace(
        capture,
        files=files,
        collector=f"nsys {nsys.nsys_version(found)}" if (found := find_nsys()) else capture.collector,
        notes=(*capture.notes, *report.warnings),
        failed=capture.failed or report.failed,  # a script without torch opens no window: that is the reason
    )
