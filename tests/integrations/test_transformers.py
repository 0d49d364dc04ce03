"""transformers.Trainer under a policy: the updates of a run, its checkpoints, evaluation, skips and refusals."""

import copy
import math

import pytest
import torch
import transformers
from torch._dynamo.backends.registry import _COMPILER_FNS, lookup_backend
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from halfstep.core.errors import HalfstepError
from halfstep.integrations import state
from halfstep.integrations.transformers import PolicyMixin, Trainer
from tests.accelerate_state import fresh_accelerate, reset  # noqa: F401
from tests.refusals import refuses
from tests.torch.nets import same_by_name

pytestmark = pytest.mark.prove  # nearly every test trains by a Trainer of its own
SPLIT = "bf16-mixed,param=fp32:split"
ROWS = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(1))
DATA = [{"input_ids": row, "labels": torch.where(row < 4 + i % 3, -100, row)} for i, row in enumerate(ROWS)]


def net(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, max_position_embeddings=16, attention_dropout=0.1, **sizes, **changes)
    )


def arguments(folder, **changes):
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **settings | changes)


def make(folder, policy="bf16-mixed", kind=Trainer, ema=0.0, callbacks=None, **changes):
    options = {"policy": policy, "ema": ema} if issubclass(kind, PolicyMixin) else {}
    data = {"train_dataset": DATA, "eval_dataset": DATA[:4]}
    return kind(net(), arguments(folder, **changes), **data, callbacks=callbacks, **options)


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("policy", ["fp16-mixed", "fp32", "bf16-mixed"])
def test_losses_are_within_the_format_of_those_of_stock_trainer_in_fp32(policy, tmp_path):
    stock = make(tmp_path, kind=transformers.Trainer)
    stock.train()
    reset()
    ours = make(tmp_path, policy)
    ours.train()
    # Each of the few products rounds its operands to so many bits.
    bits = {"fp32": 20, "bf16-mixed": 8, "fp16-mixed": 11}[policy]
    assert losses(ours) == pytest.approx(losses(stock), rel=4 * 2.0**-bits)
    norms = [[row["grad_norm"] for row in t.state.log_history if "grad_norm" in row] for t in (ours, stock)]
    assert norms[0] == pytest.approx(norms[1], rel=16 * 2.0**-bits)
    assert int(ours.run.num_applied) == 4


def test_an_interrupted_run_resumes_bit_for_bit_from_trainers_own_checkpoint(tmp_path):
    """Split masters. Other policies are killed in tests/examples/test_integrations.py."""

    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 3:
                raise KeyboardInterrupt

    whole = make(tmp_path / "whole", SPLIT, ema=0.9)
    whole.train()
    reset()
    killed = make(tmp_path / "killed", SPLIT, ema=0.9, save_strategy="steps", save_steps=2, callbacks=[Kill()])
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    saved = tmp_path / "killed" / "checkpoint-2"
    names = {path.name for path in saved.iterdir()}
    assert names >= {state.NAME, "model.safetensors", "scheduler.pt", "rng_state.pth"}
    assert "optimizer.pt" not in names
    reset()
    torch.manual_seed(77)
    resumed = make(tmp_path / "killed", SPLIT, ema=0.9)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed)[-2:] == losses(whole)[-2:]
    assert same_by_name(resumed.run.weights(), whole.run.weights())
    assert same_by_name(resumed.run.ema, whole.run.ema)


def test_weights_are_saved_from_the_masters_and_load_anywhere(tmp_path):
    trainer = make(tmp_path, SPLIT)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert same_by_name(dict(loaded.named_parameters()), trainer.run.weights())
    assert next(loaded.parameters()).dtype == torch.float32


