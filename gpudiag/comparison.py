"""The result of comparing two sides: plain data, no work. `to_json`/`from_json` are the contract `gpudiag.comparison/1`."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpudiag.diagnosis import BoundBy

SCHEMA = "gpudiag.comparison/1"

Outcome = Literal["faster", "slower", "no_change", "not_settled", "cannot_judge"]
FindingStatus = Literal["gone", "new", "unchanged", "unknown"]
GateResult = Literal["pass", "fail", "cannot_judge"]


class SideInfo(msgspec.Struct, frozen=True):
    """One side. Times in ns; None = there is none.

    scope: `steps`, or `span` when no step is known and the whole recording is the one sample.
    rounds: how many recordings of this side; round_ns: the median step of each; spread: (max - min) / median of these, None
    with one round. shown: which round (from 0) account and findings are taken from: the one nearest to the median.
    sample_ns: what the interval was drawn from: the steps, or round_ns; at most 2,000 are kept.
    median_ns: the median of round_ns. p99_ns, mean_ns, steps: of the shown round. batch_size: of its DataLoader, if recorded.
    """

    paths: tuple[str, ...]
    recorder: str
    scope: Literal["steps", "span"]
    status: str
    bound_by: BoundBy
    headline: str
    rounds: int
    shown: int
    round_ns: tuple[int, ...]
    spread: float | None
    steps: int
    median_ns: int | None
    p99_ns: int | None
    mean_ns: int | None
    gpus: tuple[str, ...]
    ranks: int
    kernels: int
    kernels_per_step: float | None = None
    batch_size: int | None = None
    sample_ns: tuple[int, ...] = ()


class Difference(msgspec.Struct, frozen=True):
    """What makes the two sides different work. blocks: their times say nothing about each other."""

    what: str
    before: str
    after: str
    blocks: bool = False


class StepChange(msgspec.Struct, frozen=True):
    """change: after over before minus 1, of the medians; low, high: its bootstrap interval at `confidence`, with rounds the range
    between their extremes; None when the sample is too small. mean_*: the same of the mean step, which a few slow steps move and the median does not.
    sample: what was resampled. settled: whether the noise allows a judgement at all."""

    change: float | None
    low: float | None
    high: float | None
    sample: Literal["rounds", "steps", "none"]
    settled: bool
    mean_change: float | None = None
    mean_low: float | None = None
    mean_high: float | None = None
    confidence: float = 0.95


class PartChange(msgspec.Struct, frozen=True):
    """One part of the account: ns a step and device (or of the span), and after minus before."""

    part: str
    before_ns: int
    after_ns: int
    change_ns: int


class FindingChange(msgspec.Struct, frozen=True):
    """status unknown: found on one side, not judged on the other (`elsewhere` is the outcome there).

    predicted_ns: for one that is gone and stood for itself, what it promised: its estimate, else its bound.
    """

    rule: str
    title: str
    status: FindingStatus
    elsewhere: str
    before_bound_ns: int | None
    after_bound_ns: int | None
    predicted_ns: int | None = None
    predicted_by: str = ""
    caused_by: str = ""


class Gain(msgspec.Struct, frozen=True):
    """Of the mean step (which bounds refer to). predicted_ns: what the findings that are gone promised, None when none is."""

    predicted_ns: int | None
    measured_ns: int | None


class MetricChange(msgspec.Struct, frozen=True):
    name: str
    unit: str
    before: float
    after: float


class Gate(msgspec.Struct, frozen=True):
    """percent: how much slower is still fine. exit_code: 0, 3 or 4 (DESIGN 7)."""

    percent: float
    result: GateResult
    exit_code: int
    reason: str


class Comparison(msgspec.Struct, frozen=True):
    """What `gpudiag compare --json` prints. blockers: why the sides cannot be compared; notes: what to keep in mind."""

    schema: str
    gpudiag: str
    outcome: Outcome
    headline: str
    before: SideInfo
    after: SideInfo
    same_work: Literal["same", "differs", "unknown"]
    differences: tuple[Difference, ...]
    step: StepChange
    account: tuple[PartChange, ...]
    findings: tuple[FindingChange, ...]
    gain: Gain
    metrics: tuple[MetricChange, ...]
    blockers: tuple[str, ...]
    notes: tuple[str, ...]
    gate: Gate | None = None


def to_json(comparison: Comparison) -> bytes:
    """UTF-8 JSON, indented by 2, ending in a newline; what is no UTF-8 in a name is spelled out, as in a diagnosis."""
    try:
        data = msgspec.json.encode(comparison)
    except UnicodeEncodeError:
        from gpudiag.diagnosis import spelled

        data = msgspec.json.encode(spelled(msgspec.to_builtins(comparison)))
    return msgspec.json.format(data, indent=2) + b"\n"


def from_json(data: bytes) -> Comparison:
    """Raises msgspec.ValidationError or msgspec.DecodeError when it is no comparison of this schema."""
    return msgspec.json.decode(data, type=Comparison)
