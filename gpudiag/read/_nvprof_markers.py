"""NVTX markers and devices of an nvprof database, row by row: there are few of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gpudiag.read._columns import Array
from gpudiag.read._sqlite import Database, as_text
from gpudiag.read._tidy import Strings, assemble
from gpudiag.timeline import DeviceInfo, Ranges, Repair

_PREFIX = "CUPTI_ACTIVITY_KIND_"
_MARKER_START, _MARKER_END = 1 << 1, 1 << 2  # cupti_activity.h, CUpti_ActivityFlag
_OBJECT_THREAD = 2  # cupti_activity.h, CUpti_ActivityObjectKind
_MARKERS = 5_000_000


def texts_of(database: Database) -> dict[int, str]:
    """StringTable by id."""
    if not {"_id_", "value"} <= set(database.tables.get("StringTable", ())):
        return {}
    rows = database.rows("SELECT _id_, value FROM StringTable ORDER BY _id_ LIMIT 1000000")
    return {i: as_text(text) for i, text in rows if isinstance(i, int) and text is not None}


def read_ranges(database: Database, strings: Strings) -> tuple[Ranges | None, list[Repair]]:
    """Pairs of markers: a start row and an end row of one id. Instantaneous marks are no ranges."""
    if database.find(_PREFIX + "MARKER") is None:
        return None, []
    names = texts_of(database)
    columns = ("flags", "timestamp", "id", "objectKind", "objectId", "name", "domain", "_id_")
    rows = database.small(_PREFIX + "MARKER", columns, _MARKERS)
    open_: dict[int, tuple[int, int, int, str, str]] = {}
    found: list[tuple[int, int, int, int, str, str]] = []
    last, odd, total = 0, 0, 0
    for flags, at, number, kind, owner, name, domain, _ in sorted(rows, key=_marker_order):
        if not (isinstance(flags, int) and isinstance(at, int) and isinstance(number, int)) or not 0 < at < 4 * 10**18:
            odd += 1
            continue
        last = max(last, at)
        if flags & _MARKER_START:
            total += 1
            pid, thread = _owner(kind, owner)
            open_[number] = (at, pid, thread, _text(names, name), _text(names, domain))
        elif flags & _MARKER_END and number in open_:
            start, pid, thread, text, where = open_.pop(number)
            found.append((start, at, pid, thread, text, where))
    repairs = [Repair("ranges without an end closed at the end of the recording", len(open_), total)] if open_ else []
    if odd:
        repairs.append(Repair("markers left out: no usable time or id", odd, len(rows)))
    found += [(start, last, pid, thread, text, where) for start, pid, thread, text, where in open_.values()]
    numbers = np.array([row[:4] for row in found], np.int64).reshape(-1, 4)
    part: dict[str, Array | int | float] = {"start": numbers[:, 0], "end": numbers[:, 1], "process": numbers[:, 2]}
    part |= {"thread": numbers[:, 3], "index": -1}
    part |= {"name": np.array([strings.code(row[4]) for row in found], np.int32)}
    part |= {"domain": np.array([strings.code(row[5]) for row in found], np.int32)}
    return assemble(Ranges, [part], [len(found)]), repairs


def _marker_order(row: tuple[object, ...]) -> tuple[int, int]:
    return (row[1] if isinstance(row[1], int) else 0, row[7] if isinstance(row[7], int) else 0)


def _owner(kind: object, owner: object) -> tuple[int, int]:
    """(pid, thread) of a CUpti_ActivityObjectKindId: two little-endian 32-bit numbers when the object is a thread."""
    if kind == _OBJECT_THREAD and isinstance(owner, bytes) and len(owner) >= 8:
        return int.from_bytes(owner[:4], "little"), int.from_bytes(owner[4:8], "little")
    return 0, 0


def _text(names: Mapping[int, str], value: object) -> str:
    return value if isinstance(value, str) else names.get(value, "") if isinstance(value, int) else ""


def read_devices(database: Database) -> dict[int, DeviceInfo]:
    """CUPTI_ACTIVITY_KIND_DEVICE; bandwidth is in kB/s and the clock in kHz there."""
    fields = ("id", "name", "numMultiprocessors", "computeCapabilityMajor", "computeCapabilityMinor")
    names = texts_of(database)
    found = {}
    for row in database.small(
        _PREFIX + "DEVICE", (*fields, "globalMemorySize", "globalMemoryBandwidth", "coreClockRate"), 1000
    ):
        number, name, count, major, minor, memory, bandwidth, clock = (
            v if isinstance(v, int | str) else None for v in row
        )
        if not isinstance(number, int):
            continue
        info = DeviceInfo(name=_text(names, name)[:100])
        if isinstance(count, int) and 0 < count < 10**6:
            info = replace(info, sm_count=count)
        if isinstance(major, int) and isinstance(minor, int):
            info = replace(info, compute_capability=(major, minor))
        if isinstance(memory, int) and 0 < memory < 2**60:
            info = replace(info, memory_bytes=memory)
        if isinstance(bandwidth, int) and 0 < bandwidth < 2**40:
            info = replace(info, memory_bandwidth=bandwidth * 1000)
        if isinstance(clock, int) and 0 < clock < 2**40:
            info = replace(info, clock_hz=clock * 1000)
        found[number] = info
    return found
