"""`gpudiag metrics`: what is measured, with formula, unit, what it does not mean, and source."""

from __future__ import annotations

import click

from gpudiag.commands._common import example, no_color_option
from gpudiag.commands.rules import wrap
from gpudiag.errors import GpudiagError
from gpudiag.expr import did_you_mean
from gpudiag.metrics.spec import BY_NAME, CATALOGUE, TEXTS


@click.command(epilog=example("gpudiag metrics", "gpudiag metrics input_lost gpu_busy"))
@click.argument("names", nargs=-1, metavar="[NAME]...")
@no_color_option
def metrics(names: tuple[str, ...]) -> None:
    """What is measured, for reports and rules: unit, formula, what it does not mean, source.

    Figures are those of one device over the steady steps; "a step" is the mean over them (the whole span, where no step is
    known). Without names, or with `list`, all are printed.
    """
    if names == ("list",):  # as `rules list` and `runs list`
        names = ()
    for name in names:
        if name not in BY_NAME:
            raise GpudiagError(
                f"no metric is called {name!r}{did_you_mean(name, BY_NAME)}", "gpudiag metrics prints them all"
            )
    for spec in [BY_NAME[name] for name in names] or CATALOGUE:
        click.secho(f"{spec.name}  [{spec.unit}]", bold=True)
        click.echo(wrap(spec.doc))
        if spec.is_not:
            click.echo(wrap(spec.is_not, "  not: ", "       "))
        if spec.source:
            click.echo(wrap(spec.source, "  source: ", "          "))
    if not names:
        click.echo()
        click.secho("Texts that a rule can quote", bold=True)
        for text in TEXTS:
            click.echo(wrap(f"{text.name}: {text.doc}"))
