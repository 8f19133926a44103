"""`gpudiag profile SCRIPT`: run a script unchanged, record it, and say what holds it back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click

from gpudiag.commands._bottom_line import bottom_line
from gpudiag.commands._common import (
    GATE_CANNOT_JUDGE,
    Outputs,
    Progress,
    example,
    fail_on_option,
    gate,
    no_color_option,
    output_options,
    progress,
    show,
    write_file,
)
from gpudiag.commands._history import keep_diagnosis, save_options
from gpudiag.commands._so_far import command
from gpudiag.diagnosis import Severity, to_json
from gpudiag.errors import GpudiagError
from gpudiag.report.facts import shell_word
from gpudiag.report.text import clean


class Target(NamedTuple):
    """What is to be run. kind: script | module | command; words: it and its arguments, untouched."""

    kind: str
    words: tuple[str, ...]

    @property
    def stem(self) -> str:
        """For the folder's name: `train` of train.py, of -m pkg.train and of torchrun train.py."""
        if self.kind == "module":
            return self.words[0].rpartition(".")[2]
        scripts = [word for word in self.words if word.endswith((".py", ".sh"))] if self.kind == "command" else []
        return Path((scripts or self.words)[0]).stem or "run"


class TargetCommand(click.Command):
    """Options end at the script, `-m MODULE` or `--`: whatever follows is the script's, even if it looks like ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_value = {
            name: not parameter.is_flag and not parameter.count
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option)
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        at = 0
        while at < len(args):
            word = args[at]
            if word == "--":
                ctx.meta["gpudiag.target"] = Target("command", tuple(args[at + 1 :]))
                break
            if word.startswith("-m") and not word.startswith("--"):
                module = [word[2:]] if len(word) > 2 else []
                ctx.meta["gpudiag.target"] = Target("module", (*module, *args[at + 1 :]))
                break
            if not word.startswith("-") or word == "-":
                ctx.meta["gpudiag.target"] = Target("script", tuple(args[at:]))
                break
            at += 2 if takes_value.get(word, False) else 1
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "(SCRIPT | -m MODULE | -- COMMAND...)", "[ARGS]..."]


@click.command(
    cls=TargetCommand,
    epilog=example(
        "gpudiag profile train.py --epochs 1",
        "gpudiag profile --html report.html -m mypackage.train --config small.yaml",
        "gpudiag profile --with torch -- torchrun --nproc-per-node 2 train.py",
    ),
)
@click.option(
    "--with",
    "collectors",
    type=click.Choice(["auto", "nsys", "torch", "nsys,torch"]),
    default="auto",
    show_default=True,
    help="Recorder. auto: nsys where it and a GPU are there, else torch.profiler. nsys,torch: two runs.",
)
@click.option(
    "-o", "--output", "folder", metavar="DIR", help="Folder for the recording. [default: ./gpudiag-SCRIPT-TIME]"
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    metavar="N",
    help="Steps before the window. [default: 5 and 0.5 s, at most 25]",
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="Steps to record."
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Runs of the whole script. The median one is judged; `compare` takes them all.",
)
@click.option(
    "--transforms", is_flag=True, help="Time each transform of the dataset by itself (torchvision's Compose)."
)
@click.option("--stop-after-capture", is_flag=True, help="End the script (SIGTERM) once the window is saved.")
@click.option(
    "--python",
    metavar="PATH",
    help="Interpreter for SCRIPT and -m. [default: this one if it has torch, else python on PATH]",
)
@click.option("--force", is_flag=True, help="Overwrite the folder of an earlier profile.")
@output_options
@fail_on_option
@save_options(by_default=True)
@no_color_option
@click.pass_context
def profile(
    ctx: click.Context,
    collectors: str,
    folder: str | None,
    warmup: int | None,
    steps: int,
    rounds: int,
    transforms: bool,
    stop_after_capture: bool,
    python: str | None,
    force: bool,
    json: str | None,
    html: str | None,
    markdown: str | None,
    sarif: str | None,
    junit: str | None,
    csv: str | None,
    fail_on: Severity | None,
    save: bool,
    db: Path | None,
) -> None:
    """Run a training script unchanged, record some of its steps, and say what holds it back.

    The script's output, arguments, stdin, working directory and exit code stay its own; what gpudiag says goes to stderr.
    A script that runs on after its --steps is judged meanwhile: the reports that were asked for, and diagnosis.json in the
    recording's folder, are there some seconds later, and are written again when it has ended.
    The exit code is the script's (128 + signal when it was killed); --fail-on counts only when that is 0.
    With `--json -` or `--markdown -` stdout holds that alone: what the script writes to its stdout goes to stderr then.
    Where the script runs more than once (--rounds, --with nsys,torch), each run gets the same stdin, up to 1 GB of it.
    """
    from gpudiag.collect.plan import Plan
    from gpudiag.collect.session import record

    target: Target | None = ctx.meta.get("gpudiag.target")
    if target is None or not target.words or not target.words[0]:
        raise click.UsageError("nothing to run: give a SCRIPT, -m MODULE, or -- COMMAND")
    outputs = Outputs(json=json, html=html, markdown=markdown, sarif=sarif, junit=junit, csv=csv)
    outputs.check()
    started = datetime.now()
    bundle = Path(folder or f"gpudiag-{target.stem}-{started:%Y%m%d-%H%M%S}").absolute()
    words = _Words()
    if outputs.uses_stdout:
        words.say("stdout is for the report alone: the script's own goes to stderr")
    plan = Plan(
        kind=target.kind,
        words=target.words,
        collectors=collectors,
        bundle=bundle,
        warmup=warmup,
        steps=steps,
        transforms=transforms,
        stop_after_capture=stop_after_capture,
        python=python,
        force=force,
        rounds=rounds,
        any_name=folder is None,
        stdout=2 if outputs.uses_stdout else 1,
    )
    ran = record(
        plan, words.say, beside=words.beside, working=words.working, judging=partial(command, outputs, fail_on)
    )
    _flush_script_output()
    code, bundle = ran.exit_code, ran.bundle
    if all(capture.failed for capture in ran.manifest.captures):
        words.say(f"nothing to judge; what there is lies in {_shown(bundle)}")
        ctx.exit(code or (GATE_CANNOT_JUDGE if fail_on else 0))
    try:
        with words.working() as tell:
            tell("analysing")
            from gpudiag.pipeline import diagnose

            diagnosis = diagnose([bundle], progress=tell)
    except GpudiagError as error:
        for warning in ran.manifest.warnings:  # how the script ended, which the report would have told
            words.say(warning)
        words.say(f"{error.message}")
        words.say(f"the recording is in {_shown(bundle)}; next: {error.hint}")
        ctx.exit(code or (GATE_CANNOT_JUDGE if fail_on else 0))
    try:
        write_file(bundle / "diagnosis.json", to_json(diagnosis))
    except GpudiagError as error:  # the disk is full: the report below is there all the same
        words.say(error.message)
    if not outputs.uses_stdout:
        words.begin()
        show(diagnosis, sys.stderr, [_shown(bundle)])
    if save:
        keep_diagnosis(diagnosis, "profile", db, name=target.stem, hint=False)
    words.say(f"recording: {shell_word(_shown(bundle))}")
    try:
        outputs.write(diagnosis, fail_on)
    except GpudiagError as error:
        words.say(error.message)
        ctx.exit(code or 1)
    ctx.exit(code or gate(diagnosis, fail_on))


class _Words:
    """What gpudiag says on stderr. The last line of the script's may lack its end, which is not seen from here: so an empty
    line goes before what is said first after it."""

    def __init__(self) -> None:
        self._follows_script = False

    def say(self, text: str) -> None:
        self.begin()
        click.echo(f"gpudiag: {clean(text)}", err=True)

    def begin(self) -> None:
        if self._follows_script:
            self._follows_script = False
            click.echo(err=True)

    @contextlib.contextmanager
    def beside(self) -> Iterator[Progress | None]:
        """The status while the script runs."""
        try:
            with bottom_line() as shown:
                yield shown
        finally:
            self._follows_script = True

    @contextlib.contextmanager
    def working(self) -> Iterator[Progress]:
        """The status while gpudiag works: it clears the line that it is on."""
        if sys.stderr.isatty():
            self.begin()
        with progress() as tell:
            yield tell


def _flush_script_output() -> None:
    """Nothing of ours is buffered while the script runs; this keeps the order when both share a file."""
    sys.stdout.flush()
    sys.stderr.flush()


def _shown(path: Path) -> str:
    """As short as it can be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
