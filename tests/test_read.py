"""From paths to timelines: several files, copies, folders with a bad file, what is no file at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gpudiag.errors import GpudiagError
from gpudiag.pipeline import diagnose
from gpudiag.read import open_recordings


@pytest.fixture
def ranks(traces: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "ranks"
    folder.mkdir()
    for rank in range(3):
        name = f"rank{rank}.json.gz"
        shutil.copy(traces / "kineto" / "megatron_tp8" / name, folder / name)
    return folder


def test_a_folder_gives_a_timeline_a_rank(ranks: Path) -> None:
    assert [timeline.rank for timeline in open_recordings([ranks]).timelines] == [0, 1, 2]


def test_one_bad_file_costs_only_itself(ranks: Path) -> None:
    (ranks / "rank3.json.gz").touch()
    got = open_recordings([ranks])
    assert len(got.timelines) == 3
    assert any("rank3.json.gz" in warning and "empty" in warning for warning in got.warnings)


def test_a_folder_of_bad_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    (tmp_path / "b.json").write_text("no trace")
    with pytest.raises(GpudiagError, match=r"a\.json"):
        open_recordings([tmp_path])


def test_the_same_recording_twice_is_one_rank(ranks: Path, tmp_path: Path) -> None:
    one, copy = ranks / "rank0.json.gz", tmp_path / "copy.json.gz"
    shutil.copy(one, copy)
    got = open_recordings([one, one, copy])
    assert len(got.timelines) == 1
    assert sum("holds the same" in warning for warning in got.warnings) == 2


def test_files_of_different_programs_are_said_to_be_strangers(traces: Path) -> None:
    strangers = [traces / "kineto" / "gp100_gpu_user_annotation.json.gz", traces / "nsys" / "healthy_1pct_idle.sqlite"]
    diagnosis = diagnose(strangers)
    assert any("ranks of one run" in warning for warning in diagnosis.warnings)
    assert diagnosis.verdict.status != "healthy", "one of them is idle 96 % of the time"


def test_many_unlike_recordings_at_once_do_not_break(traces: Path) -> None:
    diagnosis = diagnose([traces / "kineto"])
    assert len(diagnosis.devices) > 10


def test_a_pipe_is_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(GpudiagError, match="a pipe or a device"):
        open_recordings([tmp_path / "pipe"])


def test_a_loop_of_links_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(GpudiagError, match="no such file"):
        open_recordings([tmp_path / "loop"])
