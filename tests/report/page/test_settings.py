"""What a page says of settings, first weights and checkpoints, and the command that repeats the run."""

import dataclasses
import shlex

import pytest

from halfstep.config.load import load
from halfstep.report.page import render
from tests.report.page.made_up_runs import BEGAN, run
from tests.report.page.parsed_page import Page


def test_settings_the_title_and_the_last_checkpoints_are_listed():
    page = Page(render(run(600), "x"))
    assert "Checkpoints written: the last 20 of 30" in page.text
    assert "step-000200" not in page.text
    assert "step-000220" in page.text
    text = Page(render(run(5, overrides=["training.batch=8"]), "x")).text
    differing, others = text.split("Settings with their defaults")
    assert "training.batch 8 default 16 Sequences in a micro-batch." in differing
    assert "optimizer.betas [0.9, 0.95] Decay of AdamW's two moments." in others
    title = load("gpt2").title
    begun = run(20)
    begun[0]["config"]["title"] = title
    assert f"<p>Recipe: {title}</p>" in render(begun, "x")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("training.steps=50", "training.compile=true", "data.source=my texts/all of them"),
        ("backend=jax", "optimizer.betas=[0.8, 0.99]", "model.mlp=gelu", "optimizer.epsilon=1e-12"),
    ],
)
def test_the_command_repeats_the_run(overrides):
    page = Page(render(run(5, "fp16-mixed; lm_head: compute=fp32", overrides=overrides), "x"))
    program, verb, recipe, *words = shlex.split("".join(page.parts["pre"]))
    assert (program, verb) == ("halfstep", "train")
    given = list(zip(words[::2], words[1::2], strict=True))
    repeated = load(recipe, [text for flag, text in given if flag == "--set"])
    flags = {flag.removeprefix("--"): text for flag, text in given if flag != "--set"}
    wanted = load("tiny", [*overrides, 'policy="fp16-mixed; lm_head: compute=fp32"'])
    assert dataclasses.replace(repeated, **flags) == wanted
    assert len(given) == len(overrides) + 1


def test_first_weights_and_names_are_shown_as_text_and_code():
    first, *others = run(20)
    origin = {"path": "gpt2/<small>", "layout": "gpt2", "sha256": "ab12", "notes": ["12 tensors are held in bf16"]}
    said = "First weights: gpt2 from gpt2/<small>, SHA-256 ab12; 12 tensors are held in bf16"
    assert said in Page(render([first | {"init": origin}, *others], "x")).text
    assert "First weights" not in Page(render([first | {"init": None}, *others], "x")).text
    assert "First weights" not in Page(render([first, *others], "x")).text
    first, second = run(20, finished=False), run(20, first=21, resumed_from=20, finished=False)
    second[0]["data"]["description"] = "2 packed shards `d<m>g`: 100 tokens of `x`"
    second[0]["init"] = {"path": "a", "layout": "gpt2", "sha256": "0", "notes": ["`lm_head` is left out"]}
    stop = {"event": "stop", "time": BEGAN + 9, "step": 20, "reason": "`weights` are not finite"}
    html = render([*first, stop, *second, {**stop, "step": 40}], "x")
    assert " on 2 packed shards <code>d&lt;m&gt;g</code>. " in html
    assert "Data: 2 packed shards <code>d&lt;m&gt;g</code>: 100 tokens of <code>x</code></p>" in html
    assert "<code>lm_head</code> is left out</p>" in html
    assert "at step 40: <code>weights</code> are not finite</p>" in html
    assert html.count("<td><code>weights</code> are not finite</td>") >= 2
    assert "`" not in html[html.index("<body") : html.index("<script")]
