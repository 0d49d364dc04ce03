"""`halfstep plan`: memory, traffic, time and money of a training, before a GPU is rented."""

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from halfstep.cli.arguments import Json, Overrides
from halfstep.cli.output import print_json, print_table, print_words
from halfstep.config.load import DEFAULT_RECIPE, load, read_policy, setting_named
from halfstep.config.machines import Machine, load_machine
from halfstep.core.errors import OptionError, SettingConflictError
from halfstep.core.policy import Policy

if TYPE_CHECKING:
    from halfstep.tools.plan.plan import Plan

MIB = 2**20
REMEDIES = (
    "--set training.memory=lean keeps fewer activations, and training.recompute_blocks=true fewer still; "
    "--set parallel.shard=full shares the rest"
)


def plan(
    target: str,
    /,
    *,
    gpu: str,
    gpus: int = 1,
    policy: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    price: float = 0.0,
    overrides: Overrides = (),
    json: Json = False,
) -> int:
    """Say what a training needs, before a GPU is rented: memory, traffic, time and money.

    One step is followed on torch's meta device, which has shapes and no numbers: this needs neither the GPU
    nor the memory. Exit code 1 if a policy does not fit.

    Parameters
    ----------
    target
        A recipe (tiny, gpt2, qwen3, speedrun, golf), a file that ends in .toml, or module:factory, a function that
        returns model, optimizer, loss_fn, batch.
    gpu
        A machine file: h200, h100, a100-80, a100-40, l40s, rtx4090, b200, mi300x, or a file that
        `halfstep probe --save` wrote.
    gpus
        How many GPUs share the training; `--set parallel.shard=full` shards the model among them.
    policy
        The precision; by default, that of the recipe, or bf16-mixed. May be repeated, to compare.
    price
        Of a GPU for an hour, in any currency.
    overrides
        A setting, such as training.batch=64. Of a factory, training.steps, training.compile and training.memory.
    """
    if gpus < 1 or price < 0:
        raise OptionError("--gpus is at least 1, and --price is not negative", hint="such as --gpus 8 --price 2.5")
    machine = load_machine(gpu)
    planned, default = _planner(target, overrides, machine, gpus, price)
    policies = {name: Policy.parse(read_policy(name)) for name in policy or (default,)}
    plans = []
    for name, each in policies.items():
        print_words(f"following a step of {target} under {name}")
        plans.append(planned(each))
    if json:
        print_json({"machine": machine.name, "plans": [each.to_dict() for each in plans]})
    else:
        _print(plans, machine)
    return 0 if all(each.fits for each in plans) else 1


def _planner(
    target: str, overrides: tuple[str, ...], machine: "Machine", gpus: int, price: float
) -> tuple[Any, str]:
    """Returns a function that plans under a policy, and the policy if none is named."""
    from halfstep.tools.audit.targets import call, find
    from halfstep.tools.plan.plan import plan_factory, plan_recipe

    module, colon, factory = target.partition(":")
    if not colon:
        config = load(target, overrides)
        if config.backend != "torch":
            raise SettingConflictError(
                f"backend is {config.backend}, and plans are made on torch", hint="--set backend=torch"
            )
        default = "bf16-mixed" if config.policy.startswith("auto") else config.policy
        return lambda policy: plan_recipe(config, policy, machine, gpus, price), default
    for override in overrides:
        if setting_named(override) not in ("training.steps", "training.compile", "training.memory"):
            raise OptionError(
                f"--set {override} changes nothing of a factory",
                hint="training.steps, training.compile and training.memory do",
            )
    training = load(DEFAULT_RECIPE, overrides).training
    if training.compile == "block":
        raise SettingConflictError(
            "training.compile=block compiles the blocks of a recipe, and which modules of a factory's model are "
            "blocks is not known",
            hint="--set training.compile=true",
        )
    options: dict[str, Any] = {"compiled": training.compile, "steps": training.steps, "memory": training.memory}
    given, made = (machine, gpus, price), lambda: call(find(module, factory), target)
    return lambda policy: plan_factory(made, policy, *given, **options), "bf16-mixed"


def _print(plans: "list[Plan]", machine: "Machine") -> None:
    columns = ("", *(each.policy for each in plans))
    excess = [(each.reserved_bytes - each.capacity_bytes) / MIB for each in plans]
    fits = [f"no, {mib:,.0f} MiB too many" if mib > 0 else "yes" for mib in excess]
    by_role = [
        (role, *(f"{each.memory_bytes[role] / MIB:,.0f} MiB" for each in plans)) for role in plans[0].memory_bytes
    ]
    rows = [
        *by_role,
        ("peak, allocated", *(f"{each.peak_bytes / MIB:,.0f} MiB" for each in plans)),
        ("reserved, with the driver's", *(f"{each.reserved_bytes / MIB:,.0f} MiB" for each in plans)),
        (f"fits {machine.memory / MIB:,.0f} MiB", *fits),
        ("batch, micro-batches of a GPU", *(f"{each.batch} x {each.micro_batches}" for each in plans)),
        ("largest batch", *(str(each.largest_batch) for each in plans)),
        ("a GPU sends, weights", *(f"{each.sent_bytes['weights'] / MIB:,.0f} MiB" for each in plans)),
        ("a GPU sends, gradients", *(f"{each.sent_bytes['gradients'] / MIB:,.0f} MiB" for each in plans)),
        ("TFLOP of an update", *(f"{each.flops / 1e12:,.4g}" for each in plans)),
        ("ms of an update", *(_range([s * 1e3 for s in each.seconds]) for each in plans)),
        (f"GPU-hours of {plans[0].steps:,} updates", *(_range(each.gpu_hours) for each in plans)),
    ]
    if plans[0].price:
        rows.append(("price", *(_range([h * each.price for h in each.gpu_hours]) for each in plans)))
    print_table(columns, rows, right=columns[1:])
    if any(each.timed_share < 0.5 for each in plans):
        print_words(
            f"times are ranges from {machine.name}'s datasheet: `halfstep probe --save mine.toml RECIPE` on that "
            "machine times these shapes"
        )
    for each in plans:
        if not each.fits:
            smaller = f"--set training.batch of {each.largest_batch} for each GPU, and more micro-batches; "
            print_words(f"{each.policy} does not fit: {smaller if each.largest_batch else ''}{REMEDIES}")


def _range(ends: Any) -> str:
    low, high = ends
    return f"{low:,.4g}" if high - low <= 0.005 * high else f"{low:,.3g} to {high:,.3g}"
