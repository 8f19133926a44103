"""The metrics of the run as a whole: steps, the account's parts, the loader, the host, memory, clocks."""

from __future__ import annotations

from gpudiag.metrics.base import MetricSpec as M

_ACCOUNT = "the exclusive account (DESIGN 4), a step"
_LOADER = "gpudiag's loader records"
_ALLOCATOR = "torch's allocator: gpudiag's records between the steps, or torch.profiler with profile_memory=True"
_NVML = "NVML samples, taken while the GPU was busy"

STEPS = (
    M(
        "step_time",
        "ns",
        "mean length of a steady step, evaluation left out; without steps the length of the span",
        "the time of one batch where steps hold several",
    ),
    M(
        "evaluation_time",
        "ns",
        "time from the first steady step to the last that lies in ranges of evaluation, spread over the steps (mean a step)",
        "evaluation between epochs where no step is recorded on both sides",
    ),
    M("evaluation_share", "ratio", "evaluation_time over the whole stretch from the first steady step to the last"),
    M("step_median", "ns", "median length of a steady step"),
    M("step_p99", "ns", "99th percentile of the steady steps' lengths"),
    M("slow_steps", "count", "steady steps that take more than twice the median"),
    M(
        "step_excess_lost",
        "ns",
        "mean less median over the steady steps of their time outside own work (GPU: idle; CPU-only: outside forward, backward, optimizer and operators), without the step that lost most",
        "steps that are longer because they have more to compute",
        _ACCOUNT,
    ),
    M("steps", "count", "steady steps in the window; 0 when no step is known"),
    M(
        "warm_up_left_ratio",
        "ratio",
        "longest of the first three steady steps / median of the steady steps (may exceed 1)",
        "a trend over the run",
    ),
    M(
        "periodic_stall_time",
        "ns",
        "excess of the periodically slow steps over the median step, spread over all steps (mean a step)",
        "every slow step: only those that recur at one period, in at least 3 cycles",
        "autocorrelation of the steps' lengths",
    ),
    M("periodic_stall_period", "count", "the period, in steps, at which slow steps recur; 0 when there is none"),
    M(
        "observer_slowdown",
        "ratio",
        "step time while recording / step time without (may exceed 1)",
        "the cost of gpudiag outside the recorded window",
        "both medians measured in the same run",
    ),
    M(
        "recorded_with_stacks",
        "flag",
        "1 when Python stacks were recorded, which lengthens host code between launches",
        source="recorder's own description",
    ),
    M(
        "launches_missing_share",
        "ratio",
        "launch calls without any GPU work, of all launch calls: GPU work that the recorder lost",
        "kernels that failed",
        "join on (process, correlation)",
    ),
    M(
        "kernels_without_launch_share",
        "ratio",
        "kernels without their launch call, of all kernels: host evidence that the recording lacks (a sliced file)",
        "lost GPU work: busy and idle time are right",
        "join on (process, correlation)",
    ),
    M(
        "rows_dropped",
        "count",
        "rows that the recorder reported as lost or that could not be read",
        source="recorder's diagnostics, Timeline.repairs",
    ),
    M("gpu_present", "flag", "1 when the driver of the machine sees a GPU", source="environment record"),
    M("torch_cuda_build", "flag", "1 when the recorded torch was built with CUDA or ROCm", source="environment record"),
    M("torch_compiled", "flag", "1 when torch.compile'd code or Triton/inductor kernels ran in the window"),
    M(
        "debug_switches",
        "count",
        "debugging switches that were on: CUDA_LAUNCH_BLOCKING, anomaly mode, sync debug mode, a trace function",
        source="environment record",
    ),
    M(
        "counters_denied",
        "flag",
        "1 when the driver refused GPU performance counters (ERR_NVGPUCTRPERM)",
        source="recorder's diagnostics",
    ),
)

# One rule serves both kinds of run: on a GPU run `*_lost` is the idle part, on a CPU-only run the host part.
LOST = (
    M(
        "input_lost",
        "ns",
        "idle_input on a GPU run, host_input on a CPU-only run",
        "the whole wait in the loader (`loader_time`): a wait hidden by queued GPU work is no loss",
        _ACCOUNT,
    ),
    M(
        "checkpoint_log_lost",
        "ns",
        "idle_checkpoint_log on a GPU run, host_checkpoint_log on a CPU-only run",
        source=_ACCOUNT,
    ),
    M("compile_lost", "ns", "idle_compile on a GPU run, host_compile on a CPU-only run", source=_ACCOUNT),
    M("gc_lost", "ns", "idle_gc on a GPU run, host_gc on a CPU-only run", source=_ACCOUNT),
    M("gc_steps", "count", "steps of which gc_lost takes 1 % or more (without steps: such stretches)", source=_ACCOUNT),
)

HOST_PARTS = tuple(
    M(
        f"host_{part}",
        "ns",
        f"part host.{part} of the account: {what}",
        "present on a GPU run: a CPU-only run alone has a host account",
        _ACCOUNT,
    )
    for part, what in (
        ("input", "the main thread in the loader's next"),
        ("h2d", "moving the batch"),
        ("forward", "the forward pass"),
        ("backward", "the backward pass"),
        ("optimizer", "the optimizer's step and zero_grad"),
        ("checkpoint_log", "saving, fsync, logging"),
        ("compile", "compiling"),
        ("gc", "Python's garbage collector"),
        ("framework", "operators outside the known phases"),
        ("other", "everything else"),
    )
)

