"""A bundle: the folder that `gpudiag profile` leaves behind, judged again at any time on any machine.

```
<bundle>/
  manifest.json            Manifest, below
  <capture>/               one folder a capture pass: torch, nsys; with several rounds torch-1, nsys-1, torch-2, ...
    rank0.kineto.json.gz   torch.profiler's export of a rank      (torch pass)
    report.sqlite          nsys export                              (nsys pass; report.nsys-rep beside it)
    report.nsys.log        what nsys itself said
    rank0.<pid>.jsonl      gpudiag's own records of a process     (read/loader_log.py)
    nvml.jsonl             NVML samples
  diagnosis.json           the diagnosis as printed
```

Roles in `CaptureInfo.files`: trace (one a rank, or the nsys export), report, log, nvml.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.diagnosis import spelled
from gpudiag.errors import GpudiagError

SCHEMA = "gpudiag.bundle/1"
MANIFEST = "manifest.json"


class CaptureInfo(msgspec.Struct, frozen=True):
    """One pass over the application. kind: torch | nsys. files: relative paths by role. failed: why it is unusable, or "".

    plain_step_ns / recorded_step_ns: median step time outside and inside the recorded window of the same run.
    """

    name: str
    kind: str
    files: dict[str, list[str]]
    collector: str = ""
    wall_s: float | None = None
    plain_step_ns: int | None = None
    recorded_step_ns: int | None = None
    failed: str = ""
    notes: tuple[str, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """What was run, with what, and how it ended. command: as typed, secrets masked. environment: allow-listed facts."""

    schema: str
    gpudiag: str
    command: tuple[str, ...]
    started: str
    exit_code: int | None
    captures: tuple[CaptureInfo, ...]
    asked: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    warnings: tuple[str, ...] = ()


class Bundle(msgspec.Struct, frozen=True):
    path: Path
    manifest: Manifest


def is_bundle(path: Path) -> bool:
    return path.is_dir() and (path / MANIFEST).is_file()


def read_bundle(path: Path) -> Bundle:
    """Raises GpudiagError when the manifest is unreadable or of a newer schema."""
    file = path / MANIFEST
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise GpudiagError(
            f"{file}: not a readable manifest ({error})", "profile again, or analyze the raw files inside the folder"
        ) from error
    if manifest.schema != SCHEMA:
        raise GpudiagError(
            f"{file}: schema {manifest.schema!r}, this gpudiag reads {SCHEMA!r}", "use the gpudiag that wrote it"
        )
    return Bundle(path, manifest)


def rounds_of(bundle: Bundle) -> list[Bundle]:
    """A bundle a round: the n-th usable capture of each recorder is of round n."""
    by_kind: dict[str, list[int]] = {}
    captures = bundle.manifest.captures
    for index, capture in enumerate(captures):
        if not capture.failed:
            by_kind.setdefault(capture.kind, []).append(index)
    most = max((len(indices) for indices in by_kind.values()), default=0)
    if most < 2:
        return [bundle]
    rounds = []
    for number in range(most):
        chosen = tuple(captures[indices[number]] for indices in by_kind.values() if number < len(indices))
        rounds.append(Bundle(bundle.path, msgspec.structs.replace(bundle.manifest, captures=chosen)))
    return rounds


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Atomic: a reader sees the old manifest or the new one. Raises OSError, and leaves the old one then.

    An argument that is not UTF-8 reaches us with lone surrogates, which JSON cannot hold: they are spelled out (`\\udce9`).
    """
    try:
        data = msgspec.json.encode(manifest)
    except UnicodeEncodeError:
        data = msgspec.json.encode(spelled(msgspec.to_builtins(manifest)))
    temporary = path / (MANIFEST + ".new")
    try:
        temporary.write_bytes(msgspec.json.format(data, indent=2) + b"\n")
        temporary.replace(path / MANIFEST)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
