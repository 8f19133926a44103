"""The history of runs: one SQLite file, flat tables that Datasette shows as they are, safe with several writers.

A file that is damaged, newer than this gpudiag, or somebody else's database is never written to: it is looked at read-only
first. Writing goes through sqlite-utils, which takes 0.4 s to import and is therefore imported here, inside functions.
"""

from __future__ import annotations

import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpudiag.errors import GpudiagError
from gpudiag.records import Record, Row
from gpudiag.store_schema import APPLICATION_ID, MIGRATIONS, VERSION

if TYPE_CHECKING:
    from sqlite_utils import Database

BUSY_S = 30.0  # how long a writer waits for the others; a save takes some ms
_MAGIC = b"SQLite format 3\x00"


def place(db: Path | None = None) -> Path:
    """--db, else GPUDIAG_DB, else the user's data folder by XDG. Raises GpudiagError for a user without a home."""
    if db is not None:
        return db
    if named := os.environ.get("GPUDIAG_DB"):
        return Path(named)
    try:
        data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    except RuntimeError as error:  # a container's user that is in no passwd file
        raise GpudiagError("there is no home folder for the history", "name a file with --db or GPUDIAG_DB") from error
    return Path(data) / "gpudiag" / "runs.db"


def save(path: Path, record: Record) -> int:
    """Adds a run in one transaction and returns its id. Makes the file and its folder. Raises GpudiagError."""
    with _said(path), closing(_writer(path)) as connection:
        from sqlite_utils import Database

        database = Database(connection)
        connection.execute("BEGIN IMMEDIATE")
        run = int(database.table("runs").insert(record.run).last_pk)  # type: ignore[arg-type]
        document = {"run_id": run, "schema": record.schema, "zlib": zlib.compress(record.document)}
        database.table("documents").insert(document)
        for table in ("metrics", "findings", "environment"):
            _insert(database, table, ({"run_id": run, **row} for row in getattr(record, table)))
        connection.execute("COMMIT")
    return run


def delete(path: Path, ids: Sequence[int]) -> None:
    """All of them or, when one is not there, none. Raises GpudiagError."""
    with _said(path), closing(_writer(_existing(path))) as connection:
        connection.execute("BEGIN IMMEDIATE")
        for run in ids:
            if connection.execute("DELETE FROM runs WHERE id = ?", (run,)).rowcount == 0:
                raise _no_run(path, run)
        connection.execute("COMMIT")


def runs(path: Path, *, name: str = "", kind: str = "", last: int = 0, ids: Sequence[int] = ()) -> list[Row]:
    """Rows of `runs`, oldest first. last: only the newest so many (0 = all). ids: exactly these. Raises GpudiagError."""
    with _reading(path) as connection:
        if ids:
            found = [row for run in ids for row in _rows(connection, "SELECT * FROM runs WHERE id = ?", (run,))]
            for run in ids:
                if run not in {row["id"] for row in found}:
                    raise _no_run(path, run)
            return found
        newest = _rows(
            connection,
            "SELECT * FROM runs WHERE (?1 = '' OR name = ?1) AND (?2 = '' OR kind = ?2) ORDER BY id DESC LIMIT ?3",
            (name, kind, last or -1),
        )
    return newest[::-1]


def document(path: Path, run: int) -> tuple[str, bytes]:
    """(schema, JSON) of a run. Raises GpudiagError."""
    with _reading(path) as connection:
        rows = _rows(connection, "SELECT schema, zlib FROM documents WHERE run_id = ?", (run,))
    if not rows:
        raise _no_run(path, run)
    try:
        return str(rows[0]["schema"]), zlib.decompress(rows[0]["zlib"])
    except zlib.error as error:
        raise GpudiagError(
            f"{path}: the document of run {run} is damaged ({error})", "analyze its recording again"
        ) from error


def parts(path: Path, run: int) -> dict[str, list[Row]]:
    """The rows of the other tables that belong to a run: metrics, findings, environment."""
    order = {"metrics": "name", "findings": "place", "environment": "name"}
    with _reading(path) as connection:
        return {
            table: _rows(connection, f"SELECT * FROM {table} WHERE run_id = ? ORDER BY {by}", (run,))
            for table, by in order.items()
        }


def trend(path: Path, metric: str, *, name: str = "", kind: str = "", last: int = 0) -> list[Row]:
    """id, created, kind, name, value, unit of a metric over the runs that have it, oldest first."""
    with _reading(path) as connection:
        newest = _rows(
            connection,
            "SELECT runs.id, created, kind, runs.name, value, unit FROM metrics JOIN runs ON runs.id = run_id "
            "WHERE metrics.name = ?1 AND value IS NOT NULL AND (?2 = '' OR runs.name = ?2) AND (?3 = '' OR kind = ?3) "
            "ORDER BY runs.id DESC LIMIT ?4",
            (metric, name, kind, last or -1),
        )
    return newest[::-1]


