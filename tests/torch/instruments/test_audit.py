"""`run.audit()`: a run under a sound policy breaks no rule, and one that is not is named by tensor."""

import pytest
import torch
from torch import nn

from halfstep.core.errors import ConfigError
from halfstep.torch import AdamW, prepare


def prepared(policy):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    run = prepare(model, AdamW(model.parameters()), f"{policy},emulate=true" if "mixed" in policy else policy)
    run.step(lambda x: model(x).square().mean(), [torch.ones(2, 16)])
    return run


SOUND = ["fp32", "bf16-mixed", "bf16-mixed,param=fp32:split", "fp16-mixed", "fp8-mixed"]


@pytest.mark.parametrize(
    ("policy", "select"), [*((policy, []) for policy in SOUND), ("bf16-true,param=bf16:stochastic", ["HS101"])]
)
def test_our_policies_break_no_rule(policy, select):
    assert prepared(policy).audit(select=select) == []


def test_a_policy_in_pure_bf16_is_named_by_tensor():
    run = prepared("bf16-true,moments=bf16,norm=bf16")
    found = {(finding.rule, finding.where[0]) for finding in run.audit()}
    assert {("HS101", "0.weight"), ("HS104", "0.weight"), ("HS401", "1")} <= found
    assert {finding.rule for finding in run.audit(select=["HS1"], ignore=["HS101"])} == {"HS104"}
    with pytest.raises(ConfigError, match="there is no rule `HS9`"):
        run.audit(select=["HS9"])
