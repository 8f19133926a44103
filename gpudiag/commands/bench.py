"""`gpudiag bench`: measure models on this machine; `compare` and `check` read what was measured."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from gpudiag.bench.models import BUILT_IN, ModelSpec, check_spec
from gpudiag.bench.result import MODES, QUICK, BenchResult, MeasuringRules, Mode, read_result, to_json
from gpudiag.commands._common import example, no_color_option, progress, wants_colour, write_output
from gpudiag.commands._history import keep, save_options
from gpudiag.errors import GpudiagError

UNFAIR = 3  # a check that failed is a gate that failed (DESIGN 7)


@click.group(
    invoke_without_command=True,
    epilog=example(
        "gpudiag bench --quick                                    a first look, under 5 minutes",
        "gpudiag bench --models resnet50 --json a.json --html a.html",
        "gpudiag bench --model my.net:build --input-shape 3,224,224 --modes eager,amp",
        "gpudiag bench --models resnet50 --sweep training --no-cpu-baseline",
        "gpudiag bench compare a.json b.json                      machines side by side",
        "gpudiag bench check a.json                               could someone else get these numbers?",
    ),
)
@click.option(
    "--models",
    metavar="NAME,...",
    help="Of resnet50, resnet101, mobilenet_v3_large, efficientnet_b0, vit_tiny_16 (default: all).",
)
@click.option("--model", "own", metavar="MODULE:FUNCTION", help="Your own: a function that returns the nn.Module.")
@click.option("--input-shape", metavar="C,H,W", help="Shape of one input of --model, without the batch.")
@click.option(
    "--sample-batch",
    default="",
    metavar="MODULE:FUNCTION",
    help="Function of the batch size that returns inputs or (inputs, targets).",
)
@click.option(
    "--modes",
    default=None,
    metavar="MODE,...",
    help="Of eager, amp, compile, compile+amp (default: all; with --quick eager).",
)
@click.option("--device", default="auto", metavar="auto|cpu|cuda:N", show_default=True, help="Where to measure.")
@click.option("--quick", is_flag=True, help="Small counts, for a first look; marked as not for comparison.")
@click.option("--batch", type=click.IntRange(1), help="Training batch, and that of the CPU baseline [32].")
@click.option("--iterations", type=click.IntRange(1), help="Training iterations a round [200].")
@click.option("--latency-iterations", type=click.IntRange(1), help="Latency iterations a round [1000].")
@click.option("--inference-batches", metavar="N,...", help="Batches for inference throughput [8,32,128].")
@click.option("--inference-iterations", type=click.IntRange(1), help="Iterations a round for these [50].")
@click.option("--warm-up", type=click.IntRange(0), help="Iterations before each round [20].")
@click.option("--rounds", type=click.IntRange(1), help="Rounds; the median counts [3].")
@click.option("--pause", type=click.FloatRange(0), help="Seconds between rounds [5].")
@click.option(
    "--unstable-over", type=click.FloatRange(0), metavar="PERCENT", help="Spread above which a result is unstable [10]."
)
@click.option("--instance-seconds", type=click.FloatRange(0.01), help="Length of a round of the pinned instances [10].")
@click.option(
    "--tolerance", type=click.FloatRange(0), help="Largest output error against eager, fp32 modes and ONNX [0.001]."
)
@click.option("--tolerance-low", type=click.FloatRange(0), help="The same for bf16 and fp16 [0.05].")
@click.option("--data", metavar="memory|synthetic|FOLDER", help="Training data [memory].")
@click.option("--workers", type=click.IntRange(0), help="Loader workers for a folder [0].")
@click.option("--optimizer", type=click.Choice(["sgd", "adam", "adamw"]), help="[sgd with momentum]")
@click.option("--learning-rate", type=float, help="[0.01]")
@click.option("--amp-dtype", type=click.Choice(["auto", "bf16", "fp16"]), help="fp16 uses loss scaling [auto].")
@click.option("--threads", type=click.IntRange(1), help="CPU threads [all usable].")
@click.option(
    "--omp-wait-policy",
    type=click.Choice(["active", "passive"]),
    help="How CPU threads wait [the runtime's default; quick: passive].",
)
@click.option("--seed", type=int, help="[0]")
@click.option(
    "--sweep",
    type=click.Choice(["training", "inference"]),
    help="Also the batch sweep: curve, knee, memory, odd sizes.",
)
@click.option(
    "--sweep-largest",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Where the sweep ends at the latest.",
)
@click.option(
    "--cpu-baseline/--no-cpu-baseline", default=True, help="One thread, all threads, pinned instances, ONNX Runtime."
)
@click.option("--onnx/--no-onnx", default=True, help="ONNX Runtime in the CPU baseline (extra [onnx]).")
@click.option("--roofline/--no-roofline", default=True, help="Share of the dense peak, and compute- or memory-bound.")
@click.option(
    "--json", "json_", metavar="FILE|-", help="The result as JSON (schema gpudiag.bench/1); - prints only it."
)
@click.option("--html", metavar="FILE", help="One self-contained page.")
@save_options(by_default=False)
@no_color_option
@click.pass_context
def bench(ctx: click.Context, /, **options: object) -> None:
    """Measure training throughput, latency, memory, power and stability of models on this machine, and their CPU baseline.

    Weights are random and nothing is downloaded: speed is measured, not accuracy. Without a GPU everything that a CPU can do
    is measured, and the rest is listed as not measured.
    """
    if ctx.invoked_subcommand is not None:
        return
    _require_torch()
    from gpudiag.bench.measure import ALL_PARTS
    from gpudiag.bench.run import Plan
    from gpudiag.bench.run import bench as measure

    plan = Plan(
        models=_models(options),
        modes=_modes(options),
        device=str(options["device"]),
        rules=_rules(options),
        quick=bool(options["quick"]),
        cpu=bool(options["cpu_baseline"]),
        onnx=bool(options["onnx"]),
        parts=tuple(part for part in ALL_PARTS if part != "roofline" or options["roofline"]),
        sweep=str(options["sweep"] or ""),
        sweep_largest=int(str(options["sweep_largest"])),
    )
    with progress() as tell:
        result = measure(plan, tell)
    saved = _save(result)
    _write(result, options["json_"], options["html"])
    if options["json_"] != "-":
        from gpudiag.bench.terminal import render

        hints = [f"gpudiag bench check {saved}"]
        if not result.quick:  # a comparison refuses a quick one
            hints.append(f"gpudiag bench compare {saved} OTHER.json")
        click.echo(render(result, *_page(), hints), nl=False)
    if options["save"]:
        _keep(result, saved, options["db"])


@bench.command(epilog=example("gpudiag bench compare laptop.json server.json --html both.html"))
@click.argument("files", nargs=-1, required=True, metavar="A.json B.json ...", type=click.Path(path_type=Path))
@click.option(
    "--anyway", is_flag=True, help="Show quick, unstable or unlike results too, with the objections in the table."
)
@click.option("--html", metavar="FILE", help="Table and plot as one page.")
@no_color_option
def compare(files: tuple[Path, ...], anyway: bool, html: str | None) -> None:
    """Several results side by side, each with its ratio to the first."""
    from gpudiag import __version__
    from gpudiag.bench import compare as comparing
    from gpudiag.bench.health import findings_of_several
    from gpudiag.bench.html import render_comparison
    from gpudiag.bench.terminal import render_comparison as on_terminal

    if len(files) < 2:
        raise click.UsageError("give at least two results")
    results = [read_result(file) for file in files]
    names = _names(files)
    rows = comparing.compare(results, names, anyway)
    table = comparing.as_table(
        rows, names, comparing.objections(results, names) if anyway else [], comparing.differences(results, names)
    )
    found = findings_of_several(results)
    if html:
        write_output(html, render_comparison(rows, table, names, found, __version__).encode())
    click.echo(on_terminal(table, found, *_page()), nl=False)


@bench.command(epilog=example("gpudiag bench check result.json"))
@click.argument("file", type=click.Path(path_type=Path))
@no_color_option
@click.pass_context
def check(ctx: click.Context, file: Path) -> None:
    """Go through the checklist of a reproducible benchmark; exit with 3 when an item would keep others from the same number."""
    from gpudiag.bench.check import checklist
    from gpudiag.bench.terminal import render_check

    items = checklist(read_result(file))
    click.echo(render_check(items, file.name, *_page()), nl=False)
    if any(item.outcome == "missing" for item in items):
        ctx.exit(UNFAIR)


@bench.command(epilog=example("gpudiag bench report result.json --html result.html"))
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--html", metavar="FILE", help="One self-contained page.")
@no_color_option
def report(file: Path, html: str | None) -> None:
    """Show a saved result again."""
    from gpudiag.bench.terminal import render

    result = read_result(file)
    _write(result, None, html)
    click.echo(render(result, *_page()), nl=False)


def _require_torch() -> None:
    from importlib.util import find_spec

    absent = [name for name in ("torch", "torchvision") if find_spec(name) is None]
    if absent:
        raise GpudiagError(f"bench needs {' and '.join(absent)}", "pip install 'gpudiag[torch]'")


def _models(options: dict[str, object]) -> list[ModelSpec]:
    shape = _numbers(options["input_shape"], "--input-shape") if options["input_shape"] else None
    own, named = options["own"], options["models"]
    if own:
        if named:
            raise click.UsageError("--model is your own and --models are built in: give one of them")
        return [check_spec(str(own), shape, str(options["sample_batch"]))]
    if shape or options["sample_batch"]:
        raise click.UsageError("--input-shape and --sample-batch go with --model")
    return (
        [check_spec(name.strip(), None, "") for name in str(named).split(",")]
        if named
        else [check_spec(name, None, "") for name in BUILT_IN]
    )


def _modes(options: dict[str, object]) -> list[Mode]:
    asked = options["modes"]
    if not asked:
        return ["eager"] if options["quick"] else list(MODES)
    chosen = [mode for mode in MODES if mode in [name.strip() for name in str(asked).split(",")]]
    unknown = {name.strip() for name in str(asked).split(",")} - set(MODES)
    if unknown:
        raise click.UsageError(f"--modes: unknown {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    return chosen


def _rules(options: dict[str, object]) -> MeasuringRules:
    """The defaults, or the quick ones, with what was given put in their place."""
    import msgspec

    fields = {
        "batch": options["batch"],
        "train_iterations": options["iterations"],
        "latency_iterations": options["latency_iterations"],
        "inference_iterations": options["inference_iterations"],
        "warm_up": options["warm_up"],
        "rounds": options["rounds"],
        "pause_s": options["pause"],
        "instance_s": options["instance_seconds"],
        "tolerance_fp32": options["tolerance"],
        "tolerance_low": options["tolerance_low"],
        "workers": options["workers"],
        "optimizer": options["optimizer"],
        "learning_rate": options["learning_rate"],
        "amp_dtype": options["amp_dtype"],
        "threads": options["threads"],
        "seed": options["seed"],
    }
    given: dict[str, object] = {name: value for name, value in fields.items() if value is not None}
    if options["omp_wait_policy"]:
        given["omp_wait_policy"] = str(options["omp_wait_policy"]).upper()
    if options["unstable_over"] is not None:
        given["unstable_over"] = float(str(options["unstable_over"])) / 100
    if options["inference_batches"]:
        given["inference_batches"] = _numbers(options["inference_batches"], "--inference-batches")
    data = options["data"]
    if data in ("memory", "synthetic"):
        given["data"] = data
    elif data:
        folder = Path(str(data))
        if not folder.is_dir():
            raise GpudiagError(f"--data {folder}: no such folder", "give memory, synthetic or a folder of images")
        given |= {"data": "folder", "folder": str(folder.resolve())}
    base = QUICK if options["quick"] else MeasuringRules()
    if "batch" in given and options["quick"] and "inference_batches" not in given:
        given["inference_batches"] = (given["batch"],)
    return msgspec.structs.replace(base, **given)


def _numbers(value: object, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in str(value).replace("x", ",").split(",") if part.strip())
    except ValueError as error:
        raise click.UsageError(f"{option} {value}: whole numbers with commas between") from error
    if not numbers or min(numbers) < 1:
        raise click.UsageError(f"{option} {value}: whole numbers of 1 and more")
    return numbers


def results_folder() -> Path:
    """Beside the run history (GPUDIAG_DB), else in the user's data folder (XDG)."""
    history = os.environ.get("GPUDIAG_DB")
    if history:
        return Path(history).parent / "bench"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "gpudiag" / "bench"


