"""The JSON Schema that gpudiag publishes fits what gpudiag writes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import sample_diagnosis
from click.testing import CliRunner
from hostile import hostile_diagnosis

from gpudiag.cli import main
from gpudiag.diagnosis import Diagnosis, from_json, to_json
from gpudiag.report.schema import diagnosis_schema

jsonschema = pytest.importorskip("jsonschema")
VALIDATOR = jsonschema.Draft202012Validator(diagnosis_schema())
ALL = [
    sample_diagnosis.bottleneck(),
    sample_diagnosis.healthy(),
    sample_diagnosis.cannot_judge(),
    sample_diagnosis.eight_ranks(),
    hostile_diagnosis(),
]


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(diagnosis_schema())


@pytest.mark.parametrize("diagnosis", ALL)
def test_what_is_written_is_valid(diagnosis: Diagnosis) -> None:
    VALIDATOR.validate(json.loads(to_json(diagnosis)))


@pytest.mark.parametrize(
    "name",
    [
        "nsys/healthy_1pct_idle.sqlite",
        "nsys/two_kernels_only.sqlite",
        "kineto/mi250_minitoy.json.gz",
        "kineto/cpu_only.json.gz",
    ],
)
def test_diagnoses_of_real_recordings_are_valid_and_every_report_takes_them(traces: Path, name: str) -> None:
    from gpudiag.pipeline import diagnose
    from gpudiag.report import junit, markdown, sarif, terminal

    diagnosis = diagnose([traces / name])
    VALIDATOR.validate(json.loads(to_json(diagnosis)))
    assert from_json(to_json(diagnosis)) == diagnosis
    lines = terminal.render(diagnosis, inputs=["x"]).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 60
    for render in (markdown.render, sarif.render, junit.render):
        assert render(diagnosis)


def test_a_later_addition_is_valid_and_a_change_of_meaning_is_not() -> None:
    document = json.loads(to_json(ALL[0]))
    added = {**document, "later": 1}
    VALIDATOR.validate(added)
    for path, value in (
        (("schema",), "gpudiag.diagnosis/2"),
        (("verdict", "status"), "fine"),
        (("steps", "median_ns"), "41 ms"),
        (("findings", 0, "severity"), "fatal"),
    ):
        broken = copy.deepcopy(document)
        place = broken
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert not VALIDATOR.is_valid(broken), path
    del document["accounts"]
    assert not VALIDATOR.is_valid(document)


def test_the_command_line_publishes_it() -> None:
    result = CliRunner().invoke(main, ["report", "--json-schema", "-"])
    assert json.loads(result.stdout) == json.loads(json.dumps(diagnosis_schema()))
