"""Kernel names as recordings have them, and what is read off them."""

from __future__ import annotations

import pytest

from gpudiag.kernels import classify, short_name


@pytest.mark.parametrize(
    ("name", "family", "tensor_cores", "number_format"),
    [
        ("volta_sgemm_64x64_nt", "gemm", False, "fp32"),
        ("volta_h884gemm_128x128_ldg8_nn", "gemm", True, "half"),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", "gemm", True, "half"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(Params)", "gemm", True, "tf32"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x256x8_stage3_ffma_aligna4_kernel", "gemm", False, "fp32"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_kernel", "gemm", True, "half"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "gemm", True, "half"),
        ("cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1", "conv", False, "fp32"),
        ("void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int)", "conv", False, "fp32"),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)", "conv", False, "fp32"),
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32_MI16x16x1_SN", "gemm", True, "fp32"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Params)", "attention", True, "half"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)", "elementwise", False, "fp32"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(float)", "reduction", False, "fp32"),
        ("void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>(float)", "norm", False, "fp32"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(int)", "optimizer", False, "fp32"),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>(int)", "copy", False, "fp32"),
        ("ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevComm*)", "communication", False, "half"),
        ("triton_poi_fused_add_0", "elementwise", False, "unknown"),
        ("my_kernel", "other", False, "unknown"),
    ],
)  # fmt: skip
def test_class_of_a_name(name: str, family: str, tensor_cores: bool, number_format: str) -> None:
    assert classify(name) == (family, tensor_cores, number_format)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)", "at::native::vectorized_elementwise_kernel [CUDAFunctor_add]"),
        ("volta_sgemm_64x64_nt", "volta_sgemm_64x64_nt"),
        ("<<<(((", "<<<((("),
        ("", ""),
    ],
)  # fmt: skip
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short
