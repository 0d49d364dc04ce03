"""Whoever says that two ways to train end alike has a verdict of `halfstep compare` beside it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
# How people say it; what is about bits, scales or formats is proved elsewhere.
CLAIM = re.compile(
    r"\b(inside|within|outside|out of)\b[^.|]{0,40}\bspread\b"
    r"|\bsame (held-out |final |training |validation )?loss(es)?\b(?! (scale|function))"
    r"|\b(equal|equally good|identical|indistinguishable) (held-out |final )?loss"
    r"|\bloss(es)? (is|are|were|was|stays?) (the same|equal|unchanged|identical|indistinguishable)"
    r"|\b(learns?|trains?|converges?) (as well as|the same as|what|like|as) (fp32|bf16|full precision)"
    r"|\bas (well|good|accurate) as (in )?(fp32|bf16|full precision)"
    r"|\bmatch(es)? (fp32|bf16|full precision)"
    r"|\bno (worse than|loss (of|in) (quality|accuracy))"
    r"|\bwithout (any )?(loss of|losing) (quality|accuracy)"
    r"|\bcosts? no(thing)? (in )?(quality|accuracy|loss)",
    re.IGNORECASE,
)
VERDICT = re.compile(r"\b(SAME|DIFFERENT|CANNOT\sTELL)\b")
ANSWERED = re.compile(r"\?|`halfstep compare|--budget")  # a question, or the tool that answers it


def passages(text: str) -> list[str]:
    """Returns the paragraphs, items and rows of a page, without code."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:\||- |\d+\. ))", text)
    return [" ".join(part.split()) for part in parts if not part.startswith("    ")]


def claims_without_verdict(text: str) -> list[str]:
    """Returns what claims that losses are alike, and has no verdict."""
    return [p for p in passages(text) if CLAIM.search(p) and not VERDICT.search(p) and not ANSWERED.search(p)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_claim_of_equality_has_a_verdict(page):
    assert claims_without_verdict(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "claim",
    [
        "| fp8: held-out loss | [inside the spread of fp32's seeds](x.md) |",
        "Its held-out loss is [within the\nspread of fp32's seeds](x.md).",
        "Three seeds lie outside bf16's spread.",
        "bf16 ends at the same loss.",
        "In bf16 the model trains as well as fp32.",
        "The losses are equal after 500 steps.",
        "It is faster without loss of quality.",
        "fp8 matches bf16 after 1000 steps.",
        "bf16 learns what fp32 learns.",
    ],
)
def test_a_claim_is_found_and_a_verdict_settles_it(claim):
    page = "# Title\n\nSomething else is SAME.\n\n{}\n\n- and DIFFERENT here\n"
    assert claims_without_verdict(page.format(claim)) == [" ".join(claim.split())]
    assert claims_without_verdict(page.format(f"{claim} CANNOT\nTELL: 3 pairs are missing.")) == []


def test_what_is_no_claim_is_left_alone():
    for text in (
        "All ranks must use the same loss scale.",
        "```\nthe same loss\n```",
        "Does it end at the same loss?",
    ):
        assert claims_without_verdict(text) == []
