"""One line a device or rank below the account of several: where each of them differs from the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpudiag.diagnosis import AccountInfo
from gpudiag.report import facts
from gpudiag.units import format_ns, format_percent

WIDE = 78  # columns that a table with all its columns takes; narrower pages leave some out
_MOST_DEVICES = 8
_GPU_GROUPS = ("compute", "communication_exposed", "copy_exposed", "idle.")
_HOST_GROUPS = ("host.input", "host.forward", "host.backward", "host.optimizer", "host.other")


def device_lines(accounts: Sequence[AccountInfo], wide: bool) -> Iterator[str]:
    """Without indent. Ranks without GPU work have a table of their own kind; beside GPUs they are named CPU."""
    on_host = all(account.device < 0 for account in accounts)
    by_work = sorted(accounts, key=lambda a: (_work(a, on_host), a.rank, a.device))
    shown = sorted(by_work[:_MOST_DEVICES], key=lambda a: (a.rank, a.device))
    yield from _host_lines(shown) if on_host else _gpu_lines(shown, len({a.rank for a in accounts}) > 1, wide)
    if len(accounts) > len(shown):
        yield f"the {len(shown)} that compute least, of {len(accounts)}"


def _work(account: AccountInfo, on_host: bool) -> float:
    return sum(facts.group_share(account, part) for part in (_HOST_GROUPS[1:4] if on_host else ("compute",)))


def _gpu_lines(accounts: Sequence[AccountInfo], many_ranks: bool, wide: bool) -> Iterator[str]:
    head = ("rank  GPU" if many_ranks else "GPU").rjust(9)
    yield f"{head}  compute  comm. exposed  copies exposed   idle{'  idle mostly' * wide}"
    for account in accounts:
        device = "CPU" if account.device < 0 else str(account.device)
        name = f"{account.rank:>4}  {device:>3}" if many_ranks else f"{device:>3}"
        shares = [format_percent(facts.group_share(account, part)) for part in _GPU_GROUPS]
        cells = shares if account.device >= 0 else ["-"] * len(shares)
        largest = max((p for p in account.parts.items() if p[0].startswith("idle.")), key=lambda p: p[1], default=None)
        owner = facts.part_label(largest[0]).removeprefix("idle: ") if largest and largest[1] else ""
        row = f"{name:>9}  {cells[0]:>7}  {cells[1]:>13}  {cells[2]:>14}  {cells[3]:>5}"
        yield row + (f"  {owner}" if wide else "")


def _host_lines(accounts: Sequence[AccountInfo]) -> Iterator[str]:
    per = "step" if all(account.steps for account in accounts) else "whole"
    yield f"rank  {per:>7}  input  forward  backward  optimizer  other code"
    for account in accounts:
        cells = [format_percent(facts.group_share(account, part)) for part in _HOST_GROUPS]
        length = format_ns(account.total_ns // max(1, account.steps))
        yield f"{account.rank:>4}  {length:>7}  {cells[0]:>5}  {cells[1]:>7}  {cells[2]:>8}  {cells[3]:>9}  {cells[4]:>10}"
