"""Warnings that torch's C code raises are about the line of the script that called it, as they are without gpudiag."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_profile import clean_environment, plain, profiled

pytest.importorskip("torch")
pytestmark = pytest.mark.live

SCRIPT = """
import sys, traceback, warnings
import torch

if sys.argv[1] == "by module":
    warnings.filterwarnings("error", module="__main__")
torch.set_warn_always(True)  # the filters decide what is said again, not torch
z = torch.ones(3, dtype=torch.complex64)
mask = torch.ones(3, dtype=torch.uint8)


def loss():
    return torch.nn.Linear(4, 1)(torch.ones(2, 4)).sum()


def say(what):
    try:
        what()
    except Exception:
        traceback.print_exc()


for _ in range(2):  # a line is told of once
    say(lambda: float(loss()))
    say(lambda: int(loss()))
    say(lambda: bool(loss()))
    say(lambda: complex(loss()))
    say(lambda: loss().item())
    say(lambda: z.to(torch.float32))
    say(lambda: torch.zeros(3).copy_(z))
    say(lambda: torch.zeros(3).__setitem__(mask, torch.ones(3)))
    say(lambda: loss().numpy())
    say(lambda: float(torch.ones(2)))
if len(sys.argv) > 2:
    float(loss())  # an error, then, that ends the script
"""


@pytest.mark.parametrize(
    ("words", "filters"),
    [
        (["once a line"], ""),
        (["every time"], "always"),
        (["as errors", "and end"], "error"),
        (["by module", "and end"], ""),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_warning_of_c_code_is_about_the_scripts_line(words: list[str], filters: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert "PYTHONWARNINGS" not in clean_environment()
    expected = plain(["train.py", *words], tmp_path, PYTHONWARNINGS=filters)
    got = profiled(["train.py", *words], tmp_path, tmp_path, "--no-save", PYTHONWARNINGS=filters)
    assert (got.code, got.out) == (expected.code, expected.out)
    assert got.own_words == expected.err
    assert expected.code == int("and end" in words)
    assert "UserWarning: Converting a tensor" in expected.err and "UserWarning: Casting complex" in expected.err
