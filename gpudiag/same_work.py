"""Are two recordings of the same work? What differs is listed; only what makes their times incomparable blocks."""

from __future__ import annotations

from gpudiag.comparison import Difference, SideInfo
from gpudiag.diagnosis import Diagnosis
from gpudiag.units import format_bytes

# Of kernels a step: a recording that cuts its first or last step short differs by up to 2 % (v100_resnet50_workers0/4: 1.7 %).
KERNEL_TOLERANCE = 0.05
LEAST_SHARED = (
    0.5  # of the kernel time in names that both sides have; below that it is another program or another precision
)
BYTES_TOLERANCE = 0.05


def differences_of(before: SideInfo, after: SideInfo, old: Diagnosis, new: Diagnosis) -> tuple[Difference, ...]:
    """before, after: the sides; old, new: the diagnoses that stand for them. Blocking ones first."""
    found = []

    def differ(what: str, a: object, b: object, blocks: bool = False) -> None:
        found.append(Difference(what, str(a), str(b), blocks))

    if before.scope != after.scope:
        names = {"steps": "steps", "span": "one span without steps"}
        differ("what is timed", names[before.scope], names[after.scope], blocks=True)
    if len(before.gpus) != len(after.gpus):
        differ("GPUs", len(before.gpus), len(after.gpus), blocks=True)
    if before.ranks != after.ranks:
        differ("ranks", before.ranks, after.ranks, blocks=True)
    if before.batch_size and after.batch_size and before.batch_size != after.batch_size:
        differ("batch size", before.batch_size, after.batch_size, blocks=True)
    if before.scope == after.scope == "span" and before.kernels != after.kernels:
        # Two spans of different length tell nothing unless the same work lies in them.
        differ("kernels in the recording", before.kernels, after.kernels, blocks=True)
    if before.scope == after.scope == "steps" and before.steps != after.steps:
        differ("steps", before.steps, after.steps)
    if before.scope == after.scope == "steps" and old.steps.source != new.steps.source:
        differ("steps known from", old.steps.source, new.steps.source)
    models = [sorted({name for name in side.gpus if name}) for side in (before, after)]  # some recordings name none
    if all(models) and models[0] != models[1]:
        differ("GPU", ", ".join(models[0]), ", ".join(models[1]))
    a, b = before.kernels_per_step, after.kernels_per_step
    if a is not None and b is not None and abs(a - b) > KERNEL_TOLERANCE * max(a, b):
        differ("kernels a step", f"{a:,.0f}", f"{b:,.0f}")
    shared = min(_shared(old, new), _shared(new, old))
    if shared < LEAST_SHARED and old.kernels and new.kernels:
        differ("kernels", "", f"only {round(shared * 100)} % of the kernel time is in kernels of the same name")
    a, b = (_bytes(d) for d in (old, new))
    if before.scope == after.scope == "steps" and a and b and abs(a - b) > BYTES_TOLERANCE * max(a, b):
        differ("bytes copied to the GPU a step", format_bytes(a), format_bytes(b))
    return tuple(sorted(found, key=lambda difference: not difference.blocks))


def _shared(one: Diagnosis, other: Diagnosis) -> float:
    """The share of the kernel time of `one` (of the rows it keeps) in kernels that `other` runs as well; 1 without kernels."""
    names = {row.name for row in other.kernels}
    total = sum(row.total_ns for row in one.kernels)
    return sum(row.total_ns for row in one.kernels if row.name in names) / total if total else 1.0


def _bytes(diagnosis: Diagnosis) -> float:
    metric = diagnosis.metrics.get("h2d_bytes")
    return float(metric.value) if metric is not None and metric.value is not None else 0.0
