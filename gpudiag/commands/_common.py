"""What several verbs share: options, output files, the gate, progress and the report on the terminal."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, TypeVar

import click
import msgspec

from gpudiag.diagnosis import SCHEMA, Diagnosis, Severity, from_json, to_json
from gpudiag.errors import GpudiagError
from gpudiag.report.facts import headline, shell_word
from gpudiag.report.method import effects_of
from gpudiag.report.text import clean

Progress = Callable[[str], None]
"""Told what is being done now, in a few words."""

GATE_FAILED = 3
GATE_CANNOT_JUDGE = 4
_SEVERITY_RANK = {"info": 0, "warning": 1, "critical": 2}
_SCHEMA_FIELD = re.compile(rb'"schema"\s*:\s*"(gpudiag\.diagnosis/\d+)"')
_LARGEST_DIAGNOSIS = 64_000_000  # bytes; views are the bulk of one and are kept to a few MB
_Command = TypeVar("_Command", bound=Callable[..., Any])


def example(*lines: str) -> str:
    """The epilog of a verb's --help."""
    return "\b\n" + ("Example:" if len(lines) == 1 else "Examples:") + "".join(f"\n  {line}" for line in lines)


def _turn_colour_off(ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        ctx.color = False


no_color_option = click.option(
    "--no-color", is_flag=True, expose_value=False, callback=_turn_colour_off, help="No colours (as does NO_COLOR)."
)

fail_on_option = click.option(
    "--fail-on",
    type=click.Choice(["info", "warning", "critical"]),
    help="Exit with 3 when a finding is at least this severe, with 4 when the recording cannot be judged.",
)


def wants_colour(stream: IO[str]) -> bool:
    """Colour only on a terminal that can show it, and only if nobody said no (NO_COLOR, --no-color, TERM=dumb)."""
    context = click.get_current_context(silent=True)
    refused = context is not None and context.color is False
    return not refused and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


@dataclass(frozen=True)
class Outputs:
    """Where the reports go: a path, `-` for stdout, or None. csv is a folder."""

    json: str | None = None
    html: str | None = None
    markdown: str | None = None
    sarif: str | None = None
    junit: str | None = None
    csv: str | None = None

    def given(self) -> dict[str, str]:
        """format -> target of those that were asked for."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: target for name, target in named if target is not None}

    @property
    def uses_stdout(self) -> bool:
        return "-" in self.given().values()

    def check(self, inputs: Iterable[Path] = ()) -> None:
        """Before the work: every target can be written, and none is a recording or another target.

        Raises click.UsageError for a clash and GpudiagError for a place that cannot be written.
        """
        if self.uses_stdout and sys.__stdout__ is None:
            raise GpudiagError("standard output is closed, and - asks for a report on it", "name a file instead of -")
        sources = {os.path.realpath(path) for path in inputs}  # (Path.resolve raises for a link that points to itself)
        seen: dict[str, str] = {}
        for name, target in self.given().items():
            place = target if target == "-" else os.path.realpath(target)
            if place in seen:
                raise click.UsageError(f"--{seen[place]} and --{name} both write to {target}")
            if place in sources:
                raise click.UsageError(f"--{name} {target} would overwrite what is being read")
            seen[place] = name
            if target != "-":
                _check_writable(Path(target), folder=name == "csv")

    def write(self, diagnosis: Diagnosis, fail_on: Severity | None = None) -> None:
        """Files are written whole or not at all, and named on stderr. fail_on: what JUnit counts as a failure (default warning).

        Raises GpudiagError.
        """
        for name, target in self.given().items():
            if name == "csv":
                from gpudiag.report.tables import csv_files

                for file, data in csv_files(diagnosis).items():
                    write_output(str(Path(target) / file), data)
            else:
                write_output(target, _rendered(name, diagnosis, fail_on))


_OUTPUT_OPTIONS = (
    ("--json", "FILE|-", "The whole diagnosis as JSON; - prints it, and only it."),
    ("--html", "FILE", "One self-contained page with a timeline."),
    ("--markdown", "FILE|-", "For a pull-request comment."),
    ("--sarif", "FILE", "SARIF 2.1.0, for code scanning."),
    ("--junit", "FILE", "JUnit XML: one test a rule."),
    ("--csv", "DIR", "Kernels, steps and account as CSV files in DIR."),
)


def output_options(command: _Command) -> _Command:
    """Adds --json, --html, --markdown, --sarif, --junit and --csv; the verb gets them by these names."""
    for flag, metavar, text in reversed(_OUTPUT_OPTIONS):
        command = click.option(flag, flag.removeprefix("--"), metavar=metavar, help=text)(command)
    return command


def _rendered(name: str, diagnosis: Diagnosis, fail_on: Severity | None) -> bytes:
    if name == "json":
        return to_json(diagnosis)
    text: str
    if name == "html":
        from gpudiag.report import html

        text = html.render(diagnosis)
    elif name == "markdown":
        from gpudiag.report import markdown

        text = markdown.render(diagnosis)
    elif name == "sarif":
        from gpudiag.report import sarif

        text = sarif.render(diagnosis, root=Path.cwd())
    else:
        from gpudiag.report import junit

        text = junit.render(diagnosis, fail_on or "warning")
    return text.encode("utf-8", "backslashreplace")


def write_output(target: str, data: bytes) -> None:
    """To stdout for `-`, else to a file, whole or not at all, named on stderr. Raises GpudiagError."""
    if target == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        write_file(Path(target), data)
        click.echo(f"gpudiag: wrote {clean(target)}", err=True)


def _check_writable(target: Path, folder: bool) -> None:
    if folder:
        with _said(target):
            target.mkdir(parents=True, exist_ok=True)
        probe = target / f".gpudiag.{os.getpid()}"
    else:
        if target.is_dir():
            raise GpudiagError(f"{target}: is a folder, not a file", f"name a file in it: {target / 'report'}")
        if target.exists() and not target.is_file():
            return  # /dev/stdout, /dev/null, a named pipe: opening it now would already be writing
        probe = target.with_name(f".{target.name[:80]}.{os.getpid()}")
    with _said(target):  # asking the file system itself: permission bits say nothing to root or on a read-only mount
        probe.touch()
        probe.unlink()


def write_file(target: Path, data: bytes) -> None:
    """Whole or not at all: a reader sees the old file or the new one. Raises GpudiagError."""
    with _said(target):
        if target.exists() and not target.is_file():
            _write_special(target, data)
            return
        temporary = target.with_name(f".{target.name[:80]}.{os.getpid()}")
        try:
            temporary.write_bytes(data)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)


def _write_special(target: Path, data: bytes) -> None:
    """To a device or a pipe. Raises OSError, for a pipe that nobody reads as well: opening one would wait for a reader."""
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO and stat.S_ISFIFO(target.stat().st_mode):
            raise OSError(errno.ENXIO, "a pipe that nobody reads") from error
        raise
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


@contextlib.contextmanager
def _said(target: Path | str) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise GpudiagError(
            f"cannot write {target}: {error.strerror or error}", "choose another place, or make the folder first"
        ) from error


def show(diagnosis: Diagnosis, stream: IO[str] | None = None, inputs: Sequence[str] = ()) -> None:
    """The report on a text stream (stdout): as wide as the terminal up to 100 columns, 80 in a pipe.

    inputs: the paths that the user named, for the commands to type next.
    """
    from gpudiag.report.terminal import render

    out: IO[str] = stream or sys.stdout
    width = max(60, min(shutil.get_terminal_size().columns, 100)) if out.isatty() else 80
    encoding = (getattr(out, "encoding", None) or "ascii").lower()
    ascii_only = not encoding.startswith("utf")
    out.write(render(diagnosis, width=width, color=wants_colour(out), ascii_only=ascii_only, inputs=inputs))
    out.flush()


def gate(diagnosis: Diagnosis, fail_on: Severity | None) -> int:
    """The exit code that `--fail-on` asks for, said on stderr: 0, 3 (failed) or 4 (cannot judge).

    A finding that another one explains is not counted again.
    """
    if fail_on is None:
        return 0
    if diagnosis.verdict.status == "cannot_judge":
        click.echo("gpudiag: gate cannot judge: " + headline(diagnosis), err=True)
        return GATE_CANNOT_JUDGE
    effects = {effect.rule for finding in diagnosis.findings for effect in effects_of(diagnosis, finding)}
    failing = [
        f for f in diagnosis.findings if f.rule not in effects and _SEVERITY_RANK[f.severity] >= _SEVERITY_RANK[fail_on]
    ]
    if not failing:
        return 0
    names = ", ".join(f"{f.rule} ({f.severity})" for f in failing)
    click.echo(f"gpudiag: gate failed at --fail-on {fail_on}: {clean(names)}", err=True)
    return GATE_FAILED


@contextlib.contextmanager
def progress() -> Iterator[Progress]:
    """A line on stderr that says what is being done, on a terminal only; in a pipe nothing."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, no_color=not wants_colour(sys.stderr))
    with console.status("") as status:
        yield lambda text: status.update(Text(clean(text, 100)))


def is_diagnosis(path: Path) -> bool:
    """True when a file is the JSON of a diagnosis, of whichever schema version, whatever the order of its keys."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_DIAGNOSIS:
            return False
        with path.open("rb") as file:
            head = file.read(4096)
            if not head.lstrip().startswith(b"{"):
                return False
            if _SCHEMA_FIELD.search(head):
                return True
            return b'"traceEvents"' not in head and _SCHEMA_FIELD.search(file.read()) is not None
    except OSError:
        return False  # the reader that opens it next says what is wrong


def load_diagnosis(path: Path) -> Diagnosis:
    """A diagnosis from its file, or from the bundle it lies in. Raises GpudiagError when it is none that this gpudiag reads."""
    if path.is_dir() and (path / "diagnosis.json").is_file():
        path = path / "diagnosis.json"
    if path.exists() and not path.is_file():
        raise GpudiagError(
            f"{path}: not a file", "give the path of a diagnosis; a pipe must be written to a file first"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise GpudiagError(f"cannot read {path}: {error.strerror or error}", "check the path") from error
    found = _SCHEMA_FIELD.search(data)
    if found is None:
        raise GpudiagError(
            f"{path}: not a gpudiag diagnosis", f"analyze it instead: gpudiag analyze {shell_word(str(path))}"
        )
    if found[1].decode() != SCHEMA:
        raise GpudiagError(
            f"{path}: schema {found[1].decode()}, this gpudiag reads {SCHEMA}", "use the gpudiag that wrote it"
        )
    try:
        return from_json(data)
    except msgspec.MsgspecError as error:
        raise GpudiagError(f"{path}: a damaged diagnosis ({error})", "analyze the recording again") from error
