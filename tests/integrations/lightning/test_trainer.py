"""Lightning's Trainer under a policy: the bits of a loop by hand, resumed exactly, nothing bypassed."""

import copy
import gc
import warnings
import weakref

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from halfstep.core.errors import HalfstepError, ScalingError
from halfstep.integrations.lightning import Fabric, HalfstepPrecision
from halfstep.torch import AdamW
from tests.integrations.lightning.modules import (
    BF16,
    CLIP,
    FP16,
    FP32,
    MICRO,
    NARROW,
    POLICIES,
    SPLIT,
    Module,
    assert_same,
    by_hand,
    dtype_of,
    fit,
    loader,
    network,
    trainer,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


@pytest.mark.parametrize("policy", [*POLICIES, SPLIT])
def test_the_trainer_takes_the_steps_of_a_loop_by_hand(policy, tmp_path):
    module, fitted = fit(tmp_path, policy, accumulate_grad_batches=MICRO, gradient_clip_val=CLIP)
    assert set(module.seen) == {dtype_of(policy)}
    assert fitted.global_step == 4
    plugin = fitted.precision_plugin
    assert int(plugin.run.num_applied) == 4
    assert float(plugin.result.grad_norm) > CLIP  # it was clipped
    assert_same(module, by_hand(policy, 4))


@pytest.mark.parametrize("policy", [FP32, BF16, FP16, SPLIT, NARROW])
def test_a_checkpoint_of_lightning_resumes_to_the_same_bits(policy, tmp_path):
    given = {"gradient_clip_val": CLIP, "enable_checkpointing": True}
    whole, _ = fit(tmp_path / "whole", policy, 2, **given)
    _, first = fit(tmp_path, policy, 1, **given)
    saved = first.checkpoint_callback.best_model_path
    resumed, second = fit(tmp_path, policy, 2, resume=saved, **given)
    assert second.global_step == 16
    assert_same(whole, resumed)
    assert [config.scheduler.last_epoch for config in second.lr_scheduler_configs] == [16]


def test_what_a_plain_job_needs_stays_in_the_checkpoint_and_costs_no_second_copy(tmp_path):
    _, ours = fit(tmp_path / "ours", "bf16-mixed", enable_checkpointing=True)
    _, plain = fit(tmp_path / "plain", None, precision="bf16-mixed", enable_checkpointing=True)
    saved = [each.checkpoint_callback.best_model_path for each in (ours, plain)]
    mine, theirs = (torch.load(path, weights_only=True) for path in saved)
    assert {type(mine["optimizer_states"][0]["state"][0][key]) for key in ("exp_avg", "step")} == {torch.Tensor}
    assert all(value.dtype == torch.float32 for value in mine["state_dict"].values())
    assert mine.keys() - theirs.keys() == {"HalfstepPrecision"}
    shared = mine["HalfstepPrecision"]["tensors"]["model.net.2.weight"]
    assert shared.data_ptr() == mine["state_dict"]["net.2.weight"].data_ptr()
    _, continued = fit(tmp_path, None, 2, precision="bf16-mixed", resume=saved[0])
    assert continued.global_step == 16


@pytest.mark.parametrize(("before", "after"), [("bf16-mixed", "bf16-mixed"), ("32-true", "fp16-mixed")])
def test_a_plain_job_is_taken_over(before, after, tmp_path):
    _, plain = fit(tmp_path, None, precision=before, enable_checkpointing=True)
    saved = plain.checkpoint_callback.best_model_path
    _, resumed = fit(tmp_path, after, 1, resume=saved)  # it is at its end already
    run, state = resumed.precision_plugin.run, torch.load(saved, weights_only=True)
    assert int(run.num_applied) == 8
    moments = run.state_dict()["tensors"]["optimizer.0.net.2.weight.exp_avg"]
    place = list(state["state_dict"]).index("net.2.weight")
    assert torch.equal(moments, state["optimizer_states"][0]["state"][place]["exp_avg"])


def test_a_checkpoint_of_another_policy_is_refused_by_name(tmp_path):
    _, first = fit(tmp_path, "bf16-mixed", enable_checkpointing=True)
    with pytest.raises(HalfstepError, match="the policy `bf16-mixed`"):
        fit(tmp_path, "fp32", 2, resume=first.checkpoint_callback.best_model_path)


class Watches(Callback):
    skipped_of = staticmethod(lambda plugin: plugin.skipped)

    def __init__(self):
        self.skipped, self.rates, self.weights, self.norms = [], [], [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        grads = [p.grad for p in module.parameters()]
        self.norms.append(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads])))

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.skipped.append(self.skipped_of(trainer.precision_plugin))
        self.rates.append(trainer.lr_scheduler_configs[0].scheduler.last_epoch)
        self.weights.append(copy.deepcopy(module.state_dict()))


