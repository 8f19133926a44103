"""A SQLite recording, opened so that nothing about it changes, and small tables of it as Python rows.

Everything that SQLite refuses becomes GpudiagError. Large tables: `_columns.fetch`.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from gpudiag.errors import GpudiagError

MAGIC = b"SQLite format 3\x00"


class Database:
    """A SQLite file opened for reading only; nothing is created beside it. tables: name -> its columns.

    Raises GpudiagError when the file is no SQLite, is damaged, or has an unfinished write beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                head = file.read(100)
            self.size = path.stat().st_size
        except OSError as error:
            raise GpudiagError(f"{path}: {error.strerror}", "check the path and its permissions") from None
        if not head.startswith(MAGIC):
            raise GpudiagError(f"{path}: not a SQLite file", "give the .sqlite that `nsys export -t sqlite` wrote")
        for suffix, what in (("-wal", "not yet merged"), ("-journal", "half-finished")):
            beside = path.with_name(path.name + suffix)
            if beside.is_file() and beside.stat().st_size:
                # Reading without it would give other rows than the writer meant; reading with it would write beside the file.
                raise GpudiagError(
                    f"{path}: {beside.name} holds {what} changes",
                    "close or finish the program that writes it (or export again), then repeat",
                )
        # SQLite itself notices missing pages only when it comes to them, and never those of tables that nobody reads.
        stated = _stated_size(head)
        if stated > self.size:
            raise self.damaged(f"it is cut short: {self.size:,} of {stated:,} bytes")
        # immutable: no lock, no -wal or -shm file, and a read-only folder is enough.
        self.uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro&immutable=1"
        try:
            self._connection = sqlite3.connect(self.uri, uri=True)
        except sqlite3.Error as error:
            raise self.damaged(error) from None
        self._connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        # No views: a view may stand for a query without end.
        names = [str(row[0]) for row in self.rows("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        self.tables: dict[str, tuple[str, ...]] = {}
        for name in names:
            # A damaged table definition must not hide the sound ones.
            try:
                info = self._connection.execute(f"PRAGMA table_info({quoted(name)})").fetchall()
            except (sqlite3.Error, OverflowError, UnicodeError):
                continue
            self.tables[name] = tuple(str(row[1]) for row in info)

    def close(self) -> None:
        self._connection.close()

    def damaged(self, error: Exception | str) -> GpudiagError:
        return GpudiagError(
            f"{self.path}: damaged or incomplete SQLite file ({_one_line(str(error))})",
            "export the recording again, or copy the file again and compare its size",
        )

    def find(self, name: str) -> str | None:
        """The table of that name, or its newest variant `NAME_V2`; None when the file has none."""
        if name in self.tables:
            return name
        variants = [t for t in self.tables if re.fullmatch(re.escape(name) + r"_V\d+", t)]
        return max(variants, key=lambda t: int(t.rpartition("_V")[2])) if variants else None

    def rows(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[object, ...]]:
        """All rows of a query on a small table."""
        try:
            return self._connection.execute(sql, parameters).fetchall()
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            raise self.damaged(error) from None

    def small(self, table: str, columns: Sequence[str], limit: int = 100_000) -> list[tuple[object, ...]]:
        """The given columns (None where the table lacks one) of a small table, in the order of the file."""
        name = self.find(table)
        if name is None:
            return []
        have = self.tables[name]
        wanted = ", ".join(quoted(c) if c in have else "NULL" for c in columns)
        return self.rows(f"SELECT {wanted} FROM {quoted(name)} LIMIT ?", (limit,))

    def count(self, table: str) -> int:
        """Rows of a table; 0 when it is absent."""
        name = self.find(table)
        return integer(self.rows(f"SELECT count(*) FROM {quoted(name)}")[0][0]) if name else 0

    def rowids(self, table: str) -> tuple[object, object] | None:
        """The least and the greatest rowid (None, None when it has no rows); None when the table has no rowids."""
        try:
            low, high = (
                self._connection.execute(f"SELECT {end}(rowid) FROM {quoted(table)}").fetchone()[0]
                for end in ("min", "max")
            )
        except sqlite3.Error:
            return None
        return low, high

    def any(self, table: str) -> bool:
        name = self.find(table)
        return name is not None and bool(self.rows(f"SELECT 1 FROM {quoted(name)} LIMIT 1"))


def _stated_size(head: bytes) -> int:
    """Bytes by the header: page size x pages; 0 where the header does not vouch for it (sqlite.org/fileformat.html, 1.3.7)."""
    page, changes, pages, valid_for = (
        int.from_bytes(head[at : at + size], "big") for at, size in ((16, 2), (24, 4), (28, 4), (92, 4))
    )
    return (65536 if page == 1 else page) * pages if changes == valid_for else 0


def quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def as_text(value: object) -> str:
    """A value of a text column, whatever type an altered file gave it."""
    return (
        value
        if isinstance(value, str)
        else value.decode("utf-8", "replace")
        if isinstance(value, bytes)
        else str(value)
    )


def integer(value: object) -> int:
    return value if isinstance(value, int) else 0


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
