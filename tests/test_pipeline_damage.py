"""The whole of an analysis on damaged recordings: a diagnosis that keeps the laws, or one clear line. GPUDIAG_FUZZ=N cases."""

from __future__ import annotations

import gzip
import os
import random
import warnings
from pathlib import Path

import pytest
from test_kineto_fuzz import _cut, _double, _drop, _flip, _swap, _values
from test_nsys_damage import _built, _change_rows, _flip_structure

from gpudiag.diagnosis import Diagnosis, from_json, to_json
from gpudiag.errors import GpudiagError
from gpudiag.pipeline import diagnose
from gpudiag.report import html, markdown, terminal

CASES = int(os.environ.get("GPUDIAG_FUZZ", "150"))


def sound(diagnosis: Diagnosis) -> None:
    """The laws that hold for every diagnosis, whatever the recording."""
    for account in diagnosis.accounts:
        assert sum(account.parts.values()) == account.total_ns
        assert all(ns > 0 for ns in account.parts.values())
    step = diagnosis.metrics["step_time"].value or 0
    assert sum(finding.bound_ns for finding in diagnosis.findings) <= step + 1
    assert from_json(to_json(diagnosis)) == diagnosis
    if not any(device.kernels for device in diagnosis.devices) and diagnosis.devices:
        assert diagnosis.verdict.status != "healthy", "no kernel at all and healthy"
    for text in (terminal.render(diagnosis), markdown.render(diagnosis)):
        assert "nan" not in text.lower().split()
    html.render(diagnosis)


def analyzed(path: Path, case: int) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            diagnosis = diagnose([path])
            sound(diagnosis)
    except GpudiagError as error:
        assert error.message and error.hint, case
        return False
    except BaseException as error:
        error.add_note(f"case {case}")
        raise
    return True


def test_damaged_torch_traces(traces: Path, tmp_path: Path) -> None:
    names = ("mi250_minitoy", "a100_event_sync", "gp100_gpu_user_annotation", "b200_eager_8rank_rank", "cpu_only")
    sources = [gzip.decompress((traces / "kineto" / f"{name}.json.gz").read_bytes())[:3_000_000] for name in names]
    done = 0
    for case in range(CASES):
        dice = random.Random(case)
        data = dice.choice(sources)
        for _ in range(dice.choice((1, 1, 3))):
            data = dice.choice((_cut, _flip, _drop, _double, _values, _swap))(bytearray(data), dice) or b" "
        path = tmp_path / "t.json"
        path.write_bytes(data)
        done += analyzed(path, case)
    assert done


@pytest.mark.parametrize("part", [0, 1])
def test_damaged_nsys_exports(tmp_path: Path, part: int) -> None:
    source = _built(tmp_path / "built.sqlite").read_bytes()
    done = 0
    for case in range(CASES):
        choose = random.Random(2 * case + part)
        data = bytearray(source)
        if choose.random() < 0.3:
            _flip_structure(data, choose)
        path = tmp_path / "x.sqlite"
        path.write_bytes(data)
        if data == source:
            _change_rows(path, choose)
        done += analyzed(path, 2 * case + part)
    assert done


def test_a_report_on_half_a_file_says_of_every_figure_that_it_is_of_what_could_be_read(
    traces: Path, tmp_path: Path
) -> None:
    whole = traces / "kineto" / "cpu_only.json.gz"
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    complete, diagnosis = diagnose([whole]), diagnose([cut])
    assert (complete.source.incomplete, diagnosis.verdict.status) == ("", "cannot_judge")
    assert "ends early" in diagnosis.source.incomplete
    assert 0 < diagnosis.steps.count < complete.steps.count
    text, page, comment = terminal.render(diagnosis), html.render(diagnosis), markdown.render(diagnosis)
    assert f"  In what could be read: {diagnosis.steps.count} steady steps" in text
    assert "Where the time goes, in what could be read" in text
    assert "in what could be read" in page and "in what could be read" in comment
    for report in (text, comment):
        assert "all clear" not in report.partition("Machine")[0]
        assert "cannot judge: no GPU work" not in report  # it may come after the cut
    assert "could be read" not in terminal.render(complete) + html.render(complete) + markdown.render(complete)
