"""Writes the reference pages that come from the code; a test keeps them current.

python docs/generate.py
"""

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

sys.path.insert(0, str(Path(__file__).parents[1]))  # for benchmarks
from benchmarks.study.page import page as study_page
from halfstep.cli.app import app
from halfstep.config.run import RunConfig
from halfstep.config.schema import rows
from halfstep.core import policy, roles, rules
from halfstep.core.audit.engine import registry
from halfstep.core.errors import code_of
from halfstep.core.formats import NAMED, Format
from halfstep.core.policy import NOT_OFFERED, OTHER_NAMES, PRESETS
from halfstep.core.roles import ROLES, print_value
from halfstep.core.scaling import LAWS, Scale
from halfstep.training.telemetry import events as telemetry

HERE = Path(__file__).parent

# The page of each module, its module, what it is for, and its public names: what most people need comes first.
MODULES = {
    "halfstep": ("halfstep", "Policies, number formats and decisions, without a framework."),
    "torch": ("halfstep.torch", "How a policy runs on PyTorch."),
    "jax": ("halfstep.jax", "How a policy runs on JAX."),
    "mlx": ("halfstep.mlx", "How a policy runs on MLX."),
    "accelerate": ("halfstep.integrations.accelerate", "Accelerate with `policy=`."),
    "transformers": ("halfstep.integrations.transformers", "transformers.Trainer with `policy=`."),
    "adapters": ("halfstep.integrations.adapters", "Adapters of PEFT, merged into their own base or not at all."),
    "lightning": ("halfstep.integrations.lightning", "Lightning's Trainer and Fabric under a policy."),
}
API = {
    "halfstep": ["Policy", "cast", "Format", "load_model", "choose", "Choice", "TensorStats", "HalfstepError"],
    "halfstep.torch": [
        *("prepare", "Run", "StepResult", "AdamW", "Muon"),
        *("CastedLinear", "Norm", "LayerNorm", "RMSNorm", "Softmax", "CrossEntropyLoss"),
        *("casts_for", "linear", "attention", "layer_norm", "rms_norm", "softmax", "cross_entropy", "quantize"),
        "linear_cross_entropy",
    ],
    "halfstep.jax": [
        *(
            "init",
            "make_step",
            "State",
            "StepResult",
            "Weighted",
            "check",
            "summary",
            "state_dict",
            "load_state_dict",
        ),
        *("muon", "audit", "Monitor"),
        *("casts_for", "dot_general", "linear", "attention"),
        *("layer_norm", "rms_norm", "softmax", "cross_entropy", "quantize"),
    ],
    "halfstep.mlx": [
        *("prepare", "audit", "Run", "StepResult", "AdamW", "Muon", "CastedLinear", "Norm"),
        *("casts_for", "linear", "attention", "layer_norm", "rms_norm", "softmax", "cross_entropy", "quantize"),
    ],
    "halfstep.integrations.accelerate": ["Accelerator"],
    "halfstep.integrations.transformers": ["Trainer", "PolicyMixin", "AuditCallback"],
    "halfstep.integrations.adapters": ["merge"],
    "halfstep.integrations.lightning": ["HalfstepPrecision", "Fabric", "ModelParallelStrategy", "AuditCallback"],
}
# The methods a page shows, of the classes whose methods a user calls; None is every public one.
METHODS: dict[str, list[str] | None] = {
    "Policy": None,
    "Format": None,
    "TensorStats": None,
    "Run": None,
    "Monitor": ["layers", "layer_numbers", "weight_numbers"],
    "AdamW": ["set_factor"],
    "Muon": ["set_factor", "set_momentum"],
    # Of a framework's class, what it does not have by itself.
    "Accelerator": ["run", "skipped", "evaluation", "summary"],
    "PolicyMixin": ["run", "summary"],
    "HalfstepPrecision": ["prepare", "run", "skipped", "summary"],
    "Fabric": ["run_of"],
}
INTERNAL = {
    "Run": {"scalars", "places", "watch_optimizers", "watch_update", "replay"}
}  # between a run and the modules of its backend


def table(columns: list[str], lines: list[list[str]]) -> str:
    """Returns a Markdown table."""
    marked = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in marked)


