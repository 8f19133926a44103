"""The timeline of the HTML report: views as compact data for the script, findings' evidence on them, and lanes as a table."""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from markupsafe import Markup

from gpudiag.diagnosis import STEP_ORDER, Diagnosis, Evidence, Finding, Lane, TimelineView
from gpudiag.report import facts
from gpudiag.report.palette import ALL_STYLES
from gpudiag.report.text import clean, short_kernel
from gpudiag.units import format_ns, format_percent

MAX_EVENTS = 120_000  # 12 bytes an event as written below: about 1.5 MB; views beyond that are left out
SHORT = 60
MAX_MARKS = 24


@dataclass(frozen=True)
class Picture:
    """One view as the template and the script show it. lanes: rows of the table; number: position among the pictures."""

    number: int
    view: TimelineView
    title: str
    label: str
    lanes: list[dict[str, Any]] = field(repr=False)

    def place(self, finding: Finding, evidence: Evidence) -> tuple[int, int, int] | None:
        """(view, start, end) in ns from the view's start when the evidence lies in it, else None."""
        view = self.view
        if evidence.start_ns is None or not self._is_of(finding):
            return None
        end = evidence.end_ns if evidence.end_ns is not None else evidence.start_ns
        if evidence.start_ns >= view.end_ns or end < view.start_ns:
            return None
        return self.number, max(evidence.start_ns, view.start_ns) - view.start_ns, min(end, view.end_ns) - view.start_ns

    def parts(self, finding: Finding) -> list[int]:
        """The names in the owners' lane that the finding's time is taken from. One about computing itself has none: it is everywhere."""
        if not self._is_of(finding) or not self.view.lanes or self.view.lanes[0].kind != "owner":
            return []
        drawn = set(self.view.lanes[0].name)
        names = enumerate(self.view.names)
        return [code for code, name in names if code in drawn and name in finding.parts and name != "compute"]

    def longest(self, finding: Finding) -> tuple[int, int, int] | None:
        """(view, start, end) of the longest stretch of `parts` without a break."""
        mine = set(self.parts(finding))
        if not mine:
            return None
        lane = self.view.lanes[0]
        found: list[tuple[int, int]] = []
        for start, length, code in zip(lane.start_ns, lane.length_ns, lane.name, strict=True):
            if code in mine and found and start <= found[-1][1]:
                found[-1] = (found[-1][0], start + length)
            elif code in mine:
                found.append((start, start + length))
        start, end = max(found, key=lambda stretch: (stretch[1] - stretch[0], -stretch[0]))
        return self.number, start, end

    def _is_of(self, finding: Finding) -> bool:
        return not finding.devices or (self.view.rank, self.view.device) in finding.devices


def in_page_order(diagnosis: Diagnosis) -> list[Finding]:
    """By step of the method; in each, those that stand for themselves before those that another explains."""
    return sorted(diagnosis.findings, key=lambda finding: (STEP_ORDER.index(finding.step), bool(finding.caused_by)))


def pictures(diagnosis: Diagnosis) -> list[Picture]:
    """The views that fit into MAX_EVENTS, first come first served."""
    many = len({(view.rank, view.device) for view in diagnosis.views}) > 1
    many_ranks = len({account.rank for account in diagnosis.accounts}) > 1
    shown: list[Picture] = []
    room = MAX_EVENTS
    for view in diagnosis.views:
        room -= sum(len(lane.start_ns) for lane in view.lanes)
        if room < 0 and shown:
            break
        title = clean(view.title, 120)
        label = f"{facts.device_label(view.rank, view.device, many_ranks)}: {title}" if many else title
        shown.append(Picture(len(shown), view, label, label, _lane_rows(view)))
    return shown


