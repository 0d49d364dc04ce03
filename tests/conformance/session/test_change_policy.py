"""A session whose policy changes: it continues as a new session of that policy that was given its state."""

from halfstep.config.weights import carry_over
from halfstep.core.policy import Policy
from tests.conformance.session.sessions import session
from tests.token_batches import batch

BEFORE, AFTER = "bf16-true,emulate=true,compute=e4m3", "bf16-mixed,emulate=true"


def bits(state):
    return {name: (*record[:2], bytes(record.data)) for name, record in state.items() if name != "rng.cpu"}


def of_optimizers(state):
    return {name: value for name, value in bits(state).items() if name.startswith(("optimizer.", "average."))}


def test_it_goes_on_as_a_new_session_with_its_state(slow_backend):
    changed, fresh = (
        session(slow_backend, policy, "training.micro_batches=1", "training.ema=0.5") for policy in (BEFORE, AFTER)
    )
    changed.step(batch(0, changed))
    state = changed.state()
    fresh.load(carry_over(state, fresh.state(), Policy.parse(BEFORE), Policy.parse(AFTER), fresh.config.model))
    changed.change_policy(Policy.parse(AFTER))
    assert (str(changed.policy), changed.applied()) == (AFTER, 1)
    assert bits(changed.state()) == bits(fresh.state())
    assert of_optimizers(changed.state()) == of_optimizers(state)
    losses = [each.read(each.step(batch(1, each)))["loss"] for each in (changed, fresh)]
    assert losses[0] == losses[1]
    assert bits(changed.state()) == bits(fresh.state())
