"""Reports that only nsys can open (.nsys-rep, .qdrep, .qdstrm), exported to SQLite by an installed nsys.

A .qdstrm is finished into a report first: nsys does that itself where its importer lies beside it, which it does not in
Debian's package and in containers that hold only the target half.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from gpudiag.errors import GpudiagError
from gpudiag.read._sqlite import Database
from gpudiag.read.nsys_sqlite import looks_like_nsys

# Where installers put nsys when it is not on PATH: NVIDIA's own packages, the CUDA toolkit, Debian.
_PLACES = (
    "/opt/nvidia/nsight-systems*/*/bin/nsys",
    "/opt/nvidia/nsight-systems*/bin/nsys",
    "/opt/nvidia/nsight-systems*/*/target-linux-*/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/usr/local/cuda*/NsightSystems-cli-*/bin/nsys",
    "/usr/lib/nsight-systems/bin/nsys",
    "/usr/lib/*/nsight-systems/target-linux-*/nsys",
)
_IMPORTERS = (
    "/opt/nvidia/nsight-systems*/*/host-linux-*/QdstrmImporter",
    "/opt/nvidia/nsight-systems*/host-linux-*/QdstrmImporter",
    "/usr/lib/nsight-systems/host-linux-*/QdstrmImporter",
    "/usr/lib/*/nsight-systems/host-linux-*/QdstrmImporter",
)
_REPORT = b"NVIDIA Tegra Profiler Report"
_STREAM = b"NVIDIA Nsight Systems Stream"
# Importing 190 MB took 4 s here; a slow, shared disk is taken to be fifty times slower.
_SECONDS, _SECONDS_PER_MB = 120.0, 1.0


def find_nsys() -> Path | None:
    """The nsys to use: $GPUDIAG_NSYS, then PATH, then the newest in the usual places. None when there is none."""
    named = os.environ.get("GPUDIAG_NSYS")
    if named:
        found = shutil.which(named)
        return Path(found) if found else None
    found = shutil.which("nsys")
    return Path(found) if found else _newest(_PLACES)


def find_importer(nsys: Path) -> Path | None:
    """QdstrmImporter of the same installation, else of any."""
    real = nsys.resolve()
    for folder in real.parents[:3]:
        beside = sorted(folder.glob("host-linux-*/QdstrmImporter")) or sorted(folder.glob("QdstrmImporter"))
        if beside:
            return beside[-1]
    return _newest(_IMPORTERS)


def nsys_version(nsys: Path) -> str:
    """`2022.4.2` of an installed nsys; empty when it does not say."""
    _, said = _run([str(nsys), "--version"], 30)
    match = re.search(r"version (\d+\.\d+(?:\.\d+)?)", said)
    return match[1] if match else ""


def report_version(path: Path) -> str:
    """`2024.2.3`: the nsys that wrote a report, where the report's first bytes say it (from 2023 on; streams always)."""
    with path.open("rb") as file:
        head = file.read(4096)
    match = re.search(rb"Profiler Report (\d{4})@(\d+)@(\d+)", head) or re.search(
        rb"Stream (\d{4})\.(\d+)\.(\d+)", head
    )
    return ".".join(part.decode() for part in match.groups()) if match else ""


def utf8_alias(path: Path) -> Path:
    """`path`, or another way to it that is UTF-8: nsys passes paths in messages that take nothing else.

    The other way is through a descriptor of this process, which stays open as long as this process lives.
    """
    try:
        str(path).encode()
        return path
    except UnicodeEncodeError:
        folder = os.open(path.parent, os.O_PATH)
        return Path(f"/proc/{os.getpid()}/fd/{folder}/{path.name}")


def export_report(path: Path, into: Path) -> Path:
    """Export a report into the folder `into`; the path of the .sqlite. Nothing is left there when it fails.

    Raises GpudiagError: no nsys or no importer, a report newer than nsys, a damaged or unfinished report, no time left.
    """
    try:
        with path.open("rb") as file:
            head = file.read(256)
        timeout = _SECONDS + _SECONDS_PER_MB * path.stat().st_size / 2**20
    except OSError as error:
        raise GpudiagError(f"{path}: {error.strerror}", "check the path and its permissions") from None
    if not head:
        raise GpudiagError(f"{path}: the file is empty", "record again; nsys was ended before it wrote its report")
    is_stream = _STREAM in head
    if not is_stream and not head.startswith(_REPORT):
        raise GpudiagError(f"{path}: not a report of Nsight Systems", "give a .nsys-rep, .qdrep or .qdstrm")
    nsys = find_nsys()
    if nsys is None:
        raise GpudiagError(
            f"{path}: needs nsys to be read, and none is installed",
            "install Nsight Systems (or set GPUDIAG_NSYS), or run `nsys export -t sqlite` where it was recorded and "
            "give the .sqlite",
        )
    try:
        scratch = tempfile.TemporaryDirectory(prefix=".gpudiag-export-", dir=into)
    except OSError as error:
        raise GpudiagError(f"{into}: {error.strerror}", "the export needs a folder that can be written") from None
    with scratch as folder:
        # nsys reads its options by their first letter: a plain name of our own can be no option.
        report = utf8_alias(path.absolute())
        if is_stream:
            report = _import_stream(path, nsys, Path(folder), timeout)
        exported = Path(folder) / "export.sqlite"
        output = f"--output={utf8_alias(exported)}"
        command = [str(nsys), "export", "--type=sqlite", "--force-overwrite=true", output, str(report)]
        code, said = _run(command, timeout)
        if code is None:
            raise GpudiagError(
                f"{path}: nsys did not finish the export in {timeout:.0f} s", "export it by hand: " + _HAND
            )
        if code or not exported.is_file():
            raise _export_error(path, nsys, said)
        _verify(path, exported)
        target = into / f"{path.stem}.sqlite"
        return exported.replace(target)


