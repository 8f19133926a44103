"""What can be saved of a piece that does not decode: profilers write quotes, backslashes, newlines and stray bytes unescaped.

Sources: pytorch issues 33961, 98432, 113001, 130622 (escapes), 113564, 121219 (bytes that are not UTF-8); kineto 336 (nan).
"""

from __future__ import annotations

import json
import re
from collections import Counter

import msgspec

from gpudiag.read._kineto_events import Args, Event, decode

LOST = "events that cannot be read"
RESPELT = "events with broken escapes or numbers"
NOT_UTF8 = "events with bytes that are not UTF-8"

_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_NOT_FINITE = re.compile(rb'("\s*:\s*)[-+]?(?:nan|inf(?:inity)?)(?=\s*[,}\]])', re.IGNORECASE)
_BAD_ESCAPE = re.compile(rb'\\(?:u(?![0-9a-fA-F]{4})|(?!["\\/bfnrtu]))')
_CONTROL = re.compile(rb"[\0-\x1f]+")
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_TEXT_FIELD = re.compile(
    rb'"(ph|cat|name)"\s*:\s*"(.*?)"\s*(?=\}\s*\Z|,\s*"(?:ph|cat|name|pid|tid|ts|dur|args|s|id|bp)"\s*:)', re.DOTALL
)
_NUMBER_FIELD = re.compile(
    rb'"(pid|tid|ts|dur|device|stream|correlation|bytes)"\s*:\s*"?(?:stream )?(-?\d{1,18}(?:\.\d{1,18})?)"?\s*(?=[,}])'
)


def salvage(piece: bytes, boundary: re.Pattern[bytes], repairs: Counter[str]) -> list[Event]:
    """The events of a piece that `decode` refused, in order. Counts into repairs what was respelt and what was lost."""
    plain = _NOT_FINITE.sub(rb"\1null", piece)
    try:
        plain.decode()
    except UnicodeDecodeError:
        plain = plain.decode(errors="replace").encode()
        repairs[NOT_UTF8] += sum("�".encode() in event for event in boundary.split(plain))
    events: list[Event] = []
    _halve(boundary_split(plain, boundary), events, repairs)
    return events


def boundary_split(piece: bytes, boundary: re.Pattern[bytes]) -> list[bytes]:
    """The events of a piece, each as bytes."""
    cuts = [found.start() + 1 for found in boundary.finditer(piece)]
    return [piece[a:b].lstrip(b", \t\r\n") for a, b in zip([0, *cuts], [*cuts, len(piece)], strict=True)]


def _halve(texts: list[bytes], events: list[Event], repairs: Counter[str]) -> None:
    """Decode together what decodes; k faults among n events cost about k log n decodes."""
    try:
        events += decode(b",".join(texts))
    except _FAULTS:
        if len(texts) > 1:
            middle = len(texts) // 2
            _halve(texts[:middle], events, repairs)
            _halve(texts[middle:], events, repairs)
            return
        event = _one(texts[0])
        repairs[RESPELT if event else LOST] += 1
        if event:
            events.append(event)


def _one(text: bytes) -> Event | None:
    try:
        return decode(_CONTROL.sub(b" ", _BAD_ESCAPE.sub(rb"\\\\", text)))[0]
    except (*_FAULTS, IndexError):
        return _by_fields(text)


def _by_fields(text: bytes) -> Event | None:
    """An event read field by field: a name ends where a quote is followed by the next key, whatever quotes it holds."""
    if not text.startswith(b"{"):
        return None
    words: dict[str, str] = {}
    for key, value in _TEXT_FIELD.findall(text):
        words.setdefault(key.decode(), _unescape(value))
    numbers: dict[str, bytes] = {}
    for key, value in _NUMBER_FIELD.findall(text):
        numbers.setdefault(key.decode(), value)
    if not words.get("name") or "ts" not in numbers:
        return None
    whole = {key: int(float(value)) for key, value in numbers.items() if key not in ("ts", "dur")}
    return Event(
        ph=words.get("ph", "X"),
        cat=words.get("cat", ""),
        name=words["name"],
        pid=whole.pop("pid", 0),
        tid=whole.pop("tid", 0),
        ts=msgspec.Raw(numbers["ts"]),
        dur=msgspec.Raw(numbers.get("dur", b"null")),
        args=Args(**whole),
    )


def _unescape(value: bytes) -> str:
    text = value.decode(errors="replace")
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except json.JSONDecodeError:
        return text
