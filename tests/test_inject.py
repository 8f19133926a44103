"""What lives in the user's process: it starts unseen, changes nothing, and finds steps, phases and lines."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpudiag.collect.inject.imports import PostImport
from gpudiag.collect.inject.log import Log
from gpudiag.collect.inject.memory import allocator, out_of_memory
from gpudiag.collect.inject.sampler import LineSampler
from gpudiag.collect.inject.tracker import Cycle, Emitter, Tracker
from gpudiag.collect.inject.where import user_line
from gpudiag.collect.torch_profiler import BOOTSTRAP

live = pytest.mark.live


def inside(
    tmp_path: Path, code: str, *options: str, pythonpath: str = "", **asked: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run code with the agent inside; records go to tmp_path/capture."""
    folder = tmp_path / "capture"
    folder.mkdir(exist_ok=True)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    wanted = {"dir": str(folder), "mode": "torch", "warmup": None, "steps": None} | asked
    path = os.pathsep.join([str(BOOTSTRAP), *([pythonpath] if pythonpath else [])])
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": path, "GPUDIAG_CAPTURE": json.dumps(wanted)}
    return subprocess.run([sys.executable, *options, str(script)], env=env, capture_output=True, timeout=60)


def records(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    lines = [
        json.loads(line) for file in sorted(tmp_path.glob("capture/*.jsonl")) for line in file.read_text().splitlines()
    ]
    return [line for line in lines if line["k"] == kind]


# -- start and end of a process, without torch ----------------------------------------------------------------------------


def test_the_users_own_sitecustomize_still_runs_and_sys_path_is_as_it_was(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.mine = __file__")
    done = inside(tmp_path, "import sys, sitecustomize; print(mine); print(sys.path[:2])", pythonpath=str(own))
    assert done.stderr == b""
    assert done.stdout.decode().splitlines() == [str(own / "sitecustomize.py"), repr([str(tmp_path), str(own)])]


def test_a_broken_sitecustomize_of_the_users_is_reported_by_python_as_ever(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("raise ImportError('mine is broken', name='other')")
    done = inside(tmp_path, "print('ran')", pythonpath=str(own))
    assert done.stdout == b"ran\n"
    assert b"mine is broken" in done.stderr


def test_exit_functions_run_in_the_order_of_the_script_and_os_exit_keeps_its_code(tmp_path: Path) -> None:
    done = inside(
        tmp_path,
        """
        import atexit, os, threading
        atexit.register(print, "first registered"); atexit.register(os._exit, 9); atexit.register(print, "last registered", flush=True)
        print(threading.active_count())
        """,
    )
    assert (done.returncode, done.stdout) == (9, b"1\nlast registered\n")


def test_a_script_without_torch_is_told_apart_from_one_that_was_not_reached(tmp_path: Path) -> None:
    inside(tmp_path, "print(1)")
    assert [record["program"] for record in records(tmp_path, "no_torch")] == ["script.py"]
    (tmp_path / "capture" / next((tmp_path / "capture").iterdir())).unlink()
    inside(tmp_path, "print(1)", "-E")
    assert not list((tmp_path / "capture").iterdir())


def test_a_failing_import_shows_no_frame_of_ours(tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "torch.py").write_text("raise RuntimeError('half installed')")
    done = inside(tmp_path, "import torch")
    assert b"half installed" in done.stderr
    assert b"inject" not in done.stderr


def test_a_full_disk_costs_the_records_and_not_the_script(tmp_path: Path) -> None:
    log = Log("/dev/full")
    log.write({"k": "x"}, flush=True)
    assert log.closed
    log.write({"k": "y"}, flush=True)


# -- post-import hooks ----------------------------------------------------------------------------------------------------


def test_a_hook_runs_once_after_the_import_and_not_for_looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    (tmp_path / "hooked_module.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    hooks = PostImport()
    monkeypatch.setattr(sys, "meta_path", [hooks, *sys.meta_path])
    seen: list[int] = []
    hooks.when("hooked_module", lambda module: seen.append(module.value))
    assert importlib.util.find_spec("hooked_module") is not None
    assert seen == []
    import hooked_module  # type: ignore[import-not-found]

    assert seen == [1]
    assert type(hooked_module.__loader__).__name__ == "SourceFileLoader"
    assert "exec_module" not in vars(hooked_module.__loader__)
    monkeypatch.delitem(sys.modules, "hooked_module")


def test_the_line_is_the_users_and_not_the_librarys() -> None:
    assert user_line(1).split(":")[0].endswith("test_inject.py")
    found: list[str] = []
    json.JSONEncoder(default=lambda value: found.append(user_line(1)) or "").encode(object())  # type: ignore[func-returns-value]
    assert found[0].split(":")[0].endswith("test_inject.py")


# -- steps and phases -----------------------------------------------------------------------------------------------------


class Spy(Emitter):
    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, name: str, index: int | None = None) -> Any:
        label = name if index is None else f"{name}#{index}"
        self.events.append(f"+{label}")
        return label

    def end(self, token: Any) -> None:
        self.events.append(f"-{token}")


class Written:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, record: dict[str, Any], flush: bool = False) -> None:
        self.lines.append(json.loads(json.dumps(record)))

    def flush(self) -> None:
        return None

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["k"] == "step" and "partial" not in line]


@pytest.fixture
def tracked() -> SimpleNamespace:
    written, counts = Written(), []
    tracker = Tracker(written, lambda count, source: counts.append((count, source)))  # type: ignore[arg-type]
    tracker.emitter = Spy()
    return SimpleNamespace(tracker=tracker, written=written, counts=counts, events=tracker.emitter.events)


def phases(tracker: Tracker, *names: str) -> None:
    for name in names:
        tracker.push(name)
        tracker.pop()


def test_a_step_ends_with_the_optimizer_and_gradient_accumulation_is_one_step(tracked: SimpleNamespace) -> None:
    for _ in range(3):
        phases(tracked.tracker, "forward", "backward", "forward", "backward", "optimizer")
        tracked.tracker.turn("optimizer", 1)
    steps = tracked.written.steps()
    assert [step["i"] for step in steps] == [0, 1, 2]
    assert all(set(step["p"]) == {"forward", "backward", "optimizer"} for step in steps)
    assert all(sum(step["p"].values()) <= step["e"] - step["s"] for step in steps)
    assert tracked.counts == [(1, "optimizer"), (2, "optimizer"), (3, "optimizer")]


def test_two_optimizers_in_turn_make_one_step_and_a_successor_takes_over() -> None:
    gan = Cycle()
    assert [gan.turn(key) for key in (1, 2, 1, 2, 1)] == [True, False, True, False, True]
    after = Cycle()
    assert [after.turn(key) for key in (1, 1, 2, 2, 2)] == [True, True, False, True, True]


def test_loader_steps_give_way_to_optimizer_steps(tracked: SimpleNamespace) -> None:
    tracker = tracked.tracker
    for _ in range(4):  # an evaluation before training
        tracker.turn("loader", 7)
        phases(tracker, "data_wait", "forward")
    for _ in range(3):
        tracker.turn("loader", 8)
        phases(tracker, "data_wait", "forward", "optimizer")
        tracker.turn("optimizer", 1)
    assert [step["o"] for step in tracked.written.steps()].count("optimizer") == 3
    assert tracker.source == "optimizer"
    assert tracker.count == 3


def test_phases_are_exclusive_and_lines_are_summed(tracked: SimpleNamespace) -> None:
    tracker = tracked.tracker
    tracker.push("forward")
    tracker.push("compile")
    tracker.pop("model.py:3")
    tracker.pop()
    for _ in range(2):
        tracker.push("log")
        tracker.pop("train.py:9")
    tracker.sync("Tensor.item", "train.py:5", 100)
    tracker.turn("optimizer", 1)
    (step,) = tracked.written.steps()
    assert [entry[:3] for entry in step["w"]] == [["compile", "model.py:3", 1], ["log", "train.py:9", 2]]
    assert step["y"] == [["Tensor.item", "train.py:5", 1, 100]]
    assert step["p"]["forward"] + step["p"]["compile"] <= step["e"] - step["s"]


def test_ranges_nest_even_when_a_step_ends_inside_a_phase(tracked: SimpleNamespace) -> None:
    tracker = tracked.tracker
    tracker.push("backward")  # an optimizer that steps inside backward
    tracker.turn("optimizer", 1)
    tracker.pop()
    tracker.finish()
    open_ranges: list[str] = []
    for event in tracked.events:
        if event[0] == "+":
            open_ranges.append(event[1:])
        else:
            assert open_ranges.pop() == event[1:]
    assert not open_ranges


def test_changing_the_emitter_closes_everything_in_the_old_one(tracked: SimpleNamespace) -> None:
    tracker = tracked.tracker
    tracker.push("forward")
    tracker.detach(Emitter())
    tracker.pop()
    assert tracked.events == ["+step#0", "+forward", "-forward", "-step#0"]
    tracker.turn("optimizer", 1)
    assert tracked.written.steps()[0]["mixed"] == 1


def test_a_fault_of_ours_ends_the_watching_and_not_the_script(tracked: SimpleNamespace) -> None:
    tracked.tracker.on_step = lambda count, source: 1 // 0
    tracked.tracker.turn("optimizer", 1)
    assert not tracked.tracker.mine()
    assert [line["note"] for line in tracked.written.lines if line["k"] == "note"] == [
        "watching stopped: ZeroDivisionError: integer division or modulo by zero"
    ]


# -- with torch -----------------------------------------------------------------------------------------------------------

LOOP = """
import torch
class Inner(torch.nn.Module):
    def __init__(self): super().__init__(); self.linear = torch.nn.Linear(8, 8)
    def forward(self, x, fail=False):
        if fail: raise ValueError("inside forward")
        return self.linear(x)
net = torch.nn.Sequential(Inner(), Inner()); opt = torch.optim.Adam(net.parameters())
"""


@live
def test_an_exception_inside_a_module_shows_the_users_frames_only(tmp_path: Path) -> None:
    code = (
        LOOP
        + "import traceback\ntry: net[0](torch.ones(2, 8), fail=True)\nexcept ValueError: traceback.print_exc()\nnet[0](torch.ones(2, 8), fail=True)"
    )
    script = tmp_path / "plain.py"
    script.write_text(code)
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, timeout=60)
    done = inside(tmp_path, code)
    assert done.returncode == 1
    assert done.stderr.replace(b"script.py", b"plain.py") == plain.stderr


