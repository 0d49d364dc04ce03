"""The callbacks that audit the first updates of a real run: findings, the same losses, and nothing left behind."""

import pytest

from tests.processes import preload_integrations, run_alone

pytestmark = pytest.mark.prove


def with_trainer(folder, dtype, audited, steps):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    from halfstep.integrations.transformers import AuditCallback

    set_seed(0)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).to(getattr(torch, dtype))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (64, 8))]
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        max_steps=steps,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-5,
    )
    callback = AuditCallback()
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback] if audited else [])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    updates = callback.audit.record.updates if audited else 0
    return losses, sorted({finding.rule for finding in callback.findings}), updates


def with_lightning(folder, dtype, audited, steps):
    import lightning
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from halfstep.integrations.lightning import AuditCallback

    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 4).to(getattr(torch, dtype))

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.net(batch[0].to(self.net.weight.dtype)).float(), batch[1])
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-5)

    lightning.seed_everything(0, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(256, 8), torch.randint(4, (256,))), batch_size=2)
    callback = AuditCallback()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if audited else [],
    )
    trainer.fit(Module(), data)
    updates = callback.audit.record.updates if audited else 0
    return losses, sorted({finding.rule for finding in callback.findings}), updates


@pytest.mark.parametrize("train", [with_trainer, with_lightning])
def test_first_updates_are_audited_and_losses_stay(train, tmp_path):
    preload_integrations()
    plain, _, _ = run_alone(train, str(tmp_path / "a"), "float32", False, 100)
    losses, found, updates = run_alone(train, str(tmp_path / "b"), "float32", True, 100)
    assert losses == plain
    assert set(found) <= {"HS502"}  # `.item()` on a CPU is a note
    assert updates == 4  # 4 % of 100
    _, found, updates = run_alone(train, str(tmp_path / "c"), "bfloat16", True, 10)
    assert {"HS101", "HS104"} <= set(found)
    assert updates == 3