HOST = (
    *HOST_PARTS,
    M(
        "host_log_arguments",
        "ns",
        "host_other * samples within the arguments of a log call / samples outside all phases",
        "time of the logging itself (`host_checkpoint_log`): the arguments are computed before the call, even where it logs nothing",
        "samples of the recorded window, one every 5 ms",
    ),
)

CPU = (
    M(
        "cpu_wait_time",
        "ns",
        "time in which the training thread could have run and waited for a CPU that others had, a step",
        "waits of the threads that work for it (OpenMP, autograd), which lengthen its step as well",
        "field 2 of Linux' /proc/thread-self/schedstat, read each step",
    ),
    M(
        "cpu_wait_lost",
        "ns",
        "cpu_wait_time without that in fetches of the training thread itself, and beside GPU work at most the time in which the device idles",
        "what workers or helper threads wait",
    ),
    M(
        "cpu_wait_excess",
        "ns",
        "mean less median over the steps of the training thread's wait for a CPU (at least 0): how much it makes the steps uneven",
    ),
    M(
        "loader_queue_share",
        "ratio",
        "time queued for a CPU / fetch time, over all batches",
        "CPU time, and time waiting for storage",
        _LOADER,
    ),
    M(
        "loader_queue_lost",
        "ns",
        "input_lost x loader_queue_share x other_cpus / usable_cpus (at most 1): what other programs make fetches wait",
        "waits that the run's own workers and threads give each other",
        _LOADER,
    ),
    M(
        "loader_cpus_needed",
        "count",
        "batches a step x median CPU time of a fetch / (step_time - input_lost): CPUs that fetching takes to keep up (a fraction)",
        "workers: those that wait for storage need no CPU meanwhile",
        _LOADER,
    ),
    M(
        "load_average",
        "count",
        "the machine's load average of a minute when the recording ended",
        source="/proc/loadavg",
    ),
    M(
        "cpu_pressure",
        "ratio",
        "share of the recording in which some task of the machine waited for a CPU",
        "the share that this run waited",
        "/proc/pressure/cpu",
    ),
    M(
        "other_cpus",
        "count",
        "CPUs that programs other than the recorded run kept busy while it was recorded",
        "a quota's view: the whole machine is counted, and a recorder of its own process (nsys) among the others",
        "/proc/stat less the CPU time of the run's processes",
    ),
)

MEMORY = (
    M(
        "memory_peak_share",
        "ratio",
        "highest memory in use / memory of the GPU",
        "what the model needs: the allocator keeps freed blocks",
        "NVML samples of the whole run, or torch's allocator: memory reserved",
    ),
    M(
        "memory_fragmented_share",
        "ratio",
        "(reserved - allocated) / reserved at the allocated peak",
        source=_ALLOCATOR,
    ),
    M(
        "memory_growth",
        "ratio",
        "memory in use at the window's last sample - at its first, over the GPU's memory",
        "a leak for certain: the allocator keeps freed blocks, and a cache fills once",
    ),
    M(
        "gpu_out_of_memory",
        "flag",
        "1 when an exception that says that the GPU's memory ran out ended the script",
        "one that the script caught",
    ),
    M(
        "host_out_of_memory",
        "flag",
        "1 when an exception that says that the host's memory ran out ended the script",
        "the kernel's killing of a process",
    ),
)

POWER = (
    M("power_cap_share", "ratio", "samples with the power cap as clocks event reason", source=_NVML),
    M("thermal_share", "ratio", "samples with a thermal or power-brake slowdown as clocks event reason", source=_NVML),
    M(
        "clocks_locked_share",
        "ratio",
        "samples with the applications clocks setting as clocks event reason",
        source=_NVML,
    ),
    M("sm_clock_share", "ratio", "median SM clock / maximum SM clock", source=_NVML),
    M("power_draw", "watt", "median power draw", source=_NVML),
    M("power_limit", "watt", "power limit in force", source=_NVML),
    M("temperature", "celsius", "highest GPU temperature", source=_NVML),
    M("sm_clock", "mhz", "median SM clock", source=_NVML),
    M(
        "pcie_link_share",
        "ratio",
        "best PCIe rate (generation x width) seen under load / the most that the GPU and its slot can do together",
        "the rate that copies reach; a card in a slot with fewer lanes, which NVML takes for the most that can be",
        "NVML, at least 5 samples with the SM clock at half its maximum or more: an idle link trains down",
    ),
    M("nvlinks", "count", "NVLink links of the GPU", source="NVML, once when the recording began"),
    M(
        "nvlinks_active",
        "count",
        "NVLink links of the GPU that are up",
        "links that carry data",
        "NVML, once when the recording began",
    ),
    M(
        "driver_versions",
        "count",
        "different driver versions on the machines of the run",
        source="environment records of all ranks together",
    ),
    M(
        "foreign_processes",
        "count",
        "processes other than the recorded ones that used the GPU during the run",
        source="NVML process list",
    ),
)
