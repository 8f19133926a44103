"""Which lines of the user's code wait for the device, and how often a step.

Two sources. Calls that gpudiag wraps (CallSite) are counted exactly. Others (boolean masks, torch.nonzero, copies to the device)
are found by looks at the training thread (Looks): one that lies in a wait of the recording names the line of that wait.
Steps repeat: the k-th wait of each is taken for the same line, so one look in any step names all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpudiag.intervals import Int64
from gpudiag.scope import Scope
from gpudiag.timeline import CallSite
from gpudiag.units import format_ns

MOST_LINES = 3
MOST_ASKED = 8  # waits of a line that are asked what they are part of; each looks through all operators
ALIKE = 0.5  # share of the steps that must have the same number of waits to be laid over one another
PLACE = re.compile(r":\d+$")
CALLS = {
    "Tensor.__bool__": "bool(tensor)",
    "Tensor.__float__": "float(tensor)",
    "Tensor.__int__": "int(tensor)",
    "Tensor.__index__": "a tensor as index",
    "Tensor.__complex__": "complex(tensor)",
    "Tensor.__repr__": "print(tensor)",
    "Tensor.__format__": "a formatted tensor",
    "Tensor.__contains__": "value in tensor",
    "Tensor.__setitem__": "tensor[mask] = values",
    "Tensor.to": ".to(cpu)",
}
UPLOAD = ".to(device)"
OPERATORS = {
    "aten::index": "tensor[mask]",
    "aten::_index_put_impl_": "tensor[mask] = values",
    "aten::index_put_": "tensor[mask] = values",
    "aten::_local_scalar_dense": ".item()",
    "aten::item": ".item()",
    "aten::to": UPLOAD,
}
READS = re.compile(r"^aten::(?:nonzero|argwhere|where|masked_select|_?unique\w*|is_nonzero|equal|allclose)$")


@dataclass(frozen=True)
class WaitLine:
    """where: `train.py:42`; what: the call in words; count, ns: a step; reads: it needs a value of the device's."""

    where: str
    what: str
    count: float
    ns: float
    reads: bool

    def __str__(self) -> str:
        times = f"{self.count:.0f}" if abs(self.count - round(self.count)) < 0.1 else f"{self.count:.1f}"
        often = "once a step" if times == "1" else f"{times} times a step"
        if self.count < 0.1:
            often = "in fewer than one of ten steps"
        return f"{self.where} {self.what} {often}, {format_ns(self.ns)}"


def wait_lines(scope: Scope) -> list[WaitLine]:
    """The lines of this rank that wait for the device, longest first."""
    counted = lines_of(scope.timeline.sites, "readback")
    known = {line.where for line in counted}
    found = counted + [line for line in _looked_up(scope) if line.where not in known]
    return sorted(found, key=lambda line: (-line.ns, line.where, line.what))


def lines_of(sites: Sequence[CallSite], kind: str) -> list[WaitLine]:
    """The places of one kind that were counted by step."""
    return [
        WaitLine(s.where, _call(s.what), s.count / s.steps, s.total_ns / s.steps, not s.what.endswith("synchronize"))
        for s in sites
        if s.kind == kind and s.steps and PLACE.search(s.where)
    ]


def told(lines: Sequence[WaitLine]) -> str:
    """`train.py:42 .item() 3 times a step, 2.10 ms; train.py:50 ...`"""
    more = f"; {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
    return "; ".join(map(str, lines[:MOST_LINES])) + more


def _call(what: str) -> str:
    """`.item()` of `Tensor.item`"""
    if what in CALLS:
        return CALLS[what]
    return f".{what[7:]}()" if what.startswith("Tensor.") else f"{what}()"


def _looked_up(scope: Scope) -> list[WaitLine]:
    looks, host, steps = scope.timeline.looks, scope.host, scope.steps
    if looks is None or host is None or not len(steps) or not host.wait_start.size:
        return []
    if not any(process in (looks.process, 0) for process, _ in host.threads):
        return []  # the looks are at another process of the recording
    inside = scope.window.contains(host.wait_start)
    start, end = host.wait_start[inside], host.wait_end[inside]
    step = np.searchsorted(steps.start, start, side="right") - 1
    position = np.arange(start.size) - np.searchsorted(step, step)  # of a wait among those of its step
    waits = np.searchsorted(start, looks.at, side="right") - 1
    hit = waits >= 0
    hit[hit] = looks.at[hit] < end[waits[hit]]
    waits, places = waits[hit], looks.place[hit]
    if not waits.size:
        return []
    sizes = np.bincount(step, minlength=len(steps))
    usual = int(np.bincount(sizes).argmax())
    alike = np.flatnonzero(sizes == usual)
    if usual and len(alike) >= ALIKE * len(steps):
        chosen = np.isin(step, alike)
        line_of = _majority(position[waits], places)
        line = np.array([line_of.get(int(p), -1) for p in position], np.int64)
    else:  # no rhythm: the waits that were looked at, which is the least
        chosen = np.ones(start.size, bool)
        line = np.full(start.size, -1, np.int64)
        line[waits] = places
        alike = np.arange(len(steps))
    found = []
    for place in np.unique(line[chosen & (line >= 0)]).tolist():
        rows = np.flatnonzero(chosen & (line == place))
        what = _operator(scope, start[rows], end[rows])
        total = int((end[rows] - start[rows]).sum())
        reads = (what in OPERATORS.values() and what != UPLOAD) or READS.match(what) is not None
        found.append(WaitLine(looks.places[place], what, rows.size / len(alike), total / len(alike), reads))
    return [line for line in found if PLACE.search(line.where)]


def _majority(positions: Int64, places: np.ndarray[tuple[int], np.dtype[np.int32]]) -> dict[int, int]:
    votes: dict[int, Counter[int]] = {}
    for position, place in zip(positions.tolist(), places.tolist(), strict=True):
        votes.setdefault(position, Counter())[place] += 1
    return {position: min(vote, key=lambda place: (-vote[place], place)) for position, vote in votes.items()}


def _operator(scope: Scope, start: Int64, end: Int64) -> str:
    """What most of these waits are part of: the outermost operator around them, else the API call."""
    ops, calls = scope.cpu_ops, scope.timeline.api_calls
    strings = scope.timeline.strings
    names: Counter[str] = Counter()
    for begins, ends in zip(start[:MOST_ASKED].tolist(), end[:MOST_ASKED].tolist(), strict=True):
        if ops is not None:
            around = np.flatnonzero((ops.start <= begins) & (ops.end >= ends))
            aten = [row for row in around.tolist() if strings[ops.name[row]].startswith("aten::")]
            if aten:
                names[strings[ops.name[min(aten, key=lambda row: (int(ops.start[row]), -int(ops.end[row])))]]] += 1
                continue
        if calls is not None:
            row = np.flatnonzero((calls.start == begins) & (calls.end == ends))
            if row.size:
                names[strings[calls.name[row[0]]]] += 1
    name = min(names, key=lambda one: (-names[one], one), default="")
    return OPERATORS.get(name, name)
