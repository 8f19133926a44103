"""`gpudiag profile` of a script that trains in a thread of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_profile import profiled

from gpudiag.diagnosis import from_json

pytest.importorskip("torch")
pytestmark = pytest.mark.live

SCRIPT = """
import queue, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch

net = torch.nn.Linear(64, 4)
net(torch.ones(1, 64)).sum().backward()  # of the main thread's, before any step
done = queue.Queue()


def train(steps=100):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
    done.put(1)


"""
WAITS = {
    "join": "thread = threading.Thread(target=train); thread.start(); thread.join()",
    "the end of the script": "threading.Thread(target=train).start()",
    "a pool": "with ThreadPoolExecutor() as pool: pool.submit(train)",
}


@pytest.mark.parametrize("waits", WAITS.values(), ids=WAITS.keys())
def test_steps_in_a_thread_are_recorded(waits: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + waits)
    got = profiled(["train.py"], tmp_path, tmp_path, "--no-save")
    assert got.code == 0, got.err
    assert got.bundle is not None
    diagnosis = from_json((got.bundle / "diagnosis.json").read_bytes())
    assert diagnosis.steps.count >= 10
    assert diagnosis.steps.median_ns is not None and diagnosis.steps.median_ns > 20e6
    assert "ran in a thread" not in got.err


def test_a_recording_ends_with_its_thread(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + WAITS["join"])
    got = profiled(["train.py"], tmp_path, tmp_path, "--no-save", "--steps", "95")
    assert got.code == 0 and got.bundle is not None, got.err
    assert from_json((got.bundle / "diagnosis.json").read_bytes()).steps.count >= 30


def test_steps_in_a_thread_that_cannot_be_recorded_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + "threading.Thread(target=train).start(); done.get()")
    got = profiled(["train.py"], tmp_path, tmp_path, "--no-save")
    assert got.code == 0
    assert "let it wait by Thread.join(), or train in the main thread" in got.err.replace("\n", " ")
