"""The GPU table against its own arithmetic, and the choice by price and by memory."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpudiag.bench.gpu_table import GpuSpec, find_gpu, load_gpus, parse_gpus, select_gpus
from gpudiag.bench.rank import Price, index_of, notes, parse_price, rank, read_prices
from gpudiag.commands.gpus import gpus
from gpudiag.errors import GpudiagError

SPECS = load_gpus()
named = pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])


def test_the_table_spans_pascal_to_blackwell_with_at_least_30_gpus_of_both_kinds() -> None:
    assert len(SPECS) >= 30
    assert {spec.architecture for spec in SPECS} == {
        "Pascal",
        "Volta",
        "Turing",
        "Ampere",
        "Ada Lovelace",
        "Hopper",
        "Blackwell",
    }
    assert {"consumer", "data-centre"} <= {spec.segment for spec in SPECS}
    assert len({spec.name for spec in SPECS}) == len(SPECS)
    assert all(spec.source for spec in SPECS)


@named
def test_fp32_is_two_operations_a_core_and_clock(spec: GpuSpec) -> None:
    if spec.cores is None or spec.boost is None or spec.fp32 is None:
        pytest.skip("the vendor does not state cores and clock")
    assert 2 * spec.cores * spec.boost * 1e6 / 1e12 == pytest.approx(spec.fp32, rel=0.03)


@named
def test_bandwidth_is_bus_width_times_data_rate(spec: GpuSpec) -> None:
    if spec.bus is None or spec.gbps is None:
        pytest.skip("the vendor does not state bus and data rate")
    assert spec.bandwidth is not None
    assert spec.bus * spec.gbps / 8 == pytest.approx(spec.bandwidth, rel=0.03)


@named
def test_no_sparse_figure_is_mixed_in(spec: GpuSpec) -> None:
    """Each halving of the width doubles a tensor core's dense rate; a sparse figure in one column would show as four times."""
    if spec.tf32 and spec.fp16:
        assert spec.fp16 / spec.tf32 == pytest.approx(2, rel=0.06)
    if spec.fp16 and spec.bf16:
        assert spec.fp16 == spec.bf16
    if spec.fp16 and spec.fp8:
        assert spec.fp8 / spec.fp16 == pytest.approx(2, rel=0.03)
    # whole chips: tensor over FP32 rate of each architecture, dense
    most = {"Volta": 8, "Turing": 8.1, "Ampere": 16.1, "Ada Lovelace": 4.1, "Hopper": 15, "Blackwell": 31.5}
    if spec.fp16 and spec.fp32:
        assert spec.fp16 / spec.fp32 <= most[spec.architecture]


@named
def test_units_exist_from_the_architecture_that_introduced_them(spec: GpuSpec) -> None:
    capability = tuple(int(part) for part in spec.cc.split("."))
    assert ("fp8" in spec.absent) == (capability < (8, 9))
    assert ("bf16" in spec.absent) == ("tf32" in spec.absent) == (capability < (8, 0))


