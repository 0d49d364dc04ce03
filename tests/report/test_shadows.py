"""What a page says of steps beside the same steps in fp32."""

import math

from halfstep.report.page import render
from tests.report.page.made_up_runs import run, shadow, start, step
from tests.report.page.parsed_page import Page


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
