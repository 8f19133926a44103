"""Names are read the same way by every reader."""

from __future__ import annotations

import pytest

from gpudiag.read.names import api_name, is_communication, operator


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
        "void vllm::cross_device_all_reduce_2stage<half>",
        "AllGatherKernel",
        "reducescatter_bf16",
        "alltoall_dispatch",
        "all_to_all_v",
        "rcclGenericKernel",
        "void dpsk::ep::internode::combine<true>",
        "deep_ep::ep::INTRANODE::dispatch",
    ],
)
def test_a_collective_is_communication(name: str) -> None:
    assert is_communication(name)


@pytest.mark.parametrize(
    "name", ["ampere_sgemm_128x64_tn", "reduce_kernel", "gather_scatter", "step::internode", "all"]
)
def test_other_kernels_are_not_communication(name: str) -> None:
    assert not is_communication(name)


@pytest.mark.parametrize(
    ("recorded", "plain"),
    [
        ("cudaLaunchKernel_v7000", "cudaLaunchKernel"),
        ("cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync"),
        ("cudaMemcpyAsync_ptsz_v7000", "cudaMemcpyAsync"),
        ("cuLaunchKernel_ptsz", "cuLaunchKernel"),
        ("cudaLaunchKernelExC_v11060", "cudaLaunchKernelExC"),
        ("hipLaunchKernel", "hipLaunchKernel"),
        ("my_version_v2x", "my_version_v2x"),
    ],
)
def test_an_api_name_loses_its_version_and_nothing_else(recorded: str, plain: str) -> None:
    assert api_name(recorded) == plain


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aten::to, op_id = 317177", ("aten::to", None)),
        ("aten::mm, seq = 3, op_id = 9, sizes = [[2, 3], [3, 4]]", ("aten::mm", "[[2, 3], [3, 4]]")),
        ("aten::add, op_id = 9, sizes = [[2], []], input_op_ids = [(8,0)]", ("aten::add", "[[2], []]")),
        (
            "autograd::engine::evaluate_function: AddBackward0, op_id = 4",
            ("autograd::engine::evaluate_function: AddBackward0", None),
        ),
        ("aten::relu", ("aten::relu", None)),
        ("step 31", None),
        ("forward, then more", None),
    ],
)
def test_an_emit_nvtx_range_is_an_operator_with_its_shapes(text: str, expected: tuple[str, str | None] | None) -> None:
    assert operator(text) == expected
