"""A training that never ends is judged while it runs on, and once more when somebody ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_profile import clean_environment

from gpudiag.bundle import read_bundle
from gpudiag.collect import early
from gpudiag.diagnosis import from_json
from gpudiag.read.nsys_report import find_nsys

ENDLESS = """
import time, torch
net = torch.nn.Linear(64, 64); opt = torch.optim.SGD(net.parameters(), lr=0.1)
while True:
    opt.zero_grad(); net(torch.randn(32, 64)).sum().backward(); opt.step(); time.sleep(0.01)
"""
RUNS_ON = "the script still ran when this was judged"


def wait_for(done: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.live
@pytest.mark.parametrize("recorder", ["torch", pytest.param("nsys", marks=pytest.mark.nsys)])
def test_a_training_that_never_ends_has_its_reports_while_it_runs_on(tmp_path: Path, recorder: str) -> None:
    pytest.importorskip("torch")
    if recorder == "nsys" and find_nsys() is None:
        pytest.skip("nsys is not installed")
    (tmp_path / "train.py").write_text(ENDLESS)
    options = ["--no-save", "--with", recorder, "-o", "b", "--json", "r.json", "--html", "r.html", "--markdown", "-"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gpudiag", "profile", *options, "train.py"],
        cwd=tmp_path,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        wait_for((tmp_path / "r.html").exists, process)  # the last to be written
        first = from_json((tmp_path / "r.json").read_bytes())
        assert first == from_json((tmp_path / "b/diagnosis.json").read_bytes())
        assert first.steps.count >= 15
        assert first.verdict.status != "cannot_judge"
        assert any(RUNS_ON in warning for warning in first.warnings)
        assert (tmp_path / "r.html").read_text().rstrip().endswith("</html>")
        assert read_bundle(tmp_path / "b").manifest.exit_code is None
        assert process.poll() is None
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143
    assert out.count(b"# ") >= 1 and out.startswith(b"#")  # one report on stdout, not two
    last = from_json((tmp_path / "r.json").read_bytes())
    assert last == from_json((tmp_path / "b/diagnosis.json").read_bytes())
    assert not any(RUNS_ON in warning for warning in last.warnings)
    assert any("SIGTERM" in warning for warning in last.warnings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "r.html", "r.json", "train.py"]
    assert len(json.loads((tmp_path / "b/manifest.json").read_text())["captures"]) == 1


def judging(tmp_path: Path, code: str) -> early.Early:
    return early.Early(lambda: True, lambda wall_s: [sys.executable, "-c", code, str(tmp_path / "began")])


def test_a_script_that_ends_soon_after_its_window_is_not_judged_twice(tmp_path: Path) -> None:
    judge = judging(tmp_path, "import sys; open(sys.argv[1], 'w')")
    judge.look()
    judge.end()
    assert not judge.judged
    assert not (tmp_path / "began").exists()


def test_a_report_that_is_not_done_when_the_script_ends_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "AFTER_S", 0.0)
    judge = judging(tmp_path, "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)")
    judge.look()
    while not (tmp_path / "began").exists() or not (tmp_path / "began").read_text():
        time.sleep(0.02)
    judge.look()  # one is enough
    began = time.monotonic()
    judge.end()
    assert time.monotonic() - began < 4
    assert not judge.judged
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "began").read_text()), 0)