def _save(result: BenchResult) -> Path:
    """Every result is kept; a full or read-only disk costs the file, not the numbers just measured."""
    stamp = result.started.replace(":", "").replace("-", "").split("+")[0]
    target = results_folder() / f"{stamp}-{result.device.replace(':', '')}{'-quick' if result.quick else ''}.json"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(to_json(result))
    except OSError as error:
        click.echo(f"gpudiag: the result was not kept: {target}: {error.strerror}", err=True)
    return target


def _keep(result: BenchResult, saved: Path, db: object) -> None:
    """In the history of runs, one metric a model and quantity. The name is the device, since trends are of one name."""
    from gpudiag.bench.compare import quantities
    from gpudiag.bench.tables import headline
    from gpudiag.records import metric_row, of_bench

    rows = [
        metric_row(f"{model.model}: {quantity}", value, unit or "fraction")
        for model in result.models
        for quantity, unit, value, _ in quantities(model)
    ]
    name = f"bench {result.device}{' quick' if result.quick else ''}"
    record = of_bench(name, str(saved), headline(result), result.schema, to_json(result), rows)
    keep(record, None if db is None else Path(str(db)))


def _write(result: BenchResult, json_: object, html: object) -> None:
    if json_:
        write_output(str(json_), to_json(result))
    if html:
        from gpudiag.bench.html import render

        write_output(str(html), render(result).encode())


def _names(files: tuple[Path, ...]) -> list[str]:
    """Short names that differ: the stem, or the whole path where stems repeat."""
    stems = [file.stem for file in files]
    return stems if len(set(stems)) == len(stems) else [str(file) for file in files]


def _page(in_a_pipe: int = 100) -> tuple[int, bool, bool]:
    """(width, colour, ASCII only) of stdout: as wide as the terminal up to 120; in a pipe 100, since a result's tables have seven
    columns."""
    width = max(60, min(shutil.get_terminal_size().columns, 120)) if sys.stdout.isatty() else in_a_pipe
    encoding = (sys.stdout.encoding or "ascii").lower()
    return width, wants_colour(sys.stdout), not encoding.startswith("utf")
