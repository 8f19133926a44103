"""A rule, checked: types only. rulefile.py reads one, judge.py judges with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gpudiag.diagnosis import BoundBy, Severity, StepName
from gpudiag.expr import Expr
from gpudiag.metrics.spec import Metric
from gpudiag.template import Template

Outcome = Literal["fired", "clear", "not_judged", "error"]

# The edits that savings.py makes to the dependency graph before replaying it. more_workers: the loader's waits shorten to
# what the workers needed would leave; remove_idle: waits for input go; remove_pause: saving and logging go; remove_part:
# the idle time of the rule's own parts goes; overlap_copy: copies run beside kernels; remove_sync: the waits go;
# shrink_launch: launch calls and framework code between them cost nothing.
EDITS = (
    "more_workers", "remove_idle", "remove_pause", "remove_part", "overlap_copy", "remove_sync", "shrink_launch",
)  # fmt: skip


@dataclass(frozen=True)
class RuleProblem:
    """A fault in a rule file; line and column are 1-based (0 where the file as a whole is meant)."""

    path: Path
    line: int
    column: int
    message: str

    def __str__(self) -> str:
        place = f":{self.line}:{self.column}" if self.line else ""
        return f"{self.path}{place}: {self.message}"


@dataclass(frozen=True)
class SeverityBands:
    """Least share of the step for each severity; a share below `info` stays silent. fixed: for rules about no time."""

    info: float = 0.03
    warning: float = 0.10
    critical: float = 0.25
    fixed: Severity | None = None
    reason: str = ""

    def of(self, share: float) -> Severity | None:
        if self.fixed:
            return self.fixed
        if share >= self.critical:
            return "critical"
        if share >= self.warning:
            return "warning"
        return "info" if share >= self.info else None


@dataclass(frozen=True)
class RuleEvidence:
    """when: shown only where this is true."""

    label: str
    value: Template
    when: Expr | None


@dataclass(frozen=True)
class RuleFix:
    """when: shown only where this is true. fallback: shown only where no other fix fits."""

    change: Template
    only_if: Template
    proof: Template
    code: Template
    when: Expr | None
    fallback: bool


@dataclass(frozen=True)
class RuleExample:
    """Metric values and what the rule must say of them. severity: checked when given. number: of the [[example]], from 0."""

    name: str
    outcome: Outcome
    metrics: dict[str, Metric]
    texts: dict[str, str]
    severity: Severity | None
    number: int


@dataclass(frozen=True)
class Rule:
    """A checked rule. The fields are explained in rules/README.md.

    unless: guards; one that is true clears the rule, one that cannot be judged is ignored. bound, summary: alternatives,
    the first that can be computed counts. part: account parts that the bound is taken from. explained_by: rules that
    explain this one where they fired with at least its bound. after: rules that come first in the method: where one is
    a warning, curing this would gain little yet, so it becomes a note under that one. gate: when it fires, no other rule is judged but those
    with `always`. ends_run: what it finds is what ended the run: it is the verdict and stands first.
    """

    id: str
    path: Path
    step: StepName
    category: BoundBy
    severity: SeverityBands
    title: str
    when: Expr
    unless: tuple[Expr, ...]
    bound: tuple[Expr, ...]
    part: tuple[str, ...]
    explained_by: tuple[str, ...]
    after: tuple[str, ...]
    gate: bool
    always: bool
    ends_run: bool
    edit: str
    no_estimate: str
    summary: tuple[Template, ...]
    why: str
    basis: str
    wrong_when: str
    where: tuple[str, ...]
    evidence: tuple[RuleEvidence, ...]
    fixes: tuple[RuleFix, ...]
    references: tuple[str, ...]
    aliases: tuple[str, ...]
    examples: tuple[RuleExample, ...] = field(repr=False)