def test_evaluation_prediction_and_generation_work_before_during_and_after_training(tmp_path):
    written = []

    class Generate(TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            written.append(model.generate(ROWS[:1, :3], max_new_tokens=2, do_sample=False))

    trainer = make(tmp_path, "bf16-mixed,eval=fp32", callbacks=[Generate()], eval_strategy="steps", eval_steps=2)
    before = trainer.evaluate()["eval_loss"]
    seen = []
    trainer.model.lm_head.register_forward_hook(lambda m, *_: seen.append((m.training, m.precision.compute.name)))
    trainer.train()
    assert set(seen) >= {(True, "bf16"), (False, "fp32")}
    assert trainer.evaluate()["eval_loss"] < before
    assert len(written) == 4
    assert trainer.predict(DATA[:2]).predictions.shape == (2, 8, 32)
    assert sum("eval_loss" in row for row in trainer.state.log_history) == 3


def test_skips_are_seen_by_trainer_and_its_scheduler(tmp_path):
    trainer = make(
        tmp_path, f"fp16-mixed,scale=dynamic:init={2**60}:ceiling={2**60}:backoff={2.0**-55}", max_steps=3
    )
    trainer.train()
    assert int(trainer.run.num_applied) == 2
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert rates[0] == rates[1] > rates[2]


def test_a_second_training_continues_with_the_same_run(tmp_path):
    trainer = make(tmp_path, max_steps=2)
    trainer.train()
    run = trainer.run
    trainer.train()
    assert trainer.run is run
    assert int(run.num_applied) == 4


def test_best_weights_are_loaded_at_the_end(tmp_path):
    trainer = make(
        tmp_path,
        SPLIT,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer.train()
    best = LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert same_by_name(trainer.run.weights(), dict(best.named_parameters()))


def test_a_subclass_of_trainer_takes_the_mixin(tmp_path):
    class Mine(transformers.Trainer):
        def compute_loss(self, model, inputs, **options):
            return 2.0 * super().compute_loss(model, inputs, **options)

    class Ours(PolicyMixin, Mine):
        pass

    trainer, plain = make(tmp_path, kind=Ours, max_steps=1), None
    trainer.train()
    reset()
    plain = make(tmp_path, max_steps=1)
    plain.train()
    assert losses(trainer) == pytest.approx([2 * loss for loss in losses(plain)], rel=2**-6)


@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        ({"bf16": True}, "bf16=True.* beside policy=", "bf16=False"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True", "eval=bf16"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "FSDP1", "fsdp_version=2"),
    ],
)
def test_settings_beside_the_policy_are_refused(changes, said, hint, tmp_path):
    with refuses(HalfstepError, said, hint):
        make(tmp_path, **changes)


def test_deepspeed_and_a_launched_precision_are_refused(tmp_path, monkeypatch):
    given = arguments(tmp_path)
    given.deepspeed = {"zero_optimization": {"stage": 2}}
    with refuses(HalfstepError, "DeepSpeed", "drop deepspeed"):
        Trainer(net(), given, train_dataset=DATA, policy="bf16-mixed")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with refuses(HalfstepError, "launched with mixed_precision bf16"):
        make(tmp_path)


def test_a_checkpoint_without_our_state_or_of_another_policy_is_refused(tmp_path):
    trainer = make(tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    reset()
    with refuses(HalfstepError, "the policy"):
        make(tmp_path, "fp16-mixed", max_steps=6).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-4" / state.NAME).unlink()
    reset()
    with refuses(HalfstepError, "there is no", "without a policy"):
        make(tmp_path, max_steps=6).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed", "fp16-mixed", SPLIT])
def test_a_job_of_stock_trainer_continues_under_a_policy(policy, tmp_path, log):
    stock = make(tmp_path, kind=transformers.Trainer, save_strategy="steps", save_steps=2)
    stock.train()
    if policy == "fp16-mixed":  # as a job with fp16=True saves it
        scaler = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "_growth_tracker": 7}
        torch.save(scaler, tmp_path / "checkpoint-2" / "scaler.pt")
    began = []

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            began.append({k: v.clone() for k, v in ours.run.state_dict()["tensors"].items()})

    reset()
    ours = make(tmp_path, policy, ema=0.9, callbacks=[Look()])
    ours.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "was saved without a policy" in log.getvalue()
    bits = {"fp32": 20, "fp16-mixed": 11}.get(policy, 8)
    assert losses(ours) == pytest.approx(losses(stock), rel=4 * 2.0**-bits)
    saved = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt")
    moments = [entry["exp_avg"] for entry in saved["state"].values()]
    held = [value for name, value in began[0].items() if name.endswith(".exp_avg")]
    assert len(held) == len(moments)
    assert {m.numpy().tobytes() for m in held} == {m.numpy().tobytes() for m in moments}
    assert int(began[0]["applied"]) == 2
    if policy == "fp16-mixed":
        assert float(began[0]["scale.scale"]) == 1024.0
        assert int(began[0]["scale.good_steps"]) == 7
    masters = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2").named_parameters()
    assert all(torch.equal(began[0][f"average.{name}"], value) for name, value in masters)


def test_the_summary_names_what_waits(tmp_path):
    trainer = make(tmp_path, max_steps=1)
    trainer.train()
    assert "logging_nan_inf_filter" in trainer.summary()
    assert "skipped updates: known exactly\n" in trainer.summary()  # on a CPU nothing waits
    assert "clipped where clip_grad_norm_ says; loss scale" in trainer.summary()
    assert math.isfinite(float(trainer.accelerator.result.loss))
    assert copy.deepcopy(trainer.model) is not None


def test_a_compiled_model_is_evaluated_trained_and_trained_again_under_the_policy(tmp_path):
    trainer = make(tmp_path, "bf16-mixed", max_steps=2, torch_compile=True, torch_compile_backend="eager")
    trainer.evaluate()
    run = trainer.run
    assert not run.optimizers
    trainer.train()
    assert trainer.run is run
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    assert int(run.num_applied) == 2
    trainer.train()
    assert trainer.run is run
    assert int(run.num_applied) == 4
    trainer.save_model(str(tmp_path / "out"))
    assert same_by_name(dict(LlamaForCausalLM.from_pretrained(tmp_path / "out").named_parameters()), run.weights())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_compiled_model_returns_its_loss_alone_where_nobody_sees_the_rest(smoothing, tmp_path, monkeypatch):
    returned = []

    def spy(graph, inputs):
        [outputs] = graph.graph.output_node().args
        returned.append([tuple(each.meta["example_value"].shape) for each in outputs])
        return graph

    def train(**settings):
        torch._dynamo.reset()
        reset()
        trainer = make(tmp_path, label_smoothing_factor=smoothing, **settings)
        trainer.train()
        return trainer, losses(trainer)

    lookup_backend("eager")
    monkeypatch.setitem(_COMPILER_FNS, "eager", spy)
    trainer, compiled = train(torch_compile=True, torch_compile_backend="eager")
    of_training = [shapes for shapes in returned if shapes]
    assert of_training == [[(2, 8, 32)] if smoothing else [()]]  # labels are smoothed outside of the model
    batch = {name: each[None].repeat(2, 1) for name, each in DATA[0].items()}
    _, outputs = trainer.compute_loss(trainer.model_wrapped, batch, return_outputs=True)
    assert outputs.logits.shape == (2, 8, 32)
    assert "forward" not in vars(trainer.model)
    if not smoothing:  # Trainer smooths unshifted labels of compiled models, by their class's name
        assert train()[1] == compiled


def test_averages_are_evaluated_inside_of_averaged(tmp_path):
    trainer = make(tmp_path, ema=0.9)
    trainer.train()
    own = trainer.evaluate()["eval_loss"]
    with trainer.run.averaged():
        assert trainer.evaluate()["eval_loss"] > own  # they lag behind
    assert trainer.evaluate()["eval_loss"] == own


def masked(rows, *last):
    """Data as collators make them, with masks of ones; those of each fourth row end in two of `last`, in turn."""
    masks = [torch.ones_like(row) for row in rows]
    for number, mask in enumerate(masks[3::4] if last else ()):
        mask[-2:] = last[number % len(last)]
    return [{"input_ids": row, "labels": row, "attention_mask": m} for row, m in zip(rows, masks, strict=True)]


def train_compiled(folder, data, compute_loss=None):
    """Returns the losses, and for each trace of the model whether it got a mask."""
    torch._dynamo.reset()
    reset()
    torch.manual_seed(0)

    class Mine(Trainer):
        def compute_loss(self, model, inputs, **options):
            if compute_loss is not None:
                compute_loss(inputs)
            return super().compute_loss(model, inputs, **options)

    settings = {"torch_compile": True, "torch_compile_backend": "eager", "gradient_accumulation_steps": 1}
    seen = []
    model = net()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs.get("attention_mask") is not None), with_kwargs=True
    )
    trainer = Mine(model, arguments(folder, **settings), train_dataset=data, policy="bf16-mixed")
    trainer.train()
    return losses(trainer), seen


def test_a_mask_of_ones_does_not_reach_a_compiled_model_and_any_other_does(tmp_path):
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    plain, masks = train_compiled(tmp_path, data)
    assert masks == [False] * 4
    assert train_compiled(tmp_path, masked(ROWS)) == (plain, masks)
    given = []
    # Zeros are padding; some say by numbers which sequence a token is of.
    other, masks = train_compiled(
        tmp_path, masked(ROWS, 0, 2), lambda inputs: given.append(set(inputs["attention_mask"].unique().tolist()))
    )
    assert masks == [each != {1} for each in given]
    assert set().union(*given) == {0, 1, 2}
    assert {1} in given
    assert other != plain


def test_a_trainer_finds_the_mask_among_its_inputs_and_may_write_to_it(tmp_path):
    summed = []

    def hide_the_first_token(inputs):
        summed.append(int(inputs["attention_mask"].sum()))
        inputs["attention_mask"][:, 0] = 0

    _, masks = train_compiled(tmp_path, masked(ROWS), hide_the_first_token)
    assert summed == [16] * 4
    assert masks == [True] * 4
