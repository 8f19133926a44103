"""Units of the condition language: exponents over a few bases, and how plain numbers are shown."""

from __future__ import annotations

from dataclasses import dataclass

BASES = ("ns", "bytes", "watt", "celsius", "mhz", "flop")


@dataclass(frozen=True)
class Unit:
    """powers: exponents over (ns, bytes, watt, celsius, mhz, flop). kind: of plain numbers, how they are shown:
    ratio | count | flag | number. is_bool: a truth value. is_zero: a literal 0, which fits every unit."""

    powers: tuple[int, ...] = (0,) * len(BASES)
    kind: str = "number"
    is_bool: bool = False
    is_zero: bool = False

    @property
    def plain(self) -> bool:
        return not any(self.powers)

    def __str__(self) -> str:
        if self.is_bool:
            return "true/false"
        if self.plain:
            return "a plain number" if self.kind == "number" else f"a {self.kind}"
        up = "*".join(_power(b, p) for b, p in zip(BASES, self.powers, strict=True) if p > 0)
        down = "*".join(_power(b, -p) for b, p in zip(BASES, self.powers, strict=True) if p < 0)
        return (up or "1") + (f"/{down}" if down else "")


def _power(base: str, power: int) -> str:
    return base if power == 1 else f"{base}^{power}"


def _unit(kind: str = "number", **powers: int) -> Unit:
    return Unit(tuple(powers.get(base, 0) for base in BASES), kind)


def same(a: Unit, b: Unit) -> bool:
    """Whether two values can be compared or added."""
    if a.is_bool or b.is_bool:
        return a.is_bool and b.is_bool
    return a.powers == b.powers or a.is_zero or b.is_zero


BOOL = Unit(is_bool=True)
# Factor from a metric's unit to the base that expressions are computed in (ns, bytes, flop).
METRIC_UNITS: dict[str, tuple[Unit, float]] = {
    "ns": (_unit(ns=1), 1.0),
    "bytes": (_unit(bytes=1), 1.0),
    "bytes/s": (_unit(bytes=1, ns=-1), 1e-9),
    "flops": (_unit(flop=1, ns=-1), 1e-9),
    "watt": (_unit(watt=1), 1.0),
    "celsius": (_unit(celsius=1), 1.0),
    "mhz": (_unit(mhz=1), 1.0),
    "count": (_unit("count"), 1.0),
    "ratio": (_unit("ratio"), 1.0),
    "flag": (_unit("flag"), 1.0),
}
CONSTANTS: dict[str, tuple[Unit, float]] = {
    "percent": (_unit("ratio"), 0.01),
    "ns": (_unit(ns=1), 1.0),
    "us": (_unit(ns=1), 1e3),
    "ms": (_unit(ns=1), 1e6),
    "s": (_unit(ns=1), 1e9),
    "B": (_unit(bytes=1), 1.0),
    "kB": (_unit(bytes=1), 1e3),
    "MB": (_unit(bytes=1), 1e6),
    "GB": (_unit(bytes=1), 1e9),
    "W": (_unit(watt=1), 1.0),
    "degC": (_unit(celsius=1), 1.0),
    "MHz": (_unit(mhz=1), 1.0),
    "TFLOP": (_unit(flop=1), 1e12),
}
