"""JUnit XML: a CI's test page shows what fired, what was clear and what could not be judged."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
import sample_diagnosis
from hostile import assert_harmless, hostile_diagnosis

from gpudiag.diagnosis import Diagnosis, Severity
from gpudiag.report.junit import render


def suite_of(diagnosis: Diagnosis, fail_on: Severity = "warning") -> ET.Element:
    suite = ET.fromstring(render(diagnosis, fail_on)).find("testsuite")
    assert suite is not None
    return suite


def outcome(suite: ET.Element, rule: str) -> str:
    case = suite.find(f"testcase[@name='{rule}']")
    assert case is not None
    return case[0].tag if len(case) else "passed"


def test_each_rule_is_a_test() -> None:
    suite = suite_of(sample_diagnosis.bottleneck())
    assert outcome(suite, "loader_wait") == "failure"
    assert outcome(suite, "launch_bound") == "system-out"  # info: passes, and says why
    assert outcome(suite, "small_copies") == "passed"
    assert outcome(suite, "pageable_h2d") == "skipped"
    assert suite.attrib == {"name": "gpudiag", "tests": "14", "failures": "2", "errors": "0", "skipped": "1"}


@pytest.mark.parametrize(("fail_on", "failures"), [("info", "3"), ("warning", "2"), ("critical", "1")])
def test_the_gate_decides_what_is_a_failure(fail_on: Severity, failures: str) -> None:
    assert suite_of(sample_diagnosis.bottleneck(), fail_on).get("failures") == failures


def test_a_recording_that_cannot_be_judged_never_looks_green() -> None:
    suite = suite_of(sample_diagnosis.cannot_judge())
    assert suite.get("errors") == "1"
    assert suite.get("skipped") == "13"


def test_a_rule_that_broke_is_an_error() -> None:
    suite = suite_of(sample_diagnosis.healthy(rules={"loader_wait": "error"}))
    assert outcome(suite, "loader_wait") == "error"


def test_hostile_names_stay_text() -> None:
    text = render(hostile_diagnosis())
    assert_harmless(text)
    assert ET.fromstring(text).find(".//script") is None
