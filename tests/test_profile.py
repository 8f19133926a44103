"""`gpudiag profile` leaves the script's behaviour alone and a bundle behind, for every shared script."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpudiag.bundle import read_bundle
from gpudiag.commands._sides import load_side
from gpudiag.commands.profile import TargetCommand, profile
from gpudiag.diagnosis import from_json
from gpudiag.read.nsys_report import find_nsys

live = pytest.mark.live
pytest.importorskip("torch")

MEASURED = re.compile(
    r"\d+(?:\.\d+)?(?= ?(?:s|ms|ms/step|%)\b|%)|(?<==)\d+\.\d+(?=s)|\d+\.\d+"
)  # what a script measures


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str
    bundle: Path | None = None

    @property
    def own_words(self) -> str:
        """What the script wrote to stderr: all before the first line of ours, and the end of line that goes before that."""
        return self.err.partition("gpudiag")[0].removesuffix("\n")


def clean_environment(**extra: str) -> dict[str, str]:
    return {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GPUDIAG_CAPTURE", "RANK", "WORLD_SIZE")
    } | extra


def run(command: list[str], cwd: Path, stdin: bytes | None = None, bundle: Path | None = None, **env: str) -> Run:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(**env),
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        timeout=120,
    )
    return Run(done.returncode, done.stdout.decode(), done.stderr.decode(), bundle)


def profiled(words: list[str], cwd: Path, tmp_path: Path, *options: str, stdin: bytes | None = None, **env: str) -> Run:
    bundle = tmp_path / "bundle"
    command = [sys.executable, "-m", "gpudiag", "profile", "--with", "torch", "-o", str(bundle), *options, *words]
    return run(command, cwd, stdin, bundle, **env)


def plain(words: list[str], cwd: Path, stdin: bytes | None = None, **env: str) -> Run:
    return run([sys.executable, *words], cwd, stdin, **env)


def both(words: list[str], cwd: Path, tmp_path: Path) -> tuple[Run, Run]:
    """Side by side, to halve the time: without gpudiag, and with it."""
    with ThreadPoolExecutor() as pool:
        expected, got = pool.submit(plain, words, cwd), pool.submit(profiled, words, cwd, tmp_path)
        return expected.result(), got.result()


def same(text: str) -> str:
    return MEASURED.sub("N", re.sub(r" +(?=\d)", " ", text))  # a longer number has less room before it


EXACT = {
    "exit code and argv": ["18_my project/train me.py", "--name", "a b", "", "--x=1;2", "--", "$HOME", 'ü"q'],
    "spawned processes": ["19_spawn_processes.py"],
    "its own profiler": ["21_own_torch_profiler.py"],
    "as a module": ["-m", "pkg22.train", "--steps", "5"],
    "changes its folder": ["23_changes_cwd.py"],
    "crashes": ["24_crashes_midway.py"],
    "forks and leaves a child": ["27_forks_subprocesses.py"],
}


@live
@pytest.mark.parametrize("words", EXACT.values(), ids=EXACT.keys())
def test_a_script_behaves_as_without_gpudiag(shared: Path, tmp_path: Path, words: list[str]) -> None:
    scripts = shared / "scripts"
    expected, got = both(words, scripts, tmp_path)
    if words == EXACT["spawned processes"]:  # two processes print at once, the text and the end of the line apart
        assert (got.code, sorted(got.out)) == (expected.code, sorted(expected.out))
    else:
        assert (got.code, got.out) == (expected.code, expected.out)
    assert without_kineto(got.own_words) == without_kineto(expected.err)  # the traceback, and nothing of ours in it
    assert got.bundle is not None
    assert read_bundle(got.bundle).manifest.exit_code == expected.code


def under_nsys(words: list[str], cwd: Path, tmp_path: Path, stdin: bytes | None = None) -> Run:
    if find_nsys() is None:
        pytest.skip("nsys is not installed")
    bundle = tmp_path / "bundle"
    command = [sys.executable, "-m", "gpudiag", "profile", "--with", "nsys", "--no-save", "-o", str(bundle), *words]
    return run(command, cwd, stdin, bundle)


@live
@pytest.mark.nsys
@pytest.mark.parametrize("case", EXACT)
def test_a_script_behaves_the_same_under_nsys(shared: Path, tmp_path: Path, case: str) -> None:
    scripts, words = shared / "scripts", EXACT[case]
    expected, got = plain(words, scripts), under_nsys(words, scripts, tmp_path)
    if case == "spawned processes":
        assert (got.code, sorted(got.out)) == (expected.code, sorted(expected.out))
    else:
        assert (got.code, got.out) == (expected.code, expected.out)
    assert without_kineto(got.own_words) == without_kineto(expected.err)
    assert "window never opened" in got.err  # they have fewer steps than the warm-up, and that is said


@live
@pytest.mark.nsys
def test_stdin_is_the_scripts_under_nsys_too(shared: Path, tmp_path: Path) -> None:
    got = under_nsys(["20_reads_stdin.py"], shared / "scripts", tmp_path, b"3\nhello\n")
    assert (got.code, got.out) == (0, "STEPS 3 NOTE hello TTY False\n")


def without_kineto(text: str) -> str:
    """Kineto's own log lines carry a time and a pid, and are silent under gpudiag."""
    return "".join(
        line for line in text.splitlines(True) if not re.match(r"(?:USDT|ERROR|WARNING|INFO|STAGE):20", line)
    )


