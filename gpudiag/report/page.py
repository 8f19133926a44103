"""A page of text: paragraphs, headings and colours, wrapped to a width, plain ASCII where asked."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field

from gpudiag.report.text import clean, columns, cut_end

BOLD, DIM, RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN = "1", "2", "31", "32", "33", "34", "35", "36"

MOST_LINES = 10  # of a paragraph: what is longer comes from a name, not from a sentence
_UNIT = re.compile(r"(?<=\d) (?=(?:%|[nuµm]?s|min|[kMGT]?B(?:/s)?)(?:\W|$))")  # a number stays with its unit

# ASCII stand-ins for the characters that the reports themselves write.
_TO_ASCII = str.maketrans({"…": "~", "─": "-", "│": "|", "·": "."})


@dataclass(frozen=True)
class Page:
    """Collects the lines of a report. Widths are counted before colours go in."""

    width: int
    color: bool
    ascii_only: bool
    lines: list[str] = field(default_factory=list)

    def paint(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.color and style and text else text

    def add(self, line: str = "") -> None:
        self.lines.append(line.rstrip())

    def prose(
        self,
        text: str,
        indent: int,
        lead: str = "",
        *,
        style: str = "",
        lead_style: str = "",
        hang: int | None = None,
        lines: int = MOST_LINES,
    ) -> None:
        """A paragraph of at most `lines` lines: the first is led by `lead`, the others are aligned under its text (or by
        `hang`). Without text, nothing."""
        if not text:
            return
        lead = " " * indent + lead
        rest = " " * (columns(lead) if hang is None else hang)
        first = "\0" * columns(lead)  # holds the place: `wrap` would break or strip the lead itself
        wrapped = textwrap.wrap(
            first + _UNIT.sub("\u00a0", cut_end(clean(text), (lines + 1) * self.width)),
            max(self.width, len(rest) + 20),
            subsequent_indent=rest,
            break_on_hyphens=False,
            max_lines=lines,
            placeholder=" …",
        )
        for i, piece in enumerate(wrapped):
            piece = piece.replace("\u00a0", " ")
            if i:
                self.add(rest + self.paint(piece[len(rest) :], style))
            else:
                self.add(self.paint(lead, lead_style) + self.paint(piece[len(first) :], style))

    def heading(self, title: str, right: str, right_style: str = "") -> None:
        """A line with a title and, at its right end or else below it, what is to be said of it."""
        room = self.width - columns(title) - 4
        if columns(right) > room:
            self.add(f"{self.paint(title, BOLD)} {self.paint('─' * (room + 3), DIM)}")
            self.prose(right, 2, style=right_style)
            return
        rule = "─" * (room + 2 - columns(right))
        self.add(f"{self.paint(title, BOLD)} {self.paint(rule, DIM)} {self.paint(right, right_style)}")

    def text(self) -> str:
        text = "\n".join(self.lines).rstrip() + "\n"
        if self.ascii_only:
            return text.translate(_TO_ASCII).encode("ascii", "backslashreplace").decode()
        return text.encode("utf-8", "backslashreplace").decode()
