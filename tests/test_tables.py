"""The CSV files: their figures add up, and a spreadsheet runs nothing of them."""

from __future__ import annotations

import io

import pytest
import sample_diagnosis
from hostile import FORMULA, assert_harmless, hostile_diagnosis

from gpudiag.report.tables import account, csv_files, kernels, steps

pd = pytest.importorskip("pandas")


def test_the_account_sums_to_its_window_on_each_device() -> None:
    diagnosis = sample_diagnosis.eight_ranks()
    sums = account(diagnosis).groupby(["rank", "device"])["ns"].sum()
    assert sums.tolist() == [a.total_ns for a in diagnosis.accounts]


def test_the_parts_of_a_step_sum_to_its_duration() -> None:
    table = steps(sample_diagnosis.bottleneck())
    assert len(table) == 18
    parts = table.drop(columns=["rank", "device", "step", "duration_ns"])
    assert list(parts) == ["compute", "copy_exposed.h2d", "idle.input", "idle.launch"]
    assert (parts.sum(axis=1) == table["duration_ns"]).all()


def test_without_an_account_the_durations_remain() -> None:
    table = steps(sample_diagnosis.bottleneck(accounts=()))
    assert table["duration_ns"].tolist() == list(sample_diagnosis.bottleneck().steps.durations_ns)


def test_kernel_names_are_whole() -> None:
    table = kernels(sample_diagnosis.bottleneck())
    assert table["name"].tolist() == [row.name for row in sample_diagnosis.KERNELS]
    assert table["total_ns"].tolist() == [row.total_ns for row in sample_diagnosis.KERNELS]


def test_files_are_read_back_as_they_were() -> None:
    files = csv_files(sample_diagnosis.bottleneck())
    assert set(files) == {"kernels.csv", "steps.csv", "account.csv"}
    pd.testing.assert_frame_equal(
        pd.read_csv(io.BytesIO(files["kernels.csv"])), kernels(sample_diagnosis.bottleneck()), check_dtype=False
    )


def test_a_diagnosis_with_nothing_in_it_gives_headers_only() -> None:
    empty = sample_diagnosis.cannot_judge(steps=sample_diagnosis.cannot_judge().steps)
    assert csv_files(empty)["account.csv"] == b"rank,device,scope,part,ns,share\n"


def test_hostile_names_are_neither_formulas_nor_extra_rows() -> None:
    data = csv_files(hostile_diagnosis())["kernels.csv"]
    assert_harmless(data.decode())
    names = pd.read_csv(io.BytesIO(data))["name"].tolist()
    assert len(names) == 3
    assert names[1] == "k" * 10_000
    assert names[2] == f"'{FORMULA}"
