"""A Kineto file as bytes: opened by content, decompressed, and cut between events.

The cut needs no parser: inside a JSON string a quote is always escaped, so the bytes `}, {"ph":` can only stand between two
objects of a list. Pieces are a few MB: decoding them is faster than decoding the whole (memory stays in the cache), a fault
spoils one piece and not the file, and nothing but the current piece is in memory.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Generator, Iterator
from contextlib import closing
from json import JSONDecodeError, JSONDecoder
from pathlib import Path

from gpudiag.errors import GpudiagError

# Measured on 900 MB: reading takes 5.7 s with pieces of 4 MB, 4.2 s with 1 MB and with 512 kB (caches, and memory is not handed
# back to the system between pieces).
PIECE = 1 << 20
PACKED = 256 << 10
# Metadata before the events is some kB; 64 MB of it is no trace.
LONGEST_HEADER = 64 << 20
# No event is this long; a list without a recognisable boundary must not grow without end.
LONGEST_EVENT = 256 << 20
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
# Keys an event may begin with: Kineto writes "ph" or "name" first, other programs that copied a trace may sort the keys.
_FIRST_KEYS = (b"ph", b"name", b"cat", b"args", b"pid", b"tid", b"ts", b"dur", b"id", b"bp", b"s")
_LAST_EVENT = re.compile(rb'\}\s*(?=\]\s*(?:,\s*"|\}\s*\Z|\Z))')


class Source:
    """The plain bytes of a file, in blocks of at most PIECE, whether it was gzipped or not.

    done, total: bytes of the file read so far, and its size. cut: why the bytes ended before their end, or None.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done = 0
        self.total = path.stat().st_size
        self.cut: str | None = None

    def __iter__(self) -> Generator[bytes, None, None]:
        with self.path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            blocks = iter(lambda: file.read(PACKED if is_gzip else PIECE), b"")
            yield from self._unzipped(self._counted(blocks)) if is_gzip else self._counted(blocks)

    def _counted(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.done += len(block)
            yield block

    def _unzipped(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """A gzip file may hold several members one after another, and zeros after the last."""
        unzip = zlib.decompressobj(wbits=31)
        for packed in blocks:
            pending = True
            while packed or pending:
                if unzip.eof:
                    if not packed.strip(b"\0"):
                        break
                    unzip = zlib.decompressobj(wbits=31)
                try:
                    block = unzip.decompress(packed, PIECE)
                except zlib.error:
                    self.cut = "the compressed data is damaged"
                    return
                if block:
                    yield block
                packed = unzip.unused_data if unzip.eof else unzip.unconsumed_tail
                pending = len(block) == PIECE
        if not unzip.eof:
            self.cut = "the compressed file ends early"


NO_JSON = -1


def find_events(head: bytearray, block: bytes) -> int:
    """Append a block to the start of a file, and say where its list of events begins (after the bracket); 0: not in it so far.

    NO_JSON: it is neither an object nor a list. A byte order mark and space before them are removed from head.
    """
    before = len(head)
    head += block
    if not head.startswith((b"{", b"[")):
        head[:] = head.removeprefix(b"\xef\xbb\xbf").lstrip()
        if head and not head.startswith((b"{", b"[")):
            return NO_JSON
        before = 0
    if head.startswith(b"["):
        return 1
    found = EVENTS.search(head, max(0, before - 64))
    return found.end() if found else 0


class Pieces:
    """The events of a trace, cut into JSON lists.

    Iterate once; then header and trailer hold the bytes before and after the events (b"" where there were none), `closed`
    says whether the list of events was closed, and `source.cut` why bytes are missing.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.header = b""
        self.trailer = b""
        self.closed = False
        self.boundary = _boundary(_FIRST_KEYS)

    def __iter__(self) -> Generator[bytes, None, None]:
        # Closed at once also when a fault ends the reading early, so that no file stays open.
        with closing(iter(self.source)) as blocks:
            yield from self._cut(blocks)

    def _cut(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        buffer = self._read_header(blocks)
        searched = 0
        for block in blocks:
            end = self._last_boundary(buffer, searched)
            if end:
                yield _list(buffer, end)
                del buffer[: buffer.index(b"{", end)]
            elif len(buffer) > LONGEST_EVENT:
                raise _no_trace(self.source.path, "its events cannot be told apart")
            searched = max(0, len(buffer) - 4096)
            buffer += block
        end = self._last_boundary(buffer, 0)
        if end:
            yield _list(buffer, end)
            del buffer[: buffer.index(b"{", end)]
        rest = bytes(buffer)
        length = _event_length(rest)
        if length:
            yield _list(rest, length)
        self.trailer = rest[length:].lstrip(b", \t\r\n")
        self.closed = self.trailer.startswith(b"]")

    def _read_header(self, blocks: Iterator[bytes]) -> bytearray:
        """Take everything up to the list of events as the header, and return the first bytes of the list."""
        head = bytearray()
        for block in blocks:
            found = find_events(head, block)
            if found == NO_JSON:
                raise _no_trace(self.source.path, "it is not JSON")
            if found > 0:
                self.header = bytes(head[:found]) if head.startswith(b"{") else b""
                del head[:found]
                return self._learn_boundary(head)
            if len(head) > LONGEST_HEADER:
                break
        raise _no_trace(self.source.path, "it has no traceEvents" if head else "it is empty")

    def _learn_boundary(self, events: bytearray) -> bytearray:
        first = re.match(rb'\s*\{\s*"([^"\\]{1,64})"\s*:', events)
        if first and first[1] not in _FIRST_KEYS:
            self.boundary = _boundary((*_FIRST_KEYS, first[1]))
        return events

    def _last_boundary(self, buffer: bytearray, start: int) -> int:
        """Where the last `}` lies that is followed by a new event: the index after it, 0 if there is none."""
        for begin in (max(start, len(buffer) - (16 << 10)), start):
            end = 0
            for found in self.boundary.finditer(buffer, begin):
                end = found.start() + 1
            if end:
                return end
        return 0


def _list(events: bytes | bytearray, end: int) -> bytes:
    with memoryview(events) as view, view[:end] as part:
        return b"".join((b"[", part, b"]"))


def _boundary(keys: tuple[bytes, ...]) -> re.Pattern[bytes]:
    return re.compile(rb'\}\s*,\s*(?=\{\s*"(?:' + b"|".join(map(re.escape, keys)) + rb')"\s*:)')


def _event_length(rest: bytes) -> int:
    """How many bytes of the end of the file belong to the last event; the others are the list's end and what follows."""
    if not rest.lstrip().startswith(b"{"):
        return 0
    start = len(rest) - len(rest.lstrip())
    # Latin-1 keeps one character a byte, so that the index is the same; only the end of the object matters here.
    try:
        return JSONDecoder(strict=False).raw_decode(rest.decode("latin-1"), start)[1]
    except (JSONDecodeError, RecursionError):
        found = _LAST_EVENT.search(rest)
        return found.start() + 1 if found else len(rest)


def _no_trace(path: Path, why: str) -> GpudiagError:
    return GpudiagError(
        f"{path}: not a torch.profiler trace ({why})",
        "give the .json or .json.gz that prof.export_chrome_trace(...) or tensorboard_trace_handler wrote",
    )
