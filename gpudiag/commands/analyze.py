"""`gpudiag analyze PATH...`: diagnose what was recorded, or draw a saved diagnosis again."""

from __future__ import annotations

from pathlib import Path

import click

from gpudiag.commands._common import (
    Outputs,
    example,
    fail_on_option,
    gate,
    is_diagnosis,
    load_diagnosis,
    no_color_option,
    output_options,
    progress,
    show,
)
from gpudiag.commands._history import keep_diagnosis, save_options
from gpudiag.diagnosis import Severity
from gpudiag.errors import GpudiagError


@click.command(
    epilog=example(
        "gpudiag analyze trace.json.gz --html report.html",
        "gpudiag analyze report.sqlite --fail-on warning --markdown comment.md",
        "gpudiag analyze ranks/                   one recording a rank",
    )
)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(path_type=Path))
@output_options
@click.option(
    "--rules",
    "rules_dirs",
    multiple=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="More rules; one with the id of a built-in rule replaces it. May be repeated.",
)
@fail_on_option
@save_options(by_default=False)
@no_color_option
@click.pass_context
def analyze(
    ctx: click.Context,
    paths: tuple[Path, ...],
    json: str | None,
    html: str | None,
    markdown: str | None,
    sarif: str | None,
    junit: str | None,
    csv: str | None,
    rules_dirs: tuple[Path, ...],
    fail_on: Severity | None,
    save: bool,
    db: Path | None,
) -> None:
    """Say what holds a recording back: where the GPU's time goes, why, and what to change.

    PATH is an nsys .sqlite, .nsys-rep, .qdrep or .qdstrm, a torch.profiler .json or .json.gz, an nvprof file, a bundle
    of `gpudiag profile`, a saved diagnosis, or a folder with one recording a rank. The type is decided by content.
    """
    outputs = Outputs(json=json, html=html, markdown=markdown, sarif=sarif, junit=junit, csv=csv)
    outputs.check(paths)
    saved = [path for path in paths if is_diagnosis(path)]
    if saved:
        if len(paths) > 1:
            raise GpudiagError(f"{saved[0]}: a diagnosis stands alone", "give one diagnosis, or only recordings")
        if rules_dirs:
            raise GpudiagError(
                f"{saved[0]}: a diagnosis holds no events to judge by --rules", "analyze the recording itself"
            )
        diagnosis = load_diagnosis(saved[0])
    else:
        from gpudiag.pipeline import diagnose

        with progress() as tell:
            diagnosis = diagnose(paths, rules_dirs=rules_dirs, progress=tell)
    outputs.write(diagnosis, fail_on)
    if not outputs.uses_stdout:
        show(diagnosis, inputs=[str(path) for path in paths])
    if save:
        keep_diagnosis(diagnosis, "analyze", db)
    ctx.exit(gate(diagnosis, fail_on))
