"""Keeping a result in the history: the options, and a save that can fail without harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpudiag.errors import GpudiagError
from gpudiag.report.text import clean

if TYPE_CHECKING:
    from gpudiag.comparison import Comparison
    from gpudiag.diagnosis import Diagnosis
    from gpudiag.records import Kind, Record

_Command = TypeVar("_Command", bound=Callable[..., Any])

db_option = click.option(
    "--db", metavar="FILE", type=click.Path(path_type=Path), help="The history. [default: GPUDIAG_DB, else XDG]"
)


def save_options(by_default: bool) -> Callable[[_Command], _Command]:
    """Adds --save/--no-save and --db; the verb gets them as `save` and `db`."""

    def add(command: _Command) -> _Command:
        text = f"Keep it in the history (gpudiag runs). [default: {'yes' if by_default else 'no'}]"
        return click.option("--save/--no-save", default=by_default, help=text)(db_option(command))

    return add


def keep_diagnosis(
    diagnosis: Diagnosis, kind: Kind, db: Path | None, name: str = "", *, hint: bool = True
) -> int | None:
    from gpudiag.records import of_diagnosis

    return keep(of_diagnosis(diagnosis, kind, name), db, hint=hint)


def keep_comparison(comparison: Comparison, db: Path | None) -> int | None:
    from gpudiag.records import of_comparison

    return keep(of_comparison(comparison), db)


def keep(record: Record, db: Path | None, *, hint: bool = True) -> int | None:
    """The id of the run, said on stderr, with the command that shows it (hint). A history that cannot be written costs a line there, never the result or the exit
    code: None."""
    from gpudiag import store

    try:
        run = store.save(store.place(db), record)
    except GpudiagError as error:
        click.echo(f"gpudiag: not kept in the history: {clean(error.message)}", err=True)
        return None
    click.echo(f"gpudiag: kept as run {run}{f'   see it again: gpudiag runs show {run}' if hint else ''}", err=True)
    return run
