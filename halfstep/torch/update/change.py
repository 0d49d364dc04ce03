"""Another policy in the middle of a run: what is refused, and what a run keeps beside masters and moments.

Masters are in the model and moments in the optimizers, which stay. The rest belongs to the run.
"""

from torch import Tensor

from halfstep.config.model import owner
from halfstep.config.policy_schedule import check_change
from halfstep.core.errors import GradientsError, ParallelError, PolicyChangeError
from halfstep.core.policy import Policy
from halfstep.core.roles import Value
from halfstep.torch.convert.apply import adopt
from halfstep.torch.convert.resolve import ModelPolicy, names_of, resolve
from halfstep.torch.parallel.ranks import in_group
from halfstep.torch.update.checks import check_given
from halfstep.torch.update.parts import RunParts


def check_changed(run: RunParts, now: Policy) -> ModelPolicy:
    """Returns another policy, resolved for the model; refuses one that would round what a run has learned."""
    if run.sharded is not None:
        raise ParallelError(
            "the model is sharded, and FSDP has put a class of its own in front of the model's",
            hint="prepare and shard a second model under the new policy, and load run.state_dict()['tensors'] "
            "without `scale.*` into its run, with load_state of halfstep.torch.state",
        )
    if run.accumulation.begun:
        raise GradientsError(
            "gradients wait for their update, at the loss scale of the policy that computed them",
            hint="change the policy after run.update(), or drop the gradients with run.forget()",
        )
    check_change(run.policy, now, names_of(run.model, None), run.masters.held)
    resolved = resolve(run.model, now)
    check_given(run.optimizers, run.model, resolved)
    if in_group() and _exchanged(run, run.policy) != _exchanged(run, now):
        raise PolicyChangeError(
            f"`{now}` holds or reduces other things than `{run.policy}`, and which gradients DDP averages was "
            "settled when it wrapped the model",
            hint="give both policies the same `param`, `accumulate` and `reduce`: bf16-mixed and fp8-mixed do",
        )
    return resolved


def _exchanged(run: RunParts, policy: Policy) -> list[Value]:
    """Returns what a policy says about the exchange of gradients between replicas."""
    values = policy.resolve(names_of(run.model, None))
    held = [values[owner(name)].values["param"] for name in run.masters.held]
    return [policy.accumulate, policy.reduce, *held]


class CarriedState:
    """What a run keeps: averages, counts, and what two policies have in common of scales and measurements."""

    def __init__(self, run: RunParts):
        self.policy = run.policy
        self.counts = run.num_applied, run.skipped
        self.scale_state = run.scale_state
        self.wrappers = run.found_wrappers  # DDP takes what is to be sent once, and both send the same
        self.averages: dict[str, Tensor] = {} if run.averages is None else run.averages.named()
        self.amaxes: dict[str, Tensor] = {} if run.amaxes is None else run.amaxes.named()
        measured = run.conversion.measured
        self.narrow = {} if measured is None else dict(measured.narrow)

    def restore(self, run: RunParts) -> None:
        """Gives it to the run under its new policy; amaxes of layers that both delay are among it."""
        run.num_applied, run.skipped = self.counts
        run.found_wrappers = self.wrappers
        if run.policy.scale == self.policy.scale:
            run.scale_state = self.scale_state
        pairs = [(run.averages, self.averages), (run.amaxes, self.amaxes)]
        for now, before in pairs:
            for name, value in ({} if now is None else now.named()).items():
                if name in before:
                    value.copy_(before[name])
        if run.policy == self.policy and self.narrow:
            run.conversion = adopt(run.model, run.conversion, self.narrow)
