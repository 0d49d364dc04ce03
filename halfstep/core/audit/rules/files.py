"""HS7xx: what the numbers in a file show.

A file alone shows a state, and not how it came about: what is odd in it is a note. It is an error where training
is proved, by an optimizer's state that holds the tensor, or by a file from before that differs from it.
"""

from collections.abc import Iterator

from halfstep.core.audit.finding import Finding, Rule, define_rule
from halfstep.core.audit.record import CheckpointFacts, Record, StoredTensor, is_narrow

_ENOUGH = 64  # numbers: fewer may be round by chance
_MANY = 0.1  # of the numbers of a tensor


def _newest(record: Record) -> Iterator[tuple[CheckpointFacts, list[StoredTensor]]]:
    """Yields the newest checkpoint and its weights, if numbers were read."""
    for facts in record.checkpoints[-1:]:
        if facts.tensors:
            yield facts, [each for each in facts.tensors if each.role == "weight"]


def _trained(facts: CheckpointFacts, each: StoredTensor) -> str:
    """Returns how it is known that a weight was trained, or nothing."""
    if _is_stepped(facts, each):
        return "an optimizer holds moments of it"
    return f"it differs from `{facts.before}`" if each.changed else ""


def _is_stepped(facts: CheckpointFacts, each: StoredTensor) -> bool:
    return any(name.rpartition("/")[0] == each.name for name in facts.moments)


def _judged(
    rule: Rule, facts: CheckpointFacts, each: StoredTensor, message: str, proof: str, cause: str
) -> Finding:
    return rule.finding(
        f"{message}; {proof}" if proof else message,
        each.name,
        place=facts.path,
        severity=None if proof else "note",
        cause=cause if proof else f"{cause}, as far as the file shows",
        evidence={"elements": each.elements},
    )


