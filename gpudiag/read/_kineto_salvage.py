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

FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_REPLACED = "\N{REPLACEMENT CHARACTER}".encode()
_NOT_FINITE = re.compile(rb'("\s*:\s*)[-+]?(?:nan|inf(?:inity)?)(?=\s*[,}\]])', re.IGNORECASE)
_ESCAPE = re.compile(rb'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')
_JSON = json.JSONDecoder(strict=False)
_LONGEST = 1 << 20  # more than this is no single event
_CONTROL = re.compile(rb"[\0-\x1f]+")
_TEXT_FIELD = re.compile(
    rb'"(ph|cat|name)"\s*:\s*"(.*?)"\s*(?=\}\s*\Z|,\s*"(?:ph|cat|name|pid|tid|ts|dur|args|s|id|bp)"\s*:)', re.DOTALL
)
_NUMBER_FIELD = re.compile(
    rb'"(pid|tid|ts|dur|device|stream|correlation|bytes)"\s*:\s*"?(?:stream )?(-?(?:0|[1-9]\d{0,17})(?:\.\d{1,18})?)"?\s*(?=[,}])'
)


def salvage(piece: bytes, boundary: re.Pattern[bytes], repairs: Counter[str]) -> list[object]:
    """The events of a piece that `decode` refused, in order. Counts into repairs what was respelt and what was lost."""
    text = _NOT_FINITE.sub(rb"\1null", piece[1:-1])
    try:
        text.decode()
    except UnicodeDecodeError:
        text = text.decode(errors="replace").encode()
        repairs[NOT_UTF8] += sum(_REPLACED in event for event in boundary.split(text))
    cuts = [found.start() + 1 for found in boundary.finditer(text)]
    texts = [text[a:b].strip(b", \t\r\n") for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    events: list[object] = []
    _halve(texts, events, repairs)
    return events


def _halve(texts: list[bytes], events: list[object], repairs: Counter[str]) -> None:
    """Decode together what decodes; k faults among n events cost about k log n decodes."""
    try:
        events += decode(b"[" + b",".join(texts) + b"]")
    except FAULTS:
        if len(texts) > 1:
            middle = len(texts) // 2
            _halve(texts[:middle], events, repairs)
            _halve(texts[middle:], events, repairs)
            return
        _one(texts[0], events, repairs)


def _one(text: bytes, events: list[object], repairs: Counter[str]) -> None:
    """What stands between two boundaries: an event, or an event and things that do not belong in the list."""
    text = _CONTROL.sub(b" ", _ESCAPE.sub(_escape, text))
    characters = text.decode("latin-1")  # one a byte, so that an index into one is an index into the other
    at = 0
    while at < len(text):
        try:
            end = _JSON.raw_decode(characters, at)[1]
        except (json.JSONDecodeError, RecursionError):
            end = len(text)
        try:
            found = decode(b"[" + text[at:end] + b"]")
        except FAULTS:
            found = _by_fields(text[at:end])
        repairs[RESPELT if found else LOST] += 1
        events += found
        while text[end : end + 1] in (b",", b" "):
            end += 1
        at = end


def _escape(found: re.Match[bytes]) -> bytes:
    return found[0] if found[1] else rb"\\"


def _by_fields(text: bytes) -> list[object]:
    """An event read field by field: a name ends where a quote is followed by the next key, whatever quotes it holds."""
    if len(text) > _LONGEST:
        return []
    words: dict[bytes, bytes] = {}
    for key, value in _TEXT_FIELD.findall(text):
        words.setdefault(key, value)
    numbers: dict[bytes, bytes] = {}
    for key, value in _NUMBER_FIELD.findall(text):
        numbers.setdefault(key, value)
    if words.get(b"ph") != b"X" or not {b"ts", b"dur"} <= numbers.keys():
        return []
    whole = {key: int(value.partition(b".")[0]) for key, value in numbers.items()}
    return [
        Event(
            cat=_unescape(words.get(b"cat", b"")),
            name=_unescape(words.get(b"name", b"")),
            pid=whole.get(b"pid", 0),
            tid=whole.get(b"tid", 0),
            ts=msgspec.Raw(numbers[b"ts"]),
            dur=msgspec.Raw(numbers[b"dur"]),
            args=Args(
                device=whole.get(b"device", -1),
                stream=whole.get(b"stream", -1),
                correlation=whole.get(b"correlation", -1),
                bytes=whole.get(b"bytes", -1),
            ),
        )
    ]


def _unescape(value: bytes) -> str:
    text = value.decode(errors="replace")
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except json.JSONDecodeError:
        return text
