"""The command line: a group whose verbs are imported when they are used, and the one place that turns a failure into an exit code.

Exit codes (DESIGN 7): 0 done, 1 the user's problem (two lines on stderr), 2 usage, 3 a gate failed, 4 a gate could not judge;
130 after Ctrl-C, 141 when the reader of a pipe went away. A bug keeps its traceback.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from gpudiag import __version__
from gpudiag.commands._common import example, no_color_option
from gpudiag.errors import GpudiagError
from gpudiag.report.text import clean

LAZY = {
    "profile": "gpudiag.commands.profile:profile",
    "analyze": "gpudiag.commands.analyze:analyze",
    "report": "gpudiag.commands.report:report",
    "compare": "gpudiag.commands.compare:compare",
    "runs": "gpudiag.commands.runs:runs",
    "rules": "gpudiag.commands.rules:rules",
    "metrics": "gpudiag.commands.metrics:metrics",
    "doctor": "gpudiag.commands.doctor:doctor",
    "bench": "gpudiag.commands.bench:bench",
    "gpus": "gpudiag.commands.gpus:gpus",
    "export": "gpudiag.commands.export:export",
    "review": "gpudiag.commands.review:review",
}

# Said here so that `gpudiag --help` imports no verb.
ABOUT = {
    "profile": "Run a script unchanged, record it, say what holds it back.",
    "analyze": "Say what holds a recording back (nsys, torch.profiler, bundle).",
    "report": "Draw a saved diagnosis as HTML, Markdown, SARIF, JUnit or CSV.",
    "compare": "Two recordings side by side: faster or slower, and where the time went.",
    "runs": "The history of runs: list, show, compare, export.",
    "rules": "List, explain and check the rules.",
    "metrics": "List what is measured, with formulas and units.",
    "doctor": "Check what this machine can record, and what is missing.",
    "bench": "Measure throughput, latency, memory, power and MFU of a model.",
    "gpus": "Compare GPUs by price and performance.",
    "export": "Pack a recording for others, without secrets; or for Perfetto.",
    "review": "Profile, benchmark and GPU choice in one document.",
}

BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports a program that was killed by it
INTERRUPTED = 130  # 128 + SIGINT
# What a stream that is full, gone or broken answers; such an error names no file.
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG})


class Verbs(click.Group):
    """Commands named by LAZY; errors become exit codes in `main`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [verb for verb, target in LAZY.items() if importlib.util.find_spec(target.partition(":")[0])]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, _, name = LAZY[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command), f"{LAZY[cmd_name]} is no click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, ABOUT[verb]) for verb in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:  # caught here: click would exit with 1, which is an error by DESIGN 7
            _silence_stdout()
            ctx.exit(BROKEN_PIPE)
        return result

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """As click's, but an error becomes an exit code here, so that every verb can just raise."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        _open_closed_streams()
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except GpudiagError as error:
            sys.stderr.write(f"gpudiag: {clean(error.message)}\n")
            if error.hint:
                sys.stderr.write(f"  next: {clean(error.hint)}\n")
            sys.exit(1)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except OSError as error:
            if error.errno not in UNWRITABLE or error.filename is not None:
                raise
            _silence_stdout()
            sys.stderr.write(f"gpudiag: cannot write the output: {error.strerror}\n  next: write it elsewhere\n")
            sys.exit(1)
        except (click.Abort, KeyboardInterrupt):
            sys.stderr.write("gpudiag: interrupted\n")
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _open_closed_streams() -> None:
    """A stream that the caller closed (`>&-`) takes what is written and drops it. (The descriptor would else be that of the
    next file that is opened.)"""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (open as long as the program runs)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def _silence_stdout() -> None:
    """The interpreter flushes stdout once more at exit; without a reader that would print a second error."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=example(
        "gpudiag profile train.py --epochs 1      record a run and diagnose it",
        "gpudiag analyze trace.json.gz            diagnose a recording",
        "gpudiag doctor                           what this machine can record",
    ),
)
@click.version_option(__version__, message="gpudiag %(version)s")
@no_color_option
def main() -> None:
    """Why the GPU is not busy with useful work, what to change, and what the change will bring."""
