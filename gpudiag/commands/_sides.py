"""From what the user named to the recordings of one side: a recording, a diagnosis, or several rounds of either."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gpudiag.bundle import Bundle, is_bundle, read_bundle, rounds_of
from gpudiag.commands._common import Progress, is_diagnosis, load_diagnosis
from gpudiag.diagnosis import Diagnosis


def load_side(paths: Sequence[Path], tell: Progress) -> list[Diagnosis]:
    """One diagnosis a round. A path is a recording, a diagnosis, a bundle (of one or several rounds), a folder of ranks, or a
    folder of bundles. Raises GpudiagError.
    """
    found: list[Diagnosis] = []
    for path in paths:
        if is_diagnosis(path):
            found.append(load_diagnosis(path))
        elif is_bundle(path):
            found += _bundle_rounds(read_bundle(path), tell)
        elif path.is_dir() and (bundles := sorted(folder for folder in path.iterdir() if is_bundle(folder))):
            for folder in bundles:
                found += _bundle_rounds(read_bundle(folder), tell)
        else:
            found.append(_diagnose(path, tell))
    return found


def _bundle_rounds(bundle: Bundle, tell: Progress) -> list[Diagnosis]:
    from gpudiag.pipeline import diagnose_recordings
    from gpudiag.read import open_bundle
    from gpudiag.rules import load_rules

    rules = load_rules(())
    return [diagnose_recordings(open_bundle(part, tell), rules, tell) for part in rounds_of(bundle)]


def _diagnose(path: Path, tell: Progress) -> Diagnosis:
    from gpudiag.pipeline import diagnose

    diagnosis = diagnose([path], progress=tell)
    if path.is_dir():  # a folder of ranks: one of its files would be no name for the side
        source = msgspec.structs.replace(diagnosis.source, path=str(path))
        diagnosis = msgspec.structs.replace(diagnosis, source=source)
    return diagnosis
