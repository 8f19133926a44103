"""The facts of the manifest: CPU quotas, the target interpreter, debug switches, git; and what must not be in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.collect.environment import cpu_quota, debug_switches, describe, target_python, usable_cpus
from gpudiag.collect.privacy import Scrubber, is_secret_name, mask_command

SCRUB = Scrubber("/home/alice", "alice", "node17.lab")


def files(root: Path, **contents: str) -> Path:
    for name, text in contents.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_cgroup_v2_quota_of_an_ancestor_holds_for_its_children(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        proc__self__cgroup="0::/pod/app\n",
        sys__fs__cgroup__podDOTslice="",
        sys__fs__cgroup__pod__cpuDOTmax="150000 100000\n",
        sys__fs__cgroup__pod__app__cpuDOTmax="max 100000\n",
    )
    assert cpu_quota(root) == 1.5


def test_a_container_on_cgroup_v2_sees_its_quota_at_the_root(tmp_path: Path) -> None:
    root = files(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpuDOTmax="50000 100000\n")
    assert cpu_quota(root) == 0.5
    assert usable_cpus(root) == 0.5


def test_a_container_on_cgroup_v1_whose_path_is_the_hosts_reads_the_mount_root(tmp_path: Path) -> None:
    root = files(
        tmp_path,
        proc__self__cgroup="3:cpu,cpuacct:/docker/0123abcd\n2:memory:/docker/0123abcd\n",
        **{
            "sys__fs__cgroup__cpu,cpuacct__cpuDOTcfs_quota_us": "200000\n",
            "sys__fs__cgroup__cpu,cpuacct__cpuDOTcfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(root) == 2.0


@pytest.mark.parametrize("text", ["max 100000\n", "", "garbage\n", "-1 100000\n", "100 0\n"])
def test_no_quota_or_an_unreadable_one_is_none_and_affinity_decides(tmp_path: Path, text: str) -> None:
    root = files(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpuDOTmax=text)
    assert cpu_quota(root) is None
    assert usable_cpus(root) == len(os.sched_getaffinity(0))


def test_affinity_limits_the_usable_cpus() -> None:
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\nfrom gpudiag.collect.environment import usable_cpus\nprint(usable_cpus())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert float(done.stdout) <= 1.0, done.stderr


def test_the_target_interpreter_says_its_torch_without_importing_it() -> None:
    facts = target_python()
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    try:
        from importlib.metadata import version

        assert facts["torch"].split("+")[0] == version("torch").split("+")[0]
    except ImportError:
        assert facts["torch"] is None


def test_an_interpreter_without_torch_says_none(tmp_path: Path) -> None:
    shim = tmp_path / "python"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    shim.chmod(0o755)
    assert target_python(shim)["torch"] is None and "problem" not in target_python(shim)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo hello", "no Python that answers"),
        ("exit 3", "no Python that answers"),
        ("echo '[1]'", "no Python that answers"),
        ("sleep 5", "no answer in 1 s"),
        (None, "does not run"),
    ],
)
def test_an_interpreter_that_is_none_gives_a_reason(tmp_path: Path, body: str | None, words: str) -> None:
    shim = tmp_path / "python"
    if body is not None:
        shim.write_text(f"#!/bin/sh\n{body}\n")
        shim.chmod(0o755)
    facts = target_python(shim, timeout_s=1)
    assert words in facts["problem"] and facts["torch"] is None


def test_debug_switches_count_only_when_they_are_on() -> None:
    env = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_DEBUG": "WARN", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PYTHONDEVMODE": ""}
    assert debug_switches(env) == ("CUDA_LAUNCH_BLOCKING=1", "TORCH_DISTRIBUTED_DEBUG=DETAIL")
    assert debug_switches({"CUDA_LAUNCH_BLOCKING": "0", "NVIDIA_TF32_OVERRIDE": "1"}) == ()


def test_git_gives_commit_and_dirty_flag_and_no_name_or_address(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=Alice", "-c", "user.email=a@b.c"]
        return subprocess.run(["git", "-C", tmp_path, *identity, *arguments], capture_output=True, text=True).stdout

    script = tmp_path / "train.py"
    assert describe(script=script)["git"] is None
    git("init")
    script.write_text("pass\n")
    git("add", "train.py")
    git("commit", "-m", "x")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "untracked").write_text("")
    assert describe(script=script)["git"] == {"commit": commit, "dirty": False}
    script.write_text("pass # changed\n")
    assert describe(script=script)["git"] == {"commit": commit, "dirty": True}


def test_no_variable_outside_the_allow_list_reaches_the_manifest() -> None:
    facts = describe(env={"WANDB_API_KEY": "s3cr3t", "HOME": "/home/alice", "OMP_NUM_THREADS": "4"})
    assert facts["variables"] == {"OMP_NUM_THREADS": "4"}
    assert "s3cr3t" not in json.dumps(facts)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["t.py", "--hf-token", "abc"], ("t.py", "--hf-token", "***")),
        (["t.py", "--hf_token=abc"], ("t.py", "--hf_token=***")),
        (["env", "WANDB_API_KEY=abc", "python"], ("env", "WANDB_API_KEY=***", "python")),
        (["logger.apiKey=abc"], ("logger.apiKey=***",)),
        (["--password", "--verbose"], ("--password", "--verbose")),
        (["--max-tokens", "512", "--tokenizer=gpt2", "--pad-token", "<pad>"],) * 2,
        (["--sort-key", "name", "--lr=1e-3", "", "a b"],) * 2,
        (["--url", "https://bob:pw1@host/x?token=abc&n=1"], ("--url", "https://***@host/x?token=***&n=1")),
        (["hf_ABCDEFGHIJKLMNOPQRST"], ("***",)),
        (["--header", "Authorization: Bearer abcdefgh12345"], ("--header", "Authorization: Bearer ***")),
        (["/home/alice/p/t.py", "--data=/home/bob/d"], ("~/p/t.py", "--data=/home/USER/d")),
        (["--out=/scratch/alice/run1", "alice@node17.lab:x"], ("--out=/scratch/USER/run1", "USER@HOST:x")),
        (["malice.py", "/data/alices", "/home/alicette/x"], ("malice.py", "/data/alices", "/home/USER/x")),
    ],
)
def test_command_lines_keep_their_meaning_and_lose_their_secrets(argv: list[str], expected: tuple[str, ...]) -> None:
    assert SCRUB.command(argv) == tuple(expected)


def test_masking_twice_changes_nothing_more() -> None:
    argv = ["/home/alice/t.py", "--token=a", "API_KEY=b", "/home/bob/x", "https://u:p@h/"]
    assert SCRUB.command(SCRUB.command(argv)) == SCRUB.command(argv)


@given(st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=4, max_size=30))
def test_a_value_after_a_secret_name_never_survives(value: str) -> None:
    value = "Zq" + value  # cannot be a part of the option names
    for argv in (
        ["--api-key", value],
        [f"--api-key={value}"],
        [f"DB_PASSWORD={value}"],
        [f"x://h/?access_token={value}"],
    ):
        assert value not in " ".join(SCRUB.command(argv))


def test_a_user_called_root_or_nobody_at_all_spoils_no_text() -> None:
    for scrub in (Scrubber("/root", "root", "localhost"), Scrubber("/", "", "")):
        assert scrub.text("/usr/root/lib the root localhost") == "/usr/root/lib the root localhost"
    assert Scrubber("/root", "root", "x").text("/root/a /rooted/b") == "~/a /rooted/b"


def test_own_home_is_masked_on_this_machine() -> None:
    assert mask_command([Path.home() / "train.py"]) == ("~/train.py",)


def test_secret_names() -> None:
    assert all(map(is_secret_name, ("--token", "HF_TOKEN", "db.password", "awsSecretAccessKey", "ssh-key", "AUTH")))
    assert not any(map(is_secret_name, ("tokens", "--key", "author", "mask_token", "", "--", "num_keys")))


def test_secrets_in_json_and_logs_are_masked_and_long_text_is_quick() -> None:
    assert (
        SCRUB.text('{"api_key": "abc", "lr": 1, "HF_TOKEN":"xyz"}') == '{"api_key": "***", "lr": 1, "HF_TOKEN":"***"}'
    )
    assert SCRUB.text("x:token=abc password: hunter2, steps=3") == "x:token=*** password: ***, steps=3"
    assert SCRUB.text("a" * 300_000 + "=" * 1000).startswith("aaa")
