"""`gpudiag analyze` and `gpudiag report`: what they read, write, refuse and how they exit."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sample_diagnosis
from click.testing import CliRunner, Result

from gpudiag.cli import main
from gpudiag.diagnosis import Diagnosis, from_json, to_json
from gpudiag.errors import GpudiagError

ROOT = Path(__file__).resolve().parents[1]
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a verb in an empty folder, with a pipeline that returns `diagnosis`; `run.calls` are the paths that it was given."""
    calls: list[tuple[Path, ...]] = []
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, diagnosis: Diagnosis | None = None, fails: Exception | None = None) -> Result:
        def diagnose(paths: Sequence[Path], *, rules_dirs: Sequence[Path] = (), progress: object = None) -> Diagnosis:
            calls.append(tuple(paths))
            if fails is not None:
                raise fails
            return diagnosis or sample_diagnosis.bottleneck()

        pipeline = types.ModuleType("gpudiag.pipeline")
        pipeline.diagnose = diagnose  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "gpudiag.pipeline", pipeline)
        return CliRunner().invoke(main, list(arguments))

    call.calls = calls  # type: ignore[attr-defined]
    return call


def test_the_report_goes_to_stdout_and_nothing_to_stderr_in_a_pipe(run: Run) -> None:
    result = run("analyze", "trace.json.gz")
    assert result.exit_code == 0
    assert "INPUT-BOUND" in result.stdout
    assert result.stderr == ""


def test_json_on_stdout_is_alone_there(run: Run) -> None:
    result = run("analyze", "trace.json.gz", "--json", "-")
    assert from_json(result.stdout_bytes) == sample_diagnosis.bottleneck()
    assert result.stderr == ""


def test_every_output_is_written_beside_the_report(run: Run) -> None:
    pytest.importorskip("gpudiag.report.html")
    result = run(
        "analyze", "t.gz", "--json", "d.json", "--html", "r.html", "--markdown", "c.md", "--sarif", "s.sarif",
        "--junit", "j.xml", "--csv", "tables/deep",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "INPUT-BOUND" in result.stdout
    assert {str(p) for p in Path().rglob("*") if p.is_file()} == {
        "d.json", "r.html", "c.md", "s.sarif", "j.xml",
        "tables/deep/kernels.csv", "tables/deep/steps.csv", "tables/deep/account.csv",
    }  # fmt: skip
    assert result.stderr.count("gpudiag: wrote ") == 8


@pytest.mark.parametrize(
    ("make", "fail_on", "code"),
    [
        (sample_diagnosis.bottleneck, "critical", 3),
        (sample_diagnosis.bottleneck, "info", 3),
        (sample_diagnosis.healthy, "info", 0),
        (sample_diagnosis.cannot_judge, "critical", 4),
    ],
)
def test_the_gate_decides_the_exit_code(run: Run, make: Callable[[], Diagnosis], fail_on: str, code: int) -> None:
    result = run("analyze", "t.gz", "--fail-on", fail_on, diagnosis=make())
    assert result.exit_code == code
    assert bool(result.stderr) == bool(code)


def test_without_a_gate_a_bottleneck_is_no_failure(run: Run) -> None:
    assert run("analyze", "t.gz", diagnosis=sample_diagnosis.cannot_judge()).exit_code == 0


def test_a_finding_below_the_gate_or_explained_by_another_does_not_fail_it(run: Run) -> None:
    small = sample_diagnosis.finding(severity="info")
    effect = sample_diagnosis.finding("gpu_idle", severity="critical", caused_by="loader_wait")
    diagnosis = sample_diagnosis.bottleneck(findings=(small, effect))
    assert run("analyze", "t.gz", "--fail-on", "warning", diagnosis=diagnosis).exit_code == 0


def test_the_gate_names_what_failed_it(run: Run) -> None:
    result = run("analyze", "t.gz", "--fail-on", "warning")
    assert result.stderr == "gpudiag: gate failed at --fail-on warning: loader_wait (critical)\n"


def test_reports_are_written_before_the_gate_fails(run: Run) -> None:
    assert run("analyze", "t.gz", "--fail-on", "info", "--json", "d.json").exit_code == 3
    assert from_json(Path("d.json").read_bytes()).findings


def test_an_error_of_the_pipeline_leaves_no_output_behind(run: Run) -> None:
    result = run("analyze", "t.gz", "--json", "d.json", fails=GpudiagError("t.gz: truncated", "copy it again"))
    assert result.exit_code == 1
    assert result.stderr == "gpudiag: t.gz: truncated\n  next: copy it again\n"
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("target", ["no/such/folder/d.json", "folder", "/proc/d.json"])
def test_a_place_that_cannot_be_written_is_said_before_the_analysis(run: Run, target: str) -> None:
    Path("folder").mkdir()
    result = run("analyze", "t.gz", "--json", target)
    assert result.exit_code == 1
    assert target in result.stderr and "  next: " in result.stderr
    assert run.calls == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze", "t.gz", "--json", "-", "--markdown", "-"],
        ["analyze", "t.gz", "--json", "a", "--markdown", "./a"],
        ["analyze", "t.gz", "--json", "t.gz"],
    ],
)
def test_outputs_that_would_destroy_each_other_or_the_input_are_a_usage_error(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert run.calls == []  # type: ignore[attr-defined]


def test_an_output_may_be_a_device(run: Run) -> None:
    assert run("analyze", "t.gz", "--json", "/dev/null").exit_code == 0


def test_a_failed_write_keeps_the_old_file(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("d.json").write_text("old")
    real = Path.write_bytes

    def full_disk(self: Path, data: bytes) -> int:
        real(self, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    result = run("analyze", "t.gz", "--json", "d.json")
    assert result.exit_code == 1
    assert "cannot write d.json: No space left on device" in result.stderr
    assert Path("d.json").read_text() == "old"
    assert [p.name for p in Path().iterdir()] == ["d.json"]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_saved_diagnosis_is_drawn_again_without_the_pipeline(run: Run, shuffled: bool) -> None:
    data = to_json(sample_diagnosis.bottleneck())
    if shuffled:  # as another program would write it
        data = json.dumps(json.loads(data), sort_keys=True).encode()
    Path("saved.json").write_bytes(data)
    result = run("analyze", "saved.json")
    assert "INPUT-BOUND" in result.stdout
    assert run.calls == []  # type: ignore[attr-defined]
    assert run("report", "saved.json").stdout == result.stdout


def test_a_diagnosis_is_not_mixed_with_recordings_or_judged_by_new_rules(run: Run) -> None:
    Path("saved.json").write_bytes(to_json(sample_diagnosis.healthy()))
    assert run("analyze", "saved.json", "t.gz").exit_code == 1
    assert run("analyze", "saved.json", "--rules", ".").exit_code == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"schema": "gpudiag.diagnosis/2"}', "schema gpudiag.diagnosis/2, this gpudiag reads gpudiag.diagnosis/1"),
        (b'{"schema": "gpudiag.diagnosis/1", "gpudiag": 3}', "a damaged diagnosis"),
        (b"{}", "not a gpudiag diagnosis"),
        (b"", "not a gpudiag diagnosis"),
    ],
)
def test_report_says_what_is_wrong_with_a_file(run: Run, content: bytes, said: str) -> None:
    Path("x.json").write_bytes(content)
    result = run("report", "x.json")
    assert result.exit_code == 1
    assert said in result.stderr


