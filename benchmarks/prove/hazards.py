"""Plants each known hazard of mixed precision, one at a time, and expects its test to fail.

    python benchmarks/prove/hazards.py [--only WORD ...]

A hazard names the function that guards against it, a faulty version of that function, and the test that must
notice. All tests must pass without a fault, and each must fail with its fault. Faults wrap functions and never
edit source, so they survive moves and rewrites; tests/benchmarks/test_hazards.py checks that every function and
test still exists. Exit code 1 if a fault goes unnoticed.
"""

import argparse
import dataclasses
import importlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"):
    os.environ.setdefault(_name, "1")  # before anything imports numpy or torch

ROOT = Path(__file__).resolve().parents[2]
TORCH, JAX, MLX = "tests/torch/test_hazards.py", "tests/jax/test_faults.py", "tests/mlx/test_faults.py"
STEP = "tests/conformance/test_step.py"
Function = Callable[..., Any]


class Hazard(NamedTuple):
    """A fault and the test that must notice it."""

    name: str
    where: str  # module:function or module:Class.method
    test: str  # a pytest node id
    fault: Callable[[Function], Function]  # makes the faulty function from the good one


HAZARDS: list[Hazard] = []


def hazard(name: str, where: str, test: str) -> Callable[[Callable[[Function], Function]], Function]:
    """Registers a function that makes a faulty function from the good one."""

    def register(fault: Callable[[Function], Function]) -> Function:
        HAZARDS.append(Hazard(name, where, test, fault))
        return fault

    return register


def nothing(good: Function) -> Function:
    """Returns a function that checks nothing."""
    return lambda *args, **kwargs: None


def unchanged(good: Function) -> Function:
    """Returns a function that returns its first argument as it is."""
    return lambda x, *args, **kwargs: x


# --- scaling ----------------------------------------------------------------------------------------------------


@hazard(
    "gradients are unscaled with the new scale",
    "halfstep.core.scaling:DynamicScale.judge",
    f"{TORCH}::test_unscaling_with_the_new_scale",
)
def _(good):
    def judge(self, state, finite, xp):
        verdict = good(self, state, finite, xp)
        return verdict._replace(inv_scale=1.0 / verdict.state.scale)

    return judge


@hazard(
    "the scale has no floor",
    "halfstep.core.scaling:DynamicScale.judge",
    f"{TORCH}::test_the_floor_holds_after_two_hundred_overflows_also_compiled",
)
@hazard(
    "the floor is lost under jit",
    "halfstep.core.scaling:DynamicScale.judge",
    f"{JAX}::test_the_floor_of_the_scale_is_kept_under_jit",
)
def _(good):
    return lambda self, *args: good(dataclasses.replace(self, floor=2.0**-100), *args)


@hazard(
    "the scale moves once per optimizer",
    "halfstep.torch.step:Run.update",
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
    "halfstep.torch.run.nonfinite:find",
    f"{TORCH}::test_at_the_floor_the_cause_is_named",
)
def _(good):
    def find(*args, **kwargs):
        return dataclasses.replace(good(*args, **kwargs), where="", what="the loss scale is at its minimum")

    return find


@hazard(
    "a skipped step advances the schedule",
    "halfstep.torch.step:Run.scheduler_step",
    f"{TORCH}::test_a_skip_is_visible_to_schedules",
)
def _(good):
    def scheduler_step(self, scheduler, *args):
        if not good(self, scheduler, *args):
            scheduler.step(*args)

    return scheduler_step


@hazard(
    "an overflow in the forward pass is taken for a scaling problem",
    "halfstep.core.scaling:way_out",
    f"{TORCH}::test_forward_overflow_is_not_reported_as_a_scaling_problem",
)
def _(good):
    return lambda where, *rest: good("backward", *rest)


