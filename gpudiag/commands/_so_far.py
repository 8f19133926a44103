"""What is recorded so far, judged while the script runs on. A process of its own (collect/early.py), which says nothing:
the report at the end says what there is to say."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import msgspec

from gpudiag.bundle import read_bundle, write_manifest
from gpudiag.child import own_module
from gpudiag.commands._common import Outputs, write_file
from gpudiag.diagnosis import Severity, to_json
from gpudiag.errors import GpudiagError


def command(outputs: Outputs, fail_on: Severity | None, bundle: Path, name: str, kind: str, wall_s: float) -> list[str]:
    """The command line of this process. name, kind: of the capture; wall_s: how long the script has run."""
    files = {format_: target for format_, target in outputs.given().items() if target != "-"}
    asked = {"bundle": str(bundle), "name": name, "kind": kind, "wall_s": wall_s, "outputs": files, "fail_on": fail_on}
    return own_module(__name__, json.dumps(asked))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # half-written files are taken away
    asked = json.loads(sys.argv[1])
    try:
        _judge(Path(asked["bundle"]), asked["name"], asked["kind"], asked["wall_s"], asked["outputs"], asked["fail_on"])
    except (GpudiagError, OSError):
        sys.exit(1)


def _judge(path: Path, name: str, kind: str, wall_s: float, outputs: dict[str, str], fail_on: Severity | None) -> None:
    from gpudiag.collect.session import with_nsys_report
    from gpudiag.collect.torch_profiler import so_far
    from gpudiag.pipeline import diagnose

    capture = so_far(path / name, kind, wall_s)
    if kind == "nsys":
        capture = with_nsys_report(capture, path / name)
    manifest = read_bundle(path).manifest
    # a gpudiag that is killed from here on leaves a bundle that lists what there is
    write_manifest(path, msgspec.structs.replace(manifest, captures=(*manifest.captures, capture)))
    diagnosis = diagnose([path])
    write_file(path / "diagnosis.json", to_json(diagnosis))
    Outputs(**outputs).write(diagnosis, fail_on)


if __name__ == "__main__":
    main()
