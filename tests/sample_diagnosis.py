"""Diagnoses as the pipeline makes them, for the tests of the reports: a bottleneck, a healthy run, one that cannot be judged, eight ranks."""

from __future__ import annotations

from gpudiag.diagnosis import (
    SCHEMA,
    AccountInfo,
    DeviceFigures,
    Diagnosis,
    Evidence,
    Finding,
    Fix,
    KernelRow,
    MetricValue,
    NotJudged,
    SourceInfo,
    StepName,
    StepsInfo,
    Verdict,
)

STEP = 41_200_000  # ns
RULE_STEPS: dict[str, StepName] = {
    "gpu_idle": "overall",
    "loader_wait": "overall",
    "loader_workers_zero": "overall",
    "exposed_copy": "transfer",
    "pageable_h2d": "transfer",
    "small_copies": "transfer",
    "hot_kernel": "compute",
    "tensor_cores_unused": "compute",
    "tiny_kernels": "compute",
    "launch_bound": "scheduling",
    "sync_idle": "scheduling",
    "readback_each_step": "scheduling",
    "clocks_throttled": "environment",
}
KERNELS = (
    KernelRow("ampere_sgemm_128x64_tn", "gemm", 1_080, 180_000_000, 166_667, 0.54, False),
    KernelRow(
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> >"
        "(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)",
        "elementwise",
        5_400,
        60_000_000,
        11_111,
        0.18,
        False,
    ),
    KernelRow(
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_warpsize2x2x1_g1_"
        "tensor16x8x8_execute_kernel__5x_cudnn",
        "conv",
        360,
        40_000_000,
        111_111,
        0.12,
        True,
    ),
)


def finding(rule: str = "loader_wait", **changes: object) -> Finding:
    """The finding of a loader that is too slow; any field can be replaced."""
    fields: dict[str, object] = {
        "rule": rule,
        "step": RULE_STEPS.get(rule, "overall"),
        "category": "input",
        "severity": "critical",
        "share": 0.41,
        "bound_ns": 16_900_000,
        "estimate_ns": None,
        "title": "The GPU waits for the DataLoader",
        "summary": "In 41 % of each step the GPU is idle while the main thread waits in the loader's next: "
        "a batch takes 33.8 ms to make and 1 process makes them.",
        "evidence": (
            Evidence("wait in next", "17.4 ms per step", 1_000, 17_401_000),
            Evidence("fetch", "33.8 ms per batch"),
            Evidence("workers", "1 on 8 usable CPUs"),
        ),
        "where": "train.py:42",
        "fixes": (
            Fix(
                "raise num_workers from 1 to 5",
                "the host has CPUs to spare (8 usable, 1.4 in use) and the batches fit in memory",
                "idle.input falls from 41 % to under 2 % of the step",
                "loader = DataLoader(\n    dataset, batch_size=64,\n    num_workers=5, persistent_workers=True)",
            ),
            Fix("decode on the GPU", "the images are JPEG", "fetch falls under 7 ms"),
        ),
        "why": "The loader makes a batch more slowly than the GPU uses one up.",
        "references": ("https://pytorch.org/docs/stable/data.html",),
        "devices": ((0, 0),),
        "estimate_reason": "no replay for loader changes",
    }
    return Finding(**{**fields, **changes})  # type: ignore[arg-type]


