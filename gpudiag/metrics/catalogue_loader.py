"""The metrics of the DataLoader: the wait for it, and what its time goes into."""

from __future__ import annotations

from gpudiag.metrics.base import MetricSpec as M

_LOADER = "gpudiag's loader records"

LOADER = (
    M(
        "loader_time",
        "ns",
        "time of the main thread in the loader's next, a step, whether or not the GPU works meanwhile",
        "lost time: that is input_lost",
    ),
    M(
        "before_launch_lost",
        "ns",
        "loss to host code between the end of the loader's next and the first launch (CPU-only: the first module call or copy to a device), a step",
        "the loader itself, and launching",
        "idle.host and idle.launch, or host.other and host.framework, of the account",
    ),
    M(
        "num_workers",
        "count",
        "worker processes of the DataLoader that delivered most batches (0 also where the recording shows the single-process iterator)",
    ),
    M(
        "num_workers_needed",
        "count",
        "ceil(batches a step x loader_fetch_time / (step_time - input_lost)), at least 1: workers that deliver batches as fast as the rest of the step takes them",
        "a promise: storage and CPUs can saturate earlier",
        _LOADER,
    ),
    M(
        "usable_cpus",
        "count",
        "CPUs that the process may use: least of affinity, cgroup quota and machine (may be a fraction)",
    ),
    M("machine_cpus", "count", "logical CPUs of the machine"),
    M(
        "loader_fetch_time",
        "ns",
        "median time to fetch one batch where it is fetched (worker or main process): dataset calls and collate; of the window's batches, with fewer than ten of the run's",
        "the wait of the main process",
        _LOADER,
    ),
    M("loader_fetch_p95", "ns", "95th percentile of the batches' fetch times", source=_LOADER),
    M("loader_dataset_time", "ns", "median time in the dataset's own calls, a batch", source=_LOADER),
    M("loader_collate_time", "ns", "median time in collate, a batch", source=_LOADER),
    M("loader_pin_time", "ns", "median time in pinning, a batch", source=_LOADER),
    M(
        "loader_cpu_share",
        "ratio",
        "CPU time / fetch time, over all batches (prep stall)",
        "CPU load of the machine",
        _LOADER,
    ),
    M(
        "loader_io_share",
        "ratio",
        "time neither on a CPU nor waiting for one / fetch time, over all batches (fetch stall)",
        "time in read() from the page cache, which is CPU time",
        _LOADER,
    ),
    M(
        "loader_late_batch_wait",
        "ns",
        "input_lost in waits for batches whose fetch took over twice the median, a step",
        source=_LOADER,
    ),
    M(
        "loader_slow_share",
        "ratio",
        "time of the slowest 1 % of the run's fetches over all fetch time (needs at least 100 batches)",
        source=_LOADER,
    ),
    M("loader_sample_time", "ns", "loader_dataset_time / batch size: dataset code for one sample", source=_LOADER),
    M(
        "dataset_in_memory",
        "flag",
        "1 when the dataset's tensors or arrays already lie in RAM (TensorDataset, a list of tensors) and a sample takes at most 0.2 ms",
        "data that the page cache happens to hold",
        _LOADER,
    ),
    M("pin_memory", "flag", "1 when the DataLoader pins its batches", source=_LOADER),
    M("persistent_workers", "flag", "1 when the DataLoader keeps its workers between epochs", source=_LOADER),
    M("loader_epochs", "count", "times that a DataLoader was iterated from its start in the window", source=_LOADER),
    M(
        "worker_restart_time",
        "ns",
        "input_lost from the last batch of an epoch to the first of the next (workers ending, starting, first wait), beyond the median wait, a step",
        source=_LOADER,
    ),
    M("first_batch_wait", "ns", "the wait for the run's first batch (once, not a step)", source=_LOADER),
    M(
        "cpu_demand",
        "count",
        "busy threads asked for: workers x threads a worker + main threads",
        "threads that exist but sleep",
        _LOADER,
    ),
)

LOADER_WORK = (
    M(
        "loader_transform_time",
        "ns",
        "median time in the transforms of a Compose, a batch",
        "transforms that the dataset calls by itself",
        _LOADER,
    ),
    M(
        "slowest_transform_time",
        "ns",
        "loader_transform_time x the share of the transform that takes longest over the run (recorded with --transforms)",
        source=_LOADER,
    ),
    M(
        "loader_read_bytes",
        "bytes",
        "bytes that fetching a batch reads from storage (mean in the window)",
        "reads that the page cache serves, and of most network clients",
        "ru_inblock of the fetching thread",
    ),
    M(
        "loader_disk_wait",
        "ratio",
        "share of the samples in which a worker process waits for a disk or a network file system (state D)",
        "waits on sockets and locks, and sleeping: state S",
        "/proc/<pid>/stat of the workers, sampled while recording",
    ),
    M(
        "loader_helper_share",
        "ratio",
        "CPU time of a worker's other threads / of all its threads, while it fetches",
        "threads that exist and do not work",
        _LOADER,
    ),
    M("worker_threads", "count", "threads of a worker process after its second batch, all of them", source=_LOADER),
    M(
        "worker_cpus",
        "count",
        "different CPUs that the worker processes may run on by their affinity, together",
        source=_LOADER,
    ),
    M(
        "loader_workers_working",
        "count",
        "batches in the window / those of the busiest worker: how many workers take equal part (a fraction)",
        source=_LOADER,
    ),
    M(
        "loader_transfer_time",
        "ns",
        "median time from the end of a fetch to the arrival of its message, of batches that were waited for",
        "unpickling in the main process",
        _LOADER,
    ),
    M(
        "loader_unpickle_time",
        "ns",
        "median time to unpickle a batch in the training process, tensors taken over from shared memory included",
        source=_LOADER,
    ),
    M(
        "loader_unpickle_lost",
        "ns",
        "input_lost while the training thread unpickles a batch, a step (0 where the pinning thread does)",
        source=_LOADER,
    ),
    M(
        "loader_message_bytes",
        "bytes",
        "median size of the pickled message of a batch",
        "its tensors, which lie in shared memory",
        _LOADER,
    ),
    M(
        "first_epoch_fetch_time",
        "ns",
        "median fetch time in the loader's first epoch, its first batches left out",
        source=_LOADER,
    ),
    M("later_epochs_fetch_time", "ns", "the same in all later epochs of the run", source=_LOADER),
    M("first_epoch_read_bytes", "bytes", "loader_read_bytes in the loader's first epoch", source=_LOADER),
    M("later_epochs_read_bytes", "bytes", "loader_read_bytes in all later epochs of the run", source=_LOADER),
    M(
        "window_in_first_epoch",
        "flag",
        "1 when most batches of the window are of the loader's first epoch",
        source=_LOADER,
    ),
    M("shm_size", "bytes", "size of /dev/shm", source="statvfs when the DataLoader was built"),
    M("shm_free", "bytes", "free room in /dev/shm when the DataLoader was built", source="statvfs"),
    M(
        "shm_needed",
        "bytes",
        "bytes of a batch's tensors x (num_workers x prefetch_factor + 1): what the workers may keep in /dev/shm",
        "what lies there at any moment",
        _LOADER,
    ),
    M("shm_errors", "count", "DataLoaders whose workers died of a full /dev/shm", source=_LOADER),
)
