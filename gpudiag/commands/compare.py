"""`gpudiag compare BEFORE AFTER`: two sides, one or several recordings each, and a gate for CI."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from gpudiag.commands._common import (
    GATE_CANNOT_JUDGE,
    Outputs,
    example,
    no_color_option,
    progress,
    wants_colour,
    write_output,
)
from gpudiag.commands._history import keep_comparison, save_options
from gpudiag.comparison import Comparison, to_json
from gpudiag.errors import GpudiagError
from gpudiag.report.text import clean


@click.command(
    epilog=example(
        "gpudiag compare before.json.gz after.json.gz --html comparison.html",
        "gpudiag compare main/diagnosis.json branch/diagnosis.json --gate 5",
        "gpudiag compare --before a1 --before a2 --before a3 --after b1 --after b2 --after b3",
    )
)
@click.argument("paths", nargs=-1, metavar="BEFORE AFTER", type=click.Path(path_type=Path))
@click.option(
    "--before",
    "more_before",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="One more round of it.",
)
@click.option(
    "--after",
    "more_after",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="One more round of it.",
)
@click.option(
    "--gate",
    type=click.FloatRange(min=0),
    metavar="PERCENT",
    help="Exit with 3 when AFTER is slower by more than this, with 4 when that cannot be judged.",
)
@click.option("--json", metavar="FILE|-", help="The whole comparison as JSON; - prints it, and only it.")
@click.option("--html", metavar="FILE", help="One self-contained page.")
@click.option("--markdown", metavar="FILE|-", help="For a pull-request comment.")
@save_options(by_default=False)
@no_color_option
@click.pass_context
def compare(
    ctx: click.Context,
    paths: tuple[Path, ...],
    more_before: tuple[Path, ...],
    more_after: tuple[Path, ...],
    gate: float | None,
    json: str | None,
    html: str | None,
    markdown: str | None,
    save: bool,
    db: Path | None,
) -> None:
    """Is AFTER faster than BEFORE, is it the same work, and where did the time go?

    A side is whatever `gpudiag analyze` takes: a recording, a bundle, a folder of ranks, or a saved diagnosis. Several
    recordings of a side (--before, --after, or a bundle with several rounds) show the spread from run to run.
    """
    if len(paths) not in (0, 2) or (not paths and not (more_before and more_after)):
        raise click.UsageError("give BEFORE and AFTER, or --before PATH and --after PATH")
    sides = ([*paths[:1], *more_before], [*paths[1:], *more_after])
    outputs = Outputs(json=json, html=html, markdown=markdown)
    outputs.check([*sides[0], *sides[1]])
    for path in (*sides[0], *sides[1]):
        if not path.exists():
            raise GpudiagError(f"{path}: no such file or folder", "give the path of a recording or a diagnosis")
    from gpudiag.commands._sides import load_side
    from gpudiag.compare import compare as comparing

    try:
        with progress() as tell:
            before, after = (load_side(side, tell) for side in sides)
        result = comparing(before, after, gate=gate)
    except GpudiagError as error:
        if gate is None:
            raise
        # A side that holds nothing never passes a gate, and is no reason to call the build broken either.
        click.echo(f"gpudiag: gate cannot judge: {clean(error.message)}", err=True)
        ctx.exit(GATE_CANNOT_JUDGE)
    deliver(result, outputs)
    if save:
        keep_comparison(result, db)
    ctx.exit(result.gate.exit_code if result.gate else 0)


def deliver(result: Comparison, outputs: Outputs, quiet: bool = False) -> None:
    """To the files asked for, and to the terminal unless one of them is stdout: then the gate speaks on stderr."""
    for name, target in outputs.given().items():
        write_output(target, _rendered(name, result))
    if not outputs.uses_stdout and not quiet:
        show(result)
    elif result.gate is not None and result.gate.result != "pass":
        word = "failed" if result.gate.result == "fail" else "cannot judge"
        click.echo(f"gpudiag: gate {word}: {clean(result.gate.reason)}", err=True)


def show(result: Comparison) -> None:
    from gpudiag.report.compare_text import render

    out = sys.stdout
    width = max(60, min(shutil.get_terminal_size().columns, 100)) if out.isatty() else 80
    ascii_only = not (out.encoding or "ascii").lower().startswith("utf")
    out.write(render(result, width=width, color=wants_colour(out), ascii_only=ascii_only))
    out.flush()


def _rendered(name: str, result: Comparison) -> bytes:
    if name == "json":
        return to_json(result)
    if name == "html":
        from gpudiag.report import compare_html

        return compare_html.render(result).encode("utf-8", "backslashreplace")
    from gpudiag.report import compare_markdown

    return compare_markdown.render(result).encode("utf-8", "backslashreplace")
