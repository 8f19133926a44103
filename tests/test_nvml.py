"""The NVML sampler against a session of NVML's answers, and the samples as a table."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpudiag.collect.health import GpuHealth, background_load, gpus_health
from gpudiag.collect.nvml import Nvml, NvmlSampler, NvmlUnavailable
from gpudiag.errors import GpudiagError
from gpudiag.read.nvml_samples import read_nvml_devices, read_nvml_samples


class NVMLError(Exception):
    pass


def answers(**changes: Any) -> dict[str, Any]:
    """What the driver of one GPU answers, by function; an exception is raised, a list is answered in turn.

    Written from nvml.h and the answers of a consumer card, not recorded: this machine has no GPU.
    """
    return {
        "nvmlDeviceGetName": "NVIDIA GeForce RTX 3060",
        "nvmlDeviceGetUUID": "GPU-11111111-aaaa",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=41),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=12 << 30, used=3 << 30),
        "nvmlDeviceGetPowerUsage": 168_500,
        "nvmlDeviceGetEnforcedPowerLimit": 170_000,
        "nvmlDeviceGetTemperature": 71,
        "nvmlDeviceGetClockInfo": 1605,
        "nvmlDeviceGetMaxClockInfo": 2130,
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
        "nvmlDeviceGetCurrPcieLinkGeneration": 3,
        "nvmlDeviceGetMaxPcieLinkGeneration": 4,
        "nvmlDeviceGetCurrPcieLinkWidth": 8,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
        "nvmlDeviceGetComputeRunningProcesses": [],
    } | changes


class Replay:
    """A module like pynvml that answers from tables, one per GPU."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.gpus = gpus
        self.shut = False

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"550.54.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return 12040

    def __getattr__(self, name: str) -> Any:
        if all(name not in gpu for gpu in self.gpus):
            raise AttributeError(name)

        def function(handle: int, *_: int) -> Any:
            answer = self.gpus[handle][name]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return function


def record(path: Path, module: Replay, seconds: float = 0.25, **env: str) -> Any:
    sampler = NvmlSampler(path, source=Nvml(module, env))
    sampler.start()
    time.sleep(seconds)
    return sampler.stop()


def test_samples_arrive_ten_times_a_second_and_read_back_in_our_units(tmp_path: Path) -> None:
    module = Replay(answers())
    began = time.time_ns()
    summary = record(tmp_path / "nvml.jsonl", module, 0.55)
    assert summary.problem == "" and 5 <= summary.samples <= 7 and module.shut
    table = read_nvml_samples(tmp_path / "nvml.jsonl", time_base_ns=began)
    assert len(table) == summary.samples
    assert 0 <= table.start[0] < 1e9 and np.all(np.diff(table.start) > 50e6)
    first = {f: getattr(table, f)[0] for f in table.__dataclass_fields__}
    assert first["gpu_util"] == pytest.approx(0.97)
    assert (first["memory_used"], first["memory_total"]) == (3 << 30, 12 << 30)
    assert (first["power_w"], first["power_limit_w"]) == (168.5, 170.0)
    assert (first["sm_clock_mhz"], first["sm_clock_max_mhz"], first["temperature_c"]) == (1605, 2130, 71)
    assert (first["pcie_gen"], first["pcie_gen_max"], first["pcie_width"], first["pcie_width_max"]) == (3, 4, 8, 16)
    assert (first["reasons"], first["other_processes"], first["other_memory"]) == (4, 0, 0)
    assert read_nvml_devices(tmp_path / "nvml.jsonl")[0].name == "NVIDIA GeForce RTX 3060"


