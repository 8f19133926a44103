"""What the parent asks of a measuring process, and how it is run. Each model and mode has a process of its own: the peak resident
set, the allocators and the compilers' state are then its own, and a process that is killed takes only its own numbers with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import msgspec

from gpudiag.bench.models import ModelSpec
from gpudiag.bench.result import CpuRun, FlopCount, MeasuringRules, Mode, ModeResult, OnnxCheck, Roofline, SweepPoint
from gpudiag.bench.roofline import Peaks
from gpudiag.child import own_module
from gpudiag.errors import GpudiagError


class Job(msgspec.Struct, frozen=True):
    """task: mode | peaks | cpu | instance | sweep. parts: of a mode or cpu job, what to measure. cores: pins an instance."""

    task: str
    model: str
    input_shape: tuple[int, ...]
    sample_batch: str
    device: str
    mode: Mode
    rules: MeasuringRules
    threads: int
    batch: int = 1
    parts: tuple[str, ...] = ()
    peaks: Peaks | None = None
    cores: tuple[int, ...] = ()
    what: str = ""
    sizes: tuple[int, ...] = ()


def spec_of(job: Job) -> ModelSpec:
    return ModelSpec(job.model, job.input_shape, job.sample_batch)


class Answer(msgspec.Struct, frozen=True):
    """What a job found; the fields that its task fills."""

    mode: ModeResult | None = None
    parameters: int = 0
    parameter_bytes: int = 0
    flops: FlopCount | None = None
    roofline: Roofline | None = None
    peaks: Peaks | None = None
    cpu: tuple[CpuRun, ...] = ()
    onnx: OnnxCheck | None = None
    images: int = 0
    start_ns: int = 0
    end_ns: int = 0
    failed: dict[str, str] = {}


class Message(msgspec.Struct, frozen=True):
    """One line of a worker's output: what it is doing, a sweep point, that it is ready, or its answer."""

    doing: str = ""
    ready: bool = False
    point: SweepPoint | None = None
    answer: Answer | None = None


class JobError(GpudiagError):
    """The process ended without an answer. killed: by a signal, most often the out-of-memory killer."""

    def __init__(self, message: str, killed: bool) -> None:
        super().__init__(message)
        self.killed = killed


class Worker:
    """A measuring process. Its stdout carries Messages; what the model prints goes to its stderr, kept for the error."""

    def __init__(self, job: Job) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in finish()
        environment = dict(os.environ)
        # numpy, MKL and OpenMP read it at import, before torch.set_num_threads can speak
        environment["OMP_NUM_THREADS"] = str(job.threads)
        if job.rules.omp_wait_policy:
            environment["OMP_WAIT_POLICY"] = job.rules.omp_wait_policy
        self.process = subprocess.Popen(
            own_module("gpudiag.bench.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )
        self._write(msgspec.json.encode(job))

    def _write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it died at once; read() tells why
            pass

    def read(self) -> Message:
        """The next message. Raises JobError when the process ended without one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._failure()
        return msgspec.json.decode(line, type=Message)

    def go(self, until_ns: int) -> None:
        """Starts a ready instance, which works until that reading of time.monotonic_ns."""
        self._write(str(until_ns).encode())

    def finish(self) -> None:
        """Ends the process if it still runs, and frees its pipes."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._errors.close()

    def _failure(self) -> JobError:
        code = self.process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        if code < 0:
            name = signal.Signals(-code).name
            cause = " (most likely out of memory)" if name == "SIGKILL" else ""
            return JobError(f"the measuring process was ended by {name}{cause}", killed=True)
        return JobError(lines[-1].strip() if lines else f"the measuring process ended with {code}", killed=False)


def run_job(job: Job, doing: Callable[[str], None], point: Callable[[SweepPoint], None] | None = None) -> Answer:
    """Runs one job to its answer. Raises JobError."""
    worker = Worker(job)
    try:
        while True:
            message = worker.read()
            if message.answer is not None:
                return message.answer
            if message.point is not None and point is not None:
                point(message.point)
            if message.doing:
                doing(message.doing)
    finally:
        worker.finish()


def first_line(error: BaseException) -> str:
    """An exception as one line for a result file: its type where the text does not say it."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_job(line: bytes) -> Any:
    return msgspec.json.decode(line, type=Job)
