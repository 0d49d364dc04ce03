"""Faults in loss scales: when they are applied, undone, moved, saved and reported."""

import dataclasses

from benchmarks.prove.faults.registry import STEP, TORCH, hazard, nothing


@hazard(
    "gradients are unscaled with the new scale",
    "halfstep.core.scaling:DynamicScale.judge",
    f"{STEP}::test_the_scale_used_is_the_scale_undone",
)
def _(good):
    def judge(self, state, finite, xp):
        verdict = good(self, state, finite, xp)
        return verdict._replace(inv_scale=1.0 / verdict.state.scale)

    return judge


@hazard(
    "the scale has no floor",
    "halfstep.core.scaling:DynamicScale.judge",
    f"{STEP}::test_a_run_that_no_scale_saves_stops",
)
def _(good):
    return lambda self, *args: good(dataclasses.replace(self, floor=2.0**-100), *args)


@hazard(
    "the scale moves once per optimizer",
    "halfstep.torch.update.step:Engine.update",
    f"{TORCH}::test_one_scale_update_however_many_optimizers",
)
def _(good):
    def update(self):
        import torch

        result = good(self)
        for _ in self.optimizers[1:]:
            self.scale_state = self.policy.scale.judge(self.scale_state, ~result.skipped, torch).state
        return result

    return update


@hazard(
    "at the floor no cause is named",
    "halfstep.torch.instruments.nonfinite:find",
    f"{TORCH}::test_at_the_floor_the_cause_is_named",
)
def _(good):
    def find(*args, **kwargs):
        return dataclasses.replace(good(*args, **kwargs), where="", what="the loss scale is at its minimum")

    return find


@hazard(
    "a skipped step advances the schedule",
    "halfstep.torch.run:Run.scheduler_step",
    f"{TORCH}::test_a_skip_is_visible_to_schedules",
)
def _(good):
    def scheduler_step(self, scheduler, *args):
        if not good(self, scheduler, *args):
            scheduler.step(*args)

    return scheduler_step


@hazard(
    "an overflow in the forward pass is taken for a scaling problem",
    "halfstep.core.scaling:overflow_hint",
    f"{TORCH}::test_forward_overflow_is_not_reported_as_a_scaling_problem",
)
def _(good):
    return lambda where, *rest: good("backward", *rest)


@hazard(
    "clipping comes before unscaling",
    "halfstep.torch.update.step:Engine.update",
    f"{STEP}::test_clipping_comes_after_unscaling",
)
def _(good):
    def update(self):
        norm, self.clip_norm = self.clip_norm, self.clip_norm / float(self.scale_state.scale)
        try:
            return good(self)
        finally:
            self.clip_norm = norm

    return update


hazard(
    "bf16 gets a loss scale without a word",
    "halfstep.core.errors:warn_caller",
    f"{TORCH}::test_a_scale_with_bf16_runs_with_a_warning_and_a_second_scaler_is_refused",
)(nothing)


@hazard(
    "the fp16 scale depends on the size of the first micro-batch",
    "halfstep.torch.update.accumulation:Accumulation._weigh_sums",
    f"{STEP}::test_the_loss_scale_does_not_depend_on_the_size_of_the_first_micro_batch",
)
def _(good):
    return lambda self, weight, *rest: weight / self._reference


@hazard(
    "a loss scale falls to its floor without a word",
    "halfstep.core.scaling:ScaleAlarm.observe",
    f"{STEP}::test_a_loss_scale_that_is_low_and_falling_is_a_warning_once_before_its_floor",
)
def _(good):
    return lambda *args, **kwargs: ""


@hazard(
    "the scale is never undone", "halfstep.core.scaling:StaticScale.judge", f"{TORCH}::test_the_scale_is_undone"
)
def _(good):
    return lambda *args: good(*args)._replace(inv_scale=1.0)


@hazard(
    "the scale is not saved",
    "halfstep.torch.state:load_state",
    "tests/torch/test_state.py::test_a_restored_run_continues_bit_for_bit",
)
def _(good):
    def load(run, given):
        scale = run.scale_state
        good(run, given)
        run.scale_state = scale

    return load


@hazard(
    "a non-finite step is applied",
    "halfstep.torch.optim.drivers:HalfstepDriver.step",
    f"{TORCH}::test_a_step_that_is_not_finite_changes_nothing_under_every_policy",
)
def _(good):
    return lambda self, grads, scale, found_inf, count: good(self, grads, scale, found_inf * 0, count)