@live
def test_a_record_function_over_all_steps_never_meets_a_second_profiler(tmp_path: Path) -> None:
    """Closing a record_function under another profiler than the one that saw it open crashes torch (2.14: SIGSEGV)."""
    code = LOOP + (
        "with torch.profiler.record_function('epoch'):\n"
        "    for _ in range(60): net(torch.ones(2, 8)).sum().backward(); opt.step()\n"
        "print('survived')\n"
    )
    done = inside(tmp_path, code, warmup=5)
    assert (done.returncode, done.stdout) == (0, b"survived\n")
    assert list(tmp_path.glob("capture/*.kineto.json"))


@live
def test_scripting_compiling_and_pickling_work_as_without_us(tmp_path: Path) -> None:
    code = LOOP + textwrap.dedent("""
        import io, pickle, copy
        @torch.jit.script
        def scripted(x):
            with torch.autograd.profiler.record_function("a"): return x + 1
        scripted(torch.ones(2))
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(2, 8)), net(torch.ones(2, 8)))
        from torch._dynamo.utils import counters
        assert not counters["graph_break"], counters
        buffer = io.BytesIO(); torch.save(net, buffer); buffer.seek(0); torch.load(buffer, weights_only=False)
        pickle.loads(pickle.dumps(torch.utils.data.DataLoader([1, 2, 3])))
        torch.jit.trace(net, torch.ones(2, 8)); torch.fx.symbolic_trace(net); copy.deepcopy(opt)
        print("fine")
    """)
    done = inside(tmp_path, code)
    assert done.stdout == b"fine\n", done.stderr.decode()


