"""A module, its data, and the loops that the tests of Lightning compare."""

import lightning
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep.integrations.lightning import Fabric, HalfstepPrecision
from halfstep.torch import prepare

FP32, BF16, FP16 = (pytest.param(name, marks=pytest.mark.prove) for name in ("fp32", "bf16-mixed", "fp16-mixed"))
POLICIES = [FP32, "bf16-mixed", "fp16-mixed"]
SPLIT = "bf16-mixed,param=fp32:split"
NARROW = pytest.param("bf16-mixed,moments=bf16", marks=pytest.mark.prove)
MICRO, CLIP = 2, 0.2


def network():
    torch.manual_seed(0)
    layers = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 11)
    return nn.Sequential(*layers)


class Module(lightning.LightningModule):
    def __init__(self, optimizer=torch.optim.AdamW):
        super().__init__()
        self.net, self.optimizer = network(), optimizer
        self.bad, self.seen = (), []

    def training_step(self, batch, index):
        logits = self.net(batch[0])
        self.seen.append(logits.dtype)
        loss = F.cross_entropy(logits, batch[1])
        return loss * float("inf") if index in self.bad else loss

    def validation_step(self, batch, index):
        self.log("validation_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch, index):
        return self.net(batch[0])

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(count=8):
    draw = torch.Generator().manual_seed(1)
    return [tuple(pair) for pair in torch.randint(0, 11, (count, 2, 32), generator=draw)]


def loader():
    return torch.utils.data.DataLoader(batches(), batch_size=None)


def trainer(folder, policy, epochs=1, **given):
    plugins = HalfstepPrecision(policy) if isinstance(policy, str) else policy
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options |= {"accelerator": "cpu", "num_sanity_val_steps": 0, "default_root_dir": folder, "max_epochs": epochs}
    return lightning.Trainer(plugins=plugins, **(options | {"enable_checkpointing": False} | given))


def fit(folder, policy, epochs=1, module=None, resume=None, **given):
    module = Module() if module is None else module
    torch.manual_seed(2)
    fitted = trainer(folder, policy, epochs, **given)
    fitted.fit(module, loader(), ckpt_path=resume, weights_only=True)
    return module, fitted


def by_hand(policy, updates, micro_batches=MICRO, dropout=0.1):
    """The same training without Lightning."""
    module = Module()
    module.net[3].p = dropout
    made = torch.optim.AdamW(module.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(made, 0.5, total_iters=20)
    run = prepare(module, made, policy, clip_norm=CLIP)
    torch.manual_seed(2)
    data = iter(loader())  # which draws a number
    for _ in range(updates):
        for _ in range(micro_batches):
            inputs, targets = next(data)
            loss = F.cross_entropy(module.net(inputs).float(), targets) / micro_batches
            run.backward(loss, normalized=True)
        run.update()
        schedule.step()
    return module


def assert_same(one, other):
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def dtype_of(policy):
    return {"fp32": torch.float32, "fp16": torch.float16}.get(policy[:4], torch.bfloat16)


def fabric_of(policy):
    return Fabric(policy=policy, accelerator="cpu")


def loop(fabric, model, optimizer, updates, first=0):
    data = batches()
    for update in range(first, updates):
        for place in range(MICRO):
            inputs, targets = data[(update * MICRO + place) % len(data)]
            fabric.backward(F.cross_entropy(model(inputs), targets) / MICRO)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        result = optimizer.step()
        optimizer.zero_grad()
    return result


def set_up(policy, optimizer=torch.optim.AdamW, *, apart=False):
    fabric, model = fabric_of(policy), network()
    if apart:
        model = fabric.setup_module(model)
        return fabric, model, fabric.setup_optimizers(optimizer(model.parameters(), lr=3e-3))
    return fabric, *fabric.setup(model, optimizer(model.parameters(), lr=3e-3))
