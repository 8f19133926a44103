"""The benchmark for real, with tiny models and counts, in its own processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")

from gpudiag.bench.device import cuda_problem
from gpudiag.bench.onnx_cpu import missing

pytestmark = pytest.mark.live

NET = """
import os, signal, sys
import torch

print("a model that talks on stdout")

def build():
    print("building")
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, stride=2), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(), torch.nn.Linear(16, 10))

def wide():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))

def batch_of(size):
    return torch.zeros(size, 3, 32, 32), torch.full((size,), 3)

class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3072, 10)
    def forward(self, x):
        if x.shape[0] > 4:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
        return self.layer(x.flatten(1))

def broken():
    return Broken()

class Nan(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3072, 10)
    def forward(self, x):
        return self.layer(x.flatten(1)) * float("nan")

def nan():
    return Nan()

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def wrong():
    return 5
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def run(folder: Path, *arguments: str, model: str = "build", code: int = 0) -> dict[str, object]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GPUDIAG_DB": str(folder / "history" / "runs.db")}
    options = ["--device", "cpu", "--quick", "--batch", "2", "--instance-seconds", "0.1", "--json", "-"]
    options += ["--model", f"net:{model}", "--input-shape", "3,32,32", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "gpudiag", "bench", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout) if code == 0 else {"stderr": done.stderr}
    assert isinstance(found, dict)
    return found


def test_one_model_gets_every_part_that_a_cpu_can_measure_and_the_rest_is_said(folder: Path) -> None:
    found = run(folder, "--no-onnx", "--threads", "2")
    assert found["quick"] is True
    assert {"gpu", "power", "speed-up"} <= set(found["not_measured"])  # type: ignore[arg-type]
    (model,) = found["models"]  # type: ignore[misc]
    (mode,) = model["runs"]
    assert mode["failed"] == {}
    assert mode["training"]["images_per_s"]["median"] > 0
    assert mode["latency"]["p99"]["ns"] >= mode["latency"]["p50"]["ns"] > 0
    assert mode["latency"]["p99"]["enough"] is False
    assert mode["training_memory"]["resident"] > 50e6
    assert mode["power"] is None and model["speedups"] == []
    assert model["flops"]["flops_forward"] == 2 * model["flops"]["macs_forward"] == 2 * (16 * 15 * 15 * 27 + 160)
    kinds = [(run["runtime"], run["kind"], run["instances"]) for run in model["cpu"]["runs"]]
    assert ("torch", "one thread", 1) in kinds
    assert ("torch", "instances", min(2, len(os.sched_getaffinity(0)))) in kinds
    assert "--no-onnx" in model["cpu"]["not_measured"]["onnxruntime"]
    assert model["weights"] == "as net:build returns them"
    saved = list((folder / "history" / "bench").glob("*.json"))
    assert len(saved) == 1 and json.loads(saved[0].read_text()) == found


def test_amp_agrees_with_eager_within_its_tolerance(folder: Path) -> None:
    found = run(folder, "--modes", "amp", "--no-cpu-baseline", "--no-roofline")
    (model,) = found["models"]  # type: ignore[misc]
    (amp,) = model["runs"]
    assert (amp["dtype"], amp["agreement"]["agrees"], amp["agreement"]["tolerance"]) == ("bf16", True, 0.05)
    assert amp["training"]["losses_not_finite"] == amp["training"]["steps_skipped"] == 0


def test_a_broken_loss_is_counted_and_its_steps_are_skipped_by_fp16_s_scaler(folder: Path) -> None:
    found = run(folder, "--modes", "amp", "--amp-dtype", "fp16", "--no-cpu-baseline", "--no-roofline", model="nan")
    (model,) = found["models"]  # type: ignore[misc]
    (amp,) = model["runs"]
    training = amp["training"]
    steps = 2 * (1 + 1)  # two rounds of a warm-up and a measured step
    assert (amp["dtype"], training["losses"]) == ("fp16", steps)
    assert training["losses_not_finite"] == training["steps_skipped"] == steps
    assert amp["agreement"]["agrees"] is False


