"""`gpudiag runs`: the history of runs. `profile` adds to it by itself, `analyze` and `compare` with --save."""

from __future__ import annotations

import difflib
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from gpudiag.commands._common import Outputs, example, no_color_option, wants_colour, write_output
from gpudiag.commands._common import show as show_diagnosis
from gpudiag.commands._history import db_option
from gpudiag.errors import GpudiagError
from gpudiag.report.runs_export import as_csv, as_json, nested

LATEST = "last"


class RunId(click.ParamType):  # type: ignore[type-arg]  # generic in new versions of click only
    """A run's number, or `last`."""

    name = "run"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if value == LATEST or isinstance(value, int):
            return 0 if value == LATEST else value
        if not str(value).isdecimal() or not 0 < int(value) < 1 << 63:
            self.fail(f"{value!r} is no run: give its number, or `{LATEST}`", param, ctx)
        return int(value)


@click.group(
    epilog=example(
        "gpudiag runs list",
        "gpudiag runs trend step_median --name train",
        "gpudiag runs compare 12 last --gate 5",
    )
)
@no_color_option
def runs() -> None:
    """The history of runs: list, show, trend, compare, delete, export.

    It is one SQLite file: --db, else GPUDIAG_DB, else gpudiag/runs.db in your data folder (XDG). Its tables are flat:
    `datasette runs.db` shows them as they are.
    """


@runs.command("list", epilog=example("gpudiag runs list --name train --last 20"))
@click.option("--name", default="", help="Only runs of this name.")
@click.option(
    "--kind", default="", type=click.Choice(["", "profile", "analyze", "compare", "bench"]), help="Only these."
)
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the newest N.")
@click.option("--json", metavar="FILE|-", help="The rows as JSON.")
@db_option
@no_color_option
def list_(name: str, kind: str, last: int | None, json: str | None, db: Path | None) -> None:
    """The runs, oldest first."""
    from gpudiag import store
    from gpudiag.report.runs_text import table

    path = store.place(db)
    found = store.runs(path, name=name, kind=kind, last=last or 0) if path.exists() else []
    if json is not None:
        write_output(json, as_json(found))
    elif found:
        click.echo(table(found, **_look()), nl=False)
    else:
        click.echo("no such runs" if name or kind else f"no runs in {path}: `gpudiag profile SCRIPT` adds one")


@runs.command(epilog=example("gpudiag runs show last", "gpudiag runs show 12 --html report.html"))
@click.argument("run", type=RunId())
@click.option("--json", metavar="FILE|-", help="The document as it was saved.")
@click.option("--html", metavar="FILE", help="One self-contained page.")
@click.option("--markdown", metavar="FILE|-", help="For a pull-request comment.")
@db_option
@no_color_option
def show(run: int, json: str | None, html: str | None, markdown: str | None, db: Path | None) -> None:
    """A run's report again, as it was judged then."""
    from gpudiag import comparison, diagnosis, store
    from gpudiag.report.runs_text import header

    path = store.place(db)
    outputs = Outputs(json=json, html=html, markdown=markdown)
    outputs.check()
    number = _number(path, run)
    schema, document = store.document(path, number)
    if json is not None:
        write_output(json, document)
    row = store.runs(path, ids=[number])[0]
    others = Outputs(html=html, markdown=markdown)
    quiet = bool(outputs.given())
    if schema == diagnosis.SCHEMA:
        result = _decoded(path, number, diagnosis.from_json, document)
        others.write(result)
        if not quiet:
            click.echo(header(row, **_look()), nl=False)
            show_diagnosis(result, inputs=[result.source.path])
    elif schema == comparison.SCHEMA:
        from gpudiag.commands.compare import deliver

        compared = _decoded(path, number, comparison.from_json, document)
        if not quiet:
            click.echo(header(row, **_look()), nl=False)
        deliver(compared, others, quiet=quiet)
    else:
        if others.given():
            raise GpudiagError(
                f"run {number} is a {row['kind']} ({schema})", f"take it out: gpudiag runs show {number} --json FILE"
            )
        if not quiet:
            click.echo(header(row, **_look()) + row["headline"])
            for metric in store.parts(path, number)["metrics"]:
                click.echo(f"  {metric['name']}: {metric['value']:.6g} {metric['unit']}".rstrip())


@runs.command(
    epilog=example("gpudiag runs trend step_median", "gpudiag runs trend gpu_busy --name train --svg busy.svg")
)
@click.argument("metric")
@click.option("--name", default="", help="Runs of this name. [default: that of the newest run with the metric]")
@click.option(
    "--kind", default="", type=click.Choice(["", "profile", "analyze", "compare", "bench"]), help="Only these."
)
@click.option("--last", default=40, show_default=True, type=click.IntRange(min=1), metavar="N", help="The newest N.")
@click.option("--svg", metavar="FILE", help="The plot as a picture.")
@click.option("--json", metavar="FILE|-", help="The values as JSON.")
@db_option
@no_color_option
def trend(metric: str, name: str, kind: str, last: int, svg: str | None, json: str | None, db: Path | None) -> None:
    """One metric over the runs, with a plot. `gpudiag metrics` lists the metrics."""
    from gpudiag import store
    from gpudiag.report import runs_text

    path = store.place(db)
    outputs = Outputs(json=json, html=svg)
    outputs.check()
    newest = store.trend(path, metric, name=name, kind=kind, last=1)
    if not newest:
        raise _no_metric(path, metric, name or kind)
    found = store.trend(path, metric, name=newest[0]["name"], kind=kind, last=last)
    if svg is not None:
        write_output(svg, runs_text.trend_svg(found, metric).encode("utf-8", "backslashreplace"))
    if json is not None:
        write_output(json, as_json(found))
    if json != "-":
        click.echo(runs_text.trend(found, metric, **_look()), nl=False)


