"""Faults in what is updated: masters, their halves, moments, gradients and their sums."""

from benchmarks.prove.faults.registry import MLX, STEP, TORCH, hazard, nothing


@hazard(
    "fp16 parameters get no master",
    "halfstep.torch.convert.apply:hold",
    f"{TORCH}::test_fp16_parameters_are_trainable",
)
def _(good):
    def hold(wide, param, policy):
        hi, lo = good(wide, param, policy)
        return hi.half(), lo

    return hold


@hazard(
    "bf16 weights train without masters",
    "halfstep.torch.convert.apply:hold",
    f"{TORCH}::test_bf16_weights_get_masters_and_fp32_moments",
)
def _(good):
    def hold(wide, param, policy):
        hi, lo = good(wide, param, policy)
        return hi.bfloat16(), lo

    return hold


@hazard(
    "small updates are lost: the remainder is not kept",
    "halfstep.torch.numerics.cast:split",
    f"{TORCH}::test_small_updates_are_not_lost",
)
def _(good):
    def split(x):
        hi, lo = good(x)
        return hi, lo * 0

    return split


@hazard(
    "a split master loses NaN and half a unit: its bf16 is truncated",
    "halfstep.torch.numerics.cast:split",
    f"{TORCH}::test_split_masters_are_exact_on_ties_and_keep_nan",
)
def _(good):
    def split(x):
        import torch

        bits = x.detach().view(torch.int32)
        return (bits >> 16).to(torch.int16).view(torch.bfloat16), (bits & 0x7FFF).to(torch.int16)

    return split


@hazard(
    "moments change dtype when a state is loaded",
    "halfstep.torch.state:_check_entries",
    f"{TORCH}::test_moments_keep_their_format_when_a_state_is_loaded",
)
def _(good):
    def checked(*args):
        entries = good(*args)
        return {o: {k: v.bfloat16().to(v.dtype) for k, v in values.items()} for o, values in entries.items()}

    return checked


@hazard(
    "gradients of split weights are rounded to bf16",
    "halfstep.torch.numerics.split.parameter:take_grad",
    f"{TORCH}::test_gradients_of_bf16_halves_are_fp32",
)
def _(good):
    return lambda parameter: None if (grad := good(parameter)) is None else grad.bfloat16().float()


@hazard(
    "a weight that was written to inside a step is multiplied as it was before",
    "halfstep.torch.layers:cached_cast",
    "tests/torch/update/test_weight_casts.py::test_a_parameter_that_is_written_to_inside_a_step_is_cast_again",
)
def _(good):
    def cached_cast(parameter, compute):
        made = getattr(parameter, "halfstep_cast", None)
        return good(parameter, compute) if made is None or made.cast is None else made.cast

    return cached_cast


hazard(
    "several processes train split masters, whose gradients nobody sums",
    "halfstep.torch.parallel.ranks:average",
    f"{TORCH}::test_gradients_of_halves_are_averaged_over_processes",
)(nothing)


@hazard(
    "stochastic rounding differs between replicas",
    "halfstep.torch.numerics.cast:random_bits",
    f"{TORCH}::test_stochastic_rounding_is_the_same_on_every_replica",
)
def _(good):
    def random_bits(*args, **kwargs):
        import torch

        return torch.randint_like(good(*args, **kwargs), 2**32)

    return random_bits


@hazard(
    "micro-batches are summed in bf16",
    "halfstep.torch.update.accumulation:Accumulation.__init__",
    f"{STEP}::test_gradients_are_summed_in_the_accumulate_format",
)
def _(good):
    def init(self, *args):
        import torch

        good(self, *args)
        self.format = torch.bfloat16

    return init


@hazard(
    "a skipped step keeps its running statistics",
    "halfstep.torch.update.buffers:Buffers.restore_unless",
    "tests/torch/update/test_prepare.py::"
    "test_a_replaced_buffer_is_restored_too_and_statistics_that_changed_between_steps_are_kept",
)
def _(good):
    return lambda self, finite: good(self, finite | True)


@hazard(
    "bf16 weights never move in MLX: its optimizers have no masters",
    "halfstep.mlx.optim.masters:Masters._stored",
    f"{MLX}::test_bf16_weights_at_one_never_move_in_mlx_and_do_here",
)
def _(good):
    def stored(self, name, wide, count):
        import mlx.core as mx

        return good(self, name, wide.astype(mx.bfloat16).astype(mx.float32), count)

    return stored


hazard(
    "a write to a split weight is rounded to bf16, or lost",
    "halfstep.torch.optim.masters:Masters.check_writes",
    "tests/torch/update/test_edit.py::test_a_write_is_exact_inside_edit_and_refused_by_name_outside",
)(nothing)


hazard(
    "averages of others are made of bf16 halves",
    "halfstep.torch.numerics.split.parameter:check_copy",
    "tests/torch/update/test_edit.py::"
    "test_a_copy_of_a_parameter_is_the_whole_master_inside_edit_and_refused_by_name_outside",
)(nothing)

hazard(
    "the remainders of a model that is moved stay behind",
    "halfstep.torch.numerics.split.parameter:HalfOfSplitMaster._follow",
    "tests/torch/update/test_edit.py::test_the_same_numbers_on_another_device_are_a_move_that_loses_nothing",
)(nothing)


@hazard(
    "save_weights of MLX writes halves of split masters",
    "halfstep.mlx.optim.masters:Masters.join_halves",
    "tests/mlx/test_state.py::test_split_masters_are_saved_shown_and_loaded_whole",
)
def _(good):
    return lambda self, tree: tree


hazard(
    "half of a split master of MLX is written by hand",
    "halfstep.mlx.optim.masters:Masters.check_writes",
    "tests/mlx/test_state.py::test_halves_of_split_masters_are_not_written_by_hand",
)(nothing)
