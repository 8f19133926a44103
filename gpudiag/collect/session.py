"""From what the user typed to a bundle on disk: one pass over the application a recorder and round."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from gpudiag import __version__
from gpudiag.bundle import MANIFEST, SCHEMA, CaptureInfo, Manifest, is_bundle, write_manifest
from gpudiag.collect import launch, torch_profiler
from gpudiag.collect.early import Early
from gpudiag.collect.environment import describe, mask_command
from gpudiag.collect.nvml import NvmlSampler
from gpudiag.collect.stdin import Stdin
from gpudiag.collect.watching import Watch
from gpudiag.errors import GpudiagError

FREE_BYTES = 64 << 20  # the least room on disk worth starting with: a trace of 20 small steps and the log
FULL_BYTES = 1 << 20  # less than that is left: what the processes wrote is cut off, and no reason for anything
CAPTURE_FOLDER = re.compile(r"(torch|nsys)(-\d+)?")
Tell = Callable[[str], None]
Judging = Callable[[Path, str, str, float], list[str]]  # bundle, name and kind of the capture, s since its start
Status = Callable[[], AbstractContextManager[Tell | None]]  # entered, it gives what shows a text until it is left


@dataclass(frozen=True)
class Plan:
    """What to run and how to record it. kind: script | module | command. collectors: auto | nsys | torch | nsys,torch.

    transforms: time each transform of the dataset by itself. any_name: a folder `bundle`-2, -3, ... does as well. stdout: a
    descriptor that the application gets as its stdout.
    """

    kind: str
    words: tuple[str, ...]
    collectors: str
    bundle: Path
    warmup: int | None = None
    steps: int = 20
    transforms: bool = False
    stop_after_capture: bool = False
    python: str | None = None
    force: bool = False
    rounds: int = 1
    any_name: bool = False
    stdout: int = 1


@dataclass(frozen=True)
class _Pass:
    """One run of the application. name: of its folder; kind: torch | nsys; label: for people, "" when it is the only one."""

    name: str
    kind: str
    label: str


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
    python = _interpreter(plan)
    argv = _command(plan, python)
    passes = _passes(plan)
    plan = replace(plan, bundle=_make_folder(plan))
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
    each: _Pass,
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

    def start() -> launch.Application:
        sampler.start()  # here, where signals are held: its thread must not be the one that takes them
        source = stdin.take()
        if each.kind == "nsys":
            application = _start_nsys(argv, folder, inside, source, plan.stdout)
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
                capture = with_nsys_report(capture, folder)
        except OSError as error:
            failed = f"the recording could not be kept: {error.strerror}"
            capture = CaptureInfo(each.name, each.kind, {}, wall_s=round(outcome.wall_s, 3), failed=failed)
        if capture.failed and shutil.disk_usage(plan.bundle).free < FULL_BYTES:
            full = "the disk ran full while the script ran; it is not affected, the recording is lost"
            capture = msgspec.structs.replace(capture, failed=full, notes=())
    return capture, outcome


def _passes(plan: Plan) -> tuple[_Pass, ...]:
    """Every recorder once a round. auto: nsys where it can see a GPU, else torch.profiler, which needs neither."""
    kinds = tuple(plan.collectors.split(","))
    if plan.collectors == "auto":
        from gpudiag.read.nsys_report import find_nsys

        kinds = ("nsys",) if find_nsys() is not None and _has_gpu() else ("torch",)
    many, total = plan.rounds > 1, plan.rounds * len(kinds)
    return tuple(
        _Pass(
            f"{kind}-{round_ + 1}" if many else kind,
            kind,
            f"run {round_ * len(kinds) + position + 1}/{total}, {kind}: " if total > 1 else "",
        )
        for round_ in range(plan.rounds)
        for position, kind in enumerate(kinds)
    )


def _has_gpu() -> bool:
    """The driver lists a GPU (a device node alone may be left over, as libcuda's package leaves one); dxg: WSL."""
    listed = Path("/proc/driver/nvidia/gpus")
    return (listed.is_dir() and any(listed.iterdir())) or Path("/dev/dxg").exists()


def _interpreter(plan: Plan) -> Path:
    """--python; else this interpreter when it has torch; else the first python on PATH."""
    if plan.python is not None:
        found = shutil.which(plan.python)
        if found is None:
            raise GpudiagError(
                f"--python {plan.python}: no such interpreter", "give the path of a Python that has torch"
            )
        return Path(found)
    if importlib.util.find_spec("torch") is not None:
        return Path(sys.executable)
    return Path(shutil.which("python") or shutil.which("python3") or sys.executable)


def _command(plan: Plan, python: Path) -> list[str]:
    if plan.kind == "command":
        if shutil.which(plan.words[0]) is None:
            raise GpudiagError(f"{plan.words[0]}: no such command", "check the words after `--`")
        return list(plan.words)
    if plan.kind == "module":
        return [str(python), "-m", *plan.words]
    script = Path(plan.words[0])
    if not script.exists():
        raise GpudiagError(
            f"{script}: no such script", "give the path of a Python script, -m MODULE, or a command after `--`"
        )
    _check_python(script)
    return [str(python), *plan.words]


def _check_python(script: Path) -> None:
    """Python would take hold of these, too, and fail with an error of its own."""
    if script.is_dir():
        if not (script / "__main__.py").is_file():
            raise GpudiagError(f"{script}: a folder, not a script", "give the path of a script in it, or -m MODULE")
        return
    try:
        with script.open("rb") as file:
            first = file.readline(200)
    except OSError as error:
        raise GpudiagError(f"{script}: cannot be read ({error.strerror})", "check its permissions") from error
    shebang = first.startswith(b"#!") and b"python" not in first
    if shebang or first.startswith(b"\x7fELF") or script.suffix in (".sh", ".bash", ".zsh"):
        shell = "bash " if script.suffix else ""
        raise GpudiagError(
            f"{script}: not a Python script",
            f"run it as a command: gpudiag profile -- {shell}{shlex.quote(str(script))}",
        )


def _make_folder(plan: Plan) -> Path:
    """Raises GpudiagError when there is none to be had. Two gpudiags that start at once never get the same one."""
    bundle = plan.bundle
    try:
        if plan.any_name:
            bundle.parent.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(2):
                with suppress(FileExistsError):
                    bundle.mkdir()
                    break
                bundle = plan.bundle.with_name(f"{plan.bundle.name}-{number}")
        if bundle.exists() and (not bundle.is_dir() or any(bundle.iterdir())):
            if not plan.force:
                raise GpudiagError(f"{bundle}: exists already", "choose another folder with -o, or add --force")
            if not is_bundle(bundle):
                raise GpudiagError(
                    f"{bundle}: holds something other than a profile, which --force will not delete",
                    "choose another folder with -o",
                )
            for folder in bundle.iterdir():
                if folder.is_dir() and CAPTURE_FOLDER.fullmatch(folder.name):
                    shutil.rmtree(folder)
            (bundle / MANIFEST).unlink()
            (bundle / "diagnosis.json").unlink(missing_ok=True)
        bundle.mkdir(parents=True, exist_ok=True)
        probe = bundle / ".writable"
        probe.touch()
        probe.unlink()
        free = shutil.disk_usage(bundle).free
    except OSError as error:
        raise GpudiagError(
            f"{bundle}: cannot be written ({error.strerror})",
            "choose another folder with -o; the script was not started",
        ) from error
    if free < FREE_BYTES:
        with suppress(OSError):
            bundle.rmdir()
        raise GpudiagError(
            f"{bundle}: only {free >> 20} MiB free on this disk",
            "choose another folder with -o; the script was not started",
        )
    return bundle


def _start_nsys(
    argv: list[str], folder: Path, env: Mapping[str, str], stdin: int | None, stdout: int
) -> launch.Application:
    from gpudiag.collect import nsys

    # nsys inherits the signal mask of whoever starts it, and its application from it
    held = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        process = nsys.start(argv, folder / "report", gpu=_has_gpu(), window=True, env=env, stdin=stdin, stdout=stdout)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    status: list[int] = []

    def poll() -> int | None:
        if not status:
            code = process.process.poll()
            if code is None:
                return None
            final = process.wait()
            status.append(code if final is None else final)
        return status[0]

    return launch.Application(
        poll,
        lambda signum: process.forward(signum, group=signum == signal.SIGINT),
        process.kill,
        shell_status=True,
    )


def with_nsys_report(capture: CaptureInfo, folder: Path) -> CaptureInfo:
    """The capture with what nsys wrote, exported; `failed` says what is wrong with it."""
    from gpudiag.collect import nsys
    from gpudiag.read.nsys_report import find_nsys

    report = nsys.finish_report(folder / "report", gpu=_has_gpu())
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
