"""Which GPU for the money: index = achieved GFLOPS x use / (price x (1 + TDP/1000 x electricity price)).

GFLOPS are measured (from results of `gpudiag bench` on that GPU) or estimated (dense peak x an assumed share). Prices come from
the user or from a dated file. A GPU without a price, or without a figure for the dtype, is listed with the reason, never filled in.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from gpudiag.bench.gpu_table import GpuSpec, find_gpu, select_gpus
from gpudiag.bench.result import BenchResult
from gpudiag.errors import GpudiagError
from gpudiag.units import format_percent

ASSUMED_SHARE = 0.40  # of the dense peak; one number for all, so the order of estimated GPUs does not depend on it
OLD_PRICE_DAYS = 90


@dataclass(frozen=True)
class Price:
    """In whatever currency the user uses throughout; dated is None for one given on the command line now."""

    amount: float
    dated: date | None
    source: str


@dataclass(frozen=True)
class Ranked:
    """index None: not ranked, for `reason`. gflops: achieved, measured or estimated (basis)."""

    gpu: GpuSpec
    gflops: float | None
    basis: str
    price: Price | None
    index: float | None
    reason: str = ""


def index_of(gflops: float, use: float, price: float, tdp_w: float, electricity: float) -> float:
    """The formula above. use: 0-1, the share of the time it works; electricity: price of a kWh in the currency of `price`."""
    return gflops * use / (price * (1 + tdp_w / 1000 * electricity))


def peak_of(spec: GpuSpec, dtype: str) -> float | None:
    """Dense peak in GFLOPS for fp32, tf32, fp16, bf16 or fp8. fp16 falls back to packed FP16 where there are no tensor cores."""
    values: dict[str, float | None] = {
        "fp32": spec.fp32,
        "tf32": spec.tf32,
        "fp16": spec.fp16 if spec.fp16 is not None else (spec.fp16_vector if "fp16" in spec.absent else None),
        "bf16": spec.bf16,
        "fp8": spec.fp8,
    }
    value = values[dtype]
    return value * 1000 if value is not None else None


def measured_gflops(results: Sequence[BenchResult], specs: Sequence[GpuSpec], dtype: str) -> dict[str, float]:
    """GPU name -> median achieved GFLOPS of the models measured on it in that dtype. Quick results do not count."""
    import statistics

    found: dict[str, list[float]] = {}
    for result in results:
        if result.quick:
            raise GpudiagError(
                "a quick result is not for comparison", "run `gpudiag bench` without --quick on that GPU"
            )
        for model in result.models:
            for roof in model.rooflines:
                spec = find_gpu(roof.device, specs)
                if spec is not None and roof.dtype == dtype:
                    found.setdefault(spec.name, []).append(roof.achieved_gflops)
    return {name: statistics.median(values) for name, values in found.items()}


def rank(
    specs: Sequence[GpuSpec],
    prices: Mapping[str, Price],
    dtype: str,
    use: float,
    electricity: float,
    measured: Mapping[str, float],
    share: float = ASSUMED_SHARE,
) -> list[Ranked]:
    """Best first; those that cannot be ranked last, in the table's order, each with its reason."""
    rows: list[Ranked] = []
    for spec in specs:
        price = prices.get(spec.name)
        gflops: float | None
        if spec.name in measured:
            gflops, basis = measured[spec.name], "measured"
        else:
            peak = peak_of(spec, dtype)
            gflops, basis = (peak * share, "estimated") if peak is not None else (None, "")
        reasons = []
        if gflops is None:
            reasons.append(f"it has no {dtype} units" if dtype in spec.absent else f"its {dtype} peak is unknown")
        if price is None:
            reasons.append("no price given")
        if spec.tdp is None:
            reasons.append("its TDP is unknown")
        if gflops is None or price is None or spec.tdp is None:
            rows.append(Ranked(spec, gflops, basis, price, None, "; ".join(reasons)))
            continue
        rows.append(Ranked(spec, gflops, basis, price, index_of(gflops, use, price.amount, spec.tdp, electricity)))
    return sorted(rows, key=lambda row: -(row.index if row.index is not None else -1.0))


def parse_price(text: str, specs: Sequence[GpuSpec]) -> tuple[str, Price]:
    """`RTX 4090=1600` from the command line. Raises GpudiagError; a name that means several GPUs must be made exact."""
    name, separator, amount = text.rpartition("=")
    if not separator:
        raise GpudiagError(f"--price {text}: no =", 'write it as "RTX 4090=1600"')
    return _one(name, specs, f"--price {text}").name, Price(_amount(amount, f"--price {text}"), None, "given now")


def read_prices(path: Path, specs: Sequence[GpuSpec]) -> dict[str, Price]:
    """A CSV file with the columns name, price, date (YYYY-MM-DD), source. A row without a date is refused: prices age."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    except OSError as error:
        raise GpudiagError(f"{path}: {error.strerror}", "a CSV file with name,price,date,source") from error
    prices: dict[str, Price] = {}
    for number, row in enumerate(rows, start=2):
        where = f"{path}, row {number}"
        if not row.get("name") or not row.get("price"):
            raise GpudiagError(f"{where}: name or price is missing", "the columns are name,price,date,source")
        try:
            dated = date.fromisoformat((row.get("date") or "").strip())
        except ValueError as error:
            raise GpudiagError(f"{where}: no date (YYYY-MM-DD)", "say from when each price is") from error
        spec = _one(row["name"], specs, where)
        prices[spec.name] = Price(_amount(row["price"], where), dated, (row.get("source") or "").strip())
    return prices


def _one(name: str, specs: Sequence[GpuSpec], where: str) -> GpuSpec:
    try:
        found = select_gpus(name.strip(), specs)
    except GpudiagError as error:
        raise GpudiagError(f"{where}: {error.message}", error.hint) from error
    if len(found) > 1:
        raise GpudiagError(f"{where}: {name!r} may be {', '.join(spec.name for spec in found)}", "give the whole name")
    return found[0]


def _amount(text: str, where: str) -> float:
    try:
        amount = float(text)
    except ValueError as error:
        raise GpudiagError(f"{where}: {text!r} is not a number", "a plain number, without a currency sign") from error
    if not 0 < amount < float("inf"):
        raise GpudiagError(f"{where}: a price is above 0", "leave the GPU out if you have no price")
    return amount


def notes(rows: Sequence[Ranked], today: date, share: float = ASSUMED_SHARE) -> list[str]:
    """What to keep in mind: what an estimate assumes, old prices, measured beside estimated."""
    found: list[str] = []
    if any(row.index is not None and row.basis == "estimated" for row in rows):
        found.append(f"Estimated: {format_percent(share)} of the data sheet's dense peak is assumed to be reached")
    old = [row for row in rows if row.price and row.price.dated and (today - row.price.dated).days > OLD_PRICE_DAYS]
    if old:
        oldest = min(row.price.dated for row in old if row.price and row.price.dated)
        found.append(
            f"{len(old)} of {sum(row.price is not None for row in rows)} prices are older than {OLD_PRICE_DAYS} days, the oldest of {oldest.isoformat()}"
        )
    ranked = [row for row in rows if row.index is not None]
    bases = {row.basis == "measured" for row in ranked}
    if len(bases) == 2:
        found.append("Measured and estimated GFLOPS stand side by side: an estimate is not what your model will reach")
    elif ranked and bases == {False}:
        found.append(
            "Nothing here was measured, so the order is that of the data sheets; --bench FILE puts measured GFLOPS in their place"
        )
    return found
