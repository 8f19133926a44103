"""Kernels by family, format and grid; the optimizer's share; operators that kept the CPU busy."""

from __future__ import annotations

import inspect

import pytest
from builders import Recorder, measured

from gpudiag.metrics.base import Missing
from gpudiag.metrics.kernel_work import FOREACH, FUSED, NAMES
from gpudiag.timeline import DeviceInfo, Kind

US = 1_000
SGEMM = "ampere_sgemm_128x64_tn"
HALF_TC = "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
REDUCE = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>"


def run_of(*kernels: tuple[str, int], steps: int = 4, **more) -> Recorder:
    """Each step of 1000 us: these kernels (name, us) one after the other, 5 us apart."""
    recorder = Recorder()
    recorder.steps(steps, 1000 * US)
    for step in range(steps):
        at = step * 1000 * US + 10 * US
        for name, length in kernels:
            recorder.launch(at, at + length * US, name, **more)
            at += (length + 5) * US
    return recorder


def values(recorder: Recorder, *names: str, **more) -> dict[str, float]:
    got = measured(recorder, **more)
    return {name: got[name].value for name in names}


def test_time_count_median_short_and_hot() -> None:
    recorder = run_of(("a", 100), ("a", 100), ("b", 50), ("c", 5), ("c", 5))
    recorder.kernel(990 * US, 995 * US, "ncclAllReduce", kind=Kind.COMM)
    assert values(
        recorder, "kernel_time", "kernels_per_step", "kernel_median_time", "kernel_short_share", "hot_kernel_share"
    ) == {
        "kernel_time": 260 * US,
        "kernels_per_step": 5,
        "kernel_median_time": 50 * US,
        "kernel_short_share": 0.4,
        "hot_kernel_share": pytest.approx(200 / 260),
    }


def test_kernels_outside_the_window_do_not_count() -> None:
    recorder = run_of((SGEMM, 100))
    recorder.kernel(-900 * US, -100 * US, SGEMM)
    recorder.kernel(4001 * US, 4900 * US, HALF_TC)
    assert values(recorder, "kernel_time", "gemm_time", "tensor_core_share") == {
        "kernel_time": 100 * US,
        "gemm_time": 100 * US,
        "tensor_core_share": 0,
    }


def test_products_by_format_and_tensor_cores() -> None:
    recorder = run_of((SGEMM, 60), (HALF_TC, 30), ("void implicit_convolve_sgemm<float>", 10), (ADD, 40))
    assert values(recorder, "gemm_time", "gemm_fp32_time", "tensor_core_share", "fp64_time") == {
        "gemm_time": 100 * US,
        "gemm_fp32_time": 70 * US,
        "tensor_core_share": 0.3,
        "fp64_time": 0,
    }
    assert isinstance(measured(run_of((ADD, 40)))["tensor_core_share"], Missing)
    assert values(run_of(("ampere_dgemm_64x64_nn", 40)), "fp64_time") == {"fp64_time": 40 * US}


def test_what_formats_could_gain_comes_from_the_device() -> None:
    recorder = run_of((SGEMM, 60))
    assert values(recorder, "tensor_core_speedup", "tf32_speedup", "fp64_rate_ratio") == {
        "tensor_core_speedup": pytest.approx(312 / 19.5),
        "tf32_speedup": pytest.approx(156 / 19.5),
        "fp64_rate_ratio": pytest.approx(9.7 / 19.5),
    }
    old = measured(recorder, devices={0: DeviceInfo("P100", 56, (6, 0))})
    assert isinstance(old["tensor_core_speedup"], Missing), "it has no tensor cores"
    assert old["fp64_rate_ratio"].value == pytest.approx(0.5)
    for devices in ({}, {0: DeviceInfo("Future", 56, (99, 0))}, {0: DeviceInfo("AMD Instinct MI300", 56, (9, 0))}):
        assert isinstance(measured(recorder, devices=devices)["tf32_speedup"], Missing)


def test_products_that_fell_off_tensor_cores_are_odd() -> None:
    narrow = "cutlass_80_tensorop_f16_s16816gemm_f16_64x64_32x6_tn_align2"
    assert values(run_of((narrow, 30)), "odd_gemm_time") == {"odd_gemm_time": 30 * US}
    assert values(run_of(("ampere_hgemm_128x64_nn", 30)), "odd_gemm_time") == {"odd_gemm_time": 30 * US}


