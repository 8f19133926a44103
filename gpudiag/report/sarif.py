"""The diagnosis as SARIF 2.1.0 (OASIS standard, errata 01): what code scanning shows beside the user's own lines.

A finding with a known place lies at that file and line. One without lies at the recording, since GitHub's upload refuses
a whole file for one result that has no location.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any
from urllib.parse import quote

from gpudiag.diagnosis import Diagnosis, Finding
from gpudiag.report import facts, method
from gpudiag.report.text import clean, clean_code

SCHEMA_URI = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVEL = {"critical": "error", "warning": "warning", "info": "note"}
_PLACE = re.compile(r"^(?P<file>.+?):(?P<line>[1-9]\d*)(?::\d+)?$")


def render(diagnosis: Diagnosis, root: Path | None = None) -> str:
    """The log as JSON. root: the checkout; files under it are given relative to it, as code scanning wants them."""
    rules = list(dict.fromkeys(finding.rule for finding in diagnosis.findings))
    return (
        json.dumps(
            {
                "$schema": SCHEMA_URI,
                "version": "2.1.0",
                "runs": [
                    {
                        "tool": {
                            "driver": {
                                "name": "gpudiag",
                                "version": clean(diagnosis.gpudiag),
                                "rules": [
                                    _rule(next(f for f in diagnosis.findings if f.rule == rule)) for rule in rules
                                ],
                            }
                        },
                        "columnKind": "unicodeCodePoints",
                        "invocations": [_invocation(diagnosis)],
                        "results": [_result(diagnosis, f, rules.index(f.rule), root) for f in diagnosis.findings],
                        "properties": {"verdict": diagnosis.verdict.status, "boundBy": diagnosis.verdict.bound_by},
                    }
                ],
            },
            indent=2,
        )
        + "\n"
    )


def _rule(finding: Finding) -> dict[str, Any]:
    help_lines = [
        _sentence(text)
        for text in (finding.why, f"Wrong when: {finding.wrong_when}" if finding.wrong_when else "")
        if text
    ]
    rule: dict[str, Any] = {
        "id": clean(finding.rule),
        "shortDescription": {"text": clean(finding.title) or clean(finding.rule)},
        "defaultConfiguration": {"level": _LEVEL[finding.severity]},
        "properties": {
            "tags": sorted({"performance", clean(finding.step), clean(finding.category)}),
            "precision": "high",
        },
    }
    if help_lines:
        rule["help"] = {"text": "\n\n".join(help_lines)}
    if finding.references and finding.references[0].startswith("https://"):
        rule["helpUri"] = quote(clean(finding.references[0]), safe=":/?#[]@!$&'()*+,;=%~")
    return rule


def _result(diagnosis: Diagnosis, finding: Finding, index: int, root: Path | None) -> dict[str, Any]:
    place = _PLACE.match(finding.where)
    sentences = [finding.title, facts.bound_line(diagnosis, finding), finding.summary]
    if finding.caused_by:
        sentences.append(method.relation_sentence(finding, finding.caused_by))
    text = [" ".join(_sentence(sentence) for sentence in sentences if sentence)]
    for fix in finding.fixes:
        text.append(
            " ".join(
                _sentence(f"{word}: {said}")
                for word, said in (("Change", fix.change), ("Only if", fix.only_if), ("Proof", fix.proof))
                if said
            )
        )
        if fix.code.strip():
            text.append("\n".join(clean_code(fix.code)))
    file = place["file"] if place else finding.where or diagnosis.source.path or "recording"
    physical: dict[str, Any] = {"artifactLocation": _artifact(file, root)}
    if place:
        physical["region"] = {"startLine": int(place["line"])}
    properties: dict[str, Any] = {
        "step": finding.step,
        "share": finding.share,
        "boundNs": finding.bound_ns,
        "estimateNs": finding.estimate_ns,
        "evidence": [f"{clean(item.label)}: {clean(item.value)}" for item in finding.evidence],
    }
    if finding.caused_by:
        properties["causedBy"] = clean(finding.caused_by)
        properties["relation"] = finding.relation
    return {
        "ruleId": clean(finding.rule),
        "ruleIndex": index,
        "level": _LEVEL[finding.severity],
        # Code scanning reads [text](1) as a link to a related location, and {0} as a placeholder.
        "message": {"text": re.sub(r"([\\\[\]])", r"\\\1", "\n\n".join(text)).replace("{", "{{").replace("}", "}}")},
        "locations": [{"physicalLocation": physical}],
        "rank": round(min(max(finding.share, 0.0), 1.0) * 100, 1),
        "partialFingerprints": {"gpudiag/v1": _fingerprint(finding, file)},
        "properties": properties,
    }


def _sentence(text: str) -> str:
    text = clean(text)
    return text if text[-1:] in ".!?:" else text + "."


def _artifact(file: str, root: Path | None) -> dict[str, Any]:
    windows = "\\" in file and "/" not in file
    path: PurePath = PureWindowsPath(file) if windows else PurePath(file)
    if root is not None and path.is_absolute() and path.is_relative_to(root):
        path = path.relative_to(root)
    uri = quote(path.as_posix(), safe="/", errors="backslashreplace")
    if path.is_absolute():
        return {"uri": f"file:///{uri.lstrip('/')}".replace("%3A/", ":/", 1)}
    return {"uri": uri, "uriBaseId": "%SRCROOT%"}


def _fingerprint(finding: Finding, file: str) -> str:
    """The same finding in the same file is the same alert, even when its line moves."""
    return hashlib.sha256(f"{finding.rule}\0{file}".encode("utf-8", "backslashreplace")).hexdigest()[:32]


def _invocation(diagnosis: Diagnosis) -> dict[str, Any]:
    notes = [("warning", warning) for warning in diagnosis.warnings]
    notes += [
        (
            "note",
            f"{facts.about_gpu_work(rules, missing) or ', '.join(rules)} not judged: {missing}"
            + (f"; record with: {how}" if how else ""),
        )
        for rules, missing, how in facts.grouped(diagnosis.not_judged)
    ]
    return {
        "executionSuccessful": diagnosis.verdict.status != "cannot_judge",
        "toolExecutionNotifications": [{"level": level, "message": {"text": clean(text)}} for level, text in notes],
    }