@runs.command(
    epilog=example("gpudiag runs compare 12 last", "gpudiag runs compare 12 15 --gate 5 --html comparison.html")
)
@click.argument("before", type=RunId())
@click.argument("after", type=RunId())
@click.option(
    "--gate",
    type=click.FloatRange(min=0),
    metavar="PERCENT",
    help="Exit with 3 when AFTER is slower by more than this, with 4 when that cannot be judged.",
)
@click.option("--json", metavar="FILE|-", help="The whole comparison as JSON.")
@click.option("--html", metavar="FILE", help="One self-contained page.")
@click.option("--markdown", metavar="FILE|-", help="For a pull-request comment.")
@db_option
@no_color_option
@click.pass_context
def compare(
    ctx: click.Context,
    before: int,
    after: int,
    gate: float | None,
    json: str | None,
    html: str | None,
    markdown: str | None,
    db: Path | None,
) -> None:
    """Two runs side by side, as `gpudiag compare` does it."""
    from gpudiag import diagnosis, store
    from gpudiag.commands.compare import deliver
    from gpudiag.compare import compare as comparing

    path = store.place(db)
    outputs = Outputs(json=json, html=html, markdown=markdown)
    outputs.check()
    sides = []
    for run in (before, after):
        number = _number(path, run)
        schema, document = store.document(path, number)
        if schema != diagnosis.SCHEMA:
            raise GpudiagError(
                f"run {number} holds {schema}, which is no diagnosis", "compare runs of profile or analyze"
            )
        sides.append([_decoded(path, number, diagnosis.from_json, document)])
    result = comparing(*sides, gate=gate)
    deliver(result, outputs)
    ctx.exit(result.gate.exit_code if result.gate else 0)


@runs.command(epilog=example("gpudiag runs delete 3 4"))
@click.argument("ids", nargs=-1, required=True, metavar="RUN...", type=RunId())
@db_option
def delete(ids: tuple[int, ...], db: Path | None) -> None:
    """Take runs out of the history; when one is not there, none is."""
    from gpudiag import store

    path = store.place(db)
    numbers = list(dict.fromkeys(_number(path, run) for run in ids))
    store.delete(path, numbers)
    click.echo(f"deleted {len(numbers)} run{'s' if len(numbers) != 1 else ''}: {', '.join(map(str, numbers))}")


@runs.command(epilog=example("gpudiag runs export --csv runs.csv", "gpudiag runs export 3 4 --json runs.json"))
@click.argument("ids", nargs=-1, metavar="[RUN...]", type=RunId())
@click.option("--json", metavar="FILE|-", help="Runs with their metrics, findings and environment.")
@click.option("--csv", "csv_", metavar="FILE|-", help="One row a run, one column a metric.")
@db_option
def export(ids: tuple[int, ...], json: str | None, csv_: str | None, db: Path | None) -> None:
    """The runs (all, or those named) for a notebook or a spreadsheet."""
    from gpudiag import store

    if json is None and csv_ is None:
        raise click.UsageError("say what to write: --json FILE or --csv FILE")
    Outputs(json=json, html=csv_).check()
    path = store.place(db)
    rows = store.runs(path, ids=[_number(path, run) for run in ids])
    parts = [store.parts(path, row["id"]) for row in rows]
    if json is not None:
        write_output(json, as_json([nested(row, part) for row, part in zip(rows, parts, strict=True)]))
    if csv_ is not None:
        write_output(csv_, as_csv(rows, parts))


def _number(path: Path, run: int) -> int:
    """`last` (0) is the newest run."""
    from gpudiag import store

    if run:
        return run
    newest = store.runs(path, last=1)
    if not newest:
        raise GpudiagError(f"{path}: no runs yet", "`gpudiag profile SCRIPT` adds one")
    return int(newest[0]["id"])


def _decoded(path: Path, run: int, decode: Any, document: bytes) -> Any:
    try:
        return decode(document)
    except msgspec.MsgspecError as error:
        raise GpudiagError(
            f"{path}: the document of run {run} is damaged ({error})", "analyze its recording again"
        ) from error


def _no_metric(path: Path, metric: str, where: str) -> GpudiagError:
    from gpudiag import store

    names = store.metric_names(path)
    close = difflib.get_close_matches(metric, names, 3)
    among = f" of {where}" if where else ""
    if metric in names:
        return GpudiagError(f"no run{among} has the metric {metric}", "see `gpudiag runs list`")
    hint = f"perhaps {' or '.join(close)}" if close else "`gpudiag metrics` lists the metrics"
    return GpudiagError(f"no run{among} has a metric {metric}", hint)


def _look() -> dict[str, Any]:
    """width, colour and characters of stdout."""
    width = max(60, min(shutil.get_terminal_size().columns, 120)) if sys.stdout.isatty() else 80
    return {
        "width": width,
        "color": wants_colour(sys.stdout),
        "ascii_only": not (sys.stdout.encoding or "ascii").lower().startswith("utf"),
    }
