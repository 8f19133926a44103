"""From paths to timelines: what a file is gets decided by its content, never by its name."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from gpudiag.bundle import Bundle, CaptureInfo, is_bundle, read_bundle, rounds_of
from gpudiag.errors import GpudiagError
from gpudiag.read.many import read_files
from gpudiag.read.one import KINDS, Progress, read_file
from gpudiag.timeline import DeviceInfo, HostInfo, Kind, Source, Timeline
from gpudiag.units import format_ns

_RECORDING_NAMES = (".sqlite", ".json", ".json.gz", ".nsys-rep", ".qdrep", ".qdstrm", ".nvvp", ".nvprof")


@dataclass(frozen=True)
class Recordings:
    """All timelines of one analysis: one a rank (nsys: one a file). bundle: where they came from, if from one."""

    timelines: tuple[Timeline, ...]
    bundle: Bundle | None = None
    warnings: tuple[str, ...] = ()


def open_recordings(paths: Sequence[Path], progress: Progress | None = None) -> Recordings:
    """Read every path. Raises GpudiagError for what is missing, empty, unreadable or of no known kind."""
    tell = progress or (lambda _text: None)
    timelines: list[Timeline] = []
    warnings: list[str] = []
    bundle: Bundle | None = None
    for path in paths:
        if not os.path.lexists(path) or not _exists(path):
            raise GpudiagError(f"{path}: no such file or folder", f"give the path of a recording: {KINDS}")
    paths, doubled = _without_copies(paths)
    warnings += doubled
    if len(paths) > 1 and all(path.is_file() for path in paths):
        timelines, said = read_files(paths, tell)
        return Recordings(_distinct_ranks(timelines), None, (*warnings, *said, *_strangers(timelines)))
    for path in paths:
        if is_bundle(path):
            bundle = read_bundle(path)
            got, said = _from_bundle(bundle, tell)
            timelines += got
            warnings += said
        elif path.is_dir():
            got, said = _from_folder(path, tell)
            timelines += got
            warnings += said
        else:
            timelines.append(read_file(path, tell))
    if not timelines:
        raise GpudiagError("no recording given", f"name at least one of: {KINDS}")
    return Recordings(_distinct_ranks(timelines), bundle, tuple(warnings))


def open_bundle(bundle: Bundle, progress: Progress | None = None) -> Recordings:
    """One bundle, or one with some of its captures left out (a round). Raises GpudiagError."""
    timelines, warnings = _from_bundle(bundle, progress or (lambda _text: None))
    return Recordings(_distinct_ranks(timelines), bundle, tuple(warnings))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, RuntimeError):  # a loop of links
        return False


def _without_copies(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The paths without those that are, or hold byte for byte, what another one is: twice the same rank is no second rank."""
    kept: list[Path] = []
    said = []
    for path in paths:
        twin = next((other for other in kept if _same(path, other)), None)
        if twin is None:
            kept.append(path)
        else:
            said.append(f"left out: {path} holds the same as {twin}")
    return kept, said


def _same(one: Path, other: Path) -> bool:
    if one.resolve() == other.resolve():
        return True
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _strangers(timelines: Sequence[Timeline]) -> list[str]:
    """A word where nothing in the files says that they are ranks of one run."""
    recorders = {(timeline.source.kind, timeline.source.recorder.split(" ")[0]) for timeline in timelines}
    numbered = len({timeline.rank for timeline in timelines}) == len(timelines)
    if len(timelines) < 2 or (len(recorders) == 1 and numbered):
        return []
    return ["nothing in the files says that they are ranks of one run: they are judged side by side as if they were"]


def _from_folder(path: Path, progress: Progress) -> tuple[list[Timeline], list[str]]:
    """A folder of ranks: every recording directly inside it, by name."""
    files = sorted(file for file in path.iterdir() if file.is_file() and file.name.endswith(_RECORDING_NAMES))
    if not files:
        raise GpudiagError(f"{path}: the folder holds no recording and no manifest.json", f"give one of: {KINDS}")
    files, doubled = _without_copies(files)
    timelines, said = read_files(files, progress)
    return timelines, [*doubled, *said, *_strangers(timelines)]


def _from_bundle(bundle: Bundle, progress: Progress) -> tuple[list[Timeline], list[str]]:
    """The timelines of the capture that says most: GPU work first, nsys before torch where both have it; of several rounds
    the one with the median step.

    Records of our own (loader, steps, call sites) and NVML samples of the same capture are joined to each timeline.
    """
    from gpudiag.read.loader_log import read_process_log
    from gpudiag.read.log_attach import attach
    from gpudiag.read.nvml_samples import read_nvml_devices, read_nvml_samples

    bundle = _with_unlisted(bundle)
    warnings = list(bundle.manifest.warnings)
    warnings += [f"{capture.name}: {capture.failed}" for capture in bundle.manifest.captures if capture.failed]
    captures, choice = _median_round(bundle)
    tried: list[tuple[CaptureInfo, list[Timeline]]] = []
    for capture in captures:
        warnings += [f"{capture.name}: {note}" for note in capture.notes]
        traces = [bundle.path / name for name in capture.files.get("trace", [])]
        logs = [bundle.path / name for name in capture.files.get("log", [])]
        timelines: list[Timeline] = []
        for trace in traces:
            try:
                timelines.append(read_file(trace, progress))
            except GpudiagError as error:
                warnings.append(f"{capture.name}: {error.message}")
        log = read_process_log(logs) if logs else None
        if log is not None:
            timelines = [
                replace(attach(timeline, log), optimizer_name=log.optimizer_name(timeline.rank))
                for timeline in timelines
            ]
        for name in capture.files.get("nvml", []):
            file = bundle.path / name
            timelines = [
                replace(
                    timeline,
                    samples=read_nvml_samples(file, timeline.time_base_ns or 0),
                    devices=_with_links(timeline.devices, read_nvml_devices(file)),
                )
                for timeline in timelines
            ]
        tried.append((capture, timelines))
    best = max(tried, key=lambda item: _worth(item[0], item[1]), default=None)
    if best is None or not best[1]:
        reasons = "; ".join(warnings) or "the run ended, or gpudiag did, before anything was recorded"
        raise GpudiagError(
            f"{bundle.path}: the bundle holds no recording ({reasons})",
            "profile the script again, with fewer --warmup steps if it is short",
        )
    for capture, timelines in tried:
        if capture is not best[0] and timelines:
            warnings.append(f"judged the {best[0].name} capture; the {capture.name} capture is in the bundle beside it")
    return [_as_bundle(timeline, bundle) for timeline in best[1]], [*warnings, *choice]


