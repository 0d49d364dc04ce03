"""Our own recipes, trained for some updates under the hooks that watch scripts: no rule is broken."""

import pytest

from halfstep.config.load import load, recipe_names
from halfstep.core.audit.engine import check
from halfstep.core.policy import Policy
from halfstep.tools.audit.targets import collect
from halfstep.torch.instruments.collect.watch import Watch
from halfstep.training.loop import Loop

SMALL = ["model.vocabulary=256", "model.context=16", "model.layers=2", "model.width=32", "model.heads=2",
         "model.kv_heads=0", "model.head_width=0", "training.steps=4", "training.batch=2",
         "training.micro_batches=2", "training.validation_tokens=64", "training.measure_ceiling=false",
         "training.compile=false"]  # fmt: skip
POLICIES = ["bf16-mixed,emulate=true", "bf16-mixed,param=fp32:split,emulate=true", "fp16-mixed,emulate=true"]
CASES = [(recipe, "fp32") for recipe in recipe_names()] + [("tiny", policy) for policy in POLICIES]


@pytest.mark.prove
@pytest.mark.parametrize(("recipe", "policy"), CASES)
def test_a_run_of_ours_breaks_no_rule(recipe, policy, text, tmp_path):
    config = load(recipe, [f"data.source={text}", "training.loggers=[]", *SMALL])
    with Watch() as watch:
        Loop(config, Policy.parse(policy), tmp_path / "run", device="cpu").run()
    record = watch.record()
    assert record.updates >= 4
    assert check(record) == []
    assert check(collect(str(tmp_path / "run")).records) == []
