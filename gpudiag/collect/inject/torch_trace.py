"""torch.profiler as something to prepare, start and end; when that happens is recorder.py's concern."""

from __future__ import annotations

import gc
import json
import os
import weakref
from typing import Any, Dict, List, Optional

from .log import Log
from .tracker import Emitter


class TorchEmitter(Emitter):
    """Ranges as record_function, `gpudiag::<name>`; the step carries its number as `gpudiag::step#N`.

    record_function is an operator: while the script traces operators (torch.jit.trace, make_fx) it would end up in the
    traced graph, so nothing is written then.
    """

    def __init__(self, torch: Any) -> None:
        self._record = torch.autograd.profiler.record_function
        self._tracing = torch._C._get_tracing_state
        self._modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)

    def begin(self, name: str, index: Optional[int] = None) -> Any:
        if self._tracing() is not None or self._modes():
            return None
        token = self._record("gpudiag::" + name if index is None else "gpudiag::%s#%d" % (name, index))
        token.__enter__()
        return token

    def end(self, token: Any) -> None:
        if self._tracing() is None and not self._modes():
            token.__exit__(None, None, None)
        # else it ends when it is collected, which is now


class Profiler:
    """What is done to torch's profiler, of which a process has one. Refusals become notes."""

    def __init__(self, torch: Any, log: Log, rank: int) -> None:
        self._torch = torch
        self._log = log
        self._rank = rank
        self._still_open: List[Any] = []  # weak references to record_functions alive when the last recording ended

    def prepared(self, cuda: bool) -> Any:
        """A profiler that is prepared and not started, or None when torch refuses."""
        quiet = "KINETO_LOG_LEVEL" not in os.environ
        if quiet:  # read at the first use; without it Kineto reports every start, and a missing GPU, on stderr
            os.environ["KINETO_LOG_LEVEL"] = "99"
        try:
            profile = self._torch.autograd.profiler.profile(use_cpu=True, use_kineto=True, **_device(self._torch, cuda))
            profile._prepare_trace()
            return profile
        except (RuntimeError, TypeError, AttributeError) as error:
            self._log.write({"k": "note", "note": "torch.profiler did not start: %s" % error})
            return None
        finally:
            if quiet:
                del os.environ["KINETO_LOG_LEVEL"]

    def start(self, profile: Any, cuda: bool) -> bool:
        """Whether it records from now on."""
        try:
            if cuda:
                self._torch.cuda.synchronize()
            if gc.isenabled():
                # What our own start-up and the imports of the profiler allocated brings the next full collection nearer: it
                # would fall into the short window, where it looks as if each step had a share of it.
                gc.collect()
            profile._start_trace()
            self._describe()
            return True
        except RuntimeError as error:
            self._log.write({"k": "note", "note": "torch.profiler did not start: %s" % error})
            return False

    def _describe(self) -> None:
        """The rank, as torch.profiler's own front end writes it; readers tell ranks apart by it."""
        world = int(os.environ.get("WORLD_SIZE") or 1)
        if world > 1:
            info = {"backend": "", "rank": self._rank, "world_size": world}
            self._torch.autograd._add_metadata_json("distributedInfo", json.dumps(info))

    def end(self, cuda: bool) -> Any:
        """What was recorded, to be saved; None when torch refuses."""
        torch = self._torch
        try:
            if cuda:
                torch.cuda.synchronize()
            result = torch.autograd.profiler._disable_profiler()
            after = getattr(torch.autograd.profiler, "_run_on_profiler_stop", None)
            if after is not None:
                after()
            self._still_open = _alive(torch.autograd.profiler.record_function)
            return result
        except RuntimeError as error:
            self._log.write({"k": "note", "note": "torch.profiler did not stop: %s" % error})
            return None

    def ranges_open(self) -> bool:
        """Whether ranges that the last recording has seen begin are still alive."""
        return any(reference() is not None for reference in self._still_open)


def _alive(kind: type) -> List[Any]:
    """Weak references to the living objects of a class. Looks at every container object: some 20 ms, once a recording."""
    return [weakref.ref(thing) for thing in gc.get_objects() if type(thing) is kind]


def _device(torch: Any, cuda: bool) -> Dict[str, Any]:
    """The argument that asks for GPU activity, by torch version."""
    names = torch.autograd.profiler.profile.__init__.__code__.co_varnames
    if "use_device" in names:
        return {"use_device": "cuda" if cuda else None}
    return {"use_cuda": cuda}
