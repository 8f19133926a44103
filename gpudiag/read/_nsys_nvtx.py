"""NVTX_EVENTS of an nsys export: ranges, and the operators that torch's emit_nvtx marked.

Columns differ by version: the name is in `text` or, for registered strings, in StringIds under `textId`; domains are rows
of their own. Event types (ENUM_NSYS_EVENT_TYPE, the same numbers in every export): 59 and 70 push/pop, 60 and 71 start/end, 75 domain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpudiag.read._columns import Array, Column, Job
from gpudiag.read._sqlite import Database
from gpudiag.read._tidy import Strings, assemble, check_times, constant, recode
from gpudiag.read.names import operator
from gpudiag.timeline import CpuOps, Ranges, Repair

_RANGE_TYPES = (59, 60, 70, 71)
_DOMAIN_CREATE = 75
_OP_ID, _SEQUENCE, _SIZES, _INPUTS = b", op_id = ", b", seq = ", b", sizes = ", b", input_op_ids = "


Entry = tuple[str, str | None, bool]


class _Texts:
    """Row by row: text -> code of (name, shapes, is operator). The op_id, which no two rows share, is left out of the key."""

    def __init__(self) -> None:
        self.found: dict[Entry, int] = {}
        self._keys: dict[bytes, int] = {}

    def code(self, text: bytes) -> int:
        head, mark, tail = text.partition(_OP_ID)
        if mark:
            # Bytes, not a regular expression: 1.5 M operators with shapes take 2 s instead of 6 s.
            head = head.partition(_SEQUENCE)[0]
            shapes = tail.partition(_SIZES)[2].partition(_INPUTS)[0]
            key = head + mark + shapes
        else:
            shapes, key = b"", text
        code = self._keys.get(key)
        if code is None:
            name = head.decode("utf-8", "replace")
            if mark:
                entry: Entry = (name, shapes.decode("utf-8", "replace") or None, True)
            else:
                entry = entry_of(name)
            code = self._keys[key] = self.found.setdefault(entry, len(self.found))
        return code


def entry_of(text: str) -> Entry:
    """(name, shapes, is operator) of a whole text."""
    split = operator(text)
    return (*split, True) if split else (text, None, False)


@dataclass(frozen=True)
class NvtxJob:
    """The query of the ranges, and what turns its texts into codes."""

    job: Job
    texts: _Texts
    has_types: bool


def nvtx_job(database: Database) -> NvtxJob | None:
    """What to fetch; None when the file has no NVTX table that could be read."""
    table = database.find("NVTX_EVENTS")
    if table is None or "start" not in database.tables[table]:
        return None
    has_types = "eventType" in database.tables[table]
    texts = _Texts()
    absent = int(np.iinfo(np.int64).min)
    columns = {
        "start": Column(("start",), missing=absent),
        "end": Column(("end",), missing=absent),
        "tid": Column(("globalTid",), missing=0),
        "text_id": Column(("textId",)),
        "domain": Column(("domainId",), missing=0),
        "index": Column(("int64Value", "uint64Value", "int32Value", "uint32Value")),
        "text": Column(("text",), dtype=np.int32, intern=texts.code),
    }
    where = f"eventType IN ({', '.join(map(str, _RANGE_TYPES))})" if has_types else ""
    return NvtxJob(Job(table, columns, where), texts, has_types)


def read_nvtx(
    database: Database, nvtx: NvtxJob, got: dict[str, Array], names: dict[int, str], strings: Strings, last: int | None
) -> tuple[Ranges, CpuOps | None, list[Repair]]:
    """(ranges, operators or None when there are none, repairs). names: StringIds by id; last: end of everything else."""
    start, end = np.asarray(got["start"], np.int64), np.array(got["end"], np.int64)
    total = start.size
    repairs: list[Repair] = []
    open_ = (end == np.iinfo(np.int64).min) & (start != np.iinfo(np.int64).min)
    if open_.any():
        closed = end[~open_]
        sane = closed[np.abs(closed.astype(np.float64)) < 4e18]
        stop = max(
            [*([int(sane.max())] if sane.size else []), *([last] if last is not None else []), int(start[open_].max())]
        )
        end[open_] = np.maximum(stop, start[open_])
        repairs.append(Repair("ranges without an end closed at the end of the recording", int(open_.sum()), total))
    keep, said = check_times("ranges", start, end, None)
    repairs += said
    columns = dict(got) | {"start": start, "end": end}
    if keep is not None:
        columns = {name: column[keep] for name, column in columns.items()}

    # Code -> (name, shapes, operator): texts first, then the registered strings of rows without a text.
    entries = list(nvtx.texts.found)
    empty = nvtx.texts.found.get(("", None, False), -1)
    code = np.array(columns["text"], np.int64)
    registered = (code == empty) & (columns["text_id"] >= 0)
    known: dict[Entry, int] = dict(nvtx.texts.found)
    if registered.any():
        by_id = {}
        for text_id in np.unique(columns["text_id"][registered]).tolist():
            text = names.get(text_id, f"string {text_id} (not recorded)")
            by_id[text_id] = known.setdefault(entry_of(text), len(known))
        entries = list(known)
        code[registered] = recode(columns["text_id"][registered], by_id, np.int64)
    name_codes = np.array([strings.code(entry[0]) for entry in entries], np.int32)
    shape_codes = np.array([-1 if entry[1] is None else strings.code(entry[1]) for entry in entries], np.int32)
    is_operator = np.array([entry[2] for entry in entries], bool)

    tid = np.asarray(columns["tid"], np.int64)
    process, thread = (tid >> 24) & 0xFFFFFF, tid & 0xFFFFFF
    operators = is_operator[code] if code.size else np.empty(0, bool)
    ranges = ~operators
    common = {"start": columns["start"], "end": columns["end"], "process": process, "thread": thread}
    domain = _domains(database, nvtx, process, np.asarray(columns["domain"], np.int64), strings)
    count = int(ranges.sum())
    range_part: dict[str, Array | int | float] = {name: column[ranges] for name, column in common.items()}
    range_part |= {"name": name_codes[code[ranges]] if count else constant(0, 0, np.int32)}
    range_part |= {"domain": domain[ranges], "index": columns["index"][ranges]}
    table = assemble(Ranges, [range_part], [count])
    if not operators.any():
        return table, None, repairs
    op_part: dict[str, Array | int | float] = {name: column[operators] for name, column in common.items()}
    op_part |= {"name": name_codes[code[operators]], "shapes": shape_codes[code[operators]]}
    return table, assemble(CpuOps, [op_part], [int(operators.sum())]), repairs


def _domains(database: Database, nvtx: NvtxJob, process: Array, domain: Array, strings: Strings) -> Array:
    """The code of each row's domain name. Domain ids are given per process; 0 is the default domain."""
    named: dict[tuple[int, int], str] = {}
    if nvtx.has_types:
        have = database.tables[nvtx.job.table]
        tid, number, text = (f'"{c}"' if c in have else "NULL" for c in ("globalTid", "domainId", "text"))
        if "textId" in have and {"id", "value"} <= set(database.tables.get("StringIds", ())):
            text = f"coalesce({text}, (SELECT value FROM StringIds WHERE id = textId))"
        rows = database.rows(
            f'SELECT {tid}, {number}, {text} FROM "{nvtx.job.table}" WHERE eventType = ? LIMIT 100000',
            (_DOMAIN_CREATE,),
        )
        for owner, domain_id, name in rows:
            if isinstance(domain_id, int) and isinstance(name, str):
                named[(owner >> 24) & 0xFFFFFF if isinstance(owner, int) else 0, domain_id] = name
    out = np.full(domain.size, strings.code(""), np.int32)
    for number in np.unique(domain).tolist():
        rows_of = domain == number
        for pid in np.unique(process[rows_of]).tolist():
            fallback = "" if number == 0 else f"domain {number}"
            out[rows_of & (process == pid)] = strings.code(named.get((pid, number), fallback))
    return out
