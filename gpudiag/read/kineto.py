"""Traces of torch.profiler (Kineto JSON, plain or gzipped), from early 2021 on, to a Timeline.

Streams: the file is cut between events (`_kineto_bytes`), each piece decoded (`_kineto_events`; `_kineto_salvage` where it is
broken) and appended to columns (`_kineto_columns`), which `_kineto_tables` puts together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gpudiag.errors import GpudiagError
from gpudiag.read._kineto_bytes import LONGEST_HEADER, NO_JSON, Pieces, Source, find_events
from gpudiag.read._kineto_columns import Columns
from gpudiag.read._kineto_events import decode
from gpudiag.read._kineto_meta import notes, read_meta
from gpudiag.read._kineto_salvage import FAULTS, salvage
from gpudiag.read._kineto_tables import build
from gpudiag.timeline import Timeline

Progress = Callable[[str], None]

_DIAGNOSIS = re.compile(rb'"schema"\s*:\s*"gpudiag\.diagnosis/')
_EVENT = re.compile(rb'\[\s*\{.{0,65536}?"ph"\s*:\s*"', re.DOTALL)
_CALL_STACK = re.compile(rb'"Call stack"\s*:\s*"[^"]')


def sniff_json(path: Path) -> Literal["kineto", "diagnosis", "other"]:
    """What a JSON file is, plain or gzipped, by its content: a trace with traceEvents or a bare list of them, a diagnosis, or
    neither (other JSON, no JSON, empty). Reads a few MB at most unless the file has more than that before its events.

    Raises OSError.
    """
    head = bytearray()
    with closing(iter(Source(path))) as blocks:
        for block in blocks:
            before = len(head)
            events = find_events(head, block)
            if events == NO_JSON:
                return "other"
            if head.startswith(b"["):
                return "kineto" if _EVENT.match(head) else "other"
            diagnosis = _DIAGNOSIS.search(head, max(0, before - 64), events or len(head))
            if diagnosis or events:
                return "diagnosis" if diagnosis else "kineto"
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
        told = -1
        for piece in pieces:
            if told < 0:
                columns.call_stacks = _CALL_STACK.search(piece) is not None
            try:
                events: Iterable[object] = decode(piece)
            except FAULTS:
                events = salvage(piece, pieces.boundary, columns.repairs)
            columns.add(events)
            percent = 100 * pieces.source.done // max(pieces.source.total, 1)
            if progress and percent > told:
                progress(f"reading {path.name}: {percent} %")
            told = max(told, percent)
    except OSError as error:
        raise GpudiagError(
            f"cannot read {path}: {error.strerror or error}", "check the path and its permissions"
        ) from error
    meta, whole = read_meta(pieces.header, pieces.trailer)
    timeline = build(path, columns, meta, notes(pieces.header + pieces.trailer), _damage(whole))
    return replace(timeline, incomplete=_cut(pieces))


def _damage(whole_meta: bool) -> list[str]:
    return [] if whole_meta else ["the description of the recording is damaged; devices or ranks may be missing"]


def _cut(pieces: Pieces) -> str:
    if pieces.source.cut:
        return f"the file is incomplete: {pieces.source.cut}"
    return "" if pieces.closed else "the file is incomplete: its list of events does not end"