@pytest.mark.parametrize(
    "name",
    [
        "cutlass_80_tensorop_i16832gemm_s8_256x128_64x3_tn_align16",  # the widest alignment
        "cutlass_80_tensorop_f16_s16816gemm_f16_64x64_32x6_tn_align8",
        "void gemvNSP_kernel<__nv_bfloat16, __nv_bfloat16, float>",  # a matrix-vector product
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __half, float, __half>",
        SGEMM,
        HALF_TC,
    ],
)
def test_products_that_are_as_they_should_be_are_not_odd(name: str) -> None:
    assert values(run_of((name, 30)), "odd_gemm_time") == {"odd_gemm_time": 0}


def test_layout_conversions_count_beside_convolutions_only() -> None:
    convert = "void cudnn::ops::nchwToNhwcKernel<__half, __half, float>"
    transpose = "void batched_transpose_32x32_half"
    conv = "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32"
    assert values(run_of((convert, 20), (transpose, 10), (conv, 100)), "layout_time") == {"layout_time": 30 * US}
    assert values(run_of((convert, 20), (HALF_TC, 100)), "layout_time") == {"layout_time": 0}
    deconvolution = "void conv_transpose2d_dgrad_kernel"
    assert values(run_of((deconvolution, 100)), "layout_time") == {"layout_time": 0}


SOFTMAX = "void at::native::(anonymous namespace)::softmax_warp_forward<float, float, float, 10, false>"


def test_softmax_between_two_products_is_attention_written_out() -> None:
    recorder = run_of((HALF_TC, 30), (ADD, 5), (SOFTMAX, 20), (HALF_TC, 40), (ADD, 5))
    assert values(recorder, "attention_unfused_time") == {"attention_unfused_time": 90 * US}


def test_softmax_of_the_loss_or_beside_fused_attention_is_not() -> None:
    loss = [(name, 5) for name in ("nll_loss_forward", "fill", "nll_loss_backward", "softmax_backward", ADD)]
    recorder = run_of((HALF_TC, 30), (SOFTMAX, 20), *loss)
    assert values(recorder, "attention_unfused_time") == {"attention_unfused_time": 0}
    fused = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>"
    recorder = run_of((fused, 30), (HALF_TC, 30), (SOFTMAX, 20), (HALF_TC, 40))
    assert values(recorder, "attention_unfused_time") == {"attention_unfused_time": 0}


def test_elementwise_kernels_in_a_row_on_one_stream_are_a_chain() -> None:
    recorder = run_of((ADD, 10), (ADD, 10), (REDUCE, 10), (SGEMM, 50), (ADD, 10))
    assert values(recorder, "elementwise_time", "elementwise_chain") == {
        "elementwise_time": 40 * US,
        "elementwise_chain": pytest.approx(16 / 5),  # 3, then 1 + 3 over the step's end thrice, then 1
    }
    compiled = run_of(("triton_poi_fused_add_relu_0", 10), (SGEMM, 50))
    assert values(compiled, "elementwise_time", "elementwise_chain") == {"elementwise_time": 0, "elementwise_chain": 1}


def test_grids_smaller_than_the_device_waste_what_they_leave_empty() -> None:
    recorder = run_of(("small", 100), blocks=25)
    for step in range(4):
        at = step * 1000 * US
        recorder.kernel(at + 300 * US, at + 400 * US, "full", blocks=100)
        recorder.kernel(at + 500 * US, at + 509 * US, "short", blocks=1)
        recorder.kernel(at + 600 * US, at + 700 * US, "unknown")
    assert values(recorder, "few_block_time", "few_block_waste") == {
        "few_block_time": 100 * US,
        "few_block_waste": 75 * US,
    }
    assert isinstance(measured(run_of(("small", 100)))["few_block_time"], Missing)
    assert isinstance(measured(recorder, devices={})["few_block_waste"], Missing)


def with_optimizer() -> Recorder:
    """Each step: forward kernel [100, 300), optimizer's range [400, 700) that launches kernels of 50 and 30 us."""
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    for step in range(4):
        at = step * 1000 * US
        recorder.launch(at + 100 * US, at + 300 * US)
        recorder.mark(at + 400 * US, at + 700 * US, "gpudiag::optimizer")
        recorder.launch(at + 410 * US, at + 460 * US, "adam")
        recorder.launch(at + 500 * US, at + 530 * US, "adam")
        recorder.operator(at + 405 * US, at + 420 * US, "aten::_foreach_add_")
        recorder.operator(at + 406 * US, at + 419 * US, "aten::add_")
        recorder.operator(at + 100 * US, at + 110 * US, "aten::mm")
    return recorder


