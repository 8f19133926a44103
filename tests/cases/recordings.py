"""Cases of recordings that lost, bent or never held what happened."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from builders_kineto import KinetoTrace
from builders_nsys import NsysFile

from cases.case import Case
from cases.kernels import LAUNCHING
from cases.loading import LOADER, STEPS, train
from cases.sim import MS, TENSOR_GEMM, US, Sim, host
from gpudiag.read import open_recordings
from gpudiag.timeline import Timeline


def busy(run: Sim | None = None, **more: object) -> Timeline:
    run = run or Sim()
    for _ in range(STEPS):
        with run.step():
            train(run)
    return run.timeline(host=host(), **more)


def no_gpu_rows() -> Timeline:
    """Launches were recorded, GPU work was not."""
    return replace(busy(), gpu_ops=None)


def emptied() -> Timeline:
    timeline = busy()
    assert timeline.gpu_ops is not None
    return replace(timeline, gpu_ops=timeline.gpu_ops.take(slice(0, 0)))


def streams_in_turn() -> Timeline:
    """Three streams that are idle 270 ms each, in turn; together the device is idle 27 of 310 ms."""
    run = Sim()
    for i in range(30):
        begin = i * 10 * MS
        run.call(begin, begin + 5 * US, correlation=i + 1)
        run.kernel(begin + 10 * US, begin + 9_100 * US, TENSOR_GEMM, correlation=i + 1, stream=7 + i % 3)
    return run.timeline(host=host())


def window_dropped(share: float = 0.4) -> Timeline:
    """The first 40 % of every step's kernels have a launch and no record."""
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            train(run)
    timeline = run.timeline(host=host())
    assert timeline.gpu_ops is not None
    keep = [i % 10 >= 10 * share for i in range(len(timeline.gpu_ops))]
    return replace(timeline, gpu_ops=timeline.gpu_ops.take([i for i, kept in enumerate(keep) if kept]))  # type: ignore[arg-type]


def _read(name: str, write: Callable[[Path], object]) -> Timeline:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        return open_recordings([path]).timelines[0]


def _trace(kernel: str = TENSOR_GEMM, skew: int = 0) -> KinetoTrace:
    trace = KinetoTrace()
    for step in range(8):
        at = step * 10 * MS + MS
        trace.annotation(f"ProfilerStep#{step}", at, 10 * MS)
        for i in range(10):
            begin, number = at + i * 20 * US, step * 10 + i + 1
            trace.op("aten::mm", begin, 15 * US)
            trace.call("cudaLaunchKernel", begin + 5 * US, 5 * US, correlation=number)
            trace.kernel(kernel, at + i * MS + 30 * US - skew, 960 * US, correlation=number)
    return trace


def rounded() -> Timeline:
    """Events shorter than a microsecond, rounded up and down, came out with a length of -1 us; clocks are 3 us apart."""
    trace = _trace(skew=3 * US)
    for i in range(20):
        trace.raw(
            f'{{"ph":"X","cat":"cpu_op","name":"aten::view","pid":4711,"tid":4711,"ts":{1000 + i},"dur":-1,"args":{{}}}}'
        )
    return _read("trace.json", trace.write)


def bad_escapes() -> Timeline:
    trace = _trace()
    trace.raw('{"ph":"X","cat":"cpu_op","name":"C:\\new\\x \x01 "quoted"","pid":4711,"tid":4711,"ts":1200.1,"dur":1.0}')
    trace.raw('{"ph":"X","cat":"cpu_op","name":"line\nbreak","pid":4711,"tid":4711,"ts":1300.1,"dur":1.0,"args":{}}')
    return _read("trace.json", trace.write)


def foreign_bytes() -> Timeline:
    text = _trace("NAME_HERE").text().encode().replace(b"NAME_HERE", b"gemm_\xf0\x9f_bf16_16816")
    return _read("trace.json.gz", lambda path: path.write_bytes(gzip.compress(text)))


def killed_midway(cut: bool) -> Timeline:
    """Ctrl-C: a range that began and never ended, and perhaps a file cut off in the middle of an event."""
    trace = _trace()
    trace.raw('{"ph":"B","cat":"user_annotation","name":"epoch","pid":4711,"tid":4711,"ts":900.0,"args":{}}')
    text = trace.text()
    return _read("trace.json", lambda path: path.write_text(text[: text.rindex('"traceName"') - 6] if cut else text))


def nsys(version: str = "2024.5.1.113", *, kernels: bool = True, ranges: bool = True) -> Timeline:
    def write(path: Path) -> object:
        file = NsysFile(path, version)
        for step in range(8):
            at = step * 10 * MS + MS
            if ranges:
                file.nvtx(at, at + 10 * MS, f"step {step}")
            for i in range(10):
                number = step * 10 + i + 1
                file.api(at + i * 20 * US, at + i * 20 * US + 5 * US, "cudaLaunchKernel_v7000", correlation=number)
                if kernels:
                    file.kernel(at + i * MS + 30 * US, at + i * MS + 990 * US, TENSOR_GEMM, correlation=number)
        return file.write()

    return _read("report.sqlite", write)


EVERYTHING = (*LOADER, *LAUNCHING, "gpu_idle", "long_gaps", "sync_idle", "gpu_unused")

CASES = (
    Case("prof-empty-is-improvement", emptied, silent=EVERYTHING, status="cannot_judge"),
    Case("prof-idle-per-stream", streams_in_turn, silent=("gpu_idle", "launch_bound"), status="healthy"),
    Case("prof-nvtx-table-name:none", lambda: nsys(ranges=False), silent=EVERYTHING, status="healthy"),
    Case("prof-nvtx-table-name:annotated", nsys, silent=EVERYTHING, status="healthy"),
    Case("prof-kineto-window-drop", window_dropped, silent=(*LAUNCHING, "gpu_idle"), says=("40 % of the launch", "lower bound")),
    Case("prof-negative-duration", rounded, silent=EVERYTHING, status="healthy"),
    Case("prof-bad-json", bad_escapes, silent=EVERYTHING, status="healthy"),
    Case("prof-non-utf8", foreign_bytes, silent=EVERYTHING, status="healthy"),
    Case("prof-unfinished:range", lambda: killed_midway(False), silent=EVERYTHING, status="healthy"),
    Case("prof-unfinished:file", lambda: killed_midway(True), silent=EVERYTHING, says=("incomplete",)),
    Case("prof-partial-stats", lambda: nsys(kernels=False), silent=EVERYTHING, status="cannot_judge"),
    Case("prof-nsys-silent-empty", no_gpu_rows, silent=EVERYTHING, status="cannot_judge", says=("no gpu activity",)),
    Case("prof-cupti-two-subscribers", lambda: window_dropped(0.7), silent=EVERYTHING, status="cannot_judge"),
)  # fmt: skip
