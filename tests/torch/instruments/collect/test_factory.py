"""Models that break the rules on updates as they train, and twins that do not."""

import pytest
import torch
from torch import nn

from halfstep.core.audit.engine import check
from halfstep.torch.instruments.collect.watch import record_of


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, as PEFT names it."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.lora_A = nn.Linear(8, 2, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(2, 8, bias=False, dtype=dtype)
        nn.init.ones_(self.lora_A.weight)  # 1 + 1e-5 is 1 in bf16
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))).float()


def rules(model, lr=1e-5, **options):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, **options)
    record = record_of(model, optimizer, lambda x: model(x).float().square().mean(), torch.ones(2, 8), steps=4)
    return {(finding.rule, finding.where[0]) for finding in check(record, select=["HS1"])}


def test_an_adapter_in_bf16_never_leaves_its_first_values():
    found = rules(Adapted(torch.bfloat16))
    assert ("HS103", "lora_A.weight") in found
    assert ("HS103", "lora_B.weight") not in found  # it starts at zero, where every update arrives
    assert rules(Adapted(torch.float32)) == set()


class Narrow(nn.Module):
    """Computes in fp32 with a weight that is stored in some format."""

    def __init__(self, dtype, value=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 8), value, dtype=dtype))

    def forward(self, x):
        return x @ self.weight.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_and_decay_in_a_narrow_format_are_named(dtype):
    found = rules(Narrow(dtype), weight_decay=0.1)
    assert {("HS101", "weight"), ("HS102", "weight"), ("HS104", "weight")} <= found
    assert (("HS105", "weight") in found) == (dtype == torch.float16)
    assert rules(Narrow(torch.float32), weight_decay=0.1) == set()
