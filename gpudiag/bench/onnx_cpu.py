"""ONNX Runtime on the CPU, from an export that is checked against torch's output. The packages are the extra [onnx]."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpudiag.bench.latency import latency_of
from gpudiag.bench.loop import Loop
from gpudiag.bench.models import ModelSpec, call, sample
from gpudiag.bench.result import CpuRun, MeasuringRules, OnnxCheck

PACKAGES = ("onnx", "onnxruntime", "onnxscript")
INSTALL = "pip install 'gpudiag[onnx]'"
OPSET = 18  # what torch's exporter writes without conversion


def missing() -> str:
    """Why ONNX cannot be measured here, with the line that cures it, or ""."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed: {INSTALL}" if absent else ""


def export(model: Any, inputs: Any, path: Path) -> None:
    """One file with the weights, for exactly this batch (a fixed shape lets the runtime plan its memory)."""
    import torch

    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    torch.onnx.export(model, arguments, str(path), dynamo=True, opset_version=OPSET, verbose=False, external_data=False)


def open_session(path: Path, threads: int, passive: bool) -> Any:
    """passive: its threads sleep while they wait, as torch's under OMP_WAIT_POLICY=PASSIVE."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if passive:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def measure(
    model: Any,
    spec: ModelSpec,
    rules: MeasuringRules,
    loop: Loop,
    threads: int,
    batch: int,
    with_latency: bool,
    doing: Callable[[str], None],
) -> tuple[OnnxCheck | None, tuple[CpuRun, ...], dict[str, str]]:
    """(check, runs, failed). Rates at `batch`, latency at 1 (another export) if asked, on one thread and on all. A model that cannot be exported is a
    finding, not an error; one whose output does not agree is measured and marked."""
    import onnxruntime
    import torch

    passive = rules.omp_wait_policy == "PASSIVE"
    runs: list[CpuRun] = []
    check: OnnxCheck | None = None
    counts = [("one thread", 1)] + ([("all threads", threads)] if threads > 1 else [])
    with tempfile.TemporaryDirectory(prefix="gpudiag-onnx-") as folder:
        files: dict[int, Path] = {}
        feeds: dict[int, dict[str, Any]] = {}
        for size in sorted({1, batch} if with_latency else {batch}):
            doing(f"ONNX export, batch {size}")
            inputs = sample(spec, size, rules.seed)[0]
            if isinstance(inputs, dict):
                return None, (), {"onnx": "models that take keywords are not exported"}
            files[size] = Path(folder) / f"model{size}.onnx"
            try:
                export(model, inputs, files[size])
            except (RuntimeError, torch.onnx.errors.OnnxExporterError) as error:
                return None, (), {"onnx": f"export failed: {str(error).splitlines()[0]}"}
            session = open_session(files[size], threads, passive)
            given = inputs if isinstance(inputs, tuple) else (inputs,)
            names = [node.name for node in session.get_inputs()]
            feeds[size] = dict(zip(names, [tensor.numpy() for tensor in given], strict=True))
            if size == batch:
                with torch.inference_mode():
                    wanted = _first(call(model, inputs)).float().numpy()
                check = compare(
                    session.run(None, feeds[size])[0], wanted, rules, f"onnxruntime {onnxruntime.__version__}"
                )
        for kind, count in counts:
            doing(f"onnxruntime, {count} thread(s)")
            session = open_session(files[batch], count, passive)
            rate = loop.throughput(lambda s=session: s.run(None, feeds[batch]), batch, rules.inference_iterations)  # type: ignore[misc]
            latency = None
            if with_latency:
                single = open_session(files[1], count, passive)
                samples, loads = loop.latencies(lambda s=single: s.run(None, feeds[1]), rules.latency_iterations)  # type: ignore[misc]
                latency = latency_of(samples, loads, 1, rules, loop.cores)
            note = "" if check is not None and check.agrees else "its output does not agree with torch's"
            runs.append(CpuRun(kind, "onnxruntime", batch, count, 1, rate, latency, note))
    return check, tuple(runs), {}


def compare(got: Any, wanted: Any, rules: MeasuringRules, runtime: str) -> OnnxCheck:
    """max |a - b| / max |b|; arrays of different shapes do not agree."""
    import numpy as np

    if got.shape != wanted.shape:
        return OnnxCheck(OPSET, None, rules.tolerance_fp32, False, runtime)
    scale = float(np.abs(wanted).max()) or 1.0
    error = float(np.abs(got - wanted).max()) / scale
    finite = error if math.isfinite(error) else None
    return OnnxCheck(OPSET, finite, rules.tolerance_fp32, error <= rules.tolerance_fp32, runtime)


def _first(output: Any) -> Any:
    from gpudiag.bench.flops import tensors_of

    return tensors_of(output)[0]
