"""Copies of JSON files that can be shown to a stranger: our own records, and Kineto traces of any size."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from gpudiag.collect.privacy import MASK, Scrubber, is_secret_name

_BLOCK = 4 << 20  # characters
# Top-level keys of Kineto files and of the harnesses around them that name people, machines and jobs (SCHEMAS 2).
_PRIVATE_KEYS = (
    r"host_?name|user_?name|user|started_by|tw_\w*|mast_\w*|fb_\w*|cmd_?line|command_?line|cwd|working_dir|job_id|job_name"
    r"|environ\w*|ip_?addr\w*"
)
_PRIVATE = re.compile(rf'("(?:{_PRIVATE_KEYS})"\s*:\s*)("(?:[^"\\]|\\.)*"|-?[\d.eE+-]+)', re.IGNORECASE)
_NAME_OF = re.compile(r'"(host_?name|user_?name)"\s*:\s*"((?:[^"\\]|\\.)+)"', re.IGNORECASE)


def scrub_value(value: Any, scrub: Scrubber) -> Any:
    """A decoded JSON value with every text scrubbed, and the values under secret names masked."""
    if isinstance(value, str):
        return scrub.text(value)
    if isinstance(value, list):
        return [scrub_value(item, scrub) for item in value]
    if isinstance(value, dict):
        return {
            scrub.trace(key): MASK if isinstance(item, str) and is_secret_name(key) else scrub_value(item, scrub)
            for key, item in value.items()
        }
    return value


def scrub_records(source: Path, target: Path, scrub: Scrubber) -> None:
    """Our own .json and .jsonl. A line that is no JSON (cut short by a kill) is left out. Raises OSError."""
    text = source.read_text(encoding="utf-8", errors="replace")
    if source.suffix == ".json":
        try:
            whole = json.dumps(scrub_value(json.loads(text), scrub), indent=2, ensure_ascii=False) + "\n"
        except json.JSONDecodeError:
            whole = ""
        target.write_text(whole, encoding="utf-8")
        return
    with target.open("w", encoding="utf-8") as out:
        for line in text.splitlines():
            try:
                value = scrub_value(json.loads(line), scrub)
            except json.JSONDecodeError:
                continue
            out.write(json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n")


def scrub_trace(source: Path, target: Path, scrub: Scrubber) -> None:
    """A Kineto trace, plain or gzipped, as text: names of people and machines go, the events stay byte for byte.

    Works block by block, so a trace may be larger than memory. Raises OSError (a damaged .gz too).
    """
    names = [scrub, *_named_in(source)]
    with _opened(source) as reading, _created(target) as writing:
        for block in _blocks(reading):
            block = _PRIVATE.sub(rf'\1"{MASK}"', block)
            for each in names:
                block = each.trace(block)
            writing.write(block)


def _named_in(source: Path) -> list[Scrubber]:
    """Scrubbers for the host and user that the trace itself names: they come back in paths and file names."""
    found = []
    with _opened(source) as reading:
        for block in _blocks(reading):
            for key, value in _NAME_OF.findall(block):
                name = json.loads(f'"{value}"', strict=False)
                host = key.lower().startswith("host")
                found.append(Scrubber("", "" if host else name, name if host else ""))
    return found


def _opened(path: Path) -> IO[str]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    raw: Any = gzip.GzipFile(path, "rb") if packed else path.open("rb")
    return TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape", newline="")


@contextmanager
def _created(path: Path) -> Iterator[IO[str]]:
    with ExitStack() as stack:
        raw: Any = stack.enter_context(path.open("wb"))
        if path.suffix == ".gz":
            # no time and no name in the header: the same trace gives the same bytes
            raw = stack.enter_context(gzip.GzipFile("", "wb", 6, raw, mtime=0))
        yield stack.enter_context(TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape", newline=""))


def _blocks(file: IO[str]) -> Iterator[str]:
    """The text in pieces that end between events, so that no name is cut in two."""
    rest = ""
    while read := file.read(_BLOCK):
        text = rest + read
        cut = max(text.rfind("\n"), text.rfind("},"))
        yield text[: cut + 1]
        rest = text[cut + 1 :]
    yield rest
