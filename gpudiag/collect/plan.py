"""What is to be run and recorded, and checks that it can be, before anything starts."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpudiag.bundle import MANIFEST, is_bundle
from gpudiag.errors import GpudiagError

FREE_BYTES = 64 << 20  # the least room on disk worth starting with: a trace of 20 small steps and the log
CAPTURE_FOLDER = re.compile(r"(torch|nsys)(-\d+)?")


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
class Pass:
    """One run of the application. name: of its folder; kind: torch | nsys; label: for people, "" when it is the only one."""

    name: str
    kind: str
    label: str


def passes_of(plan: Plan) -> tuple[Pass, ...]:
    """Every recorder once a round. auto: nsys where it can see a GPU, else torch.profiler, which needs neither."""
    kinds = tuple(plan.collectors.split(","))
    if plan.collectors == "auto":
        from gpudiag.read.nsys_report import find_nsys

        kinds = ("nsys",) if find_nsys() is not None and has_gpu() else ("torch",)
    many, total = plan.rounds > 1, plan.rounds * len(kinds)
    return tuple(
        Pass(
            f"{kind}-{round_ + 1}" if many else kind,
            kind,
            f"run {round_ * len(kinds) + position + 1}/{total}, {kind}: " if total > 1 else "",
        )
        for round_ in range(plan.rounds)
        for position, kind in enumerate(kinds)
    )


def has_gpu() -> bool:
    """The driver lists a GPU (a device node alone may be left over, as libcuda's package leaves one); dxg: WSL."""
    listed = Path("/proc/driver/nvidia/gpus")
    return (listed.is_dir() and any(listed.iterdir())) or Path("/dev/dxg").exists()


def interpreter_of(plan: Plan) -> Path:
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


def command_of(plan: Plan, python: Path) -> list[str]:
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


def make_folder(plan: Plan) -> Path:
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
