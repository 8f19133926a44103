"""Every metric that a rule can name, and the texts that it can quote: the contract between metrics/ and rules/.

Scope: one rank and one device (device -1: the host account of a run without GPU work). Window: the steady steps, or the
span where no step is known. "a step" in a doc: the mean over the steady steps; without steps the whole span counts as
one step (`steps` is then 0 and `step_time` the span). "idle": no work at all on that device.
A figure that was not recorded is `Missing`, never 0.
"""

from __future__ import annotations

from gpudiag.metrics import catalogue_gpu as gpu
from gpudiag.metrics import catalogue_loader as loader
from gpudiag.metrics import catalogue_run as run
from gpudiag.metrics.base import Metric, MetricSpec, Missing, TextSpec, Unit

__all__ = ["BY_NAME", "CATALOGUE", "TEXTS", "Metric", "MetricSpec", "Missing", "TextSpec", "Unit"]

CATALOGUE: tuple[MetricSpec, ...] = (
    run.STEPS
    + run.LOST
    + gpu.BUSY
    + gpu.PARTS
    + gpu.COPIES
    + gpu.KERNELS
    + gpu.LAUNCHES
    + gpu.COMMUNICATION
    + run.HOST
    + loader.LOADER
    + loader.LOADER_WORK
    + run.CPU
    + run.MEMORY
    + run.POWER
)
BY_NAME: dict[str, MetricSpec] = {spec.name: spec for spec in CATALOGUE}

TEXTS: tuple[TextSpec, ...] = (
    TextSpec("the_step", "`each 103 ms step`, or `the 969 ms span` where no step is known (always there)"),
    TextSpec("per_step", "`a step`, or `in the span` where no step is known (always there)"),
    TextSpec("loader_where", "file:line that built the DataLoader"),
    TextSpec("dataset_name", "class of the dataset"),
    TextSpec(
        "transform_shares",
        "the slowest transforms with their share of all transforms, where they were timed one by one",
    ),
    TextSpec("shm_error", "what torch said when a worker died of a full /dev/shm"),
    TextSpec("shm_where", "file:line that built that DataLoader"),
    TextSpec("out_of_memory_said", "what the exception said that ended the script for lack of memory"),
    TextSpec("optimizer_name", "class of the optimizer"),
    TextSpec("hot_kernel_name", "name of the largest kernel"),
    TextSpec("sync_api", "the synchronising call with most idle time after it"),
    TextSpec("sync_where", "file:line of that call"),
    TextSpec("wait_lines", "the lines of code that wait for the device, each with how often and how long a step"),
    TextSpec("read_lines", "the lines that read values of large tensors on the CPU, likewise"),
    TextSpec("readback_where", "file:line of the readback with most idle time after it"),
    TextSpec("implicit_sync_op", "the operator that reads values back most expensively"),
    TextSpec("implicit_sync_where", "file:line of that operator"),
    TextSpec("cpu_op_name", "the operator on the CPU with most idle time under it"),
    TextSpec("host_where", "file:line of the script where most samples outside all phases lie"),
    TextSpec("log_argument_where", "file:line of the log call whose arguments take most samples"),
    TextSpec("checkpoint_log_where", "file:line of the slowest save or log call"),
    TextSpec("slow_step_numbers", "numbers of the recorded steps that take more than twice the median"),
    TextSpec("recompile_where", "file:line that has code compiled again"),
    TextSpec("recompile_reason", "what is compiled again, and which guard of the compiled code fails"),
    TextSpec("debug_switch_names", "the debugging switches that were on, comma-separated"),
    TextSpec("gpu_name", "name of the device"),
    TextSpec("straggler_rank", "the rank that came last most often"),
)
