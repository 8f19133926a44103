"""Loading, checking and judging: every fault is found, causes come before symptoms, no nanosecond is promised twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.account import PARTS
from gpudiag.cli import main
from gpudiag.errors import GpudiagError
from gpudiag.expr import Unknown, condition, evaluate
from gpudiag.metrics.spec import BY_NAME, Metric, Missing
from gpudiag.rule import Rule
from gpudiag.rules import Judgement, check_rules, judge, load_rules, merge
from gpudiag.units import format_ns

MS = 1_000_000
RULE = """
id = "{id}"
step = "overall"
category = "input"
title = "{id} holds"
when = "{when}"
bound = "{bound}"
part = {part}
estimate = {{none = "a test"}}
summary = "idle {{gpu_idle}}"
why = "w"
basis = "b"
wrong_when = "never"
{extra}
[[fix]]
change = "c"
only_if = "o"
proof = "p"
[[example]]
name = "fires"
outcome = "fired"
metrics = {{gpu_idle = "50*ms", idle_input = "50*ms", idle_sync = "50*ms", step_time = "100*ms"}}
[[example]]
name = "silent"
outcome = "clear"
metrics = {{gpu_idle = 0, idle_input = 0, idle_sync = 0, step_time = "100*ms"}}
"""


def write(
    folder: Path,
    name: str,
    *,
    when: str = "gpu_idle > 5*percent*step_time",
    bound: str = "gpu_idle",
    part: str = '["idle.input"]',
    extra: str = "",
) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{name}.toml"
    path.write_text(RULE.format(id=name, when=when, bound=bound, part=part, extra=extra))
    return path


def rules_of(folder: Path) -> list[Rule]:
    problems = check_rules(folder)
    assert not problems, [str(problem) for problem in problems]
    own = [rule for rule in load_rules([folder]) if rule.path.parent == folder]
    assert own
    return own


def metrics(**values: float) -> dict[str, Metric | Missing]:
    return {name: Metric(name, value, BY_NAME[name].unit, "test") for name, value in values.items()}


def judged(
    rules: list[Rule], parts: dict[str, float] | None = None, step: int = 100 * MS, **values: float
) -> Judgement:
    return judge(rules, metrics(step_time=step, **values), step_time_ns=step, parts=parts or dict.fromkeys(PARTS, step))


def test_a_rule_fires_with_its_share_and_the_severity_of_that_share(tmp_path: Path) -> None:
    rules = rules_of(write(tmp_path / "r", "one").parent)
    for idle, severity in ((6, "info"), (12, "warning"), (30, "critical")):
        (finding,) = judged(rules, gpu_idle=idle * MS).findings
        assert (finding.severity, finding.share, finding.bound_ns) == (severity, idle / 100, idle * MS)
        assert finding.summary == f"idle {format_ns(idle * MS)}"


def test_a_share_below_the_least_one_is_silent(tmp_path: Path) -> None:
    rules = rules_of(write(tmp_path / "r", "one", when="gpu_idle > 0*ns").parent)
    assert judged(rules, gpu_idle=2 * MS).outcomes == {"one": "clear"}
    assert judged(rules, gpu_idle=3 * MS).outcomes == {"one": "fired"}


def test_a_missing_metric_means_not_judged_with_what_to_record(tmp_path: Path) -> None:
    rules = rules_of(write(tmp_path / "r", "one").parent)
    values = metrics(step_time=100 * MS) | {
        "gpu_idle": Missing("gpu_idle", "no GPU activity recorded", "gpudiag profile")
    }
    result = judge(rules, values, step_time_ns=100 * MS, parts={})
    assert result.outcomes == {"one": "not_judged"}
    assert result.not_judged[0].missing == "gpu_idle: no GPU activity recorded"
    assert result.not_judged[0].record_with == "gpudiag profile"


def test_a_guard_that_holds_clears_the_rule_and_one_that_cannot_be_judged_does_not(tmp_path: Path) -> None:
    rules = rules_of(write(tmp_path / "r", "one", extra='unless = ["dataset_in_memory == 1"]').parent)
    assert judged(rules, gpu_idle=50 * MS).outcomes == {"one": "fired"}
    assert judged(rules, gpu_idle=50 * MS, dataset_in_memory=0).outcomes == {"one": "fired"}
    assert judged(rules, gpu_idle=50 * MS, dataset_in_memory=1).outcomes == {"one": "clear"}


def test_a_metric_that_contradicts_its_definition_is_an_error_of_that_rule_alone(tmp_path: Path) -> None:
    write(tmp_path / "r", "good", when="idle_sync > 5*percent*step_time", bound="idle_sync", part='["idle.sync"]')
    write(tmp_path / "r", "bad")
    for path in (tmp_path / "r").glob("*.toml"):
        path.write_text(path.read_text().replace("idle {gpu_idle}", "of {step_time}"))
    result = judged(rules_of(tmp_path / "r"), gpu_idle=float("nan"), idle_sync=50 * MS)
    assert result.outcomes == {"bad": "error", "good": "fired"}
    assert "gpu_idle" in result.errors[0]


def test_a_cause_with_as_much_time_takes_the_symptom_under_it(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    write(folder, "cause", when="idle_input > 0*ns", bound="idle_input")
    rules = rules_of(write(folder, "symptom", part='["idle.launch"]', extra='explained_by = ["cause"]').parent)
    cause, symptom = judged(rules, gpu_idle=20 * MS, idle_input=30 * MS).findings
    assert (cause.rule, cause.caused_by, cause.bound_ns) == ("cause", "", 30 * MS)
    assert (symptom.rule, symptom.caused_by, symptom.bound_ns) == ("symptom", "cause", 0)
    assert (cause.relation, symptom.relation) == ("", "effect")
    assert symptom.share == 0.2  # what it would be alone
    smaller = judged(rules, gpu_idle=40 * MS, idle_input=10 * MS)
    assert [finding.caused_by for finding in smaller.findings] == ["", ""]


def test_what_is_left_of_a_claim_by_less_than_half_is_explained_by_who_took_it(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    write(folder, "narrow", when="idle_input > 0*ns", bound="idle_input")
    rules = rules_of(write(folder, "wide", part='["idle.input", "idle.sync"]').parent)
    parts = {"idle.input": 30.0 * MS, "idle.sync": 10.0 * MS}
    narrow, wide = judged(rules, parts, gpu_idle=40 * MS, idle_input=30 * MS).findings
    assert (narrow.rule, narrow.bound_ns) == ("narrow", 30 * MS)
    assert (wide.rule, wide.caused_by, wide.bound_ns) == ("wide", "narrow", 0)
    parts = {"idle.input": 30.0 * MS, "idle.sync": 40.0 * MS}
    findings = judged(rules, parts, gpu_idle=70 * MS, idle_input=30 * MS).findings
    assert [(f.rule, f.caused_by, f.bound_ns) for f in findings] == [("wide", "", 40 * MS), ("narrow", "", 30 * MS)]


def test_a_chain_of_causes_ends_at_its_root(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    write(folder, "a_root")
    write(folder, "b_middle", extra='explained_by = ["a_root"]')
    rules = rules_of(write(folder, "c_leaf", extra='explained_by = ["b_middle"]').parent)
    findings = judged(rules, gpu_idle=50 * MS).findings
    assert [(f.rule, f.caused_by) for f in findings] == [("a_root", ""), ("b_middle", "a_root"), ("c_leaf", "a_root")]


def test_a_later_step_of_the_method_is_a_note_while_an_earlier_one_is_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    write(folder, "earlier", when="idle_input > 0*ns", bound="idle_input")
    rules = rules_of(write(folder, "later", part='["compute"]', extra='after = ["earlier"]').parent)
    _, later = judged(rules, gpu_idle=40 * MS, idle_input=20 * MS).findings
    assert (later.caused_by, later.severity, later.bound_ns) == ("earlier", "info", 0)
    assert later.relation == "after"  # not an effect: its time is another one
    later, _ = judged(rules, gpu_idle=40 * MS, idle_input=5 * MS).findings
    assert (later.rule, later.caused_by, later.severity) == ("later", "", "critical")


def test_an_effect_of_what_is_put_off_is_put_off_as_well(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    write(folder, "earlier", when="idle_input > 0*ns", bound="idle_input")
    write(folder, "later", part='["compute"]', extra='after = ["earlier"]')
    rules = rules_of(write(folder, "symptom", part='["compute"]', extra='explained_by = ["later"]').parent)
    findings = {f.rule: f for f in judged(rules, gpu_idle=40 * MS, idle_input=20 * MS).findings}
    assert {f.rule: (f.caused_by, f.relation, f.severity) for f in findings.values() if f.caused_by} == {
        "later": ("earlier", "after", "info"),
        "symptom": ("earlier", "after", "info"),
    }


def test_what_this_kind_of_run_does_not_have_is_nothing_to_find_and_nothing_to_record() -> None:
    """The host's account beside GPU work: its rules are clear, whatever else is missing."""
    rules = [rule for rule in load_rules() if rule.id in ("host_code_outside_phases", "optimizer_host_loop")]
    parts = {name: Missing(name, "there is GPU work", "", applies=False) for name in ("host_other", "host_optimizer")}
    lacks = Missing("optimizer_ops", "not recorded", "record it")
    result = judge(rules, {**parts, "optimizer_ops": lacks}, step_time_ns=100, parts={})
    assert (set(result.outcomes.values()), result.not_judged) == ({"clear"}, ())