def _with_unlisted(bundle: Bundle) -> Bundle:
    """A gpudiag that was killed during the first capture has listed none: what there is is found by name."""
    manifest = bundle.manifest
    if manifest.captures:
        return bundle
    found = []
    for name in manifest.asked.get("passes", ()):
        folder = bundle.path / name
        files = {
            "trace": [*sorted(folder.glob("rank*.kineto.json")), *folder.glob("report.sqlite")],
            "log": sorted(folder.glob("rank*.jsonl")),
            "nvml": [*folder.glob("nvml.jsonl")],
        }
        if files["log"]:
            paths = {role: [f"{name}/{path.name}" for path in some] for role, some in files.items() if some}
            note = "gpudiag was ended before it had gathered this capture; it is judged as it lies there"
            found.append(CaptureInfo(name, name.partition("-")[0], paths, notes=(note,)))
    return Bundle(bundle.path, msgspec.structs.replace(manifest, captures=tuple(found)))


def _median_round(bundle: Bundle) -> tuple[tuple[CaptureInfo, ...], tuple[str, ...]]:
    """The captures of the round whose step takes the median time (of two middle ones the faster), and a line that says so."""
    rounds = rounds_of(bundle)
    if len(rounds) < 2:
        return bundle.manifest.captures, ()
    timed = sorted((time, number) for number, part in enumerate(rounds) if (time := _step_ns(part)))
    number = timed[(len(timed) - 1) // 2][1] if timed else 0
    captures = rounds[number].manifest.captures
    judged = f"judged round {number + 1} of {len(rounds)} ({', '.join(capture.name for capture in captures)})"
    if not timed:
        return captures, (f"{judged}: no round has timed steps, so none is the median",)
    shortest, longest = timed[0][0], timed[-1][0]
    times = ", ".join(format_ns(time) for time, _ in sorted(timed, key=lambda item: item[1]))
    spread = (longest - shortest) / timed[(len(timed) - 1) // 2][0]
    return captures, (
        f"{judged}, the median by step time: the rounds took {times} a step, a spread of {100 * spread:.0f} %",
    )


def _step_ns(part: Bundle) -> int | None:
    """A round's step time: as it was recorded, since that is what is judged; else outside the recording."""
    for capture in part.manifest.captures:
        if time := capture.recorded_step_ns or capture.plain_step_ns:
            return time
    return None


def _worth(capture: CaptureInfo, timelines: Sequence[Timeline]) -> tuple[int, int, int]:
    kernels = sum(
        int((timeline.gpu_ops.kind == Kind.KERNEL).sum()) for timeline in timelines if timeline.gpu_ops is not None
    )
    operators = sum(len(timeline.cpu_ops) for timeline in timelines if timeline.cpu_ops is not None)
    if kernels:
        return 2, int(capture.kind == "nsys"), operators
    return int(bool(timelines)), int(operators > 0), operators


def _as_bundle(timeline: Timeline, bundle: Bundle) -> Timeline:
    return replace(
        timeline,
        source=Source("bundle", str(bundle.path), timeline.source.recorder, timeline.source.schema),
        host=_host(timeline.host, bundle.manifest.environment),
    )


def _with_links(recorded: Mapping[int, DeviceInfo], sampled: Mapping[int, DeviceInfo]) -> dict[int, DeviceInfo]:
    """What the recording says of each device, and what only NVML knows: its links, and devices that did no work."""
    found = dict(sampled)
    for device, info in recorded.items():
        links = sampled.get(device, DeviceInfo())
        found[device] = replace(info, nvlinks=links.nvlinks, nvlinks_active=links.nvlinks_active)
    return found


def _host(known: HostInfo, environment: Mapping[str, Any]) -> HostInfo:
    """What the process said of itself, completed by what the manifest says of the machine."""
    gpus = environment.get("gpus")
    return replace(
        known,
        # the script may have narrowed what it was started with
        usable_cpus=min(filter(None, (environment.get("usable_cpus"), known.usable_cpus)), default=None),
        machine_cpus=environment.get("machine_cpus", known.machine_cpus),
        torch=known.torch or environment.get("torch"),
        cuda=known.cuda or environment.get("torch_cuda") or environment.get("torch_hip"),
        debug_switches=known.debug_switches or tuple(environment.get("debug_switches") or ()),
        gpu_present=bool(gpus) if gpus is not None else known.gpu_present,
        driver=environment.get("driver", known.driver),
    )


def _distinct_ranks(timelines: Sequence[Timeline]) -> tuple[Timeline, ...]:
    """Ranks as recorded; numbered in the given order where two files claim the same one."""
    ranks = [timeline.rank for timeline in timelines]
    if len(set(ranks)) == len(ranks):
        return tuple(sorted(timelines, key=lambda timeline: timeline.rank))
    return tuple(replace(timeline, rank=number) for number, timeline in enumerate(timelines))
