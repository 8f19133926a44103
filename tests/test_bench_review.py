"""The review joins a diagnosis, a benchmark and a dry run into the four questions of a deployment meeting."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from bench_sample import result
from click.testing import CliRunner
from sample_diagnosis import bottleneck, finding, healthy

from gpudiag.bench.fit import Fit, Footprint, line_of
from gpudiag.bench.gpu_table import load_gpus, select_gpus
from gpudiag.bench.result import to_json
from gpudiag.bench.review import (
    ASSUMED_SHARE,
    SCHEMA,
    Review,
    estimated_rate,
    fixes_of,
    next_fixes,
    tables_of,
    which_gpu,
)
from gpudiag.commands.review import review
from gpudiag.diagnosis import Diagnosis
from gpudiag.diagnosis import to_json as diagnosis_json

SPECS = load_gpus()


def fit(what: str, fixed: float = 1e9, per_image: float = 0.1e9) -> Fit:
    low, middle, high = (Footprint(b, 10**8, 10**8, 10**8, b, b, round(fixed + per_image * b)) for b in (4, 16, 64))
    return line_of((low, middle, high), what, "fp32", "sgd", "cpu operators")


def made(diagnosis: Diagnosis, **changes: object) -> Review:
    base = Review(SCHEMA, ("train.py",), diagnosis, result(), (fit("training"), fit("serving")), 64, None)
    return msgspec.structs.replace(base, **changes)


def test_the_four_questions_are_answered_in_order() -> None:
    titles = [table.title for table in tables_of(made(bottleneck()), SPECS)]
    assert titles == ["What it does a second", "What limits it", "What the next 3 fixes bring", "Which GPU is enough"]


def test_fixes_are_the_findings_that_stand_for_themselves_and_at_most_three() -> None:
    many = bottleneck(
        findings=tuple(
            finding(f"rule_{i}", bound_ns=10**6 * (9 - i), caused_by="x" if i == 0 else "") for i in range(6)
        )
    )
    assert [f.rule for f in fixes_of(many)] == ["rule_1", "rule_2", "rule_3"]
    assert next_fixes(made(healthy(findings=()))).rows[0][0] == "nothing to fix was found"


def test_a_gpu_is_enough_when_the_batch_fits_and_the_rate_is_reached() -> None:
    rows = which_gpu(made(bottleneck()), SPECS).rows
    # 1 + 64 x 0.1 GB and 1 GB of reserve need 8.4 GB: the 8 GB cards are out, the 10 and 11 GB cards are in
    assert rows[0][0] == "GeForce RTX 3080" or float(rows[0][1]) == 10
    assert all(float(row[1]) > 8.4 for row in rows)
    few = which_gpu(made(bottleneck(), need=1e9), SPECS)
    assert few.rows[0][0] == "none of the table"


def test_an_estimated_rate_is_bounded_by_memory_as_well_as_by_compute() -> None:
    count = result().models[0].flops
    assert count is not None and count.flops_training is not None
    fast_memory = estimated_rate(count, 100_000.0, 1e9)
    slow_memory = estimated_rate(count, 100_000.0, 100.0)
    assert fast_memory == pytest.approx(ASSUMED_SHARE * 100_000e9 / count.flops_training)
    assert slow_memory == pytest.approx(ASSUMED_SHARE * 100e9 / (3 * count.bytes_ops))
    assert estimated_rate(None, 1.0, 1.0) is None


def test_a_priced_gpu_comes_first_with_its_index() -> None:
    (l4,) = select_gpus("L4", SPECS)
    rows = which_gpu(made(bottleneck(), prices={l4.name: 2500.0}), SPECS).rows
    assert rows[0][0] == "L4" and float(rows[0][4]) > 0
    assert rows[1][4] == "–"


def test_the_command_joins_earlier_recordings(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    diagnosis, bench = tmp_path / "d.json", tmp_path / "b.json"
    diagnosis.write_bytes(diagnosis_json(bottleneck()))
    bench.write_bytes(to_json(result()))
    page = tmp_path / "r.html"
    arguments = ["--model", "mobilenet_v3_large", "--diagnosis", str(diagnosis), "--bench", str(bench)]
    shown = CliRunner().invoke(review, [*arguments, "--html", str(page), "--json", str(tmp_path / "r.json")])
    assert shown.exit_code == 0, shown.output
    assert "Which GPU is enough" in shown.output
    assert "against one CPU core" in shown.output
    assert "Which GPU is enough" in page.read_text()
    assert json.loads((tmp_path / "r.json").read_text())["schema"] == SCHEMA


def test_a_script_or_a_diagnosis_is_needed_and_not_both(tmp_path: Path) -> None:
    assert CliRunner().invoke(review, ["--model", "resnet50"]).exit_code == 2
    both = CliRunner().invoke(review, ["--model", "resnet50", "--diagnosis", str(tmp_path), "train.py"])
    assert both.exit_code == 2


def test_what_ails_the_machine_is_in_the_document() -> None:
    (model,) = result().models
    power = msgspec.structs.replace(model.runs[0].power, pcie_share=0.5)  # type: ignore[type-var]
    runs = (msgspec.structs.replace(model.runs[0], power=power),)
    slow = result(models=(msgspec.structs.replace(model, runs=runs),))
    rows = [row for table in tables_of(made(healthy(), bench=slow), SPECS) for row in table.rows]
    assert any(row[0] == "health, resnet50, eager" and "PCIe" in row[1] for row in rows)
