"""Faults in what is cast to what, and when: operands, islands, positions, custom functions."""

import dataclasses
import importlib

from benchmarks.prove.faults.registry import MLX, TORCH, hazard, nothing


@hazard(
    "native fp8 casts decide what overflow becomes",
    "halfstep.core.arrays.cast:_round_quanta",
    "tests/conformance/test_cast.py::test_where_native_casts_disagree_the_rule_decides",
)
def _(good):
    return lambda arrays, x, plan, overflow, *rest: good(arrays, x, plan, "saturate", *rest)


@hazard("a NaN becomes 448 in fp8", "halfstep.mlx.numerics.cast:quantize", f"{MLX}::test_a_nan_stays_one_in_fp8")
def _(good):
    def quantize(x, *args, **kwargs):
        import mlx.core as mx

        return good(mx.where(mx.isnan(x), 448.0, x), *args, **kwargs)

    return quantize


@hazard(
    "a layer derives its format from its input",
    "halfstep.torch.layers:linear",
    "tests/torch/convert/test_modules.py::test_the_format_is_never_derived_from_an_operand",
)
def _(good):
    def linear(x, weight, bias, casts, **options):
        return good(x, weight, bias, dataclasses.replace(casts, compute=x.dtype, operand=x.dtype), **options)

    return linear


hazard(
    "matmuls sum in reduced precision",
    "halfstep.torch.update.switches:Switches._set",
    f"{TORCH}::test_halves_are_summed_in_fp32",
)(nothing)


hazard("fp32 means TF32", "halfstep.torch.update.switches:check_fp32", f"{TORCH}::test_fp32_is_fp32")(nothing)


@hazard(
    "an all-zero tensor gets an infinite scale",
    "halfstep.torch.numerics.cast:_scales",
    "tests/conformance/test_cast.py::test_the_scale_of_zero_tiny_huge_and_broken",
)
def _(good):
    def scales(amax, fmt):
        scale = fmt.max / amax
        return scale, 1 / scale

    return scales


hazard(
    "autocast around a model is refused without a remedy",
    "halfstep.torch.numerics.lowering:autocast_error",
    "tests/torch/convert/test_plan.py::test_autocast_around_a_model_with_a_policy_is_refused",
)(lambda good: lambda: RuntimeError("not refused with a remedy"))


@hazard(
    "a cast outlives the step",
    "halfstep.torch.numerics.split.operand:operand_of",
    f"{TORCH}::test_no_cast_outlives_a_step",
)
def _(good):
    kept = {}

    def operand_of(weight, whole):
        values, owner = good(weight, whole)
        return kept.setdefault(id(weight), values.clone()), owner

    return operand_of


@hazard(
    "islands return fp32",
    "halfstep.torch.numerics.lowering:exit_island",
    "tests/torch/convert/test_modules.py::test_a_norm_or_a_softmax_is_fp32_inside_and_compute_out",
)
def _(good):
    return lambda x, role, casts: x.float()


@hazard(
    "norms run in bf16",
    "halfstep.torch.numerics.lowering:island",
    "tests/torch/convert/test_modules.py::test_a_norm_or_a_softmax_is_fp32_inside_and_compute_out",
)
def _(good):
    def island(x, role, casts):
        return None if x is None else good(x.bfloat16(), role, casts)

    return island


@hazard(
    "rotary positions are bf16",
    "halfstep.torch.model:rope_tables",
    f"{TORCH}::test_rotary_angles_are_right_at_every_position",
)
def _(good):
    return lambda config: tuple(table.bfloat16().float() for table in good(config))


@hazard(
    "an fp32 gain promotes the stream", "halfstep.mlx.layers:rms_norm", f"{MLX}::test_fp32_gains_do_not_promote"
)
def _(good):
    def rms_norm(*args, **kwargs):
        import mlx.core as mx

        return good(*args, **kwargs).astype(mx.float32)

    return rms_norm


@hazard(
    "a compiler drops emulated casts",
    "halfstep.torch.numerics.cast:carried",
    f"{TORCH}::test_emulated_casts_are_not_dropped_by_the_compiler",
)
def _(good):
    def carried(x, fmt):
        import torch

        return x.to(torch.bfloat16).float()

    return carried


@hazard(
    "a casted layer without a policy computes in fp32",
    "halfstep.torch.layers:casts_like",
    "tests/torch/test_layers.py::test_a_casted_layer_without_a_policy_follows_its_input",
)
@hazard(
    "a casted layer of MLX without a policy computes in fp32",
    "halfstep.mlx.layers:casts_like",
    "tests/mlx/test_layers.py::test_a_casted_layer_without_a_policy_follows_its_input",
)
def _(good):
    def casts_like(x):
        module = importlib.import_module(good.__module__)
        return module.casts_of(module.Precision())

    return casts_like


hazard(
    "a softmax that an MLX model calls as a function runs in bf16",
    "halfstep.mlx.convert.functions:reach_functions",
    "tests/mlx/convert/test_functions.py::test_a_function_is_an_island_in_a_prepared_model_and_mlxs_own_elsewhere",
)(nothing)


hazard(
    "an fp32 mask or table widens the activations of an MLX model",
    "halfstep.mlx.convert.promotion:_mixes_widths",
    "tests/mlx/convert/test_promotion.py::test_arithmetic_with_an_fp32_array_is_fp32_inside_and_compute_out",
)(nothing)


hazard(
    "a custom backward multiplies a bf16 gradient by an fp32 parameter",
    "halfstep.torch.convert.functions.custom:_remember",
    "tests/torch/convert/functions/test_custom.py::test_an_activation_and_a_parameter_meet_in_its_backward",
)(nothing)


@hazard(
    "custom_fwd(cast_inputs=...) casts under autocast alone",
    "halfstep.torch.convert.functions.custom:_cast_of",
    "tests/torch/convert/functions/test_custom.py::test_cast_inputs_are_cast_and_everything_inside_runs_as_written",
)
def _(good):
    return lambda forward: good(forward) and (lambda t: t)


@hazard(
    "a second derivative of an emulated layer is zero",
    "halfstep.mlx.numerics.cast:_carrying",
    "tests/mlx/test_layers.py::test_gradients_can_be_differentiated_again_emulated_too_and_narrow_ones_say_that_they_cannot",
)
def _(good):
    def carrying(fmt):
        import mlx.core as mx

        return lambda x: good(fmt)(mx.stop_gradient(x))

    return carrying


@hazard(
    "a mask of finite numbers becomes infinite in bf16",
    "halfstep.mlx.convert.modules:cast_input",
    "tests/mlx/convert/test_apply.py::test_a_mask_that_a_model_is_given_stays_finite",
)
def _(good):
    from halfstep.mlx.layers import to_compute

    return to_compute
