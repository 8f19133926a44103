"""FLOPs, MACs, roofline and memory of models, against figures that others published and against real runs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")

from gpudiag.bench.fit import Footprint, dry_run, largest_batch, line_of, usable_bytes  # noqa: E402
from gpudiag.bench.flops import CONV, MATMUL, OTHER, Counted, count_model, counting  # noqa: E402
from gpudiag.bench.models import ModelSpec, build_model, check_spec, loss_of  # noqa: E402
from gpudiag.bench.result import MeasuringRules  # noqa: E402
from gpudiag.bench.roofline import Peaks, dtype_of_kind, judge, table_peaks  # noqa: E402
from gpudiag.errors import GpudiagError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# GMAC at 224 x 224: torchvision's model pages (printed there as GFLOPS: 4.09, 7.80, 0.22, 0.39), parameters likewise;
# ViT-Ti/16: 1.26 GMAC and 5.7 M parameters in timm's results tables.
PUBLISHED = {
    "resnet50": (4.09, 25_557_032),
    "mobilenet_v3_large": (0.22, 5_483_032),
    "efficientnet_b0": (0.39, 5_288_548),
    "vit_tiny_16": (1.26, 5_717_416),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_multiply_adds_and_parameters_are_those_published(name: str) -> None:
    spec = ModelSpec(name)
    model = build_model(spec, 0)
    count = count_model(model, spec, 8, 0)
    macs, parameters = PUBLISHED[name]
    assert count.macs_forward / 1e9 == pytest.approx(macs, abs=0.0101)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert count.flops_forward == 2 * count.macs_forward
    assert count.flops_training is not None
    # backward costs twice the forward, less the first layer's input gradient; depthwise layers must not count channels-fold
    assert 2.8 < count.flops_training / count.flops_forward < 3.1


def test_torch_s_own_counter_agrees_where_it_counts_everything() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = build_model(ModelSpec("resnet50"), 0).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad(), FlopCounterMode(display=False) as theirs:
        model(x)
    with torch.no_grad(), counting() as ours:
        model(x)
    assert ours.flops == theirs.get_total_flops()


def test_fused_attention_counts_as_much_as_its_products_written_out() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(2, 3, 50, 64)
    with torch.no_grad(), counting() as fused:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counting() as written:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert fused.flops == written.flops == 2 * 2 * 3 * 2 * 50 * 50 * 64


def test_a_depthwise_convolution_s_gradients_cost_what_its_forward_costs() -> None:
    conv = torch.nn.Conv2d(32, 32, 3, groups=32, padding=1)
    x = torch.randn(2, 32, 8, 8, requires_grad=True)
    with counting() as forward:
        out = conv(x)
    with counting() as backward:
        out.sum().backward()
    assert forward.flops == 2 * (2 * 32 * 8 * 8 * 9)  # 2 FLOP x outputs x 3x3 taps of one channel
    assert backward.flops == 2 * forward.flops


def test_bytes_are_what_operations_read_and_write_and_views_move_none() -> None:
    a, b = torch.zeros(100, 50), torch.zeros(50, 20)
    with torch.no_grad(), counting() as counted:
        (a.t().t() @ b).view(-1)
    assert counted.bytes == 4 * (100 * 50 + 50 * 20 + 100 * 20)
    assert counted.flops == 2 * 100 * 50 * 20


PEAKS = Peaks("cpu", 1, {"fp32": 100.0, "tf32": 800.0}, "data sheet", 10.0, "data sheet")


def test_the_roof_is_compute_or_memory_by_where_the_ideal_time_goes() -> None:
    # 1 GFLOP at 100 GFLOP/s = 10 ms; 10 MB at 10 GB/s = 1 ms
    compute = judge(Counted([(MATMUL, 10**9, 10**7)]), 2, 0.02, {"": "fp32"}, PEAKS, "cpu")
    assert (compute.bound, compute.peak_share, compute.ridge) == ("compute", pytest.approx(0.5), pytest.approx(10.0))
    assert compute.ideal_s_per_image == pytest.approx(0.005)
    memory = judge(Counted([(MATMUL, 10**9, 10**7), (OTHER, 0, 2 * 10**8)]), 1, 0.1, {"": "fp32"}, PEAKS, "cpu")
    assert memory.bound == "memory"
    assert memory.memory_share == pytest.approx(20 / 30)


def test_each_kind_is_held_against_the_peak_of_the_units_it_runs_on() -> None:
    dtypes = dtype_of_kind("fp32", device_has_tf32=True, matmul_tf32=False, conv_tf32=True)
    roof = judge(Counted([(CONV, 8 * 10**9, 1), (MATMUL, 10**9, 1)]), 1, 0.04, dtypes, PEAKS, "gpu")
    # 8 GFLOP at 800 and 1 at 100 need 20 ms together: an effective peak of 450, not 800
    assert roof.peak_gflops == pytest.approx(450.0)
    assert roof.dtype == "fp32+tf32"
    assert dtype_of_kind("bf16", True, False, True) == {"": "bf16"}
    assert set(dtype_of_kind("fp32", False, True, True).values()) == {"fp32"}


def test_a_peak_slower_than_the_model_is_no_peak() -> None:
    measured = Peaks("cpu", 1, {"fp32": 1.0}, "measured here: matrix product", 10.0, "measured")
    roof = judge(Counted([(MATMUL, 10**9, 10**6)]), 1, 0.1, {"": "fp32"}, measured, "cpu")
    assert roof.peak_share is None and roof.bound == "unknown"
    assert "not known" in roof.peak_source


def test_data_sheet_peaks_are_the_dense_ones() -> None:
    peaks = table_peaks("cuda:0", "NVIDIA H100 80GB HBM3")
    assert peaks is not None
    assert peaks.gflops["bf16"] == pytest.approx(989_500)
    assert table_peaks("cuda:0", "NVIDIA A10G") is None


def small(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32)


def build_small() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3, padding=1),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 10),
    )


def build_reader() -> torch.nn.Module:
    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if float(x.sum()) > 0 else -self.layer(x)

    return Reader()


SMALL = ModelSpec("test_bench_flops:build_small", (3, 32, 32))


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "sgd"), ("fp32", "adamw"), ("bf16", "adam")])
def test_a_dry_run_counts_the_bytes_of_a_real_run(precision: str, optimizer: str) -> None:
    fake = dry_run(SMALL, 8, precision, optimizer, training=True)
    real = dry_run(SMALL, 8, precision, optimizer, training=True, fake=False)
    for field in ("weights", "gradients", "optimizer", "inputs"):
        assert getattr(fake, field) == getattr(real, field)
    # under autocast the fake batch norm keeps its statistics in bf16 where the real one keeps fp32: a few bytes a channel
    assert fake.peak == pytest.approx(real.peak, rel=1e-3)
    assert fake.activations == pytest.approx(real.activations, rel=1e-3)
    assert fake.step_peak == real.step_peak
    weights = sum(p.numel() for p in build_small().parameters()) * 4
    assert fake.gradients == weights
    states = {"sgd": 1, "adam": 2, "adamw": 2}[optimizer] * weights
    assert states <= fake.optimizer <= states + 64  # Adam's step counters


def test_torch_s_profiler_sees_the_same_peak() -> None:
    """An independent count: the allocator's own events while the same step runs."""
    from torch.profiler import ProfilerActivity, profile

    torch.manual_seed(0)
    model = build_small()
    x = small(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(x), None, 0).backward()
        optimizer.step()

    step()
    standing = sum(t.untyped_storage().nbytes() for t in [*model.parameters(), *model.buffers(), x]) + sum(
        t.untyped_storage().nbytes()
        for p in model.parameters()
        for t in (p.grad, optimizer.state[p]["momentum_buffer"])
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    now = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    footprint = dry_run(SMALL, 64, "fp32", "sgd", training=True)
    assert max(footprint.peak, footprint.step_peak) == pytest.approx(standing + peak, rel=0.03)


def test_serving_needs_no_gradients_and_half_the_weights_in_low_precision() -> None:
    full = dry_run(SMALL, 8, "fp32", "sgd", training=False)
    half = dry_run(SMALL, 8, "bf16", "sgd", training=False)
    assert full.gradients == full.optimizer == full.activations == 0
    assert half.weights < 0.6 * full.weights
    assert half.peak < full.peak


def test_a_model_that_reads_its_values_is_an_error_with_another_way() -> None:
    with pytest.raises(GpudiagError, match="depends on values") as caught:
        dry_run(ModelSpec("test_bench_flops:build_reader", (8,)), 4, "fp32", "sgd", training=True)
    assert "bench" in caught.value.hint


def points(*peaks: int) -> tuple[Footprint, Footprint, Footprint]:
    first, second, third = (Footprint(b, 0, 0, 0, 0, 0, p) for b, p in zip((4, 16, 64), peaks, strict=True))
    return first, second, third


def test_the_largest_batch_is_where_the_line_meets_the_memory() -> None:
    fit = line_of(points(1_400, 2_600, 7_400), "training", "fp32", "sgd", "cpu")
    assert (fit.fixed, fit.per_image, fit.linear) == (1000.0, 100.0, True)
    assert largest_batch(fit, 2_000) == 10
    assert largest_batch(fit, 1_099) == 0
    heavy_step = msgspec.structs.replace(fit, step_fixed=1_950.0)
    assert heavy_step.peak_at(2) == 1_950.0
    assert largest_batch(heavy_step, 1_900) == 0  # the optimizer's step alone does not fit, whatever the batch
    assert largest_batch(heavy_step, 2_000) == 10
    assert not line_of(points(1_400, 5_000, 7_400), "training", "fp32", "sgd", "cpu").linear


def test_the_reserve_is_taken_off_and_gigabytes_are_read_low() -> None:
    assert usable_bytes(24, 1) == 23e9
    assert usable_bytes(0.5, 1) == 0


def test_models_are_named_or_your_own_with_a_shape() -> None:
    assert check_spec("resnet50", None, "").input_shape == (3, 224, 224)
    assert check_spec("my.net:build", (3, 8, 8), "").input_shape == (3, 8, 8)
    with pytest.raises(GpudiagError, match="not one of"):
        check_spec("resnet5000", None, "")
    with pytest.raises(GpudiagError, match="its input is not known"):
        check_spec("my.net:build", None, "")
    with pytest.raises(GpudiagError, match="cannot import"):
        build_model(ModelSpec("no_such_module_here:build", (3,)), 0)
    with pytest.raises(GpudiagError, match=r"returned int, not a torch\.nn\.Module"):
        build_model(ModelSpec("os:getpid", (3,)), 0)


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second = (build_model(ModelSpec("mobilenet_v3_large"), 7) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert MeasuringRules().seed == 0