def account(rank: int = 0, device: int = 0, **parts: int) -> AccountInfo:
    """18 steady steps of 41.2 ms; the parts given in 1/1000 of the window (`idle_input=410`), the rest is compute."""
    total = 18 * STEP
    named = {
        (
            name
            if name in ("communication_exposed", "memset_exposed")
            else name.replace("exposed_", "exposed.").replace("idle_", "idle.")
        ): total * thousandths // 1000
        for name, thousandths in parts.items()
    }
    named = {"compute": total - sum(named.values()), **named}
    per_step = tuple({name: value // 18 for name, value in named.items()} for _ in range(18))
    return AccountInfo(rank, device, "steps", (5_000, 5_000 + total), total, named, 18, per_step)


def figures(rank: int = 0, device: int = 0) -> DeviceFigures:
    return DeviceFigures(
        rank,
        device,
        "NVIDIA A100-SXM4-40GB",
        18 * STEP,
        9 * STEP,
        9 * STEP,
        8 * STEP,
        0,
        0,
        STEP,
        STEP,
        0,
        6_840,
        0,
        90,
        18,
    )


def bottleneck(**changes: object) -> Diagnosis:
    """Input-bound: the loader, what it explains, a smaller finding, a healthy transfer step, one rule that could not be judged."""
    fields: dict[str, object] = {
        "schema": SCHEMA,
        "gpudiag": "0.1.0",
        "source": SourceInfo("kineto", "runs/train 1/rank0.kineto.json.gz", "torch 2.14.1"),
        "verdict": Verdict(
            "bottleneck",
            "input",
            "the GPU is idle 41 % of each step because it waits for the DataLoader (16.9 of 41.2 ms)",
        ),
        "steps": StepsInfo(18, STEP, 55_000_000, "ProfilerStep", 2, 1.0, (STEP,) * 17 + (55_000_000,)),
        "accounts": (account(idle_input=410, idle_launch=73, copy_exposed_h2d=52),),
        "devices": (figures(),),
        "metrics": {
            "step_time": MetricValue(STEP, "ns"),
            "mfu": MetricValue(missing="no FLOPs recorded", record_with="gpudiag profile --with torch train.py"),
        },
        "findings": (
            finding(),
            finding(
                "launch_bound",
                category="launch",
                severity="info",
                share=0.073,
                bound_ns=3_000_000,
                title="Launches keep the GPU waiting",
                summary="7.3 % of the step is idle time under launches.",
                evidence=(),
                where="",
                fixes=(Fix("use torch.compile", "the shapes are fixed", "idle.launch falls under 2 %"),),
            ),
            finding(
                "gpu_idle",
                share=0.483,
                bound_ns=0,
                severity="warning",
                title="The GPU is idle 48 % of the time",
                caused_by="loader_wait",
                fixes=(),
            ),
        ),
        "not_judged": (
            NotJudged("pageable_h2d", "memory kinds were not recorded", "gpudiag profile --with nsys train.py"),
        ),
        "warnings": ("recorded with Python stacks: host times are inflated",),
        "kernels": KERNELS,
        "rules": {
            **dict.fromkeys(RULE_STEPS, "clear"),
            "loader_wait": "fired",
            "launch_bound": "fired",
            "gpu_idle": "fired",
            "pageable_h2d": "not_judged",
        },
        "rule_steps": RULE_STEPS,
        "environment": {"torch": "2.14.1"},
    }
    return Diagnosis(**{**fields, **changes})  # type: ignore[arg-type]


def healthy(**changes: object) -> Diagnosis:
    return bottleneck(
        **{
            "verdict": Verdict(
                "healthy", "none", "the GPU is busy 98.7 % of each step and no rule found a loss of 3 % or more"
            ),
            "accounts": (account(idle_launch=13),),
            "findings": (),
            "not_judged": (),
            "warnings": (),
            "rules": dict.fromkeys(RULE_STEPS, "clear"),
            **changes,
        }
    )


def cannot_judge(**changes: object) -> Diagnosis:
    return bottleneck(
        **{
            "verdict": Verdict("cannot_judge", "none", "2 kernels in 22 ms are too little to judge"),
            "steps": StepsInfo(0, None, None, "none", 0, 0.0),
            "accounts": (),
            "findings": (),
            "kernels": (),
            "warnings": (),
            "rules": dict.fromkeys(RULE_STEPS, "not_judged"),
            "not_judged": tuple(
                NotJudged(rule, "fewer than 3 steps", "gpudiag profile --steps 20 SCRIPT") for rule in RULE_STEPS
            ),
            **changes,
        }
    )


def eight_ranks(**changes: object) -> Diagnosis:
    """Eight GPUs that wait for each other, rank 6 the slow one."""
    return bottleneck(
        **{
            "verdict": Verdict(
                "bottleneck", "communication", "45 % of each step is exposed communication; rank 6 arrives last"
            ),
            "accounts": tuple(
                account(rank, 0, communication_exposed=100 if rank == 6 else 450, idle_launch=31) for rank in range(8)
            ),
            "devices": tuple(figures(rank) for rank in range(8)),
            **changes,
        }
    )
