"""Real traces damaged at random, from fixed seeds: whatever the damage, a Timeline or a GpudiagError."""

from __future__ import annotations

import gzip
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

from gpudiag.errors import GpudiagError
from gpudiag.read.kineto import read_kineto, sniff_json

Damage = Callable[[bytearray, random.Random], bytes]


def _cut(data: bytearray, dice: random.Random) -> bytes:
    return bytes(data[: dice.randrange(len(data))])


def _flip(data: bytearray, dice: random.Random) -> bytes:
    for _ in range(dice.choice((1, 5, 100))):
        data[dice.randrange(len(data))] = dice.randrange(256)
    return bytes(data)


def _drop(data: bytearray, dice: random.Random) -> bytes:
    start = dice.randrange(len(data))
    del data[start : start + dice.choice((1, 10, 5000))]
    return bytes(data)


def _double(data: bytearray, dice: random.Random) -> bytes:
    start, length, to = dice.randrange(len(data)), dice.choice((3, 300, 30_000)), dice.randrange(len(data))
    data[to:to] = data[start : start + length]
    return bytes(data)


def _values(data: bytearray, dice: random.Random) -> bytes:
    odd = (
        b"null",
        b"NaN",
        b"-1",
        b"1e400",
        b'"x"',
        b"[]",
        b"{}",
        b"[{}]",
        b"true",
        b"9" * 40,
        b'"a\nb"',
        b"-0.0000001",
        b"",
    )
    values = list(re.finditer(rb':\s*("(?:[^"\\]|\\.)*"|-?[\d.]+)', data))
    for found in sorted(dice.sample(values, min(len(values), dice.choice((1, 3, 30)))), key=lambda f: -f.start(1)):
        data[found.start(1) : found.end(1)] = dice.choice(odd)
    return bytes(data)


def _swap(data: bytearray, dice: random.Random) -> bytes:
    keys = list({found[0] for found in re.finditer(rb'"[A-Za-z ]+"(?=\s*:)', data)})
    return bytes(data).replace(dice.choice(keys), dice.choice(keys), dice.choice((1, 50, -1)))


def test_damaged_recordings_give_a_timeline_or_a_clear_error_and_nothing_else(traces: Path, tmp_path: Path) -> None:
    """GPUDIAG_FUZZ=N sets the number of cases."""
    sources = [
        gzip.decompress((traces / "kineto" / f"{name}.json.gz").read_bytes())
        for name in ("mi250_minitoy", "a100_event_sync", "gp100_gpu_user_annotation")
    ]
    damages: tuple[Damage, ...] = (_cut, _flip, _drop, _double, _values, _swap)
    path = tmp_path / "t.json"
    read = 0
    for case in range(int(os.environ.get("GPUDIAG_FUZZ", "400"))):
        dice = random.Random(case)
        data = bytes(dice.choice(sources))
        for _ in range(dice.choice((1, 1, 2))):
            data = dice.choice(damages)(bytearray(data), dice) or b" "
        if dice.random() < 0.3:
            data = gzip.compress(data, 1)
            if dice.random() < 0.5:
                data = dice.choice((_cut, _flip, _drop))(bytearray(data), dice)
        path.write_bytes(data)
        try:
            timeline = read_kineto(path)
            sniff_json(path)
        except GpudiagError as error:
            assert error.hint, case
            continue
        except Exception as error:
            error.add_note(f"case {case}")
            raise
        read += 1
        for table in (timeline.gpu_ops, timeline.api_calls, timeline.ranges, timeline.cpu_ops):
            if table is not None and len(table):
                assert (table.end >= table.start).all() and (table.start[1:] >= table.start[:-1]).all(), case
                assert int(table.name.min()) >= 0 and int(table.name.max()) < len(timeline.strings), case
    assert read
