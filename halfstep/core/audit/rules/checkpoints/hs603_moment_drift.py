"""HS603: moments that change their format when they are loaded, or from one checkpoint to the next."""

from collections.abc import Iterator
from itertools import pairwise

from halfstep.core.audit.finding import Finding, Rule
from halfstep.core.audit.record import Record

RULE = Rule(
    id="HS603",
    name="moments change format on load",
    severity="error",
    shows="The moments whose format changed.",
    what="The moments of an optimizer have one format when they are saved and another after they are loaded.",
    why="`Optimizer.load_state_dict` of torch casts fp32 moments to the format of the weight. In bf16 the second "
    "moment stands still from then on.",
    fix="Keep trainable weights in fp32, or load the state of the optimizer before the model is cast; "
    "`halfstep.torch.AdamW` keeps its moments' format when it loads.",
)


def check(record: Record) -> Iterator[Finding]:
    """Yields one finding per load that cast moments, and per pair of checkpoints that differ."""
    for call in record.calls_of("load"):
        if call.target == "moments" and (cast := call.numbers.get("narrowed", 0)):
            yield RULE.finding(
                f"loading an optimizer's state cast {cast:.0f} fp32 moments to the format of their weights",
                place=call.place,
                evidence={"moments": cast},
            )
    for before, after in pairwise(record.checkpoints):
        was, now = before.moments, after.moments
        changed = [name for name in was if name in now and was[name] != now[name]]
        if changed and before.policy == after.policy:
            first = changed[0]
            yield RULE.finding(
                f"the moment `{first}` is {was[first]} in `{before.path}` and {now[first]} in `{after.path}`"
                + (f"; so are {len(changed) - 1} more" if changed[1:] else ""),
                *changed,
                place=after.path,
                evidence={"moments": len(changed)},
            )
