"""Accelerate, Trainer and Lightning as they are, at full precision, around a prepared model.

They step its optimizer themselves. The updates are the run's own, counted and skipped as in a plain loop; what
they would bypass is refused.
"""

import math

import pytest
import torch

from halfstep.core.errors import HalfstepError
from halfstep.torch import AdamW, prepare
from tests.accelerate_state import fresh_accelerate  # noqa: F401
from tests.refusals import refuses
from tests.torch.nets import seeded_net

KINDS = {
    "ours": lambda m: AdamW(m.parameters(), lr=1e-2),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "sync": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
}


def batch(seed, rows=4):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_accelerate_steps_a_prepared_model_as_the_run_does(kind):
    import accelerate

    model, twin = seeded_net(), seeded_net()
    run, alone = prepare(model, KINDS[kind](model), "bf16-mixed"), prepare(twin, KINDS[kind](twin), "bf16-mixed")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=2)
    wrapped, optimizer = accelerator.prepare(model, run.optimizers[0])
    for step in range(3):
        factor = math.nan if step == 1 else 1.0
        for m in range(2):
            with accelerator.accumulate(wrapped):
                accelerator.backward(factor * wrapped(batch(2 * step + m)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        alone.step(
            lambda x, factor=factor: factor * twin(x).square().mean(), [batch(2 * step), batch(2 * step + 1)]
        )
    assert int(run.num_applied) == int(alone.num_applied) == 2
    weights = alone.weights()
    assert all(torch.equal(w, weights[name]) for name, w in run.weights().items())


@pytest.mark.prove
def test_trainer_steps_a_prepared_model_and_what_it_would_bypass_is_refused(tmp_path):
    import transformers

    sizes = {"n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    drawn = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in drawn]
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 1}
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}

    def trained(**settings):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **sizes))
        run = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "bf16-mixed", **settings)
        given = transformers.TrainingArguments(str(tmp_path), **options, **quiet)
        pair = (run.optimizers[0], None)
        return run, transformers.Trainer(model, given, train_dataset=data, optimizers=pair).train()

    run, result = trained()
    assert int(run.num_applied) == 2
    assert math.isfinite(result.training_loss)
    with refuses(HalfstepError, "clip_norm=1 would be ignored", "run.step("):
        trained(clip_norm=1.0)


@pytest.mark.prove
def test_lightning_steps_a_prepared_model_as_the_run_does(tmp_path):
    """Its closure runs the last micro-batch inside optimizer.step()."""
    import lightning

    twin = seeded_net()
    alone = prepare(twin, KINDS["fused"](twin), "bf16-mixed")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = seeded_net()

        def training_step(self, x, index):
            return self.model(x).square().mean() * (math.nan if index == 2 else 1.0)

        def configure_optimizers(self):
            optimizer = KINDS["fused"](self.model)
            self.halfstep = prepare(self.model, optimizer, "bf16-mixed")
            return optimizer

    batches = [batch(seed) for seed in range(6)]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "accelerator": "cpu", "default_root_dir": tmp_path}
    lightning.Trainer(**options, **quiet).fit(module, loader)
    for step in range(3):
        factor = math.nan if step == 1 else 1.0
        alone.step(lambda x, f=factor: f * twin(x).square().mean(), batches[2 * step : 2 * step + 2])
    assert int(module.halfstep.num_applied) == 2
    weights = alone.weights()
    assert all(torch.equal(w, weights[name]) for name, w in module.halfstep.weights().items())