def test_report_takes_the_diagnosis_of_a_bundle_and_says_when_a_file_is_missing(run: Run) -> None:
    Path("bundle").mkdir()
    Path("bundle/diagnosis.json").write_bytes(to_json(sample_diagnosis.healthy()))
    assert "HEALTHY" in run("report", "bundle").stdout
    assert run("report", "absent.json").exit_code == 1
    assert run("report").exit_code == 2


def test_a_file_name_that_is_not_utf8_reaches_every_output(run: Run) -> None:
    source = sample_diagnosis.bottleneck().source
    odd = type(source)(source.kind, "tr\udcffce.gz", source.recorder)
    result = run(
        "analyze",
        "t.gz",
        "--json",
        "d.json",
        "--markdown",
        "c.md",
        "--sarif",
        "s",
        diagnosis=sample_diagnosis.bottleneck(source=odd),
    )
    assert result.exit_code == 0, result.output
    assert from_json(Path("d.json").read_bytes()).source.path == "tr\\udcffce.gz"
    assert "tr\\udcffce.gz" in result.stdout


def test_a_terminal_that_is_not_utf8_gets_ascii(tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_bytes(to_json(sample_diagnosis.bottleneck()))
    call = [sys.executable, "-m", "gpudiag", "report", str(saved)]
    done = subprocess.run(
        call, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, cwd=ROOT, check=True
    )
    assert done.stdout.isascii()
    assert b"INPUT-BOUND" in done.stdout


@pytest.mark.parametrize("options", [[], ["--no-color"]])
def test_a_terminal_sees_progress_and_colour_unless_it_said_no(traces: Path, options: list[str]) -> None:
    pytest.importorskip("gpudiag.pipeline")
    ours, theirs = pty.openpty()
    call = [sys.executable, "-m", "gpudiag", "analyze", str(traces / "kineto" / "mi250_minitoy.json.gz"), *options]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "90"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(call, stdout=theirs, stderr=theirs, stdin=theirs, env=environment, cwd=ROOT) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux reports the end of a pseudo-terminal as an error
            while piece := os.read(ours, 65536):
                shown += piece
        assert process.wait(timeout=60) == 0, shown
    os.close(ours)
    text = shown.decode()
    assert "judging" in text
    assert ("\x1b[1;33mCANNOT JUDGE: " in text) == (not options)
    assert ("\x1b[1m" in text) == (not options)
