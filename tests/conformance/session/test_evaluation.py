"""Evaluating and sampling: in the format of `eval`, and without a trace in the state."""

from halfstep.training.run.trained import generate
from tests.conformance.session.sessions import session
from tests.token_batches import batch


def test_evaluation_changes_nothing_and_is_in_the_eval_format(backend):
    s, reference = session(backend, "fp8-mixed,emulate=true"), session(backend, "bf16-mixed,emulate=true")
    evaluated = [batch(1, s)[0]]
    before = s.state()
    total, count = s.evaluate(evaluated)
    assert count == 2 * 8
    # fp8-mixed evaluates in bf16: the same as bf16-mixed does
    assert total == reference.evaluate(evaluated)[0]
    assert s.state() == before
    assert str(s.model.blocks[0].mlp.up.precision.operand.format) == "e4m3"
    assert s.evaluate([]) == (0, 0)


def test_sampling_is_a_function_of_the_seed_and_greedy_at_zero(backend):
    s = session(backend)
    first = list(generate(s, [1, 2], 12, 1.0, 0, seed=3, alphabet=64))
    assert first == list(generate(s, [1, 2], 12, 1.0, 0, seed=3, alphabet=64))
    assert first != list(generate(s, [1, 2], 12, 1.0, 0, seed=4, alphabet=64))
    greedy = list(generate(s, [1, 2], 5, 0.0, 0, seed=0, alphabet=64))
    assert greedy == list(generate(s, [1, 2], 5, 1.0, 1, seed=9, alphabet=64))  # the top one of one
    assert all(0 <= token < 64 for token in first)
