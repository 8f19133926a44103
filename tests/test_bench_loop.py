"""The benchmark's clock work, with a clock and a device that stand still until told."""

from __future__ import annotations

import pytest
from bench_fakes import FakeClock, FakeDevice, FakeSource

from gpudiag.bench.loop import Loop
from gpudiag.bench.power import NvmlSource, PowerWatch, Sample, summarise_power
from gpudiag.bench.result import RoundLoad
from gpudiag.bench.stability import CpuTimes, load_of_round, summarise


def make_loop(clock: FakeClock, device: FakeDevice, **changes: object) -> Loop:
    values: dict[str, object] = {"rounds": 3, "warm_up": 2, "pause_s": 5.0, "unstable_over": 0.1, "cores": 2}
    return Loop(device, clock=clock, sleep=clock.sleep, **(values | changes))  # type: ignore[arg-type]


def test_queued_work_counts_in_throughput_because_the_device_is_awaited_before_the_clock_is_read() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)
    # the host needs 1 ms to launch, the device 9 ms to work: a clock read without waiting would say 1 ms
    rounds = make_loop(clock, device).throughput(lambda: device.submit(1_000_000, 9_000_000), items=32, iterations=10)
    assert rounds.values == pytest.approx((3200.0, 3200.0, 3200.0))
    assert rounds.stable and rounds.spread == 0


def test_each_latency_sample_is_bracketed_by_its_own_synchronisation() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)
    samples, loads = make_loop(clock, device, rounds=1, warm_up=0).latencies(lambda: device.submit(1_000, 9_000), 4)
    assert samples == [[10_000] * 4]
    assert device.log == ["sync"] + ["sync", "step", "sync"] * 4
    assert len(loads) == 1


def test_a_throughput_round_synchronises_twice_only_so_that_the_host_may_run_ahead() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)
    make_loop(clock, device, rounds=1, warm_up=0).throughput(lambda: device.submit(1, 1), items=1, iterations=50)
    assert device.log == ["sync", "sync"] + ["step"] * 50 + ["sync"]


def test_warm_up_runs_before_every_round_and_is_not_measured() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)
    calls = 0

    def step() -> None:
        nonlocal calls
        first_of_round = calls % 3 == 0
        calls += 1
        device.submit(1_000_000_000 if first_of_round else 1_000_000, 0)

    rounds = make_loop(clock, device, warm_up=1).throughput(step, items=1, iterations=2)
    assert calls == 3 * (1 + 2)
    assert rounds.values == pytest.approx((1000.0, 1000.0, 1000.0))


def test_the_pause_lies_between_rounds_and_not_inside_them() -> None:
    clock = FakeClock()
    device = FakeDevice(clock)
    make_loop(clock, device, warm_up=0, pause_s=7.0).throughput(lambda: device.submit(1000, 0), items=1, iterations=1)
    assert clock.now == 3 * 1000 + 2 * 7_000_000_000


def test_the_median_of_the_rounds_is_reported_and_over_ten_percent_spread_is_unstable() -> None:
    assert summarise([100.0, 104.0, 90.0], "images/s", 0.10).median == 100.0
    assert summarise([100.0, 104.0, 95.0], "images/s", 0.10).stable
    unstable = summarise([100.0, 104.0, 90.0], "images/s", 0.10, [RoundLoad(others=0.4)], 2)
    assert not unstable.stable
    assert unstable.spread == pytest.approx(0.14)
    assert unstable.reasons == ("other processes used 40 % of the CPU cores",)


def test_one_round_has_no_spread_and_is_never_called_stable() -> None:
    assert not summarise([100.0], "images/s", 0.10).stable


@pytest.mark.parametrize(
    ("loads", "said"),
    [
        ([RoundLoad(gpu_events=("HwThermalSlowdown",))], "the GPU lowered its clocks: HwThermalSlowdown"),
        ([RoundLoad(gpu_celsius=88.0)], "GPU temperature reached 88 C"),
        ([RoundLoad(gpu_processes=3)], "2 other process(es) on the GPU"),
        ([RoundLoad(gpu_mhz=1980.0), RoundLoad(gpu_mhz=1500.0)], "the GPU clock moved between 1500 and 1980 MHz"),
        ([RoundLoad(steal=0.1)], "the hypervisor took 10 % of the CPU time"),
        ([RoundLoad(load_before=3.0)], "load average 3.0 on 2 cores before the first round"),
        ([RoundLoad(others=0.01, load_before=0.1)], "no cause recorded"),
    ],
)
def test_the_likely_reason_comes_from_what_was_recorded(loads: list[RoundLoad], said: str) -> None:
    assert summarise([1.0, 2.0], "images/s", 0.1, loads, 2).reasons[0].startswith(said)


