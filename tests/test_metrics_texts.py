"""Names and places that texts quote: those of this device's process, and those that cost most."""

from __future__ import annotations

from builders import Recorder, loader_info, scopes

from gpudiag.metrics.across import run_facts
from gpudiag.metrics.texts import texts_of
from gpudiag.timeline import CallSite, HostInfo

US = 1_000


def texts(recorder: Recorder, **more) -> dict[str, str]:
    found = scopes(recorder, **more)
    return texts_of(found[0], run_facts(found))


def steps() -> Recorder:
    recorder = Recorder()
    recorder.steps(4, 10_000 * US)
    for step in range(4):
        recorder.launch(
            step * 10_000 * US + 100 * US, step * 10_000 * US + 1000 * US, "void ns::big_kernel<float>(int)"
        )
        recorder.launch(step * 10_000 * US + 9000 * US, step * 10_000 * US + 9100 * US, "small")
    return recorder


def test_the_largest_kernel_and_the_device() -> None:
    got = texts(steps())
    assert got["hot_kernel_name"] == "ns::big_kernel"
    assert got["gpu_name"] == "NVIDIA Test"
    assert "sync_api" not in got


def test_the_sync_that_idle_time_follows_is_named_not_the_longest() -> None:
    recorder = steps()
    for step in range(4):
        at = step * 10_000 * US
        recorder.call(at + 200 * US, at + 1010 * US, "cudaStreamSynchronize")  # the device runs dry in it
        recorder.call(at + 2000 * US, at + 6000 * US, "cudaEventSynchronize")  # on an idle device
        recorder.call(at + 200 * US, at + 8000 * US, "cudaDeviceSynchronize", thread=999)
    assert texts(recorder)["sync_api"] == "cudaStreamSynchronize"


def test_the_cpu_operator_with_most_idle_time_under_it_is_named_not_the_longest() -> None:
    recorder = steps()
    recorder.operator(-90_000 * US, -10_000 * US, "aten::before_the_window")
    for step in range(4):
        recorder.operator(step * 10_000 * US + 2000 * US, step * 10_000 * US + 4000 * US, "aten::topk")
    assert texts(recorder)["cpu_op_name"] == "aten::topk"


def test_places_are_the_costliest_with_a_line() -> None:
    sites = (
        CallSite("readback", "Tensor.item", "train.py:40", 10, 500),
        CallSite("readback", "Tensor.cpu", "train.py:50", 10, 900),
        CallSite("readback", "Tensor.cpu", "<string>", 10, 9000),
        CallSite("checkpoint", "torch.save", "train.py:60", 1, 100),
        CallSite("log", "print", "train.py:70", 100, 300),
        CallSite("compile", "compile", "train.py:80", 3, 300, "forward: tensor 'x' size mismatch at index 0"),
        CallSite("compile", "compile", "train.py:81", 1, 900),
    )
    got = texts(steps(), sites=sites, host=HostInfo(debug_switches=("a", "b")), loaders=(loader_info(),))
    assert got["readback_where"] == got["sync_where"] == got["implicit_sync_where"] == "train.py:50"
    assert got["checkpoint_log_where"] == "train.py:70"
    assert got["recompile_where"] == "train.py:80"  # what was compiled once is no recompilation
    assert got["recompile_reason"] == "forward: tensor 'x' size mismatch at index 0"
    assert got["debug_switch_names"] == "a, b"
    assert (got["loader_where"], got["dataset_name"]) == ("train.py:7", "Images")


def test_the_operator_that_reads_back_is_one_in_which_the_host_waited() -> None:
    recorder = steps()
    for step in range(4):
        at = step * 10_000 * US
        recorder.operator(at + 150 * US, at + 1020 * US, "aten::nonzero")
        recorder.call(at + 200 * US, at + 1010 * US, "cudaStreamSynchronize")
        recorder.operator(at + 2000 * US, at + 8000 * US, "aten::_local_scalar_dense")  # on the CPU
    assert texts(recorder)["implicit_sync_op"] == "aten::nonzero"
