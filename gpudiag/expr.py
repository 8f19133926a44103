"""The language of rule conditions: comparisons of named metrics, checked for units when a rule is loaded.

Text is parsed with `ast` and walked over a white list: comparisons, and/or/not, + - * /, numbers, names, min() and max().
Nothing is ever executed, and length, depth and size of numbers are limited, so that a hostile file costs microseconds.

Units: ns, bytes and so on are dimensions; counts, ratios and flags are plain numbers. `idle_input > 5` is an error,
`idle_input > 5*percent*step_time` passes. Rates combine: `h2d_bytes / (10*GB/s)` is a time.

Evaluation is three-valued. A metric that is missing makes the value unknown, unless the answer does not depend on it:
`a and b` is false when a is false, `a or b` true when a is true. A comparison with a metric that this kind of run does
not have (`Missing.applies`) is false: there is nothing to find. A division by zero is unknown as well (the rule is then
not judged): it comes from a recording in which a divisor happens to be 0, not from a fault of the rule.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpudiag.expr_units import BOOL, CONSTANTS, METRIC_UNITS, Unit, same
from gpudiag.metrics.spec import BY_NAME, Metric, Missing

MAX_LENGTH = 1000  # the longest condition of the built-in rules has under 200 characters
MAX_DEPTH = 40
MAX_NUMBER = 1e18  # 30 years in ns
_ALLOWED = re.compile(r"[A-Za-z0-9_ .+\-*/()<>=!,\n]*")


class ExprError(Exception):
    """A fault in a rule's text. offset: index of the character in the text where it lies."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


class MetricError(Exception):
    """A metric whose value contradicts its own definition (wrong unit, not finite): a bug in the metrics, not in the rule."""


@dataclass(frozen=True)
class Unknown:
    """The value depends on metrics that are missing (or on a division by zero); first needed first."""

    missing: tuple[Missing, ...]


