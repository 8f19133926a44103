"""What `gpudiag gpus fit` shows: the parts of the memory, the answer for each GPU, and how the estimate was checked."""

from __future__ import annotations

from collections.abc import Sequence

from gpudiag.bench.fit import Fit, largest_batch, real_peak
from gpudiag.bench.models import ModelSpec
from gpudiag.bench.tables import Table
from gpudiag.errors import GpudiagError
from gpudiag.units import format_bytes


def checked_text(spec: ModelSpec, precision: str, optimizer: str, batch: int, fits: Sequence[Fit], problem: str) -> str:
    """The training estimate against a real peak, where there is a GPU; else that it was not checked."""
    training = next((fit_ for fit_ in fits if fit_.what == "training"), None)
    if training is None or problem:
        return f"not checked against a real run: {problem or 'training was not asked for'}"
    import torch

    total = float(torch.cuda.get_device_properties(0).total_memory)
    size = max(1, min(batch, largest_batch(training, 0.8 * total)))
    try:
        name, real = real_peak(spec, precision, optimizer, size)
    except GpudiagError as error:
        return f"not checked against a real run: {error.message}"
    estimate = training.peak_at(size)
    return (
        f"checked on {name} at batch {size}: {format_bytes(real)} allocated, estimated {format_bytes(estimate)} "
        f"({estimate / real:.2f} of it)"
    )


def parts_table(model: str, fits: Sequence[Fit], batch: int, checked: str) -> Table:
    rows = []
    notes = [
        f"By a dry run on a fake device with PyTorch's CPU operators: what torch allocates, without the reserve; {checked}."
    ]
    for fit_ in fits:
        first, last = fit_.points[0], fit_.points[-1]
        saved = (last.activations - first.activations) / (last.batch - first.batch)
        rows.append(
            (
                f"{fit_.what} {fit_.precision} {fit_.optimizer}".rstrip(),
                format_bytes(last.weights),
                format_bytes(last.gradients),
                format_bytes(last.optimizer),
                format_bytes(saved),
                format_bytes(fit_.per_image),
                format_bytes(fit_.peak_at(batch)),
            )
        )
        if not fit_.linear:
            notes.append(f"{fit_.what}: the peak does not grow in a line with the batch; the largest batch is rough.")
    columns = (
        "",
        "weights",
        "gradients",
        "optimizer states",
        "activations an image",
        "peak an image",
        f"peak at batch {batch}",
    )
    return Table(f"Memory of {model}", columns, tuple(rows), " ".join(notes))


def fit_table(fits: Sequence[Fit], answers: Sequence[dict[str, object]], batch: int, reserve: float, why: str) -> Table:
    kinds = [key for key in answers[0] if key not in ("gpu", "memory_gb")] if answers else []
    rows = []
    for answer in answers:
        cells = [str(answer["gpu"]), f"{answer['memory_gb']:g}"]
        for kind in kinds:
            most = int(str(answer[kind]))
            cells += ["yes" if most >= batch else "NO", f"{most:,}" if most else "none"]
        rows.append(tuple(cells))
    columns = ["GPU", "GB"]
    for kind in kinds:
        columns += [f"{kind} at {batch}", "largest batch"]
    return Table(
        "Does it fit?", tuple(columns), tuple(rows), f"{reserve:g} GB are kept for {why}. An estimate: leave some room."
    )
