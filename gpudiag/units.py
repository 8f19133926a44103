"""Units on the way out. Inside, times are int ns, sizes int bytes, fractions 0-1 (DESIGN 10.1)."""

from __future__ import annotations

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def format_ns(ns: float) -> str:
    """A duration in ns as people read it, three significant digits: `999 ns`, `1.25 us`, `34.0 ms`, `2.50 s`, `3 min 20 s`."""
    sign = "-" if ns < 0 else ""
    ns = abs(ns)
    if ns < 999.5:
        return f"{sign}{ns:.0f} ns"
    for scale, unit in ((NS_PER_US, "us"), (NS_PER_MS, "ms"), (NS_PER_S, "s")):
        value = ns / scale
        if value < 999.5 and (unit != "s" or value < 120):
            return f"{sign}{_three_digits(value)} {unit}"
    minutes, seconds = divmod(round(ns / NS_PER_S), 60)
    return f"{sign}{minutes} min {seconds} s"


def format_bytes(count: float) -> str:
    """A size in bytes with decimal units (as links and nsys quote them): `512 B`, `1.50 MB`, `4.94 GB`."""
    sign = "-" if count < 0 else ""
    count = abs(count)
    if count < 999.5:
        return f"{sign}{count:.0f} B"
    for scale, unit in ((1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")):
        value = count / scale
        if value < 999.5 or unit == "TB":
            return f"{sign}{_three_digits(value)} {unit}"
    raise AssertionError("unreachable: TB takes the rest")


def format_rate(bytes_per_second: float) -> str:
    """A transfer rate, `27.7 GB/s`."""
    return f"{format_bytes(bytes_per_second)}/s"


def format_percent(fraction: float) -> str:
    """A fraction 0-1 as percent: `97 %`, below 10 % with one decimal (`0.7 %`), and never a rounded-up 100 % or 0 %."""
    percent = fraction * 100
    if percent != 0 and abs(percent) < 0.05:
        return "<0.1 %"
    if abs(percent) < 9.95:
        return f"{percent:.1f} %"
    if 99.5 <= percent < 100:
        return f"{min(percent, 99.9):.1f} %"
    return f"{percent:.0f} %"


def counted(number: float, noun: str) -> str:
    """`1 kernel`, `694 kernels`"""
    text = f"{number:.0f}"
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
