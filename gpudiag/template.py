"""Texts of rules with measured values in braces, checked like conditions: `idle for {idle_input} of {step_time}`.

A field is an expression (formatted by its unit) or the name of a recorded text. After a colon a way to show it:
`{idle_input/step_time:percent}`, `{observer_slowdown:factor}` (2.3x), `{x:count}`, `{x:floor}` (a whole number for
code), `{x:number}`. `{x} worker{x:plural}`: an s unless x is shown as 1. `{{` is a brace.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpudiag import units
from gpudiag.expr import Env, Expr, ExprError, Unknown, did_you_mean, evaluate, parse
from gpudiag.expr_units import METRIC_UNITS, Unit
from gpudiag.metrics.spec import BY_NAME, TEXTS, Missing

_PIECES = re.compile(r"(?P<open>\{\{)|(?P<close>\}\})|\{(?P<field>[^{}]*)\}|(?P<stray>[{}])")
_SHOWN = ("percent", "factor", "count", "floor", "number", "plural")
_TEXTS = frozenset(spec.name for spec in TEXTS)
MAX_LENGTH = 4000


@dataclass(frozen=True)
class Field:
    """expr None: the recorded text of that name. show: one of _SHOWN or ""."""

    name: str
    expr: Expr | None
    show: str


@dataclass(frozen=True)
class Template:
    """parts: literal texts and fields in order."""

    parts: tuple[str | Field, ...]

    @property
    def is_constant(self) -> bool:
        return not any(isinstance(part, Field) for part in self.parts)

    @property
    def text(self) -> str:
        """For a page about the rule: with the names of what is measured in braces."""
        return "".join(part if isinstance(part, str) else f"{{{part.name}}}" for part in self.parts)


def parse_template(text: str) -> Template:
    """Raises ExprError with the offset in the text."""
    if len(text) > MAX_LENGTH:
        raise ExprError(f"longer than {MAX_LENGTH} characters", MAX_LENGTH)
    parts: list[str | Field] = []
    at = 0
    for match in _PIECES.finditer(text):
        parts.append(text[at : match.start()])
        at = match.end()
        if match["open"] or match["close"]:
            parts.append("{" if match["open"] else "}")
        elif match["stray"]:
            raise ExprError("a lone brace; write {{ or }} for one in the text", match.start())
        else:
            parts.append(_field(match["field"], match.start("field")))
    parts.append(text[at:])
    return Template(tuple(part for part in parts if part != ""))


def _field(text: str, at: int) -> Field:
    source, _, show = text.partition(":")
    if show and show not in _SHOWN:
        raise ExprError(f"no way to show a value is called {show!r}{did_you_mean(show, _SHOWN)}", at + len(source) + 1)
    name = source.strip()
    if name in _TEXTS:
        return Field(name, None, "")
    if name.isidentifier() and name not in BY_NAME:
        raise ExprError(f"no metric or text is called {name!r}{did_you_mean(name, [*BY_NAME, *_TEXTS])}", at)
    try:
        expr = parse(source)
    except ExprError as error:
        raise ExprError(error.message, at + error.offset) from None
    if expr.unit.is_bool:
        raise ExprError("a value is needed here, this is true/false", at)
    if show and not expr.unit.plain:
        raise ExprError(f"only plain numbers are shown as {show}, this is {expr.unit}", at)
    if not show and not expr.unit.plain and not _formattable(expr.unit):
        raise ExprError(f"there is no way to show {expr.unit}", at)
    return Field(name, expr, show)


def render(template: Template, metrics: Env, texts: Mapping[str, str]) -> str | Unknown:
    """The text, or Unknown when it quotes something that was not recorded. Raises MetricError."""
    out: list[str] = []
    for part in template.parts:
        if isinstance(part, str):
            out.append(part)
        elif part.expr is None:
            if part.name not in texts:
                return Unknown((Missing(part.name, "not recorded", ""),))
            out.append(texts[part.name])
        else:
            value = evaluate(part.expr, metrics)
            if isinstance(value, Unknown):
                return value
            out.append(_show(float(value), part.expr.unit, part.show))
    return "".join(out)


def _formattable(unit: Unit) -> bool:
    return any(unit.powers == known.powers for known, _ in METRIC_UNITS.values())


def _show(value: float, unit: Unit, show: str) -> str:
    if not unit.plain:
        return _quantity(value, unit)
    match show or unit.kind:
        case "percent" | "ratio":
            return units.format_percent(value)
        case "factor":
            return f"{value:.3g}x"
        case "count":
            return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:.2g}"
        case "plural":
            return "" if _show(value, unit, "") == "1" else "s"
        case "floor":
            return f"{math.floor(value)}"
        case "flag":
            return "yes" if value else "no"
    return f"{value:.3g}"


def _quantity(value: float, unit: Unit) -> str:
    """value: in base units (ns, bytes, bytes/ns, flop/ns)."""
    name = next(name for name, (known, _) in METRIC_UNITS.items() if known.powers == unit.powers)
    match name:
        case "ns":
            return units.format_ns(value)
        case "bytes":
            return units.format_bytes(value)
        case "bytes/s":
            return units.format_rate(value * 1e9)
        case "flops":
            return f"{value / 1e3:.3g} TFLOP/s"
        case "watt":
            return f"{value:.0f} W"
        case "celsius":
            return f"{value:.0f} C"
    return f"{value:.0f} MHz"
