"""`gpudiag gpus`: the table of GPUs, which is worth its money, and whether a model fits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import click

from gpudiag.bench.gpu_table import PEAKS, GpuSpec, load_gpus, read_gpus, select_gpus
from gpudiag.bench.models import check_spec
from gpudiag.bench.tables import NOTHING, Table
from gpudiag.commands._common import example, no_color_option, progress, write_output
from gpudiag.commands.bench import _numbers, _page, _require_torch
from gpudiag.errors import GpudiagError
from gpudiag.units import format_percent

table_option = click.option(
    "--table", metavar="FILE", type=click.Path(path_type=Path), help="More GPUs, a CSV file of the same columns."
)
json_option = click.option("--json", "json_", metavar="FILE|-", help="As JSON.")


@click.group(
    epilog=example(
        "gpudiag gpus list --segment consumer",
        'gpudiag gpus rank --price "RTX 4090=1600" --price "L4=2500" --electricity 0.30 --dtype bf16',
        "gpudiag gpus fit --model resnet50 --precision bf16 --optimizer adamw",
    )
)
def gpus() -> None:
    """Compare GPUs: dense peaks with their sources, performance for the money, and whether a model fits in the memory."""


@gpus.command("list", epilog=example('gpudiag gpus list "a100"'))
@click.argument("names", nargs=-1)
@click.option("--segment", type=click.Choice(["consumer", "workstation", "data-centre"]), help="Only these.")
@click.option("--architecture", help="Only of this architecture, e.g. Hopper.")
@click.option("--sources", is_flag=True, help="Also where each row's figures come from.")
@table_option
@json_option
@no_color_option
def list_gpus(
    names: tuple[str, ...],
    segment: str | None,
    architecture: str | None,
    sources: bool,
    table: Path | None,
    json_: str | None,
) -> None:
    """The table: dense TFLOPS, memory, bandwidth, power and links. "no" = the hardware has no such unit, "?" = not known here."""
    known = _table(table)
    chosen = [spec for name in names for spec in select_gpus(name, known)] if names else list(known)
    chosen = [s for s in chosen if segment in (None, s.segment)]
    chosen = [s for s in chosen if architecture is None or architecture.lower() in s.architecture.lower()]
    if not chosen:
        raise GpudiagError("no GPU of the table matches", "see all with `gpudiag gpus list`")
    if json_:
        _write_json(json_, chosen)
        if json_ == "-":
            return
    rows = tuple(
        (
            spec.name,
            spec.cc,
            *(_peak(spec, name) for name in PEAKS if name != "fp16_vector"),
            f"{spec.memory:g}" if spec.memory else "?",
            f"{spec.bandwidth:,.0f}" if spec.bandwidth else "?",
            f"{spec.tdp:.0f}" if spec.tdp else "?",
            spec.pcie,
            "?" if spec.nvlink is None else (f"{spec.nvlink:g}" if spec.nvlink else "no"),
        )
        for spec in chosen
    )
    columns = ("GPU", "CC", "FP32", "TF32", "FP16", "BF16", "FP8", "GB", "GB/s", "TDP W", "PCIe", "NVLink GB/s")
    note = "Dense TFLOPS as the vendor states them, tensor rates with FP32 accumulation; none with sparsity. no: no such unit; ?: not known."
    tables = [Table(f"{len(chosen)} GPUs", columns, rows, note)]
    if sources:
        tables.append(Table("Sources", ("GPU", "from"), tuple((spec.name, spec.source) for spec in chosen)))
    _show(tables)


@gpus.command("rank", epilog=example('gpudiag gpus rank --price "RTX 4090=1600" --price "A10=2800" --electricity 0.30'))
@click.argument("names", nargs=-1)
@click.option(
    "--price", "prices", multiple=True, metavar='"NAME=AMOUNT"', help="What a GPU costs you; may be repeated."
)
@click.option(
    "--prices", "price_file", metavar="FILE", type=click.Path(path_type=Path), help="CSV with name,price,date,source."
)
@click.option("--dtype", type=click.Choice(["fp32", "tf32", "fp16", "bf16", "fp8"]), default="bf16", show_default=True)
@click.option(
    "--use",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Share of the time it works.",
)
@click.option(
    "--electricity", type=click.FloatRange(0), default=0.0, help="Price of a kWh, in the currency of the prices [0]."
)
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the peak assumed where nothing was measured [0.4].",
)
@click.option(
    "--bench",
    "bench_files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Results of `gpudiag bench`.",
)
@table_option
@json_option
@no_color_option
def rank_gpus(
    names: tuple[str, ...],
    prices: tuple[str, ...],
    price_file: Path | None,
    dtype: str,
    use: float,
    electricity: float,
    share: float | None,
    bench_files: tuple[Path, ...],
    table: Path | None,
    json_: str | None,
) -> None:
    """Performance for the money: achieved GFLOPS x use / (price x (1 + TDP/1000 x electricity price)).

    GPUs without a price or without a known figure are listed with the reason; nothing is filled in.
    """
    from gpudiag.bench import rank as ranking
    from gpudiag.bench.result import read_result

    known = _table(table)
    given = ranking.read_prices(price_file, known) if price_file else {}
    given |= dict(ranking.parse_price(text, known) for text in prices)
    if not given:
        raise GpudiagError(
            "no price was given", 'add --price "RTX 4090=1600" or --prices FILE (name,price,date,source)'
        )
    chosen = [spec for name in names for spec in select_gpus(name, known)] if names else list(known)
    results = [read_result(file) for file in bench_files]
    measured = ranking.measured_gflops(results, known, dtype)
    rows = ranking.rank(chosen, given, dtype, use, electricity, measured, share or ranking.ASSUMED_SHARE)
    if json_:
        _write_json(json_, rows)
        if json_ == "-":
            return
    ranked = [row for row in rows if row.index is not None]
    rest = [row for row in rows if row.index is None]
    body = tuple(
        (
            f"{number}. {row.gpu.name}",
            f"{row.index:,.1f}",
            f"{row.gflops:,.0f}",
            row.basis,
            f"{row.price.amount:,.0f}" if row.price else NOTHING,
            (row.price.dated.isoformat() if row.price.dated else row.price.source) if row.price else NOTHING,
            f"{row.gpu.tdp:.0f}" if row.gpu.tdp else "?",
        )
        for number, row in enumerate(ranked, 1)
    )
    note = "Index = GFLOPS x use / (price x (1 + TDP/1000 x electricity price)). " + ". ".join(
        ranking.notes(rows, datetime.now(UTC).date(), share or ranking.ASSUMED_SHARE)
    )
    columns = ("GPU", "index", f"{dtype} GFLOPS", "from", "price", "price of", "TDP W")
    tables = (
        [Table(f"By index: use {format_percent(use)}, electricity {electricity:g} a kWh", columns, body, note)]
        if body
        else []
    )
    listed = [row for row in rest if names or row.price is not None]
    why = tuple((row.gpu.name, row.reason) for row in listed)
    if len(rest) > len(listed):
        why += ((f"{len(rest) - len(listed)} other GPUs", "no price given"),)
    if why:
        tables.append(Table("Not ranked", ("GPU", "why"), why))
    _show(tables)


@gpus.command(
    "fit",
    epilog=example(
        "gpudiag gpus fit --model my.net:build --input-shape 3,512,512 --batch 16 --gpu L4 --gpu 'RTX 4090'"
    ),
)
@click.option("--model", required=True, metavar="NAME|MODULE:FUNCTION", help="A built-in model or your own.")
@click.option("--input-shape", metavar="C,H,W", help="Shape of one input, without the batch.")
@click.option(
    "--sample-batch",
    default="",
    metavar="MODULE:FUNCTION",
    help="Function of the batch size that returns inputs or (inputs, targets).",
)
@click.option("--what", type=click.Choice(["training", "serving", "both"]), default="both", show_default=True)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    default="fp32",
    show_default=True,
    help="bf16 and fp16: autocast for training, low-precision weights for serving.",
)
@click.option(
    "--optimizer",
    type=click.Choice(["sgd", "adam", "adamw"]),
    default="sgd",
    show_default=True,
    help="sgd has momentum.",
)
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Does this batch fit?")
@click.option("--gpu", "names", multiple=True, metavar="NAME", help="Only these GPUs; may be repeated.")
@click.option(
    "--memory",
    multiple=True,
    type=click.FloatRange(0, min_open=True),
    metavar="GB",
    help="Any amount of memory; may be repeated.",
)
@click.option(
    "--reserve",
    type=click.FloatRange(0),
    metavar="GB",
    help="Kept for the CUDA context, libraries and fragmentation [1].",
)
@table_option
@json_option
@no_color_option
def fit(
    model: str,
    input_shape: str | None,
    sample_batch: str,
    what: str,
    precision: str,
    optimizer: str,
    batch: int,
    names: tuple[str, ...],
    memory: tuple[float, ...],
    reserve: float | None,
    table: Path | None,
    json_: str | None,
) -> None:
    """Weights, gradients, optimizer states and activations by a dry run on a fake device, and the largest batch that fits."""
    _require_torch()
    from gpudiag.bench import fit as fitting
    from gpudiag.bench import fit_tables
    from gpudiag.bench.device import cuda_problem

    known = _table(table)
    shape = _numbers(input_shape, "--input-shape") if input_shape else None
    spec = check_spec(model, shape, sample_batch)
    places = [(f"{gb:g} GB", gb) for gb in memory]
    chosen = [s for name in names for s in select_gpus(name, known)] if names else ([] if memory else list(known))
    places += [(s.name, s.memory) for s in chosen if s.memory is not None]
    kept = fitting.RESERVE_GB if reserve is None else reserve
    kinds = {"training": [True], "serving": [False], "both": [True, False]}[what]
    problem = cuda_problem()  # asked first: torch gives the reason only once a process, and the dry run would take it
    with progress() as tell:
        fits = []
        for training in kinds:
            tell(f"dry run, {'training' if training else 'serving'}")
            fits.append(fitting.measure_fit(spec, precision, optimizer, training))
    checked = fit_tables.checked_text(spec, precision, optimizer, batch, fits, problem)
    answers = [
        {
            "gpu": name,
            "memory_gb": gb,
            **{f.what: fitting.largest_batch(f, fitting.usable_bytes(gb, kept)) for f in fits},
        }
        for name, gb in places
    ]
    if json_:
        _write_json(
            json_,
            {
                "model": model,
                "precision": precision,
                "reserve_gb": kept,
                "checked": checked,
                "fits": fits,
                "gpus": answers,
            },
        )
        if json_ == "-":
            return
    _show(
        [
            fit_tables.parts_table(model, fits, batch, checked),
            fit_tables.fit_table(fits, answers, batch, kept, fitting.RESERVE_WHY),
        ]
    )


def _peak(spec: GpuSpec, name: str) -> str:
    value = getattr(spec, name)
    if value is not None:
        return f"{value:,g}"
    return "no" if name in spec.absent else "?"


def _table(extra: Path | None) -> tuple[GpuSpec, ...]:
    return (*read_gpus(extra), *load_gpus()) if extra else load_gpus()


def _write_json(target: str, value: object) -> None:
    import msgspec

    write_output(target, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def _show(tables: Sequence[Table]) -> None:
    from gpudiag.bench.terminal import render_tables

    click.echo(render_tables(tables, *_page(80)), nl=False)