def script_data(diagnosis: Diagnosis, shown: list[Picture]) -> Markup:
    """JSON for a script element: nothing in it can end the element or break a line of script."""
    data = {
        "views": [_view(diagnosis, picture) for picture in shown],
        "parts": [{"name": s.name, "css": s.css, "idle": s.idle, "light": s.light} for s in ALL_STYLES],
        "labels": facts.PART_LABELS,
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _view(diagnosis: Diagnosis, picture: Picture) -> dict[str, Any]:
    view = picture.view
    names = [clean(name, 600) for name in view.names]
    kernels = {code for lane in view.lanes if lane.kind in ("stream", "comm") for code in lane.name}
    shorts = [_said(name, code in kernels) for code, name in enumerate(view.names)]
    return {
        "title": picture.title,
        "span": max(1, view.end_ns - view.start_ns),
        "names": names,
        "short": [short if short != name else "" for short, name in zip(shorts, names, strict=True)],
        "marks": _marks(diagnosis, picture),
        "lanes": [_lane(lane, level) for lane, level in zip(view.lanes, _levels(view), strict=True)],
    }


def _marks(diagnosis: Diagnosis, picture: Picture) -> list[dict[str, Any]]:
    """What the findings point at, as rows above the lanes: evidence that has a time, else the parts that a finding is about.

    Findings that another one explains are left out: its stretches are theirs.
    """
    marks = []
    for number, finding in enumerate(in_page_order(diagnosis), 1):
        mark: dict[str, Any] = {"f": number, "title": clean(finding.title, 200)}
        places = [(evidence, picture.place(finding, evidence)) for evidence in finding.evidence]
        timed = [(evidence, place) for evidence, place in places if place]
        for evidence, (_, start, end) in timed:
            words = {"label": clean(evidence.label, 200), "value": clean(evidence.value, 300)}
            marks.append({**mark, **words, "spans": [[start, end]]})
        parts = [] if timed or finding.caused_by else picture.parts(finding)
        if parts:
            marks.append({**mark, "label": mark["title"], "value": clean(finding.summary, 300), "parts": parts})
    return marks[:MAX_MARKS]


def _lane(lane: Lane, level: int) -> dict[str, Any]:
    """g: distance of each start from the one before; l: lengths; n: names; c: how many events each stands for."""
    starts = lane.start_ns
    gaps = [starts[i] - (starts[i - 1] if i else 0) for i in range(len(starts))]
    return {
        "label": clean(lane.label, 80),
        "kind": lane.kind,
        "detail": lane.detail,
        "level": level,
        "g": gaps,
        "l": lane.length_ns,
        "n": lane.name,
        "c": lane.count or None,
    }


def _levels(view: TimelineView) -> list[int]:
    """How deep in its group a lane lies: `Ranges, level 2` lies in `Ranges`."""
    levels: list[int] = []
    for i, lane in enumerate(view.lanes):
        before = view.lanes[i - 1] if i else None
        base = view.lanes[i - levels[-1] - 1].label if before else ""
        inside = before is not None and lane.kind == before.kind and lane.label.startswith(f"{base}, ")
        levels.append(levels[-1] + 1 if inside else 0)
    return levels


def _lane_rows(view: TimelineView) -> list[dict[str, Any]]:
    span = max(1, view.end_ns - view.start_ns)
    rows = []
    for lane in view.lanes:
        by_name: dict[int, int] = {}
        for code, length in zip(lane.name, lane.length_ns, strict=True):
            by_name[code] = by_name.get(code, 0) + length
        covered = _covered(lane)
        kernel = lane.kind in ("stream", "comm")
        said = facts.part_label if lane.kind == "owner" else partial(_said, kernel=kernel)
        top = heapq.nsmallest(3, by_name.items(), key=lambda item: (-item[1], item[0]))
        rows.append(
            {
                "label": clean(lane.label, 80),
                "detail": lane.detail,
                "events": f"{sum(lane.count) if lane.count else len(lane.start_ns):,}",
                "time": format_ns(covered),
                "share": format_percent(covered / span),
                "top": [{"name": said(view.names[code]), "time": format_ns(ns)} for code, ns in top],
            }
        )
    return rows


def _said(name: str, kernel: bool) -> str:
    return short_kernel(name, SHORT) if kernel else clean(name.removeprefix("gpudiag::"), SHORT)


def _covered(lane: Lane) -> int:
    total = reach = 0
    for start, length in zip(lane.start_ns, lane.length_ns, strict=True):
        end = start + length
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total
