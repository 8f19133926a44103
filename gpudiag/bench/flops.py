"""FLOPs, multiply-adds and bytes of a model, operation by operation, with torch's own formulas.

A multiply-add (MAC) is two floating-point operations (FLOP): ResNet-50 at 224 x 224 has about 4.1 G MAC (often printed as
"4.1 GFLOPs") and so 8.2 GFLOP. Here `macs` and `flops` are always said by name, and flops = 2 x macs.

The formulas cover convolutions, matrix products and attention; elementwise work counts no FLOPs, as in torch.utils.flop_counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from gpudiag.bench.models import ModelSpec, call, loss_of, sample
from gpudiag.bench.result import FlopCount, OpKind

CONV, MATMUL, ATTENTION, OTHER = "convolution", "matmul", "attention", "other"
COUNT_BATCH = 2  # one image would do, but batch norm in training refuses a single value per channel


@dataclass
class Counted:
    """What one pass did. ops: (kind, flops, bytes) of every operation that is not a view."""

    ops: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def flops(self) -> int:
        return sum(flops for _, flops, _ in self.ops)

    @property
    def bytes(self) -> int:
        return sum(size for _, _, size in self.ops)

    def kinds(self, batch: int) -> dict[str, OpKind]:
        """Per image, by kind, largest FLOPs first."""
        totals: dict[str, list[int]] = {}
        for kind, flops, size in self.ops:
            row = totals.setdefault(kind, [0, 0, 0])
            row[0] += flops
            row[1] += size
            row[2] += 1
        rows = sorted(totals.items(), key=lambda item: (-item[1][0], item[0]))
        return {kind: OpKind(row[0] // batch, row[1] // batch, row[2]) for kind, row in rows}


@contextmanager
def counting() -> Iterator[Counted]:
    """Counts every operation dispatched in the block, forward and backward."""
    counted = Counted()
    with _mode(counted):
        yield counted


def _mode(counted: Counted) -> AbstractContextManager[Any]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    formulas = _formulas()

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if (
                func not in formulas
                and func._overloadpacket not in formulas
                and func is not torch.ops.prim.device.default
            ):
                with self:  # composite operations (linear in inference mode) are taken apart, as FlopCounterMode does
                    parts = func.decompose(*args, **kwargs)
                    if parts is not NotImplemented:
                        return parts
            out = func(*args, **kwargs)
            formula = formulas.get(func._overloadpacket)
            if func.is_view or _is_alias(func):
                return out
            flops = int(formula(*args, **kwargs, out_val=out)) if formula else 0
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            counted.ops.append((_kind(func), flops, sum(t.numel() * t.element_size() for t in tensors)))
            return out

    return Mode()


def _formulas() -> dict[Any, Callable[..., int]]:
    """torch's registry with two corrections (torch 2.14):

    - it lacks the CPU's fused attention: ViT-Ti loses 14 % of its FLOPs without it;
    - its weight gradient of a convolution leaves out `groups`: a depthwise layer counts channels times too much, and training
      MobileNetV3 came out at 27 times the forward pass. Both gradients of a convolution cost what its forward pass costs.
    """
    import torch
    from torch.utils.flop_counter import conv_flop_count, flop_registry, sdpa_flop_count

    formulas: dict[Any, Callable[..., int]] = dict(flop_registry)

    def attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))

    def attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
        # the scores again (it recomputes them), then four products: 2.5 times the forward (torch counts its other backends so)
        return int(sdpa_flop_count(query.shape, key.shape, value.shape)) * 5 // 2

    def convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any, out_val: Any = None, **__: Any) -> int:
        # (bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask)
        forward = conv_flop_count(x.shape, weight.shape, grad.shape, transposed=rest[4])
        return int(forward) * (bool(rest[7][0]) + bool(rest[7][1]))

    aten = torch.ops.aten
    formulas[aten.convolution_backward] = convolution_backward
    formulas.setdefault(aten._scaled_dot_product_flash_attention_for_cpu, attention)
    formulas.setdefault(aten._scaled_dot_product_flash_attention_for_cpu_backward, attention_backward)
    return formulas


def _is_alias(func: Any) -> bool:
    return func._overloadpacket.__name__ in ("detach", "_unsafe_view", "lift_fresh", "_reshape_alias", "alias", "empty")


def _kind(func: Any) -> str:
    name = func._overloadpacket.__name__
    if "conv" in name:
        return CONV
    if "attention" in name:
        return ATTENTION
    if name in ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "linear"):
        return MATMUL
    return OTHER


def count_model(model: Any, spec: ModelSpec, batch: int, seed: int) -> FlopCount:
    """FLOPs of one image forward (inference) and of a training step per image, by running both on the CPU.

    bytes at `batch`: weights are read once a batch, activations once an image; measured at two batches and scaled.
    """
    import torch

    inputs, targets = sample(spec, COUNT_BATCH, seed)
    was_training = model.training
    model.eval()
    with torch.no_grad(), counting() as forward:
        output = call(model, inputs)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    sizes = [t.numel() * t.element_size() for t in tensors_of(inputs)] + [
        t.numel() * t.element_size() for t in tensors_of(output)
    ]
    model.train()
    with counting() as both:
        loss_of(call(model, inputs), targets, seed).backward()
    training = both.flops // COUNT_BATCH
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    flops = forward.flops // COUNT_BATCH
    # forward.bytes = weights' traffic + COUNT_BATCH x activations' traffic; each weight is read once
    per_image = max(0, forward.bytes - weights) // COUNT_BATCH
    bytes_ops = weights // batch + per_image
    bytes_least = weights // batch + sum(sizes) // COUNT_BATCH
    return FlopCount(
        macs_forward=flops // 2,
        flops_forward=flops,
        flops_training=training,
        batch=batch,
        bytes_ops=bytes_ops,
        bytes_least=bytes_least,
        intensity_ops=flops / bytes_ops if bytes_ops else 0.0,
        intensity_least=flops / bytes_least if bytes_least else 0.0,
        kinds=forward.kinds(COUNT_BATCH),
        counter=f"torch.utils.flop_counter formulas, torch {torch.__version__}",
    )


def tensors_of(value: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
