"""`gpudiag rules`: what is looked for, why, and how one adds a rule."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

from gpudiag.commands._common import example, no_color_option
from gpudiag.diagnosis import STEP_ORDER
from gpudiag.report.text import clean, clean_code
from gpudiag.rule import Rule, RuleFix
from gpudiag.rules import builtin_dir, check_rules, load_rules

_HEADINGS = {
    "overall": "1  Overall timeline",
    "transfer": "2  Data transfer",
    "compute": "3  Compute and kernels",
    "scheduling": "4  Launch and scheduling",
    "environment": "Environment",
}
_RULES_OPTION = click.option(
    "--rules",
    "rules_dirs",
    multiple=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="A folder of further rules; one of the same id replaces the built-in rule.",
)


@click.group(
    epilog=example(
        "gpudiag rules list",
        "gpudiag rules show loader_wait",
        "gpudiag rules check my_rules/      every fault of every file, and the rules' own examples",
    )
)
def rules() -> None:
    """List, explain and check the rules."""


@rules.command("list", epilog=example("gpudiag rules list --rules my_rules/"))
@_RULES_OPTION
@no_color_option
def list_(rules_dirs: tuple[Path, ...]) -> None:
    """All rules by step of the method, with what each one says."""
    rule_set = load_rules(rules_dirs)
    for note in rule_set.notes:
        click.echo(f"gpudiag: {clean(note)}", err=True)
    width = max(len(rule.id) for rule in rule_set)
    for step in STEP_ORDER:
        group = [rule for rule in rule_set if rule.step == step]
        if group:
            click.secho(f"{_HEADINGS[step]}  ({len(group)} rules)", bold=True)
            for rule in group:
                lead = f"  {rule.id:<{width}}  "
                click.echo(wrap(clean(rule.title), lead, " " * len(lead)))
            click.echo()
    click.echo(f"{len(rule_set)} rules. `gpudiag rules show ID` explains one.")


@rules.command(epilog=example("gpudiag rules show tensor_cores_unused"))
@click.argument("rule_id", metavar="ID")
@_RULES_OPTION
@no_color_option
def show(rule_id: str, rules_dirs: tuple[Path, ...]) -> None:
    """One rule: what it looks for, why, when it is wrong, what to change, how that is proved."""
    rule = load_rules(rules_dirs).named(rule_id)
    click.secho(f"{clean(rule.title)}  ({rule.id})", bold=True)
    aliases = f"; also called {', '.join(rule.aliases)}" if rule.aliases else ""
    click.echo(wrap(f"{_HEADINGS[rule.step].strip()}; category {rule.category}{aliases}", "", ""))
    for heading, text in _sections(rule):
        click.echo()
        click.secho(heading, bold=True)
        click.echo("\n".join(wrap(line) for line in _lines(text)))
    for number, fix in enumerate(rule.fixes, 1):
        click.echo()
        click.secho(f"Fix {number}" if len(rule.fixes) > 1 else "Fix", bold=True)
        click.echo("\n".join(_fix_lines(fix)))
    click.echo()
    click.secho("References", bold=True)
    for reference in rule.references:
        click.echo(f"  {clean(reference)}")
    click.echo(f"  this rule: {clean(str(rule.path))}")


def _sections(rule: Rule) -> Iterator[tuple[str, str]]:
    yield "What", rule.summary[0].text
    yield "Why", rule.why
    yield "Fires when", rule.when.text
    if rule.unless:
        yield "Unless", "\n".join(guard.text for guard in rule.unless)
    yield "When it is wrong", rule.wrong_when
    yield "Basis", rule.basis
    yield "Severity", _severity(rule)
    if rule.part:
        yield "Bound (what it can win back)", f"{rule.bound[0].text}, from {', '.join(rule.part)}"
    if rule.no_estimate:
        yield "Estimate", f"none: {rule.no_estimate}"
    elif rule.edit:
        yield "Estimate", f"by replay, with the edit {rule.edit}"
    if rule.explained_by:
        yield "Explained by", ", ".join(rule.explained_by)
    if rule.after:
        yield "Only a note while these are warnings", ", ".join(rule.after)
    if rule.evidence:
        yield "Evidence", "\n".join(f"{item.label}: {item.value.text}" for item in rule.evidence)


def _severity(rule: Rule) -> str:
    bands = rule.severity
    reason = f" ({bands.reason})" if bands.reason else ""
    if bands.fixed:
        return f"always {bands.fixed}{reason}"
    # A band that begins at the whole step is a band that the rule never reaches.
    levels = [
        (name, share)
        for name, share in (("info", bands.info), ("warning", bands.warning), ("critical", bands.critical))
        if share < 1
    ]
    return ", ".join(f"{name} from {share * 100:g} % of the step" for name, share in levels) + reason


def _fix_lines(fix: RuleFix) -> Iterator[str]:
    yield wrap(clean(fix.change.text), "  change   ", " " * 11)
    yield wrap(clean(fix.only_if.text), "  only if  ", " " * 11)
    yield wrap(clean(fix.proof.text), "  proof    ", " " * 11)
    if fix.when:
        yield wrap(clean(fix.when.text), "  shown    where ", " " * 11)
    if fix.fallback:
        yield "  shown    where no other fix fits"
    for line in clean_code(fix.code.text) if fix.code.text.strip() else ():
        yield "    | " + line


def _lines(text: str) -> list[str]:
    return [clean(line) for line in text.splitlines()]


def wrap(text: str, first: str = "  ", rest: str = "  ") -> str:
    width = min(shutil.get_terminal_size().columns, 100) if sys.stdout.isatty() else 80
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


@rules.command(epilog=example("gpudiag rules check my_rules/"))
@click.argument("folder", required=False, metavar="[DIR]", type=click.Path(path_type=Path))
@click.pass_context
def check(ctx: click.Context, folder: Path | None) -> None:
    """Check rule files (without DIR the built-in ones): syntax, names, units, and that each rule's examples come out.

    Prints every fault of every file as FILE:LINE:COLUMN and ends with 1 if there is any.
    """
    folder = folder or builtin_dir()
    problems = check_rules(folder)
    for problem in problems:
        click.echo(clean(str(problem)))
    count = sum(1 for _ in folder.rglob("*.toml"))
    files = f"{count} rule file{'' if count == 1 else 's'}"
    if problems:
        click.echo(f"gpudiag: {len(problems)} problem{'' if len(problems) == 1 else 's'} in {files}", err=True)
        ctx.exit(1)
    click.echo(f"{files}: no problems")
