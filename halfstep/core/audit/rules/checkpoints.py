"""HS6xx: what checkpoints hold, and what a resume makes of it."""

from collections.abc import Callable, Iterator
from itertools import pairwise

from halfstep.core.audit.finding import Finding, Rule, define_rule
from halfstep.core.audit.record import CheckpointFacts, Record, is_narrow


@define_rule(
    "HS601",
    "masters rebuilt from rounded weights",
    "error",
    shows="The weights that a resume would round.",
    what="A checkpoint to resume from holds weights in a format below fp32, while training steps fp32 masters.",
    why="The resumed run continues from rounded weights, and everything below 1/256 of each that training had "
    "gathered is gone: the loss jumps, or slowly falls behind.",
    fix="Save the fp32 masters: the state dict of the fp32 model, or of the optimizer that holds them. "
    "`halfstep.integrations.state` and `run.state_dict()` do.",
    needs="",
)
def check_masters_saved(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per checkpoint that lost its masters, and one for a load that was seen to."""
    live = [w for w in record.weights if w.trainable and w.optimizer and not is_narrow(w.stepped)]
    for facts in record.checkpoints[-1:]:  # the newest is what a run resumes from
        rounded = _rounded_weights(facts, {w.name for w in live})
        if rounded:
            yield rule.finding(
                f"`{facts.path}` holds {len(rounded)} weights in {facts.weights[rounded[0]]}, without masters and "
                "beside fp32 moments: a resume begins with rounded weights",
                *rounded,
                place=facts.path,
                evidence={"weights": len(rounded)},
                confidence="certain" if live else "likely",
            )
    loads = record.calls_of("load")
    if any(call.target == "moments" for call in loads):  # without them it is the start of a fine-tuning
        for call in loads:
            if call.target == "weights" and (count := call.numbers.get("rounded", 0)):
                yield rule.finding(
                    f"{count:.0f} weights that are stepped in fp32 were loaded from a narrower format, together "
                    "with an optimizer's state",
                    place=call.place,
                    evidence={"weights": count},
                )


def _rounded_weights(facts: CheckpointFacts, live: set[str]) -> list[str]:
    """Returns weights in a narrow format whose moments, or whose masters in the live run, are fp32."""
    wide = {name.rpartition("/")[0] for name, fmt in facts.moments.items() if not is_narrow(fmt)}
    return [
        name
        for name, fmt in facts.weights.items()
        if is_narrow(fmt) and name not in facts.masters and (name in wide or (name in live and facts.moments))
    ]


@define_rule(
    "HS602",
    "formats drift between checkpoints",
    "error",
    shows="The weights whose format changed.",
    what="The same weight has one format in a checkpoint and another in the next.",
    why="Something cast the model between the two, such as a `.half()` before a save or a loader with "
    "`dtype=auto`: what narrows once is lost for good, also if a later checkpoint is wide again.",
    fix="Find the cast between the two steps. If the precision was changed on purpose, resume with `--policy`, "
    "which converts exactly and records it.",
    needs="two checkpoints",
)
def check_weight_drift(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per pair of checkpoints that differ, unless another policy explains it."""
    for path, changed, message in _drifts(record, lambda facts: facts.weights | facts.masters):
        yield rule.finding(message, *changed, place=path, evidence={"weights": len(changed)})


@define_rule(
    "HS603",
    "moments change format on load",
    "error",
    shows="The moments whose format changed.",
    what="The moments of an optimizer have one format when they are saved and another after they are loaded.",
    why="`Optimizer.load_state_dict` of torch casts fp32 moments to the format of the weight. In bf16 the second "
    "moment stands still from then on.",
    fix="Keep trainable weights in fp32, or load the state of the optimizer before the model is cast; "
    "`halfstep.torch.AdamW` keeps its moments' format when it loads.",
    needs="",
)
def check_moment_drift(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per load that cast moments, and per pair of checkpoints that differ."""
    for call in record.calls_of("load"):
        if call.target == "moments" and (cast := call.numbers.get("narrowed", 0)):
            yield rule.finding(
                f"loading an optimizer's state cast {cast:.0f} fp32 moments to the format of their weights",
                place=call.place,
                evidence={"moments": cast},
            )
    for path, changed, message in _drifts(record, lambda facts: facts.moments):
        yield rule.finding(f"the moment {message}", *changed, place=path, evidence={"moments": len(changed)})


@define_rule(
    "HS604",
    "scaler state not saved",
    "warning",
    shows="The checkpoint, in the place.",
    what="Training uses a dynamic loss scale, and the checkpoints that it writes do not hold it.",
    why="A resumed run begins at the first scale, 65536 by default: it skips updates until the scale has fallen "
    "to where it was, and takes other steps than the uninterrupted run.",
    fix='Save and load `scaler.state_dict()` beside the optimizer\'s: `{"scaler": scaler.state_dict(), ...}`.',
    needs="",
)
def check_scaler_saved(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding for the newest checkpoint to resume from that lacks it."""
    saved = [facts for facts in record.checkpoints if facts.moments]  # without them it is no place to resume from
    if saved and saved[-1].scaler is False:
        yield rule.finding(
            f"`{saved[-1].path}` holds the state of the optimizer and not that of the loss scaler",
            place=saved[-1].path,
        )


@define_rule(
    "HS605",
    "unfinished newest checkpoint",
    "error",
    shows="What is missing, in the message.",
    what="The newest checkpoint is not complete: the process that wrote it was killed, or the disk was full.",
    why="Loaders that take the newest folder, such as `get_last_checkpoint`, do not look whether it is whole: a "
    "resume fails, or begins with some weights freshly initialized.",
    fix="Remove or rename that folder and resume from the one before. halfstep's own checkpoints are whole or "
    "absent.",
    needs="",
)
def check_completeness(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields a finding if the newest of the checkpoints is not whole."""
    for facts in record.checkpoints[-1:]:
        if not facts.complete:
            yield rule.finding(f"`{facts.path}` is not complete: {facts.problem}", place=facts.path)


def _drifts(
    record: Record, formats: Callable[[CheckpointFacts], dict[str, str]]
) -> Iterator[tuple[str, list[str], str]]:
    """Yields path, changed names and message of each checkpoint whose formats differ from those of the one before.

    A change of policy between two checkpoints explains such a change.
    """
    for before, after in pairwise(record.checkpoints):
        was, now = formats(before), formats(after)
        changed = [name for name in was if name in now and was[name] != now[name]]
        if changed and before.policy == after.policy:
            first = changed[0]
            message = f"`{first}` is {was[first]} in `{before.path}` and {now[first]} in `{after.path}`"
            yield after.path, changed, message + (f"; so are {len(changed) - 1} more" if changed[1:] else "")
