"""The precision policy: one format for each role, one meaning on every backend.

A `Policy` holds a value for each role (roles.py) and rules for modules (rules.py). It has a text form for a
command line and a table form for TOML, and both read back as the same policy:

    bf16-mixed                                        a preset
    bf16-mixed,norm=bf16                              a preset, then roles that differ
    param=fp32,compute=bf16                           no preset: all other roles are fp32
    bf16-mixed; blocks.*.mlp.*: compute=e4m3; lm_head: compute=fp32           rules, after semicolons

Names that other libraries have for a preset are read as that preset (OTHER_NAMES). Presets expand to roles and are
forgotten. `str(policy)` starts from the preset that leaves the fewest differences, so two policies that mean the
same print the same. A wide `compute`, in a rule too, also sets `grad` unless it is given.

Narrow formats (8 bits or less) are for matmul operands alone: activations, the residual stream and the
results of matmuls stay in the `compute` of the whole model. So a narrow format lives in rules, which name
the matmuls: `bf16-mixed,compute=e4m3` is short for `bf16-mixed; **: compute=e4m3`.

fp8-mixed says `measured` because a preset is a promise: it is never slower than bf16-mixed. Below some width,
which differs by device, casts and transposed copies cost a layer more than the faster matmul saves, so the preset
times each size when a model is prepared. `fp8-mixed,compute=e4m3` forces fp8; under emulation nothing is timed.
"fp32" is fp32. TF32 on NVIDIA and bf16 passes on TPU are other formats; to get TF32, ask for `tf32`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from halfstep.core.errors import (
    AutoPolicyError,
    PolicyConflictError,
    PolicyError,
    PolicySyntaxError,
    RoleValueError,
    UnknownPresetError,
    did_you_mean,
    one_of,
    type_name,
)
from halfstep.core.formats import BF16, E4M3, E5M2, FP16, FP32, Format
from halfstep.core.roles import (
    ROLES,
    Accumulator,
    Evaluation,
    Operand,
    Param,
    Value,
    check_offered,
    is_narrow,
    needs_loss_scale,
    parse_value,
    print_value,
)
from halfstep.core.rules import Resolved, Rule, check_role, merge, parse_items, resolve, with_grad
from halfstep.core.scaling import DynamicScale, NoScale, Scale, StaticScale, is_power_of_two, nearest_power

EVERYWHERE = "**"
SMALLEST_FP16 = f"{FP16.smallest_subnormal:.0e}"


@dataclass(frozen=True)
class Policy:
    """A value for each role, and rules. The defaults are fp32 throughout. ROLES says what each role is."""

    param: Param = Param(FP32)
    compute: Operand = Operand(FP32)
    matmul: Accumulator = Accumulator()
    grad: Operand = Operand(FP32)
    grad_weight: Format = FP32
    accumulate: Format = FP32
    reduce: Format = FP32
    moments: Format = FP32
    norm: Format = FP32
    softmax: Format = FP32
    loss: Format = FP32
    router: Format = FP32
    rope: Format = FP32
    buffers: Format = FP32
    eval: Evaluation = Evaluation()
    export: Format = FP32
    scale: Scale = field(default_factory=NoScale)
    emulate: bool = False
    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for role, value in self.roles().items():
            if isinstance(value, str):
                raise PolicySyntaxError(
                    f"Policy({role}={value!r}) is a text", hint='Policy.parse("bf16-mixed") reads it'
                )
            check_offered(role, value)
        object.__setattr__(self, "rules", merge(self.rules))
        self._simplify_eval()
        self._check_base()
        self._check_scale()

    @property
    def is_measured(self) -> bool:
        """Whether a rule calls matmuls `measured`: narrow if that is faster."""
        values = [value for rule in self.rules for _, value in rule.changes]
        return any(isinstance(value, Operand) and value.measured for value in values)

    @property
    def warnings(self) -> list[str]:
        """What runs as asked and is probably not wanted."""
        warnings, scale = [], f"`scale={print_value(self.scale)}`"
        if not isinstance(self.scale, NoScale) and not self._weak():
            range_ = "" if self.grad.format == FP32 else f"{self.grad.format} has fp32's range, and "
            warnings.append(f"{scale} has nothing to protect: {range_}only fp16 needs a loss scale")
        if isinstance(self.scale, StaticScale) and not is_power_of_two(self.scale.value):
            why = f"{self.scale.value:g} is not a power of two, {nearest_power(self.scale.value)} is"
            warnings.append(f"{scale} rounds every gradient twice: {why}")
        return warnings

    def roles(self) -> dict[str, Value]:
        """Returns the value of each role for the whole model, without rules."""
        return {name: getattr(self, name) for name in ROLES}

    def resolve(self, names: Sequence[str]) -> dict[str, Resolved]:
        """Returns what holds for each of a model's names. A rule that matches none, or a tie, is an error."""
        return resolve(self.roles(), self.rules, names)

    def evaluation(self) -> "Policy":
        """Returns the policy of evaluation: this one, or with the format of `eval` everywhere."""
        if self.eval.format is None:
            return self
        operand = Operand(self.eval.format)
        rules = [(rule.glob, [c for c in rule.changes if not isinstance(c[1], Operand)]) for rule in self.rules]
        return replace(
            self,
            compute=operand,
            grad=operand,
            scale=DynamicScale() if needs_loss_scale(operand.format) else NoScale(),
            eval=Evaluation(),
            rules=tuple(Rule(glob, tuple(changes)) for glob, changes in rules if changes),
        )

    def without_training(self) -> "Policy":
        """Returns the policy without what only training uses: split masters, moments, formats of gradients."""
        rules = [Rule(rule.glob, tuple(_without_updates(dict(rule.changes)).items())) for rule in self.rules]
        return replace(
            self,
            **_without_updates({"param": self.param, "compute": self.compute}),  # type: ignore[arg-type]
            accumulate=FP32,
            moments=FP32,
            rules=tuple(rule for rule in rules if rule.changes),
        )

    @classmethod
    def parse(cls, text: str, *, auto: "Policy | None" = None) -> "Policy":
        """Reads the text form. `auto` is the policy that was chosen for the name `auto`, if any."""
        try:
            return read(text, auto=auto is not None).build(auto)
        except PolicyError as error:
            raise error.within(f"in policy `{text}`") from None

    @classmethod
    def from_table(cls, table: Mapping[str, Any], *, auto: "Policy | None" = None) -> "Policy":
        """Reads the table form, as TOML gives it."""
        return read_table(table, auto=auto is not None).build(auto)

    def __str__(self) -> str:
        return str(self._spell())

    def to_table(self) -> dict[str, Any]:
        """Returns the table form: strings and booleans, for TOML or JSON."""
        return self._spell().to_table()

    def _spell(self) -> "Spelling":
        """Returns the shortest way to write the policy; of two as short, that of the earlier preset."""
        spellings = [spelling for name in PRESETS if (spelling := self._against(name)) is not None]
        return min(spellings, key=lambda spelling: spelling.length)

    def _against(self, preset: str) -> "Spelling | None":
        base = PRESETS[preset]
        differing = {role: value for role, value in self.roles().items() if value != getattr(base, role)}
        # `compute` also sets `grad`, so whether `grad` must be written depends on it.
        followed = {**base.roles(), **with_grad({r: v for r, v in differing.items() if r == "compute"})}
        items = {r: v for r, v in self.roles().items() if v != followed[r] or (r == "compute" and r in differing)}
        ours = {rule.glob: dict(rule.changes) for rule in self.rules}
        for rule in base.rules:
            mine = ours.get(rule.glob, {})
            if not mine.keys() >= dict(rule.changes).keys():
                return None  # text can add to a preset's rules and change them, not remove them
            kept = {role: v for role, v in mine.items() if dict(rule.changes).get(role) != v}
            ours[rule.glob] = {"grad": mine["grad"], **kept} if "compute" in kept and "grad" in mine else kept
        rules = tuple(Rule(glob, tuple(changes.items())) for glob, changes in ours.items() if changes)
        return Spelling(preset, items, rules)

    def _simplify_eval(self) -> None:
        """Writes an `eval` in the format of training as `eval=compute`, if no rule changes compute."""
        ruled = any(role == "compute" for rule in self.rules for role, _ in rule.changes)
        if self.eval.format == self.compute.format and not ruled:
            object.__setattr__(self, "eval", Evaluation())

    def _check_base(self) -> None:
        for role in ("compute", "grad"):
            fmt = getattr(self, role).format
            if is_narrow(fmt):
                raise RoleValueError(
                    f"{role}={fmt} cannot hold for a whole model: {fmt} is for matmul operands, "
                    "not for the activations between them",
                    hint=f'name the matmuls in a rule, such as Rule.parse("{EVERYWHERE}", "{role}={fmt}")',
                )

    def _weak(self) -> list[str]:
        """Returns the roles, with their formats, whose gradients leave the range unless the loss is scaled."""
        return [
            f"{role}={value.format}"
            for changes in [self.roles().items(), *(rule.changes for rule in self.rules)]
            for role, value in changes
            if isinstance(value, Operand) and needs_loss_scale(value.format)
        ]

    def _check_scale(self) -> None:
        if isinstance(self.scale, NoScale) and (weak := self._weak()):
            raise PolicyConflictError(
                f"`{weak[0]}` without a scale: gradients below {SMALLEST_FP16} would become zero",
                hint="add `scale=dynamic`, start from `fp16-mixed`, or use bf16, which has fp32's range",
            )


