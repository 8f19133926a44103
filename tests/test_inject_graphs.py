"""CUDA graphs in the user's process: captures stay undisturbed, replays are steps."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_inject import Written, inside, records

from gpudiag.collect.inject import patch_graphs
from gpudiag.collect.inject.recorder import Recorder
from gpudiag.collect.inject.tracker import Tracker

live = pytest.mark.live


class Watched:
    """A tracker, and a CUDAGraph class without CUDA that is watched by it; `fails` names the method that raises."""

    def __init__(self) -> None:
        self.written, self.turns, self.fails, self.grad = Written(), list[tuple[int, str]](), "", True
        self.tracker = Tracker(self.written, lambda count, source: self.turns.append((count, source)))  # type: ignore[arg-type]
        self.tracker.push("h2d")  # opens the first step
        self.tracker.pop()
        outer = self

        class CUDAGraph:
            def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> str:
                return outer.call("capture_begin")

            def capture_end(self) -> None:
                self.capture_end_pre()

            def capture_end_pre(self) -> None:
                outer.call("capture_end")

            def replay(self) -> None:
                outer.call("replay")

        self.graph = CUDAGraph
        patch_graphs.install(
            SimpleNamespace(cuda=SimpleNamespace(CUDAGraph=CUDAGraph), is_grad_enabled=lambda: self.grad), self.tracker
        )

    def call(self, name: str) -> str:
        if name == self.fails:
            raise RuntimeError("refused")
        return name

    def captured(self, *optimizers: int) -> Any:
        """A graph in which the model is called and the optimizers step."""
        graph = self.graph()
        graph.capture_begin()
        self.tracker.turn("forward", 5)
        for key in optimizers:
            self.tracker.turn("optimizer", key)
        graph.capture_end()
        return graph

    def steps(self, source: str) -> list[dict[str, Any]]:
        return [step for step in self.written.steps() if step["o"] == source]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_each_replay_of_a_captured_training_step_is_a_step_and_the_capture_none(watched: Watched) -> None:
    for _ in range(2):
        watched.tracker.turn("optimizer", 1)
    graph = watched.captured(1)
    assert len(watched.turns) == 2
    for _ in range(4):
        graph.replay()
    assert watched.turns == [(n, "optimizer") for n in range(1, 7)]
    assert [step["p"].get("graph_replay", -1) >= 0 for step in watched.steps("optimizer")[2:]] == [True] * 4


def test_a_graph_that_holds_two_optimizers_and_two_graphs_of_one_each_make_one_step_a_round(watched: Watched) -> None:
    both = watched.captured(1, 2)
    for _ in range(3):
        both.replay()
    assert len(watched.steps("optimizer")) == 3
    other = Watched()
    first, second = other.captured(1), other.captured(2)
    for _ in range(3):
        first.replay()
        second.replay()
    assert len(other.steps("optimizer")) == 3


def test_a_graph_without_an_optimizer_is_a_call_of_the_model(watched: Watched) -> None:
    graph = watched.captured()
    for _ in range(4):
        graph.replay()
    assert watched.tracker.source == "forward"
    assert len(watched.steps("forward")) == 3  # the sign comes at a step's start, and the last has not ended
    watched.tracker.turn("optimizer", 1)  # micro-batches by graph, the optimizer eager
    graph.replay()
    graph.replay()
    watched.tracker.turn("optimizer", 1)
    assert len(watched.steps("optimizer")) == 2


def test_a_replay_inside_a_models_call_is_no_step_of_its_own(watched: Watched) -> None:
    graph = watched.captured()
    for _ in range(3):
        watched.tracker.turn("forward", 5)
        watched.tracker.push("forward")
        graph.replay()
        graph.replay()
        watched.tracker.pop()
    assert len(watched.steps("forward")) == 2
    assert set(watched.steps("forward")[0]["p"]) == {"forward", "graph_replay"}


def test_a_graph_captured_again_is_what_it_holds_now(watched: Watched) -> None:
    graph = watched.captured(1)
    graph.capture_begin()
    graph.capture_end()
    graph.replay()
    assert watched.tracker.source == "forward"


def test_a_replay_within_a_capture_hands_its_optimizer_on(watched: Watched) -> None:
    inner, outer = watched.captured(1), watched.graph()
    outer.capture_begin()
    inner.replay()
    outer.capture_end()
    assert watched.turns == []
    outer.replay()
    assert watched.turns == [(1, "optimizer")]


@pytest.mark.parametrize("step", ["capture_begin", "capture_end", "replay"])
def test_a_failure_leaves_nothing_open_and_shows_the_scripts_frames_only(watched: Watched, step: str) -> None:
    watched.fails = step
    with pytest.raises(RuntimeError) as caught:
        watched.captured(1).replay()
    assert "patch_graphs" not in "".join(traceback.format_tb(caught.value.__traceback__))
    assert not watched.tracker.capturing
    assert not watched.tracker.busy
    assert watched.turns == []
    watched.fails = ""
    watched.captured(1).replay()
    assert watched.turns == [(1, "optimizer")]


def test_a_script_that_replays_without_gradients_in_training_evaluates_and_torch_does_not(watched: Watched) -> None:
    graph = watched.captured()
    watched.tracker.turn("optimizer", 1)
    watched.grad = False
    graph.replay()
    exec("run = lambda graph: graph.replay()", names := {"__name__": "torch._inductor.cudagraph_trees"})
    names["run"](graph)  # type: ignore[operator]
    watched.tracker.turn("optimizer", 1)
    assert {"eval", "graph_replay"} <= set(watched.steps("optimizer")[-1]["p"])


def in_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


class Decisions(Recorder):
    """A recorder that notes what it would do."""

    def __init__(self, tracker: Tracker, folder: Path, log: Any) -> None:
        torch: Any = SimpleNamespace(__file__="torch/__init__.py", cuda=SimpleNamespace(is_initialized=lambda: False))
        super().__init__(torch, str(folder), "rank0", log, tracker, {"warmup": 2, "steps": 3}, 0)
        self.done: list[str] = []
        self.slow = 0.0

    def _start(self, kind: str) -> None:
        time.sleep(self.slow)
        self.done.append("start")
        self._profile, self._kind, self._thread = True, kind, threading.get_ident()
        self._recordings += 1

    def _stop(self, reason: str, steps: int = 0) -> None:
        self.done.append(reason)
        self._profile, self._done = None, True

    def _grown(self) -> int:
        return 0

    def _watch(self) -> None:
        return None


def test_no_recording_starts_or_ends_while_any_thread_captures(watched: Watched, tmp_path: Path) -> None:
    recorder = Decisions(watched.tracker, tmp_path, watched.written)
    watched.tracker.on_step = recorder.on_step
    graph = watched.graph()

    def steps(count: int) -> None:
        for _ in range(count):
            watched.tracker.turn("optimizer", 1)

    in_thread(graph.capture_begin).join()
    steps(4)  # this thread trains on: its steps count, and belong to no graph
    assert (recorder.done, watched.tracker.count, watched.tracker.captured) == ([], 4, {})
    graph.capture_end()
    steps(1)
    assert recorder.done == ["start"]
    graph.capture_begin()
    steps(9)
    recorder._requests.append(("memory", 1))
    recorder._on_pending()
    assert recorder.done == ["start"]
    graph.capture_end()
    recorder._requests.append(("memory", 1))
    recorder._on_pending()
    assert recorder.done == ["start", "memory"]


def test_an_early_recording_does_not_end_amid_a_compilation(watched: Watched, tmp_path: Path) -> None:
    recorder = Decisions(watched.tracker, tmp_path, watched.written)
    recorder._start("early")
    watched.tracker.push("compile")
    recorder._requests.append(("time", 1))
    recorder._on_pending()
    watched.tracker.pop()
    assert recorder.done == ["start"]
    recorder._requests.append(("time", 1))
    recorder._on_pending()
    assert recorder.done == ["start", "time"]


def test_a_capture_that_begins_while_a_recording_starts_waits_for_it(watched: Watched, tmp_path: Path) -> None:
    recorder = Decisions(watched.tracker, tmp_path, watched.written)
    recorder.slow = 0.3
    thread = in_thread(lambda: recorder.on_step(9, ""))
    time.sleep(0.1)
    watched.graph().capture_begin()
    assert recorder.done == ["start"]
    thread.join()


GRAPH = """
import contextlib, torch
state = {"capturing": False, "violations": 0, "replays": 0}

