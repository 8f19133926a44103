"""How much faster than plain FP32 a GPU is in other formats, from its dense peaks."""

from __future__ import annotations

from dataclasses import dataclass

from gpudiag.timeline import DeviceInfo


@dataclass(frozen=True)
class PeakRatios:
    """half, tf32: tensor-core peak / FP32 peak; fp64: FP64 peak / FP32 peak; None = the device has no such unit."""

    half: float | None
    tf32: float | None
    fp64: float | None
    source: str


# Dense peaks of a typical part of each generation, TFLOP/s as (FP32, FP16/BF16 tensor, TF32 tensor, FP64), from NVIDIA's
# datasheets and architecture whitepapers: P100, V100, T4, A100, A40, L40S, H100 SXM, B200; ratios hardly vary inside one.
_BY_CAPABILITY: dict[tuple[int, int], tuple[float, float | None, float | None, float, str]] = {
    (6, 0): (10.6, None, None, 5.3, "P100"),
    (6, 1): (12.0, None, None, 0.37, "P40"),
    (7, 0): (15.7, 125.0, None, 7.8, "V100"),
    (7, 5): (8.1, 65.0, None, 0.25, "T4"),
    (8, 0): (19.5, 312.0, 156.0, 9.7, "A100"),
    (8, 6): (37.4, 149.7, 74.8, 0.58, "A40"),
    (8, 9): (91.6, 362.0, 183.0, 1.4, "L40S"),
    (9, 0): (67.0, 989.0, 494.0, 34.0, "H100 SXM"),
    (10, 0): (75.0, 2250.0, 1125.0, 37.0, "B200"),
}


def peaks_of(info: DeviceInfo | None) -> PeakRatios | None:
    """The ratios of the device's generation; None when the recording does not say which it is, or it is not NVIDIA's."""
    if info is None or info.compute_capability is None or "amd" in info.name.lower() or "instinct" in info.name.lower():
        return None
    row = _BY_CAPABILITY.get(info.compute_capability)
    if row is None:
        return None
    fp32, half, tf32, fp64, part = row
    return PeakRatios(
        half / fp32 if half else None,
        tf32 / fp32 if tf32 else None,
        fp64 / fp32,
        f"dense peaks of compute capability {info.compute_capability[0]}.{info.compute_capability[1]} ({part} datasheet)",
    )