def _without_updates(roles: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the roles of weights that no update changes. Gradients, which nobody asks for, follow the others."""
    kept = {role: value for role, value in roles.items() if role not in ("grad", "grad_weight", "moments")}
    if isinstance(compute := kept.get("compute"), Operand):
        kept["grad"] = compute
    if isinstance(param := kept.get("param"), Param):
        kept |= {"param": Param(param.format), "grad_weight": param.format}
    return kept


@dataclass(frozen=True)
class Spelling:
    """The parts of a policy's text: a preset, the roles that differ from it, and the rules that are added."""

    base: str
    items: Mapping[str, Value]
    rules: tuple[Rule, ...]

    @property
    def length(self) -> int:
        """How many changes there are to the base."""
        return len(self.items) + sum(len(rule.changes) for rule in self.rules)

    def build(self, auto: Policy | None = None) -> Policy:
        """Returns the policy."""
        base = auto if self.base == "auto" else PRESETS[self.base]
        if base is None:
            raise AutoPolicyError(
                "`auto` chooses by measuring, and nothing is measured here",
                hint=f"`halfstep probe` measures; or name {one_of(PRESETS)}",
            )
        wide: dict[str, Value] = {}
        narrow: dict[str, Value] = {}
        for role, value in self.items.items():
            (narrow if isinstance(value, Operand) and is_narrow(value.format) else wide)[role] = value
        rules = [*base.rules, *self.rules]
        if narrow:
            rules.insert(len(base.rules), Rule(EVERYWHERE, tuple(narrow.items())))
            self._check_said_once(narrow)
        return replace(base, **with_grad(wide), rules=tuple(rules))  # type: ignore[arg-type]

    def _check_said_once(self, narrow: Iterable[str]) -> None:
        for rule in self.rules:
            for role in narrow:
                if rule.glob == EVERYWHERE and role in dict(rule.changes):
                    raise PolicyConflictError(
                        f"role `{role}` is given for `{EVERYWHERE}` twice", hint="keep one of the two"
                    )

    def __str__(self) -> str:
        items = [f"{role}={print_value(value)}" for role, value in self.items.items()]
        return "; ".join([",".join([self.base, *items]), *map(str, self.rules)])

    def to_table(self) -> dict[str, Any]:
        """Returns the same as a table of strings and booleans."""
        table: dict[str, Any] = {"preset": self.base}
        for role, value in self.items.items():
            table[role] = value if isinstance(value, bool) else print_value(value)
        if self.rules:
            table["rules"] = {rule.glob: rule.changes_text for rule in self.rules}
        return table


def as_policy(given: "Policy | str") -> Policy:
    """Returns a policy, given itself or its text; Lightning's 16 and 32 may be numbers."""
    if isinstance(given, str | int):
        return Policy.parse(str(given))
    if not isinstance(given, Policy):
        raise PolicySyntaxError(
            f"the policy is {type_name(given)}",
            hint="give a Policy, or its text, such as `bf16-mixed` or `bf16-mixed,norm=bf16`",
        )
    return given


def read(text: str, *, auto: bool = True) -> Spelling:
    """Reads the text form without building the policy; with `auto`, hints may offer it as a base."""
    first, *rest = text.split(";")
    head, comma, items = first.partition(",")
    if "=" in head:
        head, comma, items = "fp32", ",", first
    base = _preset(head.strip(), auto)
    rules = tuple(_read_rules(rest))
    return Spelling(base, parse_items(items, in_rule=False) if comma else {}, rules)


def read_table(table: Mapping[str, Any], *, auto: bool = True) -> Spelling:
    """Reads the table form without building the policy, as `read` does."""
    base = _preset(_check_string("preset", table.get("preset", "fp32")), auto)
    items: dict[str, Value] = {}
    for role, value in table.items():
        if role in ("preset", "rules"):
            continue
        check_role(role, in_rule=False)
        text = ("true" if value else "false") if isinstance(value, bool) else _check_string(role, value)
        items[role] = parse_value(role, text)
    rules = table.get("rules", {})
    if not isinstance(rules, Mapping):
        raise PolicySyntaxError(
            f"policy.rules is {rules!r}; it must be a table", hint='such as "lm_head" = "compute=fp32"'
        )
    parsed = tuple(Rule.parse(glob, _check_string(glob, text)) for glob, text in rules.items())
    return Spelling(base, items, parsed)


def _read_rules(parts: Iterable[str]) -> Iterator[Rule]:
    globs: set[str] = set()
    for part in parts:
        glob, colon, changes = (piece.strip() for piece in part.partition(":"))
        if not colon:
            raise PolicySyntaxError(
                f"`{part.strip()}` is not a rule", hint="write a rule like `lm_head: compute=fp32`"
            )
        if glob in globs:
            raise PolicyConflictError(f"two rules for `{glob}`", hint="write one rule with all of its roles")
        globs.add(glob)
        yield Rule.parse(glob, changes)


def read_as(text: str) -> str:
    """Says which preset a policy starts from, if it is written with a name of another library; else nothing."""
    name = text.partition(";")[0].partition(",")[0].strip()
    if _normalize_name(name) not in OTHER_NAMES:
        return ""
    preset, where = OTHER_NAMES[_normalize_name(name)]
    return f"`{name}` is read as `{preset}`, which is what it means in {where}"


def _preset(name: str, auto: bool) -> str:
    """Returns the preset of that name, which may be another library's."""
    known = _normalize_name(name)
    if known in PRESETS or known == "auto":
        return known
    if known in OTHER_NAMES:
        return OTHER_NAMES[known][0]
    if known in NOT_OFFERED:
        why, instead = NOT_OFFERED[known]
        raise UnknownPresetError(f"`{name}` is not a preset: {why}", hint=instead)
    offered = [*PRESETS, *["auto"] * auto]
    raise UnknownPresetError(
        f"unknown preset `{name}`; presets are {', '.join(offered)}, and anything else is role=value",
        hint=did_you_mean(known, offered, otherwise="such as `bf16-mixed` or `bf16-mixed,norm=bf16`"),
    )


def _normalize_name(name: str) -> str:
    """Returns a name as our tables have it: `BF16_Mixed` is `bf16-mixed`."""
    return name.lower().replace("_", "-")


def _check_string(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise PolicySyntaxError(
            f"policy key `{key}` is {value!r}; it must be a string", hint='such as norm = "fp32"'
        )
    return value


_BF16_MIXED = Policy(compute=Operand(BF16), grad=Operand(BF16))

PRESETS: dict[str, Policy] = {
    "fp32": Policy(),
    "bf16-mixed": _BF16_MIXED,
    "bf16-true": replace(_BF16_MIXED, param=Param(BF16), grad_weight=BF16, export=BF16),
    "fp16-mixed": Policy(compute=Operand(FP16), grad=Operand(FP16), scale=DynamicScale()),
    "fp8-mixed": replace(
        _BF16_MIXED,
        rules=(Rule(EVERYWHERE, (("compute", Operand(E4M3, measured=True)), ("grad", Operand(E5M2)))),),
        eval=Evaluation(BF16),
    ),
}

# What other libraries call a precision: our preset, and where the name is from. Case and `_` make no other name.
_ACCELERATE, _LIGHTNING, _KERAS = "Accelerate (mixed_precision=)", "Lightning (precision=)", "Keras"
_COMPOSER = "Composer (precision=)"
OTHER_NAMES: dict[str, tuple[str, str]] = {
    "no": ("fp32", _ACCELERATE),
    "32": ("fp32", _LIGHTNING),
    "32-true": ("fp32", _LIGHTNING),
    "float32": ("fp32", _KERAS),
    "bf16": ("bf16-mixed", f"{_ACCELERATE} and {_LIGHTNING}"),
    "mixed-bfloat16": ("bf16-mixed", _KERAS),
    "amp-bf16": ("bf16-mixed", _COMPOSER),
    "fp16": ("fp16-mixed", _ACCELERATE),
    "16": ("fp16-mixed", _LIGHTNING),
    "16-mixed": ("fp16-mixed", _LIGHTNING),
    "mixed-float16": ("fp16-mixed", _KERAS),
    "amp-fp16": ("fp16-mixed", _COMPOSER),
    "fp8": ("fp8-mixed", _ACCELERATE),
}
# Names that mean something else than any preset, or two things: why they are refused, and what to write instead.
_FP16 = (
    "weights in fp16 lose updates below 6e-8, and nothing scales their gradients",
    "write `fp16-mixed`: the weights are fp32, and the loss is scaled",
)
_FP64 = ("no role is wider than fp32", "write `fp32`")
NOT_OFFERED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("16-true", "fp16-true", "float16", "half"), _FP16),
    "bfloat16": (
        "it has two meanings: bf16 weights in Keras, autocast from fp32 weights in many training scripts",
        "write `bf16-mixed` for fp32 weights, or `bf16-true` for bf16 weights",
    ),
    **dict.fromkeys(
        ("mixed", "amp", "mixed-precision", "o1", "o2"),
        ("it does not say which format", "write `bf16-mixed`, or `fp16-mixed` where bf16 is slow"),
    ),
    "tf32": ("it is a way to multiply fp32 numbers", "write `fp32,compute=tf32`"),
    "transformer-engine": (
        "in Lightning it holds the weights in bf16, and multiplies in fp8 with the package of that name",
        "write `fp8-mixed` for fp8 with fp32 weights, or `fp8-mixed,param=bf16` for bf16 weights",
    ),
    **dict.fromkeys(("64", "64-true", "float64"), _FP64),
}
