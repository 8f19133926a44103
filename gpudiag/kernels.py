"""What a kernel is, from its name: the family of work, whether it uses matrix units, and its number format.

Names are those of cuBLAS/cuDNN/CUTLASS, PyTorch's ATen, Triton/Inductor, FlashAttention and AMD's Tensile/rocBLAS as seen in
recordings from 2021 to 2026. A name that says nothing is `other`; nothing is guessed from time or size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from gpudiag.intervals import Int64
from gpudiag.read.names import is_communication
from gpudiag.timeline import GpuOps, Kind

Family = Literal[
    "gemm", "conv", "attention", "elementwise", "reduction", "norm", "optimizer", "communication", "copy", "other"
]
Format = Literal["fp64", "fp32", "tf32", "half", "int8_fp8", "unknown"]


class KernelClass(NamedTuple):
    family: Family
    tensor_cores: bool
    format: Format


_ATTENTION = re.compile(
    r"flash_?(?:fwd|bwd|attn)|\bflash::|pytorch_flash|fmha|attn_fwd|attn_bwd|attention|sdpa|paged_?att", re.I
)
_NORM = re.compile(
    r"bn_(?:fw|bw)|batch_?norm|layer_?norm|group_?norm|rms_?norm|instance_?norm|cuApplyLayerNorm|GammaBeta|RowwiseMoments",
    re.I,
)
_OPTIMIZER = re.compile(
    r"adam|sgd(?!emm)|adagrad|rmsprop|lamb_|multi_tensor_apply|fused_?optimizer|ForeachNormOps", re.I
)
_LAYOUT = re.compile(
    r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|nchwAddPadding|transpose(?!d_?conv)|permute|CatArrayBatchedCopy|direct_copy_kernel"
    r"|bfloat16_copy_kernel|float16_copy_kernel|copy_device_to_device|split_with_sizes_copy|batched_transpose",
    re.I,
)
_CONV = re.compile(
    r"conv(?!ert)|winograd|wgrad|dgrad(?!_?gelu)|fprop|scudnn|hcudnn|implicit_gemm|fft2d|cudnn_infer_\w*(?:gemm|cudnn)"
    r"|naive_conv|miopen.*(?:Sp3|Conv)|igemm_(?:fwd|bwd|wrw)|computeOffsetsKernel",
    re.I,
)
_GEMM = re.compile(
    r"gemm|\bCijk_|nvjet|gemv|cublas(?!Lt.*epilogue)|cutlass::Kernel|cutlass_\d+|\bbmm_|splitKreduce|dot_kernel|matmul|triton_(?:tem|mm)"
    r"|wgmma|scaled_mm|marlin",
    re.I,
)
_REDUCTION = re.compile(
    r"reduce_kernel|softmax|argmax|argmin|cunn_|triton_(?:red|per)_|cub::|scan_|cumsum|topk|sort|norm_kernel", re.I
)
_ELEMENTWISE = re.compile(
    r"elementwise|CUDAFunctor|triton_poi_|index_(?:put|select|add)|gather|scatter|embedding|dropout|fill|where_kernel|threshold|relu"
    r"|gelu|silu|sigmoid|tanh|masked|pow_tensor|cast|op_tensor|pointwise|max_pool|avg_pool|Pool\w*Forward|Pool\w*Backward",
    re.I,
)

# Matrix-unit instructions as they stand in library names: s884/h884 (Volta), 1688/8816 (Turing), 16816 (Ampere), *mma,
# tensorop (CUTLASS), nvjet (Hopper and later cuBLAS), tensor16x8x16 (xmma), Tensile's MI16x16 (AMD MFMA).
_TENSOR = re.compile(
    r"[shib]_?(?:884|1688|8816|16816|16832|161616)|_(?:884|1688|8816|16816|16832)|tensorop|tensor\d+x\d+x\d+|[hibqu]?g?mma(?!_?none)"
    r"|nvjet|tcgen05|utcmma|_MI\d+x\d+|mfma|warpgroupsize|flash_fwd|flash_bwd|fmha|attn_fwd|attn_bwd|bmm_\w*sm\d+",
    re.I,
)
_NO_TENSOR = re.compile(
    r"ffma|simt|sgemm(?!.*(?:1688|tensorop))|scudnn|dgemm(?!.*884)|gemv|implicit_convolve|wgrad_alg|dgrad_engine", re.I
)
_HALF = re.compile(r"bf16|bfloat16|fp16|f16|half|hgemm|h884|h1688|h16816|hcudnn|_(?:HH|BB|H|B)(?:B|H)?S?_BH?", re.I)
_TF32 = re.compile(
    r"tf32|s1688gemm|s1688(?:fprop|dgrad|wgrad|cudnn)|s16816tf32|f32f32_tf32|tensorop_s\d+gemm(?!.*(?:f16|bf16))", re.I
)
_FP64 = re.compile(r"dgemm|\bd884|<double|double>|, double|f64|_DB_", re.I)
_INT8_FP8 = re.compile(r"e4m3|e5m2|int8|s8s8|i8816|i16832|imma|fp8|e2m1|nvfp4|mxfp", re.I)


@lru_cache(maxsize=65536)
def classify(name: str) -> KernelClass:
    """The class of one kernel name (demangled where there is one)."""
    family = _family(name)
    matrix = family in ("gemm", "conv", "attention")
    tensor_cores = (
        matrix
        and _TENSOR.search(name) is not None
        and not (_NO_TENSOR.search(name) is not None and not re.search(r"tensorop|1688|16816|884", name))
    )
    return KernelClass(family, tensor_cores, _format(name, tensor_cores, matrix))


def _family(name: str) -> Family:
    if is_communication(name):
        return "communication"
    for family, pattern in _ORDER:
        if pattern.search(name):
            return family
    return "other"


_ORDER: tuple[tuple[Family, re.Pattern[str]], ...] = (
    ("attention", _ATTENTION),
    ("norm", _NORM),
    ("optimizer", _OPTIMIZER),
    ("copy", _LAYOUT),
    ("elementwise", re.compile(r"at::native::.*elementwise_kernel|triton_poi_", re.I)),
    ("reduction", re.compile(r"at::native::reduce_kernel|softmax|triton_(?:red|per)_", re.I)),
    ("conv", _CONV),
    ("gemm", _GEMM),
    ("reduction", _REDUCTION),
    ("elementwise", _ELEMENTWISE),
)


def _format(name: str, tensor_cores: bool, matrix: bool) -> Format:
    if _INT8_FP8.search(name):
        return "int8_fp8"
    if _FP64.search(name):
        return "fp64"
    if _HALF.search(name):
        return "half"
    if tensor_cores and _TF32.search(name):
        return "tf32"
    if re.search(r"float|sgemm|scudnn|f32|ffma|_SB_|\bS_", name):
        return "fp32"
    return "unknown" if not matrix else ("half" if tensor_cores else "unknown")


@dataclass(frozen=True, eq=False)
class KernelTable:
    """The kernels among some operations, with what their names say. Columns are gathered when asked for: a table of
    5 million kernels with all of its columns copied would take half a gigabyte.

    rows: of ops; row_of: per kernel the place of its name in `names` and `classes`.
    """

    ops: GpuOps
    rows: slice | npt.NDArray[np.intp]
    row_of: npt.NDArray[np.int32]
    classes: tuple[KernelClass, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, ops: GpuOps, strings: Sequence[str]) -> KernelTable:
        found = ops.kind == Kind.KERNEL
        rows: slice | npt.NDArray[np.intp] = slice(None) if found.all() else np.flatnonzero(found)
        codes = ops.name[rows]
        present = np.flatnonzero(np.bincount(codes, minlength=1)) if codes.size else np.empty(0, np.intp)
        place = np.zeros(int(present[-1]) + 1 if present.size else 1, np.int32)
        place[present] = np.arange(present.size)
        names = tuple(strings[int(code)] for code in present)
        return cls(ops, rows, place[codes], tuple(classify(name) for name in names), names)

    def __len__(self) -> int:
        return int(self.row_of.size)

    @cached_property
    def length(self) -> Int64:
        """ns of each kernel."""
        return self.ops.end[self.rows] - self.ops.start[self.rows]

    @property
    def stream(self) -> Int64:
        return self.ops.stream[self.rows]

    @property
    def blocks(self) -> Int64:
        return self.ops.blocks[self.rows]

    @cached_property
    def time_of(self) -> npt.NDArray[np.float64]:
        """Summed ns a distinct name."""
        return np.asarray(np.bincount(self.row_of, weights=self.length, minlength=len(self.names)), np.float64)

    def mask(self, flags: Sequence[bool]) -> npt.NDArray[np.bool_]:
        """The kernels whose name is flagged."""
        return np.array(flags, bool)[self.row_of] if flags else np.zeros(len(self), bool)

    def time(self, flags: Sequence[bool]) -> float:
        """Summed ns of the flagged names."""
        return float(self.time_of[np.array(flags, bool)].sum()) if flags else 0.0


def short_name(name: str) -> str:
    """The name without template arguments, parameters and leading `void`, for tables: `at::native::reduce_kernel`."""
    text = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    depth = 0
    out: list[str] = []
    for char in text:
        if char in "<(":
            if char == "(" and depth == 0 and out:
                break
            depth += 1
        elif char in ">)":
            depth = max(0, depth - 1)
        elif depth == 0:
            out.append(char)
    short = "".join(out).strip()
    inner = re.search(r"(\w+Functor\w*|\w+_kernel(?:_impl|_cuda)?\w*|\w+Ops|\w*_s?\d+gemm\w+)", text[len(short) :])
    return f"{short} [{inner.group(1)}]" if inner and inner.group(1) not in short else short or name
