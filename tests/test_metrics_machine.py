"""Memory, power and clocks from NVML samples of a busy GPU, of this device, and growth inside the window only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import Recorder, measured, samples

from gpudiag.metrics import measure
from gpudiag.metrics.across import run_facts
from gpudiag.metrics.base import Missing
from gpudiag.metrics.machine import NAMES
from gpudiag.rules import judge, load_rules
from gpudiag.scope import scopes_of
from gpudiag.timeline import DeviceInfo, HostInfo, MemoryEvents

MS = 1_000_000
GB = 1_000_000_000


def training() -> Recorder:
    """4 steps of 100 ms, busy."""
    recorder = Recorder()
    recorder.steps(4, 100 * MS)
    for step in range(4):
        recorder.kernel(step * 100 * MS, step * 100 * MS + 90 * MS)
    return recorder


def sampled(*rows: dict[str, float], recorder: Recorder | None = None):
    return measured(recorder or training(), samples=samples(*rows))


def test_figures_are_medians_and_extremes_over_samples_with_the_gpu_busy() -> None:
    row = {"power_limit_w": 400, "sm_clock_max_mhz": 1400, "memory_total": 40 * GB}
    got = sampled(
        {"at": 10 * MS, "gpu_util": 0.0, "power_w": 50, "temperature_c": 90, "sm_clock_mhz": 200, "memory_used": 39 * GB, **row},
        {"at": 20 * MS, "gpu_util": 0.35, "power_w": 200, "temperature_c": 60, "sm_clock_mhz": 1400, "memory_used": 10 * GB, **row},
        {"at": 30 * MS, "gpu_util": 0.9, "power_w": 300, "temperature_c": 70, "sm_clock_mhz": 1050, "memory_used": 20 * GB, **row},
        {"at": 40 * MS, "gpu_util": 1.0, "power_w": 390, "temperature_c": 65, "sm_clock_mhz": 700, "memory_used": 12 * GB, **row},
        {"at": 40 * MS, "gpu_util": 1.0, "power_w": 999, "temperature_c": 99, "sm_clock_mhz": 1, "memory_used": 40 * GB, "device": 1, **row},
    )  # fmt: skip
    wanted = {
        "power_draw": 300, "power_limit": 400, "temperature": 70, "sm_clock": 1050, "sm_clock_share": 0.75,
        "memory_peak_share": 0.5, "memory_growth": 0.05,
    }  # fmt: skip
    assert {name: got[name].value for name in wanted} == pytest.approx(wanted)
    assert (got["power_draw"].unit, got["temperature"].unit, got["sm_clock"].unit) == ("watt", "celsius", "mhz")


def test_reasons_are_shares_of_the_samples_that_have_them() -> None:
    masks = (0x4, 0x4 | 0x20, 0x80, 0x2, 0x1, -1)
    got = sampled(*[{"at": i * MS, "reasons": mask} for i, mask in enumerate(masks)])
    assert got["power_cap_share"].value == 2 / 5
    assert got["thermal_share"].value == 2 / 5
    assert got["clocks_locked_share"].value == 1 / 5


def test_memory_that_grew_before_the_window_is_no_growth() -> None:
    rows = [
        {"at": at * MS, "memory_used": used * GB, "memory_total": 40 * GB}
        for at, used in ((-500, 1), (-100, 8), (50, 20), (250, 21), (380, 22), (900, 40))
    ]
    got = sampled(*rows)
    assert got["memory_growth"].value == pytest.approx(2 / 40)
    assert got["memory_peak_share"].value == 1.0
    alone = sampled(*rows[:3])
    assert isinstance(alone["memory_growth"], Missing)
    assert alone["memory_peak_share"].value == 0.5


def test_processes_of_others_are_the_most_seen_on_this_device() -> None:
    got = sampled(
        {"at": 0, "other_processes": 1, "gpu_util": 0.0},
        {"at": MS, "other_processes": 3},
        {"at": MS, "other_processes": 9, "device": 1},
        {"at": 2 * MS},
    )
    assert got["foreign_processes"].value == 3
    assert sampled({"at": 0, "other_processes": 0})["foreign_processes"].value == 0
    unknown = sampled({"at": 0})["foreign_processes"]
    assert isinstance(unknown, Missing)


def test_what_nvml_did_not_give_is_missing_by_itself() -> None:
    got = sampled({"at": 0, "power_w": 100})
    assert got["power_draw"].value == 100
    for name in NAMES:
        if name != "power_draw":
            assert isinstance(got[name], Missing), name
            assert "NVML" in got[name].reason


def test_a_maximum_clock_of_zero_gives_no_share() -> None:
    assert isinstance(sampled({"at": 0, "sm_clock_mhz": 900, "sm_clock_max_mhz": 0})["sm_clock_share"], Missing)


def test_no_samples_and_no_busy_sample_are_told_apart() -> None:
    assert "not sampled" in measured(training())["power_draw"].reason
    assert "busy" in sampled({"at": 0, "gpu_util": 0.0, "power_w": 9})["power_draw"].reason
    on_cpu = Recorder()
    on_cpu.steps(4, MS)
    assert all(isinstance(measured(on_cpu)[name], Missing) for name in NAMES)


def test_without_the_allocators_counters_it_is_said_how_to_record_them() -> None:
    got = measured(training())["memory_fragmented_share"]
    assert isinstance(got, Missing)
    assert got.record_with == "gpudiag profile SCRIPT"


def test_the_timeline_takes_samples_in_the_collectors_own_units(tmp_path) -> None:
    """The collector writes utilisation as a fraction: 40 % is busy."""
    from gpudiag.read.nvml_samples import read_nvml_samples

    path = tmp_path / "nvml.jsonl"
    path.write_text(
        '{"gpudiag_nvml": 1, "devices": [{"device": 0, "name": "X", "memory_total": 100}]}\n'
        '{"t": 5, "device": 0, "gpu_util": 0.4, "power_w": 77.0, "memory_used": 50}\n'
    )
    got = measured(training(), samples=read_nvml_samples(path))
    assert (got["power_draw"].value, got["memory_peak_share"].value) == (77, 0.5)


def allocator(*rows: tuple[int, int, int]) -> MemoryEvents:
    """Rows of (ns, allocated GB, reserved GB) on device 0 of 40 GiB."""
    start, allocated, reserved = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    gb = 1 << 30
    return MemoryEvents(start, start, np.zeros(len(rows), np.int32), allocated * gb, reserved * gb)


def test_the_allocators_events_tell_how_full_and_how_fragmented_it_is() -> None:
    recorder = Recorder()
    recorder.steps(4, 1000)
    for step in range(4):
        recorder.launch(step * 1000 + 10, step * 1000 + 900)
    memory = allocator((100, 10, 20), (1500, 20, 36), (2500, 12, 36), (3900, 14, 36))
    (scope,) = scopes_of(recorder.timeline(memory=memory))
    got = measure(scope, run_facts([scope]))
    assert got["memory_peak_share"].value == pytest.approx(36 / 40)
    assert got["memory_fragmented_share"].value == pytest.approx(1 - 20 / 36)
    assert got["memory_growth"].value == pytest.approx((14 - 10) / 40), "from the end of the first step to the last's"
    judged = judge(load_rules(), got, step_time_ns=1000, parts=scope.parts, texts={})
    assert judged.outcomes["memory_fragmented"] == "fired"


LINK = {"sm_clock_max_mhz": 2000, "pcie_gen_max": 4, "pcie_width_max": 16}
IDLE = {**LINK, "sm_clock_mhz": 210, "pcie_gen": 1, "pcie_width": 16, "gpu_util": 0.03}
HALF = {**LINK, "sm_clock_mhz": 1800, "pcie_gen": 4, "pcie_width": 8}


def link(*rows: dict[str, float]):
    return sampled(*[{"at": at * MS, **row} for at, row in enumerate(rows)])["pcie_link_share"]


def test_the_link_counts_only_while_the_clock_is_up_and_by_its_best_state() -> None:
    assert link(*[IDLE] * 20, *[HALF] * 5).value == 0.5
    assert link(*[HALF] * 5, {**HALF, "pcie_width": 16}).value == 1.0
    older = {**HALF, "pcie_gen": 3, "pcie_width": 16}
    assert link(*[older] * 5).value == pytest.approx(0.5, rel=0.01)  # 8 instead of 16 GT/s


def test_a_link_seen_idle_or_for_a_moment_only_is_not_judged() -> None:
    for rows in ([IDLE] * 20, [IDLE] * 20 + [HALF] * 4, [{"pcie_gen": 4, "pcie_width": 16}] * 20):
        got = link(*rows)
        assert isinstance(got, Missing) and "under load" in got.reason


def test_where_the_clock_is_not_known_the_utilisation_tells_the_load() -> None:
    row = {"pcie_gen": 3, "pcie_width": 4, "pcie_gen_max": 3, "pcie_width_max": 16}
    assert link(*[{**row, "gpu_util": 0.9}] * 5).value == 0.25
    assert isinstance(link(*[{**row, "gpu_util": 0.3}] * 5), Missing)


def test_nvlinks_are_those_of_the_device_and_a_board_without_is_not_asked_for_them() -> None:
    busy = samples({"at": 0})
    got = measured(training(), samples=busy, devices={0: DeviceInfo(nvlinks=18, nvlinks_active=17)})
    assert (got["nvlinks"].value, got["nvlinks_active"].value) == (18, 17)
    without = measured(training(), samples=busy, devices={0: DeviceInfo()})["nvlinks"]
    assert isinstance(without, Missing) and not without.applies
    assert "not asked" in measured(training())["nvlinks"].reason


def test_the_drivers_of_the_ranks_are_counted_where_they_are_known() -> None:
    assert measured(training(), host=HostInfo(driver="550.54.15"))["driver_versions"].value == 1
    assert isinstance(measured(training())["driver_versions"], Missing)
    two = [
        scope
        for rank, driver in enumerate(("550.54.15", "535.9"))
        for scope in scopes_of(replace(training().timeline(host=HostInfo(driver=driver)), rank=rank))
    ]
    assert run_facts(two).drivers == ("535.9", "550.54.15")
