"""All metrics of a scope. `measure` gives every name of the catalogue exactly once, as a value or as missing with the reason."""

from __future__ import annotations

from gpudiag.metrics import busy, communication, copies, cpu, kernel_work, launching, loader_work, loading, machine, run
from gpudiag.metrics.across import RunFacts
from gpudiag.metrics.base import Metric, Missing
from gpudiag.metrics.busy import NO_GPU
from gpudiag.metrics.make import ON_GPU, PROFILE, inapplicable, missing, value
from gpudiag.metrics.spec import BY_NAME
from gpudiag.scope import Scope

ALL = (
    run.measure,
    busy.measure,
    copies.measure,
    kernel_work.measure,
    launching.measure,
    loading.measure,
    loader_work.measure,
    cpu.measure,
    machine.measure,
)


def measure(scope: Scope, facts: RunFacts) -> dict[str, Metric | Missing]:
    """Every metric of the catalogue by name."""
    values: dict[str, Metric | Missing] = {}
    for part in ALL:
        values.update((item.name, item) for item in part(scope))
    values.update((item.name, item) for item in communication.measure(scope, facts))
    if scope.timeline.gpu_ops is None and not facts.devices:
        values["devices"] = missing("devices", NO_GPU, ON_GPU)
    else:
        values["devices"] = value("devices", facts.devices, "gpu_ops")
    if facts.drivers:
        values["driver_versions"] = value("driver_versions", len(facts.drivers), "environment record")
    else:
        values["driver_versions"] = missing("driver_versions", "the recording does not name the driver", PROFILE)
    if facts.busy_spread is None:
        values["busy_spread"] = (
            inapplicable("busy_spread", "one device was recorded")
            if facts.devices
            else missing("busy_spread", NO_GPU, ON_GPU)
        )
    else:
        values["busy_spread"] = value("busy_spread", facts.busy_spread, "gpu_ops")
    return {name: values[name] for name in BY_NAME}