def metric_names(path: Path) -> list[str]:
    with _reading(path) as connection:
        return [
            row["name"]
            for row in _rows(connection, "SELECT DISTINCT name FROM metrics WHERE value IS NOT NULL ORDER BY name")
        ]


def _insert(database: Database, table: str, rows: Iterable[Row]) -> None:
    database.table(table).insert_all(rows)


def _rows(connection: sqlite3.Connection, sql: str, values: Sequence[Any] = ()) -> list[Row]:
    return [dict(row) for row in connection.execute(sql, values)]


def _no_run(path: Path, run: int) -> GpudiagError:
    return GpudiagError(f"{path}: there is no run {run}", "`gpudiag runs list` shows the runs")


def _existing(path: Path) -> Path:
    if not path.exists():
        raise GpudiagError(
            f"{path}: no history yet", "`gpudiag profile SCRIPT` and `gpudiag analyze --save PATH` begin one"
        )
    return path


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Read-only; a history of an older gpudiag is brought up to date first."""
    with _said(path):
        if _version(_existing(path)) < VERSION:
            _writer(path).close()
        with closing(_reader(path)) as connection:
            yield connection


def _reader(path: Path) -> sqlite3.Connection:
    """Changes nothing. Not `mode=ro` where one may write: that leaves the two files of the WAL behind, which the last to
    close a connection of `mode=rw` takes away. Where nobody may write, nobody does, and the file is read as it lies there.
    """
    ours = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    mode = "mode=rw" if ours else "mode=ro&immutable=1"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=BUSY_S, isolation_level=None)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA query_only = ON")
    return connection


def _version(path: Path, thorough: bool = False) -> int:
    """The schema version of a file, 0 for an empty one. Raises GpudiagError for one that must not be touched.

    Version and owner are read from the header as bytes (SQLite's file format, 1.3), so that a file that is not ours is not
    even opened; only where a log lies beside it, which may hold a later header, SQLite is asked.
    """
    if path.is_dir():
        raise GpudiagError(f"{path}: is a folder, not a history", f"name a file in it: {path / 'runs.db'}")
    with path.open("rb") as file:
        head = file.read(100)
    if not head:
        return 0
    if not head.startswith(_MAGIC) or len(head) < 100:
        raise GpudiagError(f"{path}: not a history of runs, left as it is", "name another file with --db or GPUDIAG_DB")
    version, owner = (int.from_bytes(head[at : at + 4], "big") for at in (60, 68))
    log = path.with_name(f"{path.name}-wal")
    if owner != APPLICATION_ID or (log.exists() and log.stat().st_size):
        with closing(_reader(path)) as connection:
            connection.execute("BEGIN")  # one moment for all three: another writer may be making the history right now
            tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            owner, version = (
                connection.execute(f"PRAGMA {n}").fetchone()[0] for n in ("application_id", "user_version")
            )
        if owner != APPLICATION_ID and tables:
            raise GpudiagError(
                f"{path}: another program's database, left as it is", "name another file with --db or GPUDIAG_DB"
            )
    if version > VERSION:
        raise GpudiagError(
            f"{path}: written by a newer gpudiag (version {version}, this one reads up to {VERSION}), left as it is",
            "use that gpudiag, or another file with --db or GPUDIAG_DB",
        )
    if thorough:
        with closing(_reader(path)) as connection:
            if (said := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(said)
    return version


def _writer(path: Path) -> sqlite3.Connection:
    """A connection to an up-to-date history, made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        _version(path, thorough=True)
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        _use_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        version = int(
            connection.execute("PRAGMA user_version").fetchone()[0]
        )  # asked again: another writer may have been first
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                connection.execute(statement)
        if version < VERSION:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    """Readers never wait for a writer. The switch itself does not honour the busy time-out, so it is tried again; a file system
    that cannot share memory keeps the old mode, which is as safe."""
    until = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.02)


@contextmanager
def _said(path: Path) -> Iterator[None]:
    """What SQLite and the file system say, as the user's problem."""
    try:
        yield
    except sqlite3.OperationalError as error:
        hint = (
            "try again" if "locked" in str(error) else "check its folder, or name another file with --db or GPUDIAG_DB"
        )
        raise GpudiagError(f"{path}: {error}", hint) from error
    except sqlite3.DatabaseError as error:
        raise GpudiagError(
            f"{path}: a damaged history, left as it is ({error})",
            f"move it away and begin a new one; `sqlite3 {path} .recover` may save what it holds",
        ) from error
    except OSError as error:
        raise GpudiagError(
            f"{path}: {error.strerror or error}", "check its folder, or name another file with --db or GPUDIAG_DB"
        ) from error