@define_rule(
    "HS701",
    "norm gains at their first values",
    "error",
    shows="The numbers of the tensor.",
    what="Every gain of a norm is exactly 1, or exactly 0 where the model adds 1 to it, as Gemma does: the value "
    "that it began with.",
    why="Near 1 a bf16 number is 1/128 from the next one, and an update of a usual learning rate is a hundred "
    "times smaller: gains that are stepped in bf16 never move, and with them weight decay and part of the "
    "model.",
    fix="Train gains in fp32 (see HS101); then begin again, or from before they were cast.",
    needs="a file of weights",
)
def check_gains(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per norm; an error if it was stepped, or if weights around it moved."""
    for facts, weights in _newest(record):
        moved = {_block(each.name) for each in weights if each.changed}
        for each in weights:
            if each.kind != "norm" or each.constant not in (0.0, 1.0) or "bias" in each.name:
                continue
            around = f"others around it differ from `{facts.before}`" if _block(each.name) in moved else ""
            message = f"`{each.name}` is {each.constant:g} throughout, in {each.format}"
            yield _judged(
                rule, facts, each, message, _trained(facts, each) or around, "norms at their first values"
            )


def _block(name: str) -> str:
    """Returns the layer of a tensor: its name up to the number of the layer."""
    parts = name.split(".")
    digits = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: digits[0] + 1]) if digits else ""


@define_rule(
    "HS702",
    "fp32 that was rounded",
    "error",
    shows="The numbers of the tensor.",
    what="All numbers of an fp32 tensor are numbers of bf16 or fp16: the lower bits of each are zero.",
    why="The tensor was narrow once, and a cast made it wide again: masters that were rebuilt from bf16 "
    "weights, or a file that takes twice the bytes for nothing. What training had gathered below 1/256 of "
    "each weight is gone.",
    fix="Save and load the fp32 masters themselves. If the weights were never wider, store them as they are.",
    needs="a file of weights",
)
def check_rounded(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per tensor; an error if it was trained."""
    for facts, _ in _newest(record):
        for each in facts.tensors:
            if each.role in ("weight", "master") and each.holds is not None and each.elements >= _ENOUGH:
                message = f"`{each.name}` is fp32, and all of its numbers are those of {each.holds}"
                proof = "it is a master" if each.role == "master" else _trained(facts, each)
                yield _judged(rule, facts, each, message, proof, f"fp32 tensors of {each.holds} numbers")


@define_rule(
    "HS703",
    "masters that are not the weights",
    "error",
    shows="The numbers that differ from the rounded master, their share, and those that differ by more than a "
    "step.",
    what="The masters in a checkpoint, rounded to the format of the weights, are not the weights.",
    why="One of the two is old: weights were loaded, merged or synchronized and the masters were not made "
    "again, or masters were stepped and never copied. The next update overwrites one with the other.",
    fix="After writing to weights, write to their masters (`run.edit()` of halfstep does both), and save both "
    "after the same update.",
    needs="a file with masters",
)
def check_masters_agree(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per master. One step of the format alone may be another way of rounding: a note."""
    for facts, _ in _newest(record):
        for each in facts.tensors:
            if each.role == "master" and each.differs:
                far = each.far > 0
                yield rule.finding(
                    f"{each.differs} of the {each.elements} numbers of `{each.name}` are not those of its master"
                    + ("" if far else ", by one step each, as if they were rounded in another way"),
                    each.name,
                    place=facts.path,
                    severity=None if far else "note",
                    confidence=None if far else "likely",
                    cause="masters" if far else "masters that were rounded in another way",
                    evidence={"differ": each.differs, "share": each.differs / each.elements, "far": each.far},
                )


@define_rule(
    "HS704",
    "numbers that do not fit their format",
    "error",
    shows="The numbers that are not finite, at the largest of the format, or below its normal ones, and their "
    "share.",
    what="A stored tensor holds NaN or infinities; or many of its numbers are at the largest number of the "
    "format, or among those with fewer bits.",
    why="A weight that is not finite spoils everything computed from it. What is at the edge of a format was "
    "cut off, and what is below its normal numbers has lost bits.",
    fix="Find the step that made it (`halfstep audit -- python ...`, HS503), and go back to a checkpoint from "
    "before; store in bf16 or fp32 what does not fit fp16.",
    needs="a file of weights",
)
def check_numbers(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per tensor and kind of number; only what is not finite is an error by itself."""
    for facts, _ in _newest(record):
        for each in facts.tensors:
            if each.nonfinite and "mask" not in each.name:
                yield _numbers(rule, facts, each, each.nonfinite, "are not finite", "error")
            if each.format == "fp16" and each.saturated:
                yield _numbers(rule, facts, each, each.saturated, "are at the largest of fp16, 65504", "warning")
            if each.subnormal > _MANY * each.elements:
                yield _numbers(
                    rule, facts, each, each.subnormal, f"are below the normal ones of {each.format}", "note"
                )


def _numbers(
    rule: Rule, facts: CheckpointFacts, each: StoredTensor, count: int, what: str, severity: str
) -> Finding:
    named = f"`{each.moment}` of `{each.name}`" if each.moment else f"`{each.name}`"
    return rule.finding(
        f"{count} of the {each.elements} numbers of {named} {what}",
        each.name,
        place=facts.path,
        severity=severity,
        cause=f"tensors whose numbers {what}",
        evidence={"numbers": count, "share": count / each.elements},
    )


@define_rule(
    "HS705",
    "another format than the model declares",
    "note",
    shows="Both formats, in the message.",
    what="Weights are stored in one format, and `config.json` names another.",
    why="A loader with `dtype=auto` takes the format of `config.json`: fp32 weights are rounded when they are "
    "loaded, without a word, and weights in bf16 take twice the memory.",
    fix="Save the model with the library that wrote `config.json`, or name the format when loading: "
    "`from_pretrained(..., dtype=torch.float32)`.",
    needs="a folder with config.json",
)
def check_declared(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding for the matrices; a warning if loading would round weights that were trained."""
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    for facts, weights in _newest(record):
        declared = names.get((facts.declared or "").removeprefix("torch."))
        other = [each for each in weights if each.kind == "matrix" and each.format != declared]
        if declared is None or not other:
            continue
        rounds = is_narrow(declared) and any(
            not is_narrow(each.format) and _trained(facts, each) for each in other
        )
        yield rule.finding(
            f"`config.json` says {declared}, and {len(other)} matrices are stored in {other[0].format}"
            + (": a loader that follows it rounds what was trained" if rounds else ""),
            *[each.name for each in other],
            place=facts.path,
            severity="warning" if rounds else "note",
            evidence={"matrices": len(other)},
        )


@define_rule(
    "HS706",
    "tied weights that differ",
    "error",
    shows="The numbers that differ, and their share.",
    what="The model says that its head and its embedding are one tensor; the file holds two, and they differ.",
    why="A loader keeps one and drops the other: which, depends on the library, and half of what was trained "
    "is lost.",
    fix="Tie them before training (`model.tie_weights()`) and after any wrapper that copies parameters; or set "
    "`tie_word_embeddings` to false.",
    needs="a folder with config.json",
)
def check_tied(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per head."""
    for facts, weights in _newest(record):
        for each in weights:
            if each.partner and each.differs:
                yield rule.finding(
                    f"{each.differs} of the {each.elements} numbers of `{each.name}` differ from "
                    f"`{each.partner}`, to which config.json ties it",
                    each.name,
                    place=facts.path,
                    evidence={"differ": each.differs, "share": each.differs / each.elements},
                )


@define_rule(
    "HS707",
    "weights that stood still",
    "error",
    shows="How many numbers of the tensor differ from those before: none.",
    what="Between two files no number of a weight changed, while others of its layer were trained.",
    why="Its updates were all below half of the last bit of its format, or no optimizer holds it.",
    fix="Keep trainable weights in fp32 (see HS101), and give all of them to the optimizer.",
    needs="a file, and one from before",
)
def check_still(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per weight. A whole layer, or an fp32 weight, may be frozen on purpose: a note."""
    for facts, weights in _newest(record):
        moved = {_block(each.name) for each in weights if each.changed}
        for each in weights:
            if each.changed != 0 or not moved or (each.kind == "norm" and each.constant in (0.0, 1.0)):
                continue
            stepped = _is_stepped(facts, each)
            narrow = is_narrow(each.format) or each.holds is not None
            is_error = stepped or (narrow and _block(each.name) in moved)
            yield rule.finding(
                f"no number of `{each.name}` ({each.format}) differs from `{facts.before}`"
                + (", and an optimizer holds moments of it" if stepped else ""),
                each.name,
                place=facts.path,
                severity=None if is_error else "note",
                confidence=None if stepped else "likely",
                cause=f"tensors in {each.format}" + ("" if is_error else " that may be frozen"),
                evidence={"elements": each.elements, "changed": 0},
            )


@define_rule(
    "HS708",
    "weights that moved less than their format shows",
    "error",
    shows="The numbers that changed, their share, and how many of those changed by one step of the format.",
    what="Between two files most numbers of a narrow weight did not change, and most that did changed by one "
    "step.",
    why="Updates are about as large as half a step of the format: most round away, and the others become a whole "
    "step, which is too large. The mean of a trained weight moves; its numbers do not.",
    fix="Keep fp32 masters (see HS101). If masters exist and this file is an export of them, nothing is lost "
    "in them.",
    needs="a file, and one from before",
)
def check_small_moves(rule: Rule, record: Record) -> Iterator[Finding]:
    """Yields one finding per weight; a warning if nothing shows that the file is what the optimizer steps."""
    for facts, weights in _newest(record):
        masters = {each.name for each in facts.tensors if each.role == "master"} | facts.masters.keys()
        for each in weights:
            if not each.changed or not is_narrow(each.format) or each.name in masters:
                continue
            if 2 * each.changed < each.elements and 2 * each.by_one > each.changed and each.elements >= _ENOUGH:
                stepped = _is_stepped(facts, each)
                yield rule.finding(
                    f"{each.elements - each.changed} of the {each.elements} numbers of `{each.name}` "
                    f"({each.format}) are those of `{facts.before}`, and {each.by_one} of the {each.changed} "
                    "others moved by one step",
                    each.name,
                    place=facts.path,
                    severity=None if stepped else "warning",
                    confidence=None if stepped else "likely",
                    cause=f"tensors in {each.format}",
                    evidence={
                        "changed": each.changed,
                        "share": 1 - each.changed / each.elements,
                        "by one step": each.by_one,
                    },
                )