@pytest.mark.parametrize("policy", ["fp16-mixed", "bf16-mixed"])
def test_a_skipped_step_is_seen_and_changes_nothing(policy, tmp_path):
    module, watch = Module(), Watches()
    module.bad = (2,)
    _, fitted = fit(tmp_path, policy, module=module, callbacks=[watch])
    assert watch.skipped == [False, False, True, *[False] * 5]
    assert all(torch.equal(watch.weights[1][name], value) for name, value in watch.weights[2].items())
    assert any(not torch.equal(watch.weights[2][name], value) for name, value in watch.weights[3].items())
    assert int(fitted.precision_plugin.run.num_applied) == 7
    # Lightning counts it as a step, and schedules advance, as with its own plugin for fp16.
    module, own = Module(), Watches()
    module.bad, own.skipped_of = (2,), lambda plugin: None
    _, plain = fit(tmp_path, MixedPrecision("16-mixed", "cpu"), module=module, callbacks=[own])
    assert all(torch.equal(own.weights[1][name], value) for name, value in own.weights[2].items())
    assert watch.rates == own.rates == [*range(1, 9)]
    assert fitted.global_step == plain.global_step == 8


def test_a_run_that_no_scale_can_save_ends(tmp_path):
    module = Module()
    module.bad = range(8)
    with pytest.raises(ScalingError, match="although the loss scale is at its floor"):
        fit(tmp_path, "fp16-mixed,scale=dynamic:init=4", module=module)


@pytest.mark.parametrize("policy", ["bf16-mixed", "fp16-mixed"])
def test_a_hook_before_the_step_sees_true_gradients(policy, tmp_path):
    watch = Watches()
    given = {"accumulate_grad_batches": MICRO, "gradient_clip_val": CLIP}
    module, fitted = fit(tmp_path, policy, callbacks=[watch], **given)
    assert len(watch.norms) == 4
    assert float(watch.norms[-1]) == pytest.approx(float(fitted.precision_plugin.result.grad_norm), rel=2**-20)
    plain, _ = fit(tmp_path, policy, **given)
    for name, value in plain.state_dict().items():  # a division more: not the same bits
        assert torch.allclose(value, module.state_dict()[name], rtol=2**-10, atol=2**-16), name


def test_clipping_by_value_and_by_a_hook(tmp_path):
    class Clips(Module):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")

    by_value, fitted = fit(
        tmp_path, "fp16-mixed", gradient_clip_val=1e-3, gradient_clip_algorithm="value", limit_train_batches=1
    )
    norm = float(fitted.precision_plugin.result.grad_norm)
    count = sum(p.numel() for p in by_value.parameters())
    assert 0 < norm <= 1e-3 * count**0.5 * (1 + 2**-20)
    hooked, _ = fit(tmp_path, "bf16-mixed", module=Clips())
    option, _ = fit(tmp_path, "bf16-mixed", gradient_clip_val=CLIP)
    for name, value in option.state_dict().items():
        assert torch.allclose(value, hooked.state_dict()[name], rtol=2**-10, atol=2**-16), name


def test_steps_without_a_loss_are_left_out(tmp_path):
    class Sometimes(Module):
        def training_step(self, batch, index):
            return None if index in (1, 2, 3) else super().training_step(batch, index)

    module = Sometimes()
    _, fitted = fit(tmp_path, "bf16-mixed", module=module, accumulate_grad_batches=MICRO)
    assert int(fitted.precision_plugin.run.num_applied) == 3


def test_evaluation_needs_no_optimizer_and_leaves_training_alone(tmp_path):
    module = Module()
    untrained = trainer(tmp_path, "bf16-mixed")
    predicted = untrained.predict(module, loader())
    assert predicted[0].dtype == torch.bfloat16
    assert "no optimizers" in untrained.precision_plugin.summary()
    assert untrained.precision_plugin.state_dict() == {}
    module, fitted = fit(tmp_path, "bf16-mixed", module=module, enable_checkpointing=True)  # another Trainer
    run = fitted.precision_plugin.run
    before = copy.deepcopy(run.state_dict()["tensors"])
    (tested,) = fitted.test(module, loader(), ckpt_path="best", verbose=False)
    assert tested["validation_loss"] > 0
    assert fitted.precision_plugin.run is run
    now = run.state_dict()["tensors"]
    assert all(torch.equal(value, now[name]) for name, value in before.items() if not name.startswith("rng."))
    (again,) = trainer(tmp_path, "bf16-mixed").test(
        Module(), loader(), ckpt_path=fitted.checkpoint_callback.best_model_path, verbose=False
    )
    assert again == tested


