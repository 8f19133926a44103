"""Microseconds written in decimal to nanoseconds, exactly: 1712195495502094.513 has 19 digits and a double holds 15 to 17."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Context, Decimal

import msgspec
import numpy as np
import numpy.typing as npt

from gpudiag.intervals import Int64

# Marks what is no time: null, text, or beyond 73 years (a quarter of the range of int64, so that sums and spans cannot overflow).
INVALID = int(np.iinfo(np.int64).min)
_LARGEST = 1 << 61
_EXACT = Context(prec=100)
_PLAIN = b"0123456789.,-"
_COMMA, _MINUS, _DOT, _ZERO = b",-.0"
_POWERS = 10 ** np.arange(19, dtype=np.int64)


def exact_ns(numbers: Sequence[msgspec.Raw]) -> Int64:
    """round(number x 1000), half to even, of n JSON values given as their bytes; INVALID for those that are no number. Shape (n,)."""
    count = len(numbers)
    text = b",".join(numbers)
    if not count or text.translate(None, _PLAIN):
        return np.fromiter(map(_one, numbers), np.int64, count)
    codes = np.frombuffer(text, np.uint8)
    ends = np.append(np.flatnonzero(codes == _COMMA), codes.size)
    starts = np.concatenate([[0], ends[:-1] + 1])
    longest = int((ends - starts).max())
    dots = np.flatnonzero(codes == _DOT)
    if not dots.size and longest <= 16:
        ns = np.fromstring(text, np.int64, sep=",") * 1000
    elif longest <= 20 and dots.size == count and np.array_equal(dots + 4, ends):
        # Kineto writes every time with three decimals: without its dot it is the number of nanoseconds. Numbers too large for
        # int64 come out as its largest.
        ns = np.fromstring(text.replace(b".", b""), np.int64, sep=",")
    else:
        ns = _mixed(numbers, codes, starts, ends, dots)
    ns[np.abs(ns) >= _LARGEST] = INVALID
    return ns


def _mixed(
    numbers: Sequence[msgspec.Raw], codes: npt.NDArray[np.uint8], starts: Int64, ends: Int64, dots: Int64
) -> Int64:
    """Numbers with any number of decimals: a trace written again by another program drops trailing zeros."""
    point = ends.copy()
    point[np.searchsorted(ends, dots)] = dots
    distance = np.repeat(point, np.diff(np.append(starts, codes.size))) - np.arange(codes.size)
    power = np.where(distance > 0, distance + 2, distance + 3)
    digit = codes.astype(np.int64) - _ZERO
    digit[(digit < 0) | (digit > 9)] = 0
    value = np.add.reduceat(digit * _POWERS[np.clip(power, 0, 18)], starts)
    value[codes[starts] == _MINUS] *= -1
    whole = point - starts
    # 16 digits of microseconds fit int64 as nanoseconds up to 9223372036854775, which is the year 2262.
    wide = (whole > 16) | ((whole == 16) & (codes[starts] >= _ZERO + 9))
    for row in map(int, np.flatnonzero((ends - point > 4) | wide)):
        value[row] = _one(numbers[row])
    return value


def _one(number: msgspec.Raw) -> int:
    text = bytes(number).strip(b'"')
    if len(text) > _EXACT.prec:
        return INVALID
    try:
        ns = _EXACT.scaleb(Decimal(text.decode("ascii")), 3)
        return int(_EXACT.to_integral_value(ns)) if abs(ns) < _LARGEST else INVALID
    except (ArithmeticError, ValueError):
        return INVALID
