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
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.config.run import MOST_SLICE
from halfstep.core.errors import ArgumentError
from halfstep.core.observed import LayerInfo, LayerNumbers, Observation, Sample, format_table, name_numbers
from halfstep.torch.instruments.observe.layers import spec_of_role, watched_layers
from halfstep.torch.instruments.observe.slots import LayerWatch, first_tensor
from halfstep.torch.instruments.observe.sums import Part, observations, part_of
from halfstep.torch.instruments.observe.weights import WeightNumbers, stored_values
from halfstep.torch.instruments.replay import extra_pass_of_run
from halfstep.torch.optim.adamw import Grads
from halfstep.torch.update.readback import Unread

NEVER = 2**62  # updates between two copies, if the caller makes them


class Monitor:
    """Watches the layers of a run; `run.monitor()` makes one."""

    def __init__(self, run: Any, every: int, slice: int):
        for name, value in (("every", every), ("slice", slice)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name}={value!r} is not a whole number from 1", hint=f"such as {name}=100")
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
        rows, whole = _first_rows(batch, share)
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
            if (p := _matrix(module)) is not None:
                seen.append((info, "weight", part_of(stored_values(p, p.numel()), spec_of_role(info, "weight"))))
        merged: dict[str, dict[str, Observation]] = {info.name: {} for info in self.layers}
        for (info, role, _), observation in zip(seen, observations([part for *_, part in seen]), strict=True):
            roles = merged[info.name]
            roles[role] = roles[role] + observation if role in roles else observation
        return {name: {role: each.sample() for role, each in roles.items()} for name, roles in merged.items()}


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


def _matrix(module: nn.Module) -> Tensor | None:
    """Returns the weight of a layer: its first matrix, else its first parameter."""
    own = [p for p in module.parameters() if p.is_floating_point()]
    return next((p for p in own if p.dim() > 1), own[0] if own else None)


def _first_rows(batch: Any, share: float) -> tuple[Any, float]:
    """Returns a share of the rows of a batch, at least one, and which share that is."""
    sizes = [t.shape[0] for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
    if not sizes:
        return batch, 1.0
    kept = max(1, int(sizes[0] * share))

    def cut(value: Any) -> Any:
        return value[:kept] if isinstance(value, Tensor) and value.dim() and value.shape[0] == sizes[0] else value

    return tree_map(cut, batch), kept / sizes[0]
