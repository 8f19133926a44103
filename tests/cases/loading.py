"""Cases of the data pipeline."""

from __future__ import annotations

from cases.case import Case
from cases.sim import ADD, FP32_GEMM, MS, TENSOR_GEMM, US, S, Sim, host, loader_info
from gpudiag.timeline import Timeline

LOADER = (
    "loader_wait", "loader_workers_zero", "loader_too_few_workers", "loader_cpu_bound", "loader_storage_bound",
    "loader_too_many_workers", "loader_collate_bound", "loader_per_sample_in_memory",
    "loader_workers_not_persistent", "cpus_restricted",
)  # fmt: skip
SYNCS = ("sync_idle", "implicit_sync", "readback_each_step")
STEPS = 12


def train(run: Sim, ns: int = 10 * MS, name: str = TENSOR_GEMM) -> None:
    """A step's work of `ns` on the device, whose end the loop waits for."""
    run.launch(ns // 10, name, count=10)
    run.idle_until_device()


def in_memory() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.load(90 * MS)
            train(run)
    return run.timeline(loader=loader_info(0, in_memory=True, batch_size=4096), host=host())


def slow_start() -> Timeline:
    run = Sim()
    for i in range(STEPS):
        with run.step():
            run.load(60 * S if i == 0 else 100 * US, fetch=8 * MS, worker=i % 4)
            train(run)
    return run.timeline(loader=loader_info(4, start_method="spawn"), host=host())


def oversubscribed_but_hidden() -> Timeline:
    run = Sim()
    for i in range(STEPS):
        with run.step():
            run.load(50 * US, fetch=200 * MS, cpu=0.3, worker=i % 12)
            train(run, 50 * MS)
    return run.timeline(loader=loader_info(12, worker_threads=16), host=host())


def one_core() -> Timeline:
    run = Sim()
    for i in range(STEPS):
        with run.step():
            run.load(60 * MS, fetch=70 * MS, worker=i % 8)
            train(run)
    return run.timeline(loader=loader_info(8), host=host(1, 48))


def every_nth(workers: int = 4) -> Timeline:
    run = Sim()
    for i in range(40):
        with run.step():
            run.load(1 * MS if i % workers else 250 * MS, fetch=290 * MS, cpu=0.03, io=0.95, worker=i % workers)
            train(run)
    return run.timeline(loader=loader_info(workers), host=host(4, 4), log_steps=True)


def locked_file() -> Timeline:
    run = Sim()
    for i in range(STEPS):
        with run.step():
            run.load(40 * MS, fetch=200 * MS, cpu=0.05, io=0.93, worker=i % 4)
            train(run)
    return run.timeline(loader=loader_info(4), host=host(4, 4))


def decoding() -> Timeline:
    run = Sim()
    for i in range(STEPS):
        with run.step():
            run.load(80 * MS, fetch=360 * MS, cpu=0.98, io=0.0, worker=i % 4)
            train(run)
    return run.timeline(loader=loader_info(4), host=host(4, 4))


def cold_first_epoch() -> Timeline:
    run = Sim()
    for i in range(60):
        with run.step():
            epoch = i // 30
            run.load(40 * MS if epoch == 0 else 100 * US, fetch=50 * MS if epoch == 0 else 2 * MS, io=0.9 if epoch == 0 else 0.1,
                     cpu=0.1, worker=i % 2, epoch=epoch, batch=i % 30)  # fmt: skip
            train(run)
    whole = run.timeline(loader=loader_info(2, persistent=True), host=host(), log_steps=True)
    second = Sim()  # the recorded window lies in the second epoch
    second.now = second.free = run.step_rows[40][0]
    second.steps = 40
    for _ in range(18):
        with second.step():
            second.load(100 * US, fetch=2 * MS, worker=0, epoch=1)
            train(second)
    return second.timeline(loader=loader_info(2, persistent=True), host=host(), step_log=whole.step_log)


def wait_hidden_by_queued_work() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(10 * MS, count=10)
            run.load(80 * MS)
            run.now = max(run.now, run.free - 18 * MS)
    return run.timeline(host=host())


def smaller_kernels_same_step() -> Timeline:
    run = Sim()
    for i in range(STEPS):
        with run.step():
            run.load(60 * MS, fetch=240 * MS, worker=i % 4)
            train(run, 40 * MS, FP32_GEMM)
    return run.timeline(loader=loader_info(4), host=host(4, 4))


def small_files() -> Timeline:
    run = Sim()
    for i in range(STEPS):
        with run.step():
            run.load(90 * MS, fetch=380 * MS, cpu=0.04, io=0.94, worker=i % 4)
            train(run)
    return run.timeline(loader=loader_info(4), host=host(4, 4))


def emptied_cache() -> Timeline:
    run = Sim()
    for _ in range(STEPS):
        with run.step():
            run.launch(1 * MS, count=4)
            run.sync("cudaDeviceSynchronize")
            for _ in range(6):
                run.api("cudaFree", 1500 * US)
            for _ in range(6):
                run.api("cudaMalloc", 900 * US)
            run.launch(1 * MS, count=4)
            run.idle_until_device()
    return run.timeline(host=host())


def host_bound_with_a_read() -> Timeline:
    run = Sim()
    for i in range(40):
        with run.step():
            run.load(14 * MS, fetch=28 * MS, worker=i % 2)
            run.launch(20 * US, ADD, count=5)
            run.item()
    return run.timeline(loader=loader_info(2), host=host(2, 2))


CASES = (
    Case("dp-inmemory-collate", in_memory, ("loader_per_sample_in_memory",), silent=("loader_workers_zero", "loader_too_few_workers"),
         bound_by="input", says_not=("num_workers=",)),
    Case("dp-worker-start-serial-pickle", slow_start, also=("loader_slow_start",), silent=LOADER),
    Case("dp-oversubscription-benign", oversubscribed_but_hidden, silent=LOADER, status="healthy"),
    Case("dp-affinity-one-core", one_core, ("cpus_restricted",), silent=("loader_too_few_workers", "loader_workers_zero"),
         bound_by="input"),
    Case("dp-every-nth-step", every_nth, ("loader_storage_bound", "loader_too_few_workers", "loader_wait"), ("periodic_stall",),
         ("step_jitter", "periodic_stall"), status="bottleneck", bound_by="input"),
    Case("dp-h5-open-in-init", locked_file, ("loader_storage_bound",), silent=("loader_cpu_bound",), bound_by="input"),
    Case("dp-jpeg-decode", decoding, ("loader_cpu_bound",), silent=("loader_storage_bound", "loader_too_few_workers"),
         bound_by="input"),
    Case("dp-cold-cache", cold_first_epoch, silent=LOADER, status="healthy"),
    Case("dp-pin-moves-time", wait_hidden_by_queued_work, silent=LOADER, status="healthy"),
    Case("dp-amp-hides-cpu", smaller_kernels_same_step, ("loader_cpu_bound",), silent=("tf32_off", "tensor_cores_unused"),
         bound_by="input"),
    Case("dp-shuffle-hdd-vs-emptycache:files", small_files, ("loader_storage_bound",), silent=("allocator_in_loop",)),
    Case("dp-shuffle-hdd-vs-emptycache:cache", emptied_cache, ("allocator_in_loop",), silent=LOADER),
    Case("sync-false-culprit-min-rule", host_bound_with_a_read, LOADER, silent=SYNCS, bound_by="input"),
)  # fmt: skip
