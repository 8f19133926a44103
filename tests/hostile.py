"""Names as an adversary, or bad luck, writes them; and a diagnosis that has them in every text field."""

from __future__ import annotations

import sample_diagnosis

from gpudiag.diagnosis import Diagnosis, Evidence, Fix, KernelRow, NotJudged, SourceInfo, Verdict

HOSTILE = (
    "<script>alert(1)</script> \"quoted\" 'single' `tick` ``` & | [text](https://evil.example/x) ![i](x) <!-- "
    "\x1b[31mred\x1b]0;title\x07 \x9b31m \r\n# heading\n| a | b |\n</details> \u202egnp.exe\u2066 \u200b\ufeff \udcff "
    "@someone #123 www.evil.example {0} %s \x00 ]]> \u2028 -->"
)
LONG = "k" * 10_000
FORMULA = "=HYPERLINK(1)"


def hostile_diagnosis() -> Diagnosis:
    base = sample_diagnosis.bottleneck()
    found = sample_diagnosis.finding(
        title=HOSTILE,
        summary=HOSTILE,
        where=f"{HOSTILE}:7",
        evidence=(Evidence(HOSTILE, HOSTILE),),
        fixes=(Fix(HOSTILE, HOSTILE, HOSTILE, f"x = 1\n{HOSTILE}"), Fix(HOSTILE, HOSTILE, HOSTILE)),
        why=HOSTILE,
        wrong_when=HOSTILE,
        references=(HOSTILE,),
    )
    effect = sample_diagnosis.finding("gpu_idle", title=HOSTILE, caused_by="loader_wait", bound_ns=0)
    names = (HOSTILE, LONG, FORMULA)
    return sample_diagnosis.bottleneck(
        source=SourceInfo("kineto", f"/tmp/{HOSTILE}", HOSTILE),
        verdict=Verdict("bottleneck", "input", HOSTILE, HOSTILE),
        findings=(found, effect),
        not_judged=(NotJudged(HOSTILE, HOSTILE, HOSTILE),),
        warnings=(HOSTILE, LONG),
        kernels=tuple(KernelRow(name, HOSTILE, 1, 10, 10, 0.3, False) for name in names),
        rules={**base.rules, HOSTILE: "error"},
        environment={HOSTILE: HOSTILE},
    )


def assert_harmless(text: str) -> None:
    """No character that a terminal obeys or that hides from the eye, whatever the format."""
    for bad in ("\x1b", "\x9b", "\x07", "\x00", "\r", "\u202e", "\u2066", "\u200b", "\ufeff", "\u2028", "\udcff"):
        assert bad not in text, f"{bad!r} got through"
    text.encode()