def test_a_reading_that_the_card_does_not_support_is_missing_and_the_rest_is_there(tmp_path: Path) -> None:
    refused = NVMLError("Not Supported")
    gpu = answers(
        nvmlDeviceGetPowerUsage=refused, nvmlDeviceGetUtilizationRates=refused, nvmlDeviceGetTemperature=refused
    )
    del gpu["nvmlDeviceGetCurrentClocksEventReasons"]  # an old driver: only the old name
    gpu["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x40
    gpu["nvmlDeviceGetCurrPcieLinkWidth"] = refused
    record(tmp_path / "n", Replay(gpu))
    table = read_nvml_samples(tmp_path / "n")
    assert np.isnan([table.power_w[0], table.gpu_util[0], table.temperature_c[0]]).all()
    assert (table.pcie_width[0], table.reasons[0], table.sm_clock_mhz[0]) == (-1, 0x40, 1605)


@pytest.mark.parametrize(
    ("setting", "names"),
    [("1,0", ["b", "a"]), ("1", ["b"]), ("GPU-2", ["b"]), ("0,7,1", ["a"]), ("", []), ("-1", []), ("GPU-", [])],
)
def test_devices_are_numbered_as_cuda_visible_devices_numbers_them(setting: str, names: list[str]) -> None:
    module = Replay(
        answers(nvmlDeviceGetName="a", nvmlDeviceGetUUID="GPU-1a"),
        answers(nvmlDeviceGetName="b", nvmlDeviceGetUUID="GPU-2b"),
    )
    if not names:
        with pytest.raises(NvmlUnavailable, match="no GPU"):
            Nvml(module, {"CUDA_VISIBLE_DEVICES": setting})
        return
    devices = Nvml(module, {"CUDA_VISIBLE_DEVICES": setting}).devices()
    assert [(d["device"], d["name"]) for d in devices] == list(enumerate(names))


def test_a_process_that_was_there_before_is_another_ones_and_ours_is_not(tmp_path: Path) -> None:
    stranger = SimpleNamespace(pid=1, usedGpuMemory=2 << 30)
    gpu = answers(nvmlDeviceGetComputeRunningProcesses=[stranger])
    sampler = NvmlSampler(tmp_path / "n", source=Nvml(Replay(gpu), {}))
    sampler.start()
    gpu["nvmlDeviceGetComputeRunningProcesses"] = [stranger, SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)]
    time.sleep(0.25)
    sampler.stop()
    table = read_nvml_samples(tmp_path / "n")
    assert set(table.other_processes) == {1} and set(table.other_memory) == {2 << 30}


def test_pids_of_another_namespace_give_no_count_rather_than_a_wrong_one(tmp_path: Path) -> None:
    gpu = answers()
    sampler = NvmlSampler(tmp_path / "n", source=Nvml(Replay(gpu), {}))
    sampler.start()
    gpu["nvmlDeviceGetComputeRunningProcesses"] = [SimpleNamespace(pid=2**22 + 12345, usedGpuMemory=5)]
    time.sleep(0.25)
    sampler.stop()
    assert read_nvml_samples(tmp_path / "n").other_processes[-1] == -1


def test_without_a_driver_there_is_no_file_and_a_reason(tmp_path: Path) -> None:
    class NoDriver(Replay):
        def nvmlInit(self) -> None:  # noqa: N802
            raise NVMLError("NVML Shared Library Not Found")

    with pytest.raises(NvmlUnavailable, match="Shared Library"):
        Nvml(NoDriver())


def test_the_real_module_on_this_machine_never_raises(tmp_path: Path) -> None:
    sampler = NvmlSampler(tmp_path / "n")
    sampler.start()
    summary = sampler.stop()
    assert summary.problem or summary.samples >= 1


def test_an_unwritable_folder_is_a_reason_and_not_an_error(tmp_path: Path) -> None:
    sampler = NvmlSampler(tmp_path / "missing" / "n", source=Nvml(Replay(answers()), {}))
    sampler.start()
    assert "missing" in sampler.stop().problem


