"""The recorded names that a rule's texts can quote: a kernel, an operator, a place in the user's code."""

from __future__ import annotations

import re

import numpy as np

from gpudiag.kernels import short_name
from gpudiag.metrics.across import RunFacts
from gpudiag.metrics.kernel_work import slow_cpu_ops
from gpudiag.metrics.launching import idle_after, implicit_sync_rows
from gpudiag.metrics.loading import main_loader
from gpudiag.metrics.run import step_lengths
from gpudiag.metrics.wait_lines import UPLOAD, lines_of, told, wait_lines
from gpudiag.names import SYNC
from gpudiag.scope import Scope
from gpudiag.timeline import LoaderInfo
from gpudiag.units import format_percent

MOST_NUMBERS = 8
MOST_TRANSFORMS = 4


def texts_of(scope: Scope, run: RunFacts) -> dict[str, str]:
    """The texts that this recording has; a name that is absent was not recorded."""
    texts: dict[str, str] = {}
    loader = main_loader(scope)
    if loader is not None:
        texts["loader_where"], texts["dataset_name"] = loader.where, loader.dataset
        if loader.transforms:
            texts["transform_shares"] = _transform_shares(loader)
    failed = [info for info in scope.timeline.loaders if info.shm_error]
    if failed:
        texts["shm_error"], texts["shm_where"] = failed[-1].shm_error, failed[-1].where
    texts.update(_waits(scope))
    site = _worst_site(scope, ("host",))
    if site:
        texts["host_where"] = site
    site = _worst_site(scope, ("log_argument",))
    if site:
        texts["log_argument_where"] = site
    site = _worst_site(scope, ("checkpoint", "log"))
    if site:
        texts["checkpoint_log_where"] = site
    numbers = _slow_steps(scope)
    if numbers:
        texts["slow_step_numbers"] = numbers
    compiled = [site for site in scope.timeline.sites if site.kind == "compile" and site.detail]
    if compiled:
        worst = max(compiled, key=lambda site: (site.total_ns, site.where))
        texts["recompile_where"], texts["recompile_reason"] = worst.where, worst.detail
    if scope.timeline.optimizer_name:
        texts["optimizer_name"] = scope.timeline.optimizer_name
    for message in scope.timeline.host.out_of_memory.values():
        texts["out_of_memory_said"] = message
    if scope.timeline.host.debug_switches:
        texts["debug_switch_names"] = ", ".join(scope.timeline.host.debug_switches)
    info = scope.timeline.devices.get(scope.device)
    if info is not None and info.name:
        texts["gpu_name"] = info.name
    if run.latest_rank is not None:
        texts["straggler_rank"] = ", ".join(map(str, run.late_ranks or (run.latest_rank,)))
    strings = scope.timeline.strings
    if scope.ops is not None:
        table = scope.kernels
        if len(table):
            texts["hot_kernel_name"] = short_name(table.names[int(table.time_of.argmax())])
        sync = _worst_sync(scope)
        if sync is not None:
            texts["sync_api"] = strings[sync]
    ops = scope.cpu_ops
    if ops is not None:
        rows = implicit_sync_rows(scope) if scope.ops is not None else np.empty(0, np.int64)
        if rows.size:
            names, inverse = np.unique(ops.name[rows], return_inverse=True)
            spent = np.bincount(inverse, weights=ops.end[rows] - ops.start[rows])
            texts["implicit_sync_op"] = strings[names[int(spent.argmax())]]
        _, slow = slow_cpu_ops(scope)
        if slow.size:
            idle = scope.account.owned_by("idle.launch").union(scope.account.owned_by("idle.host"))
            under = idle.covered_in(ops.start[slow], ops.end[slow])
            if under.any():
                texts["cpu_op_name"] = strings[ops.name[slow[int(under.argmax())]]]
    return texts


def _transform_shares(loader: LoaderInfo) -> str:
    """`RandomResizedCrop 61 %, ToTensor 20 %`, the first MOST_TRANSFORMS of them."""
    total = max(1, sum(length for _, _, length in loader.transforms))
    return ", ".join(
        f"{name} {format_percent(length / total)}" for name, _, length in loader.transforms[:MOST_TRANSFORMS]
    )


def _waits(scope: Scope) -> dict[str, str]:
    """Where the host waits for the device, or reads values of large tensors on the CPU."""
    texts: dict[str, str] = {}
    waits = wait_lines(scope)
    reading = next((line.where for line in waits if line.reads), _worst_site(scope, ("readback",)))
    if reading:
        texts["readback_where"] = texts["implicit_sync_where"] = reading
    worst = next((line.where for line in waits if line.what != UPLOAD), reading)
    if worst:
        texts["sync_where"] = worst
    if waits:
        texts["wait_lines"] = told(waits)
    reads = lines_of(scope.timeline.sites, "read")
    if reads:
        texts["read_lines"] = told(reads)
    return texts


def _slow_steps(scope: Scope) -> str:
    """`12, 31 and 44`, the first MOST_NUMBERS of them; "" where none is slow."""
    lengths = step_lengths(scope)
    if not lengths.size:
        return ""
    slow = [str(number) for number in scope.steps.index[lengths > 2 * np.median(lengths)].tolist()]
    if len(slow) > MOST_NUMBERS:
        return f"{', '.join(slow[:MOST_NUMBERS])} and {len(slow) - MOST_NUMBERS} more"
    return " and ".join(filter(None, (", ".join(slow[:-1]), *slow[-1:])))


def _worst_sync(scope: Scope) -> int | None:
    """The name (a code) of the synchronising calls of the window that most idle time follows; None where none follows any."""
    calls = scope.timeline.api_calls
    if calls is None or scope.launches is None or scope.host is None:
        return None
    rows = np.flatnonzero(scope.feeding & scope.names.rows(calls.name, SYNC) & scope.window.contains(calls.start))
    idle = {
        int(code): idle_after(
            scope, np.isin(scope.host.wait_start, calls.start[rows[calls.name[rows] == code]])
        ).total()
        for code in np.unique(calls.name[rows])
    }
    worst = max(idle, key=lambda code: (idle[code], scope.timeline.strings[code]), default=None)
    return worst if worst is not None and idle[worst] else None


def _worst_site(scope: Scope, kinds: tuple[str, ...]) -> str:
    sites = [site for site in scope.timeline.sites if site.kind in kinds and re.search(r":\d+$", site.where)]
    return max(sites, key=lambda site: (site.total_ns, site.where), default=None).where if sites else ""  # type: ignore[union-attr]
