"""The account over the steps as stacked bars: an SVG that scales with the page, its axis, and the same numbers as rows."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup, escape

from gpudiag.diagnosis import AccountInfo
from gpudiag.report.facts import PART_LABELS, ordered_parts
from gpudiag.report.palette import part_style
from gpudiag.units import counted, format_ns

MAX_BARS = 240  # at the width of the page a bar is then 4 px


def step_chart(account: AccountInfo, title: str, max_bars: int = MAX_BARS) -> dict[str, Any]:
    """What the template draws. More than max_bars steps: equal runs of neighbours become one bar of their mean."""
    per_bar = -(-len(account.per_step) // max_bars)
    bars = [_mean(account.per_step[i : i + per_bar]) for i in range(0, len(account.per_step), per_bar)]
    totals = [sum(bar.values()) for bar in bars]
    top, ticks = _scale(max(totals))
    lengths = sorted(sum(step.values()) for step in account.per_step)
    middle = len(lengths) // 2
    median = lengths[middle] if len(lengths) % 2 else (lengths[middle - 1] + lengths[middle]) / 2
    names = [name for name, _ in ordered_parts({name: 1 for bar in bars for name, value in bar.items() if value})]
    longest = max(range(len(totals)), key=totals.__getitem__)
    unit = "Step" if per_bar == 1 else f"Steps, {per_bar} to a row"
    each = "" if per_bar == 1 else f" Each bar is the mean of {per_bar} steps."
    return {
        "caption": f"{title}: who owned the time in each of {counted(len(account.per_step), 'steady step')}.{each}",
        "spoken": f"Stacked bars. Median step {format_ns(median)}, longest bar {format_ns(totals[longest])} at "
        f"{_label(longest, per_bar, len(account.per_step))}. The table below has the numbers.",
        "ticks": [{"at": round(100 * tick / top, 2), "label": format_ns(tick) if tick else "0"} for tick in ticks],
        "median_at": round(100 * median / top, 2),
        "svg": _bars(bars, names, top, per_bar, len(account.per_step), f"hatch-{account.rank}-{account.device}"),
        "last": f"step {len(account.per_step)}",
        "legend": [part_style(name) for name in names],
        "unit": unit,
        "rows": [
            {
                "label": _label(i, per_bar, len(account.per_step)).removeprefix("step "),
                "cells": [
                    format_ns(total),
                    *(format_ns(bar[name]) if bar.get(name) else "–" for name in names),
                ],
            }
            for i, (bar, total) in enumerate(zip(bars, totals, strict=True))
        ],
    }


def _label(bar: int, per_bar: int, steps: int) -> str:
    first, last = bar * per_bar + 1, min((bar + 1) * per_bar, steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _mean(steps: tuple[dict[str, int], ...]) -> dict[str, float]:
    return {name: sum(s.get(name, 0) for s in steps) / len(steps) for step in steps for name in step}


def _scale(largest: float) -> tuple[float, list[float]]:
    """The top of the axis, and three to six round numbers on it."""
    rough = max(largest, 1) / 4
    power = 10.0 ** (len(str(int(rough))) - 1)
    by = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    count = int(-(-largest // by))
    return max(count, 1) * by, [i * by for i in range(max(count, 1) + 1)]


def _bars(
    bars: list[dict[str, float]], names: list[str], top: float, per_bar: int, steps: int, hatch_id: str
) -> Markup:
    """One group a bar, parts stacked from the bottom in the account's order; idle parts get the hatch on top."""
    slot = 100 / len(bars)
    width = slot * (0.86 if len(bars) <= 60 else 0.94)
    groups = []
    for i, bar in enumerate(bars):
        at, pieces, words = 100.0, [], [f"{_label(i, per_bar, steps)}: {format_ns(sum(bar.values()))}"]
        for name in names:
            height = 100 * bar.get(name, 0) / top
            if not height:
                continue
            at -= height
            place = (
                f'x="{i * slot + (slot - width) / 2:.3f}%" y="{at:.3f}%" width="{width:.3f}%" height="{height:.3f}%"'
            )
            style = part_style(name)
            pieces.append(f'<rect class="p-{style.css}" {place}/>')
            if style.idle:
                pieces.append(f'<rect fill="url(#{hatch_id})" {place}/>')
            words.append(f"{PART_LABELS.get(name, name)} {format_ns(bar[name])}")
        groups.append(f'<g class="b"><title>{escape("; ".join(words))}</title>{"".join(pieces)}</g>')
    # Places are in percent, so the hatch keeps its size on any width.
    hatch = (
        f'<defs><pattern id="{hatch_id}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect class="stroke" width="2.2" height="7"/></pattern></defs>'
    )
    return Markup(
        f'<svg width="100%" height="100%" aria-hidden="true" focusable="false">{hatch}{"".join(groups)}</svg>'
    )
