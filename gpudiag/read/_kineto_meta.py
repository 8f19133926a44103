"""What the head and the tail of a trace say about the recording, apart from its events. Names of hosts, users and jobs are not read."""

from __future__ import annotations

import re

import msgspec

from gpudiag.timeline import DeviceInfo, HostInfo


class _Device(msgspec.Struct, gc=False):
    id: int | None = None
    name: str = ""
    total: int | None = msgspec.field(default=None, name="totalGlobalMem")
    major: int | None = msgspec.field(default=None, name="computeMajor")
    minor: int | None = msgspec.field(default=None, name="computeMinor")
    sms: int | None = msgspec.field(default=None, name="numSms")


class _Distributed(msgspec.Struct, gc=False):
    backend: str | None = None
    rank: int | None = None
    world_size: int | None = None


class Meta(msgspec.Struct, gc=False):
    """Top-level keys; None = not in the file."""

    schema: int | None = msgspec.field(default=None, name="schemaVersion")
    devices: list[_Device] | None = msgspec.field(default=None, name="deviceProperties")
    distributed: _Distributed | None = msgspec.field(default=None, name="distributedInfo")
    base_ns: int | None = msgspec.field(default=None, name="baseTimeNanoseconds")
    with_stack: int | None = None
    cuda_runtime: int | None = msgspec.field(default=None, name="cuda_runtime_version")
    hip_runtime: int | None = msgspec.field(default=None, name="hip_runtime_version")


_DECODER = msgspec.json.Decoder(Meta)
_LONGEST_VALUE = 1 << 16
_FAULTS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_meta(header: bytes, trailer: bytes) -> tuple[Meta, bool]:
    """The metadata around the events, and whether all of it could be read. header ends with `[`, trailer starts with `]`."""
    if not header:
        return Meta(), True
    try:
        return _DECODER.decode(header + (trailer or b"]}")), True
    except _FAULTS:
        return _by_key(header + trailer), False


def _by_key(text: bytes) -> Meta:
    """Each key on its own, where the whole is broken: the value after it ends at a comma or a bracket."""
    found = {}
    for field in msgspec.structs.fields(Meta):
        at = re.search(rb'"' + field.encode_name.encode() + rb'"\s*:', text)
        value = text[at.end() : at.end() + _LONGEST_VALUE] if at else b""
        for end in re.finditer(rb"(?<=[}\]])|(?=[,}])", value):
            try:
                found[field.name] = msgspec.json.decode(value[: end.start()], type=field.type)
                break
            except _FAULTS:
                continue
    return Meta(**found)


def devices(meta: Meta) -> dict[int, DeviceInfo]:
    """Every GPU of the node that the recording lists, used or not."""
    return {
        (index if d.id is None else d.id): DeviceInfo(
            name=d.name,
            sm_count=d.sms,
            compute_capability=(d.major, d.minor) if d.major is not None and d.minor is not None else None,
            memory_bytes=d.total,
        )
        for index, d in enumerate(meta.devices or [])
    }


def describe(meta: Meta, categories: frozenset[str]) -> tuple[str, str]:
    """(recorder, schema) in words. Kineto writes no version of torch; its categories and keys tell the years."""
    if categories & {"Operator", "Kernel", "Memcpy", "Memset", "Runtime"}:
        schema = "2021: capitalised categories"
    elif meta.base_ns is not None:
        schema = "since 2024: times relative to baseTimeNanoseconds"
    else:
        schema = "2022 to 2024: absolute times"
    version = host(meta).cuda
    platform = f", {'CUDA' if meta.cuda_runtime else 'HIP'} {version}" if version else ""
    return f"torch.profiler (Kineto{platform})", schema


def host(meta: Meta) -> HostInfo:
    """The CUDA or HIP version that the recording names, as the runtime packs it (12040 is 12.4, 60443483 is 6.4)."""
    version = None
    if meta.cuda_runtime:
        version = f"{meta.cuda_runtime // 1000}.{meta.cuda_runtime % 1000 // 10}"
    elif meta.hip_runtime:
        version = f"{meta.hip_runtime // 10_000_000}.{meta.hip_runtime % 10_000_000 // 100_000}"
    # An empty list of devices may also come from a driver that does not fit; only a full one is evidence.
    return HostInfo(cuda=version, gpu_present=True if meta.devices else None)


def notes(text: bytes) -> tuple[str, ...]:
    """What the profiler itself counted as missing. Its messages are not repeated: they hold paths and addresses."""
    said = []
    outside = [int(n) for n in re.findall(rb"Out-of-range = (\d{1,12})", text)]
    if any(outside):
        said.append(
            f"the profiler dropped {sum(outside)} GPU records outside its window (those of the warm-up are normal)"
        )
    if re.search(rb"CUPTI stopped early\? = 1", text):
        said.append("CUPTI stopped early: its buffers were full, and later GPU work was not recorded")
    if re.search(rb'"ERROR"\s*:\s*\[\s*"', text):
        said.append("the profiler logged errors")
    return tuple(said)