@live
def test_what_a_training_loop_does_is_found_with_its_lines(tmp_path: Path) -> None:
    code = LOOP + textwrap.dedent("""
        import logging, os
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.ones(40, 8)), batch_size=4)
        logging.basicConfig(handlers=[logging.NullHandler()], level=logging.INFO)
        for (x,) in loader:
            opt.zero_grad(); loss = net(x).sum(); loss.backward(); opt.step()
            logging.info("step")
        torch.save(net.state_dict(), os.devnull)
        net.eval()
        with torch.no_grad(): net(x)
    """)
    done = inside(tmp_path, code)
    assert done.stderr == b"" or b"Traceback" not in done.stderr
    steps = records(tmp_path, "step")
    found = {name for step in steps for name in step.get("p", ())}
    assert found >= {"data_wait", "forward", "backward", "optimizer", "zero_grad", "log", "checkpoint", "eval"}
    (loader,) = records(tmp_path, "loader")
    assert (loader["where"].rpartition("/")[2], loader["in_memory"], loader["length"]) == ("script.py:12", True, 40)
    assert len(records(tmp_path, "fetch")) == 10
    assert {line[1].rpartition("/")[2] for step in steps for line in step.get("w", ()) if line[0] == "log"} == {
        "script.py:16"
    }
    (optimizer,) = records(tmp_path, "optimizer")
    assert optimizer["params"] == 4


