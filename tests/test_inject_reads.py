"""Reads of device values in the user's process: which calls wait, on which line, and that nothing else changes.

A Tensor subclass that says it is on a GPU stands for one; what really waits there is checked by the tests marked gpu.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
from test_inject import inside, records

pytest.importorskip("torch")
pytestmark = pytest.mark.live

FAKE = """
import torch
class OnGpu(torch.Tensor):
    is_cuda = property(lambda self: True)
x, other, plain = torch.randn(6, 4).as_subclass(OnGpu), torch.randn(6, 4).as_subclass(OnGpu), torch.zeros(6, 4)
mask, rows, places = x > 0, (x > 0).any(1), torch.tensor([0, 1]).as_subclass(OnGpu)
picked = torch.randn((torch.Tensor(x) > 0).sum().tolist()).as_subclass(OnGpu)
step = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step
"""
# the lines of code and what is noted for each; on a GPU (tests/test_gpu.py) all of these must wait, and the silent must not
READS = {
    "x.sum().item()": "Tensor.item",
    "x.tolist()": "Tensor.tolist",
    "x.cpu()": "Tensor.cpu",
    "mask.nonzero()": "Tensor.nonzero",
    "mask.argwhere()": "Tensor.argwhere",
    "x.masked_select(mask)": "Tensor.masked_select",
    "x.unique()": "Tensor.unique",
    "x.unique_consecutive()": "Tensor.unique_consecutive",
    "x.equal(other)": "Tensor.equal",
    "x.allclose(other)": "Tensor.allclose",
    "x.sum().is_nonzero()": "Tensor.is_nonzero",
    "1.0 in x": "Tensor.__contains__",
    "if x.sum() > 0: pass": "Tensor.__bool__",
    "float(x.sum()), int(x.sum())": "Tensor.__float__, Tensor.__int__",
    "complex(x.sum())": "Tensor.__complex__",
    "f'{x}'": "Tensor.__format__",
    "repr(x)": "Tensor.__repr__",
    "x.numpy(force=True)": "Tensor.numpy",
}
COPIES = {
    "x.to('cpu')": "Tensor.to",
    "x.to(device='cpu')": "Tensor.to",
    "x.to(torch.device('cpu'), torch.float64)": "Tensor.to",
    "x.to(plain)": "Tensor.to",
    "x.to(tensor=plain)": "Tensor.to",
    "plain.copy_(x)": "Tensor.copy_",
    "plain.copy_(other=x)": "Tensor.copy_",
    "plain.copy_(x, False)": "Tensor.copy_",
}
SILENT_COPIES = (
    "x.to('cpu', non_blocking=True)",
    "x.to('cpu', torch.float32, True)",
    "x.to(plain, True)",
    "x.to(torch.float64)",
    "x.to(other)",
    "plain.to('cpu')",
    "plain.copy_(plain + 1)",
    "other.copy_(x)",
    "plain.numpy()",
)
# with values, with several indices, and with a value that is on the GPU, the places of the mask have to be found
ASSIGNMENTS = dict.fromkeys(
    ("x[mask] = picked", "x[mask] = other[:1].sum()", "x[rows, [0]] = 1.0", "x[rows, 1] = other[0, 0]"),
    "Tensor.__setitem__",
)
SILENT_ASSIGNMENTS = (
    "x[mask] = 0.0",
    "x[mask] = torch.tensor(0.0)",
    "x[rows, 1] = 5",
    "x[rows, torch.tensor(0)] = 1.0",
    "x[0] = 1.0",
    "x[:, 1] = other[:, 0]",
    "x[places] = 3.0",
    "x[...] = other",
    "plain[plain > 0] = 2.0",
)


def waits(tmp_path: Path, *lines: str, head: str = FAKE) -> dict[str, str]:
    """What is noted for each line, `call` or `call, call`; lines that are not noted are left out."""
    code = head + "\n".join(lines) + "\nstep()\n"
    done = inside(tmp_path, code)
    assert done.returncode == 0, done.stderr.decode()
    assert not records(tmp_path, "note")
    text = (tmp_path / "script.py").read_text().splitlines()
    found: dict[str, list[str]] = {}
    for step in records(tmp_path, "step"):
        for what, where, count, _ in step.get("y", ()):
            if not what.startswith("cpu:"):
                found.setdefault(text[int(where.rpartition(":")[2]) - 1], []).extend([what] * count)
    return {line: ", ".join(what) for line, what in found.items()}


@pytest.mark.parametrize(
    ("noted", "silent"),
    [(READS, ()), (COPIES, SILENT_COPIES), (ASSIGNMENTS, SILENT_ASSIGNMENTS)],
    ids=["reads", "copies", "masks"],
)
def test_what_waits_is_noted_once_with_its_line_and_what_does_not_is_not(
    tmp_path: Path, noted: dict[str, str], silent: tuple[str, ...]
) -> None:
    assert waits(tmp_path, *noted, *silent) == noted


def test_a_copy_that_need_not_block_is_taken_for_one_that_does_not(tmp_path: Path) -> None:
    """To pageable memory the driver makes it wait all the same; asking each time where the memory is would cost more."""
    assert waits(tmp_path, "plain.copy_(x, True)", "plain.copy_(x, non_blocking=True)") == {}


def test_a_helper_of_the_users_is_named_and_a_library_is_not(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text("def mean(x):\n    return x.mean().item()\n")
    library = tmp_path / "lib" / "site-packages" / "wise"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("def mean(x):\n    return x.mean().item()\n")
    code = f"""
        import sys; sys.path.insert(0, {str(library.parent)!r})
        import helpers, wise
        for _ in range(3):
            helpers.mean(x)
            wise.mean(x)
            torch.nn.utils.clip_grad_norm_([], 1.0)
            step()
    """
    assert inside(tmp_path, FAKE + textwrap.dedent(code)).returncode == 0
    found = Counter(
        {
            (what, where.rpartition("/")[2]): count
            for s in records(tmp_path, "step")
            for what, where, count, _ in s.get("y", ())
        }
    )
    line = (tmp_path / "script.py").read_text().splitlines().index("    wise.mean(x)") + 1
    assert set(found) == {("Tensor.item", "helpers.py:2"), ("Tensor.item", f"script.py:{line}")}


def test_another_threads_reads_are_not_the_training_threads_and_do_not_hide_its_own(tmp_path: Path) -> None:
    code = """
        import threading
        inside, go = threading.Event(), threading.Event()
        def other_thread():
            class Holds(OnGpu):
                @classmethod
                def __torch_function__(cls, func, types, args=(), kwargs=None):
                    if func.__name__ == "tolist": inside.set(); go.wait(10)
                    return super().__torch_function__(func, types, args, kwargs or {})
            torch.randn(3).as_subclass(Holds).tolist()
        thread = threading.Thread(target=other_thread); thread.start()
        inside.wait(10)
        x.sum().item()
        go.set(); thread.join(); step()
    """
    assert inside(tmp_path, FAKE + textwrap.dedent(code)).returncode == 0
    assert [entry[0] for s in records(tmp_path, "step") for entry in s.get("y", ())] == ["Tensor.item"]


SAME = """
import io, pickle, sys, warnings
import torch
warnings.simplefilter("ignore")
torch.manual_seed(0)
x = torch.randn(6, 4); m = x > 0
def show(label, function):
    try: said = str(function())
    except Exception as error: said = type(error).__name__
    print(label, said.replace("\\n", "|"))
