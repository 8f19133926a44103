"""The diagnosis as JUnit XML: one test a rule, so that a CI's test page shows what fired, what was clear and what could not be judged."""

from __future__ import annotations

from xml.etree import ElementTree as ET

from gpudiag.diagnosis import SEVERITY_ORDER, Diagnosis, Finding, Severity
from gpudiag.report import facts, method
from gpudiag.report.text import clean, clean_code


def render(diagnosis: Diagnosis, fail_on: Severity = "warning") -> str:
    """The XML document. A rule that fired at `fail_on` or above is a failure; below it, it passes and says why in its output.

    A rule that was not judged is skipped; a rule that broke is an error; a diagnosis without a verdict is an error of its own.
    """
    failing = SEVERITY_ORDER[: SEVERITY_ORDER.index(fail_on) + 1]
    fired: dict[str, Finding] = {finding.rule: finding for finding in reversed(diagnosis.findings)}
    missing = {item.rule: item for item in diagnosis.not_judged}
    rules = sorted({*diagnosis.rules, *fired, *missing})
    suite = ET.Element("testsuite", name="gpudiag", tests=str(len(rules) + 1))
    verdict = ET.SubElement(suite, "testcase", classname="gpudiag", name="verdict")
    if diagnosis.verdict.status == "cannot_judge":
        ET.SubElement(verdict, "error", message=facts.headline(diagnosis), type="cannot_judge")
    else:
        ET.SubElement(verdict, "system-out").text = facts.headline(diagnosis)
    for rule in rules:
        step = fired[rule].step if rule in fired else diagnosis.rule_steps.get(rule, "rules")
        case = ET.SubElement(suite, "testcase", classname=f"gpudiag.{clean(step)}", name=clean(rule))
        if rule in fired:
            finding = fired[rule]
            if finding.severity in failing:
                ET.SubElement(case, "failure", message=clean(finding.title), type=finding.severity).text = _told(
                    diagnosis, finding
                )
            else:
                ET.SubElement(case, "system-out").text = f"{clean(finding.title)}\n{_told(diagnosis, finding)}"
        elif rule in missing:
            how = f"; record with: {missing[rule].record_with}" if missing[rule].record_with else ""
            ET.SubElement(case, "skipped", message=clean(missing[rule].missing + how))
        elif diagnosis.rules.get(rule) == "error":
            ET.SubElement(case, "error", message="the rule could not be evaluated", type="rule_error")
    for outcome, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(outcome, str(len(suite.findall(f"testcase/{tag}"))))
    totals = {name: suite.attrib[name] for name in ("tests", "failures", "errors")}
    suites = ET.Element("testsuites", {"name": "gpudiag", **totals})
    suites.append(suite)
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def _told(diagnosis: Diagnosis, finding: Finding) -> str:
    lines = [facts.bound_line(diagnosis, finding), finding.summary]
    if finding.caused_by:
        lines.append(method.relation_sentence(finding, finding.caused_by))
    lines += [f"{item.label}: {item.value}" for item in finding.evidence]
    text = [clean(line) for line in lines if line]
    for fix in finding.fixes:
        text += [
            clean(f"{word}: {said}")
            for word, said in (("change", fix.change), ("only if", fix.only_if), ("proof", fix.proof))
            if said
        ]
        text += ["  " + line for line in clean_code(fix.code)] if fix.code.strip() else []
    return "\n".join(text)
