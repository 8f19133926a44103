"""Lines that wait for the device: counted where a call is wrapped, looked up in the recording where not."""

from __future__ import annotations

import numpy as np
from builders import PROCESS, Recorder, scopes

from gpudiag.metrics.across import run_facts
from gpudiag.metrics.texts import texts_of
from gpudiag.metrics.wait_lines import WaitLine, told, wait_lines
from gpudiag.timeline import CallSite, CopyKind, Looks

US = 1_000
MS = 1_000 * US


def looks(*moments: tuple[int, str], process: int = PROCESS) -> Looks:
    """Where the thread was at each moment (us)."""
    places = sorted({place for _, place in moments})
    return Looks(
        np.array([at * US for at, _ in moments], np.int64),
        np.array([places.index(place) for _, place in moments], np.int32),
        tuple(places),
        process,
    )


def training(uneven: bool = False) -> Recorder:
    """Ten steps of 10 ms; each waits twice for a mask and once in an upload. uneven: step n has n waits more."""
    recorder = Recorder()
    recorder.steps(10, 10 * MS)
    for step in range(10):
        at = step * 10 * MS
        recorder.launch(at + 100 * US, at + 3000 * US)
        for wait in (1000, 3000):
            recorder.operator(at + wait * US, at + (wait + 1000) * US, "aten::index")
            recorder.operator(at + (wait + 10) * US, at + (wait + 990) * US, "aten::nonzero")
            recorder.call(at + (wait + 100) * US, at + (wait + 900) * US, "cudaStreamSynchronize")
        recorder.operator(at + 6000 * US, at + 7000 * US, "aten::to")
        recorder.call(at + 6100 * US, at + 6900 * US, "cudaStreamSynchronize")
        for more in range(step if uneven else 0):
            recorder.call(at + (7000 + 100 * more) * US, at + (7050 + 100 * more) * US, "cudaEventSynchronize")
    return recorder


def lines(recorder: Recorder, seen: Looks, sites: tuple[CallSite, ...] = ()) -> list[WaitLine]:
    (scope,) = scopes(recorder, looks=seen, sites=sites)
    return wait_lines(scope)


def test_one_look_in_any_step_names_that_wait_of_every_step() -> None:
    seen = looks((11_500, "loss.py:7"), (43_500, "loss.py:7"), (56_500, "train.py:3"), (67_500, "train.py:9"))
    assert lines(training(), seen) == [
        WaitLine("loss.py:7", "tensor[mask]", 2.0, 1_600_000.0, True),
        WaitLine("train.py:3", ".to(device)", 1.0, 800_000.0, False),
    ]


def test_looks_outside_of_waits_and_at_other_processes_name_nothing() -> None:
    assert lines(training(), looks((11_050, "train.py:5"), (15_000, "train.py:6"))) == []
    assert lines(training(), looks((11_500, "loss.py:7"), process=7)) == []
    assert lines(Recorder_without_waits(), looks((11_500, "loss.py:7"))) == []


def Recorder_without_waits() -> Recorder:  # noqa: N802
    recorder = Recorder()
    recorder.steps(10, 10 * MS)
    for step in range(10):
        recorder.launch(step * 10 * MS + 100 * US, step * 10 * MS + 3000 * US)
    return recorder


def test_without_a_rhythm_only_the_waits_that_were_looked_at_count() -> None:
    assert lines(training(uneven=True), looks((11_500, "loss.py:7"), (13_500, "loss.py:7"), (21_500, "loss.py:7"))) == [
        WaitLine("loss.py:7", "tensor[mask]", 0.3, 240_000.0, True)
    ]


def test_a_line_that_is_counted_is_not_looked_up_again() -> None:
    site = CallSite("readback", "Tensor.item", "loss.py:7", 30, 30 * MS, steps=10)
    seen = looks((11_500, "loss.py:7"), (56_500, "train.py:3"))
    assert [str(line) for line in lines(training(), seen, (site,))] == [
        "loss.py:7 .item() 3 times a step, 3.00 ms",
        "train.py:3 .to(device) once a step, 800 us",
    ]


def test_the_place_of_a_read_is_no_upload_and_no_explicit_wait() -> None:
    sync = CallSite("readback", "torch.cuda.synchronize", "train.py:1", 10, 90 * MS, steps=10)
    (scope,) = found = scopes(training(), looks=looks((11_500, "loss.py:7"), (56_500, "train.py:3")), sites=(sync,))
    texts = texts_of(scope, run_facts(found))
    assert texts["sync_where"] == "train.py:1"
    assert texts["readback_where"] == texts["implicit_sync_where"] == "loss.py:7"
    assert texts["wait_lines"].startswith("train.py:1 torch.cuda.synchronize() once a step, 9.00 ms; ")


def test_slow_reads_of_a_run_without_a_gpu_are_told_by_line() -> None:
    recorder = Recorder()
    recorder.steps(10, 10 * MS)
    site = CallSite("read", "Tensor.tolist", "train.py:8", 15, 60 * MS, steps=10)
    (scope,) = found = scopes(recorder, sites=(site,))
    assert texts_of(scope, run_facts(found))["read_lines"] == "train.py:8 .tolist() 1.5 times a step, 6.00 ms"


def test_many_lines_are_cut_and_counted() -> None:
    many = [WaitLine(f"a.py:{n}", ".item()", 3.0, 5.0, True) for n in range(5)]
    assert told(many) == (
        "a.py:0 .item() 3 times a step, 5 ns; a.py:1 .item() 3 times a step, 5 ns; a.py:2 .item() 3 times a step, 5 ns; 2 more"
    )
    assert str(WaitLine("a.py:1", ".item()", 0.01, 5.0, True)) == "a.py:1 .item() in fewer than one of ten steps, 5 ns"


def test_a_copy_that_the_host_waits_for_is_a_wait_too() -> None:
    recorder = Recorder_without_waits()
    for step in range(10):
        at = step * 10 * MS
        recorder.call(at + 3500 * US, at + 4500 * US, "cudaMemcpyAsync", correlation=step)
        recorder.copy(at + 4000 * US, at + 4400 * US, 4, CopyKind.D2H, correlation=step)
    assert [str(line) for line in lines(recorder, looks((24_000, "train.py:4")))] == [
        "train.py:4 cudaMemcpyAsync once a step, 1.00 ms"
    ]
