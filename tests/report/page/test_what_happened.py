"""What a page says of findings, of the cause of a NaN, and of layers, without its script."""

from halfstep.report.page import render
from tests.report.page.made_up_runs import finding, layer_names, run, watched_run
from tests.report.page.parsed_page import Page


def test_findings_are_listed_once_each_with_the_worst_first():
    page = Page(render([*watched_run(), finding("HS101", "error", "again", where=["blocks.1.attn.qkv"])], "x"))
    happened = page.text.split("What happened")[1].split(" Precision ")[0]
    error, note = happened.split("HS303")
    assert "HS101 error again blocks.1.attn.qkv" in error  # the same rule at the same place: the later one
    assert "To do: hold the weights in fp32: param=fp32" in error
    assert "train.py:41" in note
    assert "likely, not certain, at step 20" in note
    assert "Findings" not in Page(render(run(20), "x")).text


def test_many_names_are_cut_and_a_policy_rule_is_shown():
    names = [f"blocks.{i}.norm" for i in range(30)]
    rule = '"blocks.*.norm" = "norm=fp32"'
    text = Page(render([*run(20), finding("HS401", "odd", "m", where=names, policy_rule=rule)], "x")).text
    assert "blocks.7.norm and 22 others" in text
    assert "blocks.8.norm" not in text
    assert f"Rule of a policy: {rule}" in text


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
