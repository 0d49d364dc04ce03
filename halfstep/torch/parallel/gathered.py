"""Weights that FSDP2 gathers in the compute format, and whose gradients it reduces in fp32.

FSDP's own mixed precision casts a weight to bf16 before the layer sees it, so autograd makes its gradient bf16,
and a reduction in fp32 sums numbers that were rounded already. Here a shard is the fp32 master. What travels is
its cast; what a layer gets is a `Gathered`, which autograd takes for an fp32 tensor and a matmul for the narrow
numbers it holds. So the gradient is fp32 from the matmul's sum to the optimizer.

A layer saves the gathered numbers themselves for its backward pass. FSDP frees their memory after the forward
pass and fills it again before the backward pass: no unsharded weight outlives its layer.

FSDP asks a local shard for `fsdp_pre_all_gather` and `fsdp_post_all_gather`. They are attributes of the plain
tensor here, so that checkpoints, optimizers and copies find no class of ours.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.utils import _pytree as pytree

from halfstep.core.errors import LossError, ParallelError
from halfstep.torch.layers import Layer
from halfstep.torch.numerics.shards import ShardCast
from halfstep.torch.parallel.wire import NarrowReduceScatter

_ATEN = torch.ops.aten
_FSDP = "torch.distributed.fsdp"  # where its hooks are from
# What gives the same numbers in another shape.
_VIEWS = {
    _ATEN.alias.default,
    _ATEN.as_strided.default,
    _ATEN.detach.default,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.view.default,
}


class Gathered(Tensor):
    """A weight in fp32 to autograd, whose numbers are in a narrower format."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "Gathered":
        """Takes the numbers."""
        options: dict[str, Any] = {"strides": values.stride(), "dtype": torch.float32, "device": values.device}
        return Tensor._make_wrapper_subclass(cls, values.shape, **options)  # type: ignore[return-value]

    def __init__(self, values: Tensor):
        self.numbers = values

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        """Views stay narrow, a cast to the format of the numbers takes them as they are, all else widens them."""
        kwargs = kwargs or {}
        if function in _VIEWS:
            return Gathered(function(args[0].numbers, *args[1:], **kwargs))
        if function is _ATEN._to_copy.default and kwargs.get("dtype") is args[0].numbers.dtype:
            return args[0].numbers
        return function(*pytree.tree_map(_widen, args), **pytree.tree_map(_widen, kwargs))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: None, size: Any, stride: Any) -> "Gathered":
        return Gathered(inner["numbers"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Gathered({tuple(self.shape)}, {self.numbers.dtype})"


def _widen(given: Any) -> Any:
    return given.numbers.float() if isinstance(given, Gathered) else given


class Sharded:
    """A model whose parameters FSDP has sharded, after it was given a policy."""

    def __init__(self, model: nn.Module, wire: torch.dtype):
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for group, _ in self.groups():
            _check_policies(group)
        if wire != torch.float32:
            for module in self.modules:
                module.set_custom_reduce_scatter(NarrowReduceScatter(wire))  # type: ignore[arg-type]
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        all_sharded = [sharded for group, _ in self.groups() for sharded in group.fsdp_params]
        for sharded in all_sharded:
            sharded.reset_sharded_param()  # as before its first pass: to_empty() may have replaced the parameter
        gathers = [*map(Gather, all_sharded)]
        self.gathers = {names[g.sharded.sharded_param]: g for g in gathers if g.is_for_matmuls}
        for gather in self.gathers.values():
            gather.install()
        for module in self.modules:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                theirs = {k: h for k, h in hooks.items() if getattr(h, "__module__", "").startswith(_FSDP)}
                hooks |= {key: _outside_of_modes(hook) for key, hook in theirs.items()}

    def set_grad_sync(self, now: bool) -> None:
        """Says to FSDP before a backward pass whether ranks exchange gradients in it or keep them."""
        for module in self.modules:
            module.set_requires_gradient_sync(now, recurse=False)

    @contextmanager
    def without_strays(self) -> Iterator[None]:
        """Inside, a loss function runs no backward pass of its own: FSDP would add its gradients to the sums."""
        before = self._gradient_versions()
        yield
        if self._gradient_versions() != before:
            raise LossError(
                "the loss function ran a backward pass of its own, whose gradients FSDP adds to the update",
                hint="for the gradient of an input: torch.autograd.grad(loss, x)",
            )

    def _gradient_versions(self) -> list[tuple[int, int]]:
        sharded = [sharded for group, _ in self.groups() for sharded in group.fsdp_params]
        grads = [s.sharded_param.grad for s in sharded]
        grads += [s.unsharded_accumulated_grad for s in sharded]
        grads += [s._unsharded_param.grad for s in sharded if hasattr(s, "_unsharded_param")]
        return [(id(grad), grad._version) for grad in grads if grad is not None]

    @torch.no_grad()
    def make(self) -> None:
        """Casts the shards in a few launches, for all gathers of an update."""
        groups: dict[torch.dtype, list[Gather]] = {}
        for gather in self.gathers.values():
            if gather.cast.current(gather.format()) is None:
                groups.setdefault(gather.format(), []).append(gather)
        groups.pop(torch.float32, None)
        for dtype, gathers in groups.items():
            values = [torch.empty_like(gather.shard, dtype=dtype) for gather in gathers]
            torch._foreach_copy_(values, [gather.shard for gather in gathers])
            for gather, cast in zip(gathers, values, strict=True):
                gather.cast.hold(cast)

    def drop(self) -> None:
        """Frees the casts, as the update has changed the shards; those it wrote too are kept for the next."""
        for gather in self.gathers.values():
            gather.cast.drop_unless_written()

    def reshard(self) -> None:
        """Frees what is gathered: the next pass gathers again, in the format that layers compute in then."""
        for module in self.modules:
            module.reshard()

    def groups(self) -> Iterator[tuple[Any, bool]]:
        """Yields the parameters that FSDP gathers together, and whether the backward pass gathers them again."""
        inner = {id(m) for module in self.modules for m in module.modules() if m is not module}
        for module in self.modules:
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one for each module
            kept = state._auto_reshard_after_forward and id(module) not in inner  # unless it was asked for
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None:
                    yield group, group.post_forward_mesh_info is not None and not kept

    def format_of(self, sharded: Any) -> torch.dtype:
        """Returns what a parameter travels in."""
        found = [gather.format() for gather in self.gathers.values() if gather.sharded is sharded]
        return found[0] if found else sharded.sharded_param.dtype


def _check_policies(group: Any) -> None:
    """Refuses what `fully_shard` was given beside a policy."""
    given = group.mp_policy
    if not {given.param_dtype, given.reduce_dtype, given.output_dtype} <= {None, torch.float32}:
        raise ParallelError(
            f"fully_shard(mp_policy=...) beside a policy: {given} would round gradients or outputs by itself",
            hint="omit it: weights travel in the policy's compute format, and gradients are reduced in fp32",
        )
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        raise ParallelError(
            "fully_shard(offload_policy=CPUOffloadPolicy()) beside a policy is not implemented: masters would be "
            "elsewhere than gradients",
            hint="omit it; `moments=bf16` in the policy and checkpointed activations save memory",
        )


def _outside_of_modes(hook: Any) -> Any:
    """Returns a hook that the mode for a model's own code does not see: it would see 170 calls for each block."""

    @torch._dynamo.disable(recursive=True)  # type: ignore[untyped-decorator]
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return hook(*args, **kwargs)

    return call


class Gather:
    """How one parameter is gathered: in the format that its layers compute in when they ask for it."""

    def __init__(self, sharded: Any):
        self.sharded, info = sharded, sharded._module_info
        self.places: list[tuple[Any, str]] = [(info.module, info.param_name)]
        self.places += zip(info.shared_modules, info.shared_param_names, strict=True)
        self.gathered_in: torch.dtype | None = None
        self.cast = ShardCast(self._version)

    @property
    def shard(self) -> Tensor:
        """This rank's part of the master, as long as that of any other."""
        return self.sharded._sharded_param_data.view(self.sharded.padded_sharded_param_size)

    def _version(self) -> tuple[int, int]:
        """Counts writes, those to the parameter and those to its local part."""
        return self.sharded.sharded_param._version, self.sharded._sharded_param_data._version

    @property
    def is_for_matmuls(self) -> bool:
        """Whether every module with the parameter multiplies it, or looks up its rows, in a format of its own."""
        layers = all(isinstance(m, Layer) and not type(m).whole_because(m, name) for m, name in self.places)
        return layers and self.sharded.sharded_param.ndim > 1 and self.sharded.sharded_param.dtype == torch.float32

    def format(self) -> torch.dtype:
        """Returns the one narrow format that all layers compute in now, or fp32."""
        formats = {m.casts.compute for m, _ in self.places}
        narrow = len(formats) == 1 and not any(m.casts.emulate for m, _ in self.places)
        return formats.pop() if narrow else torch.float32

    def install(self) -> None:
        """Gives the shard the two functions that FSDP asks for."""
        local = self.sharded._sharded_local_tensor
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self.before, self.after
        self.sharded._init_extensions()

    def before(
        self, mesh: Any, size: Any, stride: Any, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """Returns what this rank sends."""
        sharded, now = self.sharded, self.format()
        if now != self.gathered_in is not None:  # evaluation in another format: FSDP would fill the old memory
            sharded.all_gather_outputs = []
            del sharded._unsharded_param
        self.gathered_in = now
        cast = self.cast.current(now)
        return (self.shard.to(now) if cast is None else cast,), None

    def after(
        self, gathered: tuple[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """Returns what layers see, the first time; later FSDP fills the same memory."""
        (values,) = gathered
        if out is not None:
            return None
        return values if values.dtype == torch.float32 else Gathered(values), gathered
