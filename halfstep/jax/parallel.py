"""Data parallel training over a mesh: every device has the whole state and its share of the rows.

    batch         split over all devices of the mesh, by rows
    gradients     each device's own, of its own rows; micro-batches are summed there, then devices once, in fp32
    what follows  is the same on every device, from the same numbers: clipping, the optimizer, the loss scale

**Why is the sum over devices written out?** JAX would make it where a weight meets the rows, which is after its
cast: a bf16 sum of bf16 gradients. The partitioner of jit does so, and so does shard_map with `check_vma`, which
is off here: gradients are then those of one device, and nothing but this `psum` is exchanged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfstep.core.errors import ArgumentError, BatchError, ParallelError

# (state, the rows of one device, rng) -> (what is the same on every device, what is each device's own)
Local = Callable[[Any, Any, Any], tuple[Any, Any]]


def sum_over_devices(own: Any, reference: Array, mesh: Mesh) -> Any:
    """Returns the sum over devices, in fp32, of arrays that each device has weighted against its own reference."""
    largest = lax.pmax(reference, mesh.axis_names)
    share = reference / jnp.where(largest == 0, 1.0, largest)  # 1 where devices have equally many tokens
    return lax.psum(jax.tree.map(lambda x: share * x.astype(jnp.float32), own), mesh.axis_names)


def map_devices(local: Local, mesh: Mesh, micro_batches: int | None) -> Local:
    """Returns a function that calls another on each device, with its rows and random numbers of its own.

    What is each device's own comes back stacked, by device.
    """
    check_mesh(mesh)
    axes = mesh.axis_names

    def share(state: Any, rows: Any, rng: Any) -> tuple[Any, Any]:
        rng = jax.tree.map(lambda key: jax.random.fold_in(key, lax.axis_index(axes)), rng)
        same, own = local(state, rows, rng)
        return same, jax.tree.map(lambda x: jnp.expand_dims(x, 0), own)

    def run(state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        whole = PartitionSpec()
        specs = (whole, _specs(batch, mesh, micro_batches), whole)
        outs = (whole, PartitionSpec(axes))
        mapped = jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
        out: tuple[Any, Any] = mapped(state, batch, rng)
        return out

    return run


def run_whole(local: Local, mesh: Mesh) -> Local:
    """Returns a function that calls another on the rows of all devices: the compiler finds what they exchange."""

    def run(state: Any, batch: Any, rng: Any) -> tuple[Any, Any]:
        same, own = jax.sharding.auto_axes(local, out_sharding=replicated(mesh))(state, batch, rng)
        return same, jax.tree.map(lambda x: jnp.expand_dims(x, 0), own)

    return run


def shapes_of_part(batch: Any, micro_batches: int | None, rows: Callable[[int], int]) -> Any:
    """Returns the shapes of a part of a micro-batch; `rows` says how many it has, given those of a whole one."""

    def shape(leaf: Any) -> Any:
        size = jnp.shape(leaf)[0 if micro_batches is None else 1 :]
        part = (*map(rows, size[:1]), *size[1:])
        return jax.ShapeDtypeStruct(part, jnp.result_type(leaf)) if jnp.ndim(leaf) else leaf

    return jax.tree.map(shape, batch)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns where a state lies: on every device, whole."""
    return NamedSharding(mesh, PartitionSpec())


def place_rows(batch: Any, mesh: Mesh, micro_batches: int | None) -> Any:
    """Sends each device its rows of a batch, without waiting."""
    specs = _specs(batch, mesh, micro_batches)
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), batch, specs)


def check_mesh(mesh: Any) -> None:
    """Refuses what is not a mesh of devices."""
    if not isinstance(mesh, Mesh):
        raise ArgumentError(
            f"mesh is a {type(mesh).__name__}, not a mesh of devices",
            hint='mesh = jax.make_mesh((jax.device_count(),), ("data",))',
        )


def check_placed(state: Any, mesh: Mesh) -> None:
    """Refuses a state that is not whole on every device of the mesh."""
    devices = {*mesh.devices.flat}
    for sharding in {leaf.sharding for leaf in jax.tree.leaves(state)}:
        if sharding.device_set != devices or not sharding.is_fully_replicated:
            raise ParallelError(
                f"the step runs on {mesh.size} devices, each with the whole state, and this state lies elsewhere",
                hint="init(params, optimizer, policy, mesh=mesh) places it; to train parameters that are sharded, "
                "leave the mesh out of make_step too: jit then follows their shardings",
            )


def check_divides(rows: int, devices: int, what: str, remedy: str) -> None:
    """Refuses rows that devices cannot share equally; the remedy is in front of numbers that they can."""
    if rows % devices:
        less, more = rows - rows % devices, rows + -rows % devices
        raise BatchError(
            f"{devices} devices cannot share {what} of {rows} rows equally",
            hint=f"{remedy} {f'{less} or {more}' if less else more}, or use fewer devices",
        )


def _specs(batch: Any, mesh: Mesh, micro_batches: int | None) -> Any:
    """Returns how each leaf of a batch is split: its rows over all devices; numbers without rows are for all."""
    first = 0 if micro_batches is None else 1
    rows = {jnp.shape(leaf)[first] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf) > first}
    if len(rows) > 1:
        raise BatchError(
            f"leaves of the batch have different numbers of rows: {', '.join(map(str, sorted(rows)))}",
            hint="devices share a batch by rows: give every leaf the same number, and let the loss function close "
            "over what belongs to no row",
        )
    for number in rows:
        what = "a batch" if micro_batches is None else "a micro-batch"
        check_divides(number, mesh.size, what, "use a number of rows such as")
    split = PartitionSpec(*(None,) * first, mesh.axis_names)
    return jax.tree.map(lambda leaf: split if jnp.ndim(leaf) > first else PartitionSpec(), batch)
