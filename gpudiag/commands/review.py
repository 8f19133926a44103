"""`gpudiag review SCRIPT --model ...`: profile, benchmark, baseline and the choice of a GPU in one document."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from gpudiag.bench.models import check_spec
from gpudiag.bench.result import QUICK, MeasuringRules, read_result
from gpudiag.child import own_module
from gpudiag.commands._common import Outputs, example, load_diagnosis, no_color_option, progress, write_output
from gpudiag.commands.bench import _numbers, _page, _require_torch
from gpudiag.errors import GpudiagError


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=example(
        "gpudiag review --model resnet50 --batch 64 --html review.html train.py --epochs 1",
        "gpudiag review --model my.net:build --input-shape 3,256,256 --need 500 train.py",
        "gpudiag review --model resnet50 --diagnosis d.json --bench b.json     from what was recorded before",
    ),
)
@click.option(
    "--model", required=True, metavar="NAME|MODULE:FUNCTION", help="The script's model: a built-in one or your own."
)
@click.option("--input-shape", metavar="C,H,W", help="Shape of one input of your own model.")
@click.option(
    "--sample-batch", default="", metavar="MODULE:FUNCTION", help="Function of the batch size that returns its inputs."
)
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Training batch.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="For the memory.",
)
@click.option(
    "--optimizer", type=click.Choice(["sgd", "adam", "adamw"]), default="sgd", show_default=True, help="For the memory."
)
@click.option(
    "--need", type=click.FloatRange(0, min_open=True), metavar="IMAGES/S", help="Training rate that the GPU must reach."
)
@click.option("--price", "prices", multiple=True, metavar='"NAME=AMOUNT"', help="Price of a GPU; may be repeated.")
@click.option("--quick", is_flag=True, help="A quick benchmark (small counts).")
@click.option("--device", default="auto", metavar="auto|cpu|cuda:N", show_default=True)
@click.option(
    "--diagnosis", type=click.Path(path_type=Path), help="A diagnosis made before, instead of running the script."
)
@click.option(
    "--bench", "bench_file", type=click.Path(path_type=Path), help="A benchmark made before, instead of measuring."
)
@click.option(
    "-o",
    "--output",
    default="gpudiag-review",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder for what is recorded.",
)
@click.option("--json", "json_", metavar="FILE|-", help="All of it as JSON.")
@click.option("--html", metavar="FILE", help="One self-contained page.")
@no_color_option
@click.argument("command", nargs=-1, metavar="[SCRIPT [ARGS]...]", type=click.UNPROCESSED)
def review(
    model: str,
    input_shape: str | None,
    sample_batch: str,
    batch: int,
    precision: str,
    optimizer: str,
    need: float | None,
    prices: tuple[str, ...],
    quick: bool,
    device: str,
    diagnosis: Path | None,
    bench_file: Path | None,
    output: Path,
    json_: str | None,
    html: str | None,
    command: tuple[str, ...],
) -> None:
    """One document for a pre-deployment meeting: what the script does a second, what limits it, what the next three fixes bring,
    and which GPU is enough."""
    import msgspec

    from gpudiag.bench import review as reviewing
    from gpudiag.bench.fit import measure_fit
    from gpudiag.bench.gpu_table import load_gpus
    from gpudiag.bench.html import render_tables
    from gpudiag.bench.rank import parse_price
    from gpudiag.bench.run import Plan
    from gpudiag.bench.run import bench as measure

    if bool(command) == (diagnosis is not None):
        raise click.UsageError("give a SCRIPT to profile, or --diagnosis of an earlier run")
    _require_torch()
    Outputs(json=json_, html=html).check()
    specs = load_gpus()
    given = dict(parse_price(text, specs) for text in prices)
    spec = check_spec(model, _numbers(input_shape, "--input-shape") if input_shape else None, sample_batch)
    recorded = load_diagnosis(diagnosis or _profile(command, output))
    with progress() as tell:
        if bench_file is None:
            rules = msgspec.structs.replace(
                QUICK if quick else MeasuringRules(), batch=batch, inference_batches=(batch,), optimizer=optimizer
            )
            measured = measure(Plan([spec], ["eager"], device, rules, quick=quick), tell)
        else:
            measured = read_result(bench_file)
        tell("dry run for the memory")
        fits = tuple(measure_fit(spec, precision, optimizer, training) for training in (True, False))
    made = reviewing.Review(
        reviewing.SCHEMA, command, recorded, measured, fits, batch, need, reviewing.price_amounts(given)
    )
    tables = reviewing.tables_of(made, specs)
    if json_:
        write_output(json_, msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    if html:
        write_output(html, render_tables("Review", f"{model}: {recorded.verdict.headline}", tables).encode())
    if json_ != "-":
        from gpudiag.bench.terminal import render_tables as on_terminal

        click.echo(on_terminal(tables, *_page()), nl=False)


def _profile(command: tuple[str, ...], output: Path) -> Path:
    """Runs `gpudiag profile` on the script, whose output stays its own. Raises GpudiagError when it failed."""
    target = output / "diagnosis-of-review.json"
    output.mkdir(parents=True, exist_ok=True)
    arguments = ["profile", "--force", "-o", str(output / "profile"), "--json", str(target), *command]
    done = subprocess.run(own_module("gpudiag", *arguments), check=False, stdout=sys.stderr)
    if done.returncode:
        raise GpudiagError(
            f"{command[0]}: the profiled run ended with {done.returncode}",
            "see its own output above; run it alone first",
        )
    return target