def test_a_driver_name_finds_its_gpu_and_no_look_alike() -> None:
    for driver, name in (
        ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("Tesla T4", "Tesla T4"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("NVIDIA H200", "H200 SXM"),
    ):
        found = find_gpu(driver, SPECS)
        assert found is not None and found.name == name
    for unknown in ("NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H20", "AMD Instinct MI300X"):
        assert find_gpu(unknown, SPECS) is None


def test_a_query_may_mean_several_gpus_and_an_unknown_one_is_not_guessed() -> None:
    assert [spec.name for spec in select_gpus("rtx 4090", SPECS)] == ["GeForce RTX 4090"]
    assert len(select_gpus("v100", SPECS)) == 4
    with pytest.raises(GpudiagError, match="not in the GPU table"):
        select_gpus("RTX 9090", SPECS)


def test_a_row_without_a_source_is_refused() -> None:
    header = "name,driver,architecture,segment,cc,year,cores,boost,fp32,tf32,fp16_vector,fp16,bf16,fp8,memory,memory_type,bus,gbps,bandwidth,tdp,pcie,nvlink,source"
    with pytest.raises(GpudiagError, match="no source"):
        parse_gpus(f"{header}\nX,X,Ada Lovelace,consumer,8.9,2023,1,1,1,,,,,,8,G,1,1,1,1,x,0,\n", "mine.csv")


def test_the_index_is_the_formula() -> None:
    # 1000 GFLOPS x 0.5 / (2000 x (1 + 0.4 x 0.25)) = 500 / 2200
    assert index_of(1000, 0.5, 2000, 400, 0.25) == pytest.approx(500 / 2200)


def test_dearer_electricity_moves_a_frugal_gpu_past_a_hungry_one() -> None:
    prices = {"L4": Price(1000.0, None, ""), "GeForce RTX 4090": Price(1400.0, None, "")}
    chosen = select_gpus("L4", SPECS) + select_gpus("RTX 4090", SPECS)
    cheap = rank(chosen, prices, "bf16", 1.0, 0.0, {})
    dear = rank(chosen, prices, "bf16", 1.0, 5.0, {})
    assert [row.gpu.name for row in cheap] == ["L4", "GeForce RTX 4090"]
    assert dear[0].index is not None and cheap[0].index is not None
    assert dear[0].index / dear[1].index > cheap[0].index / cheap[1].index  # type: ignore[operator]


def test_measured_figures_replace_estimates_and_mixing_them_is_said() -> None:
    prices = {"L4": Price(1000.0, None, ""), "A10": Price(1000.0, None, "")}
    chosen = select_gpus("L4", SPECS) + select_gpus("A10", SPECS)
    rows = rank(chosen, prices, "bf16", 1.0, 0.0, {"A10": 100_000.0})
    assert rows[0].gpu.name == "A10" and rows[0].basis == "measured"
    assert any("side by side" in note for note in notes(rows, date(2026, 1, 1)))


def test_a_missing_price_or_unit_is_a_reason_and_no_number() -> None:
    rows = rank(SPECS, {"GeForce GTX 1080": Price(200.0, None, "")}, "bf16", 1.0, 0.0, {})
    by_name = {row.gpu.name: row for row in rows}
    assert by_name["GeForce GTX 1080"].index is None and by_name["GeForce GTX 1080"].reason == "it has no bf16 units"
    assert by_name["L4"].reason == "no price given"
    assert "unknown" in by_name["RTX PRO 6000 Blackwell"].reason


def test_a_price_file_needs_dates_and_old_ones_are_said(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("name,price,date,source\nRTX 4090,1600,2024-01-15,a shop\n")
    prices = read_prices(file, SPECS)
    assert prices["GeForce RTX 4090"] == Price(1600.0, date(2024, 1, 15), "a shop")
    rows = rank(SPECS, prices, "fp16", 1.0, 0.0, {})
    assert any("older than 90 days" in note for note in notes(rows, date(2026, 1, 1)))
    file.write_text("name,price,date,source\nRTX 4090,1600,,a shop\n")
    with pytest.raises(GpudiagError, match="no date"):
        read_prices(file, SPECS)


@pytest.mark.parametrize("text", ["RTX 4090", "RTX 4090=cheap", "RTX 4090=-3", "RTX 4090=inf", "A100=9000"])
def test_a_price_that_cannot_be_used_says_why(text: str) -> None:
    with pytest.raises(GpudiagError):
        parse_price(text, SPECS)


def test_the_list_says_no_for_a_missing_unit_and_a_question_mark_for_a_missing_figure() -> None:
    result = CliRunner().invoke(gpus, ["list", "P40", "RTX PRO 6000 Blackwell", "--sources"])
    assert result.exit_code == 0
    pascal, blackwell = (
        line
        for line in result.output.splitlines()
        if "GB" not in line and ("P40 " in line or "RTX PRO" in line) and "x16" in line
    )
    assert " no " in pascal and "?" not in pascal
    assert "?" in blackwell
    assert "NVIDIA Tesla P40 data sheet" in result.output


def test_rank_prints_json_and_only_it() -> None:
    result = CliRunner().invoke(gpus, ["rank", "L4", "--price", "L4=2500", "--electricity", "0.3", "--json", "-"])
    assert result.exit_code == 0
    (row,) = json.loads(result.stdout)
    assert row["index"] == pytest.approx(121_000 * 0.4 / (2500 * (1 + 0.072 * 0.3)))


def test_rank_without_any_price_is_an_error_with_a_hint() -> None:
    result = CliRunner().invoke(gpus, ["rank"])
    assert isinstance(result.exception, GpudiagError) and "--price" in result.exception.hint


def test_fit_says_for_each_gpu_whether_the_batch_fits_and_how_it_was_checked() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    arguments = [
        "fit",
        "--model",
        "mobilenet_v3_large",
        "--batch",
        "100",
        "--gpu",
        "L4",
        "--memory",
        "2",
        "--what",
        "training",
    ]
    result = CliRunner().invoke(gpus, [*arguments, "--json", "-"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    small, large = found["gpus"]
    assert (small["gpu"], large["gpu"]) == ("2 GB", "L4")
    assert small["training"] < 100 < large["training"]
    assert "checked" in found["checked"]
    (fit,) = found["fits"]
    assert fit["linear"] and fit["points"][0]["weights"] > 5_483_032 * 4  # parameters and batch-norm statistics
    shown = CliRunner().invoke(gpus, arguments)
    assert " NO " in shown.output and " yes " in shown.output
    assert "GB are kept for" in shown.output


def test_fit_of_an_unknown_gpu_is_an_error() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    result = CliRunner().invoke(gpus, ["fit", "--model", "resnet50", "--gpu", "RTX 9090"])
    assert isinstance(result.exception, GpudiagError)


def test_the_ranking_fits_80_columns_and_says_what_an_estimate_assumes(tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("name,price,date,source\nRTX 4090,1600,2026-10-01,shop\nH100 PCIe,25000,2025-01-01,shop\n")
    done = CliRunner().invoke(gpus, ["rank", "--prices", str(prices), "--price", "L4=2500", "--electricity", "0.3"])
    assert done.exit_code == 0, done.output
    assert max(len(line) for line in done.output.splitlines()) <= 80
    assert "40 % of the data sheet's dense peak is assumed" in " ".join(done.output.split())


def test_a_gpu_that_is_not_in_the_table_is_named_with_its_row(tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("name,price,date,source\nL4,2500,2026-10-01,shop\nNope 3000,1,2026-10-01,shop\n")
    with pytest.raises(GpudiagError, match=r"row 3: 'Nope 3000' is not in the GPU table"):
        read_prices(prices, SPECS)
