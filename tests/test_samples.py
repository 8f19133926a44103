"""Each sample is judged as its expect.toml says: the planted bottleneck is found, and what is not there is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpudiag.read.nsys_report import find_nsys

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
RULES = Path(__file__).resolve().parents[1] / "rules"


def expectations() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for file in sorted(SAMPLES.glob("*/expect.toml")):
        for variant, expected in tomllib.loads(file.read_text()).items():
            yield file.parent.name, variant, expected


CASES = list(expectations())


def test_every_sample_has_what_a_reader_needs_and_names_rules_that_exist() -> None:
    known = {file.stem for file in RULES.glob("*/*.toml")}
    assert CASES
    for name, variant, expected in CASES:
        assert (SAMPLES / name / f"{variant}.py").is_file()
        assert (SAMPLES / name / "README.md").read_text().startswith(f"# {name}\n")
        assert set(expected) <= {"must_find", "must_not_find", "bound_by", "needs"}
        assert expected.get("needs") in (None, "gpu")
        named = {*expected["must_find"], *expected["must_not_find"]}
        assert named <= known, named - known
        assert not set(expected["must_find"]) & set(expected["must_not_find"])


def judged(name: str, variant: str, tmp_path: Path, recorder: str) -> tuple[dict[str, Any], str]:
    """The diagnosis of a sample that is profiled here and now, and what gpudiag said."""
    target = tmp_path / "diagnosis.json"
    command = [sys.executable, "-m", "gpudiag", "profile", "--with", recorder, "-o", str(tmp_path / "bundle")]
    done = subprocess.run(
        [*command, "--json", str(target), str(SAMPLES / name / f"{variant}.py")],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        check=True,
    )
    return json.loads(target.read_text()), done.stderr.decode()


def hold(diagnosis: dict[str, Any], expected: dict[str, Any], said: str) -> None:
    found = {finding["rule"] for finding in diagnosis["findings"]}
    assert set(expected["must_find"]) <= found, said
    assert not found & set(expected["must_not_find"]), said
    if "bound_by" in expected:
        assert diagnosis["verdict"]["bound_by"] == expected["bound_by"], said


@pytest.mark.live
@pytest.mark.parametrize(("name", "variant", "expected"), CASES, ids=[f"{n}-{v}" for n, v, _ in CASES])
def test_a_sample_is_judged_as_expected(name: str, variant: str, expected: dict[str, Any], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver that is too old for this torch is no GPU either
        gpu = torch.cuda.is_available()
    if expected.get("needs") == "gpu" and not gpu:
        pytest.skip("this bottleneck exists on a GPU only, and there is none")
    diagnosis, said = judged(name, variant, tmp_path, "torch")
    hold(diagnosis, expected, said)


BASE = [case for case in CASES if case[0] in ("slow_loader", "healthy", "checkpoint_log")]


@pytest.mark.live
@pytest.mark.nsys
@pytest.mark.parametrize(("name", "variant", "expected"), BASE, ids=[f"{n}-{v}" for n, v, _ in BASE])
def test_a_base_sample_is_judged_the_same_from_an_nsys_recording(
    name: str, variant: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    if find_nsys() is None:
        pytest.skip("nsys is not installed")
    diagnosis, said = judged(name, variant, tmp_path, "nsys")
    assert diagnosis["source"]["recorder"].startswith("nsys"), said
    hold(diagnosis, expected, said)
