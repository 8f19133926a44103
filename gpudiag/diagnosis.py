"""The result: plain data, no work. `to_json`/`from_json` are the contract `gpudiag.diagnosis/1` (DESIGN 6)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

SCHEMA = "gpudiag.diagnosis/1"
NO_GPU_WORK = "no GPU work was recorded"  # why rules about GPU work are not judged; reports fold them by this reason

StepName = Literal["overall", "transfer", "compute", "scheduling", "environment"]
Severity = Literal["info", "warning", "critical"]
Relation = Literal["", "effect", "after"]
BoundBy = Literal["input", "transfer", "compute", "launch", "sync", "communication", "memory", "power", "host", "none"]
STEP_ORDER: tuple[StepName, ...] = ("overall", "transfer", "compute", "scheduling", "environment")
SEVERITY_ORDER: tuple[Severity, ...] = ("critical", "warning", "info")


class SourceInfo(msgspec.Struct, frozen=True):
    """kind: nsys-sqlite | kineto | nvprof | bundle; recorder e.g. `nsys 2023.4.4`.

    incomplete: why an unknown part of the recording is missing (a file cut short), "" when it is whole.
    """

    kind: str
    path: str
    recorder: str
    incomplete: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """headline: one sentence with numbers. margin: said when the two largest owners are close, else empty."""

    status: Literal["bottleneck", "healthy", "cannot_judge"]
    bound_by: BoundBy
    headline: str
    margin: str = ""


class StepsInfo(msgspec.Struct, frozen=True):
    """count: steady steps; times of the steady steps in ns (None without steps)."""

    count: int
    median_ns: int | None
    p99_ns: int | None
    source: str
    warm_up: int
    confidence: float = 1.0
    durations_ns: tuple[int, ...] = ()


class AccountInfo(msgspec.Struct, frozen=True):
    """parts sum to total_ns exactly. device -1 is the host account of a run without GPU work.

    per_step: one dict of parts a steady step, in order (empty for scope "span").
    """

    rank: int
    device: int
    scope: Literal["steps", "span"]
    window_ns: tuple[int, int]
    total_ns: int
    parts: dict[str, int]
    steps: int = 0
    per_step: tuple[dict[str, int], ...] = ()


class DeviceFigures(msgspec.Struct, frozen=True):
    """Whole-file figures of one device; definitions as traces/REFERENCE.tsv. All *_ns are ns, the rest counts."""

    rank: int
    device: int
    name: str
    span_ns: int
    busy_ns: int
    idle_ns: int
    compute_union_ns: int
    comm_union_ns: int
    comm_exposed_ns: int
    copy_union_ns: int
    copy_exposed_ns: int
    memset_exposed_ns: int
    kernels: int
    comm_kernels: int
    copies: int
    gaps_over_1ms: int


class MetricValue(msgspec.Struct, frozen=True, omit_defaults=True):
    """A measured value with its unit, or why it is missing and how to record it."""

    value: float | int | None = None
    unit: str = ""
    missing: str = ""
    record_with: str = ""


class Evidence(msgspec.Struct, frozen=True):
    """One fact: a label, the value as text with its unit, and where it lies in time (ns) if it does."""

    label: str
    value: str
    start_ns: int | None = None
    end_ns: int | None = None


class Fix(msgspec.Struct, frozen=True):
    """change: what to do. only_if: its precondition. proof: which number must move, and how far. code: to copy, may be empty."""

    change: str
    only_if: str
    proof: str
    code: str = ""


class Finding(msgspec.Struct, frozen=True):
    """share: bound over step time 0-1. bound_ns, estimate_ns: per step, or for the span.

    where: `file.py:42` of the user's code or "". devices: the (rank, device) pairs it holds for.
    caused_by: id of the finding that it is shown under ("" = it stands for itself); such findings carry bound_ns 0.
    relation: how it stands to that finding. effect: that one explains it, its time is counted there; after: that one comes
    first in the method, and curing this would gain little before (its time is another one).
    estimate_reason: why there is no estimate.
    parts: the parts of the account that its time is taken from ("*": any), which is where a picture shows it.
    ends_run: it is what ended the run, not a loss of time in it; such a finding comes first.
    """

    rule: str
    step: StepName
    category: str
    severity: Severity
    share: float
    bound_ns: int
    estimate_ns: int | None
    title: str
    summary: str
    evidence: tuple[Evidence, ...]
    where: str
    fixes: tuple[Fix, ...]
    why: str = ""
    basis: str = ""
    wrong_when: str = ""
    references: tuple[str, ...] = ()
    devices: tuple[tuple[int, int], ...] = ()
    caused_by: str = ""
    estimate_reason: str = ""
    parts: tuple[str, ...] = ()
    relation: Relation = ""
    ends_run: bool = False


class NotJudged(msgspec.Struct, frozen=True):
    rule: str
    missing: str
    record_with: str


class KernelRow(msgspec.Struct, frozen=True):
    """One kernel name on one device over the window. what: gemm | conv | attention | elementwise | reduction | norm |
    optimizer | communication | copy | other. share: of the window's kernel time."""

    name: str
    what: str
    count: int
    total_ns: int
    average_ns: int
    share: float
    tensor_cores: bool
    rank: int = 0
    device: int = 0


