"""Reads one rule file and finds every fault in it, with line and column."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from gpudiag import toml_places
from gpudiag.account import PARTS
from gpudiag.diagnosis import BoundBy, Severity, StepName
from gpudiag.expr import Expr, ExprError, condition, did_you_mean, evaluate, quantity
from gpudiag.expr_units import METRIC_UNITS
from gpudiag.metrics.spec import BY_NAME, TEXTS, Metric
from gpudiag.rule import EDITS, Outcome, Rule, RuleEvidence, RuleExample, RuleFix, RuleProblem, SeverityBands
from gpudiag.template import Template, parse_template

MAX_BYTES = 100_000

_FIELDS = {
    "id", "step", "category", "severity", "title", "when", "unless", "bound", "part", "explained_by", "after", "gate", "always", "ends_run", "estimate",
    "summary", "why", "basis", "wrong_when", "where", "evidence", "fix", "reference", "aliases", "example",
}  # fmt: skip
_REQUIRED = ("id", "step", "category", "title", "when", "bound", "estimate", "summary", "why", "basis", "wrong_when")
_TABLES = {
    "severity": {"info", "warning", "critical", "fixed", "reason"},
    "estimate": {"edit", "none"},
    "evidence": {"label", "value", "when"},
    "fix": {"change", "only_if", "proof", "code", "when", "fallback"},
    "reference": {"title", "url"},
    "example": {"name", "outcome", "severity", "metrics", "texts"},
}
T = TypeVar("T")
Path_ = toml_places.Path


class _Checker:
    """Reads one file's table and collects its problems instead of stopping at the first."""

    def __init__(self, path: Path, text: str, table: dict[str, Any]) -> None:
        self.path, self.text, self.table = path, text, table
        self.problems: list[RuleProblem] = []
        self._places: dict[Path_, int] | None = None

    def index(self, place: Path_) -> int:
        if self._places is None:
            self._places = toml_places.places(self.text)
        for path in (place, (*place, "="), place[:-1]):
            if path in self._places:
                return self._places[path]
        return 0

    def problem(self, place: Path_, message: str, offset: int = 0) -> None:
        line, column = toml_places.line_and_column(self.text, self.index(place) + offset)
        self.problems.append(RuleProblem(self.path, line, column, f"{_name(place)}: {message}" if place else message))

    def known(self, table: Mapping[str, Any], allowed: set[str], place: Path_) -> None:
        for key in table:
            if key not in allowed:
                self.problem((*place, key, "="), f"no such field{did_you_mean(key, allowed)}")

    def string(self, table: Mapping[str, Any], place: Path_, *, required: bool = False) -> str:
        value = table.get(str(place[-1]), "")
        if not isinstance(value, str):
            self.problem(place, f"must be a string, this is {type(value).__name__}")
            return ""
        if required and not value.strip():
            self.problem(place, "is missing or empty")
        return value

    def strings(self, table: Mapping[str, Any], place: Path_, *, one: bool = False) -> list[tuple[Path_, str]]:
        """A string or a list of strings, each with its place. one: a single string is fine."""
        value = table.get(str(place[-1]), [])
        if one and isinstance(value, str):
            return [(place, value)]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.problem(place, "must be a list of strings" + (" or one string" if one else ""))
            return []
        return [((*place, i), item) for i, item in enumerate(value)]

    def tables(self, name: str) -> list[dict[str, Any]]:
        value = self.table.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.problem((name,), f"must be written as [[{name}]]")
            return []
        for i, item in enumerate(value):
            self.known(item, _TABLES[name], (name, i))
        return value

    def choice(self, value: str, place: Path_, allowed: tuple[str, ...], default: T) -> T:
        if value in allowed:
            return value  # type: ignore[return-value]
        if value:
            self.problem(place, f"no such value {value!r}{did_you_mean(value, allowed)}; one of {', '.join(allowed)}")
        return default

    def parsed(self, parse_one: Callable[[str], T], text: str, place: Path_) -> T | None:
        try:
            return parse_one(text)
        except ExprError as error:
            self.problem(place, error.message, error.offset)
            return None

    def template(self, table: Mapping[str, Any], place: Path_, *, required: bool = False) -> Template:
        text = self.string(table, place, required=required)
        return self.parsed(parse_template, text, place) or Template(())

    def when(self, table: Mapping[str, Any], place: Path_) -> Expr | None:
        """An optional condition."""
        text = self.string(table, place)
        return self.parsed(condition, text, place) if text else None


def _name(place: Path_) -> str:
    return ".".join(str(part + 1) if isinstance(part, int) else part for part in place if part != "=")