def test_the_eval_role_holds_in_validation(tmp_path):
    seen = []

    class Validates(Module):
        def validation_step(self, batch, index):
            seen.append(self.net(batch[0]).dtype)

    module, fitted = Validates(), trainer(tmp_path, "bf16-mixed,eval=fp32")
    fitted.fit(module, loader(), loader())
    assert set(seen) == {torch.float32}
    assert set(module.seen) == {torch.bfloat16}


def test_a_second_fit_starts_anew_from_the_weights(tmp_path):
    module, fitted = fit(tmp_path, SPLIT)
    before = copy.deepcopy(module.state_dict())
    fitted.fit_loop.max_epochs = 2
    fitted.fit(module, loader())
    assert int(fitted.precision_plugin.run.num_applied) == 8
    assert any(not torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.prove
def test_our_optimizer_and_averages_resume(tmp_path):
    def go(folder, epochs, resume=None):
        module = Module(AdamW)
        plugin = HalfstepPrecision(SPLIT, ema=0.9, seed=3)
        torch.manual_seed(2)
        fitted = trainer(folder, plugin, epochs, enable_checkpointing=True)
        fitted.fit(module, loader(), ckpt_path=resume, weights_only=True)
        return fitted

    whole, first = go(tmp_path / "whole", 2), go(tmp_path, 1)
    resumed = go(tmp_path, 2, first.checkpoint_callback.best_model_path)
    averages = [each.precision_plugin.run.ema for each in (whole, resumed)]
    assert all(torch.equal(value, averages[1][name]) for name, value in averages[0].items())


def test_what_would_bypass_the_run_is_refused(tmp_path):
    class Manual(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    class OwnBackward(Module):
        def backward(self, loss):
            loss.backward()

    for module, words in ((Manual(), "manual optimization"), (OwnBackward(), "OwnBackward.backward is its own")):
        with pytest.raises(HalfstepError, match=words) as caught:
            fit(tmp_path, "bf16-mixed", module=module)
        assert caught.value.hint
    with pytest.raises(ValueError, match="Received both"):
        trainer(tmp_path, "bf16-mixed", precision="bf16-mixed")
    with pytest.raises(TypeError, match="FSDP"):
        lightning.pytorch.strategies.FSDPStrategy(precision_plugin=HalfstepPrecision("bf16-mixed"))
    with pytest.raises(HalfstepError, match="no model yet"):
        trainer(tmp_path, "bf16-mixed").precision_plugin.summary()
    with pytest.raises(HalfstepError, match="each would be stepped alone"):
        Fabric(policy="fp32", accelerator="cpu").setup(net := network(), *[torch.optim.SGD(net.parameters())] * 2)


@pytest.mark.parametrize("ended", [False, True])
def test_another_trainer_takes_a_module_over(ended, tmp_path):
    module, fitted = fit(tmp_path, SPLIT, limit_train_batches=1)
    before = fitted.precision_plugin.run.weights()
    if ended:
        fitted.precision_plugin.run.unprepare()
    other = trainer(tmp_path, "fp32")
    other.test(module, loader(), verbose=False)
    now = other.precision_plugin.run.weights()
    assert all(torch.equal(value, now[name]) for name, value in before.items())
    if not ended:
        with pytest.raises(HalfstepError, match="no model yet"):
            fitted.precision_plugin.summary()


def test_nothing_keeps_a_module_that_nobody_uses(tmp_path):
    module, fitted = fit(tmp_path, "bf16-mixed", limit_train_batches=1)
    with pytest.raises(HalfstepError, match="has a policy already"):  # and the run of the original stays
        trainer(tmp_path, "bf16-mixed").validate(copy.deepcopy(module), loader(), verbose=False)
    assert fitted.precision_plugin.run.model is module
    kept = weakref.ref(module)
    del module, fitted
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("kind", ["HalfstepPrecision", "Fabric"])
def test_strategies_without_a_policy_are_refused_by_name(kind, tmp_path):
    if kind == "Fabric":
        parallel = lightning.fabric.strategies.ModelParallelStrategy(lambda model, _: model)
        for given in ("fsdp", "deepspeed", "dp", parallel):
            name = given if isinstance(given, str) else "ModelParallelStrategy"
            with pytest.raises(HalfstepError, match=f"strategy={name}: no policy is implemented"):
                Fabric(policy="bf16-mixed", strategy=given, accelerator="cpu", devices=2)
        return
    module, kinds = Module(), lightning.pytorch.strategies
    refused = {
        "strategy=ModelParallelStrategy: no policy": kinds.ModelParallelStrategy(),
        "ddp_comm_hook=fp16_compress_hook": kinds.DDPStrategy(ddp_comm_hook=fp16_compress_hook),
    }
    for words, given in refused.items():
        module.trainer = trainer(tmp_path, "bf16-mixed", strategy=given)
        with pytest.raises(HalfstepError, match=words):
            module.trainer.precision_plugin.convert_module(module)  # as each strategy does first


def test_the_plugin_of_the_trainer_is_refused_in_fabric():
    fabric = lightning.fabric.Fabric(plugins=HalfstepPrecision("bf16-mixed"), accelerator="cpu")
    with pytest.raises(HalfstepError, match="is for Lightning's Trainer") as caught:
        fabric.setup(network())
    assert "Fabric(policy='bf16-mixed')" in caught.value.hint


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["EMAWeightAveraging", "StochasticWeightAveraging"])
def test_callbacks_that_average_parameters_need_whole_masters(kind, tmp_path):
    def callback():
        settings = {"decay": 0.5} if kind == "EMAWeightAveraging" else {"swa_lrs": 1e-2}
        return getattr(lightning.pytorch.callbacks, kind)(**settings)

    with pytest.raises(HalfstepError, match=f"{kind} averages the module's parameters"):
        fit(tmp_path, SPLIT, callbacks=[callback()])
    ours, _ = fit(tmp_path, "fp32", 2, callbacks=[callback()], limit_train_batches=2)
    plain, _ = fit(tmp_path, None, 2, callbacks=[callback()], limit_train_batches=2)
    for name, value in plain.state_dict().items():
        assert torch.allclose(value, ours.state_dict()[name], rtol=2**-16, atol=2**-18), name


def test_an_optimizer_that_is_not_the_runs_is_refused(tmp_path):
    class Replaces(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 1:
                trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]

    with pytest.raises(HalfstepError, match="steps another optimizer than the run's, a SGD"):
        fit(tmp_path, "bf16-mixed", callbacks=[Replaces()])


def test_a_checkpoint_between_micro_batches_says_what_it_lacks(tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            trainer.save_checkpoint(tmp_path / f"{index}.ckpt")

    with pytest.warns(UserWarning, match="between the micro-batches of an update") as caught:
        fit(tmp_path, "bf16-mixed", accumulate_grad_batches=MICRO, limit_train_batches=2, callbacks=[Saves()])
    assert sum("micro-batches" in str(each.message) for each in caught) == 1


@pytest.mark.prove
def test_validation_between_micro_batches_leaves_their_gradients_alone(tmp_path):
    modules = [Module(), Module()]
    for module, check in zip(modules, (3, None), strict=True):
        module.net[3].p = 0.0
        given = {"accumulate_grad_batches": MICRO, "val_check_interval": check}
        trainer(tmp_path, "fp16-mixed", **given).fit(module, loader(), loader() if check else None)
    assert_same(*modules)


@pytest.mark.prove
def test_accumulation_may_change_between_epochs(tmp_path):
    scheduler = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 2, 1: 4})
    _, fitted = fit(tmp_path, "fp16-mixed", 2, callbacks=[scheduler])
    assert int(fitted.precision_plugin.run.num_applied) == fitted.global_step == 4 + 2