def settings() -> str:
    """Returns the page of settings."""
    lines = [[f"`{row.key}`", row.kind, f"`{row.shown}`", row.help] for row in rows(RunConfig)]
    return (
        "# Settings\n\nEvery setting of a run, as written in a recipe file or given with `--set`. Generated from "
        "`halfstep/config/run.py`.\n\n" + table(["setting", "type", "default", "what it is"], lines) + "\n"
    )


AUTO = """## `auto`

`auto` is a measurement with one answer for everyone: `halfstep train`, `halfstep probe`, `prepare(model,
optimizer, "auto")` and, on JAX, `init(params, optimizer, "auto")`. On a CPU a block of the model is trained for
a moment in fp32, bf16 and fp16; on an accelerator matmuls are timed. It takes about three seconds, on JAX also
the time to compile. Every format is timed: one that is too slow for the larger sizes is "at least" so much
slower. The sizes are the recipe's (`halfstep probe gpt2 --set model.width=1024`), or those of your own layers
and the argument `tokens`. The choice and its reason are in the log, the events, the page and every manifest of
a run; in your own loop they are in `run.choice` and `run.summary()` (`state.choice` on JAX). `auto,norm=bf16`
changes what was chosen.
"""
SCALE = """## The loss scale

fp16 needs one: `dynamic` starts at 65536, halves when gradients are not finite, doubles after 2000 finite
steps, and weights micro-batches in the fp32 sum, so that their sizes do not move it. A scale of 1024 or less
that still falls is an alarm, long before its floor stops the run: an event, a line and a row of the page in
`halfstep train`, and one Python warning in your own loop. It reads results that are done already and makes no
step wait (on MLX, the update four before the last). A scale with a format that needs none, and a static one
that is not a power of two, run with a warning.
"""
OTHERS = """## Names of other libraries

These are read as the preset that they mean elsewhere, wherever a policy is named: `--policy bf16`, `policy =
"16-mixed"`, `prepare(model, optimizer, "fp16")`. Case does not matter, nor whether `_` or `-` is written.
Records and pages have the preset's name, and the summary of a run says what a name was read as. In
`bf16-true`, as in Lightning, weights and their gradients are bf16; moments stay fp32 here.
"""


def plain(module: types.ModuleType) -> str:
    """Returns the docstring of a module after its first paragraph, without references to code."""
    text = (module.__doc__ or "").partition("\n\n")[2].rstrip()
    return re.sub(r" \((?:[a-z_]+\.[a-z_]+|[A-Z_]+)\)", "", text)


def grammar() -> str:
    """Returns how a policy is written, from the modules that read it."""
    values = plain(roles).partition("The kinds of value are")[0].rstrip()  # the rest is about the code
    lines = [[f"`{name}`", *_values(role), "yes" if role.in_rules else "no"] for name, role in ROLES.items()]
    parts = ["## How a policy is written", plain(policy), "### Rules", plain(rules), "### Values", values]
    return "\n\n".join([*parts, table(["role", "values", "modifiers", "in rules"], lines)]) + "\n"


def _values(role: roles.Role) -> tuple[str, str]:
    """Returns the values that a role may have, and their modifiers."""
    if role.kind is Scale:
        modifiers = "; ".join(f"`{law.word}`: {words}" for law in LAWS if (words := _modifiers(law)))
        return ", ".join(f"`{law.word}`" for law in LAWS), modifiers
    if role.kind is bool:
        return "`true`, `false`", ""
    formats = ", ".join(f"`{name}`" for name in role.allowed or ()) or "any format"
    reason = f"; no other, because {role.reason}" if role.reason else ""
    return formats + reason, "" if role.kind is Format else _modifiers(role.kind)


def _modifiers(kind: type) -> str:
    """Returns the words that may follow a value, with the comments of the fields that they set."""
    source = inspect.getsource(kind)
    words = []
    for name, key, hint, default in roles.grammar(kind):
        if hint is bool:
            word = f"`{key}`"
        elif get_origin(hint) is Literal:
            word = " or ".join(f"`{choice}`" for choice in get_args(hint))
        else:
            word = f"`{key}={default:.12g}`"
        comment = re.search(rf"^    {name}:[^#\n]*  # (.*)$", source, flags=re.M)
        words.append(word + (f": {comment[1]}" if comment else ""))
    return "; ".join(words)


