"""The metrics of one device: the account's parts, copies, kernels, launches, syncs, communication."""

from __future__ import annotations

from gpudiag.metrics.base import MetricSpec as M

_ACCOUNT = "the exclusive account (DESIGN 4), a step"
_NAMES = "kernel names"
_WORK = "work of the GPU: where more than one stream runs the times may overlap"

BUSY = (
    M(
        "gpu_busy",
        "ratio",
        "share of the window with any work on the device (kernel, copy, memset, graph)",
        "NVML's utilisation, or how well the SMs are used",
    ),
    M("gpu_idle", "ns", "time without any work on the device, a step; the sum of the idle parts", source=_ACCOUNT),
    M(
        "idle_before_first",
        "ns",
        "of idle_unknown, the part before the first recorded operation, a step: work launched before the recording may have run",
        source=_ACCOUNT,
    ),
    M(
        "idle_queued",
        "ns",
        "of idle_unknown, the part in which launched work had waited 100 us and more to start, a step",
        "launch latency",
        _ACCOUNT,
    ),
    M("long_gap_time", "ns", "idle gaps of at least max(1 ms, 5 % of the step), a step"),
    M("long_gap_steps", "count", "steps that hold such a gap (without steps: such gaps)"),
    M(
        "gpu_ops_total",
        "count",
        "kernels, copies, memsets and graph launches in the window; 0 when recorded and there were none",
    ),
    M("kernels_total", "count", "kernels in the window, communication included"),
    M("devices", "count", "devices with work in the recording"),
    M(
        "busy_spread",
        "ratio",
        "highest - lowest share of the window with work of the device's own (kernels, copies, memsets) over the devices of the run; waiting in collectives is none",
        "imbalance inside a device",
    ),
    M(
        "mfu",
        "ratio",
        "model FLOPs a second / peak FLOPs a second of the data type",
        "the share of time that the GPU is busy",
        "FLOPs counter or formula; a recording holds neither today, `gpudiag bench` measures it",
    ),
    M(
        "compute_capability",
        "count",
        "major + minor / 10, as 8.0 or 9.0 (a version, not a share)",
        source="device properties or GPU table",
    ),
    M(
        "queue_full_time",
        "ns",
        "time in which the launch queue was full, a step: the host is ahead of the GPU",
        source="COMMAND_BUFFER_FULL overhead rows",
    ),
)

PARTS = tuple(
    M(name, "ns", f"part {part} of the account: {what}", is_not, _ACCOUNT)
    for name, part, what, is_not in (
        ("compute", "compute", "any non-communication kernel or graph runs", "useful work"),
        (
            "communication_exposed",
            "communication_exposed",
            "a collective runs and no compute",
            "time on the wire: waiting for other ranks is inside",
        ),
        ("copy_exposed_h2d", "copy_exposed.h2d", "a copy to the device runs and no kernel", ""),
        ("copy_exposed_d2h", "copy_exposed.d2h", "a copy to the host runs and no kernel", ""),
        ("copy_exposed_d2d", "copy_exposed.d2d", "a copy inside the device runs and no kernel", ""),
        ("copy_exposed_p2p", "copy_exposed.p2p", "a copy between GPUs runs and no kernel", ""),
        (
            "copy_exposed_managed",
            "copy_exposed.managed",
            "unified memory migrates and no kernel runs",
            "stalls inside kernels",
        ),
        ("copy_exposed_other", "copy_exposed.other", "a copy of unknown direction runs and no kernel", ""),
        ("memset_exposed", "memset_exposed", "a memset runs and nothing else", ""),
        ("idle_input", "idle.input", "the host is in the loader's next or in dataset code", "all of the loader's time"),
        (
            "idle_sync",
            "idle.sync",
            "the device ran dry because the host waited for it with nothing more queued",
            "the length of the waits",
        ),
        (
            "idle_launch",
            "idle.launch",
            "the host is in launch calls or in framework code between launches",
            "cost of launches while the GPU works",
        ),
        ("idle_allocator", "idle.allocator", "the host is in the CUDA allocator", ""),
        ("idle_compile", "idle.compile", "the host compiles or loads modules", ""),
        ("idle_checkpoint_log", "idle.checkpoint_log", "the host saves or logs", ""),
        ("idle_gc", "idle.gc", "Python's garbage collector runs", ""),
        ("idle_host", "idle.host", "the host runs other user code", ""),
        ("idle_profiler", "idle.profiler", "the recorder's own work", ""),
        ("idle_unknown", "idle.unknown", "nothing recorded says what the host did", "idle for no reason"),
    )
)

