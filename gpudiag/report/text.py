"""Names made safe and short for any report, and shares that sum to the whole."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def clean(text: str, limit: int = 0) -> str:
    """One line without anything a terminal or a reader's eye would obey: white space becomes a space; control characters,
    escape sequences, direction marks, invisible characters and lone surrogates are spelled out (`\\x1b`, `\\u202e`).

    limit: cut in the middle to this many characters, 0 = not.
    """
    if limit and len(text) > 4 * limit:  # a 10,000-character name is cut before the slow part
        text = text[: 2 * limit] + "…" + text[-2 * limit :]
    text = " ".join(_visible(text).split())
    return cut(text, limit) if limit else text


def clean_code(text: str) -> list[str]:
    """The lines of a piece of code, each as `clean` leaves it but with its white space."""
    lines = [line.rstrip() for line in text.expandtabs(4).strip("\n").split("\n")]
    return [cut(_visible(line), 400) for line in lines]


def _visible(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(_spelled(character) for character in text)


def _spelled(character: str) -> str:
    if character.isspace() and character != "\x1c":
        return " "
    if unicodedata.category(character) in _HIDDEN:
        code = ord(character)
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character


def cut(text: str, limit: int) -> str:
    """At most `limit` characters: what is left out of the middle is one `…`, the start keeps two thirds."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 3
    return text[: limit - 1 - tail] + "…" + text[len(text) - tail :]


def cut_end(text: str, limit: int) -> str:
    """At most `limit` characters; the end is left out: for sentences."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)].rstrip() + "…"


def cut_start(text: str, limit: int) -> str:
    """At most `limit` characters; the start is left out: for paths, whose end tells them apart."""
    return text if len(text) <= limit else "…" + text[len(text) - max(limit - 1, 0) :]


_CAST = re.compile(r"\((?:unsigned )?(?:int|long|short|char|bool)\)(?=[\d-])")


def short_kernel(name: str, limit: int) -> str:
    """A kernel's name as one would say it: no return type, no parameters, no namespaces, then cut to `limit` characters.

    `void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int, float*)` becomes
    `vectorized_elementwise_kernel<4, AddFunctor<float>>`.
    """
    text = clean(name, 2000)
    text = text.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    text = _signature_name(_CAST.sub("", text))
    text = re.sub(r"\b(?:\w+::)+", "", text).replace("> >", ">>").replace("> >", ">>") or clean(name)
    return cut_end(text, limit) if "<" in text else cut(text, limit)


def _signature_name(text: str) -> str:
    """What stands between the return type and the parameter list of a C++ function; a name without parameters as it is.

    Brackets are followed, since a return type may hold them: `enable_if<(((8) > (0))), void>::type ns::kernel<8>(float*)`.
    Within parentheses `<` and `>` are comparisons.
    """
    angle = round_ = start = 0
    for i, character in enumerate(text):
        if character == "(":
            if not angle and not round_ and i > start:
                return text[start:i]
            round_ += 1
        elif character == ")":
            round_ -= 1
        elif not round_ and character == "<":
            angle += 1
        elif not round_ and character == ">":
            angle -= 1
        elif not round_ and not angle and character == " ":
            start = i + 1
    return text.removeprefix("void ")


def columns(text: str) -> int:
    """How many terminal cells a text takes: wide characters two, combining marks none."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def apportion(values: Sequence[int], total: int) -> list[int]:
    """Whole shares of `total` in proportion to `values` that sum to it exactly (largest remainder; ties to the earlier).

    All zeros give all zeros. `apportion(parts, 1000)` are tenths of a percent.
    """
    whole = sum(values)
    if whole <= 0:
        return [0] * len(values)
    shares = [value * total // whole for value in values]
    by_remainder = sorted(range(len(values)), key=lambda i: (-(values[i] * total % whole), i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares
