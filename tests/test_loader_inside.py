"""What gpudiag sees inside a data pipeline, on small scripts that each have one fault planted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from gpudiag.read.loader_log import read_process_log

pytest.importorskip("torchvision")
pytestmark = pytest.mark.live

HEAD = """
import itertools, os, sys, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

def train(loader, width, epochs=1):
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(epochs):
        for batch in loader:
            x = batch[0] if isinstance(batch, (list, tuple)) else batch
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

def work(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
"""


@dataclass(frozen=True)
class Run:
    code: int
    err: str
    diagnosis: dict[str, Any]
    bundle: Path

    def metric(self, name: str) -> float | None:
        return self.diagnosis["metrics"][name].get("value")

    def finding(self, rule: str) -> dict[str, Any]:
        found = [finding for finding in self.diagnosis["findings"] if finding["rule"] == rule]
        assert found, (rule, [finding["rule"] for finding in self.diagnosis["findings"]])
        return found[0]

    def standing(self) -> set[str]:
        """Findings that no other explains."""
        return {finding["rule"] for finding in self.diagnosis["findings"] if not finding["caused_by"]}


def profiled(
    tmp_path: Path, script: str, *options: str, words: tuple[str, ...] = (), prefix: tuple[str, ...] = ()
) -> Run:
    file, bundle = tmp_path / "train.py", tmp_path / "bundle"
    file.write_text(HEAD + dedent(script))
    command = [*prefix, sys.executable, "-m", "gpudiag", "profile", "--with", "torch", "--no-save", "-o", str(bundle)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, *options, str(file), *words], capture_output=True, text=True, timeout=180, env=env)
    saved = bundle / "diagnosis.json"
    assert saved.is_file(), done.stderr
    return Run(done.returncode, done.stderr, json.loads(saved.read_text()), bundle)


TRANSFORMS = """
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    def slow(image):
        work(0.002)
        return image

    class Images(Dataset):
        def __init__(self, compose):
            self.transform = compose
        def __len__(self):
            return 640
        def __getitem__(self, i):
            return self.transform(torch.full((3, 8, 8), i % 7))

    if __name__ == "__main__":
        kind = v1 if sys.argv[1] == "v1" else v2
        inner = kind.Compose([kind.RandomHorizontalFlip(0.5)])
        compose = kind.Compose([inner, kind.ConvertImageDtype(torch.float32), kind.Lambda(slow)])
        before = repr(compose)
        train(DataLoader(Images(compose), batch_size=16, num_workers=int(sys.argv[2])), 192)
        print(repr(compose) == before, type(compose).__call__.__name__)
"""


@pytest.mark.parametrize(("kind", "workers"), [("v1", 0), ("v2", 1)])
def test_each_transform_is_timed_on_request(tmp_path: Path, kind: str, workers: int) -> None:
    page = tmp_path / "report.html"
    run = profiled(tmp_path, TRANSFORMS, "--transforms", "--html", str(page), words=(kind, str(workers)))
    assert "ConvertImageDtype" in page.read_text()
    transforms = {name: (calls, ns) for name, calls, ns in run.diagnosis["loaders"][0]["transforms"]}
    assert next(iter(transforms)) == "slow"
    assert set(transforms) == {"slow", "Compose", "ConvertImageDtype"}  # an inner Compose is one of the outer's
    assert all(calls == 640 for calls, _ in transforms.values())
    assert transforms["slow"][1] >= 640 * 2_000_000
    whole = run.metric("loader_transform_time")
    fetch = run.metric("loader_fetch_time")
    assert whole is not None
    assert fetch is not None
    assert 32e6 <= whole <= fetch
    assert "slow" in run.finding("loader_one_transform")["summary"]


def test_transforms_are_not_taken_apart_unasked_and_it_is_said_how(tmp_path: Path) -> None:
    run = profiled(tmp_path, TRANSFORMS, words=("v1", "0"))
    assert run.diagnosis["loaders"][0]["transforms"] == []
    assert run.metric("loader_transform_time") is not None  # all together cost two clock reads a sample
    asked = {item["rule"]: item["record_with"] for item in run.diagnosis["not_judged"]}
    assert asked["loader_one_transform"] == "gpudiag profile --transforms SCRIPT"


def test_an_iterable_dataset_with_one_shard_keeps_one_worker_busy(tmp_path: Path) -> None:
    script = """
        class Shards(IterableDataset):
            def __init__(self, shards):
                self.shards = shards
            def __iter__(self):
                for shard in range(get_worker_info().id, self.shards, get_worker_info().num_workers):
                    for _ in range(480 // self.shards):
                        time.sleep(0.004)
                        yield torch.ones(64)
        if __name__ == "__main__":
            train(DataLoader(Shards(int(sys.argv[1])), batch_size=8, num_workers=3), 64)
    """
    one = profiled(tmp_path, script, words=("1",))
    assert one.metric("loader_workers_working") == 1
    assert "loader_few_workers_work" in one.standing()
    shutil.rmtree(one.bundle)
    even = profiled(tmp_path, script, words=("3",))
    assert even.metric("loader_workers_working") > 2.4  # type: ignore[operator]
    assert "loader_few_workers_work" not in {finding["rule"] for finding in even.diagnosis["findings"]}


def test_threads_in_the_workers_that_take_the_cpus_from_each_other_are_named(tmp_path: Path) -> None:
    cpus = len(os.sched_getaffinity(0))
    script = f"""
        class Augmented(Dataset):
            def __len__(self):
                return 640
            def __getitem__(self, i):
                image = torch.rand(3, 256, 256)
                for _ in range(8):
                    image = (image * 1.02 - 0.01).clamp(0, 1)
                return image[:, ::8, ::8].clone()
        def threads(_):
            torch.set_num_threads(int(sys.argv[1]))
        if __name__ == "__main__":
            train(DataLoader(Augmented(), batch_size=8, num_workers={cpus}, worker_init_fn=threads), 3072)
    """
    many = profiled(tmp_path, script, words=("4",))
    assert many.diagnosis["loaders"][0]["worker_threads"] == 4
    assert many.metric("loader_helper_share") > 0.4  # type: ignore[operator]
    if (many.metric("other_cpus") or 0) >= 0.25 * cpus or many.metric("loader_busy_cpus") < 0.6 * cpus:  # type: ignore[operator]
        pytest.skip("other programs have the CPUs: then the threads are not to blame")
    assert many.finding("loader_threads_oversubscribed")
    shutil.rmtree(many.bundle)
    single = profiled(tmp_path, script, words=("1",))
    assert single.diagnosis["loaders"][0]["worker_threads"] == 1
    assert "loader_threads_oversubscribed" not in {finding["rule"] for finding in single.diagnosis["findings"]}


COLD = """
    SIZE = 4 << 20
    class Records(Dataset):
        def __init__(self, path):
            self.path, self.file = path, -1
        def __len__(self):
            return 64
        def __getitem__(self, i):
            if self.file < 0:
                self.file = os.open(self.path, os.O_RDONLY)
                os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_RANDOM)
            return torch.frombuffer(bytearray(os.pread(self.file, SIZE, i * SIZE)[:1024]), dtype=torch.uint8).float()
    if __name__ == "__main__":
        train(DataLoader(Records(sys.argv[1]), batch_size=1, shuffle=True, num_workers=1, persistent_workers=True), 1024, 3)
"""


def test_a_first_epoch_that_reads_from_the_disk_is_told_from_later_ones(tmp_path: Path) -> None:
    data = tmp_path / "data.bin"
    with data.open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(4 << 20))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    run = profiled(tmp_path, COLD, words=(str(data),))
    first = run.metric("first_epoch_read_bytes")
    if not first:
        pytest.skip("the files of this machine's temporary folder never leave memory")
    assert first >= 0.9 * (4 << 20)
    assert run.metric("later_epochs_read_bytes") < 0.1 * first  # type: ignore[operator]
    assert run.metric("window_in_first_epoch") == 1
    assert run.finding("loader_cold_cache")
    assert "loader_storage_bound" not in run.standing()


def test_a_worker_that_waits_for_no_disk_is_not_told_to_buy_one(tmp_path: Path) -> None:
    script = """
        class Remote(Dataset):
            def __len__(self):
                return 400
            def __getitem__(self, i):
                time.sleep(0.005)
                return torch.ones(64)
        if __name__ == "__main__":
            train(DataLoader(Remote(), batch_size=8, num_workers=2), 64)
    """
    run = profiled(tmp_path, script)
    assert run.metric("loader_read_bytes") == 0
    assert run.metric("loader_disk_wait") < 0.05  # type: ignore[operator]
    fixes = run.finding("loader_storage_bound")["fixes"]
    assert any("no byte came from a disk" in fix["change"] for fix in fixes)


def test_batches_that_travel_as_python_objects_are_named(tmp_path: Path) -> None:
    script = """
        class Boxes(Dataset):
            def __len__(self):
                return 400
            def __getitem__(self, i):
                return i
        OBJECTS = [{"box": [float(n), 1.0, 2.0, 3.0], "label": f"class {n}"} for n in range(20000)]
        def as_objects(samples):
            return torch.ones(8, 64), OBJECTS
        def as_tensors(samples):
            return torch.ones(8, 64), torch.ones(20000, 4)
        if __name__ == "__main__":
            train(DataLoader(Boxes(), batch_size=8, num_workers=1, collate_fn=globals()[sys.argv[1]]), 64)
    """
    objects = profiled(tmp_path, script, words=("as_objects",))
    assert objects.metric("loader_message_bytes") > 500_000  # type: ignore[operator]
    if objects.metric("loader_queue_share") >= 0.15:  # type: ignore[operator]
        pytest.skip("other programs have the CPUs: then the way of a batch is not to blame")
    assert "return tensors" in objects.finding("loader_unpickling")["fixes"][0]["change"]
    shutil.rmtree(objects.bundle)
    tensors = profiled(tmp_path, script, words=("as_tensors",))
    assert tensors.metric("loader_message_bytes") < 2_000  # type: ignore[operator]


def small_shm() -> tuple[str, ...]:
    """A prefix that runs a command with 16 MB of /dev/shm; skips where no mount namespace can be had."""
    unshare = shutil.which("unshare")
    inside = "mount -t tmpfs -o size=16m tmpfs /dev/shm"
    if unshare is None or subprocess.run([unshare, "-m", "sh", "-c", inside], capture_output=True).returncode:
        pytest.skip("needs root, to mount a small /dev/shm of its own")
    return (unshare, "-m", "sh", "-c", f'{inside} && exec "$@"', "sh")


SHM = """
    class Images(Dataset):
        def __len__(self):
            return 200
        def __getitem__(self, i):
            time.sleep(float(sys.argv[2]))
            return torch.ones(3, int(sys.argv[1]), 256)
    if __name__ == "__main__":
        train(DataLoader(Images(), batch_size=4, num_workers=2), 3 * int(sys.argv[1]) * 256)
"""


def test_a_worker_that_dies_of_a_full_shared_memory_is_said_to(tmp_path: Path) -> None:
    run = profiled(tmp_path, SHM, words=("2048", "0"), prefix=small_shm())
    assert run.code == 1
    assert "Bus error" in run.err or "shared memory" in run.err  # torch's own words, as without gpudiag
    finding = run.finding("shm_full")
    assert finding["severity"] == "critical"
    assert "16.8 MB" in finding["summary"]


def test_a_shared_memory_that_may_not_hold_the_batches_is_warned_of_while_it_still_works(tmp_path: Path) -> None:
    run = profiled(tmp_path, SHM, words=("300", "0.1"), prefix=small_shm())  # 3.7 MB a batch: five do not fit
    log = read_process_log(sorted((run.bundle / "torch").glob("rank*.jsonl")))
    if any(process.of("shm_error") for process in log.processes):
        pytest.skip("the workers got ahead and died, before the training took their batches")
    assert run.code == 0
    assert run.finding("shm_too_small")["severity"] == "warning"


def test_work_on_a_batch_in_the_training_thread_is_told_from_other_code(tmp_path: Path) -> None:
    script = """
        import numpy as np
        class Images(Dataset):
            def __len__(self):
                return 400
            def __getitem__(self, i):
                return np.full(4096, i % 9)
        def collate(samples):
            return np.stack(samples)
        if __name__ == "__main__":
            torch.set_num_threads(1)
            net = nn.Sequential(nn.Linear(4096, 512), nn.Linear(512, 10))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            before, after = (0.02, 0) if sys.argv[1] == "before" else (0, 0.02)
            for rows in DataLoader(Images(), batch_size=8, num_workers=1, collate_fn=collate):
                work(before)  # stands for decoding, augmenting, normalising
                x = torch.from_numpy(rows).float()
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
                work(after)  # and here for anything else
    """
    early = profiled(tmp_path, script, words=("before",))
    assert "batch_work_in_main_thread" in early.standing()
    assert early.metric("before_launch_lost") >= 19e6  # type: ignore[operator]
    assert "host_code_outside_phases" not in early.standing()
    shutil.rmtree(early.bundle)
    late = profiled(tmp_path, script, words=("after",))
    assert late.metric("before_launch_lost") < 5e6  # type: ignore[operator]
    assert "host_code_outside_phases" in late.standing()


def test_a_run_that_ends_for_lack_of_memory_says_so_first(tmp_path: Path) -> None:
    script = """
        class Hoarder(Dataset):
            def __init__(self):
                self.kept = []
            def __len__(self):
                return 400
            def __getitem__(self, i):
                if i == 250:
                    self.kept.append(bytearray(1 << 50))
                return torch.ones(64)
        if __name__ == "__main__":
            train(DataLoader(Hoarder(), batch_size=4), 64)
    """
    run = profiled(tmp_path, script)
    assert run.code == 1
    assert run.err.split("gpudiag")[0].rstrip().endswith("MemoryError")
    assert run.finding("host_out_of_memory")["severity"] == "critical"
    assert "gpu_out_of_memory" not in run.standing()


@pytest.mark.parametrize(
    ("pinned", "found"),
    [("all to one", "cpus_restricted"), ("workers to one", "loader_workers_pinned"), ("each to its own", "")],
)
def test_a_mask_that_the_script_sets_counts_and_one_cpu_for_each_worker_is_no_narrow_one(
    tmp_path: Path, pinned: str, found: str
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    script = f"""
        class Images(Dataset):
            def __len__(self):
                return 480
            def __getitem__(self, i):
                work(0.003)
                return torch.ones(64)
        def pin(worker):
            if sys.argv[1] != "all to one":
                os.sched_setaffinity(0, [{cpus}[worker if sys.argv[1] == "each to its own" else 0]])
        if __name__ == "__main__":
            if sys.argv[1] == "all to one":  # as some imported libraries do
                os.sched_setaffinity(0, [{cpus[0]}])
            train(DataLoader(Images(), batch_size=8, num_workers=2, worker_init_fn=pin), 64)
    """
    run = profiled(tmp_path, script, words=(pinned,))
    assert run.metric("usable_cpus") == (2 if pinned == "each to its own" else 1)
    named = {finding["rule"] for finding in run.diagnosis["findings"]} & {"cpus_restricted", "loader_workers_pinned"}
    assert named == ({found} if found else set())


def test_threads_of_the_runs_own_workers_are_not_taken_for_other_programs(tmp_path: Path) -> None:
    script = """
        import numpy as np
        class Products(Dataset):
            def __len__(self):
                return 120
            def __getitem__(self, i):
                a = np.ones((600, 600), np.float32)
                for _ in range(6):
                    a = a @ a / 600
                return torch.from_numpy(a[:8, :8].copy())
        if __name__ == "__main__":
            train(DataLoader(Products(), batch_size=2, num_workers=2), 64)
    """
    run = profiled(tmp_path, script)
    others = run.metric("other_cpus")
    if others is None:
        pytest.skip("recorded for too short a time")
    workers = read_process_log(sorted((run.bundle / "torch").glob("rank*.jsonl"))).processes
    fetches = [record for process in workers for record in process.of("fetch") if record["w"] >= 0]
    assert sum(record["pc"] for record in fetches) > 1.2 * sum(record["cpu"] for record in fetches), "BLAS has threads"
    load = os.getloadavg()[0]
    assert others < 0.5 or load > 3, f"{others} of other programs at load {load}"