def sets(x, m):
    z = x.clone(); z[m] = z[m] * 2; z[0] = 1; z.copy_(z + 1); return z
class Sub(torch.Tensor):
    seen = []
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})
def subclass():
    s = x.as_subclass(Sub); Sub.seen.clear()
    s.to("cpu"); s.to(torch.float64); s[0, 0].item(); s[m] = 0.0; s.copy_(x); s.equal(s); bool(s.sum()); s.numpy(); s.unique()
    return Sub.seen
def lazy():
    net = torch.nn.Sequential(torch.nn.LazyLinear(3)); net.to("cpu"); net.cpu(); net.to(torch.float64)
    return net(torch.ones(2, 4, dtype=torch.float64)).shape
def scripted(x, m):
    return x.masked_select(m).sum().item(), m.nonzero().size(0), x.equal(x), x.to("cpu").size(0), torch.unique(x).size(0)
show("script", lambda: torch.jit.script(scripted)(x, m))
show("trace", lambda: [n.kind() for n in torch.jit.trace(lambda x, m: (sets(x, m), x.to("cpu"), x.unique()), (x, m)).graph.nodes()])
show("fx", lambda: torch.fx.symbolic_trace(lambda x, m: (x[m], x.to("cpu"), x.masked_select(m), torch.nonzero(m))).graph)
show("vmap", lambda: torch.vmap(lambda v: torch.zeros_like(v).copy_(v).to(torch.float64))(x).sum())
show("vmap item", lambda: torch.vmap(lambda v: v.sum().item())(x))
show("vmap mask", lambda: torch.vmap(lambda v, k: v[k])(x, m))
show("tensor of tensors", lambda: torch.tensor([torch.tensor(1.0), torch.tensor(2.0)]))
show("subclass", subclass)
show("lazy", lazy)
show("pickle", lambda: pickle.loads(pickle.dumps(torch.Tensor.masked_select)) is torch.Tensor.masked_select)
show("refused", lambda: x.copy_()); show("refused", lambda: x.to("bogus")); show("refused", lambda: x.numpy(1, 2, 3))
import torch._dynamo
for dynamic in (False, True):
    torch._dynamo.config.capture_dynamic_output_shape_ops = torch._dynamo.config.capture_scalar_outputs = dynamic
    for name, function in {
        "item": lambda x, m: x.sum().item() + 1, "float": lambda x, m: float(x.sum()) + 1, "repr": lambda x, m: repr(x * 2),
        "sets": sets, "nonzero": lambda x, m: m.nonzero().sum(), "selects": lambda x, m: x.masked_select(m).sum(),
        "unique": lambda x, m: x.unique().sum(), "equal": lambda x, m: x.equal(x * 1), "in": lambda x, m: 1.0 in x,
        "to": lambda x, m: (x * 2).to("cpu").to(torch.float64), "numpy": lambda x, m: x.numpy(), "tolist": lambda x, m: (x * 2).tolist(),
    }.items():
        torch._dynamo.reset()
        found = torch._dynamo.explain(function)(x, m)
        show(f"{name} {dynamic} {found.graph_count} {found.graph_break_count} {found.op_count}", lambda: torch.compile(function, backend="eager")(x, m))

