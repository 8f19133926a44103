"""A disk that is full or not writable, and names that are taken: said in so many words, and nothing of the user's is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_profile import run
from test_profile_robust import PROFILE

from gpudiag.bundle import SCHEMA, Manifest, is_bundle, write_manifest

NOTHING_RUN = "the script was not started"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """A file system of its own, of a given size."""
    mounted: list[Path] = []

    def make(size: str) -> Path:
        folder = tmp_path / f"disk{size}"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "ran.py").write_text("print('RAN')")
    return tmp_path / "ran.py"


def refused(script: Path, *words: str) -> str:
    """What is said, in a line and its hint, where nothing is run."""
    got = run([*PROFILE, "--no-save", "--with", "torch", *words, str(script)], script.parent)
    assert (got.code, got.out, len(got.err.strip().splitlines())) == (1, "", 2), got.err
    return got.err


def test_a_nearly_full_disk_is_refused_before_the_run(script: Path, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("3m")
    said = refused(script, "-o", str(disk / "b"))
    assert f"{disk / 'b'}: only 3 MiB free on this disk" in said
    assert NOTHING_RUN in said
    assert list(disk.iterdir()) == []


FILLS = """
import os, sys, torch
net = torch.nn.Linear(64, 64); opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(60):
    opt.zero_grad(); net(torch.randn(32, 64)).sum().backward(); opt.step()
    if i == int(sys.argv[2]):
        with open(os.path.join(sys.argv[1], "mine"), "wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)): pass
            except OSError: pass
print("end"); sys.exit(4)
"""


@pytest.mark.live
@pytest.mark.parametrize("recorder", ["torch", pytest.param("nsys", marks=pytest.mark.nsys)])
@pytest.mark.parametrize("when", [2, 55])
def test_a_disk_that_fills_up_costs_the_recording_at_most(
    tmp_path: Path, small_disk: Callable[[str], Path], recorder: str, when: int
) -> None:
    pytest.importorskip("torch")
    from gpudiag.read.nsys_report import find_nsys

    if recorder == "nsys" and find_nsys() is None:
        pytest.skip("nsys is not installed")
    disk = small_disk("80m")
    (tmp_path / "fills.py").write_text(FILLS)
    command = [*PROFILE, "--no-save", "--with", recorder, "-o", str(disk / "b"), "--html", str(disk / "r.html")]
    got = run([*command, "fills.py", str(disk), str(when)], tmp_path)
    assert (got.code, got.out) == (4, "end\n"), got.err
    assert "Traceback" not in got.err
    assert (disk / "mine").stat().st_size > 40 << 20
    full = [line for line in got.err.splitlines() if "No space left" in line or "disk ran full" in line]
    assert full, got.err
    assert not [path for path in disk.rglob("*") if ".part" in path.name or path.name.startswith((".r.html", ".diag"))]


@pytest.mark.parametrize("kind", ["file", "folder with something else", "bundle"])
def test_a_name_that_is_taken_is_refused_and_what_is_there_stays(script: Path, tmp_path: Path, kind: str) -> None:
    taken = tmp_path / "taken"
    if kind == "file":
        taken.write_text("mine")
    else:
        taken.mkdir()
        (taken / "thesis.txt").write_text("mine")
        if kind == "bundle":
            write_manifest(taken, Manifest(SCHEMA, "0", ("a",), "now", None, ()))
            (taken / "torch").mkdir()
            (taken / "torch" / "rank0.kineto.json.gz").write_bytes(b"old")
    before = {path: path.read_bytes() for path in [taken, *taken.rglob("*")] if path.is_file()}

    said = refused(script, "-o", "taken")
    assert f"{taken}: exists already" in said
    assert "choose another folder with -o, or add --force" in said
    assert {path: path.read_bytes() for path in before} == before
    if kind != "bundle":
        said = refused(script, "-o", "taken", "--force")
        assert "holds something other than a profile, which --force will not delete" in said
        assert {path: path.read_bytes() for path in before} == before


@pytest.mark.live
def test_force_replaces_the_recording_and_leaves_what_is_not_of_gpudiag(script: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    (taken / "torch").mkdir(parents=True)
    write_manifest(taken, Manifest(SCHEMA, "0", ("a",), "now", None, ()))
    (taken / "thesis.txt").write_text("mine")
    (taken / "torch" / "rank0.kineto.json.gz").write_bytes(b"old")
    got = run([*PROFILE, "--no-save", "--with", "torch", "-o", "taken", "--force", str(script)], tmp_path)
    assert (got.code, got.out) == (0, "RAN\n")
    assert (taken / "thesis.txt").read_text() == "mine"
    assert not (taken / "torch" / "rank0.kineto.json.gz").exists()
    assert is_bundle(taken)


def test_a_folder_that_cannot_be_written_is_said_with_its_reason(
    script: Path, tmp_path: Path, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("70m")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    said = refused(script, "-o", str(disk / "b"))
    assert f"{disk / 'b'}: cannot be written (Read-only file system)" in said
    assert NOTHING_RUN in said
    assert "cannot be written (Not a directory)" in refused(script, "-o", str(script / "b"))
    said = refused(script, "-o", str(tmp_path / "fine"), "--html", str(disk / "r.html"))
    assert f"cannot write {disk / 'r.html'}: Read-only file system" in said
    assert not (tmp_path / "fine").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_of_somebody_else_is_refused(script: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert "cannot be written (Permission denied)" in refused(script, "-o", str(closed / "b"))


def test_a_report_that_would_overwrite_what_is_no_file_is_refused(script: Path, tmp_path: Path) -> None:
    (tmp_path / "r.html").mkdir()
    assert "is a folder, not a file" in refused(script, "--html", "r.html")
    assert not list(tmp_path.glob("gpudiag-*"))
