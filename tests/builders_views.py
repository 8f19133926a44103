"""A diagnosis by hand with pictures in it, for the tests of what is drawn: a training run that waits for its loader."""

from __future__ import annotations

import random

from gpudiag.diagnosis import (
    SCHEMA,
    AccountInfo,
    DeviceFigures,
    Diagnosis,
    Evidence,
    Finding,
    Fix,
    KernelRow,
    Lane,
    MetricValue,
    NotJudged,
    SourceInfo,
    StepsInfo,
    TimelineView,
    Verdict,
)

MS = 1_000_000
US = 1_000
ORIGIN = 1_790_000_000_000_000_000  # wall-clock ns: larger than a double holds exactly, as real recordings are
KERNELS = (
    ("ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x4_tn", "gemm", True),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float, float, float, "
        "at::native::binary_internal::MulFunctor<float> >, at::detail::Array<char*, 3> >(int, float, char*)",
        "elementwise",
        False,
    ),
    ("void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(float, float)", "norm", False),
    ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nchw_tilesize128x128x32_stage4", "conv", True),
    (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(at::native::ReduceOp<float>)",
        "reduction",
        False,
    ),
    ("multi_tensor_apply_kernel<AdamFunctor>", "optimizer", False),
)


class _Picture:
    """Collects lanes; names become codes."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.lanes: list[Lane] = []

    def lane(self, label: str, kind: str, events: list[tuple[int, int, str]], width: int = 0) -> None:
        code = [self.names.setdefault(name, len(self.names)) for _, _, name in events]
        self.lanes.append(
            Lane(
                label=label,
                kind=kind,
                start_ns=tuple(start for start, _, _ in events),
                length_ns=tuple(end - start for start, end, _ in events),
                name=tuple(code),
                detail=f"merged {width} ns" if width else "exact",
                count=tuple(1 + i % 3 for i in range(len(events))) if width else (),
            )
        )


def view(title: str, origin: int, wait: int, work: int, kernels: int = 180, seed: int = 1) -> TimelineView:
    """One step: a wait for the loader, a copy, `kernels` kernels in `work` ns with gaps, and the host ahead of them."""
    rng = random.Random(seed)
    length = wait + work
    copy_end = wait + work // 12
    picture = _Picture()
    device: list[tuple[int, int, str]] = []
    launches: list[tuple[int, int, str]] = []
    owner: list[tuple[int, int, str]] = [(0, wait, "idle.input"), (wait, copy_end, "copy_exposed.h2d")]
    at = copy_end
    pace = (length - copy_end) / kernels
    for i in range(kernels):
        busy = int(pace * rng.uniform(0.35, 0.95))
        name = KERNELS[rng.randrange(len(KERNELS))][0]
        device.append((at, at + busy, name))
        owner.append((at, at + busy, "compute"))
        launch = max(wait, at - int(pace * 2.5))
        launches.append((launch, launch + int(pace * 0.4), "cudaLaunchKernel"))
        following = copy_end + int((i + 1) * pace)
        if following > at + busy:
            owner.append((at + busy, following, "idle.launch" if i % 5 else "idle.host"))
        at = following
    third = (length - wait) // 3
    picture.lane("Who owns the time", "owner", [o for o in owner if o[1] > o[0]])
    picture.lane("Ranges", "range", [(0, length, "gpudiag::step#12")])
    phases = [(0, wait, "data_wait"), (wait, copy_end, "h2d"), (copy_end, wait + third, "forward")]
    phases += [(wait + third, wait + 2 * third, "backward"), (wait + 2 * third, length, "optimizer")]
    picture.lane("Ranges, level 2", "range", phases)
    picture.lane("Waits for the loader", "loader", [(0, wait, "wait for the next batch")])
    picture.lane("Loader worker 0", "loader", [(0, int(wait * 0.93), "fetch a batch")])
    ops = [(s, e + int(pace * 0.5), rng.choice(("aten::linear", "aten::mul", "aten::conv2d"))) for s, e, _ in launches]
    picture.lane("Main thread", "host", [(0, wait, "enumerate(DataLoader)#_next_data"), *ops], width=int(pace))
    picture.lane(
        "Main thread: CUDA calls", "launch", [*launches, (length - third // 4, length, "cudaStreamSynchronize")]
    )
    picture.lane("Stream 7: kernels", "stream", device)
    picture.lane("Stream 7: copies", "copy", [(wait, copy_end, "Memcpy HtoD (Pageable -> Device)")])
    return TimelineView(title, 0, 0, origin, origin + length, tuple(picture.names), tuple(picture.lanes))


def diagnosis(steps: int = 24, views: tuple[TimelineView, ...] | None = None) -> Diagnosis:
    rng = random.Random(7)
    per_step = []
    for i in range(steps):
        wait = int(52 * MS * rng.uniform(0.85, 1.2)) * (2 if i == 17 else 1)
        part = {"compute": int(48 * MS * rng.uniform(0.97, 1.03)), "copy_exposed.h2d": int(5.1 * MS)}
        part |= {"idle.input": wait, "idle.launch": int(11 * MS * rng.uniform(0.8, 1.2)), "idle.host": 3 * MS}
        part |= {"idle.sync": int(1.2 * MS), "memset_exposed": 90 * US}
        per_step.append(part)
    durations = tuple(sum(part.values()) for part in per_step)
    total = sum(durations)
    parts = {name: sum(part[name] for part in per_step) for name in per_step[0]}
    if views is None:
        views = (
            view("Typical step, number 12: 120 ms", ORIGIN + 12 * 120 * MS, 52 * MS, 68 * MS),
            view("Longest step, number 17: 172 ms", ORIGIN + 17 * 120 * MS, 104 * MS, 68 * MS, seed=2),
        )
    start = views[0].start_ns if views else ORIGIN
    findings = (
        Finding(
            rule="loader_wait",
            step="overall",
            category="input",
            severity="critical",
            share=0.44,
            bound_ns=53_100_000,
            estimate_ns=49_800_000,
            title="The GPU waits for the data loader",
            summary="In every step the training loop waits 53.1 ms for the next batch, and the GPU has nothing to do in that time.",
            evidence=(
                Evidence("idle while the loop waits for a batch", "53.1 ms of 120 ms a step", start, start + 52 * MS),
                Evidence("loader", "num_workers=0, batch 256, train.py:31"),
                Evidence("one batch takes a worker", "50.4 ms, of it 44.0 ms on a CPU"),
            ),
            where="train.py:31",
            fixes=(
                Fix(
                    "Load in worker processes: num_workers=4",
                    "the machine has 4 usable CPUs, and the dataset can be pickled",
                    "the loader wait falls from 53.1 ms to under 3 ms a step",
                    "loader = DataLoader(\n    dataset,\n    batch_size=256,\n    num_workers=4,\n    persistent_workers=True,\n    pin_memory=True,\n)",
                ),
                Fix(
                    "Decode and resize the images once, beforehand",
                    "the transforms are not random",
                    "the worker's CPU time falls below 10 ms",
                ),
            ),
            why="With num_workers=0 the batch is made by the same thread that launches the kernels, so loading and computing take turns.",
            basis="severity: share of the step, info 3 %, warning 10 %, critical 25 %",
            wrong_when="the loop waits for something else inside its own iterator, such as a remote queue",
            references=("https://pytorch.org/docs/stable/data.html",),
            devices=((0, 0),),
        ),
        Finding(
            rule="pageable_copy",
            step="transfer",
            category="transfer",
            severity="info",
            share=0.042,
            bound_ns=5_100_000,
            estimate_ns=None,
            title="Batches are copied from pageable memory",
            summary="154 MB a step go to the GPU at 4.6 GB/s from pageable memory, with nothing running beside the copy.",
            evidence=(Evidence("exposed host-to-device copies", "5.10 ms a step", start + 52 * MS, start + 57 * MS),),
            where="train.py:44",
            fixes=(
                Fix(
                    "pin_memory=True and .to(device, non_blocking=True)",
                    "there is work to overlap with",
                    "exposed H2D under 1 ms",
                    'x = x.to("cuda", non_blocking=True)',
                ),
            ),
            devices=((0, 0),),
            estimate_reason="the replay has no rate for pinned copies on this link",
        ),
        Finding(
            rule="launch_bound",
            step="scheduling",
            category="launch",
            severity="warning",
            share=0.0,
            bound_ns=0,
            estimate_ns=None,
            title="Many small kernels, launched one by one",
            summary="180 kernels a step with a median of 31 us; the queue runs dry between them.",
            evidence=(Evidence("gaps under launch calls", "11.0 ms a step", start + 60 * MS, start + 100 * MS),),
            where="",
            fixes=(
                Fix(
                    'torch.compile(model, mode="reduce-overhead")',
                    "shapes do not change from step to step",
                    "idle.launch under 2 ms",
                    'model = torch.compile(model, mode="reduce-overhead")',
                ),
            ),
            devices=((0, 0),),
            caused_by="loader_wait",
        ),
    )
    busiest = 48 * MS * steps
    rows = tuple(
        KernelRow(
            name,
            what,
            30 * steps - 40 * i,
            busiest >> (i + 1),
            (busiest >> (i + 1)) // (30 * steps - 40 * i),
            0.5 ** (i + 1),
            tensor,
        )
        for i, (name, what, tensor) in enumerate(KERNELS)
    )
    return Diagnosis(
        schema=SCHEMA,
        gpudiag="0.1.0",
        source=SourceInfo("bundle", "runs/resnet50-2026-11-30", "torch 2.14.1"),
        verdict=Verdict(
            "bottleneck",
            "input",
            "The GPU waits 53.1 ms of every 120 ms step for the data loader; more loader workers can bring a step down to about 70 ms.",
        ),
        steps=StepsInfo(steps, sorted(durations)[steps // 2], max(durations), "nvtx", 3, 1.0, durations),
        accounts=(AccountInfo(0, 0, "steps", (ORIGIN, ORIGIN + total), total, parts, steps, tuple(per_step)),),
        devices=(
            DeviceFigures(
                0,
                0,
                "NVIDIA A100-SXM4-40GB",
                total,
                total * 45 // 100,
                total * 55 // 100,
                total * 40 // 100,
                0,
                0,
                total * 5 // 100,
                total * 4 // 100,
                90 * US,
                180 * steps,
                0,
                steps * 2,
                steps * 3,
            ),
        ),
        metrics={
            "step_time": MetricValue(sorted(durations)[steps // 2], "ns"),
            "gpu_busy": MetricValue(0.442, "fraction"),
            "h2d_rate": MetricValue(4_600_000_000, "B/s"),
            "mfu": MetricValue(
                missing="the FLOPs of a step are not known", record_with="gpudiag profile --with torch train.py"
            ),
        },
        findings=findings,
        not_judged=(
            NotJudged("power_limited", "no NVML samples", "gpudiag profile train.py"),
            NotJudged("slow_rank", "one rank only", "record every rank: torchrun ... with gpudiag profile on each"),
        ),
        warnings=("The recording holds Python stacks, which slow the host down: host times are upper bounds.",),
        kernels=rows,
        rules={
            "loader_wait": "fired",
            "pageable_copy": "fired",
            "launch_bound": "fired",
            "gpu_idle": "clear",
            "power_limited": "not_judged",
            "slow_rank": "not_judged",
        },
        ranks=(),
        loaders=(
            {
                "loader": 0,
                "where": "train.py:31",
                "num_workers": 0,
                "batch_size": 256,
                "pin_memory": False,
                "prefetch_factor": None,
            },
        ),
        environment={"torch": "2.14.1", "cuda": "12.8", "usable_cpus": 4, "gpus": ["NVIDIA A100-SXM4-40GB"]},
        views=views,
    )
