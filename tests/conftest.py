"""What several test files need: the shared recordings, and a clean environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("GPUDIAG_SHARED", Path(__file__).resolve().parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared recordings, scripts and cases; a user's clone has none."""
    if not (SHARED / "traces" / "REFERENCE.tsv").is_file():
        pytest.skip(f"no shared recordings at {SHARED} (set GPUDIAG_SHARED)")
    return SHARED


@pytest.fixture(scope="session")
def traces(shared: Path) -> Path:
    return shared / "traces"


@pytest.fixture(autouse=True)
def _private_history(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes to the user's own run history."""
    monkeypatch.setenv("GPUDIAG_DB", str(tmp_path_factory.mktemp("history") / "runs.db"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that runs a real script for seconds gets a second try: what else runs on the machine is not in its hands."""
    for item in items:
        if item.get_closest_marker("live") is not None:
            item.add_marker(pytest.mark.flaky(reruns=1))