COPIES = (
    M("copy_exposed", "ns", "sum of the copy_exposed parts, a step", source=_ACCOUNT),
    M(
        "copy_exposed_link",
        "ns",
        "copy_exposed_h2d + copy_exposed_d2h + copy_exposed_other: exposed copies over the host link",
        source=_ACCOUNT,
    ),
    M("h2d_bytes", "bytes", "bytes copied to the device, a step"),
    M("h2d_pageable_bytes", "bytes", "of h2d_bytes, from pageable memory"),
    M("h2d_pageable_exposed", "ns", "of copy_exposed_h2d, the time in which only copies from pageable memory run"),
    M("h2d_pinned_time", "ns", "union of the copies to the device from pinned memory, a step"),
    M("h2d_pinned_exposed", "ns", "of copy_exposed_h2d, the time in which a copy from pinned memory runs"),
    M(
        "h2d_pinned_rate",
        "bytes/s",
        "bytes / time over the pinned copies to the device of at least 1 MB",
        "the link's limit",
    ),
    M("h2d_pageable_rate", "bytes/s", "bytes / time over the pageable copies to the device of at least 1 MB"),
    M("d2h_bytes", "bytes", "bytes copied to the host, a step"),
    M("d2h_large_exposed", "ns", "of copy_exposed_d2h, under copies of at least 64 kB"),
    M("d2h_pageable_bytes", "bytes", "of d2h_bytes, into pageable memory"),
    M(
        "link_rate_share",
        "ratio",
        "median rate of the pinned copies of at least 1 MB / rate of the link (generation x width under load)",
        "a fault: two GPUs may share the link",
    ),
    M("copies_per_step", "count", "copies between host and device, a step", "copies inside a device or between two"),
    M("copy_median_bytes", "bytes", "median size of the copies between host and device"),
    M(
        "copy_api_time",
        "ns",
        "time of the launching threads in copy calls, a step",
        "lost time: the GPU may work meanwhile",
    ),
    M("copy_api_idle", "ns", "time in which the host is in a copy call and the device is idle, a step"),
    M(
        "blocking_copies",
        "count",
        "synchronous cudaMemcpy* calls (not Async) of more than 64 000 bytes between host and device, a step",
        source="nsys's own expert rule",
    ),
    M("blocking_copy_idle", "ns", "of idle_sync, the part that follows such calls, a step"),
    M(
        "reupload_exposed",
        "ns",
        "of copy_exposed_h2d, under copies of at least 1 MB whose size comes three or more times a step, with more than five such copies a step (an input batch has fewer tensors); without steps: four or more such sizes, each three or more times",
        "a fault where weights are offloaded to fit",
    ),
    M("reupload_bytes", "bytes", "bytes of such copies, a step"),
    M("device_copy_time", "ns", "device-to-device copies and copy/contiguous/cat kernels, a step", _WORK),
    M("memset_fill_time", "ns", "memsets and fill kernels, a step", _WORK),
    M(
        "managed_time",
        "ns",
        "exposed migrations of unified memory, a step",
        "the stalls of kernels on page faults, which no table holds",
        _ACCOUNT,
    ),
)

KERNELS = (
    M(
        "kernel_time",
        "ns",
        "sum of the lengths of the non-communication kernels, a step",
        "the time that the GPU is busy where streams overlap",
    ),
    M("kernels_per_step", "count", "kernels that are no communication, a step"),
    M("kernel_median_time", "ns", "median length of such a kernel"),
    M("kernel_short_share", "ratio", "such kernels shorter than 10 us, of all of them"),
    M("hot_kernel_share", "ratio", "kernel time of the largest kernel name, of kernel_time"),
    M("gemm_time", "ns", "kernels that are matrix products or convolutions, a step", _WORK, _NAMES),
    M("gemm_fp32_time", "ns", "of gemm_time, FP32 kernels that use no tensor cores", _WORK, _NAMES),
    M(
        "tensor_core_share",
        "ratio",
        "of gemm_time, in kernels whose name says that they use tensor cores",
        "tensor-core utilisation",
        _NAMES,
    ),
    M(
        "tensor_core_speedup",
        "ratio",
        "tensor-core peak / FP32 peak of the device's generation (at least 1)",
        "a measured gain: kernels that memory limits gain less",
        "GPU table",
    ),
    M("tf32_speedup", "ratio", "TF32 peak / FP32 peak of the device's generation (at least 1)", source="GPU table"),
    M(
        "elementwise_time",
        "ns",
        "elementwise and reduction kernels that torch.compile did not write, a step (copy kernels are in device_copy_time)",
        _WORK,
        _NAMES,
    ),
    M("elementwise_chain", "ratio", "mean number of such kernels in a row on one stream (at least 1)"),
    M("optimizer_time", "ns", "kernels launched in the optimizer's range, a step", _WORK, "ranges"),
    M("optimizer_kernels", "count", "kernels launched in the optimizer's range, a step"),
    M(
        "optimizer_ops",
        "count",
        "framework operators in the optimizer's range, those inside others included, a step (CPU-only runs too)",
    ),
    M("optimizer_params", "count", "parameter tensors of the optimizer", source="gpudiag's collector"),
    M(
        "optimizer_has_fused",
        "count",
        "1 when torch has a fused form of the optimizer, by the name of its class; else 0",
        source="gpudiag's collector",
    ),
    M(
        "optimizer_has_foreach",
        "count",
        "1 when torch has a foreach form of the optimizer, by the name of its class; else 0 (LBFGS, SparseAdam, one of the user's own)",
        source="gpudiag's collector",
    ),
    M(
        "optimizer_ideal_time",
        "ns",
        "bytes that the optimizer moves at most (7 x the parameters: Adam) / memory bandwidth, a step",
        source="parameter sizes; device properties",
    ),
    M("optimizer_idle", "ns", "idle time while the host is in the optimizer's range, a step"),
    M(
        "attention_unfused_time",
        "ns",
        "softmax kernels and the batched products next to them, where no fused attention kernel ran, a step",
        _WORK,
        _NAMES,
    ),
    M(
        "layout_time",
        "ns",
        "layout conversions (nchwToNhwc and the like) and transposes, where convolutions ran, a step",
        _WORK,
        _NAMES,
    ),
    M(
        "odd_gemm_time",
        "ns",
        "16-bit products and convolutions that fell off tensor cores or to align1/align2 variants, a step",
        "odd sizes that still use tensor cores; matrix-vector products, which use none at any size",
        _NAMES,
    ),
    M(
        "few_block_time",
        "ns",
        "kernels of at least 10 us with fewer thread blocks than the device has SMs, a step",
        source="grid sizes",
    ),
    M(
        "few_block_waste",
        "ns",
        "over those kernels: length x (1 - blocks / SMs)",
        "certain: a small problem cannot always be split",
        "grid sizes",
    ),
    M("fp64_time", "ns", "FP64 kernels, a step", _WORK, _NAMES),
    M("fp64_rate_ratio", "ratio", "FP64 peak / FP32 peak of the device", source="GPU table"),
    M(
        "cpu_op_idle",
        "ns",
        "idle time under operators of at least 1 ms that ran on the CPU and launched nothing, a step",
        source="framework operators",
    ),
)