def test_the_share_of_other_processes_leaves_our_own_work_out() -> None:
    before = CpuTimes(busy=100.0, steal=0.0, own=10.0, wall_ns=0, cpus=2)
    after = CpuTimes(
        busy=119.0, steal=0.5, own=25.0, wall_ns=10_000_000_000, cpus=2
    )  # 19 s busy, 15 of them ours, on 2 x 10 s
    load = load_of_round(before, after)
    assert load.others == pytest.approx(0.2)
    assert load.steal == pytest.approx(0.025)
    assert load_of_round(before, CpuTimes(100.1, 0.0, 10.0, 100_000_000, 2)).others is None  # ten ticks say nothing


def test_energy_comes_from_the_counter_where_there_is_one_else_from_the_samples() -> None:
    counted = [[Sample(0, watts=200.0, energy_mj=1_000_000), Sample(10**9, watts=300.0, energy_mj=1_250_000)]]
    power = summarise_power(counted, images_per_round=100)
    assert power is not None
    assert power.joules_per_image == pytest.approx(2.5)
    assert (power.mean_watts, power.max_watts, power.energy_source) == (250.0, 300.0, "NVML energy counter")
    sampled = [[Sample(0, watts=100.0), Sample(10**9, watts=200.0), Sample(3 * 10**9, watts=200.0)]]
    power = summarise_power(sampled, images_per_round=55)
    assert power is not None
    assert power.joules_per_image == pytest.approx((150 + 400) / 55)


def test_without_a_power_reading_there_is_no_power_result() -> None:
    assert summarise_power([[Sample(0), Sample(1)]], 10) is None


def test_the_power_watch_keeps_what_it_saw_for_each_round() -> None:
    watch = PowerWatch(
        FakeSource([Sample(0, watts=10.0, sm_mhz=1000.0, events=("SwPowerCap",)), Sample(1, watts=30.0, sm_mhz=900.0)])
    )
    watch.start()
    watch.stop()
    assert len(watch.rounds) == 1
    assert watch.load()["gpu_events"] == ("SwPowerCap",)
    watch.start()
    watch.stop()
    assert len(watch.rounds) == 2
    assert watch.load()["gpu_events"] == ()


class Board:
    """NVML's answers for one GPU under load, x16 generation 4 at most."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __init__(self, mhz: int, generation: int, width: int) -> None:
        self.answers = {
            "nvmlDeviceGetClockInfo": mhz,
            "nvmlDeviceGetMaxClockInfo": 2000,
            "nvmlDeviceGetPowerUsage": 200_000,
            "nvmlDeviceGetCurrPcieLinkGeneration": generation,
            "nvmlDeviceGetMaxPcieLinkGeneration": 4,
            "nvmlDeviceGetCurrPcieLinkWidth": width,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
        }

    def __getattr__(self, name: str) -> object:
        def answer(*_: object) -> int:
            if name not in self.answers:
                raise self.NVMLError
            return self.answers[name]

        return answer


def link_of(*boards: Board) -> float | None:
    samples = [NvmlSource(board, 0).sample() for board in boards]
    power = summarise_power([samples], 1)
    assert power is not None
    return power.pcie_share


def test_the_link_is_judged_by_its_best_state_under_load_and_never_by_an_idle_one() -> None:
    idle, half, full = Board(300, 1, 16), Board(1900, 4, 8), Board(1900, 4, 16)
    assert link_of(*[idle] * 20, *[half] * 5) == 0.5
    assert link_of(*[half] * 5, full) == 1.0
    assert link_of(*[idle] * 20, *[half] * 4) is None  # too short a time under load
    assert link_of(*[idle] * 20) is None
