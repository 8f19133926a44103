"""Words that every report shares: names made safe and short, the parts of the account by name, percents that sum to 100."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpudiag.diagnosis import AccountInfo, Diagnosis, Finding, NotJudged, StepName

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

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean(text: str, limit: int = 0) -> str:
    """One line without anything a terminal or a reader's eye would obey: white space becomes a space; control characters,
    escape sequences, direction marks, invisible characters and lone surrogates are spelled out (`\\x1b`, `\\u202e`).

    limit: cut in the middle to this many characters, 0 = not.
    """
    if limit and len(text) > 4 * limit:  # a 10,000-character name is cut before the slow part
        text = text[: 2 * limit] + "…" + text[-2 * limit :]
    if not text.isascii() or not text.isprintable():
        text = "".join(_spelled(character) for character in text)
    text = " ".join(text.split())
    return cut(text, limit) if limit else text


def clean_code(text: str) -> list[str]:
    """The lines of a piece of code, each as `clean` leaves it but with its indentation."""
    lines = [line.rstrip() for line in text.expandtabs(4).strip("\n").split("\n")]
    return [" " * (len(line) - len(line.lstrip(" "))) + clean(line, 400) for line in lines]


def _spelled(character: str) -> str:
    if character.isspace() and character != "\x1c":
        return " "
    if unicodedata.category(character) in _HIDDEN:
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


def cut(text: str, limit: int) -> str:
    """At most `limit` characters: what is left out of the middle is one `…`, the start keeps two thirds."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 3
    return text[: limit - 1 - tail] + "…" + text[len(text) - tail :]


def short_kernel(name: str, limit: int) -> str:
    """A kernel's name as one would say it: no return type, no parameters, no namespaces, then cut to `limit` characters.

    `void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int, float*)` becomes
    `vectorized_elementwise_kernel<4, AddFunctor<float>>`.
    """
    text = clean(name, 2000)
    text = text.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    text = _without_parameters(text).removeprefix("void ")
    text = re.sub(r"\b(?:\w+::)+", "", text).replace("> >", ">>").replace("> >", ">>")
    text = text or clean(name)
    if len(text) <= limit or "<" not in text:
        return cut(text, limit)
    return text[: limit - 1] + "…"


def _without_parameters(text: str) -> str:
    depth = 0
    for i, character in enumerate(text):
        if character == "<":
            depth += 1
        elif character == ">":
            depth -= 1
        elif character == "(" and depth <= 0 and i:
            return text[:i]
    return text


def columns(text: str) -> int:
    """How many terminal cells a text takes: wide characters two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def apportion(values: Sequence[int], total: int) -> list[int]:
    """Whole shares of `total` in proportion to `values` that sum to it exactly (largest remainder; ties to the earlier).

    All zeros give all zeros. `apportion(parts, 1000)` are tenths of a percent.
    """
    whole = sum(values)
    if whole <= 0:
        return [0] * len(values)
    shares = [value * total // whole for value in values]
    by_remainder = sorted(range(len(values)), key=lambda i: (-(values[i] * total % whole), i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


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


def findings_of(diagnosis: Diagnosis, step: StepName) -> list[Finding]:
    """The findings of a step that stand for themselves, in the diagnosis's order. Those explained by another are `effects_of` it."""
    present = {finding.rule for finding in diagnosis.findings}
    return [f for f in diagnosis.findings if f.step == step and (f.caused_by not in present or f.caused_by == f.rule)]


def effects_of(diagnosis: Diagnosis, cause: Finding) -> list[Finding]:
    return [f for f in diagnosis.findings if f.caused_by == cause.rule != f.rule]


def not_judged_of(diagnosis: Diagnosis, step: StepName) -> list[NotJudged]:
    return [n for n in diagnosis.not_judged if diagnosis.rule_steps.get(n.rule) == step]


def clear_count(diagnosis: Diagnosis, step: StepName) -> int:
    """How many rules of a step were judged and found nothing."""
    return sum(
        1 for rule, outcome in diagnosis.rules.items() if outcome == "clear" and diagnosis.rule_steps.get(rule) == step
    )


def grouped(not_judged: Iterable[NotJudged]) -> Iterator[tuple[list[str], str, str]]:
    """(rule ids, what is missing, how to record it) for rules that miss the same thing, in the order of first mention."""
    groups: dict[tuple[str, str], list[str]] = {}
    for item in not_judged:
        groups.setdefault((item.missing, item.record_with), []).append(item.rule)
    for (missing, record_with), rules in groups.items():
        yield rules, missing, record_with
