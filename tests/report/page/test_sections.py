"""What each section of a page says."""

import dataclasses
import math
import shlex

import pytest

from halfstep.config.load import load
from halfstep.core.errors import RunFolderError
from halfstep.report.page import render
from tests.report.page.made_up_runs import (
    BEGAN,
    FP16,
    REASON,
    RUNS,
    finding,
    layer_names,
    run,
    shadow,
    start,
    step,
    watched_run,
)
from tests.report.page.parsed_page import Page

# Precision: which, why, its rules and its loss scale


def test_an_fp16_run_shows_its_rules_its_scale_and_marks_skipped_steps():
    page = Page(render(FP16, "x"))
    assert "trained in fp16-mixed with 1 rule for" in page.headline
    assert "The run used fp16-mixed; lm_head: compute=fp32, as requested." in page.text
    assert "Rules: other formats for some modules" in page.text
    assert "lm_head" in page.text
    assert "No rules: the table holds for every module." in Page(render(RUNS["fp32"], "x")).text
    scale = page.line("scale", "scale")
    assert [scale[s] for s in (1, 3, 4, 5, 6, 180, 181)] == [65536, 65536, 32768, 16384, 8192, 8192, 4096]
    assert page.line("scale", "skipped steps") == {3: 65536, 4: 32768, 5: 16384, 180: 8192}
    caption = next(c for c in page.parts["figcaption"] if "loss scale" in c)
    assert "from 65,536 (2^16) at step 1 to 4,096 (2^12) at step 200" in caption
    assert "4 steps were skipped" in caption
    assert "the first by step 3 and the last by step 180" in caption


def test_a_resumed_run_keeps_the_reason_it_was_started_with():
    chosen = run(20, choice={"preset": "fp32", "reason": REASON}, finished=False)
    again = [dict(event) for event in run(20, first=21, resumed_from=20)]
    assert Page(render([*chosen, *again], "x")).parts["blockquote"] == [REASON]
    again[0]["config"] = again[0]["config"] | {"policy": "fp32"}  # as a resumed run has it
    assert "The run used fp32. A measurement chose fp32:" in Page(render([*chosen, *again], "x")).text
    # A reason for another precision is no reason for this one.
    assert "blockquote" not in Page(render([*chosen, *run(20, "bf16-mixed", resumed_from=20)], "x")).parts


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("fp32", "No loss scale: everything is computed in fp32, where no gradient is lost to range."),
        ("bf16-mixed", "No loss scale: bf16 has fp32's range."),
        ("fp8-mixed", "No loss scale: bf16 has fp32's range and e4m3 and e5m2 operands have their own scales."),
        ("fp16-mixed", None),
    ],
)
def test_a_run_without_a_loss_scale_says_why(policy, reason):
    page = Page(render(run(20, policy), "x"))
    assert ("scale" in page.data) == (reason is None)
    assert ("No loss scale" in page.text) == (reason is not None)
    if reason:
        assert reason in page.text


def test_a_policy_of_another_version_is_not_guessed_and_events_without_a_start_are_no_run():
    events = [event | ({"policy": "int4-mixed"} if event["event"] == "start" else {}) for event in run(20)]
    text = Page(render(events, "x")).text
    assert "The run used int4-mixed" in text
    assert "this version of halfstep cannot read the policy: in policy `int4-mixed`: unknown preset" in text
    with pytest.raises(RunFolderError):
        render([step(1, BEGAN)], "x")


# Settings, first weights and checkpoints, and the command that repeats the run


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


# Findings of the audit, the cause of a NaN, and layers


def test_findings_are_listed_once_each_with_the_worst_first():
    page = Page(render([*watched_run(), finding("HS101", "error", "again", where=["blocks.1.attn.qkv"])], "x"))
    happened = page.text.split("What happened")[1].split(" Precision ")[0]
    error, note = happened.split("HS303")
    assert "HS101 error again blocks.1.attn.qkv" in error  # the same rule at the same place: the later one
    assert "To do: hold the weights in fp32: param=fp32" in error
    assert "train.py:41" in note
    assert "likely, not certain, at step 20" in note
    assert "Findings" not in Page(render(run(20), "x")).text


def test_of_many_names_the_others_unfold_and_a_policy_rule_is_shown():
    names = [f"blocks.{i}.norm" for i in range(30)]
    rules = [f'"{name}" = "norm=fp32"' for name in names]
    html = render([*run(20), finding("HS401", "odd", "m", where=names, policy_rule="\n".join(rules))], "x")
    assert "blocks.7.norm and 22 others" in Page(html).text
    folded = html.split("<summary>the 22 others</summary>")[1].split("</details>")[0]
    assert [name for name in names if f"<code>{name}</code>" in folded] == names[8:]
    assert f"Rule of a policy: {rules[0]}, and 29 more like it" in Page(html).text


