"""What every report takes from a diagnosis: labels, the findings of a step, and the sentences made of numbers."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpudiag.diagnosis import (
    NO_GPU_WORK,
    AccountInfo,
    Diagnosis,
    Finding,
    KernelRow,
    NotJudged,
    StepName,
)
from gpudiag.report.text import clean
from gpudiag.units import counted, format_ns, format_percent

STEP_TITLES: dict[StepName, str] = {
    "overall": "Overall timeline",
    "transfer": "Data transfer",
    "compute": "Compute and kernels",
    "scheduling": "Launch and scheduling",
    "environment": "Machine",
}

# The order of the account (DESIGN 4); a part that is not listed keeps its own name and comes last.
PART_LABELS: dict[str, str] = {
    "compute": "compute",
    "communication_exposed": "communication, exposed",
    "copy_exposed.h2d": "H2D copies, exposed",
    "copy_exposed.d2h": "D2H copies, exposed",
    "copy_exposed.d2d": "D2D copies, exposed",
    "copy_exposed.p2p": "P2P copies, exposed",
    "copy_exposed.managed": "managed memory, exposed",
    "copy_exposed.other": "other copies, exposed",
    "memset_exposed": "memsets, exposed",
    "idle.input": "idle: waits for input",
    "idle.sync": "idle: after a sync",
    "idle.launch": "idle: launch cost",
    "idle.allocator": "idle: memory allocator",
    "idle.compile": "idle: compiling",
    "idle.checkpoint_log": "idle: checkpoint or log",
    "idle.gc": "idle: garbage collector",
    "idle.host": "idle: other host code",
    "idle.profiler": "idle: the profiler itself",
    "idle.unknown": "idle: cause unknown",
    "host.input": "waits for input",
    "host.h2d": "copies to the device",
    "host.forward": "forward",
    "host.backward": "backward",
    "host.optimizer": "optimizer",
    "host.checkpoint_log": "checkpoint or log",
    "host.compile": "compiling",
    "host.gc": "garbage collector",
    "host.framework": "framework code",
    "host.other": "other host code",
}

# Parts whose name alone leaves a reader guessing; said below the legend where they take much.
PART_MEANINGS: dict[str, str] = {
    "idle.unknown": "the recording does not show what the GPU waited for",
    "idle.host": "the host was busy outside launches, waits and the framework (Python, other libraries)",
    "host.other": "the main thread was outside every recorded phase and operator (Python, other libraries, waits)",
}
NOTABLE_PART = 0.03  # share of the window from which a part's meaning is told: the least share of a finding

_METRIC = re.compile(r"^[a-z][a-z0-9_]*: ")
_LABEL = re.compile(r"^(?:Run ended|Mostly compute|Healthy|Cannot judge|Bound by [a-z ]+): ", re.IGNORECASE)


def ordered_parts(parts: Mapping[str, int]) -> list[tuple[str, int]]:
    """The parts of an account that are not zero, in the account's order, unknown names last."""
    order = {name: i for i, name in enumerate(PART_LABELS)}
    return sorted(((n, v) for n, v in parts.items() if v), key=lambda item: (order.get(item[0], len(order)), item[0]))


def part_label(name: str) -> str:
    return PART_LABELS.get(name) or clean(name, 40)


def summed(accounts: Iterable[AccountInfo]) -> dict[str, int]:
    """The parts of several accounts added up (one bar for all devices)."""
    total: dict[str, int] = {}
    for account in accounts:
        for name, value in account.parts.items():
            total[name] = total.get(name, 0) + value
    return total


def group_share(account: AccountInfo, prefix: str) -> float:
    """The share 0-1 of an account that the parts starting with `prefix` take."""
    return (
        sum(v for n, v in account.parts.items() if n.startswith(prefix)) / account.total_ns if account.total_ns else 0.0
    )


def device_label(rank: int, device: int, many_ranks: bool) -> str:
    name = "CPU" if device < 0 else f"GPU {device}"
    return f"rank {rank}, {name}" if many_ranks else name


def devices_word(accounts: Sequence[AccountInfo]) -> str:
    """`2 GPUs`; `2 ranks` where there is no GPU work, `3 devices` where only some have it."""
    on_host = {account.device < 0 for account in accounts}
    return counted(len(accounts), "device" if len(on_host) > 1 else "rank" if on_host == {True} else "GPU")


