"""Which recorded names mean what: every pattern says where the name comes from."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from gpudiag.timeline import Bool, Int32

LAUNCH = re.compile(
    r"^(?:cudaLaunch(?:Kernel|KernelExC|CooperativeKernel)|cuLaunch(?:Kernel|KernelEx|CooperativeKernel)|cudaGraphLaunch"
    r"|cuGraphLaunch|hip(?:Ext)?(?:Module)?Launch(?:Kernel|CooperativeKernel)|hipExtLaunchKernel|hipGraphLaunch)"
)
SYNC = re.compile(r"^(?:cuda|cu|hip)(?:Device|Stream|Event|Ctx|Context|Thread)Synchronize")
# Copies that return only when they are done: cudaMemcpy is (for pageable and device-to-host memory) synchronous by
# the CUDA runtime's "API synchronization behavior"; the Async forms block for pageable memory, decided per call below.
BLOCKING_COPY = re.compile(r"^(?:cuda|hip)Memcpy(?!.*Async)|^cuMemcpy(?!.*Async)")
ASYNC_COPY = re.compile(r"^(?:cuda|hip|cu)Memcpy.*Async|^hipMemcpyWithStream")
COPY_CALL = re.compile(r"^(?:cuda|hip|cu)Memcpy")
ALLOCATOR = re.compile(
    r"^(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostFree|MallocHost|FreeHost|HostMalloc|HostRegister|HostUnregister)"
    r"|^cuMem(?:Alloc|Free|Create|Map|Unmap|Release|AddressReserve|SetAccess|HostAlloc|HostRegister)"
)
COMPILE_CALL = re.compile(
    r"^(?:cu|hip)(?:Module|Library)(?:Load|Unload)|^(?:cuda|cu)LibraryLoad|^nvrtcCompile|^cuLink|^hiprtcCompile"
)
COMPILE_OVERHEAD = re.compile(r"lazy|module.*load|compil", re.IGNORECASE)

# DataLoader's own record_function ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"), ours, Lightning's and
# common hand-made names for the wait for a batch.
INPUT = re.compile(
    r"^enumerate\(DataLoader\)#|^(?:gpudiag::)?data_wait$|train_dataloader_next|dataloader_iter|wait_for_\w*batch"
    r"|^(?:## ?)?(?:data[\s_-]?load(?:ing|er)?|load[\s_-]?(?:data|batch)|get[\s_-]?batch|next[\s_-]?batch|fetch[\s_-]?batch"
    r"|input[\s_-]?pipeline)(?: ?##)?$",
    re.IGNORECASE,
)
CHECKPOINT_LOG = re.compile(
    r"^(?:gpudiag::)?(?:checkpoint|log)$|^(?:## ?)?(?:save[\s_-]?(?:checkpoint|model)|checkpoint(?:ing)?|torch\.save|logging|"
    r"log[\s_-]?metrics|tensorboard)(?: ?##)?$",
    re.IGNORECASE,
)
COMPILE = re.compile(
    r"^(?:gpudiag::)?compile$|^(?:OutputGraph|_compile|_inductor|inductor|dynamo|compile_fx|triton).*compil"
    r"|^CachingAutotuner\.benchmark_all_configs|^torch\._dynamo",
    re.IGNORECASE,
)
GC = re.compile(r"^(?:gpudiag::)?gc$|^gc\.collect")
EVAL = re.compile(r"^(?:gpudiag::)?(?:eval|evaluat(?:e|ion)|validat(?:e|ion)|val)$|run_validation", re.IGNORECASE)
FORWARD = re.compile(
    r"^(?:gpudiag::)?forward$|^## ?forward ?##$|^DistributedDataParallel\.forward|^forward_pass$", re.IGNORECASE
)
BACKWARD = re.compile(
    r"^(?:gpudiag::)?backward$|^## ?backward ?##$|^autograd::engine::evaluate_function|^backward_pass$", re.I
)
OPTIMIZER = re.compile(
    r"^(?:gpudiag::)?(?:optimizer|zero_grad)$|^Optimizer\.(?:step|zero_grad)#|^## ?(?:optimizer|zero_grad) ?##$"
    r"|^optimizer[_ ]step$",
    re.IGNORECASE,
)
H2D = re.compile(r"^(?:gpudiag::)?h2d$|^## ?(?:copy|move)_?batch_?to_?device ?##$", re.IGNORECASE)
REPLAY = re.compile(r"^(?:gpudiag::)?graph_replay$")  # ours, of torch.cuda.CUDAGraph.replay: launching
PY_SAVE = re.compile(r"torch/serialization\.py\(\d+\): save$")
PY_LOADER = re.compile(r"torch/utils/data/dataloader\.py\(\d+\): __next__$")


class Names:
    """Which strings of a timeline match which pattern; each distinct string is tested once a pattern."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._known: dict[re.Pattern[str], Bool] = {}

    @property
    def size(self) -> int:
        return len(self._strings)

    def matching(self, pattern: re.Pattern[str]) -> Bool:
        """Mask over the strings, shape (len(strings),)."""
        mask = self._known.get(pattern)
        if mask is None:
            search = pattern.search
            mask = np.fromiter((search(text) is not None for text in self._strings), bool, len(self._strings))
            self._known[pattern] = mask
        return mask

    def rows(self, codes: Int32, pattern: re.Pattern[str]) -> Bool:
        """Mask over rows whose name code matches."""
        mask = self.matching(pattern)
        return mask[codes] if mask.size else np.zeros(codes.size, bool)
