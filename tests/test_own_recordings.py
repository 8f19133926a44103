"""The whole analysis on recordings of our own samples, which every clone has."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpudiag.cli import main

DATA = Path(__file__).parent / "data"


@pytest.fixture(params=["slow_loader_torch", "slow_loader_nsys"])
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with zipfile.ZipFile(DATA / f"{request.param}.zip") as packed:
        packed.extractall(tmp_path)
    (found,) = [path.parent for path in tmp_path.rglob("manifest.json")]
    return found


def test_a_slow_loader_is_named_with_its_line_and_the_workers_that_would_do(bundle: Path) -> None:
    done = CliRunner().invoke(main, ["analyze", str(bundle), "--json", "-"])
    assert done.exit_code == 0, done.output
    diagnosis = json.loads(done.stdout)
    assert diagnosis["verdict"]["bound_by"] == "input"
    first = next(finding for finding in diagnosis["findings"] if not finding["caused_by"])
    assert first["rule"] == "loader_workers_zero"
    assert first["where"].endswith("slow.py:38")
    assert first["fixes"][0]["code"].count("num_workers=2") == 1, "as many as the machine had CPUs"
    (account,) = diagnosis["accounts"]
    assert account["device"] == -1
    assert sum(account["parts"].values()) == account["total_ns"]
    assert account["parts"]["host.input"] > 0.5 * account["total_ns"]


def test_what_needs_a_gpu_is_not_called_healthy(bundle: Path) -> None:
    done = CliRunner().invoke(main, ["analyze", str(bundle), "--json", "-"])
    diagnosis = json.loads(done.stdout)
    assert diagnosis["metrics"]["gpu_busy"]["missing"]
    assert diagnosis["rules"]["exposed_copy"] in ("not_judged", "clear")
    assert diagnosis["devices"] == []