def test_another_thing_to_find_keeps_a_rule_unjudged_beside_what_does_not_apply() -> None:
    absent = {
        "gc_steps": Missing("gc_steps", "no such thing", "", applies=False),
        "steps": Missing("steps", "not recorded", "record it"),
    }
    either = evaluate(condition("gc_steps > 0 or steps > 3"), absent)
    assert isinstance(either, Unknown) and [item.name for item in either.missing] == ["steps"]


def test_a_closed_gate_leaves_all_else_unjudged(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    write(folder, "gate", when="steps < 3", bound="0", extra='gate = true\nseverity = {fixed = "info", reason = "r"}')
    write(folder, "always", extra="always = true")
    write(folder, "other")
    for path in folder.glob("*.toml"):  # the template's examples lack `steps`
        path.write_text(
            path.read_text().replace('outcome = "fired"\nmetrics = {', 'outcome = "fired"\nmetrics = {steps = 1, ')
        )
        path.write_text(
            path.read_text().replace('outcome = "clear"\nmetrics = {', 'outcome = "clear"\nmetrics = {steps = 9, ')
        )
    rules = rules_of(folder)
    assert judged(rules, gpu_idle=50 * MS, steps=1).outcomes == {
        "gate": "fired",
        "always": "fired",
        "other": "not_judged",
    }
    assert judged(rules, gpu_idle=50 * MS, steps=9).outcomes["other"] == "fired"


def test_what_ends_a_run_is_no_share_of_a_step(tmp_path: Path) -> None:
    write(tmp_path, "fatal", extra="ends_run = true")
    assert ["ends_run: needs severity" in str(problem) for problem in check_rules(tmp_path)] == [True]
    fixed = 'ends_run = true\nalways = true\nseverity = {fixed = "critical", reason = "r"}'
    write(tmp_path, "fatal", extra=fixed)
    assert check_rules(tmp_path) == []


def test_fixes_fit_what_was_recorded(tmp_path: Path) -> None:
    extra = """
[[fix]]
when = "num_workers == 0"
change = "use {num_workers_needed}"
only_if = "o"
proof = "p"
code = "n={num_workers_needed}"
[[fix]]
fallback = true
change = "use some"
only_if = "o"
proof = "p"
"""
    path = write(tmp_path / "r", "one", extra=extra)
    path.write_text(path.read_text().replace('[[fix]]\nchange = "c"\nonly_if = "o"\nproof = "p"\n', ""))
    rules = rules_of(path.parent)
    (known,) = judged(rules, gpu_idle=50 * MS, num_workers=0, num_workers_needed=6).findings
    assert [(fix.change, fix.code) for fix in known.fixes] == [("use 6", "n=6")]
    for unknown in (judged(rules, gpu_idle=50 * MS, num_workers=0), judged(rules, gpu_idle=50 * MS)):
        assert [fix.change for fix in unknown.findings[0].fixes] == ["use some"]


BUILTIN = list(load_rules())
_AMOUNTS = st.integers(0, 200 * MS)


@given(st.data())
def test_all_bounds_together_never_exceed_the_step_nor_the_parts_they_come_from(data: st.DataObject) -> None:
    """The account's law, for the built-in rules and random recordings."""
    parts = {part: float(data.draw(_AMOUNTS, part)) for part in data.draw(st.sets(st.sampled_from(PARTS), min_size=1))}
    step = max(1, int(sum(parts.values())))
    scale = {"ns": _AMOUNTS, "ratio": st.floats(0, 2), "flag": st.integers(0, 1), "count": st.integers(0, 3000)}
    chosen = data.draw(st.sets(st.sampled_from(sorted(BY_NAME)), min_size=40))
    values: dict[str, Metric | Missing] = {
        name: Metric(name, data.draw(scale.get(BY_NAME[name].unit, st.integers(0, 10**12))), BY_NAME[name].unit, "t")
        for name in sorted(chosen - {"gpu_ops_total", "steps"})
    }
    values |= metrics(step_time=step, steps=10, gpu_ops_total=1000)
    result = judge(BUILTIN, values, step_time_ns=step, parts=parts)
    assert sum(f.bound_ns for f in result.findings) <= step
    by_id = {rule.id: rule for rule in BUILTIN}
    for name in parts:
        only = sum(f.bound_ns for f in result.findings if by_id[f.rule].part == (name,))
        assert only <= parts[name]
    for finding in result.findings:
        assert not (finding.caused_by and finding.bound_ns)
        assert not finding.caused_by or finding.caused_by in {f.rule for f in result.findings if not f.caused_by}
    assert list(result.findings) == list(judge(BUILTIN, values, step_time_ns=step, parts=parts).findings)


def test_the_same_rule_on_several_devices_is_one_finding_of_the_worst(tmp_path: Path) -> None:
    rules = rules_of(write(tmp_path / "r", "one").parent)
    scopes = [
        judge(
            rules,
            metrics(step_time=100 * MS, gpu_idle=idle * MS),
            step_time_ns=100 * MS,
            parts={"idle.input": idle * MS},
            rank=rank,
            device=rank,
        )
        for rank, idle in enumerate((10, 40, 0))
    ]
    merged = merge(scopes)
    (finding,) = merged.findings
    assert (finding.share, finding.bound_ns, finding.devices) == (0.4, 40 * MS, ((0, 0), (1, 1)))
    assert merged.outcomes == {"one": "fired"}


def test_bounds_of_different_devices_together_stay_within_the_step(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    write(folder, "one", when="idle_input > 0*ns", bound="idle_input")
    rules = rules_of(write(folder, "two", when="idle_sync > 0*ns", bound="idle_sync", part='["idle.sync"]').parent)
    first = judged(rules, idle_input=70 * MS, idle_sync=0, gpu_idle=1)
    second = judged(rules, idle_input=0, idle_sync=60 * MS, gpu_idle=1)
    assert [(f.rule, f.bound_ns) for f in merge([first, second]).findings] == [("one", 70 * MS), ("two", 30 * MS)]


def test_a_device_that_could_not_be_judged_is_not_healthy(tmp_path: Path) -> None:
    rules = rules_of(write(tmp_path / "r", "one").parent)
    merged = merge([judged(rules, gpu_idle=0), judged(rules)])
    assert merged.outcomes == {"one": "not_judged"}
    assert [item.rule for item in merged.not_judged] == ["one"]


def test_all_faults_of_all_files_are_found_with_line_and_column(tmp_path: Path) -> None:
    write(tmp_path, "first", when="gpu_idle > 5")
    write(tmp_path / "deeper", "second", part='["idle.inptu"]', extra='titel = "x"\nexplained_by = ["frist"]')
    (tmp_path / "third.toml").write_text('id = "third"\nwhen = "')
    (tmp_path / "fourth.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "fifth.toml").write_text("")
    said = [str(problem).replace(str(tmp_path) + "/", "") for problem in check_rules(tmp_path)]
    text = "\n".join(said)
    assert "first.toml:6:20: when: cannot compare ns and a plain number" in text
    assert "deeper/second.toml:8:10: part.1: no such value 'idle.inptu', did you mean 'idle.input'?" in text
    assert "deeper/second.toml:14:1: titel: no such field, did you mean 'title'?" in text
    assert any(line.startswith("third.toml:2:") and "not TOML" in line for line in said)
    assert "fourth.toml: is not UTF-8" in text
    assert text.count("fifth.toml") > 8


def test_a_fault_in_a_text_of_many_lines_is_found_on_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, "one")
    path.write_text(
        path.read_text().replace('summary = "idle {gpu_idle}"', 'summary = """\nfirst\n  idle {gpu_idel}\n"""')
    )
    (problem,) = check_rules(tmp_path)
    lines = path.read_text().splitlines()
    assert lines[problem.line - 1][problem.column - 1 :].startswith("gpu_idel")


def test_an_unknown_cause_and_an_example_that_comes_out_otherwise_are_faults(tmp_path: Path) -> None:
    path = write(tmp_path, "one", extra='explained_by = ["loader_wiat"]')
    path.write_text(path.read_text().replace("metrics = {gpu_idle = 0,", 'metrics = {gpu_idle = "60*ms",'))
    text = "\n".join(str(problem) for problem in check_rules(tmp_path))
    assert "no rule is called 'loader_wiat', did you mean 'loader_wait'?" in text
    assert "example 'silent' comes out as fired, not clear" in text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('step = "overall"', 'step = "overal"', "did you mean 'overall'"),
        ('category = "input"', "category = 5", "must be a string"),
        ('part = ["idle.input"]', "", "`part` is missing"),
        ('bound = "gpu_idle"', 'bound = "gpu_busy"', "must be ns, this is a ratio"),
        ('bound = "gpu_idle"', 'bound = "h2d_bytes"', "must be ns, this is bytes"),
        ('estimate = {none = "a test"}', "estimate = {}", "exactly one"),
        ('estimate = {none = "a test"}', 'estimate = {edit = "magic"}', "no such value 'magic'"),
        ('why = "w"', "", "'why' is missing"),
        ('why = "w"', 'why = " "', "missing or empty"),
        ('why = "w"', 'why = "w"\nseverity = {info = 0.5}', "say why in `reason`"),
        ('why = "w"', 'why = "w"\nseverity = {info = 0.5, warning = 0.1, reason = "r"}', "info <= warning"),
        ('why = "w"', 'why = "w"\nseverity = {info = 5, reason = "r"}', "share of the step"),
        ('why = "w"', 'why = "w"\nunless = "steps > 1"', "list of strings"),
        ('proof = "p"', "", "proof"),
        ('outcome = "clear"', 'outcome = "fired"', 'one with "clear"'),
        ('gpu_idle = "50*ms"', 'gpu_idle = "50*MB"', "must be ns"),
        ('gpu_idle = "50*ms"', "gpu_idel = 5", "did you mean 'gpu_idle'"),
        ('gpu_idle = "50*ms"', 'gpu_idle = "step_time"', "a number with a unit"),
        ('id = "one"', 'id = "two"', "must be the file's name"),
        ("[[fix]]", "[fix]", "must be written as [[fix]]"),
    ],
)
def test_each_field_is_checked(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = write(tmp_path, "one")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    problems = [str(problem) for problem in check_rules(tmp_path)]
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 3000 + "]" * 3000,
        'id = "one"\n' + "x = 1\n" * 60_000,
        "when = 5\nfix = 3\nexample = 'x'\nseverity = 1\nestimate = []\npart = {}\nsummary = [1]\nwhere = ['x']",
        "[[fix]]\nchange = {a = {b = {c = 1}}}\n[[evidence]]\nlabel = 1979-05-27\n[[example]]\nmetrics = 5",
        "[a.b.c]\nd = 1\n[[a.e]]\nf = '''\nx'''\n",
        "'' = 1\n\"\" = 2",
    ],
)
def test_a_hostile_file_is_a_list_of_problems(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.toml").write_text(text)
    assert check_rules(tmp_path)


def test_a_users_rule_replaces_the_built_in_one_and_the_report_is_told(tmp_path: Path) -> None:
    write(tmp_path, "gpu_idle")
    rules = load_rules([tmp_path])
    assert rules.named("gpu_idle").path.parent == tmp_path
    assert len(rules) == len(load_rules())
    assert "gpu_idle" in rules.notes[0]
    assert str(tmp_path) in rules.notes[0]


def test_half_a_rule_set_is_never_used(tmp_path: Path) -> None:
    write(tmp_path, "one", when="gpu_idle > 5")
    with pytest.raises(GpudiagError, match="cannot compare"):
        load_rules([tmp_path])
    with pytest.raises(GpudiagError, match="no such folder"):
        load_rules([tmp_path / "missing"])


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(args))
    return result.exit_code, result.stdout, result.stderr


