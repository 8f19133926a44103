"""Does a model train or serve in a GPU's memory? A dry run counts every tensor on a fake device: nothing is computed, so it costs
neither the memory nor the time, and it counts what PyTorch would ask its allocator for (within 0.1 % of a real run, see the tests).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec

from gpudiag.bench.models import ModelSpec, build_model, call, loss_of, move, sample
from gpudiag.errors import GpudiagError

RESERVE_GB = 1.0
RESERVE_WHY = "CUDA context, cuDNN and cuBLAS workspaces, fragmentation"
BATCHES = (4, 16, 64)  # the outer two make the line, the middle one says whether it is one; a fake batch costs nothing


class Footprint(msgspec.Struct, frozen=True):
    """Bytes of one training or inference step at `batch`. peak: the most that is alive at one moment of forward and backward,
    step_peak: of the optimizer's step, which works without activations but with copies of its own. The parts need not add up to
    either, since activations are freed while gradients appear. activations: saved for backward, without weights."""

    batch: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    inputs: int
    peak: int
    step_peak: int = 0


class Fit(msgspec.Struct, frozen=True):
    """peak(batch) = the larger of fixed + per_image x batch (forward and backward) and step_fixed + step_per_image x batch (the
    optimizer's step). linear: the middle point lies on its line within 2 %."""

    what: str
    precision: str
    optimizer: str
    device: str
    points: tuple[Footprint, ...]
    fixed: float
    per_image: float
    linear: bool
    step_fixed: float = 0.0
    step_per_image: float = 0.0

    def peak_at(self, batch: int) -> float:
        return max(self.fixed + self.per_image * batch, self.step_fixed + self.step_per_image * batch)


class _Live:
    """Bytes of all storages that are alive, and their peak: storages are seen when an operation returns them, and leave by weak
    reference."""

    def __init__(self) -> None:
        self.seen: dict[int, Any] = {}
        self.now = 0
        self.peak = 0

    def add(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.seen:
            return
        size = storage.nbytes()

        def gone(_: object, key: int = key, size: int = size) -> None:
            self.seen.pop(key, None)
            self.now -= size

        self.seen[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def watching(self) -> AbstractContextManager[Any]:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        live = self

        class Mode(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                for leaf in tree_leaves(out):
                    if isinstance(leaf, torch.Tensor):
                        live.add(leaf)
                return out

        return Mode()


def dry_run(
    spec: ModelSpec, batch: int, precision: str, optimizer: str, training: bool, device: str = "cpu", fake: bool = True
) -> Footprint:
    """Two steps (the optimizer's states exist from the first on); the second is counted. fake=False runs it for real.

    Raises GpudiagError when the model reads values of its tensors (`.item()`, data-dependent branches): there are none.
    """
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    try:
        with warnings.catch_warnings():
            # torch looks for CUDA (fake tensors, the first backward pass) and warns of an old driver: nothing to a dry run
            warnings.simplefilter("ignore")
            # a served model holds its weights in the low precision; training keeps them in fp32 (autocast)
            model = _model(spec, mode, device, None if training else low)
            with mode or _nothing():
                inputs, targets = move(sample(spec, batch, 0), device)
                if low is not None and not training:
                    inputs = _cast(inputs, low)
                return _steps(model, inputs, targets, batch, precision, optimizer, training, device)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise GpudiagError(
            f"{spec.name}: its forward pass depends on values ({error}), which a dry run does not have",
            "measure it: gpudiag bench --model ... --sweep training",
        ) from error
    finally:
        torch.compiler.reset()


def _model(spec: ModelSpec, mode: Any, device: str, dtype: Any) -> Any:
    """Built for real on the CPU, since initialisers read values; its tensors are then replaced by fake ones of the same shape."""
    model = build_model(spec, 0)
    if dtype is not None:
        model = model.to(dtype)
    if mode is None:
        return model.to(device)
    import torch

    with mode:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    fake = torch.empty_like(mode.from_tensor(parameter), device=device)
                    module._parameters[name] = torch.nn.Parameter(fake, parameter.requires_grad)
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(mode.from_tensor(buffer), device=device)
    return model


def _steps(
    model: Any, inputs: Any, targets: Any, batch: int, precision: str, optimizer: str, training: bool, device: str
) -> Footprint:
    import torch

    from gpudiag.bench.flops import tensors_of

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    weights = [*model.parameters(), *model.buffers()]
    live = _Live()
    for tensor in [*weights, *tensors_of(inputs), *tensors_of(targets)]:
        live.add(tensor)
    saved: dict[int, int] = {}
    known = {tensor.untyped_storage()._cdata for tensor in weights}

    def pack(tensor: Any) -> Any:
        key = tensor.untyped_storage()._cdata
        if key not in known and key not in saved:
            saved[key] = tensor.untyped_storage().nbytes()
        return tensor

    sizes = {"weights": _bytes(weights), "inputs": _bytes(tensors_of(inputs))}
    if not training:
        model.eval()
        with torch.no_grad(), live.watching():
            call(model, inputs)
        return Footprint(batch, sizes["weights"], 0, 0, 0, sizes["inputs"], live.peak)
    model.train()
    stepper = _optimizer(optimizer, model.parameters())
    autocast = precision in dtypes
    with live.watching():
        for number in range(2):
            live.peak = live.now
            saved.clear()
            stepper.zero_grad(set_to_none=True)
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor) if number else _nothing(),
                torch.autocast(device.split(":")[0], dtype=dtypes[precision]) if autocast else _nothing(),
            ):
                loss = loss_of(call(model, inputs), targets, 0)
            loss.backward()
            del loss
            backward_peak, live.peak = live.peak, live.now
            stepper.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    states = [value for state in stepper.state.values() for value in tensors_of(list(state.values()))]
    return Footprint(
        batch,
        sizes["weights"],
        _bytes(gradients),
        _bytes(states),
        sum(saved.values()),
        sizes["inputs"],
        backward_peak,
        live.peak,
    )


def _bytes(tensors: Any) -> int:
    """Of distinct storages: tied weights count once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _cast(value: Any, dtype: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map

    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, value)


def _optimizer(name: str, parameters: Any) -> Any:
    """foreach=True is torch's default on CUDA; it is faster and holds more copies than the loop that is the CPU's default."""
    import torch

    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True)
    kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=0.01, foreach=True)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def measure_fit(spec: ModelSpec, precision: str, optimizer: str, training: bool) -> Fit:
    """The line through two dry runs, and a third that says whether it is one."""
    low, middle, high = (dry_run(spec, batch, precision, optimizer, training) for batch in BATCHES)
    return line_of(
        (low, middle, high),
        "training" if training else "serving",
        precision,
        optimizer if training else "",
        "cpu operators",
    )


def line_of(
    points: tuple[Footprint, Footprint, Footprint], what: str, precision: str, optimizer: str, device: str
) -> Fit:
    first, between, last = points
    apart = last.batch - first.batch
    slope = (last.peak - first.peak) / apart
    fixed = first.peak - slope * first.batch
    step_slope = (last.step_peak - first.step_peak) / apart
    linear = abs(fixed + slope * between.batch - between.peak) <= 0.02 * between.peak
    return Fit(
        what,
        precision,
        optimizer,
        device,
        points,
        fixed,
        slope,
        linear,
        first.step_peak - step_slope * first.batch,
        step_slope,
    )


def largest_batch(fit: Fit, memory_bytes: float) -> int:
    """The largest batch whose peak fits; 0 when not even one image does."""
    if fit.peak_at(1) > memory_bytes:
        return 0
    largest = 1 << 20  # more than anyone asks
    for fixed, per_image in ((fit.fixed, fit.per_image), (fit.step_fixed, fit.step_per_image)):
        if per_image > 0:
            largest = min(largest, int((memory_bytes - fixed) / per_image))
    return largest


def real_peak(spec: ModelSpec, precision: str, optimizer: str, batch: int) -> tuple[str, int]:
    """(GPU, allocated bytes at the peak) of a few real training steps. Raises JobError or GpudiagError where that fails."""
    import torch

    from gpudiag.bench.job import Job, run_job
    from gpudiag.bench.result import QUICK

    rules = msgspec.structs.replace(QUICK, batch=batch, optimizer=optimizer, rounds=1)
    rules = rules if precision == "fp32" else msgspec.structs.replace(rules, amp_dtype=precision)
    job = Job(
        task="mode",
        model=spec.name,
        input_shape=spec.input_shape,
        sample_batch=spec.sample_batch,
        device="cuda:0",
        mode="eager" if precision == "fp32" else "amp",
        rules=rules,
        threads=1,
        batch=batch,
        parts=("training",),
    )
    found = run_job(job, lambda text: None).mode
    if found is None or found.training_memory is None or found.training_memory.allocated is None:
        why = found.failed.get("training", "no figure") if found else "no figure"
        raise GpudiagError(f"{spec.name} at batch {batch} on the GPU: {why}", "try a smaller --batch")
    return str(torch.cuda.get_device_name(0)), found.training_memory.allocated


def usable_bytes(memory_gb: float, reserve_gb: float = RESERVE_GB) -> float:
    """Data-sheet gigabytes read as 10^9 bytes, which is below what boards report (a "24 GB" board has 23.0 to 25.8 x 10^9 bytes,
    the low end with ECC on GDDR6), less the reserve."""
    return max(0.0, (memory_gb - reserve_gb) * 1e9)
