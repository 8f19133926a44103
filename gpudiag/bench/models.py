"""The models: five from torchvision with random weights (nothing is downloaded), or the user's own function."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpudiag.errors import GpudiagError

BUILT_IN = ("resnet50", "resnet101", "mobilenet_v3_large", "efficientnet_b0", "vit_tiny_16")
IMAGE = (3, 224, 224)
CLASSES = 1000


@dataclass(frozen=True)
class ModelSpec:
    """name: a built-in or `package.module:function` returning an nn.Module. sample_batch: `module:function`, called with the
    batch size, returning inputs or (inputs, targets); without it inputs are random of `input_shape`."""

    name: str
    input_shape: tuple[int, ...] = IMAGE
    sample_batch: str = ""

    @property
    def weights(self) -> str:
        return "random, seeded" if self.name in BUILT_IN else f"as {self.name} returns them"


def check_spec(name: str, input_shape: tuple[int, ...] | None, sample_batch: str) -> ModelSpec:
    """Raises GpudiagError for an unknown name or a model of the user's without a way to make its input."""
    if name in BUILT_IN:
        return ModelSpec(name, input_shape or IMAGE, sample_batch)
    if ":" not in name:
        raise GpudiagError(
            f"--model {name}: not one of {', '.join(BUILT_IN)}", "name your own as package.module:function"
        )
    if input_shape is None and not sample_batch:
        raise GpudiagError(
            f"--model {name}: its input is not known", "add --input-shape 3,224,224 or --sample-batch module:function"
        )
    return ModelSpec(name, input_shape or (), sample_batch)


def build_model(spec: ModelSpec, seed: int) -> Any:
    """The module on the CPU in train mode. Same seed, same weights. Raises GpudiagError when the user's function cannot be used."""
    import torch

    torch.manual_seed(seed)
    if spec.name in BUILT_IN:
        return _built_in(spec.name)
    model = load_function(spec.name)()
    if not isinstance(model, torch.nn.Module):
        raise GpudiagError(
            f"{spec.name} returned {type(model).__name__}, not a torch.nn.Module", "return the model itself"
        )
    return model.train()


def _built_in(name: str) -> Any:
    import torchvision
    from torchvision.models.vision_transformer import VisionTransformer

    if name == "vit_tiny_16":
        # ViT-Ti/16 as in DeiT (Touvron et al. 2021, table 1): 12 layers, width 192, 3 heads, 5.7 M parameters. torchvision's
        # smallest ready-made one, vit_b_16, has 86 M and is not light.
        return VisionTransformer(
            image_size=224, patch_size=16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=CLASSES
        )
    return getattr(torchvision.models, name)(weights=None)


def load_function(reference: str) -> Callable[..., Any]:
    """`package.module:function`, looked up from the current folder too, as `python -m` would. Raises GpudiagError."""
    module_name, _, function = reference.partition(":")
    folder = os.getcwd()  # noqa: PTH109 - a str for sys.path
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = getattr(importlib.import_module(module_name), function)
    except ImportError as error:
        raise GpudiagError(f"{reference}: cannot import ({error})", "run in the folder where `import` works") from error
    except AttributeError as error:
        raise GpudiagError(
            f"{reference}: {module_name} has no {function!r}", "check the name after the colon"
        ) from error
    if not callable(found):
        raise GpudiagError(f"{reference} is not callable", "name a function that returns the model")
    return found  # type: ignore[no-any-return]


def sample(spec: ModelSpec, batch: int, seed: int) -> tuple[Any, Any]:
    """(inputs, targets or None) on the CPU for one batch, from the user's function or random numbers."""
    import torch

    if spec.sample_batch:
        made = load_function(spec.sample_batch)(batch)
        if isinstance(made, tuple) and len(made) == 2:
            return made
        return made, None
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *spec.input_shape, generator=generator), None


def loss_of(output: Any, targets: Any, seed: int) -> Any:
    """Cross entropy against given or random classes for logits [batch, classes]; a scalar output is the loss itself; else the mean
    square of the output. The choice does not change the cost of forward and backward beyond the last layer."""
    import torch

    if isinstance(output, dict):
        output = output.get("loss", next(iter(output.values())))
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, (tuple, list)):
        output = output[0]
    if output.ndim == 0:
        return output
    if output.ndim == 2:
        if targets is None or targets.dtype.is_floating_point:
            generator = torch.Generator().manual_seed(seed)
            targets = torch.randint(output.shape[1], (output.shape[0],), generator=generator).to(output.device)
        return torch.nn.functional.cross_entropy(output, targets)
    return output.float().square().mean()


def move(value: Any, device: str, non_blocking: bool = False) -> Any:
    """Tensors inside tuples, lists and dicts onto the device."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, (tuple, list)):
        return type(value)(move(item, device, non_blocking) for item in value)
    if isinstance(value, dict):
        return {key: move(item, device, non_blocking) for key, item in value.items()}
    return value


def call(model: Any, inputs: Any) -> Any:
    """One tensor or tuple is positional, a dict is keywords: the ways models take their input."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)
