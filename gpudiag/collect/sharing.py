"""A bundle or a recording as a zip that can be sent to a stranger: what goes in, what is left out, and why."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpudiag.bundle import MANIFEST, CaptureInfo, is_bundle, read_bundle
from gpudiag.collect.privacy import Scrubber
from gpudiag.collect.scrub_json import scrub_records, scrub_trace, scrub_value
from gpudiag.collect.scrub_sqlite import is_nsys_sqlite, scrub_sqlite
from gpudiag.errors import GpudiagError

_DATE = (1980, 1, 1, 0, 0, 0)  # of every member: the same bundle gives the same bytes
_REPORTS = (".nsys-rep", ".qdrep", ".qdstrm")


@dataclass(frozen=True)
class Shared:
    """One file of the source. what: what was done to it, or why it was left out (kept False)."""

    name: str
    kept: bool
    what: tuple[str, ...]


def share(
    source: Path, target: Path, *, scrub: Scrubber | None = None, progress: Callable[[str], None] | None = None
) -> list[Shared]:
    """Write `target`, a zip of scrubbed copies of everything in `source` that is known how to scrub.

    source: a bundle, a folder of recordings, or one recording. Whole or not at all: a failure leaves no zip.
    Raises GpudiagError for a source that is missing, holds nothing to share, or cannot be read.
    """
    scrub = scrub or Scrubber.of_this_machine()
    tell = progress or (lambda _text: None)
    if not source.exists():
        raise GpudiagError(f"{source}: no such file or folder", "give a bundle that `gpudiag profile` wrote")
    root = source if source.is_dir() else source.parent
    done: list[Shared] = []
    temporary = target.with_name(f".{target.name}.part")
    try:
        with (
            tempfile.TemporaryDirectory(prefix="gpudiag-export-", dir=target.absolute().parent) as folder,
            zipfile.ZipFile(temporary, "w") as archive,
        ):
            copy = Path(folder) / "copy"
            for path in _files(source, exclude={target.absolute(), temporary.absolute()}):
                name = path.relative_to(root).as_posix()
                tell(f"copying {name}")
                what = _why_not(path)
                if not what:
                    what = _copy(path, copy.with_suffix(path.suffix), scrub)
                    _add(archive, copy.with_suffix(path.suffix), name)
                    done.append(Shared(name, True, tuple(what)))
                else:
                    done.append(Shared(name, False, tuple(what)))
            if is_bundle(source):
                left_out = {entry.name for entry in done if not entry.kept}
                (copy.with_suffix(".json")).write_bytes(_manifest(source, left_out, scrub))
                _add(archive, copy.with_suffix(".json"), MANIFEST)
                done.append(Shared(MANIFEST, True, ("user names, home folders and secrets in texts replaced",)))
        if not any(entry.kept for entry in done):
            raise GpudiagError(f"{source}: nothing in it can be shared", "give a bundle, a .sqlite or a Kineto .json")
        temporary.replace(target)
    except OSError as error:
        raise GpudiagError(f"{target}: {error.strerror or error}", "check the file and the disk") from error
    finally:
        temporary.unlink(missing_ok=True)
    return done


def _files(source: Path, exclude: set[Path]) -> Iterator[Path]:
    if source.is_file():
        yield source
        return
    for path in sorted(source.rglob("*")):
        # a link may point at anything outside the bundle
        if path.is_file() and not path.is_symlink() and path.absolute() not in exclude and path.name != MANIFEST:
            yield path


def _why_not(path: Path) -> list[str]:
    """Why a file stays behind; empty when it can be shared."""
    if path.suffix in _REPORTS:
        return [
            "left out: an nsys report holds the whole environment in a format that cannot be cleaned; the .sqlite is in"
        ]
    if path.suffix in (".sqlite", ".db"):
        return [] if is_nsys_sqlite(path) else ["left out: no nsys export, so its private parts are not known"]
    if path.suffix in (".json", ".jsonl") or path.name.endswith(".json.gz"):
        return []
    if path.suffix == ".html":
        return ["left out: draw it again from diagnosis.json with `gpudiag report`"]
    return ["left out: not needed to judge the recording again"]


def _copy(path: Path, target: Path, scrub: Scrubber) -> list[str]:
    if path.suffix in (".sqlite", ".db"):
        target.unlink(missing_ok=True)
        return scrub_sqlite(path, target, scrub)
    if path.suffix == ".jsonl" or path.name == "diagnosis.json":
        scrub_records(path, target, scrub)
        return ["user names, home folders and secrets in texts replaced"]
    try:
        scrub_trace(path, target, scrub)
    except EOFError as error:  # a .gz cut short by a kill
        raise GpudiagError(f"{path}: the file is cut short", "leave it out of the folder, or record again") from error
    return ["host, user and job names and home folders replaced"]


def _manifest(source: Path, left_out: set[str], scrub: Scrubber) -> bytes:
    """The manifest without the files that stay behind."""
    manifest = read_bundle(source).manifest
    captures = tuple(_without(capture, left_out) for capture in manifest.captures)
    builtins = msgspec.to_builtins(msgspec.structs.replace(manifest, captures=captures))
    builtins = scrub_value(builtins, scrub) | {"command": list(scrub.command(manifest.command))}
    return msgspec.json.format(msgspec.json.encode(builtins), indent=2) + b"\n"


def _without(capture: CaptureInfo, left_out: set[str]) -> CaptureInfo:
    files = {role: [name for name in names if name not in left_out] for role, names in capture.files.items()}
    return msgspec.structs.replace(capture, files={role: names for role, names in files.items() if names})


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    info = zipfile.ZipInfo(name, _DATE)
    info.external_attr = 0o644 << 16
    info.compress_type = zipfile.ZIP_STORED if name.endswith(".gz") else zipfile.ZIP_DEFLATED
    with path.open("rb") as plain, archive.open(info, "w", force_zip64=True) as packed:
        shutil.copyfileobj(plain, packed, 1 << 20)