@live
def test_time_outside_all_phases_is_laid_to_the_line_that_takes_it(tmp_path: Path) -> None:
    code = LOOP + textwrap.dedent("""
        import time
        def slow():
            end = time.perf_counter() + 0.02
            while time.perf_counter() < end: pass
        for _ in range(30):
            net(torch.ones(2, 8)).sum().backward(); opt.step()
            slow()
    """)
    assert inside(tmp_path, code, warmup=3).returncode == 0
    (record,) = records(tmp_path, "lines")
    where, count, length = record["lines"][0]
    assert where.rpartition("/")[2] in ("script.py:13", "script.py:12")
    assert count >= 8  # the sampler may wake late
    assert length > 0.5 * 20 * 20_000_000  # half of 20 steps of 20 ms; a busy machine stretches it


@pytest.mark.parametrize("on_gpu", [True, False])
def test_on_a_gpu_run_each_look_is_kept_with_its_moment_phase_or_not(on_gpu: bool, tracked: SimpleNamespace) -> None:
    sampler = LineSampler(tracked.tracker, tracked.written, lambda: on_gpu)
    sampler.sample()  # the first only begins
    tracked.tracker.push("forward")
    sampler.sample()
    tracked.tracker.pop()
    sampler.sample()
    sampler.write()
    sampler.write()
    kept = [line for line in tracked.written.lines if line["k"] == "looks"]
    assert len(kept) == on_gpu
    for record in kept:
        assert [record["places"][n].rpartition("/")[2].split(":")[0] for n in record["n"]] == ["test_inject.py"] * 2
        assert len(set(record["n"])) == 2
        assert 0 < record["at"][1] < 10**9 < record["at"][0]
    (lines,) = [line for line in tracked.written.lines if line["k"] == "lines"]
    assert [count for _, count, _ in lines["lines"]] == [1]  # a phase explains the other


@live
def test_under_nsys_there_is_one_window_and_torchs_profiler_stays_off(tmp_path: Path) -> None:
    code = LOOP + "for _ in range(60): net(torch.ones(2, 8)).sum().backward(); opt.step()\n"
    assert inside(tmp_path, code, mode="nsys", warmup=5, steps=7).returncode == 0
    events = [(record["event"], record.get("steps")) for record in records(tmp_path, "clock")]
    assert events == [("start", None), ("stop", 7)]
    assert sum(record.get("r", 0) for record in records(tmp_path, "step")) == 7
    assert not list(tmp_path.glob("capture/*.kineto.json"))


