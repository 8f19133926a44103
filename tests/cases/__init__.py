"""The cases of CASES.jsonl as timelines, and the labelled recordings: what tests/test_cases.py and benchmarks/accuracy.py run."""

from __future__ import annotations

from cases import busy, further, kernels, loading, machine, recordings, transfers
from cases.case import Case

ALL: tuple[Case, ...] = loading.CASES + transfers.CASES + kernels.CASES + machine.CASES + recordings.CASES
FURTHER: tuple[Case, ...] = further.CASES + busy.CASES  # not of CASES.jsonl

# Why the others cannot be said as a timeline, and what holds them instead.
NOT_EXPRESSED: dict[str, str] = {
    "dp-wsl-mnt": "no recording names the file system that the data lies on",
    "dp-sync-folder": "no recording names the file system that the data lies on",
    "geforce-no-p2p": "no recording holds the topology between GPUs or whether they reach each other directly",
    "comm-find-unused": "the program's own warnings on stderr pass through and are not read",
    "prof-nsys-multiproc": "a process that was not recorded is in no timeline, and NVML's list of processes names none",
    "prof-oom-at-stop": "about recording, not judging: tests/test_profile.py (the window ends by heap growth)",
    "prof-readline-block": "about running the script: tests/test_launch.py",
    "prof-fork-unsupported": "about recording: workers write their own records, tests/test_loader_log.py and the samples",
    "prof-perf-paranoid": "about the machine: tests/test_doctor.py",
    "prof-duration-kills-app": "about nsys's arguments: tests/test_nsys_collect.py",
}
