"""The pull-request comment, read back by a real Markdown parser."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import sample_diagnosis
from hostile import HOSTILE, LONG, assert_harmless, hostile_diagnosis
from hypothesis import given
from hypothesis import strategies as st

from gpudiag.report.markdown import code, escape, render

markdown_it = pytest.importorskip("markdown_it")
OURS = re.compile(r"</?(?:details|summary|b|sub)(?: open)?>|<!-- -->")


def parsed(text: str) -> list[object]:
    return markdown_it.MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text)  # type: ignore[no-any-return]


def leaves(tokens: list[object]) -> Iterator[object]:
    for token in tokens:
        yield token
        yield from leaves(getattr(token, "children", None) or [])


def foreign(text: str) -> list[str]:
    """Every piece of HTML, link or image in a Markdown text that the report did not put there itself."""
    found = []
    for token in leaves(parsed(text)):
        if token.type in ("html_block", "html_inline"):  # type: ignore[attr-defined]
            found += re.findall(r"<[^>]*>?", OURS.sub("", token.content))  # type: ignore[attr-defined]
        elif token.type in ("link_open", "image"):  # type: ignore[attr-defined]
            found.append(str(token.attrs))  # type: ignore[attr-defined]
    return found


def test_the_comment_has_the_verdict_the_account_and_the_steps() -> None:
    text = render(sample_diagnosis.bottleneck())
    assert text.startswith("### 🔴 gpudiag: input-bound\n")
    assert "| idle: waits for input | 41.0 % | 16.9 ms |" in text
    assert "| 2 Data transfer | all clear (2 rules), 1 not judged |" in text
    assert "num_workers=5" in text
    assert text.count("<details") == text.count("</details>") == 4


def test_the_tables_are_tables() -> None:
    heads = [token for token in parsed(render(sample_diagnosis.bottleneck())) if token.type == "table_open"]  # type: ignore[attr-defined]
    assert len(heads) == 3


def test_a_healthy_run_is_short() -> None:
    text = render(sample_diagnosis.healthy())
    assert text.startswith("### 🟢 gpudiag: healthy")
    assert text.count("<details") == 1


def test_hostile_names_stay_text() -> None:
    text = render(hostile_diagnosis())
    assert_harmless(text)
    assert foreign(text) == []
    tokens = parsed(text)
    assert [t.content for t in leaves(tokens) if t.type == "heading"] == []  # type: ignore[attr-defined]
    assert sum(t.type == "heading_open" for t in tokens) == 1  # type: ignore[attr-defined]
    assert sum(t.type == "table_open" for t in tokens) == 3  # type: ignore[attr-defined]


def test_a_comment_with_long_names_is_one_that_github_takes() -> None:
    assert LONG not in render(hostile_diagnosis())
    assert len(render(hostile_diagnosis())) < 65_536  # GitHub's limit of a comment


@pytest.mark.parametrize("text", [HOSTILE, "@team #12 GH-3", "https://x.example www.x.example"])
def test_nobody_is_mentioned_and_nothing_linked(text: str) -> None:
    escaped = escape(text)
    assert not re.search(r"@\w|#\d|GH-\d|https?:|www\.", escaped)


@given(st.text() | st.text(alphabet="-+#=.)1<>[](!`*_~|$&; a\\"))
def test_any_text_escapes_to_one_paragraph_of_plain_text(text: str) -> None:
    escaped = escape(text)
    assert foreign(f"a {escaped} z") == []
    assert foreign(escaped) == []
    if escaped:
        assert [t.type for t in parsed(escaped)] == ["paragraph_open", "inline", "paragraph_close"]  # type: ignore[attr-defined]


def test_a_fold_shows_its_title_without_markdown_escapes_because_it_is_html() -> None:
    found = sample_diagnosis.finding(title="num_workers=0 | <b>")
    assert "<b>num_workers=0 | &lt;b&gt;</b>" in render(sample_diagnosis.bottleneck(findings=(found,)))


@given(st.text(alphabet="`|\\ a"))
def test_any_text_fits_a_code_span_in_a_table_cell(text: str) -> None:
    table = f"| a | b |\n|---|---|\n| {code(text)} | z |\n"
    rows = [t for t in parsed(table) if t.type == "td_open"]  # type: ignore[attr-defined]
    assert len(rows) == 2
    last = [t for t in parsed(table) if t.type == "inline"][-1]  # type: ignore[attr-defined]
    assert last.content == "z"  # type: ignore[attr-defined]
