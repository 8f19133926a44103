"""Cases from the field as timelines: the true cause is named first, and nothing is said that was wrong there."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from cases import ALL, FURTHER, NOT_EXPRESSED
from cases.case import Case, faults
from conftest import SHARED

from gpudiag.pipeline import diagnose_recordings
from gpudiag.read import Recordings
from gpudiag.rules import RuleSet, load_rules

CASES_FILE = SHARED / "cases" / "CASES.jsonl"


@pytest.fixture(scope="module")
def rules() -> Iterator[RuleSet]:
    yield load_rules()


@pytest.mark.parametrize("case", ALL + FURTHER, ids=[case.id for case in ALL + FURTHER])
def test_the_true_cause_is_named_first_and_nothing_wrong_is_said(case: Case, rules: RuleSet) -> None:
    built = case.build()
    diagnosis = diagnose_recordings(Recordings(built if isinstance(built, tuple) else (built,)), rules)
    assert faults(case, diagnosis) == []
    for account in diagnosis.accounts:
        assert sum(account.parts.values()) == account.total_ns


def test_rules_that_cases_name_exist(rules: RuleSet) -> None:
    for case in ALL + FURTHER:
        for rule in (*case.first, *case.also, *case.silent):
            assert rule in rules.rules, f"{case.id}: {rule}"


@pytest.mark.skipif(not CASES_FILE.is_file(), reason="the shared cases are not here")
def test_every_case_is_expressed_or_said_to_be_beyond_a_timeline() -> None:
    known = {json.loads(line)["id"] for line in CASES_FILE.read_text().splitlines() if line.strip()}
    expressed = {case.id.partition(":")[0] for case in ALL}
    assert not expressed & set(NOT_EXPRESSED)
    assert expressed | set(NOT_EXPRESSED) == known
