"""Modules of ours in processes of their own."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])


def own_module(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of this very package, whatever else is called gpudiag in the working directory
    or on PYTHONPATH: a script of the user's that is called gpudiag.py would be taken for it by `python -m`."""
    code = (
        f"import sys; sys.path.insert(0, {_ROOT!r}); import gpudiag; del sys.path[0]; import runpy;"
        f" runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", code, *arguments]
