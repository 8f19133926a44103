"""Where the values of a TOML file stand. tomllib gives the values without their places; an error needs line and column.

Works on text that tomllib has accepted, so it need not notice errors.
"""

from __future__ import annotations

import re

Path = tuple[str | int, ...]
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*'""")
_SKIP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRINGS = ('"""', "'''", '"', "'")


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.places: dict[Path, int] = {}

    def skip(self) -> None:
        match = _SKIP.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def key(self) -> tuple[str, ...]:
        parts: list[str] = []
        while match := _KEY.match(self.text, self.at):
            parts.append(match[0].strip("\"'"))
            self.at = match.end()
            self.skip()
            if self.text[self.at : self.at + 1] != ".":
                break
            self.at += 1
            self.skip()
        return tuple(parts)

    def document(self) -> None:
        table: Path = ()
        counts: dict[tuple[str, ...], int] = {}
        self.skip()
        while self.at < len(self.text):
            start = self.at
            if self.text[self.at] == "[":
                many = self.text.startswith("[[", self.at)
                self.at += 2 if many else 1
                self.skip()
                name = self.key()
                self.at = self.text.index("]", self.at) + (2 if many else 1)
                if many:
                    counts[name] = counts.get(name, -1) + 1
                table = self._resolved(name, counts)
                self.places[table] = start
            else:
                key = self.key()
                if not key:  # not TOML after all: stop rather than loop
                    return
                self.pair(table + key, start)
            self.skip()

    def _resolved(self, name: tuple[str, ...], counts: dict[tuple[str, ...], int]) -> Path:
        out: list[str | int] = []
        for i, part in enumerate(name):
            out.append(part)
            if name[: i + 1] in counts:
                out.append(counts[name[: i + 1]])
        return tuple(out)

    def pair(self, path: Path, key_at: int) -> None:
        self.at = self.text.index("=", self.at) + 1
        self.skip()
        self.places[(*path, "=")] = key_at
        self.value(path)

    def value(self, path: Path) -> None:
        for quote in _STRINGS:
            if self.text.startswith(quote, self.at):
                self.at += len(quote)
                if len(quote) == 3 and self.text.startswith(("\n", "\r\n"), self.at):
                    self.at = self.text.index("\n", self.at) + 1
                self.places[path] = self.at
                escapes = quote[0] == '"'
                while not self.text.startswith(quote, self.at):
                    self.at += 2 if escapes and self.text[self.at] == "\\" else 1
                self.at += len(quote)
                while len(quote) == 3 and self.text[self.at : self.at + 1] == quote[0]:
                    self.at += 1  # up to two quotes may stand before the closing three
                return
        self.places[path] = self.at
        if self.text[self.at] == "[":
            self._items(path, "]")
        elif self.text[self.at] == "{":
            self._items(path, "}")
        else:
            match = re.compile(r"[^,\]}\n#]*").match(self.text, self.at)
            assert match is not None
            self.at = match.end()

    def _items(self, path: Path, close: str) -> None:
        self.at += 1
        index = 0
        self.skip()
        while self.text[self.at] != close:
            if close == "]":
                self.value((*path, index))
                index += 1
            else:
                start = self.at
                self.pair((*path, *self.key()), start)
            self.skip()
            if self.text[self.at] == ",":
                self.at += 1
                self.skip()
        self.at += 1


def places(text: str) -> dict[Path, int]:
    """Index in the text of each value (strings: of their first character), of each table header, and of each key under
    its path with "=" appended."""
    scanner = _Scanner(text)
    scanner.document()
    return scanner.places


def line_and_column(text: str, index: int) -> tuple[int, int]:
    """1-based."""
    before = text[: max(index, 0)]
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
