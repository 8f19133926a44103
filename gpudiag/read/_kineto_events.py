"""The parts of a Kineto event that are read, and the decoder for them. Everything else in the file is skipped unparsed."""

from __future__ import annotations

import functools
import operator
from types import GenericAlias
from typing import Annotated, Any

import msgspec

_Int = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
_NOTHING = msgspec.Raw(b"null")


class Args(msgspec.Struct, gc=False):
    """args of a GPU row, a runtime call or an operator; -1, None and null = not there. ROCm's calls have text for stream and bytes."""

    device: _Int = -1
    stream: _Int | str = -1
    correlation: _Int = -1
    bytes: _Int | str = -1
    registers: _Int = msgspec.field(default=-1, name="registers per thread")
    shared: _Int = msgspec.field(default=-1, name="shared memory")
    grid: tuple[_Int, _Int, _Int] | None = None
    block: tuple[_Int, _Int, _Int] | None = None
    occupancy: float = msgspec.field(default=float("nan"), name="est. achieved occupancy %")
    graph: _Int = msgspec.field(default=0, name="graph id")
    dims: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input Dims")
    dims_2021: msgspec.Raw = msgspec.field(default=_NOTHING, name="Input dims")


class Event(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A row with a start and a length. Times stay as bytes: `exact_ns` converts them in bulk and without loss."""

    cat: str = ""
    name: str = ""
    pid: _Int | str = 0
    tid: _Int | str = 0
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING
    args: Args | None = None


class MemoryArgs(msgspec.Struct, gc=False):
    """args of `[memory]` (profile_memory=True): the allocator's totals after the event, bytes; device type 0 is the CPU."""

    device: _Int = msgspec.field(default=-1, name="Device Id")
    kind: _Int = msgspec.field(default=0, name="Device Type")
    allocated: _Int = msgspec.field(default=-1, name="Total Allocated")
    reserved: _Int = msgspec.field(default=-1, name="Total Reserved")


class Instant(msgspec.Struct, gc=False, tag_field="ph", tag="i"):
    """A moment: `Record Window End`, `[memory]`."""

    name: str = ""
    ts: msgspec.Raw = _NOTHING
    args: MemoryArgs | None = None


# Flows, metadata, counters and the other phases of the Chrome trace format: a third of a trace, and nothing in them is used.
_SKIPPED = tuple(
    msgspec.defstruct(f"Skipped_{phase}", [], gc=False, tag_field="ph", tag=phase)
    for phase in "sftMCBEIbneNODPRSTFpvVca()"
)

NO_ARGS = Args()
_ELEMENT: Any = functools.reduce(operator.or_, (Event, Instant, *_SKIPPED))
_DECODER: msgspec.json.Decoder[list[object]] = msgspec.json.Decoder(GenericAlias(list, (_ELEMENT,)))


def decode(piece: bytes) -> list[object]:
    """The elements of a JSON list of events. Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError."""
    return _DECODER.decode(piece)
