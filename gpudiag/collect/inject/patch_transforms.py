"""Time in a dataset's transforms: all of a Compose in each fetch, and on request each transform in it.

Patched on the classes when the script (or a spawned worker) imports them; counted only while a batch is being fetched.
"""

from __future__ import annotations

import functools
import time
from types import ModuleType
from typing import Any, Callable, Dict, List, Tuple

from .fetches import Fetches
from .imports import PostImport
from .patch_torch import forget

# module -> (class, method that applies all of its `transforms` one after the other to one sample)
COMPOSED: Dict[str, Tuple[str, str]] = {
    "torchvision.transforms.transforms": ("Compose", "__call__"),
    "torchvision.transforms.v2._container": ("Compose", "forward"),
    "albumentations.core.composition": ("Compose", "__call__"),
    "monai.transforms.compose": ("Compose", "__call__"),
}
APART = (
    "torchvision.transforms.transforms",
    "torchvision.transforms.v2._container",
)  # they only loop over `transforms`


def install(imports: PostImport, fetches: Fetches, each: bool) -> None:
    """each: time every transform by itself, where the class is known to do nothing but call them in order."""
    for module in COMPOSED:
        imports.when(module, lambda loaded, name=module: _patch(loaded, name, fetches, each))


def _patch(module: ModuleType, name: str, fetches: Fetches, each: bool) -> None:
    kind_name, method = COMPOSED[name]
    kind = getattr(module, kind_name, None)
    original = getattr(kind, method, None)
    if original is not None:
        setattr(kind, method, _timed(original, fetches, each and name in APART))


def _timed(original: Callable[..., Any], fetches: Fetches, each: bool) -> Callable[..., Any]:
    depth = [0]  # a Compose within a Compose counts once

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if depth[0] or not fetches.fetching():
            try:
                return original(self, *args, **kwargs)
            except BaseException as error:
                forget(error)
                raise
        depth[0] += 1
        began = time.monotonic_ns()
        try:
            return original(_Apart(self, fetches) if each else self, *args, **kwargs)
        except BaseException as error:
            forget(error)
            raise
        finally:
            depth[0] -= 1
            fetches.transformed("", time.monotonic_ns() - began)

    return wrapper


class _Apart:
    """Stands for a Compose in a call of its own method: the same, with transforms that time themselves."""

    def __init__(self, whole: Any, fetches: Fetches) -> None:
        self._whole = whole
        self.transforms: List[Callable[..., Any]] = [_one(transform, fetches) for transform in whole.transforms]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)


def _one(transform: Callable[..., Any], fetches: Fetches) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.monotonic_ns()
        try:
            return transform(*args, **kwargs)
        except BaseException as error:
            forget(error)
            raise
        finally:
            fetches.transformed(name_of(transform), time.monotonic_ns() - began)

    return call


def name_of(transform: Any) -> str:
    """`RandomResizedCrop`; `augment` of a function and of Lambda(augment)."""
    inner = getattr(transform, "lambd", transform)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))
