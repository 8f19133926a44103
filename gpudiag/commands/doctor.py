"""`gpudiag doctor`: what this machine can record, what it cannot, what is lost by that and how to get it."""

from __future__ import annotations

import json as json_module
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from gpudiag import __version__
from gpudiag.collect.checks import Check, describe_and_check
from gpudiag.commands._common import Outputs, example, no_color_option, progress, wants_colour, write_output
from gpudiag.report.text import clean

SCHEMA = "gpudiag.doctor/1"
_COLOURS = {"ok": "green", "limited": "yellow", "missing": "red", "unknown": "bright_black"}
_WIDTH = 80


@click.command(epilog=example("gpudiag doctor --python .venv/bin/python", "gpudiag doctor --json machine.json"))
@click.option(
    "--python", type=click.Path(path_type=Path), help="The interpreter that runs your scripts (default: this one)."
)
@click.option(
    "--json", metavar="FILE|-", help="The checks and the facts of the machine as JSON; - prints it, and only it."
)
@no_color_option
def doctor(python: Path | None, json: str | None) -> None:
    """Check what this machine can record, and what is missing.

    Records one NVTX range with nsys where it is installed (about two seconds). Always exits with 0.
    """
    Outputs(json=json).check()
    with progress() as tell:
        facts, checks = describe_and_check(python, tell)
    if json is not None:
        result = {"schema": SCHEMA, "gpudiag": __version__, "checks": msgspec.to_builtins(checks), "environment": facts}
        write_output(json, json_module.dumps(result, indent=2).encode() + b"\n")
    if json != "-":
        click.echo(text(checks, color=wants_colour(sys.stdout)), nl=False, color=True)


def text(checks: Sequence[Check], *, color: bool = False) -> str:
    """One block a check, 80 columns; what is missing says what is lost and how to get it."""
    name_width = max(len(check.name) for check in checks)
    indent = " " * (len("limited") + 2 + name_width + 2)
    blocks = []
    for check in checks:
        head = f"{check.status:<7}  {check.name:<{name_width}}  "
        lines = _wrapped(clean(check.found), head, indent)
        if check.status != "ok":
            lines += _wrapped(clean(check.lost), indent + "lost: ", indent + "      ") if check.lost else []
            lines += _wrapped(clean(check.fix), indent + "fix:  ", indent + "      ") if check.fix else []
        if color:
            lines[0] = click.style(check.status, fg=_COLOURS[check.status]) + lines[0].removeprefix(check.status)
        blocks += lines
    return "\n".join([*blocks, "", *_wrapped(_summary(checks), "", "")]) + "\n"


def _wrapped(words: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        words, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False, break_long_words=False
    )


def _summary(checks: Sequence[Check]) -> str:
    state = {check.name: check.status for check in checks}
    ways = []
    if state["torch"] in ("ok", "limited"):
        ways.append("torch.profiler")
    if state["nsys"] == "ok" and state.get("NVTX ranges") == "ok":
        ways.append("nsys")
    what = "GPU and CPU" if state["GPU"] == "ok" else "the CPU only"
    if not ways:
        return "This machine can analyze recordings, and record none."
    return f"This machine can record {what}, with {' or '.join(ways)}."
