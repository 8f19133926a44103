"""`gpudiag export`: a scrubbed zip for someone else, or a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

import click

from gpudiag.commands._common import Outputs, example, no_color_option, progress
from gpudiag.errors import GpudiagError
from gpudiag.report.text import clean
from gpudiag.units import format_bytes


@click.command(
    epilog=example(
        "gpudiag export gpudiag-train -o shared.zip",
        "gpudiag export trace.json.gz --perfetto timeline.json.gz",
    )
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="ZIP", type=click.Path(path_type=Path), help="The zip to write.")
@click.option("--perfetto", metavar="FILE", type=click.Path(path_type=Path), help="A trace for ui.perfetto.dev.")
@click.option("--force", is_flag=True, help="Overwrite what is there.")
@no_color_option
def export(path: Path, output: Path | None, perfetto: Path | None, force: bool) -> None:
    """Pack a bundle or a recording for someone else: scrubbed of environment, user and host names, home folders and secrets.

    Prints what was done to each file and what was left out. What cannot be recognised as secret stays: names of your
    files, modules, functions and processes, and numbers. Look at the zip before you publish it. --perfetto is not scrubbed.
    """
    if output is None and perfetto is None:
        raise click.UsageError("give -o ZIP or --perfetto FILE")
    for option, target in (("-o", output), ("--perfetto", perfetto)):
        if target == Path("-"):
            raise click.UsageError(f"{option} needs the name of a file: it cannot write to stdout")
        if target is not None and target.exists() and not force:
            raise GpudiagError(f"{target}: exists", "choose another name, or add --force")
        if target is not None:
            Outputs(json=str(target)).check([path])
    if output is not None:
        _share(path, output)
    if perfetto is not None:
        _perfetto(path, perfetto)


def _share(path: Path, output: Path) -> None:
    from gpudiag.collect.sharing import share

    with progress() as tell:
        entries = share(path, output, progress=tell)
    for entry in entries:
        click.echo(f"{'  ' if entry.kept else '- '}{clean(entry.name)}")
        for line in entry.what:
            click.echo(f"      {clean(line)}")
    click.echo(f"gpudiag: wrote {clean(str(output))} ({format_bytes(output.stat().st_size)})", err=True)


def _perfetto(path: Path, target: Path) -> None:
    from gpudiag.perfetto import write_perfetto
    from gpudiag.pipeline import diagnose_recordings
    from gpudiag.read import open_recordings
    from gpudiag.rules import load_rules
    from gpudiag.scope import scopes_of

    with progress() as tell:
        recordings = open_recordings([path], tell)
        diagnosis = diagnose_recordings(recordings, load_rules(()), tell)
        accounts = [scope.account for timeline in recordings.timelines for scope in scopes_of(timeline)]
        tell("writing the trace")
        try:
            write_perfetto(recordings.timelines, accounts, diagnosis, target)
        except OSError as error:
            raise GpudiagError(f"{target}: {error.strerror or error}", "check the folder and the disk") from error
    click.echo(f"gpudiag: wrote {clean(str(target))}; open it at ui.perfetto.dev", err=True)
