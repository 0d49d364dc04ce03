"""Faults in what a device is believed to do, and in the choice that follows."""

import dataclasses

from benchmarks.prove.faults.registry import hazard, nothing


@hazard(
    "emulated formats count as supported",
    "halfstep.torch.numerics.dtypes:answer",
    "tests/conformance/test_dtypes.py::test_the_hardware_decides",
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
    "tests/torch/convert/test_apply.py::test_a_policy_that_does_not_fit_is_refused_and_changes_nothing",
)(nothing)


@hazard(
    "row-wise scaling is emulated tensor-wise",
    "halfstep.torch.numerics.cast:amax_of",
    "tests/conformance/test_cast.py::test_a_scaled_operand_is_the_reference_cast_of_the_scaled_values",
)
def _(good):
    return lambda x, operand: good(x, dataclasses.replace(operand, granularity="tensor"))
