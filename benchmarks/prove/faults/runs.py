"""Faults in a run around its arithmetic: steps, state, checkpoints, signals, data."""

from benchmarks.prove.faults.registry import hazard, nothing

hazard(
    "a step outside the run bypasses its checks",
    "halfstep.torch.update.own_steps:OwnSteps.check",
    "tests/torch/update/test_own_steps.py::test_where_it_cannot_be_exact_it_is_refused_and_nothing_moves",
)(nothing)

hazard(
    "a plain loop makes a step that is not finite",
    "halfstep.torch.update.own_steps:OwnSteps._begin",
    "tests/torch/update/test_own_steps.py::test_buffers_of_a_step_that_is_not_finite_are_restored_and_a_scheduler_may_wait",
)(nothing)


@hazard(
    "a resumed run rebuilds its masters from bf16",
    "halfstep.torch.state:load_state",
    "tests/torch/test_state.py::test_a_restored_run_continues_bit_for_bit",
)
def _(good):
    def load(run, given):
        good(run, given)
        for remainder in run.masters.remainders.values():
            remainder.zero_()

    return load


@hazard(
    "gradients are clipped by hand while they are times the scale",
    "halfstep.torch.update.gradients:UserGradients._changed",
    "tests/torch/update/test_gradients.py::test_gradients_that_are_changed_while_they_are_sums_or_scaled_are_refused",
)
def _(good):
    return lambda self: ""


@hazard(
    "clipping by value makes an infinite gradient finite, and the step is made",
    "halfstep.torch.update.gradients:UserGradients.unscale",
    "tests/torch/update/test_gradients.py::test_a_step_that_is_not_finite_is_skipped_whatever_was_done_to_its_gradients",
)
def _(good):
    def unscale(self, *args):
        good(self, *args)
        self.finite.fill_(True)

    return unscale


@hazard(
    "a half-written checkpoint is the newest",
    "halfstep.training.checkpoints.checkpoint:step_folders",
    "tests/training/checkpoints/test_checkpoint.py::test_latest_is_by_number_and_ignores_what_is_none",
)
def _(good):
    return lambda folder: sorted(folder.glob("step-*"))


@hazard(
    "a second SIGTERM kills a run that is saving",
    "halfstep.training.run.signals:StopRequest.receive",
    "tests/training/run/test_signals.py::test_a_second_sigint_interrupts_and_a_second_sigterm_does_not",
)
def _(good):
    def receive(self, number, frame=None):
        if self.requested is not None:
            raise SystemExit(128 + number)
        good(self, number, frame)

    return receive


@hazard(
    "a FIFO is read as text and hangs",
    "halfstep.training.data.walk:_kind_of_target",
    "tests/training/data/test_walk.py::test_pipes_and_sockets_are_skipped_and_counted",
)
def _(good):
    from halfstep.training.data import walk

    return lambda path: walk.FILE if good(path) == walk.SPECIAL else good(path)
