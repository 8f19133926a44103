"""The table of GPUs (gpus.csv): dense vendor figures with their source. Unknown stays unknown."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path

import msgspec

from gpudiag.errors import GpudiagError

FILE = "gpus.csv"
NONE = "-"  # in a peak's column: the hardware has no such unit


class GpuSpec(msgspec.Struct, frozen=True):
    """One row; units as the file's head says. A peak is None when unknown or absent; `absent` names the units it does not have."""

    name: str
    driver: tuple[str, ...]
    architecture: str
    segment: str
    cc: str
    year: int
    cores: int | None
    boost: float | None
    fp32: float | None
    tf32: float | None
    fp16_vector: float | None
    fp16: float | None
    bf16: float | None
    fp8: float | None
    memory: float | None
    memory_type: str
    bus: int | None
    gbps: float | None
    bandwidth: float | None
    tdp: float | None
    pcie: str
    nvlink: float | None
    source: str
    absent: tuple[str, ...] = ()


PEAKS = ("fp32", "tf32", "fp16_vector", "fp16", "bf16", "fp8")
NUMBERS = ("boost", *PEAKS, "memory", "gbps", "bandwidth", "tdp", "nvlink")
COUNTS = ("cores", "bus", "year")


@cache
def load_gpus() -> tuple[GpuSpec, ...]:
    """The packaged table, in the file's order (architecture, then size)."""
    return parse_gpus(resources.files("gpudiag.bench").joinpath(FILE).read_text(encoding="utf-8"), FILE)


def read_gpus(path: Path) -> tuple[GpuSpec, ...]:
    """A user's file of the same columns. Raises GpudiagError."""
    try:
        return parse_gpus(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise GpudiagError(f"{path}: {error.strerror}", f"see the packaged {FILE} for the columns") from error


def parse_gpus(text: str, where: str) -> tuple[GpuSpec, ...]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    specs: list[GpuSpec] = []
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            specs.append(_spec(row))
        except (KeyError, TypeError, ValueError) as error:
            raise GpudiagError(
                f"{where}: row {number} ({row.get('name')}): {error}", "compare with its header line"
            ) from error
    return tuple(specs)


def _spec(row: dict[str, str]) -> GpuSpec:
    values: dict[str, object] = {
        key: row[key] for key in ("name", "architecture", "segment", "cc", "memory_type", "pcie", "source")
    }
    if not row["source"]:
        raise ValueError("no source")
    values["driver"] = tuple(row["driver"].split("|"))
    values["absent"] = tuple(key for key in PEAKS if row[key] == NONE)
    values.update({key: float(row[key]) if row[key] not in ("", NONE) else None for key in NUMBERS})
    values.update({key: int(row[key]) if row[key] else None for key in COUNTS})
    return msgspec.convert(values, GpuSpec, strict=False)


def normalise(name: str) -> str:
    """Letters and digits, lower case, without a leading vendor's name: `NVIDIA GeForce RTX 4090` and `rtx4090` compare alike."""
    plain = re.sub(r"[^a-z0-9]+", "", name.lower())
    plain = plain.removeprefix("nvidia")
    for family in ("geforce", "tesla"):
        plain = plain.removeprefix(family)
    return plain


def find_gpu(name: str, specs: Iterable[GpuSpec]) -> GpuSpec | None:
    """By the driver's or the table's exact name. An A10G is no A10, a laptop GPU not its desktop namesake: those are unknown."""
    wanted = normalise(name)
    for spec in specs:
        if wanted == normalise(spec.name) or wanted in [normalise(driver) for driver in spec.driver]:
            return spec
    return None


def select_gpus(query: str, specs: Iterable[GpuSpec]) -> list[GpuSpec]:
    """What a user means by a name: the exact one, else every GPU whose name contains all its words (`v100`, `a100 80gb`).

    Raises GpudiagError when nothing matches: an unknown GPU is not guessed.
    """
    known = list(specs)
    exact = find_gpu(query, known)
    if exact is not None:
        return [exact]
    words = [normalise(word) for word in query.split()]
    found = [
        spec for spec in known if all(any(word == normalise(part) for part in _words(spec.name)) for word in words)
    ]
    if not found:
        raise GpudiagError(
            f"{query!r} is not in the GPU table", "see `gpudiag gpus list`; add your own rows with --table FILE"
        )
    return found


def _words(name: str) -> list[str]:
    """The words of a name, and neighbours written together: `RTX 4090` answers to `rtx4090`."""
    words = name.replace("(", " ").replace(")", " ").split()
    return words + [a + b for a, b in pairwise(words)]