def read_rule(path: Path) -> tuple[Rule | None, list[RuleProblem]]:
    """The rule, or all that is wrong with the file. Raises nothing for a file that can be opened or not."""
    try:
        raw = path.read_bytes()
        if len(raw) > MAX_BYTES:
            return None, [RuleProblem(path, 0, 0, f"longer than {MAX_BYTES} bytes: not a rule")]
        text = raw.decode()
        table = tomllib.loads(text)
    except OSError as error:
        return None, [RuleProblem(path, 0, 0, f"cannot be read ({error.strerror})")]
    except UnicodeDecodeError:
        return None, [RuleProblem(path, 0, 0, "is not UTF-8")]
    except tomllib.TOMLDecodeError as error:
        line, column = _toml_place(str(error), text)
        return None, [RuleProblem(path, line, column, f"not TOML: {error}")]
    except RecursionError:
        return None, [RuleProblem(path, 0, 0, "not TOML that can be read: nested too deeply")]
    checker = _Checker(path, text, table)
    rule = _rule(checker)
    return (None if checker.problems else rule), checker.problems


def _toml_place(message: str, text: str) -> tuple[int, int]:
    """tomllib says `... (at line 3, column 5)` or `... (at end of document)`."""
    found = re.search(r"at line (\d+), column (\d+)", message)
    return (int(found[1]), int(found[2])) if found else toml_places.line_and_column(text, len(text))


def _rule(c: _Checker) -> Rule | None:
    t = c.table
    c.known(t, _FIELDS, ())
    for name in _REQUIRED:
        if name not in t:
            c.problem((), f"the field {name!r} is missing")
    text = {name: c.string(t, (name,), required=name in t) for name in ("id", "step", "category", "title", "when")}
    prose = {name: c.string(t, (name,), required=name in t) for name in ("why", "basis", "wrong_when")}
    if text["id"] and text["id"] != c.path.stem:
        c.problem(("id",), f"{text['id']!r} must be the file's name, {c.path.stem!r}")
    when = c.parsed(condition, text["when"], ("when",)) if text["when"] else None
    unless = [c.parsed(condition, s, place) for place, s in c.strings(t, ("unless",))]
    bound = [c.parsed(lambda s: quantity(s, "ns"), s, place) for place, s in c.strings(t, ("bound",), one=True)]
    summary = [c.parsed(parse_template, s, place) for place, s in c.strings(t, ("summary",), one=True)]
    part = [c.choice(s, place, (*PARTS, "*"), "*") for place, s in c.strings(t, ("part",))]
    where = [c.choice(s, place, tuple(x.name for x in TEXTS), "") for place, s in c.strings(t, ("where",))]
    gate = t.get("gate", False)
    always = t.get("always", False)
    ends_run = t.get("ends_run", False)
    for name, value in (("gate", gate), ("always", always), ("ends_run", ends_run)):
        if not isinstance(value, bool):
            c.problem((name,), "must be true or false")
    severity = _severity(c)
    if ends_run is True and (severity.fixed != "critical" or always is not True):
        c.problem(
            ("ends_run",),
            'needs severity = {fixed = "critical", ...} and always = true: a run that ended is no share of a step',
        )
    edit, no_estimate = _estimate(c)
    fixes = _fixes(c)
    evidence = tuple(
        RuleEvidence(
            c.string(item, ("evidence", i, "label"), required=True),
            c.template(item, ("evidence", i, "value"), required=True),
            c.when(item, ("evidence", i, "when")),
        )
        for i, item in enumerate(c.tables("evidence"))
    )
    references = []
    for i, item in enumerate(c.tables("reference")):
        title = c.string(item, ("reference", i, "title"), required=True)
        url = c.string(item, ("reference", i, "url"))
        references.append(f"{title}: {url}" if url else title)
    if not part and severity.fixed is None:
        c.problem((), "`part` is missing: a rule about time says which parts of the account it takes its bound from")
    examples = _examples(c)
    if when is None or not bound or not summary or None in bound or None in summary or None in unless:
        return None
    return Rule(
        id=text["id"],
        path=c.path,
        step=c.choice(text["step"], ("step",), get_args(StepName), "overall"),
        category=c.choice(text["category"], ("category",), get_args(BoundBy), "none"),
        severity=severity,
        title=text["title"],
        when=when,
        unless=tuple(x for x in unless if x),
        bound=tuple(x for x in bound if x),
        part=tuple(part),
        explained_by=tuple(s for _, s in c.strings(t, ("explained_by",))),
        after=tuple(s for _, s in c.strings(t, ("after",))),
        gate=bool(gate),
        always=bool(always),
        ends_run=bool(ends_run),
        edit=edit,
        no_estimate=no_estimate,
        summary=tuple(x for x in summary if x),
        **prose,
        where=tuple(where),
        evidence=evidence,
        fixes=fixes,
        references=tuple(references),
        aliases=tuple(s for _, s in c.strings(t, ("aliases",))),
        examples=examples,
    )