@pytest.mark.slow
def test_compile_time_is_kept_apart_and_outputs_agree(folder: Path) -> None:
    found = run(folder, "--modes", "compile,compile+amp", "--no-cpu-baseline", "--no-roofline")
    (model,) = found["models"]  # type: ignore[misc]
    compiled, mixed = model["runs"]
    if "outputs" in compiled["failed"]:
        pytest.skip(f"no compiler here: {compiled['failed']['outputs']}")
    assert compiled["compile_inference_s"] > 0.1
    assert compiled["compile_training_s"] > 0.1
    assert compiled["agreement"]["agrees"] and compiled["agreement"]["tolerance"] == 0.001
    assert mixed["agreement"]["agrees"] and mixed["agreement"]["tolerance"] == 0.05
    assert mixed["compile_training_s"] > 0.1 and mixed["dtype"] == "bf16"


def test_a_sweep_ends_at_out_of_memory_and_keeps_the_curve(folder: Path) -> None:
    found = run(
        folder, "--sweep", "inference", "--sweep-largest", "16", "--no-cpu-baseline", "--no-roofline", model="broken"
    )
    (model,) = found["models"]  # type: ignore[misc]
    (sweep,) = model["sweeps"]
    assert [point["batch"] for point in sweep["points"]] == [1, 2, 4, 7]
    assert sweep["points"][-1]["out_of_memory"] is True
    assert sweep["knee"] in (1, 2, 4)
    assert all(point["memory_bytes"] > 0 for point in sweep["points"][:-1])


def test_out_of_memory_in_one_part_leaves_the_others(folder: Path) -> None:
    found = run(folder, "--batch", "8", "--no-cpu-baseline", "--no-roofline", model="broken")
    (model,) = found["models"]  # type: ignore[misc]
    (mode,) = model["runs"]
    assert mode["failed"]["training"] == mode["failed"]["inference batch 8"] == "out of memory"
    assert mode["latency"]["p50"]["ns"] > 0


def test_a_process_that_the_system_kills_is_a_row_and_not_the_end(folder: Path) -> None:
    found = run(folder, "--no-onnx", "--no-roofline", model="killed")
    (model,) = found["models"]  # type: ignore[misc]
    assert model["runs"] == []
    assert "SIGKILL (most likely out of memory)" in model["failed"]["eager"]
    assert "SIGKILL" in model["cpu"]["not_measured"]["baseline"]


def test_a_function_that_returns_no_model_is_said_in_its_row(folder: Path) -> None:
    found = run(folder, "--no-cpu-baseline", "--no-roofline", model="wrong")
    (model,) = found["models"]  # type: ignore[misc]
    assert model["failed"]["eager"] == "net:wrong returned int, not a torch.nn.Module"


def test_a_sample_batch_of_the_user_s_own_is_taken(folder: Path) -> None:
    found = run(folder, "--no-cpu-baseline", "--no-roofline", "--sample-batch", "net:batch_of", model="wide")
    (model,) = found["models"]  # type: ignore[misc]
    assert model["runs"][0]["training"]["images_per_s"]["median"] > 0


def test_a_folder_of_images_is_loaded_and_decoded(folder: Path) -> None:
    from PIL import Image

    for name in ("cats/a.png", "dogs/b.png"):
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), "red").save(folder / "images" / name)
    found = run(folder, "--no-cpu-baseline", "--no-roofline", "--data", str(folder / "images"), "--workers", "1")
    (model,) = found["models"]  # type: ignore[misc]
    assert model["runs"][0]["training"]["data"].startswith("folder: images decoded")


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_the_onnx_export_agrees_with_torch_before_it_is_timed(folder: Path) -> None:
    found = run(folder, "--threads", "1", "--no-roofline")
    (model,) = found["models"]  # type: ignore[misc]
    assert model["cpu"]["onnx"]["agrees"] is True
    assert "onnxruntime" in {run["runtime"] for run in model["cpu"]["runs"]}


def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error(folder: Path) -> None:
    if not cuda_problem():
        pytest.skip("there is a GPU")
    said = run(folder, "--device", "cuda", code=1)["stderr"]
    assert "--device cuda" in str(said) and "next:" in str(said)
