"""Real training under `gpudiag profile`: the same result to the last bit, several ranks, and ends at any moment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_profile import both, clean_environment, profiled, run

from gpudiag.bundle import is_bundle, read_bundle
from gpudiag.diagnosis import from_json
from gpudiag.report import html, markdown, terminal

pytest.importorskip("torch")
pytestmark = pytest.mark.live
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(("script", "steps"), [("image", 36), ("text", 40), ("tabular", 40)])
def test_a_wrapped_training_ends_with_the_same_loss_to_the_last_bit(script: str, steps: int, tmp_path: Path) -> None:
    if script == "image":
        pytest.importorskip("torchvision")
    expected, got = both([str(SCRIPTS / f"train_{script}.py")], tmp_path, tmp_path)
    assert got.code == expected.code == 0, expected.err + got.err
    assert re.fullmatch(r"final loss -?0x1\.[0-9a-f]+p[-+]\d+.*\n", expected.out)
    assert got.out == expected.out
    assert got.bundle is not None
    (log,) = (file for file in (got.bundle / "torch").glob("rank*.jsonl") if '"role":"main"' in file.read_text())
    records = [json.loads(line) for line in log.read_text().splitlines()]
    whole = [r for r in records if r["k"] == "step" and not r.get("partial")]
    assert len([r for r in whole if r["o"] == "optimizer"]) in (steps, steps - 1)  # the first is shared with set-up


def test_both_ranks_of_a_data_parallel_training_are_in_one_report(tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPTS / "train_ddp.py")]
    expected = run([sys.executable, *words], tmp_path)
    got = profiled(["--", sys.executable, *words], tmp_path, tmp_path)
    assert got.code == 0, got.err
    assert sorted(got.out.splitlines()) == sorted(expected.out.splitlines())
    assert got.bundle is not None
    diagnosis = from_json((got.bundle / "diagnosis.json").read_bytes())
    assert [row["rank"] for row in diagnosis.ranks] == [0, 1]
    assert sorted({account.rank for account in diagnosis.accounts}) == [0, 1]
    assert diagnosis.steps.count >= 10
    assert diagnosis.verdict.status != "cannot_judge"
    page = html.render(diagnosis)
    for report in (got.err, terminal.render(diagnosis), markdown.render(diagnosis), page):
        assert "2 GPUs" not in report and "both GPUs" not in report and "GPU -1" not in report
    assert "2 ranks together" in got.err
    rows = re.search(r"^ *rank +step +input.*\n +0 .*\n +1 .*\n", got.err, re.MULTILINE)
    assert rows is not None and "-1" not in rows[0]
    assert "Per step and rank (2 ranks)" in markdown.render(diagnosis)
    assert ">-1<" not in page and "<td>CPU</td>" in page


ENDLESS = """
import time, torch
net = torch.nn.Linear(64, 64); opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(300):
    opt.zero_grad(); net(torch.randn(32, 64)).sum().backward(); opt.step(); time.sleep(0.02)
"""
WAYS = ("kill the application", "kill its group", "kill gpudiag too", "TERM to gpudiag", "TERM to the application")


def end_at_random(number: int, folder: Path) -> tuple[str, int, str, Path]:
    """Profile an endless training and end it in one of the ways, at a moment that nobody has chosen."""
    way, bundle = WAYS[number % len(WAYS)], folder / f"run{number}"
    command = [sys.executable, "-m", "gpudiag", "profile", "--with", "torch", "--no-save", "-o", str(bundle)]
    process = subprocess.Popen(
        [*command, str(folder / "train.py")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        start_new_session=True,
    )
    application = application_of(process.pid)
    time.sleep(random.Random(time.time_ns()).uniform(0.0, 6.0))
    for act, pid, number_ in {
        "kill the application": [(os.kill, application, signal.SIGKILL)],
        "kill its group": [(os.killpg, application, signal.SIGKILL)],
        "kill gpudiag too": [(os.kill, process.pid, signal.SIGKILL), (os.killpg, application, signal.SIGKILL)],
        "TERM to gpudiag": [(os.kill, process.pid, signal.SIGTERM)],
        "TERM to the application": [(os.kill, application, signal.SIGTERM)],
    }[way]:
        act(pid, number_)
    out, err = process.communicate(timeout=90)
    return way, process.returncode, (out + err).decode(), bundle


def application_of(pid: int) -> int:
    """gpudiag asks git and others on the way: its child that runs the script."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            with contextlib.suppress(OSError, IndexError):
                if Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[1].endswith(b"train.py"):
                    return child
        time.sleep(0.02)
    raise AssertionError("gpudiag has not started the script")


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_leaves_a_report_or_a_clear_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(lambda number: end_at_random(number, tmp_path), range(10)))
    for way, code, said, bundle in ends:
        assert "Traceback" not in said, said
        if way == "kill gpudiag too":
            assert code == -signal.SIGKILL
        else:
            assert code == (143 if way.startswith("TERM") else 137), (way, said)
            assert is_bundle(bundle)
            assert read_bundle(bundle).manifest.exit_code == code
        again = run([sys.executable, "-m", "gpudiag", "analyze", str(bundle)], tmp_path)
        assert "Traceback" not in again.err
        assert again.code in (0, 1), again.err
        if again.code:  # two lines: what is missing, and what to do
            assert re.match(r"gpudiag: .*\n.*\n$", again.err), again.err
        else:
            assert "step" in again.out
