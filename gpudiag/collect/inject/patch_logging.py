"""Logging and checkpoint calls of common libraries as phases, each patched when the script imports it."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, Tuple

from .imports import PostImport
from .patch_torch import phase
from .tracker import Tracker

# module -> ((class or "" for the module itself, names), phase)
CALLS: Dict[str, Tuple[str, Tuple[str, ...], str]] = {
    "logging": ("Logger", ("handle",), "log"),
    "torch.utils.tensorboard.writer": (
        "SummaryWriter",
        ("add_scalar", "add_scalars", "add_histogram", "add_image", "add_images", "add_figure", "add_text", "flush"),
        "log",
    ),
    "wandb.sdk.wandb_run": ("Run", ("log",), "log"),
    "mlflow.tracking.fluent": ("", ("log_metric", "log_metrics"), "log"),
    "safetensors.torch": ("", ("save_file", "save_model"), "checkpoint"),
    "torch.distributed.checkpoint.state_dict_saver": ("", ("save",), "checkpoint"),
}


def install(imports: PostImport, tracker: Tracker) -> None:
    for module in CALLS:
        imports.when(module, lambda loaded, name=module: _patch(loaded, CALLS[name], tracker))


def _patch(module: ModuleType, call: Tuple[str, Tuple[str, ...], str], tracker: Tracker) -> None:
    owner: Any = getattr(module, call[0], None) if call[0] else module
    for name in call[1]:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, phase(tracker, call[2], original, site=True))
