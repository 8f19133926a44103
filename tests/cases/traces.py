"""What is known of the shared recordings (traces/README.md there), as cases whose timelines are files."""

from __future__ import annotations

from dataclasses import dataclass

from cases.kernels import LAUNCHING
from cases.loading import LOADER, SYNCS
from cases.transfers import TRANSFER

HOST = (
    "launch_bound",
    "tiny_kernels",
    "graph_candidate",
    "host_code_bound",
    "cpu_ops_in_step",
    "gpu_idle",
    "optimizer_unfused",
)
COMMUNICATION = ("straggler_rank", "waits_in_collectives", "exposed_communication", "grad_sync_each_microstep")
COMPUTE = ("tensor_cores_unused", "tf32_off", "elementwise_bound", "too_few_blocks", "attention_unfused", "odd_shapes")


@dataclass(frozen=True)
class Label:
    """file: below traces/. first, silent, status, bound_by: as of a Case; first empty: nothing of warning or above.
    first_if_any: nothing need be named, but what is must be one of these."""

    file: str
    first: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    status: str | None = None
    bound_by: str | None = None
    first_if_any: tuple[str, ...] = ()


LABELS = (
    Label("nsys/h100_2gpu_streamed_weights.sqlite", TRANSFER, ("pageable_h2d", *LAUNCHING, *LOADER, *SYNCS), bound_by="transfer"),
    Label("nsys/h100_2gpu_train_before.sqlite", silent=(*LOADER, *SYNCS, *TRANSFER), status="healthy"),
    Label("nsys/healthy_1pct_idle.sqlite", silent=(*LOADER, *SYNCS, *TRANSFER, *LAUNCHING, *COMMUNICATION), status="healthy"),
    Label("nsys/two_kernels_only.sqlite", status="cannot_judge"),
    Label("nsys/a100_sync_after_each_kernel.sqlite", silent=(*LOADER, *LAUNCHING, "tensor_cores_unused"),
          first_if_any=("sync_idle", "hot_kernel", "too_few_blocks", "fp64_used")),
    Label("nsys/a100_saxpy_old_schema.sqlite", ("pageable_h2d", "exposed_copy", "large_readback", "gpu_idle"), (*LOADER, *SYNCS)),
    Label("kineto/v100_resnet50_workers0.json.gz", ("loader_workers_zero",), (*TRANSFER, *SYNCS), bound_by="input"),
    Label("kineto/v100_resnet50_workers4.json.gz", HOST, (*LOADER, *SYNCS, *TRANSFER)),
    Label("kineto/early2021_resnet50_workers0.json.gz", ("loader_workers_zero",), (*TRANSFER, *SYNCS), bound_by="input"),
    Label("kineto/a100_ddp_overlap_control.json.gz", (*COMMUNICATION, *HOST), LOADER),
    Label("kineto/a100_nccl_2024.json.gz", HOST, (*LOADER, *SYNCS), bound_by="launch"),
    Label("kineto/v100_ns_resolution.json.gz", ("tensor_cores_unused",), (*LOADER, *SYNCS, *TRANSFER, *LAUNCHING), bound_by="compute"),
    Label("kineto/cpu_only.json.gz", silent=(*SYNCS, *TRANSFER, *LAUNCHING, "gpu_idle", "gpu_unused")),
    Label("kineto/a100_event_sync.json.gz", status="cannot_judge"),
    Label("kineto/b200_eager_8rank_rank.json.gz", HOST, (*LOADER, *SYNCS), bound_by="launch"),
    Label("kineto/h100_qwen_inference.json.gz", silent=(*LOADER, *SYNCS, *TRANSFER), first_if_any=COMPUTE),
    Label("kineto/mi300_qwen_inference.json.gz", silent=(*LOADER, *SYNCS, *TRANSFER), first_if_any=COMPUTE),
    Label("kineto/h100_owlv2.json.gz", LOADER, (*SYNCS, *TRANSFER), bound_by="input"),
    Label("kineto/megatron_tp8", ("straggler_rank",), (*LOADER, *TRANSFER), bound_by="communication"),
)  # fmt: skip
