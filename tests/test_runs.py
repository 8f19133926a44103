"""`gpudiag runs` and the --save of the other verbs, as typed."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
import sample_diagnosis
from click.testing import CliRunner, Result
from hostile import HOSTILE, assert_harmless, hostile_diagnosis

from gpudiag import store
from gpudiag.cli import main
from gpudiag.diagnosis import Diagnosis, MetricValue, StepsInfo, to_json
from gpudiag.records import metric_row, of_bench, of_diagnosis
from gpudiag.report.runs_text import trend_svg, value_text


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "runs.db"
    monkeypatch.setenv("GPUDIAG_DB", str(path))
    return path


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def at(step_ms: float, **changes: object) -> Diagnosis:
    """Twenty even steps of that length."""
    ns = tuple(round((step_ms + 0.001 * i) * 1e6) for i in range(20))
    steps = StepsInfo(20, ns[10], ns[-1], "ProfilerStep", 2, 1.0, ns)
    metrics = {"step_median": MetricValue(ns[10], "ns"), "gpu_busy": MetricValue(20 / step_ms, "fraction")}
    return sample_diagnosis.bottleneck(**{"steps": steps, "metrics": metrics, **changes})


def keep(db: Path, *steps_ms: float, name: str = "train") -> None:
    for ms in steps_ms:
        store.save(db, of_diagnosis(at(ms), "profile", name))


def test_analyze_keeps_a_run_only_when_asked(db: Path, tmp_path: Path) -> None:
    file = tmp_path / "train.json"
    file.write_bytes(to_json(at(41)))
    assert cli("analyze", file).exit_code == 0 and not db.exists()
    result = cli("analyze", file, "--save")
    assert result.exit_code == 0 and "kept as run 1" in result.stderr and "kept" not in result.stdout
    other = tmp_path / "other.db"
    assert cli("analyze", file, "--save", "--db", other).exit_code == 0
    assert len(store.runs(db)) == len(store.runs(other)) == 1


def test_compare_keeps_a_run_when_asked_and_shows_it_again(db: Path, tmp_path: Path) -> None:
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    for file, ms in zip(files, (41, 30), strict=True):
        file.write_bytes(to_json(at(ms)))
    first = cli("compare", *files, "--save", "--gate", 5)
    assert first.exit_code == 0 and "kept as run 1" in first.stderr
    shown = cli("runs", "show", 1)
    assert shown.exit_code == 0 and first.stdout in shown.stdout


@pytest.mark.parametrize(
    "arguments", [["analyze", "FILE", "--fail-on", "critical"], ["compare", "FILE", "FILE", "--gate", "5"]]
)
def test_a_history_that_cannot_be_written_costs_one_line_and_nothing_else(
    db: Path, tmp_path: Path, arguments: list[str]
) -> None:
    file = tmp_path / "train.json"
    file.write_bytes(to_json(at(41)))
    db.write_text("somebody's notes")
    typed = [str(file) if word == "FILE" else word for word in arguments]
    without, with_ = cli(*typed), cli(*typed, "--save")
    assert with_.exit_code == without.exit_code and with_.stdout == without.stdout
    new = [line for line in with_.stderr.splitlines() if line not in without.stderr.splitlines()]
    assert len(new) == 1 and new[0].startswith("gpudiag: not kept in the history:")
    assert db.read_text() == "somebody's notes"


def test_the_list_has_a_line_a_run_within_80_columns(db: Path) -> None:
    assert "no runs in" in cli("runs", "list").stdout and not db.exists()
    keep(db, 41, 40)
    keep(db, 30, name="a rather long name of a script that somebody wrote")
    lines = cli("runs", "list").stdout.splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 80
    assert lines[1].split()[0] == "1" and "  input" in lines[1] and "41.0 ms" in lines[1]
    assert len(cli("runs", "list", "--name", "train").stdout.splitlines()) == 3
    assert [row["id"] for row in json.loads(cli("runs", "list", "--last", 1, "--json", "-").stdout)] == [3]
    assert cli("runs", "list", "--kind", "bench").stdout == "no such runs\n"


def test_show_draws_a_run_as_it_was_judged_then(db: Path, tmp_path: Path) -> None:
    keep(db, 41, 30)
    shown = cli("runs", "show", "last")
    assert shown.stdout.startswith("run 2: ") and "INPUT-BOUND" in shown.stdout
    document = cli("runs", "show", 1, "--json", "-").stdout
    assert document.encode() == to_json(at(41))
    page = tmp_path / "report.html"
    assert cli("runs", "show", 1, "--html", page).stdout == "" and page.stat().st_size > 10_000


@pytest.mark.parametrize(
    "verb", [["show", "9"], ["delete", "9"], ["compare", "1", "9"], ["export", "9", "--json", "-"]]
)
def test_a_run_that_is_not_there_is_said(db: Path, verb: list[str]) -> None:
    keep(db, 41)
    result = cli("runs", *verb)
    assert result.exit_code == 1 and "there is no run 9" in result.stderr and "runs list" in result.stderr


@pytest.mark.parametrize("word", ["0", "-1", "x", "99999999999999999999", "1.5"])
def test_what_is_no_number_of_a_run_is_a_usage_error(db: Path, word: str) -> None:
    assert cli("runs", "show", "--", word).exit_code == 2


def test_a_trend_is_of_one_name_and_says_the_change(db: Path, tmp_path: Path) -> None:
    keep(db, 40, 44, 22)
    keep(db, 99, name="other")
    keep(db, 20)
    lines = cli("runs", "trend", "step_median").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["1", "2", "3", "5"] and max(map(len, lines)) <= 80
    assert "+10 %" in lines[3] and "-50 %" in lines[4]
    bars = [line.count("█") for line in lines[2:6]]
    assert bars[1] == max(bars) and bars[2] == pytest.approx(bars[1] / 2, abs=1)
    values = json.loads(cli("runs", "trend", "step_median", "--name", "other", "--json", "-").stdout)
    assert [row["value"] for row in values] == [99.01e6]
    picture = tmp_path / "trend.svg"
    assert cli("runs", "trend", "gpu_busy", "--svg", picture).exit_code == 0
    root = ET.fromstring(picture.read_text())
    assert len(root.findall(".//{http://www.w3.org/2000/svg}circle")) == 4


def test_a_metric_that_no_run_has_is_answered_with_one_that_is_like_it(db: Path) -> None:
    keep(db, 41)
    result = cli("runs", "trend", "stepmedian")
    assert result.exit_code == 1 and "perhaps step_median" in result.stderr
    assert cli("runs", "trend", "step_median", "--name", "other").exit_code == 1


def test_values_are_printed_with_their_unit() -> None:
    assert [
        value_text(v, u) for v, u in ((41e6, "ns"), (0.5, "fraction"), (1392.0, "count"), (2e9, "bytes"), (7.03, "W"))
    ] == [
        "41.0 ms",
        "50 %",
        "1,392",
        "2.00 GB",
        "7.03 W",
    ]


def test_runs_are_compared_by_number_with_the_gates_exit_codes(db: Path) -> None:
    keep(db, 41, 30)
    assert cli("runs", "compare", 1, 2, "--gate", 5).exit_code == 0
    slower = cli("runs", "compare", 2, "last", "--gate", 5)
    assert slower.exit_code == 0 and "same recording" in slower.stdout
    assert cli("runs", "compare", 2, 1, "--gate", 5).exit_code == 3
    store.save(db, of_diagnosis(sample_diagnosis.cannot_judge(), "profile", "train"))
    assert cli("runs", "compare", 1, 3, "--gate", 5).exit_code == 4


def test_a_benchmark_is_listed_shown_and_followed_but_not_compared(db: Path) -> None:
    keep(db, 41)
    rows = [metric_row("resnet50: eager: training", 512.0, "images/s")]
    store.save(
        db,
        of_bench("bench cpu", "a.json", "5 models on a CPU", "gpudiag.bench/1", b'{"schema": "gpudiag.bench/1"}', rows),
    )
    assert "measured" in cli("runs", "list").stdout
    assert "resnet50: eager: training: 512 images/s" in cli("runs", "show", 2).stdout
    assert "512 images/s" in cli("runs", "trend", "resnet50: eager: training").stdout
    result = cli("runs", "compare", 1, 2)
    assert result.exit_code == 1 and "no diagnosis" in result.stderr


def test_delete_takes_runs_out(db: Path) -> None:
    keep(db, 41, 40, 39)
    assert cli("runs", "delete", 1, 3).stdout == "deleted 2 runs: 1, 3\n"
    assert [run["id"] for run in store.runs(db)] == [2]


def test_export_gives_every_run_to_other_programs(db: Path) -> None:
    keep(db, 41, 30)
    everything = json.loads(cli("runs", "export", "--json", "-").stdout)
    assert [run["id"] for run in everything] == [1, 2]
    assert everything[0]["metrics"]["step_median"]["value"] == 41.01e6
    assert everything[0]["findings"][0]["rule"] == "loader_wait" and everything[0]["environment"] == {"torch": "2.14.1"}
    table = list(csv.DictReader(io.StringIO(cli("runs", "export", 2, "--csv", "-").stdout)))
    assert len(table) == 1 and float(table[0]["step_median"]) == 30.01e6 and table[0]["name"] == "train"
    assert cli("runs", "export").exit_code == 2


def test_hostile_names_do_nothing_on_the_way_out(db: Path) -> None:
    hostile = msgspec.structs.replace(
        hostile_diagnosis(), metrics={"step_median": MetricValue(1e6, HOSTILE), "=cmd()": MetricValue(1, "")}
    )
    store.save(db, of_diagnosis(hostile, "analyze", HOSTILE))
    store.save(db, of_diagnosis(hostile, "analyze", "=1+1"))
    for arguments in (["list"], ["show", "1"], ["trend", "step_median", "--name", store.runs(db)[0]["name"]]):
        text = cli("runs", *arguments).stdout
        assert text
        assert_harmless(text)
    picture = trend_svg(store.trend(db, "step_median"), "step_median")
    assert_harmless(picture)
    ET.fromstring(picture)
    table = list(csv.reader(io.StringIO(cli("runs", "export", "--csv", "-").stdout)))
    assert not [cell for row in table for cell in row if cell.startswith(("=", "@", "+"))]
    assert_harmless("".join(cell for row in table for cell in row))


def test_a_damaged_document_is_said(db: Path) -> None:
    keep(db, 41)
    connection = sqlite3.connect(db)
    connection.execute("UPDATE documents SET zlib = X'00'")
    connection.commit()
    connection.close()
    result = cli("runs", "show", 1)
    assert result.exit_code == 1 and "the document of run 1 is damaged" in result.stderr


def test_the_history_is_read_without_heavy_imports(db: Path) -> None:
    """sqlite-utils, which brings pandas along, is for writing only."""
    keep(db, 41, 40)
    program = (
        "import sys\nfrom gpudiag.cli import main\n"
        "try:\n    main(['runs', 'trend', 'step_median'])\nexcept SystemExit:\n    pass\n"
        "print(' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"sqlite_utils", "pandas", "torch", "numpy"} & set(done.stdout.splitlines()[-1].split())


@pytest.mark.live
@pytest.mark.slow
def test_profile_keeps_its_run_by_default_and_not_with_no_save(db: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "tiny.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8)\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(40):\n    optimizer.zero_grad()\n    model(torch.randn(4, 8)).sum().backward()\n    optimizer.step()\n"
    )
    for extra in ([], ["--no-save"]):
        folder = tmp_path / f"out{len(extra)}"
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "gpudiag",
                "profile",
                "--with",
                "torch",
                "-o",
                folder,
                "--steps",
                "5",
                *extra,
                script,
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("kept as run 1" in done.stderr) is (not extra)
    found = store.runs(db)
    assert [(run["kind"], run["name"]) for run in found] == [("profile", "tiny")]
    assert {"torch", "python"} & {row["name"] for row in store.parts(db, 1)["environment"]}
