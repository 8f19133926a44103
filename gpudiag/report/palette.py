"""How the parts of the account look in pictures: one class name each, idle ones hatched, and which text reads on them.

The colours stand in templates/report.css (hues after Okabe and Ito, "Color Universal Design", 2008: they stay apart for
readers with any of the common colour blindnesses). No picture relies on colour alone: idle is hatched, and labels name it.
"""

from __future__ import annotations

import msgspec

from gpudiag.report.facts import PART_LABELS, part_label

# Parts whose colour is so light that dark text reads better on it (contrast at least 4.5 to 1).
_LIGHT = frozenset(
    {
        "communication_exposed",
        "copy_exposed.d2h",
        "copy_exposed.d2d",
        "copy_exposed.managed",
        "copy_exposed.other",
        "memset_exposed",
        "idle.sync",
        "idle.launch",
        "idle.gc",
        "idle.host",
        "idle.profiler",
        "idle.unknown",
        "host.optimizer",
        "host.gc",
        "host.framework",
        "host.other",
        "other",
    }
)


class PartStyle(msgspec.Struct, frozen=True):
    """css: the class is `p-` + css, the colour `--p-` + css. idle: drawn hatched. light: dark text on it."""

    name: str
    label: str
    css: str
    idle: bool
    light: bool


def part_style(name: str) -> PartStyle:
    """The style of a part; one that this version does not know is drawn as `other`."""
    css = name.replace(".", "-").replace("_", "-") if name in PART_LABELS else "other"
    known = name if name in PART_LABELS else "other"
    return PartStyle(name, part_label(name), css, name.startswith("idle."), known in _LIGHT)


ALL_STYLES: tuple[PartStyle, ...] = (*(part_style(name) for name in PART_LABELS), part_style("other"))