def test_a_last_line_cut_short_by_a_kill_is_dropped_and_other_damage_is_said(tmp_path: Path) -> None:
    record(tmp_path / "n", Replay(answers()))
    whole = read_nvml_samples(tmp_path / "n")
    text = (tmp_path / "n").read_text()
    (tmp_path / "n").write_text(text + '{"t": 17')
    assert len(read_nvml_samples(tmp_path / "n")) == len(whole)
    for damaged in (
        "",
        "[]\n",
        '{"gpudiag_nvml": 1, "devices": []}\nxx\n{}\n',
        '{"gpudiag_nvml": 1, "devices": []}\n{"t": 1}\n',
    ):
        (tmp_path / "n").write_text(damaged)
        with pytest.raises(GpudiagError):
            read_nvml_samples(tmp_path / "n")
    with pytest.raises(GpudiagError, match="No such file"):
        read_nvml_samples(tmp_path / "absent")


def test_a_header_alone_is_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "n").write_text('{"gpudiag_nvml": 1, "devices": []}\n')
    assert len(read_nvml_samples(tmp_path / "n")) == 0


def test_links_of_the_board_are_recorded_once_with_those_that_are_up(tmp_path: Path) -> None:
    """A link that the board lacks is no answer: NVML refuses it."""

    class Bridge(Replay):
        NVML_NVLINK_MAX_LINKS = 6

        def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
            if handle == 1 or link >= 4:
                raise NVMLError("Invalid Argument")
            return int(link != 2)

    record(tmp_path / "nvml.jsonl", Bridge(answers(), answers()))
    devices = read_nvml_devices(tmp_path / "nvml.jsonl")
    assert (devices[0].nvlinks, devices[0].nvlinks_active) == (4, 3)
    assert (devices[1].nvlinks, devices[1].nvlinks_active) == (None, None)


def health(**changes: Any) -> GpuHealth:
    (found,) = gpus_health(Nvml(Replay(answers(**changes)), {}), lambda _: None)
    return found


def test_doctor_judges_a_gpu_under_load_by_the_rules_that_judge_runs() -> None:
    """The sample board is at 97 % utilisation, power-capped at 75 % of its clock, on half its lanes one generation down."""
    found = health()
    assert found.busy
    assert {finding.rule for finding in found.findings} == {"power_capped", "pcie_degraded"}
    assert "PCIe 3.0 x8 of 4.0 x16" in found.state


def test_doctor_does_not_judge_the_clock_and_link_of_an_idle_gpu() -> None:
    found = health(nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=0, memory=0))
    assert (found.busy, found.findings) == (False, ())


def test_doctor_names_a_link_that_is_down_on_an_idle_gpu_too() -> None:
    class Bridge(Replay):
        NVML_NVLINK_MAX_LINKS = 4

        def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:  # noqa: N802
            return int(link > 0)

    idle = answers(nvmlDeviceGetUtilizationRates=SimpleNamespace(gpu=0, memory=0))
    (found,) = gpus_health(Nvml(Bridge(idle), {}), lambda _: None)
    assert [finding.rule for finding in found.findings] == ["nvlinks_down"]
    assert "NVLink 3 of 4 up" in found.state


def test_doctor_counts_the_programs_on_a_gpu() -> None:
    process = SimpleNamespace(pid=1, usedGpuMemory=1 << 30)
    assert health(nvmlDeviceGetComputeRunningProcesses=[process]).processes == 1


def test_other_programs_on_the_cpus_are_read_from_the_machines_own_counters(tmp_path: Path) -> None:
    """CPU time moves by what a test writes between the two readings: 4 s on each of this process's CPUs."""
    cpus = sorted(os.sched_getaffinity(0))

    def write(ticks: int) -> None:
        (tmp_path / "stat").write_text("".join(f"cpu{number} {ticks} 0 0 0 0 0 0 0 0 0\n" for number in cpus))

    write(1000)
    text, findings = background_load(len(cpus), float(len(cpus)), lambda _: write(1400), tmp_path)
    assert [finding.rule for finding in findings] == ["background_load"]
    assert f"of {len(cpus)} CPUs" in text
    text, findings = background_load(len(cpus), float(len(cpus)), lambda _: None, tmp_path)
    assert findings == () and "others use 0.0" in text
    assert background_load(1, 1.0, lambda _: None, tmp_path / "absent") == ("", ())
