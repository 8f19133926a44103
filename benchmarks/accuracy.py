"""How often gpudiag is right: every labelled recording, every case that can be a timeline, and (--live) every sample.

    python benchmarks/accuracy.py [--live]

Prints per rule: found (named where it had to be), missed, false alarms (named where it had to be silent); overall: how often
the first named cause is right, findings on healthy input, and the error of the estimates. The labels are in tests/cases; the
recordings are in ../shared/traces (or $GPUDIAG_SHARED) and are skipped where absent.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("GPUDIAG_SHARED", ROOT.parent / "shared"))
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from cases import ALL, FURTHER  # noqa: E402
from cases.case import Case, faults, first_named, standing  # noqa: E402
from cases.pairs import PAIRS, Pair  # noqa: E402
from cases.traces import LABELS  # noqa: E402

from gpudiag.diagnosis import Diagnosis, from_json  # noqa: E402
from gpudiag.pipeline import diagnose_recordings  # noqa: E402
from gpudiag.read import Recordings, open_recordings  # noqa: E402
from gpudiag.rules import RuleSet, load_rules  # noqa: E402


@dataclass(frozen=True)
class Judged:
    """One labelled input and what was said of it. wrong: what is not as labelled, a line each. false_alarms: by rule."""

    source: str
    name: str
    healthy: bool
    found: tuple[str, ...]
    missed: tuple[str, ...]
    false_alarms: tuple[str, ...]
    fired: frozenset[str]
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class Estimate:
    """Times in ns a step. predicted None: no estimate was given, and why."""

    pair: str
    step: float
    predicted: float | None
    true: float
    why: str = ""

    @property
    def error(self) -> float | None:
        """Of the step: 0.02 is a prediction that misses the cured step by 2 % of the present one."""
        return None if self.predicted is None else (self.predicted - self.true) / self.step


@dataclass
class Score:
    judged: list[Judged] = field(default_factory=list)
    estimates: list[Estimate] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def right(self) -> float:
        return sum(not item.wrong for item in self.judged) / max(1, len(self.judged))

    @property
    def on_healthy(self) -> int:
        return sum(len(item.false_alarms) for item in self.judged if item.healthy)

    @property
    def worst_error(self) -> float:
        return max((abs(e.error) for e in self.estimates if e.error is not None), default=0.0)

    @property
    def fired(self) -> frozenset[str]:
        return frozenset().union(*(item.fired for item in self.judged))

    def of_rule(self, rule: str) -> tuple[int, int, int]:
        """(found, missed, false alarms)"""
        return tuple(  # type: ignore[return-value]
            sum(Counter(getattr(item, kind))[rule] for item in self.judged)
            for kind in ("found", "missed", "false_alarms")
        )


def judged(source: str, case: Case, diagnosis: Diagnosis, first_if_any: tuple[str, ...] = ()) -> Judged:
    named = first_named(diagnosis)
    alone = {finding.rule for finding in standing(diagnosis)}
    serious = {finding.rule for finding in standing(diagnosis) if finding.severity != "info"}
    everything = {finding.rule for finding in diagnosis.findings}
    wrong = faults(case, diagnosis)
    if first_if_any and named in first_if_any:
        wrong = [line for line in wrong if not line.startswith("nothing is to be named")]
    false_alarms = {rule for rule in case.silent if rule in alone}
    if case.status == "healthy":
        false_alarms |= serious
    elif named and named not in (*case.first, *first_if_any):
        false_alarms.add(named)
    right = [named] if named in (*case.first, *first_if_any) else []
    right += [rule for rule in case.also if rule in everything and rule not in right]
    missed = [rule for rule in case.also if rule not in everything]
    if case.first and named not in case.first:
        missed.append(case.first[0])
    fired = frozenset(rule for rule, outcome in diagnosis.rules.items() if outcome == "fired")
    return Judged(
        source,
        case.id,
        case.status == "healthy",
        tuple(right),
        tuple(missed),
        tuple(sorted(false_alarms)),
        fired,
        tuple(wrong),
    )


def of_cases(rules: RuleSet) -> Iterator[Judged]:
    for case in ALL + FURTHER:
        built = case.build()
        timelines = built if isinstance(built, tuple) else (built,)
        yield judged(
            "case" if case in ALL else "further fault", case, diagnose_recordings(Recordings(timelines), rules)
        )


def of_recordings(rules: RuleSet, traces: Path) -> Iterator[Judged]:
    """Nothing where the folder is not there."""
    for label in LABELS:
        path = traces / label.file
        if path.exists():
            case = Case(label.file, lambda: (), label.first, (), label.silent, label.status, label.bound_by)  # type: ignore[arg-type]
            yield judged("recording", case, diagnose_recordings(open_recordings([path]), rules), label.first_if_any)


def of_samples(score: Score) -> Iterator[Judged]:
    """Profiles every sample that this machine can show; the others are named in score.skipped."""
    import torch

    gpu = torch.cuda.is_available()
    for file in sorted((ROOT / "samples").glob("*/expect.toml")):
        for variant, expected in tomllib.loads(file.read_text()).items():
            name = f"{file.parent.name}/{variant}"
            if expected.get("needs") == "gpu" and not gpu:
                score.skipped.append(f"{name}: the bottleneck exists on a GPU only")
                continue
            diagnosis = profile(file.parent / f"{variant}.py")
            found = {finding.rule for finding in diagnosis.findings}
            missed = [rule for rule in expected["must_find"] if rule not in found]
            alarms = [rule for rule in expected["must_not_find"] if rule in found]
            wrong = [f"{rule} is missing" for rule in missed] + [f"{rule} is said" for rule in alarms]
            bound = expected.get("bound_by", diagnosis.verdict.bound_by)
            if bound != diagnosis.verdict.bound_by:
                wrong.append(f"bound by {diagnosis.verdict.bound_by}, not {bound}")
            fired = frozenset(rule for rule, outcome in diagnosis.rules.items() if outcome == "fired")
            right = tuple(rule for rule in expected["must_find"] if rule in found)
            healthy = file.parent.name == "healthy"
            yield Judged("sample", name, healthy, right, tuple(missed), tuple(alarms), fired, tuple(wrong))


def profile(script: Path) -> Diagnosis:
    """The diagnosis of a script under `gpudiag profile --with torch`. Raises CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "diagnosis.json"
        command = [sys.executable, "-m", "gpudiag", "profile", "--with", "torch", "-o", str(Path(folder) / "bundle")]
        subprocess.run(
            [*command, "--json", str(target), str(script)], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, check=True
        )  # fmt: skip
        return from_json(target.read_bytes())