@dataclass(frozen=True)
class Expr:
    """A checked expression. names: the metrics it reads."""

    text: str
    unit: Unit
    names: tuple[str, ...]
    tree: ast.expr


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` or the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def parse(text: str) -> Expr:
    """Check a text and its units. Raises ExprError."""
    if len(text) > MAX_LENGTH:
        raise ExprError(f"longer than {MAX_LENGTH} characters", MAX_LENGTH)
    allowed = _ALLOWED.match(text)
    end = allowed.end() if allowed else 0
    if end < len(text):
        raise ExprError(f"{text[end]!r} is not part of the condition language", end)
    flat = text.replace("\n", " ")
    lead = len(flat) - len(flat.lstrip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # `1or 2` only warns
            tree = ast.parse(flat.strip(), mode="eval").body
    except SyntaxError as error:
        raise ExprError(f"not an expression ({error.msg})", lead + max((error.offset or 1) - 1, 0)) from None
    except (ValueError, RecursionError, MemoryError):
        raise ExprError("not an expression (nested too deeply)", 0) from None
    names: dict[str, None] = {}
    try:
        unit = _check(tree, names, 0)
    except ExprError as error:
        raise ExprError(error.message, error.offset + lead) from None
    return Expr(text, unit, tuple(names), tree)


def condition(text: str) -> Expr:
    """An expression that is true or false. Raises ExprError."""
    expr = parse(text)
    if not expr.unit.is_bool:
        raise ExprError(f"a condition must be a comparison, this is {expr.unit}", 0)
    return expr


def quantity(text: str, unit: str) -> Expr:
    """An expression with a given unit (a key of METRIC_UNITS). Raises ExprError."""
    expr = parse(text)
    if not same(expr.unit, METRIC_UNITS[unit][0]):
        raise ExprError(f"must be {METRIC_UNITS[unit][0]}, this is {expr.unit}", 0)
    return expr


def _check(node: ast.expr, names: dict[str, None], depth: int) -> Unit:
    here = node.col_offset
    if depth > MAX_DEPTH:
        raise ExprError("nested too deeply", here)
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            if not abs(value) <= MAX_NUMBER:
                raise ExprError(f"numbers go up to {MAX_NUMBER:g}", here)
            return Unit(is_zero=value == 0)
        case ast.Name(id=name):
            if name in CONSTANTS:
                return CONSTANTS[name][0]
            if name not in BY_NAME:
                known = [*BY_NAME, *CONSTANTS, "min", "max"]
                raise ExprError(f"no metric is called {name!r}{did_you_mean(name, known)}", here)
            names.setdefault(name)
            return METRIC_UNITS[BY_NAME[name].unit][0]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            _need_bool(operand, names, depth)
            return BOOL
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _need_number(operand, names, depth)
        case ast.BoolOp(values=terms):
            for term in terms:
                _need_bool(term, names, depth)
            return BOOL
        case ast.Compare(left=left, ops=ops, comparators=others):
            for op in ops:
                if not isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.Eq | ast.NotEq):
                    raise ExprError("only < <= > >= == != compare", here)
            _alike([left, *others], names, depth, "compare")
            return BOOL
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            return _alike([left, right], names, depth, "add" if isinstance(op, ast.Add) else "subtract")
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as op, right=right):
            return _product(left, op, right, names, depth)
        case ast.Call(func=ast.Name(id="min" | "max"), args=args, keywords=[]) if len(args) >= 2:
            return _alike(args, names, depth, "take the least or most of")
        case ast.Call():
            raise ExprError("only min(a, b, ...) and max(a, b, ...) can be called", here)
    raise ExprError(f"{type(node).__name__} is not part of the condition language", here)


def _need_number(node: ast.expr, names: dict[str, None], depth: int) -> Unit:
    unit = _check(node, names, depth + 1)
    if unit.is_bool:
        raise ExprError("a number is needed here, this is true/false", node.col_offset)
    return unit


def _need_bool(node: ast.expr, names: dict[str, None], depth: int) -> None:
    unit = _check(node, names, depth + 1)
    if not unit.is_bool:
        raise ExprError(f"a comparison is needed here, this is {unit}", node.col_offset)


def _alike(nodes: list[ast.expr], names: dict[str, None], depth: int, verb: str) -> Unit:
    """The common unit of operands that are compared or added."""
    units = [_need_number(node, names, depth) for node in nodes]
    first = next((unit for unit in units if not unit.is_zero), units[0])
    for node, unit in zip(nodes, units, strict=True):
        if not same(first, unit):
            hint = "; say the share of something (5*percent*step_time) or give it a unit (5*ms)"
            plain = unit.plain or first.plain
            raise ExprError(f"cannot {verb} {first} and {unit}{hint if plain else ''}", node.col_offset)
    kinds = {unit.kind for unit in units if not unit.is_zero} - {"number"}
    return Unit(first.powers, kinds.pop() if len(kinds) == 1 else "number")


def _product(left: ast.expr, op: ast.operator, right: ast.expr, names: dict[str, None], depth: int) -> Unit:
    a, b = _need_number(left, names, depth), _need_number(right, names, depth)
    if isinstance(op, ast.Div):
        if b.is_zero:
            raise ExprError("division by zero", right.col_offset)
        powers = tuple(x - y for x, y in zip(a.powers, b.powers, strict=True))
        shown = a.kind if b.plain and b.kind == "number" else "ratio"
    else:
        powers = tuple(x + y for x, y in zip(a.powers, b.powers, strict=True))
        kinds = {u.kind for u in (a, b) if u.plain} - {"number", "ratio"}
        shown = kinds.pop() if len(kinds) == 1 else ("ratio" if "ratio" in (a.kind, b.kind) else "number")
    if any(abs(power) > 4 for power in powers):
        raise ExprError("no quantity has such a unit", left.col_offset)
    return Unit(powers, shown)


Value = float | bool | Unknown
Env = Mapping[str, Metric | Missing]


def evaluate(expr: Expr, metrics: Env) -> Value:
    """The value in base units (ns, bytes, bytes/ns), or Unknown. Raises MetricError."""
    value = _value(expr.tree, metrics)
    if isinstance(value, float) and not math.isfinite(value):
        return Unknown((Missing(expr.text, "the value is too large", ""),))
    return value


def _value(node: ast.expr, metrics: Env) -> Value:
    match node:
        case ast.Constant(value=value):
            return float(value)  # type: ignore[arg-type]
        case ast.Name(id=name):
            return CONSTANTS[name][1] if name in CONSTANTS else _metric(name, metrics)
        case ast.UnaryOp(op=op, operand=operand):
            inner = _value(operand, metrics)
            if isinstance(inner, Unknown):
                return inner
            if isinstance(op, ast.Not):
                return not inner
            return -inner if isinstance(op, ast.USub) else inner
        case ast.BoolOp(op=op, values=values):
            return _logic([_value(v, metrics) for v in values], decisive=isinstance(op, ast.Or))
        case ast.Compare(left=left, ops=ops, comparators=others):
            terms = [_value(n, metrics) for n in (left, *others)]
            return _logic([_compare(op, a, b) for op, a, b in zip(ops, terms, terms[1:], strict=False)], decisive=False)
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(op, _value(left, metrics), _value(right, metrics), right)
        case ast.Call(func=ast.Name(id=name), args=args):
            terms = [_value(n, metrics) for n in args]
            unknown = _joined(terms)
            if unknown:
                return unknown
            numbers = [float(t) for t in terms if not isinstance(t, Unknown)]
            return min(numbers) if name == "min" else max(numbers)
    raise AssertionError(f"unchecked node {type(node).__name__}")


def _metric(name: str, metrics: Env) -> float | Unknown:
    found = metrics.get(name)
    if found is None:
        return Unknown((Missing(name, "not measured for this recording", ""),))
    if isinstance(found, Missing):
        return Unknown((found,))
    wanted = BY_NAME[name].unit
    if found.unit != wanted:
        raise MetricError(f"metric {name} has unit {found.unit!r}, its definition says {wanted!r}")
    if not math.isfinite(found.value):
        raise MetricError(f"metric {name} is {found.value}")
    return float(found.value) * METRIC_UNITS[wanted][1]


def _joined(values: Iterable[Value]) -> Unknown | None:
    missing = {m.name: m for v in values if isinstance(v, Unknown) for m in v.missing}
    return Unknown(tuple(missing.values())) if missing else None


def _logic(values: list[Value], *, decisive: bool) -> bool | Unknown:
    """Kleene's and (decisive False) and or (decisive True)."""
    if any(v is decisive for v in values):
        return decisive
    return _joined(values) or (not decisive)


def _compare(op: ast.cmpop, a: Value, b: Value) -> bool | Unknown:
    unknown = _joined((a, b))
    if unknown:
        return unknown if all(one.applies for one in unknown.missing) else False
    assert not isinstance(a, Unknown)
    assert not isinstance(b, Unknown)
    match op:
        case ast.Lt():
            return a < b
        case ast.LtE():
            return a <= b
        case ast.Gt():
            return a > b
        case ast.GtE():
            return a >= b
        case ast.Eq():
            return a == b
    return a != b


def _arithmetic(op: ast.operator, a: Value, b: Value, divisor: ast.expr) -> float | Unknown:
    unknown = _joined((a, b))
    if unknown:
        return unknown
    assert not isinstance(a, Unknown)
    assert not isinstance(b, Unknown)
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
    if b == 0:
        text = ast.unparse(divisor)
        return Unknown((Missing(text, f"{text} is 0, nothing can be divided by it", ""),))
    return a / b