# what the training loop's own functions become: neither a break nor a warning of Dynamo's that they cannot be traced
torch._dynamo.reset()
net = torch.nn.Linear(4, 1); opt = torch.optim.SGD(net.parameters(), lr=0.1)
def zeroed(x): y = x * 2; net.zero_grad(); return net(y).sum() * 0
def stepped(x): opt.zero_grad(); net(x).sum().backward(); opt.step(); return x.sum()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    show("zero_grad", lambda: torch.compile(zeroed, backend="eager", fullgraph=True)(x))
    show("training step", lambda: torch.compile(stepped, backend="eager")(x))
    show("optimizer", lambda: torch.compile(lambda: opt.step(), backend="eager")())
show("warnings", lambda: [str(one.message)[:80] for one in said if "know how to trace" in str(one.message)])
"""


def test_compilers_tracers_and_subclasses_see_what_they_see_without_us(tmp_path: Path) -> None:
    """Graph breaks are counted: a wrapper that Dynamo compiles breaks the graph, or calls itself without end."""
    script = tmp_path / "plain.py"
    script.write_text(SAME)
    plain = subprocess.run([sys.executable, str(script)], capture_output=True, timeout=120)
    assert plain.returncode == 0, plain.stderr.decode()
    done = inside(tmp_path, SAME)
    assert done.stdout.decode().splitlines() == plain.stdout.decode().splitlines()
    assert not records(tmp_path, "note")