def of_pairs(rules: RuleSet) -> Iterator[Estimate]:
    """Estimates on simulated faults, held against their simulated cures."""
    for pair in PAIRS:
        yield of_pair(pair, rules)


def of_pair(pair: Pair, rules: RuleSet) -> Estimate:
    slow, fast = (diagnose_recordings(Recordings((build(),)), rules) for build in (pair.slow, pair.fast))
    before, after = (float(diagnosis.metrics["step_time"].value or 0) for diagnosis in (slow, fast))
    finding = next((f for f in slow.findings if f.rule == pair.rule and not f.caused_by), None)
    if finding is None:
        return Estimate(pair.name, before, None, before - after, f"{pair.rule} is not found")
    predicted = None if finding.estimate_ns is None else float(finding.estimate_ns)
    return Estimate(pair.name, before, predicted, before - after, finding.estimate_reason)


def measure(*, live: bool = False, traces: Path | None = None) -> Score:
    rules = load_rules()
    score = Score()
    score.judged += of_cases(rules)
    folder = traces or SHARED / "traces"
    score.judged += of_recordings(rules, folder)
    if not folder.is_dir():
        score.skipped.append(f"recordings: no folder {folder}")
    if live:
        score.judged += of_samples(score)
    else:
        score.skipped.append("samples: --live profiles them (some minutes)")
    score.estimates += of_pairs(rules)
    return score


def text(score: Score, rules: RuleSet) -> str:
    lines = [f"{'rule':34}{'found':>7}{'missed':>8}{'false alarms':>14}"]
    for rule in rules:
        counts = score.of_rule(rule.id)
        if any(counts):
            lines.append(f"{rule.id:34}{counts[0]:7}{counts[1]:8}{counts[2]:14}")
    lines.append("")
    for item in score.judged:
        lines += [f"wrong: {item.source} {item.name}: {line}" for line in item.wrong]
    lines.append(
        f"{'estimate (simulated fault, simulated cure)':44}{'step':>9}{'predicted':>11}{'true':>9}{'error':>8}"
    )
    for e in score.estimates:
        if e.predicted is None or e.error is None:
            lines.append(f"{e.pair:44}{e.step / 1e6:6.1f} ms   no estimate: {e.why}")
        else:
            lines.append(
                f"{e.pair:44}{e.step / 1e6:6.1f} ms{e.predicted / 1e6:8.2f} ms{e.true / 1e6:6.2f} ms{e.error:+8.1%}"
            )
    lines.append("")
    counts = Counter(item.source for item in score.judged)
    wrong = sum(bool(item.wrong) for item in score.judged)
    lines.append(", ".join(f"{n} {source}s" for source, n in counts.items()))
    lines.append(
        f"right in every point: {len(score.judged) - wrong} of {len(score.judged)} ({score.right:.1%}; goal 95 %)"
    )
    lines.append(f"findings on healthy input: {score.on_healthy} (goal none)")
    lines.append(f"worst error of an estimate: {score.worst_error:.1%} of the step")
    lines += [f"skipped: {reason}" for reason in score.skipped]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--live", action="store_true", help="profile the samples, too (some minutes; needs torch)")
    print(text(measure(live=parser.parse_args().live), load_rules()))


if __name__ == "__main__":
    main()
