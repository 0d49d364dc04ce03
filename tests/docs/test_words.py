"""Phrases that this repository does not use, because readers stumble over them, and the plain form of each."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("halfstep", "tests", "docs", "examples", "benchmarks")
UNITS = "tokens|steps|bytes|bits|FLOPs|kernels|launches|syncs?|waits|ms|micro-batches"

# A pattern, and what to write instead.
AVOIDED = {
    r"\b(?:go|goes|going|gone|went) on\b(?! (?:the|a|its|disk|stdout|stderr))": "continue, resume",
    r"(?<![\"'])\btold\b(?![\"'])": "reported, shown, named (the key `told` of an event stays)",
    r"\bhangs? on\b": "depends on",
    r"\bwhoever\b|\bwho wants\b": "a user who, anyone who, to do this",
    r"\ba look\b|\btwo looks\b|\blooks? at held-out\b": "an evaluation",
    r"\ball the same\b": "still, anyway",
    r"\bwhat (?:becomes|became) of\b": "what happens to",
    r"\bthat (?:it|they) (?:has|have) not\b": "that it lacks",
    r"\b(?<!there )is no (?:multiple|parameter|JSON|UTF-8|number|tensor|array|policy|format|TOML)\b": "is not a",
    rf"\b(?:{UNITS}) an? (?:second|step|update|token|parameter|window|row|tensor|micro-batch)\b": "per",
    r"\bof one's own\b|\ba loop of (?:your|their) own\b": "your own loop",
    r"\bthe seam\b|\ba seam\b": "the driver",
}
# What was written before these rules, and the rules.
EXCEPT = {ROOT / "CHANGELOG.md", Path(__file__)}


def prose(path):
    """Returns the text of a file, with spaces in names; of a measurement, without its raw output."""
    text = path.read_text(encoding="utf-8")
    if "measurements" in path.parts:
        text = re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.S | re.M)
    return text.replace("_", " ")


def uses(text):
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: `{match[0]}`; write: {plain}"
        for pattern, plain in AVOIDED.items()
        for match in re.finditer(pattern, text, flags=re.I)
    ]


FILES = [
    *ROOT.glob("*.md"),
    *(p for f in FOLDERS for kind in ("py", "pyi", "md") for p in (ROOT / f).rglob(f"*.{kind}")),
]


@pytest.mark.prove
def test_no_file_uses_a_phrase_that_we_avoid():
    found = {str(path.relative_to(ROOT)): uses(prose(path)) for path in FILES if path not in EXCEPT}
    assert {path: lines for path, lines in found.items() if lines} == {}


BAD = ["the run goes on", "a user is told", "tokens a second", "two looks at held-out text"]
BAD += ["200 is no multiple of 16"]
PLAIN = ["it goes on the page", "tokens per second", "there is no number", 'record["told"]']


def test_a_phrase_is_found_and_plain_english_is_not():
    assert all(uses(text) for text in BAD)
    assert not any(uses(text) for text in PLAIN)
