"""FSDP2 in transformers.Trainer, on two ranks: shards, resumes, the best model, evaluation, and saved models."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, TrainerCallback

from halfstep.integrations.transformers import _is_whole
from tests.accelerate_state import fresh_accelerate  # noqa: F401
from tests.integrations import sharded, test_transformers
from tests.integrations.test_processes import BOUNDS
from tests.processes import preload_integrations
from tests.torch.nets import same_by_name
from tests.torch.parallel import jobs


@pytest.fixture(autouse=True, scope="module")
def preloaded():
    preload_integrations()


SHARDED = {"fsdp": True, "ddp_backend": "gloo"}
SAVES = {"save_strategy": "steps", "save_steps": 2}


def make(folder, policy="bf16-mixed", **changes):
    sharded.forget()
    return test_transformers.make(folder, policy, per_device_train_batch_size=1, **changes)


def ended(trainer):
    """Losses, whole masters and whether they are shards, when training is over."""
    names = trainer.run.masters.names.items()
    weights = {name: jobs.whole_tensor(p) for p, name in names}
    return test_transformers.losses(trainer), weights, all(isinstance(p, DTensor) for p, _ in names)


def trained(folder, policy="bf16-mixed", resume=None, dropout=0.0, **changes):
    trainer = make(folder, policy, **changes)
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = dropout
    trainer.train(resume_from_checkpoint=resume)
    return ended(trainer)


def evaluated_first(folder):
    """Evaluates a model that is not sharded yet, trains it under a spy, and evaluates it again, sharded."""
    trainer = make(folder, **SHARDED)
    before = trainer.evaluate()["eval_loss"]
    sent = sharded.sent(trainer.train)
    after = trainer.evaluate()["eval_loss"]
    kind = trainer.accelerator.distributed_type.value, trainer.accelerator.is_fsdp2, type(trainer.model).__name__
    return before, after, sent, kind, ended(trainer)


def test_trainer_shards_reduces_in_fp32_and_evaluates(ranks, tmp_path):
    torch.manual_seed(0)
    for before, after, sent, kind, (losses, _, are_shards) in ranks(evaluated_first, 2, str(tmp_path)):
        assert kind == ("FSDP", True, "FSDPLlamaForCausalLM")
        assert are_shards
        assert after < before
        assert len(losses) == 4
        assert {dtype for name, dtype in sent if name == "reduce_scatter_base"} == {torch.float32}
        # Beside it DDP's one reduction of all gradients is not there: what is reduced are the run's few numbers.
        assert sent["reduce_scatter_base", torch.float32][1] > 10 * sent["allreduce", torch.float32][1]


@pytest.mark.prove
@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_shards_learn_as_replicas(ranks, policy, tmp_path):
    shards = ranks(partial(trained, str(tmp_path), policy, **SHARDED), 2)
    replicas = ranks(partial(trained, str(tmp_path), policy, ddp_backend="gloo"), 2)
    assert [result[2] for result in (*shards, *replicas)] == [True, True, False, False]
    for (losses, *_), (expected, *_) in zip(shards, replicas, strict=True):
        assert losses == pytest.approx(expected, rel=BOUNDS[policy])


def whole_then_resumed(folder):
    """Trains and is resumed from the newest whole checkpoint; returns both ends, and what is in the folder."""
    given = {**SHARDED, **SAVES, "dropout": 0.1, "max_steps": 4, "policy": "bf16-mixed,export=bf16"}
    first = trained(folder, **given)
    left = Path(folder) / "checkpoint-4"
    if jobs.rank_and_ranks()[0] == 0:
        (left / "trainer_state.json").unlink()  # as by a kill
    torch.distributed.barrier()
    torch.manual_seed(5)
    return first, trained(folder, resume=True, **given)


def test_trainer_resumes_bit_for_bit_from_the_newest_whole_checkpoint(ranks, tmp_path):
    """Though the weights beside a run's state are rounded, for others to load."""
    for (losses, weights, _), (same_losses, same_weights, are_shards) in ranks(
        whole_then_resumed, 2, str(tmp_path)
    ):
        assert are_shards
        assert same_losses == losses
        assert same_by_name(weights, same_weights)
    files = sorted(str(file.relative_to(tmp_path)) for file in (tmp_path / "checkpoint-2").rglob("*-of-*"))
    parts = [f"checkpoint-2/step-000002/state-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    assert files == parts
    test_transformers.assert_in_format(weights, torch.bfloat16, tmp_path / "checkpoint-4")


@pytest.mark.prove
@pytest.mark.parametrize("config", [{"activation_checkpointing": True}, {"cpu_ram_efficient_loading": True}])
def test_what_the_configuration_says_changes_no_number(ranks, config, tmp_path):
    plain = ranks(partial(trained, str(tmp_path), **SHARDED), 2)
    other = ranks(partial(trained, str(tmp_path), **SHARDED, fsdp_config=config), 2)
    for (losses, weights, _), (same_losses, same_weights, _) in zip(plain, other, strict=True):
        assert losses == same_losses
        assert same_by_name(weights, same_weights)


@pytest.mark.prove
def test_one_process_continues_what_two_saved(ranks, tmp_path, monkeypatch):
    ranks(partial(trained, str(tmp_path), **SHARDED, **SAVES, max_steps=2), 2)
    monkeypatch.delenv("RANK", raising=False)
    losses, _, are_shards = trained(str(tmp_path), resume=True, max_steps=4)
    assert not are_shards
    assert len(losses) == 4


def with_the_best(folder, kind):
    """Takes the checkpoint with the highest loss, which is not the last, for the best; saves the model."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    evaluates = {"eval_strategy": "steps", "eval_steps": 2, "fsdp_config": {"state_dict_type": kind}}
    trainer = make(folder, **SHARDED, **SAVES, **best, **evaluates)
    trainer.train()
    trainer.save_model(f"{folder}/out")
    return trainer.state.best_model_checkpoint, ended(trainer)[1]


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_the_best_model_is_loaded_and_saved_whole(ranks, tmp_path, kind):
    for best, weights in ranks(with_the_best, 2, str(tmp_path), kind):
        assert best.endswith("checkpoint-2")
        saved = LlamaForCausalLM.from_pretrained(tmp_path / "out")
        assert same_by_name({name: p.detach() for name, p in saved.named_parameters()}, weights)
        assert saved.config.architectures == ["LlamaForCausalLM"]
    if kind == "FULL_STATE_DICT":  # the same weights are in the checkpoint, for from_pretrained
        at_best = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
        assert same_by_name({name: p.detach() for name, p in at_best.named_parameters()}, weights)
    assert (tmp_path / "checkpoint-2/model.safetensors").exists() == (kind == "FULL_STATE_DICT")


class States(TrainerCallback):
    """Keeps the state of the run when training begins, and after each update until the last that is asked for."""

    def __init__(self, last):
        self.last, self.found = last, {}

    def on_step_end(self, args, state, control, **_):
        self.found[state.global_step] = sharded.whole_state(self.trainer.run)
        control.should_training_stop = state.global_step >= self.last

    def on_train_begin(self, args, state, control, **_):
        if state.global_step:
            self.found[state.global_step] = sharded.whole_state(self.trainer.run)
            raise KeyboardInterrupt  # it was loaded, which is all that is asked


SAVING = {**SHARDED, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 400}


def states(folder, last, resume=None):
    callback = States(last)
    trainer = callback.trainer = make(folder, callbacks=[callback], **SAVING)
    with suppress(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=resume)
    return callback.found


def saving(folder):
    make(folder, **SAVING).train()


def newest(folder):
    return max((_number(path) for path in folder.glob("checkpoint-*") if _is_whole(path)), default=0)


def is_saving(folder):
    return not all(map(_is_whole, folder.glob("checkpoint-*")))


def _number(path):
    return int(path.name.removeprefix("checkpoint-"))


@pytest.mark.prove
def test_a_killed_trainer_loses_no_whole_checkpoint(ranks, tmp_path):
    """30 times, amid saves after each update, of which two are kept: it resumes from the newest that is whole."""
    expected = ranks(states, 2, str(tmp_path / "whole"), 40)[0]
    partial_folders = 0
    for folder, last in sharded.killed_saves(tmp_path, saving, newest, 0.3, is_saving):
        partial_folders += is_saving(folder)
        first, second = ranks(states, 2, str(folder), 0, True)
        ((step, state),) = first.items()
        assert step == newest(folder) >= last
        assert same_by_name(state, expected[step])
        assert same_by_name(state, second[step])
    assert partial_folders  # some kills came within a save