class Lane(msgspec.Struct, frozen=True):
    """One row of a timeline picture. kind: owner | range | loader | host | launch | stream | comm | copy.

    start_ns (relative to the view's start), length_ns, name: parallel tuples; name indexes TimelineView.names.
    detail: `exact` or `merged N ns` when events shorter than N ns that lie in one N ns cell were drawn as one.
    count: how many events each drawn one stands for; empty = one each. A merged one is as long as the time that it stands
    for, and bears the name that fills most of it.
    """

    label: str
    kind: str
    start_ns: tuple[int, ...]
    length_ns: tuple[int, ...]
    name: tuple[int, ...]
    detail: str = "exact"
    count: tuple[int, ...] = ()


class TimelineView(msgspec.Struct, frozen=True):
    """A piece of the recording to draw: a typical step, the worst one. Times absolute as in the accounts, ns."""

    title: str
    rank: int
    device: int
    start_ns: int
    end_ns: int
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]


class Diagnosis(msgspec.Struct, frozen=True):
    """What `analyze` and `profile` print with --json. rules: outcome per rule id (fired, clear, not_judged, error).

    rule_steps: the step of the method that each rule id of `rules` belongs to, so that a report can say per step what was clear.
    """

    schema: str
    gpudiag: str
    source: SourceInfo
    verdict: Verdict
    steps: StepsInfo
    accounts: tuple[AccountInfo, ...]
    devices: tuple[DeviceFigures, ...]
    metrics: dict[str, MetricValue]
    findings: tuple[Finding, ...]
    not_judged: tuple[NotJudged, ...]
    warnings: tuple[str, ...]
    kernels: tuple[KernelRow, ...] = ()
    rules: dict[str, str] = {}
    rule_steps: dict[str, StepName] = {}
    ranks: tuple[dict[str, Any], ...] = ()
    loaders: tuple[dict[str, Any], ...] = ()
    environment: dict[str, Any] = {}
    views: tuple[TimelineView, ...] = ()


def to_json(diagnosis: Diagnosis) -> bytes:
    """UTF-8 JSON, indented by 2, ending in a newline. Same diagnosis, same bytes.

    A file name that is not UTF-8 reaches us with lone surrogates, which JSON cannot hold: they are spelled out (`\\udcff`).
    """
    try:
        data = msgspec.json.encode(diagnosis)
    except UnicodeEncodeError:
        data = msgspec.json.encode(spelled(msgspec.to_builtins(diagnosis)))
    return msgspec.json.format(data, indent=2) + b"\n"


def spelled(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {spelled(key): spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [spelled(item) for item in value]
    return value


def from_json(data: bytes) -> Diagnosis:
    """Raises msgspec.ValidationError or msgspec.DecodeError when it is no diagnosis of this schema."""
    return msgspec.json.decode(data, type=Diagnosis)
