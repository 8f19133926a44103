"""A copy of an nsys SQLite export that can be shown to a stranger.

What an export carries besides events: the recorder's whole environment (TARGET_INFO_SYSTEM_ENV 'DeviceEnvironment',
META_DATA_CAPTURE 'PROCESS_n:ENVIRONMENT_VARIABLE'), its command line, user, host and paths (META_DATA_*), the name of
every process of the machine (PROCESSES) and of its threads, the application's output (ProcessStreams, ANALYSIS_FILE),
opened files (OSRT_FILE_ACCESS_EVENTS), and strings that nothing refers to any more. So tables and settings are kept by
allow-list: what is not known to be needed is dropped.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache
from pathlib import Path

from gpudiag.collect.privacy import Scrubber, secret_values
from gpudiag.errors import GpudiagError

_KEPT_TABLES = re.compile(
    r"CUPTI_ACTIVITY_KIND_\w+|ENUM_\w+|CUDA_GRAPH\w*|CUDA_GPU_MEMORY\w*|CUDA_UM_\w+|NVTX_EVENTS|NVTX_PAYLOAD_\w+"
    r"|TARGET_INFO_(?:GPU|CUDA_\w+|NVTX_CUDA_\w+|SESSION_START_TIME|SYSTEM_ENV)|META_DATA_\w+|EXPORT_META_DATA"
    r"|ANALYSIS_DETAILS|PROFILER_OVERHEAD|OSRT_API|SCHED_EVENTS|GPU_METRICS|DIAGNOSTIC_EVENT|PROCESSES|ThreadNames"
    r"|StringIds"
)
_KEPT_SETTINGS = re.compile(
    r"EXPORT_(?:PRODUCT_\w+|SCHEMA_VERSION\w*|PLATFORM|ARCH|LAZY|PARAM_LAZY)|CAPTURE_EVENT_TYPE|\w*VERSION\w*"
    r"|(?:Nv|Cuda)DriverVersion|Cpu(?:Cores|SpeedMhz|Architecture|Description)|OsDescription|HardwarePlatform"
    r"|CUDA_GRAPH_TRACE_OPTIONS:\w+|CUDA_FLUSH_\w+|(?:START|STOP)_TRIGGER|\w+_(?:FREQ|HZ)|SoftwarePlatform"
)
_BLANKED = {
    "TARGET_INFO_GPU": ("uuid",),
    "TARGET_INFO_CUDA_DEVICE": ("uuid",),
    "NVTX_EVENTS": ("binaryData", "jsonText"),
}
# Columns that hold ids of StringIds; newer exports say so in a comment of their CREATE TABLE, older ones do not.
_STRING_COLUMNS = frozenset({"nameId", "shortName", "demangledName", "mangledName", "textId", "kernelName", "labelId"})
_REFERENCE = re.compile(r"^\s*\"?(\w+)\"?[^\n]*REFERENCES\s+StringIds", re.MULTILINE | re.IGNORECASE)
_GLOBAL_PID = ~0xFFFFFF  # globalTid without its thread bits


def is_nsys_sqlite(path: Path) -> bool:
    """Whether a SQLite file is an export of nsys: nothing else is known well enough to be scrubbed."""
    try:
        with closing(_open(path)) as db:
            return {"StringIds"} <= _tables(db).keys()
    except sqlite3.DatabaseError:
        return False


def scrub_sqlite(source: Path, target: Path, scrub: Scrubber) -> list[str]:
    """Write the scrubbed copy to `target`; the source is opened read-only. What was done, in words.

    scrub: of this machine; the recording machine's user, home, host and secrets are read from the export itself.
    Raises GpudiagError when the source cannot be read or the disk is full.
    """
    try:
        with closing(_open(source)) as original, closing(sqlite3.connect(target, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = OFF")  # nobody else sees the copy, and a failed one is thrown away
            db.execute("PRAGMA synchronous = OFF")
            original.backup(db)
            db.text_factory = lambda raw: raw.decode("utf-8", "replace")  # kernel names may be no UTF-8
            scrubbers = (_recorder(db), scrub)
            done = _drop_tables(db)
            done += _drop_settings(db)
            done += _drop_processes(db)
            _drop_strings(db)
            done += _rewrite_texts(db, scrubbers)
            db.execute("VACUUM")  # deleted rows stay in the file until then
    except sqlite3.DatabaseError as error:
        raise GpudiagError(
            f"{source}: cannot be copied without its private parts ({error})", "check the disk and the file"
        ) from error
    return done


def _open(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)


def _tables(db: sqlite3.Connection) -> dict[str, list[str]]:
    """table -> its columns."""
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    return {name: [row[1] for row in db.execute(f"PRAGMA table_info({_quoted(name)})")] for name in names}


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _recorder(db: sqlite3.Connection) -> Scrubber:
    """Who and what recorded, as far as the export says: to be found in other texts and replaced there."""
    settings: list[tuple[str, str]] = []
    for table in _tables(db):
        if re.fullmatch(r"TARGET_INFO_SYSTEM_ENV|META_DATA_\w+|EXPORT_META_DATA", table):
            settings += db.execute(
                f"SELECT name, value FROM {_quoted(table)} WHERE typeof(value) = 'text' AND typeof(name) = 'text'"
            ).fetchall()
    lines = [line for name, value in settings if "nvironment" in name.title() for line in value.splitlines()]
    variables = {name: value for name, _, value in (line.partition("=") for line in lines)}
    by_name = dict(settings)
    user = variables.get("USER") or variables.get("LOGNAME") or by_name.get("EXPORT_USER") or ""
    host = by_name.get("Hostname") or by_name.get("EXPORT_HOST") or variables.get("HOSTNAME") or ""
    return Scrubber(variables.get("HOME", ""), user, host, secret_values(variables))


def _drop_tables(db: sqlite3.Connection) -> list[str]:
    for kind, name in db.execute("SELECT type, name FROM sqlite_master WHERE type IN ('view', 'trigger')").fetchall():
        db.execute(f"DROP {kind} {_quoted(name)}")
    dropped = [name for name in _tables(db) if not _KEPT_TABLES.fullmatch(name) and not name.startswith("sqlite_")]
    filled = [name for name in dropped if db.execute(f"SELECT 1 FROM {_quoted(name)} LIMIT 1").fetchone()]
    for name in dropped:
        db.execute(f"DROP TABLE {_quoted(name)}")
    return [f"tables left out: {', '.join(filled)}"] if filled else []


def _drop_settings(db: sqlite3.Connection) -> list[str]:
    """Name-value tables: everything that is not known to be harmless."""
    gone = 0
    for table, columns in _tables(db).items():
        if not re.fullmatch(r"TARGET_INFO_SYSTEM_ENV|META_DATA_\w+|EXPORT_META_DATA", table):
            continue
        if not {"name", "value"} <= set(columns):
            db.execute(f"DROP TABLE {_quoted(table)}")
            continue
        names = [name for (name,) in db.execute(f"SELECT DISTINCT name FROM {_quoted(table)}")]
        for name in names:
            if not (isinstance(name, str) and _KEPT_SETTINGS.fullmatch(name)):
                gone += db.execute(f"DELETE FROM {_quoted(table)} WHERE name IS ?", (name,)).rowcount
    return [f"{gone} settings of the recorder left out (environment, command line, user, host, paths)"] if gone else []


def _drop_processes(db: sqlite3.Connection) -> list[str]:
    """Processes and threads without any event are not of the application: nsys lists the whole machine."""
    tables = _tables(db)
    db.execute("CREATE TEMP TABLE active(id UNIQUE)")
    for table, columns in tables.items():
        for column in {"globalTid", "globalPid"} & set(columns):
            if table not in ("PROCESSES", "ThreadNames", "SCHED_EVENTS", "DIAGNOSTIC_EVENT"):
                _collect(db, "active", f"{column} & {_GLOBAL_PID}", table)
    gone = 0
    for table, column in (("PROCESSES", "globalPid"), ("ThreadNames", "globalTid"), ("SCHED_EVENTS", "globalTid")):
        if column in tables.get(table, ()):
            inactive = f"{column} & {_GLOBAL_PID} NOT IN (SELECT id FROM active)"
            gone += db.execute(f"DELETE FROM {_quoted(table)} WHERE {inactive}").rowcount
    db.execute("DROP TABLE active")
    return [f"{gone} rows about other processes of the machine left out"] if gone else []


def _drop_strings(db: sqlite3.Connection) -> None:
    tables = _tables(db)
    if "StringIds" not in tables:
        return
    db.execute("CREATE TEMP TABLE used(id UNIQUE)")  # not one UNION: a compound SELECT takes at most 500 terms
    for table, columns in tables.items():
        (sql,) = db.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        for column in sorted((set(_REFERENCE.findall(sql or "")) | _STRING_COLUMNS) & set(columns)):
            _collect(db, "used", _quoted(column), table)
    db.execute("DELETE FROM StringIds WHERE id NOT IN (SELECT id FROM used)")
    db.execute("DROP TABLE used")


def _collect(db: sqlite3.Connection, into: str, expression: str, table: str) -> None:
    db.execute(
        f"INSERT OR IGNORE INTO {into} SELECT DISTINCT {expression} FROM {_quoted(table)} WHERE {expression} IS NOT NULL"
    )


def _rewrite_texts(db: sqlite3.Connection, scrubbers: Sequence[Scrubber]) -> list[str]:
    """Every text that is left passes through the scrubbers; columns that identify a machine are emptied."""

    @lru_cache(maxsize=1 << 16)
    def clean(raw: bytes) -> bytes:
        text = raw.decode("utf-8", "surrogateescape")
        for scrub in scrubbers:
            text = scrub.trace(text)
        return text.encode("utf-8", "surrogateescape")

    db.create_function("scrubbed", 1, clean, deterministic=True)
    changed = 0
    for table, columns in _tables(db).items():
        if table.startswith("ENUM_"):
            continue
        for column in columns:
            if column in _BLANKED.get(table, ()):
                db.execute(f"UPDATE {_quoted(table)} SET {_quoted(column)} = '' WHERE {_quoted(column)} IS NOT NULL")
                continue
            name = _quoted(column)
            # as bytes both ways: sqlite3 refuses to hand text that is no UTF-8 to a function
            new = f"CAST(scrubbed(CAST({name} AS BLOB)) AS TEXT)"
            done = db.execute(
                f"UPDATE {_quoted(table)} SET {name} = {new} WHERE typeof({name}) = 'text' AND {new} <> {name}"
            )
            changed += done.rowcount
    return [f"{changed} texts with names, paths or secrets rewritten"] if changed else []
