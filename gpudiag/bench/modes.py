"""eager, amp, compile, compile+amp: what each changes around the same model, and whether its outputs still agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from gpudiag.bench.models import call
from gpudiag.bench.result import Agreement, MeasuringRules, Mode
from gpudiag.errors import GpudiagError


@dataclass(frozen=True)
class Precision:
    """name: fp32, bf16 or fp16. scale_loss: fp16 gradients underflow without it; bf16 has the range of fp32."""

    name: str
    scale_loss: bool

    def context(self, device_type: str) -> AbstractContextManager[Any]:
        if self.name == "fp32":
            return nullcontext()
        import torch

        dtype = torch.bfloat16 if self.name == "bf16" else torch.float16
        return torch.autocast(device_type, dtype=dtype)  # type: ignore[no-any-return]


def precision_of(mode: Mode, device: str, asked: str) -> Precision:
    """asked: auto, bf16 or fp16. auto is bf16 where the hardware has it (every CPU by emulation or AMX/AVX512-BF16; GPUs from Ampere)."""
    if "amp" not in mode:
        return Precision("fp32", False)
    if asked not in ("auto", "bf16", "fp16"):
        raise GpudiagError(f"--amp-dtype {asked}: not known", "take auto, bf16 or fp16")
    if asked == "auto":
        import torch

        has_bf16 = device == "cpu" or torch.cuda.get_device_capability(device)[0] >= 8
        asked = "bf16" if has_bf16 else "fp16"
    return Precision(asked, asked == "fp16")


def is_compiled(mode: Mode) -> bool:
    return mode.startswith("compile")


def prepare(model: Any, mode: Mode) -> Any:
    """The callable to measure. dynamic=False: each batch size gets its own code, as a deployment at that size would."""
    if not is_compiled(mode):
        return model
    import torch

    return torch.compile(model, dynamic=False)


def forward(model: Any, inputs: Any, precision: Precision, device_type: str) -> Any:
    with precision.context(device_type):
        return call(model, inputs)


def compile_seconds(step: Callable[[], object], time_once: Callable[[Callable[[], object]], int]) -> float:
    """Wall time of the first call less a steady one (the third), in seconds: tracing, code generation and the compiler."""
    first = time_once(step)
    time_once(step)
    steady = time_once(step)
    return max(0, first - steady) / 1e9


def agreement(output: Any, reference: Any, mode: Mode, rules: MeasuringRules) -> Agreement:
    """max |a - b| / max |b| over the first tensor of the output, against eager fp32. A result that is not finite never agrees."""
    from gpudiag.bench.flops import tensors_of

    got, wanted = tensors_of(output)[0].detach().float(), tensors_of(reference)[0].detach().float()
    tolerance = rules.tolerance_low if "amp" in mode else rules.tolerance_fp32
    scale = float(wanted.abs().max())
    error = float((got - wanted).abs().max()) / scale if scale else float((got - wanted).abs().max())
    return Agreement(error if math.isfinite(error) else None, tolerance, error <= tolerance)  # a NaN compares false
