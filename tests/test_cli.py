"""The command line as a whole: lazy verbs, exit codes, errors in two lines."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import gpudiag.cli as cli
from gpudiag import __version__
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
