"""The loops of Lightning, Hugging Face's Trainer and Accelerate, profiled as they are.

They live in an environment of their own, since they bring half of PyPI:

    python -m venv FRAMEWORKS && FRAMEWORKS/bin/pip install torch lightning transformers accelerate
    GPUDIAG_FRAMEWORKS_PYTHON=FRAMEWORKS/bin/python pytest tests/test_frameworks.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from test_profile import clean_environment, profiled, run

from gpudiag.diagnosis import from_json

pytestmark = [pytest.mark.live, pytest.mark.slow]
SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = os.environ.get("GPUDIAG_FRAMEWORKS_PYTHON", "")
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def python() -> str:
    if not PYTHON:
        pytest.skip(
            "GPUDIAG_FRAMEWORKS_PYTHON names no interpreter with: pip install torch lightning transformers accelerate"
        )
    names = "torch lightning transformers accelerate"
    ask = f"from importlib.util import find_spec; print(*[n for n in '{names}'.split() if find_spec(n) is None])"
    done = subprocess.run([PYTHON, "-c", ask], capture_output=True, text=True, check=True, env=clean_environment())
    if done.stdout.strip():
        pytest.skip(f"{PYTHON} lacks them: pip install {done.stdout.strip()}")
    return PYTHON


# evaluations: passes over the held-out data; batches: of them in each pass
@pytest.mark.parametrize(
    ("script", "evaluations", "batches"), [("lightning", 4, 8), ("hf_trainer", 2, 32), ("accelerate", 2, 4)]
)
def test_the_loop_of_a_framework_is_seen_step_by_step(
    python: str, script: str, evaluations: int, batches: int, tmp_path: Path
) -> None:
    words = [str(SCRIPTS / f"train_{script}.py")]
    expected = run([python, *words], tmp_path, **QUIET)
    options = ("--python", python, "--warmup", "5", "--steps", "20")
    got = profiled(words, tmp_path, tmp_path, *options, **QUIET)
    assert got.code == expected.code == 0, expected.err + got.err
    last = [run.out.splitlines()[-1] for run in (expected, got)]
    assert last[0] == last[1]  # the same number of steps, and the same loss to the last bit
    done = re.match(r"steps (\d+) loss", last[0])
    assert done is not None
    assert got.bundle is not None
    (log,) = (file for file in (got.bundle / "torch").glob("rank*.jsonl") if '"role":"main"' in file.read_text())
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [record for record in records if record["k"] == "step" and record["o"] == "optimizer"]
    whole = [record for record in steps if not record.get("partial")]
    assert len(whole) == int(done[1])  # one an optimizer step, though gradients are accumulated over two batches
    for record in whole[2:]:
        assert {"data_wait", "forward", "backward", "optimizer"} <= record["p"].keys()
    # evaluation is on its own: its forward passes and its waits for data are no training
    evaluated = [record for record in steps if "eval" in record.get("p", {})]
    assert evaluations - 1 <= len(evaluated) <= evaluations + 1
    counted = sum(record["k"] == "batch" for record in records)
    assert counted >= 2 * int(done[1]) + evaluations * batches
    assert not [record for record in records if record["k"] == "note"]
    diagnosis = from_json((got.bundle / "diagnosis.json").read_bytes())
    assert diagnosis.steps.count >= 10
    (account,) = diagnosis.accounts
    assert all(account.parts.get(f"host.{part}", 0) > 0 for part in ("input", "forward", "backward", "optimizer"))