@live
def test_spawned_children_are_noted_and_not_profiled(tmp_path: Path) -> None:
    code = """
        import multiprocessing, torch
        def work(): torch.ones(3).sum()
        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=work); child.start(); child.join()
    """
    assert inside(tmp_path, code).returncode == 0
    assert sorted(record["role"] for record in records(tmp_path, "process")) == ["main", "spawned"]
    assert len(list(tmp_path.glob("capture/*.kineto.json"))) == 1


def test_the_allocators_figures_are_read_where_cuda_was_set_up_and_nowhere_else() -> None:
    stats = {
        f"{kind}_bytes.all.{when}": number
        for number, (kind, when) in enumerate(
            [("allocated", "current"), ("reserved", "current"), ("allocated", "peak"), ("reserved", "peak")], 1
        )
    }
    cuda = SimpleNamespace(is_initialized=lambda: True, memory_stats=lambda: stats, current_device=lambda: 3)
    assert allocator(SimpleNamespace(cuda=cuda)) == {"a": 1, "r": 2, "pa": 3, "pr": 4, "d": 3}
    cuda.is_initialized = lambda: False
    assert allocator(SimpleNamespace(cuda=cuda)) == {}
    cuda.is_initialized, cuda.memory_stats = (lambda: True), dict  # an allocator of another make tells nothing
    assert allocator(SimpleNamespace(cuda=cuda)) == {}


def test_torchs_own_counters_have_the_names_that_are_read() -> None:
    torch = pytest.importorskip("torch")
    source = inspect.getsource(torch.cuda.memory.memory_stats)
    for name in (
        "allocated_bytes.{all,large_pool,small_pool}.{current,peak",
        "reserved_bytes.{all,large_pool,small_pool}",
    ):
        assert name in source


class OutOfMemoryError(RuntimeError):
    """As torch.OutOfMemoryError is called."""


@pytest.mark.parametrize(
    ("error", "whose"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"), "gpu"),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.90 GiB total capacity)"),
            "gpu",
        ),  # torch 1
        (MemoryError(), "host"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
            "host",
        ),
        (RuntimeError("shapes cannot be multiplied"), None),
        (None, None),
    ],
)
def test_whose_memory_ran_out_is_read_off_the_exception(error: BaseException | None, whose: str | None) -> None:
    found = out_of_memory(error)
    assert found.get("of") == whose
    assert "\n" not in found.get("said", "")


CALLERS = """
import logging, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

warnings.simplefilter("always")
logging.basicConfig(format="%(lineno)d %(message)s")


def tell(what):
    for level in range(1, 9):
        warnings.warn(f"{what} {level}", stacklevel=level)
        logging.warning(f"{what} {level}", stacklevel=level)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        tell("forward")
        return self.inner(x)


class Rows(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, i):
        tell("fetch")
        return torch.ones(4)


class Step(torch.optim.SGD):
    def step(self):
        tell("step")
        super().step()


def main():
    net = Net()
    optimizer = Step(net.parameters(), lr=0.1)
    for x in DataLoader(Rows()):
        loss = net(x).sum()
        loss.register_hook(lambda gradient: tell("backward"))
        loss.backward()
        optimizer.step()
        print(format(loss.detach(), ".1f") != "")


main()
"""


@live
def test_warnings_and_log_records_name_the_line_that_they_name_without_us(tmp_path: Path) -> None:
    script = tmp_path / "callers.py"
    script.write_text(CALLERS)
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    command = [
        sys.executable,
        "-m",
        "gpudiag",
        "profile",
        "--with",
        "torch",
        "--no-save",
        "-o",
        str(tmp_path / "bundle"),
    ]
    wrapped = subprocess.run([*command, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert plain.stderr.count("stacklevel") == plain.stderr.count("warnings.warn(") > 0
    assert wrapped.stderr.split("\ngpudiag 0")[0].split("\ngpudiag:")[0] == plain.stderr
