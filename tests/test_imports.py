"""Imports go downward only, and what a user waits for at every call stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "gpudiag"

# What a part may import from the package besides itself; `*` is everything. Top-level modules stand for themselves.
BASE = {"errors", "units", "child", "intervals", "timeline", "bundle", "diagnosis"}
MAY_IMPORT = {
    "read": BASE - {"diagnosis"},
    "report": {"diagnosis", "comparison", "units", "errors"},
    "comparison": {"diagnosis"},
    "diagnosis": set(),
    "errors": set(),
    "child": set(),
    "units": set(),
    "intervals": set(),
    "timeline": {"intervals"},
    "bundle": {"errors", "diagnosis"},
}


@cache
def imported(file: Path) -> set[str]:
    """The first part below `gpudiag` of every import of a module, wherever it stands in it; `` for the package itself."""
    here = file.relative_to(PACKAGE.parent).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join([*(here[: -node.level] if node.level else ()), *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("gpudiag.")}
    return found


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if "templates" not in file.parts]


def test_imports_go_downward_only() -> None:
    wrong = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in files()
        if part_of(file) in MAY_IMPORT
        for name in sorted(imported(file) - MAY_IMPORT[part_of(file)] - {part_of(file), "__version__"})
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("part", "users"),
    [
        ("commands", {"cli"}),
        ("cli", {"__main__"}),
        ("report", {"cli", "commands", "bench", "perfetto"}),
        ("pipeline", {"commands", "bench"}),
    ],
)
def test_a_part_near_the_user_is_imported_by_no_part_below_it(part: str, users: set[str]) -> None:
    assert {part_of(file) for file in files() if part in imported(file)} <= users | {part}


def test_torch_and_pandas_are_imported_inside_functions_only() -> None:
    heavy = ("torch", "torchvision", "pandas", "sqlite_utils", "onnx", "onnxruntime")
    wrong = []
    for file in files():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [str(node.module)]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            wrong += [f"{file.relative_to(PACKAGE)}: {name}" for name in names if name.split(".")[0] in heavy]
    assert not wrong


@pytest.mark.parametrize("arguments", [["--help"], ["analyze", "--help"], ["report", "--help"]])
def test_help_imports_neither_torch_nor_pandas(arguments: list[str]) -> None:
    assert not loaded_by(arguments) & {"torch", "pandas", "numpy", "rich", "jinja2"}


def test_analyze_imports_neither_torch_nor_pandas(traces: Path) -> None:
    pytest.importorskip("gpudiag.pipeline")
    recording = traces / "kineto" / "v100_resnet50_workers0.json.gz"
    assert not loaded_by(["analyze", str(recording)]) & {"torch", "pandas"}


def loaded_by(arguments: list[str]) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after one call of the command line."""
    program = (
        "import sys\nfrom gpudiag.cli import main\ncode = 0\n"
        f"try:\n    main({arguments!r}, prog_name='gpudiag')\nexcept SystemExit as end:\n    code = end.code\n"
        "print('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())