@hazard(
    "clipping comes before unscaling",
    "halfstep.torch.step:Run.update",
    f"{TORCH}::test_clipping_comes_after_unscaling",
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
    "halfstep.torch.run.accumulation:Accumulation._weigh_sums",
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
    "the scale is not saved", "halfstep.torch.state:load_state", f"{TORCH}::test_the_scale_is_part_of_the_state"
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


# --- masters and updates ----------------------------------------------------------------------------------------


@hazard(
    "fp16 parameters get no master",
    "halfstep.torch.apply:hold",
    f"{TORCH}::test_fp16_parameters_are_trainable",
)
def _(good):
    def hold(wide, param, policy):
        hi, lo = good(wide, param, policy)
        return hi.half(), lo

    return hold


@hazard(
    "bf16 weights train without masters",
    "halfstep.torch.apply:hold",
    f"{TORCH}::test_bf16_weights_get_masters_and_fp32_moments",
)
def _(good):
    def hold(wide, param, policy):
        hi, lo = good(wide, param, policy)
        return hi.bfloat16(), lo

    return hold


@hazard(
    "small updates are lost: the remainder is not kept",
    "halfstep.torch.cast:split",
    f"{TORCH}::test_small_updates_are_not_lost",
)
def _(good):
    def split(x):
        hi, lo = good(x)
        return hi, lo * 0

    return split


@hazard(
    "a split master loses NaN and half a unit: its bf16 is truncated",
    "halfstep.torch.cast:split",
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
    "halfstep.torch.state:_checked_entries",
    f"{TORCH}::test_moments_keep_their_format_when_a_state_is_loaded",
)
def _(good):
    def checked(*args):
        entries = good(*args)
        return {o: {k: v.bfloat16().to(v.dtype) for k, v in values.items()} for o, values in entries.items()}

    return checked


@hazard(
    "gradients of split weights are rounded to bf16",
    "halfstep.torch.split.parameter:take_grad",
    f"{TORCH}::test_gradients_of_bf16_halves_are_fp32",
)
def _(good):
    return lambda parameter: None if (grad := good(parameter)) is None else grad.bfloat16().float()


@hazard(
    "a weight that was written to inside a step is multiplied as it was before",
    "halfstep.torch.lowering:MadeCast.fits",
    "tests/torch/run/test_weight_casts.py::test_a_parameter_that_is_written_to_inside_a_step_is_cast_again",
)
def _(good):
    return lambda self, parameter, compute: True


hazard(
    "several processes train split masters, whose gradients nobody sums",
    "halfstep.torch.run.checks:check_replicas",
    f"{TORCH}::test_halves_are_not_trained_by_several_processes",
)(nothing)


@hazard(
    "stochastic rounding differs between replicas",
    "halfstep.torch.cast:random_bits",
    f"{TORCH}::test_stochastic_rounding_is_the_same_on_every_replica",
)
def _(good):
    def random_bits(*args, **kwargs):
        import torch

        return torch.randint_like(good(*args, **kwargs), 2**32)

    return random_bits


@hazard(
    "micro-batches are summed in bf16",
    "halfstep.torch.run.accumulation:Accumulation.__init__",
    f"{TORCH}::test_micro_batches_are_summed_in_fp32",
)
def _(good):
    def init(self, *args):
        import torch

        good(self, *args)
        self.format = torch.bfloat16

    return init


@hazard(
    "a skipped step keeps its running statistics",
    "halfstep.torch.run.buffers:Buffers.restore_unless",
    f"{TORCH}::test_running_statistics_survive_a_skipped_step",
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


# --- casting ----------------------------------------------------------------------------------------------------


@hazard(
    "native fp8 casts decide what overflow becomes",
    "halfstep.torch.cast:_round_quanta",
    "tests/conformance/test_cast.py::test_where_native_casts_disagree_the_rule_decides",
)
def _(good):
    return lambda x, plan, overflow, *rest: good(x, plan, "saturate", *rest)


@hazard("a NaN becomes 448 in fp8", "halfstep.mlx.cast:quantize", f"{MLX}::test_a_nan_stays_one_in_fp8")
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
    "halfstep.torch.run.switches:Switches._set",
    f"{TORCH}::test_halves_are_summed_in_fp32",
)(nothing)

hazard("fp32 means TF32", "halfstep.torch.run.switches:check_fp32", f"{TORCH}::test_fp32_is_fp32")(nothing)


@hazard(
    "an all-zero tensor gets an infinite scale",
    "halfstep.torch.cast:_scales",
    "tests/conformance/test_cast.py::test_the_scale_of_zero_tiny_huge_and_broken",
)
def _(good):
    def scales(amax, fmt):
        scale = fmt.max / amax
        return scale, 1 / scale

    return scales


hazard(
    "autocast around a model is refused without a remedy",
    "halfstep.torch.lowering:autocast_error",
    "tests/torch/convert/test_plan.py::test_autocast_around_a_model_with_a_policy_is_refused",
)(lambda good: lambda: RuntimeError("not refused with a remedy"))


@hazard(
    "a cast outlives the step",
    "halfstep.torch.split.operand:operand_of",
    f"{TORCH}::test_no_cast_outlives_a_step",
)
def _(good):
    kept = {}

    def operand_of(weight, whole):
        values, owner = good(weight, whole)
        return kept.setdefault(id(weight), values.clone()), owner

    return operand_of


@hazard("islands return fp32", "halfstep.torch.lowering:leave", f"{TORCH}::test_islands_do_not_return_fp32")
def _(good):
    return lambda x, role, casts: x.float()


@hazard(
    "norms run in bf16",
    "halfstep.torch.lowering:island",
    "tests/torch/test_layers.py::test_a_norm_is_fp32_inside_and_compute_out_forward_and_backward",
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
    "halfstep.torch.cast:carried",
    f"{TORCH}::test_emulated_casts_are_not_dropped_by_the_compiler",
)
def _(good):
    def carried(x, fmt):
        import torch

        return x.to(torch.bfloat16).float()

    return carried


# --- hardware and choice ----------------------------------------------------------------------------------------


@hazard(
    "emulated formats count as supported",
    "halfstep.torch.dtypes:answer",
    "tests/torch/test_dtypes.py::test_the_hardware_decides_on_an_accelerator",
)
def _(good):
    return lambda fmt, device: dataclasses.replace(good(fmt, device), supported=True)


@hazard(
    "a narrow format is chosen although it is slower",
    "halfstep.core.choice:gain",
    "tests/core/test_choice.py::test_bf16_that_is_hundreds_of_times_slower_is_not_chosen_and_the_reason_holds_the_ratio",
)
def _(good):
    def gain(timings, fmt):
        found = good(timings, fmt)
        return dataclasses.replace(found, fp32=1.0, other=0.1) if found else None

    return gain


hazard(
    "fp8 was asked for and bf16 runs",
    "halfstep.core.refusal:check_formats",
    "tests/torch/test_apply.py::test_a_policy_that_does_not_fit_is_refused_and_changes_nothing",
)(nothing)


@hazard(
    "row-wise scaling is emulated tensor-wise",
    "halfstep.torch.cast:amax_of",
    "tests/torch/test_cast.py::test_a_scaled_operand_is_the_reference_cast_of_the_scaled_values",
)
def _(good):
    return lambda x, operand: good(x, dataclasses.replace(operand, granularity="tensor"))


# --- runs -------------------------------------------------------------------------------------------------------

hazard(
    "a step outside the run bypasses its checks",
    "halfstep.torch.optim.drivers:StockDriver.refuse_outside_run",
    "tests/torch/test_split.py::test_a_step_that_the_run_does_not_make_is_refused_where_it_would_be_lost",
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


hazard(
    "a write to a split weight is rounded to bf16, or lost",
    "halfstep.torch.optim.masters:Masters.check_writes",
    "tests/torch/run/test_edit.py::test_a_write_is_exact_inside_edit_and_refused_by_name_outside",
)(nothing)


@hazard(
    "gradients are clipped by hand while they are times the scale",
    "halfstep.torch.run.gradients:Shown._changed",
    "tests/torch/run/test_gradients.py::test_gradients_that_are_changed_while_they_are_sums_or_scaled_are_refused",
)
def _(good):
    return lambda self: ""


@hazard(
    "clipping by value makes an infinite gradient finite, and the step is made",
    "halfstep.torch.run.gradients:Shown.unscale",
    "tests/torch/run/test_gradients.py::test_a_step_that_is_not_finite_is_skipped_whatever_was_done_to_its_gradients",
)
def _(good):
    def unscale(self, *args):
        good(self, *args)
        self.finite.fill_(True)

    return unscale


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


@hazard(
    "a softmax that an MLX model calls as a function runs in bf16",
    "halfstep.mlx.functions:reach_functions",
    "tests/mlx/test_functions.py::test_a_function_is_an_island_in_a_prepared_model_and_mlxs_own_elsewhere",
)
def _(good):
    return nothing(good)


@hazard(
    "save_weights of MLX writes halves of split masters",
    "halfstep.mlx.optim.masters:Masters.joined",
    "tests/mlx/test_state.py::test_split_masters_are_saved_shown_and_loaded_whole",
)
def _(good):
    return lambda self: {}


@hazard(
    "half of a split master of MLX is written by hand",
    "halfstep.mlx.optim.masters:Masters.check_writes",
    "tests/mlx/test_state.py::test_halves_of_split_masters_are_neither_saved_nor_written_by_hand",
)
@hazard(
    "a custom backward multiplies a bf16 gradient by an fp32 parameter",
    "halfstep.torch.functions.custom:_remember",
    "tests/torch/functions/test_custom.py::test_an_activation_and_a_parameter_meet_in_its_backward",
)
def _(good):
    return nothing(good)


@hazard(
    "custom_fwd(cast_inputs=...) casts under autocast alone",
    "halfstep.torch.functions.custom:Cast.apply",
    "tests/torch/functions/test_custom.py::test_cast_inputs_are_cast_and_everything_inside_runs_as_written",
)
def _(good):
    return lambda self, t: t


@hazard(
    "a second derivative of an emulated layer is zero",
    "halfstep.mlx.cast:_carrying",
    "tests/mlx/test_layers.py::test_gradients_can_be_differentiated_again_emulated_too_and_narrow_ones_say_that_they_cannot",
)
def _(good):
    def carrying(fmt):
        import mlx.core as mx

        return lambda x: good(fmt)(mx.stop_gradient(x))

    return carrying


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


# --- planting ---------------------------------------------------------------------------------------------------


def find(where: str) -> tuple[Any, str, Any]:
    """Returns the owner (a module or class), the name, and the stored object of a hazard's function."""
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name, inspect.getattr_static(owner, name)


def plant(chosen: Hazard) -> None:
    """Replaces a hazard's function by its faulty version, also where other modules have imported it by name."""
    owner, name, good = find(chosen.where)
    faulty = chosen.fault(good)
    setattr(owner, name, faulty)
    for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == "halfstep"]:
        for key in [k for k, value in vars(module).items() if value is good]:
            setattr(module, key, faulty)


def run_tests(task: tuple[int | None, list[str]]) -> tuple[int | None, int, str]:
    """Runs tests in this process, with a fault if one is given; returns pytest's exit code and output."""
    index, tests = task
    os.chdir(ROOT)
    os.environ["COLUMNS"] = "200"  # else pytest cuts off why a test failed
    with tempfile.TemporaryFile("w+") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        import pytest

        try:
            if index is not None:
                plant(HAZARDS[index])
            code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))
        except Exception:  # the function is not there any more
            traceback.print_exc()
            code = -1
        sys.stdout.flush()
        sys.stderr.flush()
        output.seek(0)
        return index, code, output.read()[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="hazards whose name or function has such a word")
    words = parser.parse_args().only
    chosen = [i for i, h in enumerate(HAZARDS) if any(word in f"{h.name} {h.where}" for word in words)]
    import torch._dynamo.testing
    import torch.distributed.fsdp  # noqa: F401

    # Every task is a fork of this process, which has imported the slowest modules and computed nothing.
    sys.path.insert(0, str(ROOT))
    tests = sorted({HAZARDS[i].test for i in chosen})
    tasks = [(None, tests), *((i, [HAZARDS[i].test]) for i in chosen)]
    failed = 0
    with multiprocessing.get_context("fork").Pool(maxtasksperchild=1) as pool:
        for index, code, output in pool.imap_unordered(run_tests, tasks):
            fine = code == (0 if index is None else 1)
            failed += not fine
            name = "all tests, without a fault" if index is None else HAZARDS[index].name
            expected = "passed" if index is None else "noticed"
            print(f"{expected if fine else 'NOT ' + expected:<14}{name}", flush=True)
            reason = [line for line in output.splitlines() if line.startswith("FAILED ")]
            print("".join(f"{'':<14}{line.partition(' - ')[2]}\n" for line in reason) if fine else output, end="")
    print(f"{len(tasks) - failed} of {len(tasks)} as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