def _severity(c: _Checker) -> SeverityBands:
    table = c.table.get("severity", {})
    if not isinstance(table, dict):
        c.problem(("severity",), "must be a table: severity = {info = 0.03, warning = 0.10, critical = 0.25}")
        return SeverityBands()
    c.known(table, _TABLES["severity"], ("severity",))
    reason = c.string(table, ("severity", "reason"))
    fixed = c.choice(c.string(table, ("severity", "fixed")), ("severity", "fixed"), get_args(Severity), None)
    numbers = []
    for name, default in (("info", 0.03), ("warning", 0.10), ("critical", 0.25)):
        value = table.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            c.problem(("severity", name), "must be a share of the step, 0 to 1")
            value = default
        numbers.append(float(value))
    if numbers != sorted(numbers):
        c.problem(("severity",), "info <= warning <= critical must hold")
    if table and not reason.strip():
        c.problem(("severity",), "differs from the usual 3, 10 and 25 % of the step: say why in `reason`")
    return SeverityBands(numbers[0], numbers[1], numbers[2], fixed, reason)


def _estimate(c: _Checker) -> tuple[str, str]:
    table = c.table.get("estimate", {})
    if not isinstance(table, dict) or ("estimate" in c.table and len(table) != 1):
        c.problem(("estimate",), 'must be exactly one of {edit = "NAME"} and {none = "why there is no estimate"}')
        return "", ""
    c.known(table, _TABLES["estimate"], ("estimate",))
    edit = c.string(table, ("estimate", "edit"), required="edit" in table)
    reason = c.string(table, ("estimate", "none"), required="none" in table)
    return c.choice(edit, ("estimate", "edit"), EDITS, ""), reason


def _fixes(c: _Checker) -> tuple[RuleFix, ...]:
    fixes = []
    for i, item in enumerate(c.tables("fix")):
        fallback = item.get("fallback", False)
        if not isinstance(fallback, bool):
            c.problem(("fix", i, "fallback"), "must be true or false")
        fixes.append(
            RuleFix(
                change=c.template(item, ("fix", i, "change"), required=True),
                only_if=c.template(item, ("fix", i, "only_if"), required=True),
                proof=c.template(item, ("fix", i, "proof"), required=True),
                code=c.template(item, ("fix", i, "code")),
                when=c.when(item, ("fix", i, "when")),
                fallback=bool(fallback),
            )
        )
    if not fixes:
        c.problem((), "at least one [[fix]] is needed")
    return tuple(fixes)


def _examples(c: _Checker) -> tuple[RuleExample, ...]:
    examples = []
    for i, item in enumerate(c.tables("example")):
        place: Path_ = ("example", i)
        values, texts = item.get("metrics", {}), item.get("texts", {})
        if not isinstance(values, dict) or not isinstance(texts, dict):
            c.problem(place, "metrics and texts must be tables")
            continue
        metrics = {name: _example_metric(c, name, value, (*place, "metrics", name)) for name, value in values.items()}
        outcome = c.string(item, (*place, "outcome"), required=True)
        examples.append(
            RuleExample(
                name=c.string(item, (*place, "name"), required=True),
                outcome=c.choice(outcome, (*place, "outcome"), get_args(Outcome), "clear"),
                metrics={name: metric for name, metric in metrics.items() if metric},
                texts={str(k): str(v) for k, v in texts.items()},
                severity=c.choice(c.string(item, (*place, "severity")), (*place, "severity"), get_args(Severity), None),
                number=i,
            )
        )
    outcomes = {example.outcome for example in examples}
    if "fired" not in outcomes or "clear" not in outcomes:
        c.problem((), 'at least one [[example]] with outcome "fired" and one with "clear" are needed')
    return tuple(examples)


def _example_metric(c: _Checker, name: str, value: object, place: Path_) -> Metric | None:
    """A number in the metric's own unit, or a text with constants as `13*ms`."""
    if name not in BY_NAME:
        c.problem((*place, "="), f"no metric is called {name!r}{did_you_mean(name, BY_NAME)}")
        return None
    unit = BY_NAME[name].unit
    if isinstance(value, str):
        expr = c.parsed(lambda s: quantity(s, unit), value, place)
        if expr is None:
            return None
        if expr.names:
            c.problem(place, "an example's value is a number with a unit")
            return None
        number = evaluate(expr, {})
        assert isinstance(number, float)
        return Metric(name, number / METRIC_UNITS[unit][1], unit, "example")
    if isinstance(value, bool) or not isinstance(value, int | float):
        c.problem(place, "must be a number")
        return None
    return Metric(name, value, unit, "example")
