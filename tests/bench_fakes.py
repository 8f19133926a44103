"""A clock, a device and a power source that tests set by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpudiag.bench.power import Sample
from gpudiag.bench.result import Memory


@dataclass
class FakeClock:
    """Nanoseconds that move only when a test says so."""

    now: int = 0

    def __call__(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


@dataclass
class FakeDevice:
    """Work is queued at once and done later, as on a GPU: `queued` ns pass only when the host synchronises."""

    clock: FakeClock
    queued: int = 0
    log: list[str] = field(default_factory=list)

    def submit(self, host_ns: int, device_ns: int) -> None:
        self.clock.now += host_ns
        self.queued += device_ns
        self.log.append("step")

    def synchronize(self) -> None:
        self.clock.now += self.queued
        self.queued = 0
        self.log.append("sync")

    def reset_peak(self) -> None:
        self.log.append("reset")

    def peak(self) -> Memory:
        return Memory(allocated=1, reserved=2)


@dataclass
class FakeSource:
    samples: list[Sample]

    def sample(self) -> Sample:
        return self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]