_HAND = "`nsys export -t sqlite REPORT`, then give the .sqlite"


def _import_stream(path: Path, nsys: Path, folder: Path, timeout: float) -> Path:
    importer = find_importer(nsys)
    if importer is None:
        raise GpudiagError(
            f"{path}: an unfinished recording, and this nsys ({nsys}) has no QdstrmImporter",
            "install the host half of Nsight Systems, or finish it elsewhere: `QdstrmImporter -i FILE.qdstrm`",
        )
    report, stream = folder / "import.nsys-rep", folder / "import.qdstrm"
    try:
        # The importer writes an index into the stream it reads; a user's recording stays as it is.
        shutil.copyfile(path, stream)
    except OSError as error:
        raise GpudiagError(
            f"{path}: {error.strerror}", f"finishing it needs as much room again in {folder.parent}"
        ) from None
    code, said = _run([str(importer), "-i", str(stream), "-o", str(report)], timeout)
    if code is None:
        raise GpudiagError(
            f"{path}: QdstrmImporter did not finish in {timeout:.0f} s", f"run it by hand: {importer} -i FILE.qdstrm"
        )
    if code or not report.is_file():
        raise GpudiagError(
            f"{path}: QdstrmImporter could not finish the recording ({_last_line(said)})",
            f"{_versions(path, nsys)}record again and let nsys end by itself: a recorder that is killed leaves no whole stream",
        )
    return report


def _export_error(path: Path, nsys: Path, said: str) -> GpudiagError:
    newer = re.search(r"created in Nsight Systems version \((\d+\.\d+\.\d+)[^)]*\), newer", said)
    invalid = re.search(r"Version number is invalid: (\d{4})@(\d+)@(\d+)", said)
    version = newer[1] if newer else ".".join(invalid.groups()) if invalid else report_version(path)
    if newer or invalid or _numbers(version) > _numbers(nsys_version(nsys)) > []:
        return GpudiagError(
            f"{path}: written by nsys {version}, which is newer than the installed {nsys_version(nsys) or nsys}",
            "update nsys, or run `nsys export -t sqlite` where it was recorded and give the .sqlite",
        )
    return GpudiagError(
        f"{path}: nsys could not export it ({_last_line(said)})",
        f"{_versions(path, nsys)}if the report is whole, export it with the nsys that recorded it: {_HAND}",
    )


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]


def _versions(path: Path, nsys: Path) -> str:
    wrote, have = report_version(path), nsys_version(nsys)
    return f"it was written by nsys {wrote}, installed is {have or 'an unknown version'}; " if wrote else ""


def _verify(path: Path, exported: Path) -> None:
    try:
        database = Database(exported)
    except GpudiagError as error:
        raise GpudiagError(f"{path}: nsys wrote a broken export ({error.message.rpartition(': ')[2]})", _HAND) from None
    try:
        if not looks_like_nsys(database):
            raise GpudiagError(f"{path}: nsys exported no table", "the report holds no events; record again")
    finally:
        database.close()


def _run(command: list[str], timeout: float) -> tuple[int | None, str]:
    """(exit status, all that was said); None when it had to be ended. A process group of its own, so that all of it ends."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise GpudiagError(f"{command[0]}: {error.strerror}", "set GPUDIAG_NSYS to an nsys that runs here") from None
    try:
        said, _ = process.communicate(timeout=timeout)
    except BaseException as reason:
        # The whole group: a helper that outlives nsys would hold the pipe open.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(reason, subprocess.TimeoutExpired):
            return None, ""
        raise
    return process.returncode, said.decode("utf-8", "replace")


def _last_line(said: str) -> str:
    """The last line that is not a progress bar."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", said) if line.strip() and "%" not in line]
    return lines[-1][:200] if lines else "it said nothing"


def _newest(patterns: Iterable[str]) -> Path | None:
    """The runnable file of the highest version among the matches."""
    found = [
        p for pattern in patterns for p in Path("/").glob(pattern.lstrip("/")) if os.access(p, os.X_OK) and p.is_file()
    ]
    return max(found, key=lambda p: (_numbers(str(p)), str(p)), default=None)
