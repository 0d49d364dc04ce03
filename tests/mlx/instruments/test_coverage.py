"""The list of functions that a policy reached."""

import mlx.core as mx
from mlx import optimizers

from halfstep.core.audit.coverage import IN_COMPUTE
from halfstep.mlx import prepare
from tests.mlx.stock import MODELS


def coverage_of(name, policy="bf16-mixed"):
    build, loss_fn, batch = MODELS[name]
    run = prepare(build(), optimizers.SGD(0.1), policy)
    before = run.state_dict()
    found = run.coverage(loss_fn, batch)
    after = run.state_dict()
    assert all(mx.array_equal(array, after[key]) for key, array in before.items())
    return found


def test_every_island_product_and_meeting_is_listed_with_its_module_and_how_it_ran():
    found = coverage_of("GPT-2, by hand")
    rows = {(row.function, row.module): (row.how, row.why, row.calls) for row in found.rows}
    assert rows["softmax", "block.attention"] == ("covered", "the softmax format inside, compute out", 1)
    assert rows["add", "the model"] == ("covered", "fp32 inside, compute out", 1)  # positions
    assert rows["iadd", "block.attention"] == ("covered", "fp32 inside, compute out", 1)  # the mask
    assert rows["matmul", "the model"] == ("covered", "in compute", 1)  # the tied head
    assert rows["matmul", "block.attention"] == ("unchanged", IN_COMPUTE, 2)
    assert rows["cross_entropy", "the loss function"] == ("unchanged", "it is given fp32", 1)
    assert "1 softmax (block.attention): covered, the softmax format inside, compute out" in str(found)


def test_what_loses_precision_and_belongs_to_no_role_is_pointed_out():
    assert not [row for row in coverage_of("Llama").uncovered if row.module != "the loss function"]
    (row,) = [row for row in coverage_of("mixture of experts").uncovered if row.function == "sum"]
    assert row == ("sum", "the model", "unchanged", "computed in bfloat16, no role reaches it", 1)
    assert "run.coverage" in prepare(MODELS["LSTM"][0](), optimizers.SGD(0.1), "bf16-mixed").summary()