def policies() -> str:
    """Returns the page of roles and presets."""
    lines = [
        [f"`{role}`", ROLES[role].meaning, *(f"`{print_value(getattr(p, role))}`" for p in PRESETS.values())]
        for role in ROLES
    ]
    names = [[f"`{name}`", f"`{preset}`", where] for name, (preset, where) in OTHER_NAMES.items()]
    names += [[f"`{name}`", "refused", f"{why}; {instead}"] for name, (why, instead) in NOT_OFFERED.items()]
    lines.append(["rules", "other values for some modules", *(_rules(p.rules) for p in PRESETS.values())])
    return (
        "# Policies, roles and presets\n\nA policy assigns one format to each role; a preset is a column of this "
        "table. Generated from `halfstep/core/roles.py`, `policy.py` and `rules.py`.\n\n"
        + table(["role", "what it is", *PRESETS], lines)
        + f"\n\n{grammar()}\n{AUTO}\n{SCALE}\n{OTHERS}\n"
        + table(["name", "read as", "as in"], names)
        + f"\n\n{formats()}"
    )


def written(name: str) -> str:
    """Returns the part of a page that is written by hand, up to the mark where this script continues it."""
    before, mark, _ = (HERE / name).read_text(encoding="utf-8").partition("docs/generate.py -->\n")
    return before + mark


KINDS = {
    "HS1": "Updates",
    "HS2": "The loss scale",
    "HS3": "Sums",
    "HS4": "Formats",
    "HS5": "The loop",
    "HS6": "Checkpoints",
    "HS7": "Numbers in files",
}


def audit() -> str:
    """Returns the page of the audit: what is written by hand, then every rule."""
    known = list(registry().values())
    lines = [[f"[{r.id}](#{r.id.lower()})", r.name, r.severity, r.needs or "anything"] for r in known]
    last = ""
    parts = [written("audit.md"), "## Rules\n", table(["id", "rule", "severity", "seen in"], lines) + "\n"]
    for rule in known:
        if (kind := rule.id[:3]) != last:
            parts.append(f"## {KINDS[kind]}\n")
            last = kind
        parts.append(f"### {rule.id}\n\n**{rule.name}** ({rule.severity}). {rule.what}\n")
        parts.append(f"*Why*: {rule.why}\n\n*Evidence*: {rule.shows}\n\n*Fix*: {rule.fix}\n")
    return "\n".join(parts)


def formats() -> str:
    """Returns the table of number formats."""
    lines = [
        [
            f"`{fmt}`",
            f"{fmt.bits}",
            f"e{fmt.exponent_bits}m{fmt.mantissa_bits}{fmt.specials}",
            f"{fmt.max:.6g}",
            f"{fmt.smallest_normal:.3g}",
            f"{fmt.smallest_subnormal:.3g}",
            f"{fmt.epsilon:.3g}",
            fmt.native_overflow,
        ]
        for fmt in NAMED.values()
    ]
    columns = ["format", "bits", "layout", "largest", "smallest normal", "smallest", "epsilon", "overflow"]
    return (
        "## Number formats\n\nThe named formats; `halfstep formats e3m4ieee` shows any other. Generated from "
        "`halfstep/core/formats.py`.\n\n" + table(columns, lines) + "\n"
    )


def api_index() -> str:
    """Returns the first page of the API: the modules, each with its public names."""
    lines = [
        [
            f"[`{module}`]({page}.md)",
            about,
            ", ".join(f"[`{name}`]({page}.md#{name.lower()})" for name in API[module]),
        ]
        for page, (module, about) in MODULES.items()
    ]
    return (
        "# API\n\nThe public names of each module, with signatures and docstrings from the code. Import a name "
        "from the module whose page it is on. The [command line](../cli.md) has a page of its own.\n\n"
        + table(["module", "what it is", "names"], lines)
        + "\n"
    )


def api(page: str) -> str:
    """Returns the page of a module: signatures and docstrings of its public names, as the code has them."""
    module, about = MODULES[page]
    names = {name: getattr(import_module(module), name) for name in API[module]}
    lines = [[f"[`{name}`](#{name.lower()})", _first_sentence(what)] for name, what in names.items()]
    parts = [f"# {module}", about, table(["name", "what it is"], lines)]
    for name, what in names.items():
        parts += _entry(name, what)
    return "\n\n".join(parts) + "\n"


