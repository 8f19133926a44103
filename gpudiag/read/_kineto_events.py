"""The parts of a Kineto event that are read, and the decoder for them. Everything else in the file is skipped unparsed."""

from __future__ import annotations

from typing import Annotated

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


class Event(msgspec.Struct, gc=False):
    """One element of traceEvents. Times stay as bytes: `exact_ns` converts them in bulk and without loss."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: _Int | str = 0
    tid: _Int | str = 0
    ts: msgspec.Raw = _NOTHING
    dur: msgspec.Raw = _NOTHING
    args: Args | None = None


NO_ARGS = Args()
_DECODER = msgspec.json.Decoder(list[Event])


def decode(piece: bytes) -> list[Event]:
    """The events of a JSON list without its brackets. Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError."""
    return _DECODER.decode(b"[" + piece + b"]")
