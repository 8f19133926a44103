"""Run something right after a module was imported for the first time, without importing it ourselves."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Callable, Dict, Optional, Sequence

Callback = Callable[[ModuleType], None]


class PostImport:
    """A finder at the head of sys.meta_path that lets the others find the module and lends its loader an epilogue."""

    def __init__(self) -> None:
        self._wanted: Dict[str, Callback] = {}

    def when(self, name: str, callback: Callback) -> None:
        """Call `callback(module)` after `name` was executed, or now when that has happened already."""
        module = sys.modules.get(name)
        if module is not None:
            callback(module)
        else:
            self._wanted[name] = callback

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        callback = self._wanted.get(name)
        if callback is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: Optional[ModuleSpec] = find(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    self._add_epilogue(name, spec.loader, callback)
                return spec
        return None

    def _add_epilogue(self, name: str, loader: Any, callback: Callback) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                del loader.exec_module
            except AttributeError:
                pass
            try:
                execute(module)
            except BaseException as error:
                error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
                raise
            # not earlier: find_spec alone (importlib.util.find_spec) imports nothing
            if self._wanted.pop(name, None) is not None:
                callback(module)

        try:
            loader.exec_module = exec_module
        except (
            AttributeError
        ):  # a loader with slots or a class used as its own loader (built-in modules): leave it alone
            pass
