"""The tables of the run history, as the steps that made them: step n takes a database of version n - 1 to version n.

A step that was released is never changed; a new one is added. `PRAGMA user_version` holds the version, `PRAGMA application_id`
says that the file is ours. All times ns unless named otherwise, shares 0-1.
"""

from __future__ import annotations

APPLICATION_ID = 0x67706475  # "gpdu"

_RUNS = """
CREATE TABLE runs (
  id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never given twice, also after a delete
  created TEXT NOT NULL,                 -- UTC, ISO 8601
  kind TEXT NOT NULL,                    -- profile | analyze | compare | bench
  name TEXT NOT NULL,                    -- what was run: trends are of one name
  path TEXT NOT NULL,
  recorder TEXT NOT NULL,
  gpudiag TEXT NOT NULL,
  status TEXT NOT NULL,
  bound_by TEXT NOT NULL,
  headline TEXT NOT NULL,
  gpu TEXT NOT NULL,
  gpus INTEGER NOT NULL,
  steps INTEGER NOT NULL,
  step_median_ns INTEGER,
  step_p99_ns INTEGER,
  step_mean_ns INTEGER,
  findings INTEGER NOT NULL
)"""
_DOCUMENTS = """
CREATE TABLE documents (
  run_id INTEGER PRIMARY KEY REFERENCES runs(id) ON DELETE CASCADE,
  schema TEXT NOT NULL,
  zlib BLOB NOT NULL                     -- the JSON as --json prints it, compressed
)"""
_METRICS = """
CREATE TABLE metrics (
  run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
  name TEXT NOT NULL,
  value REAL,                            -- NULL: missing, and why
  unit TEXT NOT NULL,
  missing TEXT NOT NULL,
  PRIMARY KEY (run_id, name)
)"""
_FINDINGS = """
CREATE TABLE findings (
  run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
  place INTEGER NOT NULL,                -- 0 is the largest
  rule TEXT NOT NULL,
  step TEXT NOT NULL,
  category TEXT NOT NULL,
  severity TEXT NOT NULL,
  share REAL NOT NULL,
  bound_ns INTEGER NOT NULL,
  estimate_ns INTEGER,
  title TEXT NOT NULL,
  at TEXT NOT NULL,                      -- file:line of the user's code, or empty
  caused_by TEXT NOT NULL,
  PRIMARY KEY (run_id, place)
)"""
_ENVIRONMENT = """
CREATE TABLE environment (
  run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
  name TEXT NOT NULL,
  value TEXT NOT NULL,
  PRIMARY KEY (run_id, name)
)"""
_LATEST = """
CREATE VIEW latest_runs AS
SELECT id, created, kind, name, status, bound_by, step_median_ns / 1e6 AS step_median_ms, findings, headline, gpu
FROM runs WHERE id IN (SELECT max(id) FROM runs GROUP BY kind, name)
ORDER BY id DESC"""

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        _RUNS,
        _DOCUMENTS,
        _METRICS,
        _FINDINGS,
        "CREATE INDEX runs_by_name ON runs (name, id)",
        "CREATE INDEX metrics_by_name ON metrics (name, run_id)",
        "CREATE INDEX findings_by_rule ON findings (rule, run_id)",
    ),
    (_ENVIRONMENT, "CREATE INDEX environment_by_name ON environment (name, value)", _LATEST),
)
VERSION = len(MIGRATIONS)