TIMED = {
    "slow samples": ["01_slow_getitem.py"],
    "workers start again": ["02_worker_restart_every_epoch.py"],
    "no torch": ["08_sync_is_not_the_culprit.py"],
    "checkpoints": ["13_checkpoint_pauses.py"],
    "logging": ["16_logging_every_step.py"],
}


@live
@pytest.mark.parametrize("words", TIMED.values(), ids=TIMED.keys())
def test_a_script_that_prints_times_prints_the_same_but_for_them(
    shared: Path, tmp_path: Path, words: list[str]
) -> None:
    scripts = shared / "scripts"
    expected, got = both(words, scripts, tmp_path)
    assert (got.code, same(got.out)) == (expected.code, same(expected.out))


@live
@pytest.mark.slow
@pytest.mark.parametrize("script", ["04_in_memory_collate.py", "10_many_small_params.py"])
def test_a_heavy_script_prints_the_same_but_for_times(shared: Path, tmp_path: Path, script: str) -> None:
    scripts = shared / "scripts"
    expected, got = both([script], scripts, tmp_path)
    assert (got.code, same(got.out)) == (expected.code, same(expected.out))


@live
@pytest.mark.parametrize(
    ("stdin", "printed"), [(b"3\nhello\n", "STEPS 3 NOTE hello TTY False\n"), (None, "STEPS 2 NOTE none TTY False\n")]
)
def test_stdin_is_the_scripts(shared: Path, tmp_path: Path, stdin: bytes | None, printed: str) -> None:
    got = profiled(["20_reads_stdin.py"], shared / "scripts", tmp_path, stdin=stdin)
    assert (got.code, got.out) == (0, printed)


