"""The command line as a whole: lazy verbs, exit codes, errors in two lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import sample_diagnosis
from click.testing import CliRunner

import gpudiag.cli as cli
from gpudiag import __version__
from gpudiag.diagnosis import to_json
from gpudiag.errors import GpudiagError

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], object]:
    """Runs a function as the body of a verb and returns click's result."""

    def run(body: Callable[[], object]) -> object:
        monkeypatch.setattr(cli.Verbs, "get_command", lambda *_: click.Command("try", callback=body))
        return CliRunner().invoke(cli.main, ["try"])

    return run


def test_help_lists_the_verbs_that_exist_and_ends_with_examples() -> None:
    result = CliRunner().invoke(cli.main, ["--help"])
    assert result.exit_code == 0
    assert "analyze  " in result.stdout and "report  " in result.stdout
    assert result.stdout.rstrip().splitlines()[-1].startswith("    gpudiag ")


def test_every_verb_is_described_and_can_be_loaded_and_its_help_ends_with_an_example() -> None:
    assert list(cli.ABOUT) == list(cli.LAZY)
    context = click.Context(cli.main)
    for name in cli.main.list_commands(context):
        result = CliRunner().invoke(cli.main, [name, "--help"])
        assert result.exit_code == 0, result.output
        assert any(line.strip() in ("Example:", "Examples:") for line in result.stdout.splitlines()[-8:]), name


def test_version() -> None:
    assert CliRunner().invoke(cli.main, ["--version"]).stdout == f"gpudiag {__version__}\n"


def test_an_unknown_verb_or_option_is_a_usage_error() -> None:
    for arguments in (["no-such-verb"], ["analyze", "--no-such-option"], ["analyze"]):
        result = CliRunner().invoke(cli.main, arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("Usage: ")


def test_the_users_problem_is_two_lines_and_exit_code_1(verb: Callable[..., click.testing.Result]) -> None:
    def body() -> None:
        raise GpudiagError("a\x1b[31m.sqlite: no kernel\ntable", "record with --trace=cuda")

    result = verb(body)
    assert result.exit_code == 1
    assert result.stderr == "gpudiag: a\\x1b[31m.sqlite: no kernel table\n  next: record with --trace=cuda\n"
    assert result.stdout == ""


def test_a_bug_keeps_its_traceback(verb: Callable[..., click.testing.Result]) -> None:
    result = verb(lambda: 1 / 0)
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_verb_ends_with_the_code_it_asks_for(verb: Callable[..., click.testing.Result]) -> None:
    assert verb(lambda: click.get_current_context().exit(3)).exit_code == 3
    assert verb(lambda: sys.exit(77)).exit_code == 77
    assert verb(lambda: None).exit_code == 0


def test_ctrl_c_ends_with_130_and_no_traceback(verb: Callable[..., click.testing.Result]) -> None:
    def body() -> None:
        signal.raise_signal(signal.SIGINT)

    result = verb(body)
    assert result.exit_code == 130
    assert result.stderr.strip() == "gpudiag: interrupted"


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """`gpudiag report --json-schema - | head -1`: the rest is not wanted, and nobody complains."""
    call = [sys.executable, "-m", "gpudiag", "report", "--json-schema", "-"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        stderr = process.stderr.read()
        process.wait(timeout=30)
    assert process.returncode == 141
    assert stderr == b""


@pytest.mark.parametrize("arguments", [["--no-color", "try"], ["try", "--no-color"]])
def test_no_color_holds_before_and_after_the_verb(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from gpudiag.commands._common import no_color_option, wants_colour

    class Terminal:
        def isatty(self) -> bool:
            return True

    seen = []
    command = no_color_option(click.command("try")(lambda: seen.append(wants_colour(Terminal()))))  # type: ignore[arg-type]
    monkeypatch.setattr(cli.Verbs, "get_command", lambda *_: command)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert CliRunner().invoke(cli.main, ["try"]).exit_code == 0
    assert CliRunner().invoke(cli.main, arguments).exit_code == 0
    monkeypatch.setenv("NO_COLOR", "1")
    assert CliRunner().invoke(cli.main, ["try"]).exit_code == 0
    assert seen == [True, False, False]


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    text = f'gpudiag() {{ "{sys.executable}" -m gpudiag "$@"; }}; cd "{folder}"; {command}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["bash", "-c", text], capture_output=True, timeout=60, env=environment)


def test_a_full_device_is_the_users_problem(tmp_path: Path) -> None:
    ended = shell("gpudiag rules list > /dev/full", tmp_path)
    assert (ended.returncode, ended.stderr.count(b"\n")) == (1, 2)
    assert ended.stderr.startswith(b"gpudiag: cannot write the output: No space left on device\n")


def test_a_closed_stdout_swallows_the_report_but_not_what_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_bytes(to_json(sample_diagnosis.healthy()))
    ended = shell("gpudiag report d.json --html page.html >&-", tmp_path)
    assert (ended.returncode, ended.stderr) == (0, b"gpudiag: wrote page.html\n")
    assert b"<html" in (tmp_path / "page.html").read_bytes()  # not into the descriptor that was free
    assert shell("gpudiag report d.json >&-", tmp_path).returncode == 0
    ended = shell("gpudiag report d.json --json - >&-", tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith(b"gpudiag: standard output is closed")
    assert shell("gpudiag report d.json 2>&-", tmp_path).stdout.startswith(b"gpudiag ")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("ln -s loop loop; gpudiag analyze loop", b"gpudiag: loop: "),
        ("mkfifo f; gpudiag analyze f", b"gpudiag: f: "),
        ("mkfifo f; gpudiag report f", b"gpudiag: f: not a file"),
        ("gpudiag report <(cat d.json)", b"not a file"),
        ("mkfifo f; gpudiag report d.json --html f", b"gpudiag: cannot write f: a pipe that nobody reads"),
    ],
)
def test_what_is_no_file_is_refused_in_two_lines_and_nothing_hangs(tmp_path: Path, command: str, said: bytes) -> None:
    (tmp_path / "d.json").write_bytes(to_json(sample_diagnosis.healthy()))
    ended = shell(command, tmp_path)
    assert ended.returncode == 1
    assert said in ended.stderr and ended.stderr.count(b"\n") == 2, ended.stderr


def test_a_report_goes_through_a_pipe_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_bytes(to_json(sample_diagnosis.healthy()))
    ended = shell("mkfifo f; cat f > copy & gpudiag report d.json --json f; wait", tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "d.json").read_bytes()