def test_the_cause_of_a_nan_is_a_row_with_its_data_and_a_mark_on_the_loss():
    page = Page(render(watched_run(), "x"))
    assert "180 cause of a NaN or infinity the matmul of blocks.2.attn.out is the first" in page.text
    assert "data: shards/b.bin at token 512" in page.text
    (marks,) = [line for line in page.data["loss"]["lines"] if line["look"] == "event"]
    assert dict(zip(marks["x"], marks["names"], strict=True)) == {
        150: "loss spike",
        180: "cause of a NaN or infinity",
    }


def test_what_each_layer_could_run_in_is_a_table():
    page = Page(render(watched_run(), "x"))
    hot = layer_names(26)[13]
    assert f"{hot} norm fp16 → e4m3:row 32 dB, 0.02 % to zero fp16 → bf16 55.7 dB" in page.text
    assert "by the sample of step 200" in page.text
    assert "could run in" not in Page(render(run(20), "x")).text


# Steps beside the same steps in fp32


def page(*events):
    return Page(render([start("bf16-mixed"), *events], "x"))


def test_a_page_shows_the_loss_beside_fp32_and_the_layers_outside():
    norm = ("blocks.0.mlp_norm",)
    steps = [step(n, 0.0) for n in range(1, 5)]
    shown = page(shadow(1), steps[0], steps[1], shadow(3, outside=norm), steps[2], steps[3])
    assert shown.line("shadow", "loss above that in fp32") == {1: 2e-4, 3: 2e-4}
    assert shown.line("shadow", "highest of noise") == {1: 1e-3, 3: 1e-3}
    assert "2 steps compared, the last at step 3" in shown.text
    assert "None of them were outside" in shown.text
    assert (
        "1 layer left the band. Alone, with the rest in fp32, these lead outside: blocks.0.mlp_norm." in shown.text
    )
    assert "0.900000 (lowest 0.999900)" in shown.text
    assert "7.0 dB (lowest 40.0)" in shown.text
    inside = page(shadow(1), steps[0])
    assert "The gradients of all layers stayed inside." in inside.text
    assert "Beside fp32" not in Page(render(run(20), "x")).text


def test_a_step_that_was_not_finite_leaves_a_gap():
    words = {"layers": {}, "loss": "nan", "difference": "nan", "band": ["-inf", "inf"]}
    shown = page(shadow(1), step(1, 0.0), shadow(2, **words), step(2, 0.0))
    drawn = shown.line("shadow", "loss above that in fp32")
    assert drawn[1] == 2e-4
    assert drawn[2] is None or math.isnan(drawn[2])


def test_of_a_step_that_is_made_again_the_later_shadow_counts():
    events = [step(1, 0.0), shadow(2, outside=("blocks.0.mlp.up",)), step(2, 0.0)]
    again = [start("bf16-mixed", resumed_from=1), shadow(2), step(2, 0.0)]
    assert "1 layer left the band" in page(*events).text
    assert "stayed inside" in page(*events, *again).text
    assert "Beside fp32" not in page(*events, start("bf16-mixed", resumed_from=1), step(2, 0.0)).text


# Words that are not plain English are explained where they stand


def test_a_page_says_how_often_layers_are_sampled_and_what_that_took():
    events = [dict(event) for event in watched_run(400, 4, sample_every=200)]
    events[0]["config"] = events[0]["config"] | {"monitor": {"sample_every": 200}}
    assert "every 200 steps and at the end (monitor.sample_every)." in Page(render(events, "x")).text
    spent = {"wall": 100.0, "training": 90.0, "first_step": 1.0, "monitor": 5.0, "other": 5.0}
    events[-1] = events[-1] | {"spent": spent}
    assert "part of a batch runs again, which took 5 % of the time" in Page(render(events, "x")).text
    events[0]["config"] = events[0]["config"] | {"monitor": {"sample_every": 0}}
    assert "after alarms and at the end (monitor.sample_every)" in Page(render(events, "x")).text


def test_decibels_and_scales_of_blocks_are_explained_beside_them():
    page = Page(render(list(watched_run(100, 4)), "x"))
    assert "dB: how far that noise is below the numbers; 6 dB more halve it." in page.text
    assert (
        ":row and :block: one scale for each row, or each 32 numbers of it; else one for the tensor." in page.text
    )
    assert "SQNR: how far, in dB, the difference is below the gradient; 6 dB less double it" in page.text
