"""What is done with a result: saved, read, compared, checked and drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from bench_sample import LOAD, mode, result, rounds, with_rates
from click.testing import CliRunner

from gpudiag.bench import html, terminal
from gpudiag.bench.check import checklist
from gpudiag.bench.compare import as_table, compare, differences, objections
from gpudiag.bench.cpu import ALL_CORES, ONE_CORE, speed_ups, split_cores
from gpudiag.bench.health import findings, findings_of_several
from gpudiag.bench.machine import gpu_state
from gpudiag.bench.result import (
    BenchResult,
    CpuRun,
    MeasuringRules,
    SweepPoint,
    measured_gpu,
    read_result,
    to_json,
    unstable_parts,
)
from gpudiag.bench.sweep import plan, run_sweep, summarise_sweep
from gpudiag.commands.bench import bench
from gpudiag.errors import GpudiagError


def save(tmp_path: Path, name: str, made: object) -> Path:
    file = tmp_path / name
    file.write_bytes(to_json(made))  # type: ignore[arg-type]
    return file


def test_a_result_survives_its_json_and_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    made = result()
    file = save(tmp_path, "a.json", made)
    assert read_result(file) == made
    assert to_json(made) == to_json(result())
    assert json.loads(file.read_text())["schema"] == "gpudiag.bench/1"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "gpudiag.diagnosis/1"}'])
def test_another_file_is_no_result(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(GpudiagError, match="not a benchmark result"):
        read_result(file)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GpudiagError, match=r"gpudiag\.bench/2"):
        read_result(save(tmp_path, "a.json", result(schema="gpudiag.bench/2")))


def test_like_is_compared_with_like_and_the_ratio_is_better_above_one() -> None:
    rows = compare([result(), with_rates(result(), 800.0, 801.0, 799.0)], ["a", "b"])
    table = as_table(rows, ["a", "b"], [])
    training = next(row for row in table.rows if row[1] == "eager: training")
    assert training == ("resnet50", "eager: training", "400 images/s", "800 images/s (2.00x)")
    slower = next(row for row in rows if row.quantity == "eager: latency p50")
    assert slower.better == "lower"


def test_an_unstable_result_is_refused_and_named() -> None:
    shaky = with_rates(result(), 400.0, 300.0, 500.0)
    assert unstable_parts(shaky) == ["resnet50 eager on cuda:0, training"]
    with pytest.raises(GpudiagError, match=r"unstable number.*resnet50 eager"):
        compare([result(), shaky], ["a", "b"])
    rows = compare([result(), shaky], ["a", "b"], anyway=True)
    assert "NOT a fair comparison" in as_table(rows, ["a", "b"], objections([result(), shaky], ["a", "b"])).note


def test_a_quick_result_and_other_rules_are_refused() -> None:
    with pytest.raises(GpudiagError, match="quick run"):
        compare([result(), result(quick=True)], ["a", "b"])
    with pytest.raises(GpudiagError, match="batch 32 and 64"):
        compare([result(), result(rules=MeasuringRules(batch=64))], ["a", "b"])
    assert not objections([result(), result(rules=MeasuringRules(threads=4))], ["a", "b"])


def test_results_without_a_common_model_cannot_be_compared() -> None:
    (model,) = result().models
    other = result(models=(msgspec.structs.replace(model, model="resnet101"),))
    with pytest.raises(GpudiagError, match="no model and mode in common"):
        compare([result(), other], ["a", "b"])


def test_losses_that_are_not_finite_are_reported_everywhere_and_refused() -> None:
    (model,) = result().models
    training = msgspec.structs.replace(model.runs[0].training, losses_not_finite=3)  # type: ignore[type-var]
    broken = result(
        models=(msgspec.structs.replace(model, runs=(msgspec.structs.replace(model.runs[0], training=training),)),)
    )
    assert "3 of 660 losses are not finite" in terminal.render(broken, 100, False, False)
    assert "3 of 660 losses are not finite" in html.render(broken)
    assert any("not finite" in text for text in objections([result(), broken], ["a", "b"]))
    assert any(item.outcome == "missing" and "not finite" in item.text for item in checklist(broken))


def test_both_speed_ups_are_given_and_labelled() -> None:
    core, cores = result().models[0].speedups
    assert (core.against, core.factor) == (ONE_CORE, pytest.approx(120.0))
    assert (cores.against, cores.factor, cores.cpu_run) == (ALL_CORES, pytest.approx(8.0), "instances")
    text = terminal.render(result(), 120, False, False)
    assert "one CPU core (the algorithm" in text and "all CPU cores (the choice" in text


def test_a_speed_up_compares_the_same_batch_and_runtime_only() -> None:
    runs = [
        CpuRun("one thread", "torch", 8, 1, 1, rounds(10, 10)),
        CpuRun("all threads", "onnxruntime", 32, 4, 1, rounds(9, 9)),
    ]
    assert speed_ups("eager", 32, 1000.0, runs) == []


def test_on_one_core_the_whole_machine_is_that_core() -> None:
    core, cores = speed_ups("eager", 8, 100.0, [CpuRun("one thread", "torch", 8, 1, 1, rounds(10, 10))])
    assert core.factor == cores.factor == pytest.approx(10.0)


def test_instances_get_disjoint_cores_of_equal_number() -> None:
    assert split_cores([0, 1, 2, 3, 8, 9, 10], 3) == [(0, 1), (2, 3), (8, 9)]
    assert split_cores([4, 6], 2) == [(4,), (6,)]


def test_the_knee_is_the_smallest_even_batch_with_90_percent_of_the_best() -> None:
    (sweep,) = result().models[0].sweeps
    assert (sweep.knee, sweep.best_batch) == (8, 16)
    assert sweep.odd_penalties == {"7": pytest.approx(250 / 380)}


def test_a_sweep_ends_at_the_first_batch_that_does_not_fit() -> None:
    assert plan(16) == [1, 2, 4, 7, 8, 15, 16]
    measured: list[int] = []

    def measure(batch: int) -> SweepPoint:
        measured.append(batch)
        return SweepPoint(batch, None if batch > 7 else 1.0 * batch, 0.0, 1, out_of_memory=batch > 7)

    points = run_sweep(plan(1024), measure, lambda point: None)
    assert measured == [1, 2, 4, 7, 8]
    assert points[-1].out_of_memory
    assert summarise_sweep(points, "training", "cuda:0", "eager").best_batch == 4


def test_a_sweep_where_nothing_fits_has_no_knee() -> None:
    sweep = summarise_sweep([SweepPoint(1, None, None, None, out_of_memory=True)], "training", "cuda:0", "eager")
    assert sweep.knee is None and sweep.best_batch is None


def test_the_checklist_passes_a_complete_result() -> None:
    assert [item for item in checklist(result()) if item.outcome == "missing"] == []


@pytest.mark.parametrize(
    ("changes", "item", "outcome"),
    [
        ({"quick": True}, "counts", "missing"),
        ({"started": ""}, "start time", "missing"),
        ({"machine": msgspec.structs.replace(result().machine, driver="")}, "software versions", "missing"),
        ({"machine": msgspec.structs.replace(result().machine, gpus=())}, "hardware", "missing"),
        ({"rules": MeasuringRules(rounds=2)}, "counts", "warn"),
        ({"rules": MeasuringRules(data="folder", folder="/x")}, "data", "warn"),
    ],
)
def test_the_checklist_names_what_would_keep_another_person_from_the_number(
    changes: dict[str, object], item: str, outcome: str
) -> None:
    found = {entry.name: entry.outcome for entry in checklist(result(**changes))}
    assert found[item] == outcome


def test_the_terminal_report_fits_its_width_and_is_plain_where_asked() -> None:
    text = terminal.render(result(), 120, False, False)
    assert max(len(line) for line in text.splitlines()) <= 120
    assert "\x1b" not in text
    assert terminal.render(result(), 120, False, True).isascii()
    assert "4.09 G" in text and "8.18 G" in text  # MAC and FLOP, each by its name
    assert "1 multiply-add (MAC) = 2 FLOP" in text.replace("\n  ", " ")


def test_the_page_is_self_contained_and_hostile_names_stay_text() -> None:
    (model,) = result().models
    hostile = result(models=(msgspec.structs.replace(model, model="<script>alert(1)</script>\u202e"),))
    page = html.render(hostile)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)
    assert "\u202e" not in page
    assert "\u202e" not in terminal.render(hostile, 100, False, False)


def test_compare_on_the_command_line_refuses_with_one_line_and_shows_with_anyway(tmp_path: Path) -> None:
    good, quick = save(tmp_path, "good.json", result()), save(tmp_path, "quick.json", result(quick=True))
    refused = CliRunner().invoke(bench, ["compare", str(good), str(quick)])
    assert isinstance(refused.exception, GpudiagError)
    page = tmp_path / "both.html"
    shown = CliRunner().invoke(bench, ["compare", str(good), str(quick), "--anyway", "--html", str(page)])
    assert shown.exit_code == 0
    assert "NOT a fair comparison: quick is a quick run" in shown.output.replace("\n  ", " ")
    assert "<svg" in page.read_text()


def test_check_exits_with_3_when_something_is_missing(tmp_path: Path) -> None:
    assert CliRunner().invoke(bench, ["check", str(save(tmp_path, "a.json", result()))]).exit_code == 0
    assert CliRunner().invoke(bench, ["check", str(save(tmp_path, "b.json", result(quick=True)))]).exit_code == 3


def test_modes_carry_their_own_dtype_and_agreement() -> None:
    text = terminal.render(result(), 120, False, False)
    assert "amp bf16" in text and "agrees" in text
    assert mode("amp", 1.0).agreement is not None


def test_a_hot_gpu_is_a_finding_by_the_rules_that_judge_profiles() -> None:
    assert findings(result()) == []
    (model,) = result().models
    power = msgspec.structs.replace(model.runs[0].power, event_shares={"HwThermalSlowdown": 0.5}, mean_mhz=1400.0)  # type: ignore[type-var]
    hot = result(models=(msgspec.structs.replace(model, runs=(msgspec.structs.replace(model.runs[0], power=power),)),))
    ((where, finding),) = findings(hot)
    assert (where, finding.rule) == ("resnet50, eager", "thermal_throttled")
    # 32 images at 400/s take 80 ms, of which at most half the samples x the missing 29 % of the clock
    assert finding.bound_ns == pytest.approx(80e6 * 0.5 * (1 - 1400 / 1980), rel=0.01)
    assert finding.title in html.render(hot)
    assert "Health of the machine" in terminal.render(hot, 100, False, False)


def test_differing_software_is_said_beside_the_ratios() -> None:
    other = result(machine=msgspec.structs.replace(result().machine, driver="535.9"))
    assert differences([result(), other], ["a", "b"]) == ["driver differs: a 550.1, b 535.9"]


def test_the_measured_gpu_is_known_by_its_uuid_and_not_by_its_number() -> None:
    """CUDA_VISIBLE_DEVICES=1 makes NVML's GPU 1 torch's cuda:0."""
    from types import SimpleNamespace

    class NvmlError(Exception):
        pass

    def refuse(*_: object) -> None:
        raise NvmlError

    class Nvml(SimpleNamespace):
        def __getattr__(self, name: str) -> object:
            return refuse  # every question that a board does not answer

    nvml = Nvml(
        NVMLError=NvmlError, NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0, NVML_NVLINK_MAX_LINKS=2,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}", nvmlDeviceGetName=lambda handle: f"name {handle}",
    )  # fmt: skip
    first, second = (gpu_state(nvml, index, handle, "550", "GPU-b") for index, handle in enumerate("ab"))
    assert (first.measured, second.measured) == (False, True)
    made = result(machine=msgspec.structs.replace(result().machine, gpus=(first, second)))
    assert measured_gpu(made) == second
    assert second.pcie_width is None and second.nvlinks_active is None
    assert "name b" in terminal.render(made, 100, False, False)


def with_power(**changes: object) -> BenchResult:
    """The sample result, its first run (eager) with other power readings."""
    (model,) = result().models
    power = msgspec.structs.replace(model.runs[0].power, **changes)  # type: ignore[type-var]
    runs = (msgspec.structs.replace(model.runs[0], power=power), *model.runs[1:])
    return result(models=(msgspec.structs.replace(model, runs=runs),))


def test_a_link_with_half_its_lanes_under_load_is_a_finding_and_a_link_not_seen_under_load_is_none() -> None:
    ((where, finding),) = findings(with_power(pcie_share=0.5))
    assert (where, finding.rule, finding.severity) == ("resnet50, eager", "pcie_degraded", "info")
    assert "50 %" in finding.summary
    assert findings(with_power(pcie_share=None)) == []


def test_one_nvlink_that_is_down_is_a_finding_and_no_bridge_at_all_is_none() -> None:
    def links(active: int) -> list[str]:
        gpu = msgspec.structs.replace(result().machine.gpus[0], nvlinks_active=active)
        made = result(machine=msgspec.structs.replace(result().machine, gpus=(gpu,)))
        return [finding.rule for _, finding in findings(made)]

    assert links(17) == ["nvlinks_down"]
    assert links(18) == links(0) == []


def test_other_programs_on_the_cpus_are_a_finding_also_without_a_gpu() -> None:
    """A quarter of 16 CPUs, in every round of the only run."""
    (model,) = result().models
    busy = msgspec.structs.replace(LOAD, others=0.25)
    rates = rounds(10, 10, 10, load=busy)
    run = msgspec.structs.replace(model.runs[0], device="cpu", power=None, latency=None, inference=())
    run = msgspec.structs.replace(run, training=msgspec.structs.replace(run.training, images_per_s=rates))  # type: ignore[type-var]
    made = result(device="cpu", models=(msgspec.structs.replace(model, runs=(run,), cpu=None),))
    ((where, finding),) = findings(made)
    assert (where, finding.rule) == ("machine", "background_load")
    assert "4 of 16 CPUs" in finding.summary


def test_the_same_finding_of_many_runs_is_told_once_for_the_worst() -> None:
    (model,) = result().models
    runs = tuple(
        msgspec.structs.replace(run, power=msgspec.structs.replace(run.power, event_shares={"HwSlowdown": share}, mean_mhz=990.0))  # type: ignore[type-var]
        for run, share in zip(model.runs, (0.2, 0.9), strict=True)
    )  # fmt: skip
    ((where, finding),) = findings(result(models=(msgspec.structs.replace(model, runs=runs),)))
    assert where == "resnet50, amp (and 1 more)"  # 90 % of 36 ms at half the clock, against 20 % of 80 ms
    assert finding.rule == "thermal_throttled"


def test_machines_with_different_drivers_are_a_finding_of_the_comparison() -> None:
    other = result(machine=msgspec.structs.replace(result().machine, driver="535.9"))
    assert [finding.rule for finding in findings_of_several([result(), other])] == ["drivers_differ"]
    assert findings_of_several([result(), result()]) == []
    unknown = result(machine=msgspec.structs.replace(result().machine, driver=""))
    assert findings_of_several([result(), unknown]) == []


def test_a_sweep_whose_rates_are_far_apart_does_not_claim_its_knee() -> None:
    (model,) = result().models
    (sweep,) = model.sweeps
    points = tuple(msgspec.structs.replace(p, spread=0.3) if p.batch == 8 else p for p in sweep.points)
    loose = (msgspec.structs.replace(sweep, points=points),)
    made = result(models=(msgspec.structs.replace(model, sweeps=loose),))
    said = " ".join(terminal.render(made, 120, False, False).split())
    assert "the spread of 1 of 5 batches is over 10 %, so knee and odd sizes are uncertain" in said
    assert "knee at batch 8, uncertain" in html.render(made)
    assert "uncertain" not in terminal.render(result(), 120, False, False) + html.render(result())


def test_an_unstable_rate_is_marked_in_the_chart_too() -> None:
    assert "images/s, unstable" in html.render(with_rates(result(), 400, 300, 410))
    assert "images/s, unstable" not in html.render(result())


def test_a_slow_link_is_told_on_the_terminal() -> None:
    assert "the link" not in terminal.render(result(), 120, False, False)
    said = " ".join(terminal.render(with_power(pcie_share=0.5), 120, False, False).split())
    assert "The PCIe link runs below what GPU and slot can do" in said


def test_a_latency_that_moves_between_rounds_is_marked_where_it_stands() -> None:
    (model,) = result().models
    latency = msgspec.structs.replace(model.runs[0].latency, p50_rounds=rounds(5e6, 9e6, 5e6, unit="ns"))  # type: ignore[type-var]
    runs = (msgspec.structs.replace(model.runs[0], latency=latency),)
    made = result(models=(msgspec.structs.replace(model, runs=runs),))
    assert "5.05 ms !" in terminal.render(made, 120, False, False)
    assert "5.05 ms !" not in terminal.render(result(), 120, False, False)
