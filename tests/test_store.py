"""The history: what is kept, several writers at once, older and newer files, and files that must not be touched."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest
import sample_diagnosis
from hostile import HOSTILE, hostile_diagnosis

from gpudiag import store
from gpudiag.compare import compare
from gpudiag.diagnosis import Diagnosis, MetricValue, from_json
from gpudiag.errors import GpudiagError
from gpudiag.records import flat, of_comparison, of_diagnosis, stem
from gpudiag.store_schema import APPLICATION_ID, MIGRATIONS, VERSION


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "sub" / "runs.db"


def keep(db: Path, diagnosis: Diagnosis | None = None, name: str = "train") -> int:
    return store.save(db, of_diagnosis(diagnosis or sample_diagnosis.bottleneck(), "profile", name))


def digest(path: Path) -> str:
    """Of the file and what SQLite may have put beside it."""
    beside = sorted(file.name for file in path.parent.iterdir() if file.name.startswith(path.name))
    return hashlib.sha256(path.read_bytes()).hexdigest() + repr(beside)


def rows(db: Path, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(db)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_a_run_is_kept_whole_and_in_flat_tables(db: Path) -> None:
    diagnosis = sample_diagnosis.bottleneck(environment={"torch": "2.14.1", "gpus": [{"name": "A100"}], "none": None})
    assert keep(db, diagnosis) == 1
    schema, document = store.document(db, 1)
    assert schema == diagnosis.schema and from_json(document) == diagnosis
    run = store.runs(db)[0]
    assert (run["kind"], run["name"], run["bound_by"], run["step_median_ns"]) == (
        "profile",
        "train",
        "input",
        41_200_000,
    )
    parts = store.parts(db, 1)
    assert {row["name"]: (row["value"], row["unit"], row["missing"]) for row in parts["metrics"]} == {
        "mfu": (None, "", "no FLOPs recorded"),
        "step_time": (41_200_000.0, "ns", ""),
    }
    assert [row["rule"] for row in parts["findings"]] == ["loader_wait", "launch_bound", "gpu_idle"]
    assert {row["name"]: row["value"] for row in parts["environment"]} == {"torch": "2.14.1", "gpus.0.name": "A100"}


def test_the_file_is_an_ordinary_database_with_keys_indexes_and_a_view(db: Path) -> None:
    for _ in range(3):
        keep(db)
    keep(db, name="other")
    assert rows(db, "PRAGMA journal_mode") == [("wal",)] and rows(db, "PRAGMA foreign_key_check") == []
    assert rows(db, "SELECT id, name FROM latest_runs") == [(4, "other"), (3, "train")]
    for table in ("documents", "metrics", "findings", "environment"):
        assert [(row[2], row[3]) for row in rows(db, f"PRAGMA foreign_key_list({table})")] == [("runs", "run_id")]
    plan = rows(db, "EXPLAIN QUERY PLAN SELECT * FROM metrics WHERE name = 'step_time'")
    assert "metrics_by_name" in str(plan)


def test_a_comparison_is_kept_with_its_change(db: Path) -> None:
    result = compare([sample_diagnosis.bottleneck()], [sample_diagnosis.healthy()])
    run = store.save(db, of_comparison(result))
    assert store.runs(db)[0]["status"] == result.outcome
    assert {row["name"] for row in store.parts(db, run)["metrics"]} == {
        "change",
        "change_low",
        "change_high",
        "mean_change",
    }


def test_hostile_names_and_values_are_kept(db: Path) -> None:
    hostile = msgspec.structs.replace(
        hostile_diagnosis(),
        metrics={
            HOSTILE: MetricValue(1 << 80, HOSTILE),
            "inf": MetricValue(float("inf"), ""),
            "nan": MetricValue(float("nan")),
        },
        environment={"a'; DROP TABLE runs; --": HOSTILE},
    )
    store.save(db, of_diagnosis(hostile, "analyze", HOSTILE))
    assert "DROP TABLE" in store.parts(db, 1)["environment"][0]["name"] and len(store.runs(db)) == 1
    assert store.runs(db, name="' OR 1=1 --") == []
    values = {row["name"]: (row["value"], row["missing"]) for row in store.parts(db, 1)["metrics"]}
    assert values["inf"] == values["nan"] == (None, "not finite") and float(1 << 80) in {v for v, _ in values.values()}


def test_deleting_takes_all_that_belongs_to_a_run_or_nothing(db: Path) -> None:
    for _ in range(3):
        keep(db)
    with pytest.raises(GpudiagError, match="no run 9"):
        store.delete(db, [1, 9])
    assert len(store.runs(db)) == 3
    store.delete(db, [1, 3])
    assert [run["id"] for run in store.runs(db)] == [2]
    for table in ("documents", "metrics", "findings", "environment"):
        assert rows(db, f"SELECT DISTINCT run_id FROM {table}") == [(2,)]
    assert keep(db) == 4  # a number is never given twice


def test_a_save_that_fails_leaves_no_half_run(db: Path) -> None:
    keep(db)
    record = of_diagnosis(sample_diagnosis.bottleneck(), "profile", "train")
    record.findings.append(dict(record.findings[0]))  # the same place twice
    with pytest.raises(GpudiagError):
        store.save(db, record)
    assert len(store.runs(db)) == 1 and rows(db, "SELECT DISTINCT run_id FROM metrics") == [(1,)]
    assert keep(db) == 2


# ---- several writers


def write_some(path: str, count: int) -> None:
    for number in range(count):
        store.save(Path(path), of_diagnosis(sample_diagnosis.bottleneck(), "profile", f"{os.getpid()}-{number}"))


def test_several_processes_begin_and_fill_one_history_at_once(db: Path) -> None:
    context = multiprocessing.get_context("spawn")  # fork would share what pytest has open
    writers = [context.Process(target=write_some, args=(str(db), 8)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(90)
    assert [writer.exitcode for writer in writers] == [0] * 4
    found = store.runs(db)
    assert len({run["name"] for run in found}) == len(found) == 32
    assert [run["id"] for run in found] == list(range(1, 33))
    assert rows(db, "PRAGMA integrity_check") == [("ok",)] and rows(db, "PRAGMA user_version") == [(VERSION,)]


def test_reading_goes_on_while_another_process_writes(db: Path) -> None:
    keep(db)
    writer = sqlite3.connect(db, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("DELETE FROM runs")
    assert len(store.runs(db)) == 1
    writer.execute("ROLLBACK")
    writer.close()


def test_a_history_that_stays_locked_is_said(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(db)
    monkeypatch.setattr(store, "BUSY_S", 0.1)
    writer = sqlite3.connect(db, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(GpudiagError, match="locked") as error:
        keep(db)
    assert error.value.hint == "try again"
    writer.close()


# ---- versions


def older(db: Path, version: int) -> None:
    db.parent.mkdir(parents=True)
    connection = sqlite3.connect(db, isolation_level=None)
    for statements in MIGRATIONS[:version]:
        for statement in statements:
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {version}")
    columns = "created, kind, name, path, recorder, gpudiag, status, bound_by, headline, gpu, gpus, steps, findings"
    connection.execute(
        f"INSERT INTO runs ({columns}) VALUES ('2026-01-01T00:00:00', 'profile', 'old', '', '', '0.0.1', 'healthy', "
        "'none', '', '', 1, 20, 0)"
    )
    connection.execute("INSERT INTO metrics VALUES (1, 'step_time', 5.0, 'ns', '')")
    connection.close()


@pytest.mark.parametrize("write_first", [True, False])
def test_an_older_history_is_brought_up_to_date_with_its_runs(db: Path, write_first: bool) -> None:
    older(db, 1)
    if write_first:
        assert keep(db) == 2
    assert store.runs(db)[0]["name"] == "old"
    assert store.trend(db, "step_time", name="old")[0]["value"] == 5.0
    assert rows(db, "PRAGMA user_version") == [(VERSION,)]
    assert store.parts(db, 1)["environment"] == []


def test_a_migration_that_fails_leaves_the_older_history_as_it_was(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older(db, 1)
    monkeypatch.setattr(store, "MIGRATIONS", (MIGRATIONS[0], ("CREATE TABLE half (x)", "CREATE TABLE runs (x)")))
    with pytest.raises(GpudiagError):
        keep(db)
    assert rows(db, "PRAGMA user_version") == [(1,)] and rows(db, "SELECT name FROM runs") == [("old",)]
    assert rows(db, "SELECT name FROM sqlite_master WHERE name = 'half'") == []


def test_a_newer_history_is_read_by_nobody_and_left_as_it_is(db: Path) -> None:
    keep(db)
    connection = sqlite3.connect(db)
    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    before = digest(db)
    for use in (keep, store.runs, lambda path: store.delete(path, [1])):
        with pytest.raises(GpudiagError, match="newer gpudiag"):
            use(db)  # type: ignore[operator]
    assert digest(db) == before


# ---- files that are not ours, or broken


def overwritten(db: Path) -> None:
    """The pages of the tables, not the header: SQLite finds out when it looks at them."""
    data = bytearray(db.read_bytes())
    data[4096 : 4096 * 6] = os.urandom(4096 * 5)
    db.write_bytes(data)


def cut(db: Path) -> None:
    db.write_bytes(db.read_bytes()[: 4096 * 3 + 100])


@pytest.mark.parametrize("damage", [overwritten, cut])
def test_a_damaged_history_is_said_and_left_as_it_is(db: Path, damage: object) -> None:
    for _ in range(3):
        keep(db)
    damage(db)  # type: ignore[operator]
    before = digest(db)
    for use in (keep, lambda path: store.delete(path, [1])):
        with pytest.raises(GpudiagError, match="damaged history, left as it is") as error:
            use(db)
        assert ".recover" in error.value.hint
    assert digest(db) == before


@pytest.mark.parametrize(
    "content", [b"not a database at all, but somebody's notes\n" * 100, b"SQLite format 4\0" * 300, b"x"]
)
def test_a_file_that_is_no_database_is_left_as_it_is(db: Path, content: bytes) -> None:
    db.parent.mkdir()
    db.write_bytes(content)
    for use in (keep, store.runs):
        with pytest.raises(GpudiagError, match="not a history of runs, left as it is"):
            use(db)
    assert db.read_bytes() == content and [file.name for file in db.parent.iterdir()] == [db.name]


def test_another_programs_database_is_left_as_it_is(db: Path, traces: Path) -> None:
    db.parent.mkdir()
    shutil.copy(traces / "nsys" / "healthy_1pct_idle.sqlite", db)
    db.chmod(0o644)
    before = digest(db)
    for use in (keep, store.runs):
        with pytest.raises(GpudiagError, match="another program's database, left as it is"):
            use(db)
    assert digest(db) == before


def test_an_empty_file_becomes_a_history(db: Path) -> None:
    db.parent.mkdir()
    db.touch()
    assert keep(db) == 1


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(GpudiagError, match="is a folder"):
        keep(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(GpudiagError, match=r"File exists|Not a directory"):
        keep(tmp_path / "file" / "runs.db")


def test_where_nobody_may_write_the_history_is_read_as_it_lies_there(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(db)
    monkeypatch.setattr(store.os, "access", lambda *_: False)  # a read-only folder; root, who runs CI, may write to any
    assert len(store.runs(db)) == 1 and store.trend(db, "step_time")[0]["value"] == 41_200_000.0
    assert [file.name for file in db.parent.iterdir()] == [db.name]


def test_no_history_yet_is_said_and_none_is_made(db: Path) -> None:
    with pytest.raises(GpudiagError, match="no history yet"):
        store.runs(db)
    assert not db.parent.exists()


# ---- places and names


def test_the_place_is_the_option_then_the_variable_then_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUDIAG_DB", "/a/b.db")
    assert store.place(Path("x.db")) == Path("x.db") and store.place() == Path("/a/b.db")
    monkeypatch.delenv("GPUDIAG_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert store.place() == tmp_path / "gpudiag" / "runs.db"
    monkeypatch.setenv("XDG_DATA_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert store.place() == Path("/home/someone/.local/share/gpudiag/runs.db")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(GpudiagError, match="no home folder"):
        store.place()


def test_names_are_what_was_run() -> None:
    assert stem("/tmp/train.json.gz") == "train" and stem("runs/gpudiag-train-20261130-120000") == "train"
    assert stem("a/report.sqlite") == "report" and stem("") == "recording"


def test_facts_are_flat() -> None:
    assert flat({"a": {"b": 1, "c": None}, "d": [1, 2], "e": [{"f": True}]}) == {
        "a.b": "1",
        "d": "1, 2",
        "e.0.f": "True",
    }
