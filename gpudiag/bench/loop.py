"""The clock work: rounds, warm-up, pause, synchronisation. Clock, sleep and device are handed in, so tests need neither time nor a GPU.

A CUDA call returns before its work is done. So the device is synchronised before each reading of the clock, start and end;
on a CPU that is nothing to wait for. A latency sample is bracketed on its own; a throughput round once, since waiting in each
iteration would keep the host from running ahead as it does in real training.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from gpudiag.bench.result import Memory, RoundLoad, Rounds
from gpudiag.bench.stability import cpu_mhz, load_average, load_of_round, read_cpu_times, summarise

Clock = Callable[[], int]
Step = Callable[[], object]
T = TypeVar("T")  # 3.11 has no `def f[T]`


class Device(Protocol):
    """What the loop needs of a device; the real ones are in device.py."""

    def synchronize(self) -> None: ...

    def reset_peak(self) -> None: ...

    def peak(self) -> Memory: ...


class Watch(Protocol):
    """Samples power, clocks and temperature while a round runs (power.py); `load()` gives what it saw since `start()`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def load(self) -> dict[str, object]: ...


class NoWatch:
    """For a machine without NVML."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def load(self) -> dict[str, object]:
        return {}


@dataclass(frozen=True)
class Loop:
    """How rounds are run. cores: usable ones, which a load average is judged against."""

    device: Device
    rounds: int
    warm_up: int
    pause_s: float
    unstable_over: float
    cores: int
    clock: Clock = time.perf_counter_ns
    sleep: Callable[[float], None] = time.sleep
    watch: Watch = field(default_factory=NoWatch)

    def throughput(self, step: Step, items: int, iterations: int) -> Rounds:
        """Items per second: `iterations` calls of `step`, each of `items` items, in every round."""
        rates: list[float] = []
        loads: list[RoundLoad] = []
        for elapsed, load in self._run_rounds(lambda: self._timed(step, iterations), step):
            rates.append(items * iterations / (elapsed / 1e9))
            loads.append(load)
        return summarise(rates, "images/s", self.unstable_over, loads, self.cores)

    def latencies(self, step: Step, iterations: int) -> tuple[list[list[int]], list[RoundLoad]]:
        """Nanoseconds of every iteration, a list a round."""
        samples: list[list[int]] = []
        loads: list[RoundLoad] = []
        for each, load in self._run_rounds(lambda: [self._timed(step, 1) for _ in range(iterations)], step):
            samples.append(each)
            loads.append(load)
        return samples, loads

    def _timed(self, step: Step, iterations: int) -> int:
        self.device.synchronize()
        start = self.clock()
        for _ in range(iterations):
            step()
        self.device.synchronize()
        return max(1, self.clock() - start)

    def _run_rounds(self, measure: Callable[[], T], step: Step) -> list[tuple[T, RoundLoad]]:
        results: list[tuple[T, RoundLoad]] = []
        for number in range(self.rounds):
            if number:
                self.sleep(self.pause_s)
            for _ in range(self.warm_up):
                step()
            self.device.synchronize()
            load_before, before = load_average(), read_cpu_times(self.clock())
            self.watch.start()
            value = measure()
            self.watch.stop()
            after = read_cpu_times(self.clock())
            load = load_of_round(
                before,
                after,
                load_before=load_before,
                load_after=load_average(),
                cpu_mhz=cpu_mhz(),
                **self.watch.load(),
            )
            results.append((value, load))
        return results