class Base(torch._C._CUDAGraph):
    '''What CUDA does, without CUDA; stands between torch's own CUDAGraph and its C++ base.'''
    _has_graph_exec = True
    def __new__(cls, *args):
        try: return object.__new__(cls)  # a build of torch without CUDA has a stand-in
        except TypeError: return super().__new__(cls)
    def capture_begin(self, pool=None, capture_error_mode="global"): state["capturing"] = True
    def capture_end_pre(self): state["capturing"] = False
    def capture_end_post(self): pass
    def capture_end(self): self.capture_end_pre()
    def instantiate(self): pass
    def replay(self): state["replays"] += 1; self.work()

class Graph(torch.cuda.CUDAGraph, Base): pass

@contextlib.contextmanager
def capture(graph):
    graph.capture_begin()
    try: yield
    finally: graph.capture_end()

def watch(name, owner):
    original = getattr(owner, name)
    def watched(*args, **kwargs):
        state["violations"] += state["capturing"]
        return original(*args, **kwargs)
    setattr(owner, name, watched)
watch("_disable_profiler", torch.autograd.profiler)
watch("_start_trace", torch.autograd.profiler.profile)
watch("_prepare_trace", torch.autograd.profiler.profile)

torch.manual_seed(0)
net = torch.nn.Linear(4, 1); opt = torch.optim.SGD(net.parameters(), lr=0.1); x = torch.ones(8, 4)
def step():
    loss = net(x).square().mean(); opt.zero_grad(); loss.backward(); opt.step(); return loss
for _ in range(3): step()
graph = Graph.__new__(Graph)  # its C++ constructor asks for a driver
with capture(graph):
    for _ in range(60): loss = step()
weight, w = net.weight.detach(), net.weight.detach().clone()
graph.work = lambda: weight.mul_(0.5)
for _ in range(40):
    x.copy_(torch.ones(8, 4)); graph.replay()
print(state["replays"], state["violations"], bool(torch.equal(weight, w * 0.5**40)))
"""


@live
@pytest.mark.parametrize("mode", ["torch", "nsys"])
def test_a_live_loop_over_a_captured_step_is_recorded_and_the_capture_is_left_alone(tmp_path: Path, mode: str) -> None:
    done = inside(tmp_path, GRAPH, mode=mode, warmup=10, steps=12)
    assert done.stdout == b"40 0 True\n", done.stderr.decode()
    assert not records(tmp_path, "note")
    whole = [step for step in records(tmp_path, "step") if step["o"] == "optimizer" and not step.get("partial")]
    assert len(whole) == 3 + 40
    assert all("graph_replay" in step["p"] for step in whole[3:])
    stops = [(r["window"], r["reason"], r["steps"]) for r in records(tmp_path, "clock") if r["event"] == "stop"]
    assert stops[-1] == ("steps", "complete", 12)  # on a slow machine an early one has ended by its time before