LAUNCHES = (
    M("launch_cost", "ns", "median length of a launch call"),
    M(
        "queue_time",
        "ns",
        "median time from the end of a launch call to the start of its kernel (below 0 where it starts during the call)",
        "a fault: a long queue means that the host is ahead",
    ),
    M(
        "queue_empty_share",
        "ratio",
        "kernels that start within 10 us of their launch call's end with the device idle before, of all kernels with a launch",
        "time lost",
    ),
    M("step_repeat_share", "ratio", "steps whose sequence of kernel names is the commonest one"),
    M("syncs_per_step", "count", "synchronising calls of the launching thread, a step"),
    M(
        "sync_time",
        "ns",
        "time of the host in synchronising calls, a step",
        "lost time: the GPU works under most waits",
    ),
    M("sync_copy_time", "ns", "of sync_time, while only copies run on the device"),
    M("small_readbacks", "count", "copies of at most 1 kB to the host that the host waits for, a step"),
    M(
        "readback_idle",
        "ns",
        "idle time from the end of such a wait to the next work on the device, a step",
        "the length of the wait",
    ),
    M(
        "implicit_syncs",
        "count",
        "operators that read a value back (item, nonzero, masked_select, unique) and in which the host waited, a step",
        "the item() of a tensor on the CPU",
        source="framework operators",
    ),
    M("implicit_sync_idle", "ns", "idle time from the end of their waits to the next work on the device, a step"),
    M("alloc_calls", "count", "cudaMalloc, cudaFree, cudaHostAlloc and the like after warm-up, a step"),
    M(
        "recompilations",
        "count",
        "compilations (torch.compile, Triton, driver JIT, lazy module loads) in the window; one inside another counts once",
    ),
)

COMMUNICATION = (
    M("comm_time", "ns", "union of the collectives, a step"),
    M("comm_overlap_share", "ratio", "share of comm_time with compute at the same time"),
    M(
        "comm_median_bytes",
        "bytes",
        "median message size of the collectives",
        source="collective arguments, which gpudiag does not read today",
    ),
    M(
        "backward_collective_wait",
        "ns",
        "time of the backward pass in which a collective of CPU tensors (gloo) was under way and no operator ran, a step",
        "collectives outside the backward pass, or behind its operators",
        source="ranges of c10d and of the backward pass, operators",
    ),
    M(
        "comm_wait_share",
        "ratio",
        "time in the collectives beyond the rank that took the shortest for the same one, of all time in them: that rank came last, the others waited",
    ),
    M(
        "straggler_share",
        "ratio",
        "of the time that ranks waited for the last one at collectives, the share where that was one of the late ranks (where no rank is clearly late: the rank that came last most often)",
        source="all ranks together",
    ),
    M(
        "straggler_wait",
        "ns",
        "exposed wait for those ranks, mean over the other ranks, a step",
        source="all ranks together",
    ),
    M("is_straggler", "flag", "1 on a rank that was clearly late in 20 % or more of the collectives at which any was"),
    M(
        "dataparallel_time",
        "ns",
        "time of the host in nn.DataParallel's broadcasts, scatters and gathers, a step",
        "torch.gather, or a broadcast of torch.distributed",
    ),
    M("grad_syncs_per_update", "ratio", "backward passes with a gradient reduction per optimizer step (may exceed 1)"),
)
