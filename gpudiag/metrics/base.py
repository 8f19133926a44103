"""What a metric is: types only. `gpudiag.metrics.spec` lists all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["ns", "bytes", "bytes/s", "count", "ratio", "flag", "watt", "celsius", "mhz", "flops"]


@dataclass(frozen=True)
class MetricSpec:
    """doc: the formula. is_not: what it does not mean. source: where the definition or the reading comes from.

    unit: `ratio` is a fraction (0-1 unless the doc says otherwise), `flag` 0 or 1, `flops` floating-point operations a second.
    """

    name: str
    unit: Unit
    doc: str
    is_not: str = ""
    source: str = ""


@dataclass(frozen=True)
class TextSpec:
    """A recorded name that a rule's texts can quote (never compare): a kernel, a place in the user's code."""

    name: str
    doc: str


@dataclass(frozen=True)
class Metric:
    """source: the table or record that it was taken from (`gpu_ops`, `loader records`, `nvml`)."""

    name: str
    value: float | int
    unit: str
    source: str


@dataclass(frozen=True)
class Missing:
    """reason: what was not recorded, as a clause. record_with: the command or option that records it, "" where none does.

    applies: False for what this kind of run does not have (a host account beside GPU work, other ranks of a run of one):
    nothing is missing then, and a comparison with it is false.
    """

    name: str
    reason: str
    record_with: str
    applies: bool = True
