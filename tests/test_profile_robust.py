"""`gpudiag profile` where things are odd: names that are not UTF-8, full disks, kills, pipes, and names of our own."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpudiag.bundle import SCHEMA, Manifest, read_bundle, write_manifest
from gpudiag.child import own_module
from gpudiag.cli import main
from gpudiag.collect.launch import Outcome
from gpudiag.collect.plan import Plan, make_folder
from gpudiag.collect.privacy import Scrubber
from gpudiag.collect.session import _ending
from gpudiag.collect.torch_profiler import _notes
from gpudiag.errors import GpudiagError
from gpudiag.read.loader_log import Process, ProcessLog
from gpudiag.read.nsys_report import find_nsys

live = pytest.mark.live
PROFILE = own_module("gpudiag", "profile", "--no-save")
TRAIN = """
import sys, torch
net = torch.nn.Linear(8, 8); opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(40):
    opt.zero_grad(); net(torch.randn(4, 8)).sum().backward(); opt.step()
print("done", ascii(sys.argv[1:]))
"""


def environment(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "GPUDIAG_CAPTURE", "RANK")} | more


def run(command: list[str], cwd: Path, stdin: bytes = b"") -> tuple[int, str, str]:
    done = subprocess.run(command, cwd=cwd, env=environment(), input=stdin, capture_output=True, timeout=120)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def driver(code: str, *arguments: str, cwd: Path) -> subprocess.Popen[bytes]:
    """Signals and reaping must not touch the tests' process."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@live
@pytest.mark.parametrize("recorder", ["torch", pytest.param("nsys", marks=pytest.mark.nsys)])
def test_names_that_are_not_utf8_cost_nothing(tmp_path: Path, recorder: str) -> None:
    pytest.importorskip("torch")
    if recorder == "nsys" and find_nsys() is None:
        pytest.skip("no nsys")
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xe9"))
    folder.mkdir()
    script = os.fsdecode(b"caf\xe9.py")
    (folder / script).write_text(TRAIN)
    code, out, err = run([*PROFILE, "--with", recorder, script, os.fsdecode(b"a\xe9")], folder)
    assert (code, out) == (0, "done ['a\\udce9']\n"), err
    (bundle,) = folder.glob("gpudiag-*")
    manifest = read_bundle(bundle).manifest
    assert manifest.command[1:] == ("caf\\udce9.py", "a\\udce9")
    assert [capture.failed for capture in manifest.captures] == [""]
    assert (bundle / "diagnosis.json").is_file()
    follow_ups = [line for line in err.splitlines() if "report.html" in line or "runs show" in line]
    assert len(follow_ups) == 1  # one, which names the folder as a shell takes it
    assert "$'gpudiag-caf\\xe9-" in follow_ups[0]


def test_a_manifest_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest(SCHEMA, "0", ("a",), "now", None, ())
    write_manifest(tmp_path, manifest)

    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_manifest(tmp_path, manifest)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


FULL = """
import sys, errno
from gpudiag.collect import session
kept = session.write_manifest
def write(path, manifest):
    if manifest.captures:
        raise OSError(errno.ENOSPC, "No space left on device")
    kept(path, manifest)
session.write_manifest = write
from gpudiag.cli import main
main(["profile", "--no-save", "--with", "torch", "-o", "b", "--", "sh", "-c", "echo out; exit 5"])
"""


def test_a_disk_that_runs_full_costs_neither_the_exit_code_nor_a_traceback(tmp_path: Path) -> None:
    process = driver(FULL, cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, b"out\n")
    assert b"Traceback" not in err


def test_profiles_that_start_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    plan = Plan("command", ("true",), "torch", tmp_path / "g", any_name=True)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(make_folder, [plan] * 4))
    assert sorted(path.name for path in made) == ["g", "g-2", "g-3", "g-4"]


