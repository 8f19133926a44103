"""The rule set: find the rule files, check them, judge with them (judge.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpudiag.errors import GpudiagError
from gpudiag.expr import did_you_mean
from gpudiag.judge import Claim, Grant, Judgement, cap_bounds, judge, merge, sort_findings
from gpudiag.rule import Outcome, Rule, RuleProblem
from gpudiag.rulefile import read_rule
from gpudiag.toml_places import line_and_column, places

__all__ = [
    "Claim", "Grant", "Judgement", "Outcome", "Rule", "RuleProblem", "RuleSet", "builtin_dir", "cap_bounds", "check_rules", "judge",
    "load_rules", "merge", "sort_findings",
]  # fmt: skip


@dataclass(frozen=True)
class RuleSet:
    """rules: by id, sorted. notes: what a report must say of the set (built-in rules that the user replaced)."""

    rules: dict[str, Rule]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules.values())

    def __len__(self) -> int:
        return len(self.rules)

    def named(self, name: str) -> Rule:
        """By id or alias. Raises GpudiagError."""
        for rule in self:
            if name == rule.id or name in rule.aliases:
                return rule
        raise GpudiagError(
            f"no rule is called {name!r}{did_you_mean(name, self.rules)}", "gpudiag rules list names them all"
        )


def builtin_dir() -> Path:
    """`gpudiag/_rules` of a wheel, else `rules/` beside the package (a checkout, an editable install)."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_rules", package.parent / "rules"):
        if folder.is_dir():
            return folder
    raise GpudiagError(f"{package}: the rules are not installed with the package", "install gpudiag again")


def load_rules(dirs: Sequence[Path] = ()) -> RuleSet:
    """The built-in rules and those of the user's folders; a later rule of the same id replaces an earlier one.

    Raises GpudiagError when a file has a problem: half a rule set would call a run healthy that is not.
    """
    rules: dict[str, Rule] = {}
    notes = []
    for folder in (builtin_dir(), *dirs):
        found, problems = _read_folder(folder)
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise GpudiagError(f"{problems[0]}{more}", f"gpudiag rules check {folder} lists everything")
        for rule in found:
            if rule.id in rules:
                notes.append(f"rule {rule.id} is the one of {rule.path}, it replaces {rules[rule.id].path}")
            rules[rule.id] = rule
    return RuleSet(dict(sorted(rules.items())), tuple(notes))


def check_rules(folder: Path) -> list[RuleProblem]:
    """Every problem of every file, examples included; empty when all is well. Raises GpudiagError without a folder."""
    rules, problems = _read_folder(folder)
    # By file name, so that a rule with a fault is not reported a second time as unknown.
    known = {path.stem for root in (builtin_dir(), folder) for path in root.rglob("*.toml")}
    for rule in rules:
        for cause in (*rule.explained_by, *rule.after):
            if cause not in known:
                message = f"explained_by, after: no rule is called {cause!r}{did_you_mean(cause, known)}"
                problems.append(RuleProblem(rule.path, 0, 0, message))
        problems += example_problems(rule)
    return sorted(problems, key=lambda p: (p.path, p.line, p.column, p.message))


def _read_folder(folder: Path) -> tuple[list[Rule], list[RuleProblem]]:
    if not folder.is_dir():
        raise GpudiagError(f"{folder}: no such folder", "give a folder of .toml rule files")
    rules: dict[str, Rule] = {}
    problems: list[RuleProblem] = []
    for path in sorted(folder.rglob("*.toml")):
        rule, found = read_rule(path)
        problems += found
        if rule and rule.id in rules:
            problems.append(RuleProblem(path, 0, 0, f"id: {rule.id!r} is also that of {rules[rule.id].path}"))
        elif rule:
            rules[rule.id] = rule
    return list(rules.values()), problems


def example_problems(rule: Rule) -> list[RuleProblem]:
    """The examples of a rule that do not come out as they say. Each is judged alone, with the whole step in every part."""
    problems = []
    text = rule.path.read_text(encoding="utf-8")
    for example in rule.examples:
        step = example.metrics.get("step_time")
        step_ns = int(step.value) if step else 1_000_000_000
        result = judge(
            [rule], example.metrics, step_time_ns=step_ns, parts=dict.fromkeys(rule.part, step_ns), texts=example.texts
        )
        outcome = result.outcomes[rule.id]
        said = f"{outcome} ({result.not_judged[0].missing})" if outcome == "not_judged" else outcome
        wrong = ""
        if outcome != example.outcome:
            wrong = f"comes out as {said}, not {example.outcome}"
        elif outcome == "fired" and example.severity and result.findings[0].severity != example.severity:
            wrong = f"comes out as {result.findings[0].severity}, not {example.severity}"
        elif outcome == "fired" and not result.findings[0].fixes:
            wrong = "leaves no fix that fits"
        if wrong:
            line, column = line_and_column(text, places(text)[("example", example.number)])
            problems.append(RuleProblem(rule.path, line, column, f"example {example.name!r} {wrong}"))
    return problems
