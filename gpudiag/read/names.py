"""What a name says, whichever recorder wrote it. Shared by the readers; pure functions on strings."""

from __future__ import annotations

import re

# Communication kernels: NCCL, RCCL, collectives by their own names (with or without underscores), and DeepEP's all-to-all,
# whose names hold none of these words. The same definition as the reference figures that the tests compare with.
_COMMUNICATION = re.compile(
    r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|::ep::(?:internode|intranode)", re.IGNORECASE
)
# cudaLaunchKernel_v7000, cuMemcpyHtoDAsync_v2, cudaMemcpyAsync_ptsz_v7000: the version says which ABI, not what was done.
_API_VERSION = re.compile(r"(?:_pts[zd])?(?:_v\d+)?(?:_pts[zd])?$")
# torch.autograd.profiler.emit_nvtx: "name[, seq = N][, op_id = N][, sizes = [...]][, input_op_ids = [...]]"
# (torch/csrc/profiler/util.cpp, getNvtxStr).
_OPERATOR = re.compile(
    r"(?P<name>.+?)(?:, (?:stashed )?seq = \d+)?(?:, op_id = \d+)?(?:, sizes = (?P<sizes>.*?))?(?:, input_op_ids = .*)?$",
    re.DOTALL,
)
_OPERATOR_MARK = re.compile(r", (?:op_id|seq|sizes) = |^aten::")


def is_communication(name: str) -> bool:
    """Whether a kernel of this (demangled) name moves data between devices as part of a collective."""
    return _COMMUNICATION.search(name) is not None


def api_name(name: str) -> str:
    """`cudaLaunchKernel` of `cudaLaunchKernel_v7000`: an API name without its ABI version and stream-mode suffixes."""
    return _API_VERSION.sub("", name)


def operator(text: str) -> tuple[str, str | None] | None:
    """(`aten::mm`, `[[2, 3], [3, 4]]` or None) of `aten::mm, op_id = 7, sizes = [[2, 3], [3, 4]]`.

    None when the text is not an operator that `emit_nvtx` marked.
    """
    if not _OPERATOR_MARK.search(text):
        return None
    match = _OPERATOR.match(text)
    return (match["name"], match["sizes"]) if match else None
