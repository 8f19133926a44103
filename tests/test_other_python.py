"""What runs inside the user's process needs the standard library and the user's torch, whichever Python that is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import venv
from pathlib import Path

import pytest
from test_frameworks import PYTHON as FRAMEWORKS
from test_profile import clean_environment, profiled, run

from gpudiag.bundle import read_bundle
from gpudiag.diagnosis import from_json

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).parent / "scripts"
OWN = ("gpudiag", "msgspec", "numpy", "pandas", "click", "rich", "jinja2_cli", "nvtx", "pynvml", "sqlite_utils")
TRAIN = """
import sys, torch
for name in ("gpudiag", "msgspec", "numpy", "click"):
    try: __import__(name)
    except ImportError: continue
    sys.exit("has " + name)
net = torch.nn.Linear(8, 8); opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(60):
    opt.zero_grad(); net(torch.ones(4, 8)).sum().backward(); opt.step()
print(sys.argv[1:], sys.prefix, __file__, sys.path[0])
"""


@pytest.mark.live
def test_another_interpreter_with_torch_and_nothing_of_ours_is_recorded(tmp_path: Path) -> None:
    """A new environment that sees this one's packages but for gpudiag and all that gpudiag needs."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "env/lib").glob("python3*/site-packages")
    for package in Path(torch.origin).parents[1].iterdir():
        ours = package.name.lower().split(".")[0].split("-")[0] in OWN or package.name.startswith("__editable__")
        if not ours and package.suffix != ".pth" and not (packages / package.name).exists():
            (packages / package.name).symlink_to(package)
    python = str(tmp_path / "env/bin/python")
    (tmp_path / "train.py").write_text(TRAIN)
    expected = run([python, "train.py", "a b", ""], tmp_path)
    assert expected.code == 0, expected.err
    got = profiled(["train.py", "a b", ""], tmp_path, tmp_path, "--no-save", "--python", python)
    assert (got.code, got.out) == (0, expected.out)
    assert str(tmp_path / "env") in got.out
    assert got.bundle is not None
    assert from_json((got.bundle / "diagnosis.json").read_bytes()).steps.count >= 15


def others() -> list[Path]:
    """Interpreters from 3.7 on, of pyenv."""
    found = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.*/bin/python")
    return sorted((path for path in found if int(path.parts[-3].split(".")[1]) >= 7), key=lambda p: p.parts[-3])


@pytest.mark.parametrize("python", others(), ids=lambda path: path.parts[-3])
def test_the_part_inside_is_valid_in_every_python(python: Path, tmp_path: Path) -> None:
    inside = REPO / "gpudiag/collect/inject"
    modules = sorted(path.stem for path in inside.glob("*.py") if path.stem != "__init__")
    (tmp_path / "part").symlink_to(inside)
    code = f"import sys, importlib; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += f"for name in {modules!r}: importlib.import_module('part.' + name)\n"
    code += "print(sorted(n for n in sys.modules if n.split('.')[0] in ('numpy', 'msgspec', 'torch', 'gpudiag')))"
    done = subprocess.run(
        [python, "-I", "-B", "-W", "error", "-c", code], capture_output=True, text=True, env=clean_environment()
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.live
@pytest.mark.parametrize("python", others(), ids=lambda path: path.parts[-3])
def test_a_script_of_an_old_python_is_left_alone(python: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys\nprint(sys.version_info[:2], sys.path[0])\nsys.exit(3)\n")
    expected = run([str(python), "plain.py"], tmp_path)
    got = profiled(["plain.py"], tmp_path, tmp_path, "--no-save", "--python", str(python))
    assert (got.code, got.out, got.own_words) == (3, expected.out, "")
    assert "plain.py ended with exit code 3 and did not import torch: there is nothing to record" in got.err


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.skipif(not FRAMEWORKS, reason="GPUDIAG_FRAMEWORKS_PYTHON names no interpreter with accelerate")
def test_both_processes_of_accelerate_launch_are_ranks_of_one_report(tmp_path: Path) -> None:
    launch = [FRAMEWORKS, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", str(SCRIPTS / "train_accelerate.py")]
    quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hf")}
    expected = run(launch, tmp_path, **quiet)
    assert expected.code == 0, expected.err
    options = ("--no-save", "--warmup", "2", "--steps", "5")
    got = profiled(["--", *launch], tmp_path, tmp_path, *options, **quiet)
    assert (got.code, sorted(got.out.splitlines())) == (0, sorted(expected.out.splitlines())), got.err
    assert got.bundle is not None
    count = expected.out.count("steps ")
    (capture,) = read_bundle(got.bundle).manifest.captures
    assert capture.files["trace"] == [f"torch/rank{rank}.kineto.json.gz" for rank in range(count)]
    diagnosis = from_json((got.bundle / "diagnosis.json").read_bytes())
    assert [row["rank"] for row in diagnosis.ranks] == list(range(count) if count > 1 else [])
    assert diagnosis.steps.count >= 3
