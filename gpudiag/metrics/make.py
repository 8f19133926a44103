"""Builds Metric and Missing values with the catalogue's units, and the phrases that say how to record what is missing."""

from __future__ import annotations

from gpudiag.metrics.base import Metric, Missing
from gpudiag.metrics.spec import BY_NAME

PROFILE = "gpudiag profile SCRIPT"
PROFILE_TORCH = "gpudiag profile --with torch SCRIPT"
PROFILE_NSYS = "gpudiag profile --with nsys SCRIPT"
PROFILE_LONGER = "gpudiag profile --steps 50 SCRIPT"
PROFILE_RANKS = "gpudiag profile -- torchrun --nproc-per-node 2 SCRIPT"
NOTHING = ""  # no command of today records it: reports list it as not to be recorded
ON_GPU = ""  # of a run without GPU work: recording it again changes nothing
BENCH = "gpudiag bench --model package.module:function"

Value = Metric | Missing


def value(name: str, number: float, source: str) -> Metric:
    """A metric of the catalogue. Raises KeyError for a name that is not in it."""
    return Metric(name, number, BY_NAME[name].unit, source)


def missing(name: str, reason: str, record_with: str) -> Missing:
    """A metric of the catalogue that this recording cannot give. Raises KeyError for a name that is not in it."""
    return Missing(BY_NAME[name].name, reason, record_with)


def inapplicable(name: str, reason: str) -> Missing:
    """A metric of the catalogue that this kind of run does not have. Raises KeyError for a name that is not in it."""
    return Missing(BY_NAME[name].name, reason, NOTHING, applies=False)
