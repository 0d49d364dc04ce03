"""The monitor of a run: what each layer's tensors look like to their formats, while it trains.

    monitor = run.monitor(every=100)            before the first step, and before torch.compile's first call
    ...                                         the loop as it was
    print(monitor)                              a table: the layers nearest to a limit of their formats first

Every step is counted in its own graph (observe/slots.py); each `every` updates, the counts so far and what the
update did to the weights are copied to the host, behind the step, and `numbers` reads the last such copy. No
step waits, and nothing that is trained depends on it. `layer_numbers` and `weight_numbers` are the same by hand;
`sample` runs part of a batch again.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.config.run import MOST_SLICE
from halfstep.core.errors import ArgumentError
from halfstep.core.formats import FP32
from halfstep.core.observed import LayerInfo, LayerNumbers, Sample, first_rows, format_table, name_numbers, samples
from halfstep.core.precision import Precision
from halfstep.core.refusal import check_numbers
from halfstep.torch.instruments.observe.slots import LayerWatch, first_tensor
from halfstep.torch.instruments.observe.sums import Part, observations, part_of, sum_dtype
from halfstep.torch.instruments.replay import casts_of, extra_pass_of_run
from halfstep.torch.layers import Matmul
from halfstep.torch.loss.plain import evenly_spaced
from halfstep.torch.numerics.cast import join
from halfstep.torch.numerics.dtypes import DTYPES
from halfstep.torch.numerics.shards import local
from halfstep.torch.numerics.split.operand import SPLIT, is_split, values_of
from halfstep.torch.optim.adamw import Grads, Optimizer
from halfstep.torch.update.readback import Unread

# Weights, gradients and updates of one update, on a fixed part of each parameter, and the updates that were lost.
#
# Parts are copied before and after the step; of a split master, the joined value. An update is lost if it was
# intended, the step was not skipped, and the stored number is the same as before. It was intended if, after the
# step, the first moment (or the momentum) of the element or its weight decay is not zero; if the optimizer has no
# such state, if the element has a gradient.

_MOMENTS = ("exp_avg", "momentum", "momentum_buffer")


class WeightNumbers:
    """The numbers of one update: `before` and `after` are called around the optimizers' steps."""

    def __init__(self, modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], slice: int):
        self._size, self._layers = slice, len(modules)
        self._groups = {id(p): (o, group) for o in optimizers for group in o.param_groups for p in group["params"]}
        own = [(at, p) for at, module in enumerate(modules) for p in module.parameters()]
        self._owners = [(at, p) for at, p in own if id(p) in self._groups and p.requires_grad]
        self._unread: Unread | None = None

    @torch.no_grad()
    def before(self, grads: Grads, factor: Tensor | float) -> None:
        """Copies weights and gradients; `factor` unscales gradients."""
        self._owners = [(at, p) for at, p in self._owners if id(p) in grads and not grads[id(p)].is_sparse]
        self._weights = self._parts(stored_values(p, self._size) for _, p in self._owners)
        self._grads = self._parts(evenly_spaced(local(grads[id(p)]), self._size) for _, p in self._owners) * factor

    @torch.no_grad()
    def after(self, finite: Tensor) -> None:
        """Compares the weights with those before the step, and launches a copy of the numbers to the host."""
        if not self._owners:
            return
        parts = [stored_values(p, self._size) for _, p in self._owners]
        weights = self._parts(parts)
        pairs = zip(self._owners, self._grads.split([p.numel() for p in parts]), strict=True)
        intended = torch.cat([self._intended(p, grad) for (_, p), grad in pairs])
        lost = intended & (weights == self._weights)
        exact = [v.to(sum_dtype(weights.device)) for v in (self._weights, self._grads, weights)]
        squares = [exact[0].square(), exact[1].square(), (exact[2] - exact[0]).square()]
        table = torch.stack([*squares, intended.to(exact[0]), lost.to(exact[0])], -1)
        # Two short lists are copied without blocking: a long or blocking copy would wait for the step.
        sizes = torch.tensor([[at, v.numel()] for (at, _), v in zip(self._owners, parts, strict=True)])
        sizes = sizes.to(weights.device, non_blocking=True)
        layer = torch.repeat_interleave(sizes[:, 0], sizes[:, 1], output_size=len(table))
        sums = table.new_zeros(self._layers, table.shape[1]).index_add_(0, layer, table)
        self._unread = Unread(torch.cat([sums, finite.to(sums).expand(self._layers, 1)], -1), _columns)
        del self._weights, self._grads

    def _parts(self, parts: Iterable[Tensor]) -> Tensor:
        flat = [p.reshape(-1).float() for p in parts]
        return torch.cat([p.to(flat[0].device, non_blocking=True) for p in flat]) if flat else torch.zeros(0)

    def _intended(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """Returns a mask of the elements for which an update was intended."""
        optimizer, group = self._groups[id(parameter)]
        state: Mapping[str, Any] = optimizer.state.get(parameter, {})
        moment = next((state[key] for key in _MOMENTS if isinstance(state.get(key), Tensor)), None)
        moved = gradient if moment is None else evenly_spaced(local(moment), self._size).reshape(-1).float()
        rate = optimizer.rate_of(group) if isinstance(optimizer, Optimizer) else group.get("lr", 1.0)
        intended = moved != 0
        if group.get("weight_decay", 0.0):
            intended = intended | (stored_values(parameter, self._size).reshape(-1) != 0)
        return intended & (rate != 0)

    def read(self) -> NDArray[np.floating[Any]]:
        """Returns (layers, WEIGHT_COLUMNS); waits for the update."""
        if self._unread is None:
            return np.full((self._layers, 4), np.nan)
        return self._unread.read()


def stored_values(parameter: Tensor, size: int) -> Tensor:
    """Returns at most about `size` of the elements that the optimizer steps; of a split master, joined."""
    values = evenly_spaced(local(values_of(parameter)), size)
    if not is_split(parameter):
        return values
    remainder = parameter.__dict__[SPLIT].remainder
    return join(values.contiguous(), evenly_spaced(remainder, size).contiguous())


def _columns(sums: NDArray[Any]) -> NDArray[np.float64]:
    squares, intended, lost, finite = sums[:, :3], sums[:, 3], sums[:, 4], sums[:, 5]
    norms = np.where((squares[:, :1] > 0) | (intended[:, None] > 0), np.sqrt(squares), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where((finite > 0) & (intended > 0), lost / intended, np.nan)
    return np.concatenate([norms, share[:, None]], axis=1)


# Which modules of a model are watched: those with a matmul, norms, embeddings, and other leaves with weights.

_TORCH = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_MATMULS = (Matmul, *_TORCH)
_FORMATS = {dtype: fmt for fmt, dtype in DTYPES.items()}


def watched_layers(model: nn.Module) -> dict[str, tuple[nn.Module, LayerInfo]]:
    """Returns the layers of a model by name; a module with several names counts once."""
    layers = dict(_layers(model, "", set())) or ({type(model).__name__: model} if _kind(model) else {})
    return {name: (module, _describe(name, module)) for name, module in layers.items()}


def spec_of_role(info: LayerInfo, role: str) -> str:
    """Returns the format of a role, and how it is scaled, as a spec of core.stats.what_if."""
    words = info.formats[role].split(":")
    return words[0] + (":row" if "row" in words else "")


def _layers(model: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if child in seen:
            continue
        seen.add(child)
        if isinstance(child, _MATMULS) or not any(True for _ in child.children()):
            if _kind(child):
                yield prefix + name, child
        else:
            yield from _layers(child, f"{prefix}{name}.", seen)


def _kind(module: nn.Module) -> str:
    """Returns the kind of a leaf module; empty if it has no weights."""
    if isinstance(module, _MATMULS):
        return "matmul"
    names = [base.__name__ for base in type(module).__mro__]
    if any("Embedding" in name for name in names):
        return "embedding"
    if any("Norm" in name for name in names):
        return "norm"
    return "other" if any(p.is_floating_point() for p in module.parameters()) else ""


def _describe(name: str, module: nn.Module) -> LayerInfo:
    weight = next((p for p in module.parameters() if p.dim() > 1), next(module.parameters(), None))
    held = FP32 if weight is None or is_split(weight) else _FORMATS.get(weight.dtype, FP32)
    first = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    casts = casts_of(module)
    precision = Precision.in_format(_FORMATS.get(first, FP32)) if casts is None else casts.precision
    return LayerInfo.of(name, _kind(module), precision, held)


NEVER = 2**62  # updates between two copies, if the caller makes them


class Monitor:
    """Watches the layers of a run; `run.monitor()` makes one."""

    def __init__(self, run: Any, every: int, slice: int):
        check_numbers(every=every, slice=slice)
        if slice > MOST_SLICE:
            raise ArgumentError(f"slice={slice}: at most {MOST_SLICE:,} elements are counted", hint="4096 will do")
        self.every, self.slice = every, slice
        self._run = run
        self._watch = LayerWatch(watched_layers(run.model), slice, run.device)
        self._next: WeightNumbers | None = None  # what wants to see the next update
        self._updates, self._due = 0, False
        self._read: list[LayerNumbers] = []
        self._copies: deque[tuple[Unread, WeightNumbers]] = deque(maxlen=2)

    @property
    def layers(self) -> list[LayerInfo]:
        """The layers that are watched."""
        return self._watch.layers

    def stop(self) -> None:
        """Ends watching: the next steps count nothing. Compiled code compiles again."""
        self._watch.remove()
        self._run.watching = None

    # --- numbers

    def layer_numbers(self) -> Unread:
        """Launches a copy of the counts since the last one, (layers, ROLES, COLUMNS), and starts from zero."""
        return self._watch.launch()

    def weight_numbers(self) -> WeightNumbers:
        """Measures the next update: (layers, WEIGHT_COLUMNS), to be read after it."""
        self._next = WeightNumbers(self._watch.modules, self._run.optimizers, self.slice)
        return self._next

    def numbers(self) -> list[LayerNumbers]:
        """Returns the numbers of the last copy that the device has finished; empty before the first."""
        while self._copies and self._copies[0][0].ready:
            self._read = name_numbers(self.layers, *(copy.read() for copy in self._copies.popleft()))
        return self._read

    def __str__(self) -> str:
        return "\n".join(format_table(self.numbers())) or f"no numbers yet: they come every {self.every} updates"

    # --- what the run calls

    def before_backward(self) -> None:
        """Drops what a backward pass that was not the run's has counted."""
        self._watch.clear()

    def after_backward(self) -> None:
        """Takes the counts of a micro-batch."""
        self._watch.collect()

    def before_update(self, grads: Grads, factor: Tensor | float) -> None:
        """Copies parts of weights and gradients, if this update is to be measured; `factor` unscales gradients."""
        self._updates += 1
        self._due = self._next is None and self._updates % self.every == 0
        if self._due:
            self.weight_numbers()
        if self._next is not None:
            self._next.before(grads, factor)

    def after_update(self, finite: Tensor) -> None:
        """Compares weights with what they were; `finite` says whether the update was applied."""
        measured, self._next = self._next, None
        if measured is None:
            return
        measured.after(finite)
        if self._due:
            self._copies.append((self.layer_numbers(), measured))

    # --- samples

    def sample(
        self, loss_fn: Callable[[Any], Any], batch: Any, share: float = 1 / 16
    ) -> dict[str, dict[str, Sample]]:
        """Runs at most a `share` of a batch again, at least one row; describes each layer's tensors by role.

        Rows are those of the first dimension of the batch's tensors. It runs eagerly, with the weights of now, and
        leaves gradients, buffers and random state as they were. Waits for the device.
        """
        rows, whole = first_rows(batch, share, tree_leaves(batch), tree_map)
        seen: list[tuple[LayerInfo, str, Part]] = []
        with extra_pass_of_run(self._run), ExitStack() as stack:
            for module, info in zip(self._watch.modules, self.layers, strict=True):
                hook = module.register_forward_hook(partial(_observe, info, seen), with_kwargs=True)
                stack.callback(hook.remove)
            given = loss_fn(rows)
            loss, weight = given if isinstance(given, tuple) else (given, 1.0)
            # Gradients as the whole batch has them: its loss is divided by all of its tokens.
            (loss.float() / weight * whole * self._run.scale_state.scale).backward()
        for module, info in zip(self._watch.modules, self.layers, strict=True):
            own = sorted((p for p in module.parameters() if p.is_floating_point()), key=lambda p: p.dim() < 2)
            for p in own[:1]:  # the first matrix, else the first parameter
                seen.append((info, "weight", part_of(stored_values(p, p.numel()), spec_of_role(info, "weight"))))
        pairs = zip(seen, observations([part for *_, part in seen]), strict=True)
        return samples(self.layers, ((info.name, role, each) for (info, role, _), each in pairs))


def _observe(
    info: LayerInfo, seen: list[tuple[LayerInfo, str, Part]], _: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    """A forward hook: copies parts of what enters a layer, and of the gradient of what leaves it."""

    def keep(role: str, x: Tensor) -> None:
        seen.append((info, role, part_of(x, spec_of_role(info, role))))

    y = first_tensor((output,) if not isinstance(output, tuple) else output)
    x = None if info.kind == "embedding" else first_tensor((*args, *kwargs.values()))
    x = y if x is None else x
    if torch.is_grad_enabled() and x is not None:
        keep("activation", x)
    if y is not None and y.requires_grad:
        y.register_hook(partial(keep, "gradient"))
