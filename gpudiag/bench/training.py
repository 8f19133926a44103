"""One training step end to end, and its rate: loading, copy, forward, backward, update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpudiag.bench import modes
from gpudiag.bench.data import batches, describe
from gpudiag.bench.job import Job, spec_of
from gpudiag.bench.loop import Loop
from gpudiag.bench.models import call, loss_of, move
from gpudiag.bench.result import MeasuringRules, Training


class TrainingStep:
    """Loading, copy, forward, backward, update. Losses stay on the device until the end: reading one would wait for it."""

    def __init__(self, job: Job, model: Any, prepared: Any) -> None:
        import torch

        rules = job.rules
        self.job, self.prepared = job, prepared
        self.kind = job.device.split(":")[0]
        self.precision = modes.precision_of(job.mode, job.device, rules.amp_dtype)
        self.optimizer = make_optimizer(rules, model.parameters())
        self.scaler = torch.amp.GradScaler(self.kind, enabled=self.precision.scale_loss)
        self.batches: Iterator[tuple[Any, Any]] = batches(spec_of(job), rules, job.batch, pin=self.kind == "cuda")
        self.losses: list[Any] = []
        self.steps_skipped = 0

    def __call__(self) -> None:
        inputs, targets = next(self.batches)
        inputs = move(inputs, self.job.device, non_blocking=True)
        targets = move(targets, self.job.device, non_blocking=True)
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision.context(self.kind):
            loss = loss_of(call(self.prepared, inputs), targets, self.job.rules.seed)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        if self.precision.scale_loss:
            before = self.scaler.get_scale()
            self.scaler.update()
            self.steps_skipped += self.scaler.get_scale() < before  # the scale falls exactly when a step was skipped
        self.losses.append(loss.detach())

    def loss_values(self) -> list[float]:
        import torch

        return [float(value) for value in torch.stack(self.losses).float().cpu()] if self.losses else []


def make_optimizer(rules: MeasuringRules, parameters: Any) -> Any:
    """sgd has momentum 0.9, as torchvision's reference recipes. Raises KeyError for a name that the command did not check."""
    import torch

    kinds: dict[str, Callable[..., Any]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=rules.learning_rate, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=rules.learning_rate),
        "adamw": lambda p: torch.optim.AdamW(p, lr=rules.learning_rate),
    }
    return kinds[rules.optimizer](parameters)


def measure_training(loop: Loop, step: TrainingStep, rules: MeasuringRules) -> Training:
    before, skipped = len(step.losses), step.steps_skipped
    rate = loop.throughput(step, step.job.batch, rules.train_iterations)
    losses = step.loss_values()[before:]
    bad = sum(not -float("inf") < loss < float("inf") for loss in losses)
    finite = [loss for loss in losses if -float("inf") < loss < float("inf")]
    return Training(
        batch=step.job.batch,
        images_per_s=rate,
        losses=len(losses),
        losses_not_finite=bad,
        steps_skipped=step.steps_skipped - skipped,
        first_loss=finite[0] if finite else None,
        last_loss=finite[-1] if finite else None,
        data=describe(rules),
    )