def reason(missing: str) -> str:
    """Why a rule could not be judged, without the names of the metrics that it misses: `a: no GPU; b: no GPU` is `no GPU`."""
    return "; ".join(sorted({_METRIC.sub("", clean(piece)) for piece in missing.split("; ")}))


def grouped(not_judged: Iterable[NotJudged]) -> Iterator[tuple[list[str], str, str]]:
    """(rule ids, why, how to record it) for rules that miss the same thing: the largest groups first, one `how` after the other.

    Rules about GPU work of a run without any are one group, the first, whatever else they miss.
    """
    items = list(not_judged)
    without_gpu = [item.rule for item in items if NO_GPU_WORK in item.missing]
    if without_gpu:
        yield without_gpu, NO_GPU_WORK, ""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in items:
        if NO_GPU_WORK not in item.missing:
            groups.setdefault((reason(item.missing), item.record_with), []).append(item.rule)
    first = {how: i for i, (_, how) in reversed(list(enumerate(groups)))}
    for (missing, how), rules in sorted(groups.items(), key=lambda item: (first[item[0][1]], -len(item[1]))):
        yield rules, missing, how


def about_gpu_work(rules: Sequence[str], missing: str) -> str:
    """`50 rules about GPU work` for the group of rules that a run without GPU work leaves unjudged; "" for any other."""
    if missing != NO_GPU_WORK:
        return ""
    return f"{counted(len(rules), 'rule')} about GPU work"


def verdict_label(diagnosis: Diagnosis) -> str:
    """`input-bound`, `healthy`, `cannot judge`, `run ended`"""
    verdict = diagnosis.verdict
    if any(finding.ends_run for finding in diagnosis.findings):
        return "run ended"
    if verdict.headline.startswith("Mostly compute: "):
        return "mostly compute"  # a bottleneck, but a small one beside the CPU's work
    if verdict.status != "bottleneck":
        return verdict.status.replace("_", " ")
    return "bottleneck" if verdict.bound_by == "none" else f"{verdict.bound_by}-bound"


def headline(diagnosis: Diagnosis) -> str:
    """The verdict's sentence without a label of its own (`Healthy: ...`), since every report sets one before it."""
    return _LABEL.sub("", clean(diagnosis.verdict.headline))


# What a step was taken to be. The first four are marked by `gpudiag profile`, the others were found in the recording.
STEP_SOURCES = {
    "optimizer": "each ends with an optimizer step",
    "loader": "each takes a batch from the loader",
    "forward": "each is one call of the model",
    "replay": "each is one replay of a CUDA graph",
    "inferred": "kernels that repeat",
    "annotation": "named ranges",
    "nvtx": "NVTX ranges",
}


def account_heading(diagnosis: Diagnosis) -> str:
    return "Where the time goes" + (", in what could be read" if diagnosis.source.incomplete else "")


def steps_line(diagnosis: Diagnosis) -> str:
    """What the figures are of; of a file that is cut short they are all of what came before the cut."""
    line = _steps_line(diagnosis)
    return f"In what could be read: {line[:1].lower()}{line[1:]}" if diagnosis.source.incomplete else line


def _steps_line(diagnosis: Diagnosis) -> str:
    steps = diagnosis.steps
    if not steps.count or steps.median_ns is None or all(a.scope == "span" for a in diagnosis.accounts):
        start = (
            "The figures are those of one span" if diagnosis.verdict.status == "cannot_judge" else "Judged as one span"
        )
        return f"{start}, start-up included: no steady steps."
    line = f"{counted(steps.count, 'steady step')}, median {format_ns(steps.median_ns)}"
    if steps.p99_ns is not None and steps.count > 1:
        line += f", p99 {format_ns(steps.p99_ns)}"
    mean = steps_mean(diagnosis)
    if mean is not None and abs(mean - steps.median_ns) > 0.02 * steps.median_ns:
        line += f", mean {format_ns(mean)}"
    notes = [STEP_SOURCES.get(steps.source, clean(steps.source, 30))]
    if steps.confidence < 0.995:
        notes.append(f"confidence {format_percent(steps.confidence)}")
    if steps.warm_up:
        notes.append(f"{steps.warm_up} warm-up dropped")
    return f"{line} ({', '.join(notes)})"