@live
@pytest.mark.parametrize(("name", "code"), [("INT", 130), ("TERM", 143)])
def test_an_endless_script_ends_on_a_signal_and_leaves_a_recording(
    shared: Path, tmp_path: Path, name: str, code: int
) -> None:
    bundle = tmp_path / "bundle"
    command = [sys.executable, "-m", "gpudiag", "profile", "--with", "torch", "-o", str(bundle)]
    process = subprocess.Popen(
        [*command, str(shared / "scripts/25_infinite_loop.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"step 50\n"
    os.killpg(process.pid, getattr(signal, f"SIG{name}"))
    process.communicate(timeout=60)
    assert process.returncode == code
    (capture,) = read_bundle(bundle).manifest.captures
    assert capture.files["trace"] == ["torch/rank0.kineto.json.gz"]
    assert not capture.failed


@live
@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_a_script_that_saves_on_a_signal_gets_it_once_and_the_time_to_save(
    shared: Path, tmp_path: Path, name: str
) -> None:
    command = [sys.executable, "-m", "gpudiag", "profile", "--with", "torch", "-o", str(tmp_path / "bundle")]
    process = subprocess.Popen(
        [*command, str(shared / "scripts/28_sigint_saves_checkpoint.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
        start_new_session=True,
    )
    log = tmp_path / "bundle/torch"
    while not any(log.glob("recording.*")):
        if process.poll() is not None:
            break
        os.sched_yield()

    time.sleep(2.0)  # the script sets its handlers up after it has imported torch
    number = getattr(signal, f"SIG{name}")
    os.kill(process.pid, number)
    os.killpg(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, b"SAVED step True signals 1\n")


TRAIN = """
import sys, torch
net = torch.nn.Linear(8, 8); opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(int(sys.argv[1])):
    opt.zero_grad(); net(torch.randn(4, 8)).sum().backward(); opt.step()
    if len(sys.argv) > 2 and i == int(sys.argv[2]): raise ValueError("shape")
print("done")
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return script


@live
def test_the_window_has_the_steps_that_were_asked_for(train: Path, tmp_path: Path) -> None:
    got = profiled([str(train), "60"], tmp_path, tmp_path, "--warmup", "10", "--steps", "7")
    assert got.code == 0
    assert got.bundle is not None

    trace = json.loads(gzip.decompress((got.bundle / "torch/rank0.kineto.json.gz").read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert len([name for name in names if name.startswith("gpudiag::step#")]) == 7
    for phase in ("zero_grad", "forward", "backward", "optimizer"):
        assert names.count(f"gpudiag::{phase}") == 7
    (capture,) = read_bundle(got.bundle).manifest.captures
    assert capture.plain_step_ns and capture.recorded_step_ns


@live
def test_a_crash_before_the_window_still_leaves_a_trace_and_a_clean_traceback(train: Path, tmp_path: Path) -> None:
    got = profiled([str(train), "60", "2"], tmp_path, tmp_path)
    assert got.code == 1
    assert "ValueError: shape" in got.own_words
    assert "inject" not in got.own_words
    assert got.bundle is not None
    assert (got.bundle / "torch/rank0.kineto.json.gz").is_file()


@live
def test_stop_after_capture_ends_the_script_and_counts_as_done(train: Path, tmp_path: Path) -> None:
    got = profiled([str(train), "100000000"], tmp_path, tmp_path, "--stop-after-capture")
    assert (got.code, got.out) == (0, "")


@live
def test_json_on_stdout_is_alone_there_and_the_scripts_own_output_is_on_stderr(train: Path, tmp_path: Path) -> None:
    got = profiled([str(train), "60"], tmp_path, tmp_path, "--json", "-")
    assert json.loads(got.out)["schema"] == "gpudiag.diagnosis/1"
    assert "done\n" in got.err


@live
def test_a_shell_script_and_every_rank_of_torchrun_are_reached(train: Path, tmp_path: Path) -> None:
    shell = tmp_path / "run.sh"
    shell.write_text(f'exec "{sys.executable}" -m torch.distributed.run --nproc-per-node 2 "$@"\n')
    got = profiled(["--", "bash", str(shell), str(train), "60"], tmp_path, tmp_path)
    assert (got.code, got.out) == (0, "done\ndone\n")
    assert got.bundle is not None
    (capture,) = read_bundle(got.bundle).manifest.captures
    assert capture.files["trace"] == ["torch/rank0.kineto.json.gz", "torch/rank1.kineto.json.gz"]


def complaint(words: list[str], tmp_path: Path) -> tuple[int, str]:
    got = run([sys.executable, "-m", "gpudiag", "profile", *words], tmp_path)
    return got.code, got.err


def test_what_cannot_work_is_said_before_the_script_starts(tmp_path: Path) -> None:
    script = tmp_path / "ran.py"
    script.write_text("print('RAN')")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    for words, code, said in (
        ([], 2, "nothing to run"),
        (["absent.py"], 1, "no such script"),
        (["--python", "nopython", "ran.py"], 1, "no such interpreter"),
        (["--", "nocommand"], 1, "no such command"),
        (["-o", "taken", "ran.py"], 1, "exists already"),
        (["-o", "taken", "--force", "ran.py"], 1, "will not delete"),
        (["-o", "ran.py/x", "ran.py"], 1, "cannot be written"),
    ):
        got, err = complaint(words, tmp_path)
        assert (got, said in err) == (code, True), err
        assert "RAN" not in err
    assert (taken / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "kind", "rest"),
    [
        (["--steps", "3", "train.py", "--steps", "5", "-o", "x"], "script", ("train.py", "--steps", "5", "-o", "x")),
        (["-m", "pkg.train", "--warmup", "1"], "module", ("pkg.train", "--warmup", "1")),
        (["--force", "-mpkg"], "module", ("pkg",)),
        (["--with=torch", "--", "torchrun", "-m", "x", "--", "y"], "command", ("torchrun", "-m", "x", "--", "y")),
        (["-o", "dir", "a.py", "--", "-m"], "script", ("a.py", "--", "-m")),
    ],
)
def test_what_follows_the_target_is_never_taken_for_an_option(
    words: list[str], kind: str, rest: tuple[str, ...]
) -> None:
    assert isinstance(profile, TargetCommand)
    context = profile.make_context("profile", list(words))
    target = context.meta["gpudiag.target"]
    assert (target.kind, target.words) == (kind, rest)


@live
def test_several_rounds_leave_a_bundle_that_is_judged_by_the_median_one(train: Path, tmp_path: Path) -> None:
    got = profiled([str(train), "40"], tmp_path, tmp_path, "--rounds", "3", "--warmup", "5", "--steps", "10")
    assert (got.code, got.out) == (0, "done\n" * 3)
    assert got.bundle is not None
    captures = read_bundle(got.bundle).manifest.captures
    assert [(c.name, c.kind) for c in captures] == [("torch-1", "torch"), ("torch-2", "torch"), ("torch-3", "torch")]
    middle = sorted(captures, key=lambda capture: capture.recorded_step_ns or 0)[1]
    said = [
        warning for warning in from_json((got.bundle / "diagnosis.json").read_bytes()).warnings if "judged" in warning
    ]
    assert len(said) == 1
    assert f"({middle.name}), the median by step time" in said[0]
    assert [len(diagnosis.accounts) for diagnosis in load_side([got.bundle], lambda _text: None)] == [1, 1, 1]


@live
def test_a_script_that_fails_is_not_run_again(train: Path, tmp_path: Path) -> None:
    got = profiled([str(train), "40", "20"], tmp_path, tmp_path, "--rounds", "3", "--warmup", "5", "--steps", "10")
    assert got.code == 1
    assert "ended with exit code 1: 2 of 3 runs left out" in got.err
