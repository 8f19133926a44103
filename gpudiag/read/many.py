"""Several recordings at once: one process each, as many at a time as there are CPUs, where reading takes long enough.

Decoding holds the interpreter's lock, so threads gain nothing. The children are started by command, not by multiprocessing,
which would import the caller's main module again.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpudiag.child import own_module
from gpudiag.errors import GpudiagError
from gpudiag.read.one import Progress, read_file
from gpudiag.timeline import Timeline

WORTH_BYTES = 60_000_000  # a child costs about 0.3 s, which is the reading of about 60 MB of JSON
GZIP_RATIO = 15  # of torch traces; the shared ones compress 9- to 22-fold


def read_files(paths: Sequence[Path], progress: Progress) -> tuple[list[Timeline], list[str]]:
    """The timelines of several files, in their order, and what is wrong with those that could not be read.

    Raises the first GpudiagError where no file can be read.
    """
    cpus = len(os.sched_getaffinity(0))
    answers: list[Timeline | GpudiagError]
    if len(paths) < 2 or cpus < 2 or sum(map(_weight, paths)) < WORTH_BYTES:
        answers = [_answer(path, progress) for path in paths]
    else:
        progress(f"reading {len(paths)} files, {min(cpus, len(paths))} at a time")
        with ThreadPoolExecutor(min(cpus, len(paths))) as pool:
            answers = list(pool.map(_in_child, paths))
    errors = [answer for answer in answers if isinstance(answer, GpudiagError)]
    timelines = [answer for answer in answers if isinstance(answer, Timeline)]
    if errors and not timelines:
        raise errors[0]
    return timelines, [f"left out: {error.message}" for error in errors]


def _answer(path: Path, progress: Progress) -> Timeline | GpudiagError:
    try:
        return read_file(path, progress)
    except GpudiagError as error:
        return error


def _weight(path: Path) -> int:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return path.stat().st_size * (GZIP_RATIO if packed else 1)


def _in_child(path: Path) -> Timeline | GpudiagError:
    command = own_module("gpudiag.read.many", os.fspath(path))
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        return GpudiagError(
            f"{path}: the process that read it ended with {done.returncode} ({said[-1] if said else 'no word'})",
            "analyze this file alone",
        )
    answer = pickle.loads(done.stdout)
    assert isinstance(answer, Timeline | GpudiagError)
    return answer


if __name__ == "__main__":
    pickle.dump(_answer(Path(sys.argv[1]), lambda _text: None), sys.stdout.buffer, protocol=5)
