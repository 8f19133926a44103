"""Every metric of the catalogue is given for every kind of recording, in its unit, or says why not and what records it."""

from __future__ import annotations

import shlex

import click
import pytest
from builders import Recorder, measured

from gpudiag.cli import main
from gpudiag.diagnosis import NO_GPU_WORK
from gpudiag.metrics.base import Metric, Missing
from gpudiag.metrics.spec import BY_NAME, CATALOGUE
from gpudiag.timeline import Kind

US = 1_000


def gpu_only() -> Recorder:
    recorder = Recorder()
    recorder.kernel(0, 100 * US)
    return recorder


def gpu_with_steps() -> Recorder:
    recorder = Recorder()
    recorder.steps(4, 100 * US)
    for step in range(4):
        recorder.launch(step * 100 * US + 10 * US, step * 100 * US + 60 * US)
    return recorder


def only_copies() -> Recorder:
    recorder = Recorder()
    recorder.copy(0, 100 * US, 1000)
    return recorder


def only_communication() -> Recorder:
    recorder = Recorder()
    recorder.kernel(0, 100 * US, "ncclDevKernel_AllReduce", kind=Kind.COMM)
    return recorder


def only_a_graph() -> Recorder:
    recorder = Recorder()
    recorder.kernel(0, 100 * US, "graph", kind=Kind.GRAPH)
    return recorder


def cpu_run() -> Recorder:
    recorder = Recorder()
    recorder.steps(4, 100 * US)
    recorder.operator(0, 50 * US, "aten::mm")
    return recorder


def a_zero_length_kernel() -> Recorder:
    recorder = Recorder()
    recorder.kernel(5, 5)
    return recorder


RECORDINGS = (
    gpu_only, gpu_with_steps, only_copies, only_communication, only_a_graph, cpu_run, a_zero_length_kernel
)  # fmt: skip


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda make: make.__name__)
def test_every_name_is_there_once_with_its_unit_or_its_reason(recording) -> None:
    values = measured(recording())
    assert list(values) == [spec.name for spec in CATALOGUE]
    for name, item in values.items():
        assert item.name == name
        if isinstance(item, Metric):
            assert item.unit == BY_NAME[name].unit
            assert item.value == item.value, "not a number"
            assert item.source
            if item.unit in ("ns", "bytes", "count", "bytes/s") and name != "queue_time":
                assert item.value >= 0
        else:
            assert item.reason


def commands() -> set[str]:
    return {
        item.record_with
        for recording in RECORDINGS
        for item in measured(recording()).values()
        if isinstance(item, Missing) and item.record_with
    }


def test_what_records_a_missing_metric_is_a_command_that_exists_with_options_that_exist() -> None:
    found = commands()
    assert len(found) > 5
    for text in found:
        program, verb, *words = shlex.split(text)
        assert program == "gpudiag", text
        group = click.Context(main)
        subcommand = main.get_command(group, verb)
        assert subcommand is not None, text
        options = {
            name: parameter
            for parameter in subcommand.params
            if isinstance(parameter, click.Option)
            for name in parameter.opts
        }
        while words and words[0].startswith("--") and words[0] != "--":
            name, value, *words = words
            assert name in options, text
            options[name].type.convert(value, options[name], group)


def test_what_no_command_records_is_said_in_the_catalogue_and_nowhere_else() -> None:
    nothing = {
        name
        for recording in RECORDINGS
        for name, item in measured(recording()).items()
        if isinstance(item, Missing) and not item.record_with and item.applies and NO_GPU_WORK not in item.reason
    }
    assert nothing == {spec.name for spec in CATALOGUE if "today" in spec.source and "bench" not in spec.source}