def test_rules_list_names_every_rule_within_80_columns() -> None:
    code, out, _ = run("rules", "list")
    assert code == 0
    assert all(rule.id in out for rule in load_rules())
    assert max(map(len, out.splitlines())) <= 80


def test_rules_show_prints_a_page_of_every_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = load_rules()
    monkeypatch.setattr("gpudiag.commands.rules.load_rules", lambda dirs: rules)  # 77 times would take long
    for rule in rules:
        code, out, _ = run("rules", "show", rule.id)
        assert code == 0
        for heading in ("What", "Why", "Fires when", "When it is wrong", "Basis", "Severity", "Fix", "References"):
            assert f"\n{heading}" in out


def test_rules_show_knows_aliases_and_suggests_names() -> None:
    assert run("rules", "show", "dataloader_bound")[1].startswith("The step waits for the data loader")
    code, _, err = run("rules", "show", "lodaer_wait")
    assert code == 1
    assert "did you mean 'loader_wait'" in err


def test_rules_check_ends_with_1_and_names_file_line_and_column(tmp_path: Path) -> None:
    assert run("rules", "check")[0] == 0
    path = write(tmp_path, "one", when="gpu_idle > 5")
    code, out, err = run("rules", "check", str(tmp_path))
    assert code == 1
    assert out.startswith(f"{path}:6:20: ")
    assert "1 problem in 1 rule file" in err
    code, _, err = run("rules", "check", str(tmp_path / "missing"))
    assert code == 1
    assert "no such folder" in err


def test_metrics_prints_unit_formula_and_what_a_metric_does_not_mean() -> None:
    code, out, _ = run("metrics")
    assert code == 0
    assert all(f"{name}  [{spec.unit}]" in out for name, spec in BY_NAME.items())
    assert "not: the whole wait in the loader" in run("metrics", "input_lost")[1]
    assert "did you mean 'gpu_busy'" in run("metrics", "gpu_bsy")[2]


def test_texts_say_step_only_where_steps_are_known(tmp_path: Path) -> None:
    path = write(tmp_path / "r", "one")
    path.write_text(
        path.read_text().replace('"idle {gpu_idle}"', '"{gpu_idle} of {the_step}, {idle_input} {per_step}"')
    )
    rules = rules_of(path.parent)
    values = {"gpu_idle": 50 * MS, "idle_input": 3 * MS}
    assert judged(rules, steps=9, **values).findings[0].summary == "50.0 ms of each 100 ms step, 3.00 ms a step"
    assert judged(rules, steps=0, **values).findings[0].summary == "50.0 ms of the 100 ms span, 3.00 ms in the span"
