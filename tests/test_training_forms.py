"""Forms that a training step takes, each profiled live: what is one step, and which phase its time belongs to."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_profile import profiled

from gpudiag.bundle import read_bundle
from gpudiag.diagnosis import Diagnosis, from_json
from gpudiag.read import open_bundle
from gpudiag.timeline import Timeline

pytest.importorskip("torch")
pytestmark = pytest.mark.live
HEAD = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
"""


@dataclass(frozen=True)
class Seen:
    """records: of the training process. steps: those that an optimizer ended, whole ones only."""

    out: str
    records: list[dict[str, Any]]
    timeline: Timeline
    diagnosis: Diagnosis

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [r for r in self.records if r["k"] == "step" and r["o"] == "optimizer" and not r.get("partial")]

    @property
    def phases(self) -> Counter[str]:
        return Counter(phase for step in self.steps for phase in step["p"])

    @property
    def parts(self) -> set[str]:
        return set(self.diagnosis.accounts[0].parts)


def seen(code: str, tmp_path: Path, **env: str) -> Seen:
    script = tmp_path / "train.py"
    script.write_text(HEAD + textwrap.dedent(code))
    got = profiled([str(script)], tmp_path, tmp_path, "--warmup", "3", "--steps", "8", "--no-save", **env)
    assert got.code == 0, got.err
    assert got.bundle is not None
    (log,) = (got.bundle / "torch").glob("rank0.*.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert not [record for record in records if record["k"] == "note"]
    (timeline,) = open_bundle(read_bundle(got.bundle)).timelines
    return Seen(got.out, records, timeline, from_json((got.bundle / "diagnosis.json").read_bytes()))


def test_accumulated_gradients_make_one_step_of_several_batches(tmp_path: Path) -> None:
    code = """
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in range(60):
            net(torch.randn(8, 16)).square().mean().backward()
            if batch % 4 == 3:
                opt.step(); opt.zero_grad()
    """
    got = seen(code, tmp_path)
    assert len(got.steps) == 15
    assert got.phases["forward"] == got.phases["backward"] == got.phases["optimizer"] == 15
    assert got.diagnosis.steps.count >= 4  # of 8 recorded, less what a busy machine makes look like warm-up


def test_a_gradient_scaler_steps_through_to_its_optimizer_unless_it_skips(tmp_path: Path) -> None:
    code = """
        opt = torch.optim.AdamW(net.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(20):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(torch.randn(8, 16)).float().mean()
            scaler.scale(loss * (float("inf") if step == 5 else 1.0)).backward()
            scaler.step(opt); scaler.update()
        print("scale", scaler.get_scale())
    """
    got = seen(code, tmp_path)
    assert got.out == "scale 2.0\n"  # one step had infinite gradients: the scaler left it out
    assert len(got.steps) == 19


def test_an_optimizer_with_a_closure_is_one_step_and_the_passes_inside_keep_their_names(tmp_path: Path) -> None:
    code = """
        opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
        x, y = torch.randn(64, 16), torch.randn(64, 1)
        def closure():
            opt.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            return loss
        for step in range(15):
            opt.step(closure)
    """
    got = seen(code, tmp_path)
    assert len(got.steps) == 15
    assert {"host.forward", "host.backward", "host.optimizer"} <= got.parts
    account = got.diagnosis.accounts[0]
    assert account.parts["host.optimizer"] < 0.9 * account.total_ns


def test_two_optimizers_in_turn_make_one_step(tmp_path: Path) -> None:
    code = """
        critic = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        for_net, for_critic = (torch.optim.Adam(m.parameters()) for m in (net, critic))
        for step in range(20):
            made = net(torch.randn(8, 16))
            for_critic.zero_grad()
            (critic(made.detach()).mean() - critic(torch.randn(8, 1)).mean()).backward()
            for_critic.step()
            for_net.zero_grad()
            (-critic(made).mean()).backward()
            for_net.step()
    """
    got = seen(code, tmp_path)
    assert len(got.steps) == 20
    assert got.diagnosis.steps.count >= 4  # of 8 recorded, less what a busy machine makes look like warm-up


def test_validation_between_the_steps_is_no_training(tmp_path: Path) -> None:
    code = """
        import time
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.randn(96, 16), torch.randn(96, 1))
        class Slow(TensorDataset):
            def __getitem__(self, index):
                time.sleep(0.002)
                return super().__getitem__(index)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        train, held_out = DataLoader(data, batch_size=16), DataLoader(Slow(*data.tensors), batch_size=32)
        for epoch in range(4):
            net.train()
            for x, y in train:
                opt.zero_grad(); (net(x) - y).square().mean().backward(); opt.step()
            net.eval()
            for x, y in held_out:
                with torch.no_grad():
                    net(x)
    """
    got = seen(code, tmp_path)
    assert len(got.steps) == 24
    evaluated = [step["p"] for step in got.steps if "eval" in step["p"]]
    assert len(evaluated) == 3  # the last has no step after it
    # its waits for data too: what a loader is for is known from its first batch on
    for phases in evaluated[1:]:
        assert phases["eval"] > 96 * 2_000_000
        assert phases["data_wait"] < 0.5 * phases["eval"]
    assert got.diagnosis.accounts[0].parts["host.input"] < 0.5 * 96 * 2_000_000
    batches = Counter(record["l"] for record in got.records if record["k"] == "batch")
    assert batches == {0: 24, 1: 12}


def test_a_recompilation_is_counted_with_its_line_and_its_reason(tmp_path: Path) -> None:
    code = """
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        @torch.compile(backend="eager")
        def loss_of(x, scale):
            return (net(x) * scale).mean()
        for step in range(12):
            opt.zero_grad()
            loss_of(torch.ones(4, 16), step // 4 + 2).backward()
            opt.step()
    """
    got = seen(code, tmp_path)
    again = [record for record in got.records if record["k"] == "recompile"]
    line = (
        (tmp_path / "train.py")
        .read_text()
        .splitlines()
        .index("    loss_of(torch.ones(4, 16), step // 4 + 2).backward()")
    )
    assert again
    assert {record["where"] for record in again} == {f"train.py:{line + 1}"}
    assert all(record["what"] == "loss_of" and "scale == 2" in record["reason"] for record in again[:1])
    (site,) = (site for site in got.timeline.sites if site.kind == "compile" and site.detail)
    assert site.where == f"train.py:{line + 1}"
    assert site.count == len(again) + 1
    assert site.detail.startswith("loss_of: scale")


def test_a_script_for_cuda_graphs_runs_as_without_us_where_there_is_no_gpu(tmp_path: Path) -> None:
    code = """
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        graph = torch.cuda.CUDAGraph if hasattr(torch.cuda, "CUDAGraph") else None
        refused = False
        for step in range(15):
            try:
                with torch.cuda.graph(graph()):
                    net(torch.randn(8, 16))
            except (RuntimeError, AssertionError) as error:
                refused = bool(str(error))
            opt.zero_grad(); net(torch.randn(8, 16)).mean().backward(); opt.step()
        print("refused", refused)
    """
    got = seen(code, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert got.out == "refused True\n"
    assert len(got.steps) == 15
