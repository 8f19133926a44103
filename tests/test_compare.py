"""Two sides compared: the same work or not, noise, the gate, and the reports of it."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
import sample_diagnosis
from click.testing import CliRunner, Result
from hostile import HOSTILE, LONG, assert_harmless, hostile_diagnosis
from test_html import CHROMIUM, FLAGS
from test_markdown import foreign

from gpudiag import comparison as contract
from gpudiag.bundle import Bundle, CaptureInfo, Manifest, rounds_of, write_manifest
from gpudiag.cli import main
from gpudiag.commands._sides import load_side
from gpudiag.compare import compare
from gpudiag.diagnosis import Diagnosis, MetricValue, StepsInfo, to_json
from gpudiag.errors import GpudiagError
from gpudiag.report import compare_html, compare_markdown, compare_text
from gpudiag.step_change import _medians, interval

MS = 1_000_000


def run(*steps_ms: float, **changes: object) -> Diagnosis:
    """A diagnosis whose steady steps took this long."""
    ns = tuple(round(step * MS) for step in steps_ms)
    steps = StepsInfo(len(ns), int(np.median(ns)), max(ns), "ProfilerStep", 2, 1.0, ns)
    base = sample_diagnosis.account(idle_input=410, idle_launch=73)
    scale = sum(ns) / base.total_ns
    parts = {name: round(value * scale) for name, value in base.parts.items()}
    account = msgspec.structs.replace(base, total_ns=sum(parts.values()), parts=parts, steps=len(ns), per_step=())
    return sample_diagnosis.bottleneck(**{"steps": steps, "accounts": (account,), **changes})


def steady(step_ms: float, noise: float = 0.005, count: int = 20, seed: int = 0) -> Diagnosis:
    rng = np.random.default_rng(seed + round(step_ms * 1000))
    return run(*(step_ms * (1 + noise * rng.standard_normal(count))))


def gate(before: Diagnosis | list[Diagnosis], after: Diagnosis | list[Diagnosis], percent: float = 5) -> int:
    sides = [side if isinstance(side, list) else [side] for side in (before, after)]
    result = compare(sides[0], sides[1], gate=percent)
    assert result.gate is not None
    return result.gate.exit_code


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


# ---- real recordings


def test_four_workers_pass_the_gate_and_the_reverse_fails_it(traces: Path) -> None:
    slow, fast = (traces / "kineto" / f"v100_resnet50_workers{n}.json.gz" for n in (0, 4))
    forward = cli(slow, fast, "--gate", 5, "--json", "-")
    assert forward.exit_code == 0, forward.stderr
    result = contract.from_json(forward.stdout.encode())
    assert result.outcome == "faster" and result.same_work == "same"
    assert result.step.change == pytest.approx(126.6145 / 176.3405 - 1, abs=1e-4)
    moved = {part.part: part.change_ns / MS for part in result.account}
    assert min(moved, key=lambda part: moved[part]) == "idle.input" and moved["idle.input"] == pytest.approx(
        -47.3, abs=0.1
    )
    assert sum(part.change_ns for part in result.account) == pytest.approx(-35.14 * MS, abs=0.01 * MS)
    gone = {f.rule: f for f in result.findings if f.status == "gone"}
    assert gone["loader_workers_zero"].predicted_ns == result.gain.predicted_ns
    assert result.gain.measured_ns == pytest.approx(
        -sum(p.change_ns for p in result.account), abs=10
    )  # ns, of rounding
    assert any("from run to run is not known" in note for note in result.notes)
    backward = cli(fast, slow, "--gate", 5)
    assert backward.exit_code == 3 and "SLOWER" in backward.stdout and "fail" in backward.stdout


@pytest.mark.parametrize("swap", [False, True])
def test_a_side_without_gpu_work_cannot_be_compared_with_one_that_has_some(traces: Path, swap: bool) -> None:
    sides = [traces / "kineto" / "cpu_only.json.gz", traces / "kineto" / "v100_resnet50_workers4.json.gz"]
    result = cli(*(reversed(sides) if swap else sides), "--gate", 1000)
    assert result.exit_code == 4 and "no GPU work" in result.stdout and "CANNOT JUDGE" in result.stdout
    assert cli(sides[0], sides[0], "--gate", 1000).exit_code == 0, "its steps took as long as they took"


def test_a_recording_that_is_too_small_cannot_be_judged(traces: Path) -> None:
    small = traces / "nsys" / "two_kernels_only.sqlite"
    assert cli(small, traces / "kineto" / "v100_resnet50_workers4.json.gz", "--gate", 1000).exit_code == 4


@pytest.mark.parametrize("content", [b"", b'{"traceEvents": []}'])
def test_an_empty_side_never_passes_and_is_never_an_improvement(tmp_path: Path, content: bytes) -> None:
    empty, full = tmp_path / "empty.json", tmp_path / "full.json"
    empty.write_bytes(content)
    full.write_bytes(to_json(steady(41)))
    for sides in ((empty, full), (full, empty), (empty, empty)):
        assert cli(*sides, "--gate", 1000).exit_code == 4
        assert cli(*sides).exit_code == 1


# ---- noise


@pytest.mark.parametrize("sample", [(3.0, 1.0, 7.0, 4.0, 9.0), (3.0, 1.0, 7.0, 4.0)])
def test_medians_of_resamples_are_those_of_every_possible_resample(sample: tuple[float, ...]) -> None:
    every = [np.median(pick) for pick in itertools.product(sample, repeat=len(sample))]
    drawn = _medians(sample, np.random.default_rng(1))  # type: ignore[arg-type]
    assert set(drawn) <= set(every)
    for value in set(every):
        assert np.mean(drawn == value) == pytest.approx(np.mean(np.asarray(every) == value), abs=0.02)


def test_the_interval_holds_no_change_in_about_95_of_100_comparisons_of_like_with_like() -> None:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(300):
        before, after = rng.lognormal(0, 0.05, 20), rng.lognormal(0, 0.05, 20)
        draws = np.random.default_rng(0)
        low, high = interval(_medians(before, draws), _medians(after, draws))  # type: ignore[arg-type]
        held += low <= 0 <= high
    assert 0.91 <= held / 300 <= 0.995


def test_the_same_sides_give_the_same_bytes() -> None:
    sides = [steady(41)], [steady(39)]
    assert contract.to_json(compare(*sides)) == contract.to_json(compare(*sides))


@pytest.mark.parametrize(
    ("after_ms", "outcome", "code"),
    [(30, "faster", 0), (41.01, "no_change", 0), (42.5, "slower", 0), (50, "slower", 3)],
)
def test_a_gate_fails_only_beyond_its_percent(after_ms: float, outcome: str, code: int) -> None:
    before, after = steady(41), steady(after_ms)
    assert compare([before], [after]).outcome == outcome
    assert gate(before, after) == code


def test_steps_that_differ_too_much_to_tell_no_change_from_a_slow_down_are_no_pass() -> None:
    before = run(40, 41, 60, 39, 62, 40)
    assert gate(before, run(43, 41, 58, 39, 66, 41)) == 4


def test_a_few_very_slow_steps_are_no_pass_although_the_median_stays() -> None:
    slow_now_and_then = run(*([41, 41.1, 40.9, 80] * 6))
    assert gate(steady(41), slow_now_and_then) == 4
    result = compare([steady(41)], [slow_now_and_then], gate=5)
    assert result.gate is not None and "the mean step changes by +2" in result.gate.reason


def test_fewer_than_five_steps_do_not_settle_it() -> None:
    assert compare([run(40, 41, 42, 40)], [run(20, 21, 22, 20)]).outcome == "not_settled"
    assert gate(run(40, 41, 42, 40), run(20, 21, 22, 20)) == 4


def test_a_recording_compared_with_itself_is_no_change_even_if_its_steps_differ() -> None:
    noisy = run(40, 80, 41, 79, 42, 90)
    result = compare([noisy], [noisy], gate=0)
    assert result.outcome == "no_change" and "same recording" in result.headline
    assert result.gate is not None and result.gate.exit_code == 0


# ---- rounds


def test_with_rounds_the_median_of_each_side_counts() -> None:
    before = [steady(ms) for ms in (41, 42, 40)]
    after = [steady(ms) for ms in (31, 30, 32)]
    result = compare(before, after, gate=5)
    assert result.before.median_ns == pytest.approx(41 * MS, rel=0.01) and result.before.shown == 0
    assert result.after.median_ns == pytest.approx(31 * MS, rel=0.01)
    assert result.step.sample == "rounds" and result.outcome == "faster"
    assert not any("run to run" in note for note in result.notes)
    assert gate(after, before) == 3


def test_rounds_that_differ_by_more_than_10_percent_are_not_settled() -> None:
    noisy = [steady(ms) for ms in (41, 46, 40)]
    calm = [steady(ms) for ms in (20, 20.5, 21)]
    result = compare(noisy, calm, gate=5)
    assert result.outcome == "not_settled" and "the before side's rounds differ by 1" in result.headline
    assert result.gate is not None and result.gate.exit_code == 4


def test_rounds_that_overlap_are_no_change() -> None:
    result = compare([steady(ms) for ms in (40, 41, 42)], [steady(ms) for ms in (40.5, 41.5, 42.5)], gate=5)
    assert result.outcome == "no_change" and result.gate is not None and result.gate.exit_code == 0


def test_one_recording_named_twice_is_no_second_round() -> None:
    with pytest.raises(GpudiagError, match="twice"):
        compare([steady(41), steady(41)], [steady(30)])


def test_a_side_with_one_recording_says_that_its_spread_is_not_known() -> None:
    result = compare([steady(41), steady(41.2), steady(40.8)], [steady(30)])
    assert result.step.sample == "steps" and result.outcome == "faster"
    assert any("one recording of the after side" in note for note in result.notes)


def test_a_bundle_of_several_rounds_is_taken_apart(tmp_path: Path) -> None:
    def capture(name: str, kind: str, failed: str = "") -> CaptureInfo:
        return CaptureInfo(name, kind, {"trace": [f"{name}/trace.json"]}, failed=failed)

    captures = (
        capture("torch", "torch"),
        capture("nsys", "nsys"),
        capture("t2", "torch"),
        capture("bad", "torch", "killed"),
    )
    bundle = Bundle(tmp_path, Manifest("gpudiag.bundle/1", "0.1.0", (), "", 0, captures))
    assert [[c.name for c in part.manifest.captures] for part in rounds_of(bundle)] == [["torch", "nsys"], ["t2"]]
    one = Bundle(tmp_path, Manifest("gpudiag.bundle/1", "0.1.0", (), "", 0, captures[:2]))
    assert rounds_of(one) == [one]


def test_rounds_are_read_from_a_bundle_and_from_a_folder_of_bundles(tmp_path: Path, traces: Path) -> None:
    names = ("v100_resnet50_workers0", "v100_resnet50_workers4")
    captures = tuple(CaptureInfo(f"torch{n}", "torch", {"trace": [f"torch{n}/rank0.json.gz"]}) for n in (0, 1))
    together = tmp_path / "together"
    for place, (name, info) in enumerate(zip(names, captures, strict=True)):
        alone = tmp_path / "folder" / f"round{place}"
        for bundle in (together, alone):
            (bundle / info.name).mkdir(parents=True)
            (bundle / info.files["trace"][0]).symlink_to(traces / "kineto" / f"{name}.json.gz")
        write_manifest(alone, Manifest("gpudiag.bundle/1", "0.1.0", (), "", 0, (info,)))
    write_manifest(together, Manifest("gpudiag.bundle/1", "0.1.0", (), "", 0, captures))
    for path in (together, tmp_path / "folder"):
        rounds = load_side([path], lambda _text: None)
        assert [d.steps.median_ns for d in rounds] == [176_340_500, 126_614_500]


# ---- the same work?


def with_loader(diagnosis: Diagnosis, batch: int) -> Diagnosis:
    return msgspec.structs.replace(diagnosis, loaders=({"batch_size": batch, "batches": 20},))


def test_another_batch_size_cannot_be_compared() -> None:
    result = compare([with_loader(steady(41), 64)], [with_loader(steady(21), 32)], gate=5)
    assert result.outcome == "cannot_judge" and "batch size: 64 before, 32 after" in result.headline
    assert result.gate is not None and result.gate.exit_code == 4
    assert gate(with_loader(steady(41), 64), with_loader(steady(21), 64)) == 0


def test_another_number_of_gpus_or_ranks_cannot_be_compared() -> None:
    assert gate(steady(41), sample_diagnosis.eight_ranks()) == 4


def on_the_cpu(diagnosis: Diagnosis) -> Diagnosis:
    return msgspec.structs.replace(diagnosis, devices=(), kernels=(), metrics={})


def test_steps_of_the_cpu_are_compared_with_those_of_another_run_on_the_cpu() -> None:
    before = on_the_cpu(steady(41))
    assert gate(before, before) == gate(before, on_the_cpu(steady(41, seed=1))) == 0
    result = compare([before], [on_the_cpu(steady(61))], gate=5)
    assert result.outcome == "slower" and result.gate is not None and result.gate.exit_code == 3
    assert any(note.startswith("no GPU work was recorded on either side") for note in result.notes)
    assert compare([before], [steady(41)]).headline == "the before side holds no GPU work"
    assert not any("no GPU work" in note for note in compare([steady(41)], [steady(61)]).notes)


def test_a_recording_of_the_cpu_without_steps_cannot_be_compared() -> None:
    span = msgspec.structs.replace(
        on_the_cpu(steady(41)),
        steps=StepsInfo(0, None, None, "none", 0),
        accounts=(msgspec.structs.replace(sample_diagnosis.account(), scope="span", steps=0, per_step=()),),
    )
    result = compare([span], [span], gate=5)
    assert result.headline.startswith("the before side holds no GPU work and no steps")
    assert result.gate is not None and result.gate.exit_code == 4


def test_kernels_and_steps_that_differ_are_said_and_do_not_hide_the_result() -> None:
    kernels = tuple(msgspec.structs.replace(row, name=f"other_{n}") for n, row in enumerate(sample_diagnosis.KERNELS))
    before = msgspec.structs.replace(steady(41), metrics={"kernels_per_step": MetricValue(1400.0, "count")})
    after = msgspec.structs.replace(
        steady(30, count=12), metrics={"kernels_per_step": MetricValue(700.0, "count")}, kernels=kernels
    )
    result = compare([before], [after], gate=5)
    assert result.same_work == "differs" and {d.what for d in result.differences} == {
        "steps",
        "kernels a step",
        "kernels",
    }
    assert result.outcome == "faster" and result.gate is not None and result.gate.exit_code == 0
    assert "kernels a step: 1,400 before, 700 after" in compare_text.render(result)


def test_steps_are_not_compared_with_a_span() -> None:
    span = msgspec.structs.replace(
        steady(41),
        steps=StepsInfo(0, None, None, "none", 0),
        accounts=(msgspec.structs.replace(sample_diagnosis.account(), scope="span", steps=0, per_step=()),),
    )
    assert gate(steady(41), span) == 4
    assert compare([span], [steady(41)]).differences[0].what == "what is timed"


# ---- findings


def test_findings_are_gone_new_unchanged_or_unknown_where_a_side_was_not_judged() -> None:
    before = steady(41)
    later = [f for f in before.findings if f.rule != "loader_wait"] + [sample_diagnosis.finding("exposed_copy")]
    judged = msgspec.structs.replace(
        steady(30), findings=tuple(later), rules={**before.rules, "loader_wait": "clear", "exposed_copy": "fired"}
    )
    found = {f.rule: f for f in compare([before], [judged]).findings}
    assert {rule: f.status for rule, f in found.items()} == {
        "loader_wait": "gone",
        "launch_bound": "unchanged",
        "gpu_idle": "unchanged",
        "exposed_copy": "new",
    }
    assert found["loader_wait"].predicted_ns == 16_900_000 and found["loader_wait"].predicted_by == "bound"
    blind = msgspec.structs.replace(judged, rules={**judged.rules, "loader_wait": "not_judged"})
    result = compare([before], [blind])
    assert {f.rule: f.status for f in result.findings}["loader_wait"] == "unknown"
    assert result.gain.predicted_ns is None


# ---- reports


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def hostile_pair() -> contract.Comparison:
    other = msgspec.structs.replace(
        steady(30),
        findings=(sample_diagnosis.finding("exposed_copy", title=LONG),),
        devices=(sample_diagnosis.figures(),),
    )
    hostile = msgspec.structs.replace(hostile_diagnosis(), steps=steady(41).steps)
    figures = msgspec.structs.replace(sample_diagnosis.figures(), name=HOSTILE)
    return compare([msgspec.structs.replace(hostile, devices=(figures,))], [other], gate=5)


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_text_fits_80_columns_and_says_it_all_without_colour(ascii_only: bool) -> None:
    for result in (
        compare([steady(41)], [steady(30)], gate=5),
        compare([steady(ms) for ms in (41, 46, 40)], [steady(30)], gate=5),
        compare([steady(41)], [sample_diagnosis.cannot_judge()], gate=5),
        compare([steady(41)], [sample_diagnosis.eight_ranks()]),
        hostile_pair(),
    ):
        text = compare_text.render(result, ascii_only=ascii_only)
        assert max(map(len, text.splitlines())) <= 80
        assert_harmless(text)
        assert text.isascii() or not ascii_only


def test_colour_changes_no_word() -> None:
    result = compare([steady(41)], [steady(30)], gate=5)
    assert re.sub(r"\x1b\[[\d;]*m", "", compare_text.render(result, color=True)) == compare_text.render(result)


def test_hostile_names_do_nothing_in_html_and_markdown() -> None:
    result = hostile_pair()
    page = compare_html.render(result)
    used = Tags()
    used.feed(page)
    assert not used.names & {"script", "img", "a", "link", "iframe", "object"} and not used.attributes & {"src", "href"}
    assert not [name for name in used.attributes if name.startswith("on")]
    assert_harmless(page)
    comment = compare_markdown.render(result)
    assert_harmless(comment)
    assert not foreign(comment) and len(comment) < 65_536
    assert contract.from_json(contract.to_json(result)).outcome == result.outcome  # lone surrogates are spelled out


def test_json_is_read_back_as_it_was() -> None:
    result = compare([steady(41)], [steady(30)], gate=5)
    assert contract.from_json(contract.to_json(result)) == result
    assert json.loads(contract.to_json(result))["schema"] == "gpudiag.comparison/1"


def test_files_are_written_and_named(tmp_path: Path) -> None:
    paths = []
    for name, ms in (("before", 41), ("after", 30)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_bytes(to_json(steady(ms)))
    page, comment = tmp_path / "c.html", tmp_path / "c.md"
    result = cli(*paths, "--html", page, "--markdown", comment)
    assert result.exit_code == 0 and page.read_text().startswith("<!doctype html>")
    assert comment.read_text().startswith("### ")
    assert cli(*paths, "--json", paths[0]).exit_code == 2  # it would overwrite what is read


def test_sides_are_named_in_pairs() -> None:
    assert cli("only-one").exit_code == 2
    assert cli("--before", "a").exit_code == 2
    assert cli("no-such-before", "no-such-after", "--gate", 5).exit_code == 1  # a typing error is no verdict


def test_rounds_can_be_named_one_by_one(tmp_path: Path) -> None:
    arguments: list[object] = []
    for side, times in (("before", (40, 41, 42)), ("after", (30, 31, 32))):
        for ms in times:
            path = tmp_path / f"{side}{ms}.json"
            path.write_bytes(to_json(steady(ms)))
            arguments += [f"--{side}", path]
    result = cli(*arguments, "--json", "-")
    assert contract.from_json(result.stdout.encode()).before.rounds == 3


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_renders_loads_nothing_and_keeps_within_the_window(tmp_path: Path, width: int) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"no Chromium at {CHROMIUM}")
    file = tmp_path / "comparison.html"
    file.write_text(compare_html.render(hostile_pair()), "utf-8")
    said: list[str] = []
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        page = chromium.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url))
        page.goto(file.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        bars = page.eval_on_selector_all(".pair .bar", "bars => bars.map(bar => bar.getBoundingClientRect().width)")
        chromium.close()
    assert said == [file.as_uri()]
    assert bars[1] / bars[0] == pytest.approx(30 / 41.2, abs=0.02)  # to scale: the mean steps of the two sides
