"""Reports are exported by an installed nsys, and every way in which that fails ends in one clear sentence."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpudiag.errors import GpudiagError
from gpudiag.read.nsys_report import export_report, find_nsys, nsys_version, report_version
from gpudiag.read.nsys_sqlite import is_nsys_sqlite, read_nsys_sqlite

_REPORT = b"NVIDIA Tegra Profiler Report 2026@1@1@204-261136693005v0\n" + bytes(200)
needs_nsys = pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed")


def _fake_nsys(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nsys that does what a real one was seen to do: `body` runs with $OUT, the --output= path."""
    script = folder / "bin" / "nsys"
    script.parent.mkdir()
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "NVIDIA Nsight Systems version 2022.4.2.1-df9881f"; exit 0; fi\n'
        'for a in "$@"; do case "$a" in --output=*) OUT="${a#--output=}";; esac; done\n' + body + "\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("GPUDIAG_NSYS", str(script))
    return script


def _report(folder: Path, content: bytes = _REPORT) -> Path:
    path = folder / "my run (1)?.nsys-rep"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("said", "version"),
    [
        (
            "Exportation error: Report was created in Nsight Systems version (2025.5.2.266-255236693005v0), newer than your "
            "current version (2023.4.4.54-234433681190v0)",
            "2025.5.2",
        ),
        ("Version number is invalid: 2024@2@3@38-242334140272v0", "2024.2.3"),
        ("google::protobuf ProtobufParseException", "2026.1.1"),
    ],
)
def test_a_report_newer_than_nsys_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, version: str
) -> None:
    _fake_nsys(tmp_path, f"echo '{said}'; exit 1", monkeypatch)
    with pytest.raises(
        GpudiagError, match=f"written by nsys {version}, which is newer than the installed 2022.4.2"
    ) as error:
        export_report(_report(tmp_path), tmp_path)
    assert "update nsys" in error.value.hint


def test_a_failed_export_leaves_no_partial_sqlite_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_nsys(tmp_path, 'printf "SQLite format 3" > "$OUT"; echo "disk is full"; exit 1', monkeypatch)
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(GpudiagError, match="disk is full"):
        export_report(_report(tmp_path, _REPORT.replace(b"2026@", b"2021@")), into)
    assert not list(into.iterdir())


def test_an_export_that_exits_0_but_is_broken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_nsys(tmp_path, 'printf "half" > "$OUT"', monkeypatch)
    with pytest.raises(GpudiagError, match="broken export"):
        export_report(_report(tmp_path), tmp_path)
    assert not list(tmp_path.glob("*.sqlite"))


def test_an_nsys_that_never_ends_is_ended_with_its_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_nsys(tmp_path, f"sleep 60 & echo $! > '{tmp_path}/helper'; sleep 60", monkeypatch)
    monkeypatch.setattr("gpudiag.read.nsys_report._SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(GpudiagError, match="did not finish"):
        export_report(_report(tmp_path), tmp_path)
    assert time.monotonic() - began < 20
    helper = int((tmp_path / "helper").read_text())
    deadline = time.monotonic() + 5
    while _runs(helper) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(helper)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_nsys_the_user_is_told_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUDIAG_NSYS", str(tmp_path / "none"))
    with pytest.raises(GpudiagError, match="none is installed") as error:
        export_report(_report(tmp_path), tmp_path)
    assert "nsys export -t sqlite" in error.value.hint


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\x00", b"not a report"])
def test_what_is_no_report_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(GpudiagError, match=r"empty|not a report"):
        export_report(_report(tmp_path, content), tmp_path)


def test_a_missing_file_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(GpudiagError, match="No such file"):
        export_report(tmp_path / "gone.nsys-rep", tmp_path)


def test_gpudiag_nsys_wins_over_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _fake_nsys(tmp_path, "exit 1", monkeypatch)
    assert find_nsys() == script
    assert nsys_version(script) == "2022.4.2"


def test_the_recorder_version_is_read_from_the_reports_first_bytes(tmp_path: Path) -> None:
    assert report_version(_report(tmp_path)) == "2026.1.1"
    assert report_version(_report(tmp_path, b"NVIDIA Tegra Profiler Report 1.\n" + bytes(100))) == ""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a real nsys leaves of a short run without a GPU."""
    folder = tmp_path_factory.mktemp("nsys")
    command = ["nsys", "profile", "--trace=nvtx,osrt", "--sample=none", "--cpuctxsw=none"]
    command += ["--force-overwrite=true", "-o", str(folder / "x")]
    for _ in range(3):  # "End of file" now and then, when another nsys starts or ends at the same time
        said = subprocess.run([*command, sys.executable, "-c", "print(1)"], capture_output=True, text=True, timeout=120)
        if not said.returncode and list(folder.glob("x.*")):
            return folder
    pytest.skip(f"nsys cannot record here: {said.stderr[-300:]}")


@pytest.mark.nsys
@needs_nsys
def test_a_real_recording_is_finished_exported_and_read(recorded: Path, tmp_path: Path) -> None:
    source = next(p for suffix in (".qdstrm", ".nsys-rep", ".qdrep") for p in recorded.glob(f"x{suffix}"))
    before = source.read_bytes()
    exported = export_report(source, tmp_path)
    assert exported == tmp_path / "x.sqlite"
    assert source.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.sqlite"]
    assert is_nsys_sqlite(exported)
    timeline = read_nsys_sqlite(exported)
    assert timeline.source.recorder.startswith("nsys 20")
    assert timeline.gpu_ops is None, "CUDA was not traced"
    assert timeline.time_base_ns is not None
    assert abs(timeline.time_base_ns / 1e9 - source.stat().st_mtime) < 3600


@pytest.mark.nsys
@needs_nsys
def test_a_cut_recording_is_refused_with_a_reason(recorded: Path, tmp_path: Path) -> None:
    source = next(recorded.glob("x.*"))
    cut = tmp_path / f"cut{source.suffix}"
    cut.write_bytes(source.read_bytes()[: source.stat().st_size // 3])
    with pytest.raises(GpudiagError, match="could not"):
        export_report(cut, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [cut.name]