def steps_mean(diagnosis: Diagnosis) -> float | None:
    """The mean steady step in ns over all devices, which bounds and shares refer to; None without steps."""
    counted = [account for account in diagnosis.accounts if account.steps]
    return sum(a.total_ns for a in counted) / sum(a.steps for a in counted) if counted else None


def bound_line(diagnosis: Diagnosis, finding: Finding) -> str:
    """`at most 17.1 ms of 41.2 ms per step (41 %), estimate 14.2 ms, at train.py:42`"""
    pieces = []
    if finding.bound_ns > 0 and finding.share > 0:
        per_step = any(account.scope == "steps" for account in diagnosis.accounts)
        whole = format_ns(finding.bound_ns / finding.share) + (" per step" if per_step else " recorded")
        pieces.append(f"at most {format_ns(finding.bound_ns)} of {whole} ({format_percent(finding.share)})")
    elif finding.share > 0:
        pieces.append(f"{format_percent(finding.share)} of the time")
    if finding.estimate_ns is not None:
        pieces.append(f"estimate {format_ns(finding.estimate_ns)}")
    if len(diagnosis.accounts) > 1 and finding.devices:
        pieces.append(_on_devices(diagnosis, finding))
    if finding.where:
        pieces.append(f"at {finding.where}")
    return ", ".join(pieces)


def _on_devices(diagnosis: Diagnosis, finding: Finding) -> str:
    devices = sorted(set(finding.devices))
    together = devices_word(diagnosis.accounts)  # `2 GPUs`
    if len(devices) >= len(diagnosis.accounts):
        return f"on both {together.removeprefix('2 ')}" if len(devices) == 2 else f"on all {together}"
    if len(devices) > 4:
        return f"on {len(devices)} of {together}"
    many_ranks = len({account.rank for account in diagnosis.accounts}) > 1
    return "on " + "; ".join(device_label(rank, device, many_ranks) for rank, device in devices)


def merged_kernels(rows: Iterable[KernelRow]) -> list[KernelRow]:
    """One row a kernel name over all ranks and devices, longest first; shares of the kernel time of all of them."""
    by_name: dict[str, list[KernelRow]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    whole = sum(row.total_ns for group in by_name.values() for row in group if row.share > 0)
    # A device's kernel time is total/share of any of its rows: the rows may be only the top of the list.
    times = {(r.rank, r.device): r.total_ns / r.share for group in by_name.values() for r in group if r.share > 0}
    whole = round(sum(times.values())) or whole
    merged = []
    for name, group in by_name.items():
        count, total = sum(r.count for r in group), sum(r.total_ns for r in group)
        merged.append(
            KernelRow(
                name=name,
                what=group[0].what,
                count=count,
                total_ns=total,
                average_ns=round(total / count) if count else 0,
                share=total / whole if whole else 0.0,
                tensor_cores=any(r.tensor_cores for r in group),
            )
        )
    return sorted(merged, key=lambda row: (-row.total_ns, row.name))


def next_commands(diagnosis: Diagnosis, inputs: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(command to type, what for). inputs: what the user named on the command line, else the recording itself."""
    paths = " ".join(shell_word(path) for path in inputs or (diagnosis.source.path or "RECORDING",))
    commands = []
    if diagnosis.verdict.status != "cannot_judge":
        commands.append((f"gpudiag analyze {paths} --html report.html", "on a timeline"))
    causes = [finding for finding in diagnosis.findings if not finding.caused_by]
    if diagnosis.verdict.status == "bottleneck" and causes:
        commands.append((f"gpudiag rules show {clean(causes[0].rule, 40)}", "why, and when it is wrong"))
    if not commands:
        commands.append(("gpudiag profile SCRIPT", "record the run so that it can be judged"))
    return commands


def shell_word(path: str) -> str:
    """A path to copy into a shell, where it names the same file: what cannot be printed is written as bytes, `$'a\\x0ab'`."""
    if path.isprintable():
        return shlex.quote(path)
    spelled = "".join(
        f"\\x{byte:02x}" if byte < 0x20 or byte > 0x7E or chr(byte) in "\\'" else chr(byte)
        for byte in os.fsencode(path)
    )
    return f"$'{spelled}'"