@pytest.mark.parametrize("policy", [BF16, "fp16-mixed"])
def test_steps_by_the_modules_own_code_are_checked(policy, tmp_path):
    class Own(Module):
        def optimizer_step(self, epoch, index, optimizer, closure):
            optimizer.step(closure)  # Lightning's, which calls the plugin

    class Direct(Module):
        def optimizer_step(self, epoch, index, optimizer, closure):
            optimizer.optimizer.step(closure)

    class Changes(Module):
        def on_after_backward(self):
            self.net[2].weight.grad.mul_(0.5)

    own, _ = fit(tmp_path, policy, module=Own(), limit_train_batches=2)
    plain, _ = fit(tmp_path, policy, limit_train_batches=2)
    assert_same(own, plain)
    with pytest.raises(HalfstepError, match="was called directly"):
        fit(tmp_path, policy, module=Direct())
    with pytest.raises(HalfstepError, match="was changed or dropped between two backward passes"):
        fit(tmp_path, policy, module=Changes(), accumulate_grad_batches=MICRO)


def test_the_summary_names_the_sync(tmp_path):
    _, fitted = fit(tmp_path, "fp16-mixed", limit_train_batches=1, gradient_clip_val=CLIP)
    summary = fitted.precision_plugin.summary()
    assert "the skip flag is read after each update, one sync" in summary
    assert "clipped to 0.2" in summary
    _, fitted = fit(tmp_path, "bf16-mixed", limit_train_batches=1)
    assert "one sync: a run" not in fitted.precision_plugin.summary()


def test_schedulers_warn_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.*")
        fit(tmp_path, "bf16-mixed", module=Module(AdamW), limit_train_batches=2)