@live
def test_json_on_stdout_can_be_piped_on(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    command = [*PROFILE, "--with", "torch", "--warmup", "0", "--steps", "1", "--json", "-", "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        piped = subprocess.run(
            [sys.executable, "-m", "json.tool"], stdin=process.stdout, capture_output=True, timeout=100, check=True
        )
        assert process.stderr is not None
        err = process.stderr.read().decode()
    assert "done []" in err
    assert "the script's own goes to stderr" in err
    # and one step of a few milliseconds on a CPU is no basis for "healthy"
    assert json.loads(piped.stdout)["verdict"]["status"] == "cannot_judge"


@live
def test_a_window_that_never_opened_is_said(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    code, _, err = run([*PROFILE, "--with", "torch", "--warmup", "100", "-o", "b", "train.py"], tmp_path)
    assert code == 0
    (capture,) = read_bundle(tmp_path / "b").manifest.captures
    assert "the window never opened: the script took 40 steps, no more than --warmup 100 asks for" in capture.notes[0]
    assert "gpudiag: the window never opened" in err


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome(0, 1.0), []),
        (Outcome(3, 1.0), []),
        (Outcome(137, 1.0, killed_by=9), ["the script was ended by signal 9 (SIGKILL)"]),
        (Outcome(130, 1.0, signals=("SIGINT",), killed_by=2), ["the script was ended by signal 2 (SIGINT)"]),
        (Outcome(9, 1.0, signals=("SIGINT",)), ["the script got SIGINT and ended by itself with exit code 9"]),
        (
            Outcome(137, 1.0, signals=("SIGINT", "SIGINT"), killed_by=9),
            ["the script was ended by signal 9 (SIGKILL), after SIGINT, SIGINT"],
        ),
    ],
)
def test_how_a_script_ended_is_said_as_it_was(outcome: Outcome, said: list[str]) -> None:
    assert list(_ending(outcome)) == said


@pytest.mark.parametrize(
    ("fetches", "said"),
    [([{"k": "fetch", "w": 1}], False), ([{"k": "fetch", "w": -1}], True), ([], True)],
    ids=["a loader's worker", "a loader of its own", "no loader"],
)
def test_work_in_child_processes_is_told_of_unless_they_are_loader_workers(
    fetches: list[dict[str, Any]], said: bool, tmp_path: Path
) -> None:
    main = Process(1, 0, "main", 0, "2.14.1", None, 2, 0, cpu_s=1.0)
    child = Process(2, 1, "spawned", 0, "2.14.1", None, 2, 0, cpu_s=5.0, records={"fetch": fetches})
    notes = _notes(tmp_path, ProcessLog((main, child)), Outcome(0, 1.0))
    assert any("most of the work ran in 1 child process" in note for note in notes) is said


def test_a_script_that_kills_itself_is_said_to_have_been_killed(tmp_path: Path) -> None:
    code, _, err = run([*PROFILE, "--with", "torch", "-o", "b", "--", "sh", "-c", "kill -9 $$"], tmp_path)
    assert code == 137
    assert read_bundle(tmp_path / "b").manifest.warnings == ("the script was ended by signal 9 (SIGKILL)",)
    assert "ended by signal 9 (SIGKILL)" in err


@pytest.mark.parametrize("from_file", [False, True])
def test_every_run_gets_the_same_stdin(tmp_path: Path, from_file: bool) -> None:
    data = b"line\n" * 40_000  # more than a pipe holds
    (tmp_path / "in").write_bytes(b"skipped" + data)
    command = [*PROFILE, "--with", "torch", "--rounds", "2", "-o", "b", "--", "sh", "-c", "head -c 12; echo; wc -c"]
    with (tmp_path / "in").open("rb") as file:
        os.lseek(file.fileno(), 7, os.SEEK_SET)
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(),
            stdin=file if from_file else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, _ = process.communicate(None if from_file else data, timeout=60)
    first, count = b"line\nline\nli\n", b"%d\n" % (len(data) - 12)
    assert out == (first + count) * 2
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["manifest.json", "torch-1", "torch-2"]


