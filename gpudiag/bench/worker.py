"""`python -m gpudiag.bench.worker`: one job in, messages out. Run by job.py only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import warnings

from gpudiag.bench import measure
from gpudiag.bench.job import Answer, Job, Message, decode_job, encode
from gpudiag.errors import GpudiagError

PR_SET_PDEATHSIG = 1


def main() -> int:
    # What the model prints must not be taken for a message: file descriptor 1 becomes stderr, messages keep the old one.
    messages = os.dup(1)
    os.dup2(2, 1)

    def send(message: Message) -> None:
        os.write(messages, encode(message))

    _end_with_parent()
    job: Job = decode_job(sys.stdin.buffer.readline())
    if job.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, job.cores)
    warnings.simplefilter("ignore")  # torch's advice to the author of a model is not this tool's to repeat
    import torch

    torch.set_num_threads(job.threads)
    torch.manual_seed(job.rules.seed)

    def doing(text: str) -> None:
        send(Message(doing=text))

    try:
        if job.task == "instance":
            answer = instance(job, send)
        else:
            answer = measure.TASKS[job.task](job, doing, lambda point: send(Message(point=point)))
    except GpudiagError as error:
        print(error.message, file=sys.stderr)
        return 1
    send(Message(answer=answer))
    return 0


def _end_with_parent() -> None:
    """A benchmark that is killed must not leave its measuring processes at work. prctl(2), Linux; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def instance(job: Job, send: measure.Send) -> Answer:
    """Inference until a common end, from a common start: says ready, waits for the word, counts whole batches within the window."""
    step = measure.inference_step(job)
    for _ in range(max(1, job.rules.warm_up)):
        step()
    send(Message(ready=True))
    total = Answer()
    # one line per round; an empty line (the parent closed the pipe) ends it
    while line := sys.stdin.buffer.readline().strip():
        until = int(line)
        images = 0
        start = end = time.monotonic_ns()
        while end < until:
            step()
            images += job.batch
            end = time.monotonic_ns()
        total = Answer(images=images, start_ns=start, end_ns=end)
        send(Message(answer=total))
    return total


if __name__ == "__main__":
    sys.exit(main())
