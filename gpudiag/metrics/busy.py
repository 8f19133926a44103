"""Metrics of the account: how busy the device is, each part a step, long gaps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpudiag import diagnosis
from gpudiag.account import DEVICE_PARTS, HOST_PARTS
from gpudiag.metrics.make import BENCH, ON_GPU, PROFILE, PROFILE_NSYS, Value, inapplicable, missing, value
from gpudiag.scope import Scope
from gpudiag.timeline import Kind
from gpudiag.units import NS_PER_MS

NO_GPU = diagnosis.NO_GPU_WORK
CPU_RUN = "a host account exists for runs without GPU work only"
HOLDS = 0.01  # of a step: a tenth of what is called a warning
LOST = {"input_lost": "input", "checkpoint_log_lost": "checkpoint_log", "compile_lost": "compile", "gc_lost": "gc"}


def measure(scope: Scope) -> Iterator[Value]:
    on_gpu = scope.ops is not None
    parts = scope.parts
    yield value("gc_steps", _steps_with(scope, "idle.gc" if on_gpu else "host.gc"), "account")
    for name, part in LOST.items():
        yield value(name, scope.per_step(parts.get(f"{'idle' if on_gpu else 'host'}.{part}", 0)), "account")
    for part in HOST_PARTS:
        name = part.replace(".", "_")
        if on_gpu:
            yield inapplicable(name, CPU_RUN)
        else:
            yield value(name, scope.per_step(parts.get(part, 0)), "account")
    yield _log_arguments(scope)
    for part in DEVICE_PARTS:
        name = part.replace(".", "_")
        if on_gpu:
            yield value(name, scope.per_step(parts.get(part, 0)), "account")
        else:
            yield missing(name, NO_GPU, ON_GPU)
    if on_gpu:
        yield from _device(scope)
    else:
        for name in (
            "gpu_busy",
            "gpu_idle",
            "idle_before_first",
            "idle_queued",
            "long_gap_time",
            "long_gap_steps",
            "compute_capability",
            "queue_full_time",
        ):
            yield missing(name, NO_GPU, ON_GPU)
        for name in ("copy_exposed", "copy_exposed_link", "gpu_ops_total", "kernels_total"):
            if scope.timeline.gpu_ops is not None and name.endswith("_total"):
                yield value(name, 0, "gpu_ops")
            else:
                yield missing(name, NO_GPU, ON_GPU)
    yield missing("mfu", "the model's FLOPs are not in a recording", BENCH)


def _log_arguments(scope: Scope) -> Value:
    """Of the samples outside all phases those within the arguments of a log call, as a share of that time."""
    name = "host_log_arguments"
    if scope.ops is not None:
        return inapplicable(name, CPU_RUN)
    if scope.timeline.step_log is None:
        return missing(name, "the code outside the phases was not sampled", PROFILE)
    sampled, logging = (
        sum(site.total_ns for site in scope.timeline.sites if site.kind == kind) for kind in ("host", "log_argument")
    )
    other = scope.per_step(scope.parts.get("host.other", 0))
    return value(name, int(other * min(1.0, logging / sampled)) if sampled else 0, "samples")


def _steps_with(scope: Scope, part: str) -> int:
    """Steps of which the part takes HOLDS or more; without steps: its stretches."""
    time = scope.account.owned_by(part)
    if not len(scope.steps):
        return len(time)
    length = scope.steps.end - scope.steps.start
    return int((time.covered_in(scope.steps.start, scope.steps.end) >= HOLDS * length).sum())


def _device(scope: Scope) -> Iterator[Value]:
    assert scope.layers is not None and scope.host is not None
    parts, total = scope.parts, scope.account.total
    idle = sum(ns for part, ns in parts.items() if part.startswith("idle."))
    yield value("gpu_busy", 1 - idle / max(1, total), "account")
    yield value("gpu_idle", scope.per_step(idle), "account")
    yield value("idle_before_first", scope.per_step(scope.before_first.total()), "account")
    yield value("idle_queued", scope.per_step(scope.idle_while_queued.total()), "account")
    copies = {part: ns for part, ns in parts.items() if part.startswith("copy_exposed.")}
    yield value("copy_exposed", scope.per_step(sum(copies.values())), "account")
    link = sum(copies.get(f"copy_exposed.{kind}", 0) for kind in ("h2d", "d2h", "other"))
    yield value("copy_exposed_link", scope.per_step(link), "account")
    ops = scope.window_ops
    yield value("gpu_ops_total", len(ops), "gpu_ops")
    yield value("kernels_total", int(np.isin(ops.kind, (Kind.KERNEL, Kind.COMM, Kind.GRAPH)).sum()), "gpu_ops")
    floor = max(NS_PER_MS, 0.05 * scope.per_step(total))
    gaps = scope.idle
    long = (gaps.end - gaps.start) >= floor
    yield value("long_gap_time", scope.per_step(float((gaps.end - gaps.start)[long].sum())), "account")
    if len(scope.steps):
        holders = np.unique(np.searchsorted(scope.steps.start, gaps.start[long], side="right"))
        yield value("long_gap_steps", int(holders.size), "account")
    else:
        yield value("long_gap_steps", int(long.sum()), "account")
    info = scope.timeline.devices.get(scope.device)
    if info is not None and info.compute_capability is not None:
        major, minor = info.compute_capability
        yield value("compute_capability", major + minor / 10, "device properties")
    else:
        yield missing("compute_capability", "the recording does not describe the GPU", PROFILE)
    if scope.timeline.overheads is None:
        yield missing("queue_full_time", "the recorder's overhead rows were not recorded", PROFILE_NSYS)
    else:
        full = scope.host.queue_full.intersect(scope.window).total()
        yield value("queue_full_time", scope.per_step(full), "overheads")