def test_a_pipe_that_stays_open_holds_no_run_up(tmp_path: Path) -> None:
    command = [*PROFILE, "--with", "torch", "--rounds", "2", "-o", "b", "--", "echo", "ran"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.wait(60) == 0
    out, _ = process.communicate()
    assert out == b"ran\nran\n"


LAUNCH = """
import os, sys
from gpudiag.collect import launch
outcome = launch.run(lambda: launch.spawn(sys.argv[1:], os.environ))
print(len(outcome.orphans), outcome.killed_by)
"""


def test_multiprocessings_helpers_are_no_orphans(tmp_path: Path) -> None:
    code = (
        "import os; from multiprocessing import forkserver, resource_tracker\n"
        "forkserver.ensure_running(); resource_tracker.ensure_running(); os._exit(0)"
    )
    out, err = driver(LAUNCH, sys.executable, "-c", code, cwd=tmp_path).communicate(timeout=30)
    assert out == b"0 0\n", err


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux'")
def test_a_gpudiag_that_is_killed_takes_the_script_along_by_sigterm(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('term', 'w').close(), os._exit(0)))\n"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    process = driver(LAUNCH, sys.executable, "-c", code, cwd=tmp_path)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
    assert (tmp_path / "term").exists()
    process.communicate()


@pytest.mark.parametrize(
    ("host", "text", "expected"),
    [
        ("vm", "epoch on vm", "epoch on HOST"),
        ("vm", "vm/step svm vmlinux", "HOST/step svm vmlinux"),
        ("vm", "void vm::copy<vm<float>>(vm::x)", "void vm::copy<vm<float>>(vm::x)"),
        ("vm", "log/vm_123.json", "log/HOST_123.json"),
        ("gpu", "gpu busy on ann@gpu", "gpu busy on ann@HOST"),
        ("vm", "--mail=ann.b@corp.example.com", "--mail=EMAIL"),
        ("vm", "git@github.com:a/b capture@gpudiag torch@2.1.0", "git@github.com:a/b capture@gpudiag torch@2.1.0"),
    ],
)
def test_short_hosts_go_where_they_are_words_and_mail_addresses_go(host: str, text: str, expected: str) -> None:
    assert Scrubber("/home/x", "x", host).trace(text) == expected


@pytest.mark.parametrize("option", ["-o", "--perfetto"])
def test_export_does_not_write_a_file_called_dash(tmp_path: Path, option: str) -> None:
    done = CliRunner().invoke(main, ["export", str(tmp_path), option, "-"])
    assert done.exit_code == 2
    assert f"{option} needs the name of a file" in done.output


def test_a_gpudiag_py_of_the_users_is_not_taken_for_the_package(tmp_path: Path) -> None:
    (tmp_path / "gpudiag.py").write_text("raise SystemExit('taken for the package')")
    done = subprocess.run(
        own_module("gpudiag", "--version"),
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("gpudiag ")


def test_metrics_take_list_as_the_other_verbs_do() -> None:
    lists = [CliRunner().invoke(main, ["metrics", *words]) for words in ([], ["list"])]
    assert lists[0].exit_code == 0
    assert lists[0].output == lists[1].output


def test_what_is_no_python_script_is_said_before_it_is_run(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("echo RAN")
    (tmp_path / "b").write_text("#!/bin/sh\necho RAN")
    (tmp_path / "dir").mkdir()
    for name, said in (
        ("a.sh", "not a Python script"),
        ("b", "not a Python script"),
        ("dir", "a folder, not a script"),
    ):
        code, out, err = run([*PROFILE, name], tmp_path)
        assert (code, out, err.count("\n")) == (1, "", 2), err
        assert said in err


def test_a_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, _, err = run([*PROFILE, "--with", "torch", "-o", "b", "-m", "nosuchmod"], tmp_path)
    assert code == 1
    assert "-m nosuchmod ended with exit code 1 and did not import torch" in err


def test_a_folder_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    plan = Plan("command", ("true",), "torch", tmp_path / "g")
    make_folder(plan)
    write_manifest(plan.bundle, Manifest(SCHEMA, "0", ("a",), "now", None, ()))
    with pytest.raises(GpudiagError, match="exists already"):
        make_folder(plan)


@pytest.mark.parametrize(
    "text",
    ["import torch; torch.ones(9).sum()", "", "import torch, os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    ids=["a report", "nothing to judge", "killed"],
)
def test_what_gpudiag_says_begins_on_a_line_of_its_own(text: str, tmp_path: Path) -> None:
    script = tmp_path / "unended.py"
    script.write_text(f"import sys\nsys.stderr.write('no end of line')\nsys.stderr.flush()\n{text}\n")
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
    _, _, said = run([*command, str(script)], tmp_path)
    first, second = said.splitlines()[:2]
    assert first == "no end of line" and second.startswith("gpudiag"), said
