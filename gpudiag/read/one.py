"""One recording: what a file is gets decided by its content, never by its name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gpudiag.errors import GpudiagError
from gpudiag.timeline import Timeline

Progress = Callable[[str], None]

KINDS = ".sqlite, .nsys-rep, .qdrep, .qdstrm, .json, .json.gz, .nvvp, .nvprof, a bundle, or a folder of ranks"
_SQLITE = b"SQLite format 3\x00"
_NSYS_REPORT = b"NVIDIA Tegra Profiler Report"
_NSYS_STREAM = b"NVIDIA Nsight Systems Stream"  # within the first 256 bytes of a .qdstrm


def read_file(path: Path, progress: Progress) -> Timeline:
    """One recording of one file. Raises GpudiagError."""
    if not path.is_file():
        raise GpudiagError(
            f"{path}: a pipe or a device, not a file", "write the recording to a file first: zcat x.json.gz > x.json"
        )
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise GpudiagError(f"{path}: {error.strerror}", "check the file's permissions") from error
    if not head:
        raise GpudiagError(
            f"{path}: the file is empty", "record again; an empty file usually means that the recorder was killed"
        )
    progress(f"reading {path.name}")
    if head.startswith(_SQLITE):
        return _read_sqlite(path, progress)
    if head.startswith(_NSYS_REPORT) or _NSYS_STREAM in head[:256]:
        return _read_report(path, progress)
    if head.lstrip().startswith(b"<?xml"):
        from gpudiag.read.nvprof import read_nvprof

        return read_nvprof(path)
    if head.startswith(b"\x1f\x8b") or head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        from gpudiag.read.kineto import read_kineto, sniff_json

        if sniff_json(path) == "diagnosis":
            raise GpudiagError(
                f"{path}: this is a diagnosis, not a recording", f"gpudiag analyze {path} alone draws it again"
            )
        return read_kineto(path, progress)
    raise GpudiagError(f"{path}: not a recording that gpudiag knows", f"give one of: {KINDS}")


def _read_sqlite(path: Path, progress: Progress) -> Timeline:
    from gpudiag.read.nsys_sqlite import is_nsys_sqlite, read_nsys_sqlite

    if is_nsys_sqlite(path):
        return read_nsys_sqlite(path, progress)
    from gpudiag.read.nvprof import is_nvprof_sqlite, read_nvprof

    if is_nvprof_sqlite(path):
        return read_nvprof(path)
    return read_nsys_sqlite(path, progress)  # says what is wrong with it: cut short, damaged, or no nsys export


def _read_report(path: Path, progress: Progress) -> Timeline:
    from gpudiag.read.nsys_report import export_report
    from gpudiag.read.nsys_sqlite import read_nsys_sqlite

    with tempfile.TemporaryDirectory(prefix="gpudiag-export-") as folder:
        progress(f"exporting {path.name} with nsys")
        timeline = read_nsys_sqlite(export_report(path, Path(folder)), progress)
    return replace(timeline, source=replace(timeline.source, path=str(path)))
