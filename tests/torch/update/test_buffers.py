"""Buffers that a skipped step wrote to are restored."""

import torch
from torch import nn

from halfstep.torch.update.buffers import Buffers, Contents
from tests.torch.nets import draw


def test_buffers_are_restored_to_what_they_were_or_the_user_wrote_before_the_step():
    model = nn.BatchNorm1d(4)
    buffers = Buffers(Contents(model))
    model(draw(8, 4))
    buffers.restore_unless(torch.tensor(True))
    kept = {name: b.clone() for name, b in model.named_buffers()}
    assert int(kept["num_batches_tracked"]) == 1
    model(draw(8, 4) * float("nan"))
    assert not model.running_mean.isfinite().any()
    buffers.restore_unless(torch.tensor(False))
    assert all(torch.equal(b, kept[name]) for name, b in model.named_buffers())
    model.running_mean.fill_(5.0)
    buffers.remember()
    model(draw(8, 4) * float("nan"))
    buffers.restore_unless(torch.tensor(False))
    assert torch.equal(model.running_mean, torch.full((4,), 5.0))
