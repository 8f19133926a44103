"""Traces of torch.profiler (Kineto JSON, plain or gzipped), from early 2021 on, to a Timeline.

Streams: the file is cut between events (`_kineto_bytes`), each piece decoded (`_kineto_events`; `_kineto_salvage` where it is
broken) and appended to columns (`_kineto_columns`), which `_kineto_tables` puts together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from gpudiag.errors import GpudiagError
from gpudiag.read._kineto_bytes import EVENTS, LONGEST_HEADER, Pieces, Source
from gpudiag.read._kineto_columns import Columns
from gpudiag.read._kineto_events import decode
from gpudiag.read._kineto_meta import notes, read_meta
from gpudiag.read._kineto_salvage import salvage
from gpudiag.read._kineto_tables import build
from gpudiag.timeline import Timeline

Progress = Callable[[str], None]

_DIAGNOSIS = re.compile(rb'"schema"\s*:\s*"gpudiag\.diagnosis/')
_EVENT = re.compile(rb'\[\s*\{[^{}]{0,4096}"ph"\s*:\s*"')


def sniff_json(path: Path) -> Literal["kineto", "diagnosis", "other"]:
    """What a JSON file is, plain or gzipped, by its content: a trace with traceEvents or a bare list of them, a diagnosis, or
    neither (other JSON, no JSON, empty). Reads a few MB at most unless the file has more than that before its events.

    Raises OSError.
    """
    head = b""
    for block in Source(path).blocks():
        head = (head + block).removeprefix(b"\xef\xbb\xbf").lstrip()
        if head.startswith(b"["):
            return "kineto" if _EVENT.match(head) else "other"
        if head and not head.startswith(b"{"):
            return "other"
        events, diagnosis = EVENTS.search(head), _DIAGNOSIS.search(head)
        if events and (not diagnosis or events.start() < diagnosis.start()):
            return "kineto"
        if diagnosis:
            return "diagnosis"
        if len(head) > LONGEST_HEADER:
            break
    return "other"


def read_kineto(path: Path, progress: Progress | None = None) -> Timeline:
    """One trace as a Timeline. progress is told in words how far the reading is.

    What is damaged is left out and counted in `repairs`. Raises GpudiagError for a file that cannot be read, is no trace, or
    holds no event of torch.profiler.
    """
    try:
        pieces = Pieces(Source(path))
        columns = Columns()
        for piece in pieces:
            try:
                events = decode(piece)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                events = salvage(piece, pieces.boundary, columns.repairs)
            columns.add(events)
            if progress:
                progress(f"reading {path.name}: {100 * pieces.source.done // max(pieces.source.total, 1)} %")
    except OSError as error:
        raise GpudiagError(
            f"cannot read {path}: {error.strerror or error}", "check the path and its permissions"
        ) from error
    meta, whole = read_meta(pieces.header, pieces.trailer)
    return build(path, columns, meta, notes(pieces.header + pieces.trailer), _damage(pieces, whole))


def _damage(pieces: Pieces, whole_meta: bool) -> list[str]:
    said = []
    if pieces.source.cut:
        said.append(f"the file is incomplete: {pieces.source.cut}; what could be read is judged")
    elif not pieces.closed:
        said.append("the file is incomplete: its list of events does not end; what could be read is judged")
    if not whole_meta:
        said.append("the description of the recording is damaged; devices or ranks may be missing")
    return said