def test_what_was_launched_in_the_optimizers_range_is_the_optimizers() -> None:
    recorder = with_optimizer()
    recorder.mark(0, 4000 * US, "gpudiag::optimizer", process=200, thread=200)  # another rank's in the same file
    recorder.operator(405 * US, 406 * US, "aten::add_", process=200, thread=200)
    assert values(
        recorder,
        "optimizer_time",
        "optimizer_kernels",
        "optimizer_ops",
        "optimizer_idle",
        "optimizer_params",
        "optimizer_ideal_time",
        optimizer_params=(161, 100_000_000),
    ) == {
        "optimizer_time": 80 * US,
        "optimizer_kernels": 2,
        "optimizer_ops": 2,
        "optimizer_idle": 220 * US,
        "optimizer_params": 161,
        "optimizer_ideal_time": pytest.approx(7 * 100e6 / 1555e9 * 1e9),
    }


@pytest.mark.parametrize(
    ("kind", "forms"), [("AdamW", (1, 1)), ("RMSprop", (0, 1)), ("LBFGS", (0, 0)), ("Mine", (0, 0))]
)
def test_an_optimizers_faster_forms_are_those_that_torch_has(kind: str, forms: tuple[int, int]) -> None:
    got = measured(with_optimizer(), optimizer_name=kind)
    assert (got["optimizer_has_fused"].value, got["optimizer_has_foreach"].value) == forms
    assert isinstance(measured(with_optimizer())["optimizer_has_fused"], Missing)


def test_the_forms_are_what_the_installed_torch_says() -> None:
    """Not by what we believe: by the arguments that each class takes."""
    optim = pytest.importorskip("torch.optim")
    classes = {n: c for n, c in vars(optim).items() if isinstance(c, type) and issubclass(c, optim.Optimizer)}
    takes = {n: inspect.signature(c).parameters.keys() for n, c in classes.items()}
    for form, known in (("fused", FUSED), ("foreach", FOREACH)):
        assert {name for name, words in takes.items() if form in words} == known & takes.keys()


def test_the_optimizer_is_missing_where_no_range_says_where_it_is() -> None:
    got = measured(run_of((ADD, 9)))
    for name in ("optimizer_time", "optimizer_kernels", "optimizer_idle", "optimizer_ops", "optimizer_params"):
        assert isinstance(got[name], Missing)
    no_device = measured(with_optimizer(), optimizer_params=(1, 2), devices={})
    assert isinstance(no_device["optimizer_ideal_time"], Missing)


def test_optimizer_operators_are_counted_on_a_cpu_run_too() -> None:
    recorder = Recorder()
    recorder.steps(4, 1000 * US)
    for step in range(4):
        recorder.mark(step * 1000 * US, step * 1000 * US + 500 * US, "gpudiag::optimizer")
        for i in range(3):
            recorder.operator(step * 1000 * US + i * US, step * 1000 * US + i * US + 500, "aten::add_")
    recorder.mark(-900 * US, -1, "gpudiag::optimizer")
    recorder.operator(-800 * US, -700 * US, "aten::add_")
    got = measured(recorder)
    assert got["optimizer_ops"].value == 3
    assert all(isinstance(got[name], Missing) for name in NAMES)


def test_an_operator_of_a_millisecond_that_launched_nothing_ran_on_the_cpu() -> None:
    recorder = Recorder()
    recorder.steps(4, 10_000 * US)
    for step in range(4):
        at = step * 10_000 * US
        recorder.launch(at + 100 * US, at + 1000 * US)
        recorder.operator(at + 500 * US, at + 3000 * US, "aten::topk")  # idle from 1000 on
        recorder.launch(at + 4000 * US, at + 5000 * US)
        recorder.operator(at + 3900 * US, at + 5500 * US, "aten::conv2d")  # launched a kernel
        recorder.operator(at + 6000 * US, at + 6900 * US, "aten::add")  # too short
        recorder.operator(at + 7000 * US, at + 9000 * US, "aten::sort", process=200, thread=200)
    assert values(recorder, "cpu_op_idle") == {"cpu_op_idle": 2000 * US}
    assert isinstance(measured(run_of((ADD, 9)))["cpu_op_idle"], Missing)


def test_a_window_without_kernels_has_no_kernel_shares() -> None:
    recorder = Recorder()
    recorder.copy(0, 10, 10)
    got = measured(recorder)
    assert (got["kernel_time"].value, got["kernels_per_step"].value) == (0, 0)
    assert isinstance(got["hot_kernel_share"], Missing)