def _first_sentence(what: Any) -> str:
    paragraph = " ".join(inspect.cleandoc(what.__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`(])", paragraph)[0].rstrip(":")


def architecture() -> str:
    """Returns the page of the code: what is written by hand, then what each folder holds."""
    package = HERE.parent / "halfstep"
    lines = []
    for path in sorted({path.parent for path in package.rglob("*.py")}):
        about = ast.get_docstring(ast.parse((path / "__init__.py").read_text("utf-8"))) or ""
        lines.append([f"`{path.relative_to(package.parent).as_posix()}/`", about.splitlines()[0]])
    return f"{written('architecture.md')}\n## Every folder\n\n" + table(["folder", "what it holds"], lines) + "\n"


CLI = """# Command line

What `--help` of each command says. Data is printed on stdout and messages on stderr; `--json` prints the data as
JSON, and an error with [its code](errors.md). Exit codes: 0 for success, 1 if a problem was found, 2 for what
cannot be done, with the remedy, and 130 for Ctrl-C. The settings that `--set` takes are on [their own
page](settings.md).
"""


def cli() -> str:
    """Returns the reference of the command line: what `--help` of every command says."""
    commands = app.generate_docs().partition("**Commands**:")[2]
    commands = re.sub(r"^(halfstep .*) -m \w+\b", r"\1", commands, flags=re.M)  # how this process was started
    return CLI + "\n".join(line.rstrip() for line in commands.splitlines()) + "\n"


def logging() -> str:
    """Returns the page of what a run records: what is written by hand, then the events of `events.jsonl`."""
    first, listed, *rest = plain(telemetry).split("\n\n")
    entries = re.findall(r"^    (\w+) +(.*(?:\n {8,}.*)*)", listed, flags=re.M)
    lines = [[f"`{kind}`", " ".join(fields.split())] for kind, fields in entries]
    parts = ["## Events", "`events.jsonl` is the record of a run, one JSON object per line.", first]
    return f"{written('logging.md')}\n" + "\n\n".join([*parts, table(["event", "fields"], lines), *rest]) + "\n"


ERRORS = """# Errors

An error says what was given and where, and what to do next. Its code names the family it belongs to: a code stays
the same from version to version, while the wording may change. In Python it is `HalfstepError.code`, and each
family is a class: `policy-syntax` is `PolicySyntaxError`, which `except PolicyError` and `except HalfstepError`
catch too. With `--json`, the command line prints `code`, `message` and `hint` of an error as a JSON object on
stdout; there, `usage` is a command line that cannot be read, and `system` an error of the operating system.
"""


def errors() -> str:
    """Returns the page of error codes, in the order of the classes that have them."""
    lines = [[f"`{code_of(name)}`", meaning, f"`{base}`"] for name, (base, meaning) in error_families().items()]
    return f"{ERRORS}\n" + table(["code", "meaning", "base class"], lines) + "\n"


def error_families() -> dict[str, tuple[str, str]]:
    """Returns the families of errors by class, each with its base class and its meaning, bases first."""
    package = HERE.parent / "halfstep"
    first = package / "core" / "errors.py"  # with the families that are not of one room
    paths = [first, *sorted(path for path in package.rglob("*.py") if path != first)]
    classes = [node for path in paths for node in ast.parse(path.read_text("utf-8")).body]
    found = {"HalfstepError": ("Exception", "Any error of halfstep.")}
    for node in classes:
        if (
            isinstance(node, ast.ClassDef)
            and node.bases
            and (base := ast.unparse(node.bases[0])).endswith("Error")
        ):
            found[node.name] = (base, ast.get_docstring(node) or "")
    return {name: family for name, family in found.items() if _is_ours(name, found)}


def _is_ours(name: str, found: dict[str, tuple[str, str]]) -> bool:
    return name == "HalfstepError" or (name in found and _is_ours(found[name][0], found))


def proofs() -> str:
    """Returns the page of proofs: what is written by hand, then the record of `make prove`, if there is one."""
    name = "measurements/proofs.md"
    path = HERE / "measurements" / "proofs.json"
    recorded = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    lines = [
        [part, each["date"], f"`{each['commit']}`", each["machine"], f"{each['seconds']:,.0f}"]
        for part, each in recorded.items()
    ]
    return f"{written(name)}\n{table(['part', 'last passed', 'commit', 'machine', 'seconds'], lines)}\n"


def study() -> str:
    """Returns the page of the study: what is written by hand, then its rows with their verdicts."""
    return f"{written('study.md')}\n{study_page()}"


PAGES = {
    "api/index.md": api_index,
    **{f"api/{page}.md": partial(api, page) for page in MODULES},
    "architecture.md": architecture,
    "audit.md": audit,
    "cli.md": cli,
    "errors.md": errors,
    "logging.md": logging,
    "measurements/proofs.md": proofs,
    "policies.md": policies,
    "settings.md": settings,
    "study.md": study,
}


def _entry(name: str, what: Any) -> Iterator[str]:
    yield f"## {name}"
    if not inspect.isclass(what):
        yield _code(_signature(what))
    elif dataclasses.is_dataclass(what):
        yield _code(_fields(what))
    elif "__init__" in vars(what) and name != "Run":  # `prepare` makes a Run
        yield _code(_signature(what.__init__, name))
    yield inspect.cleandoc(what.__doc__ or "")
    for attribute in _methods(name, what):
        value = inspect.getattr_static(what, attribute)
        function = value.fget if isinstance(value, property) else inspect.unwrap(getattr(what, attribute))
        kinds = {property: "@property\n", classmethod: "@classmethod\n"}
        yield f"### {name}.{attribute}"
        yield _code(kinds.get(type(value), "") + _signature(function))
        yield inspect.cleandoc(function.__doc__ or "")


def _methods(name: str, kind: type) -> list[str]:
    """Returns the methods and properties of a class that the page shows, in the order of the source."""
    chosen = METHODS.get(name, [])
    if chosen is not None:
        return [method for method in chosen if hasattr(kind, method)]  # optimizers differ by backend
    kinds = (types.FunctionType, property, classmethod)
    shared = ("Engine", "Losses")  # what a Run and statistics are made of
    parts = [part for part in reversed(kind.__mro__) if part is kind or part.__name__ in shared]
    members = {key: value for part in parts for key, value in vars(part).items() if not key.startswith("_")}
    public = [key for key, value in members.items() if isinstance(value, kinds)]
    return [key for key in public if key not in INTERNAL.get(name, ())]


def _parse(what: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(what))).body[0]


def _signature(function: Any, name: str | None = None) -> str:
    """Returns a signature as the source writes it, which does not depend on versions of the frameworks."""
    node = _parse(function)
    constants = {p.name: repr(p.default) for p in inspect.signature(function).parameters.values()}
    parts = list(_arguments(node.args, constants))
    returns = f" -> {_text(node.returns)}" if node.returns is not None and name is None else ""
    line = f"{name or node.name}({', '.join(parts)}){returns}"
    if len(line) <= 100:
        return line
    wrapped = "".join(f"    {part},\n" for part in parts)
    return f"{name or node.name}(\n{wrapped}){returns}"


def _arguments(given: ast.arguments, constants: dict[str, str]) -> Iterator[str]:
    padding = [None] * (len(given.args) - len(given.defaults))
    for argument, default in zip(given.args, [*padding, *given.defaults], strict=True):
        if argument.arg not in ("self", "cls"):
            yield _argument(argument, default, constants)
    if given.vararg or given.kwonlyargs:
        yield f"*{_argument(given.vararg) if given.vararg else ''}"
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _argument(argument, default, constants)
    if given.kwarg:
        yield f"**{_argument(given.kwarg)}"


def _argument(given: ast.arg, default: ast.expr | None = None, constants: dict[str, str] | None = None) -> str:
    kind = "" if given.annotation is None else f": {_text(given.annotation)}"
    if default is None:
        return given.arg + kind
    # A constant's name says nothing here; its value does.
    value = constants[given.arg] if constants and isinstance(default, ast.Name) else ast.unparse(default)
    return given.arg + kind + (" = " if kind else "=") + value.replace("'", '"')


def _text(annotation: ast.expr) -> str:
    """Returns an annotation without the quotes of a forward reference."""
    return annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)


def _fields(kind: type) -> str:
    """Returns a dataclass's fields with their comments, as the source writes them."""
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    fields = [item for item in _parse(kind).body if isinstance(item, ast.AnnAssign)]
    text = textwrap.dedent("\n".join(line for f in fields for line in lines[f.lineno - 1 : f.end_lineno]))
    return f"class {kind.__name__}:\n{textwrap.indent(text, '    ')}"


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _rules(rules: tuple[object, ...]) -> str:
    return " ".join(f"`{rule}`" for rule in rules)


if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
