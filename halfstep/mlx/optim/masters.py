"""Masters: the fp32 numbers that parameters stand for, however they are held.

    fp32          the array in the model is its own master
    fp32:split    the model holds a bf16 (hi), and `Masters` an int16 remainder (lo): core.split
    bf16          there is none: the parameter is widened, updated and rounded back, to nearest or stochastically
    emulated      bf16 numbers in fp32 arrays, rounded back in the same way

MLX's optimizers have no masters: they compute in the dtype of the parameter, and a bf16 weight at 1 never moves at
a rate of 1e-4. But they are functions of the parameters, so they get the fp32 numbers, and their results are
stored.

In the forward pass with a split master, a matmul in bf16 uses hi unchanged. Elsewhere the whole is joined for the
pass and dropped after it: in modules other than matmuls, since a tied head may compute in another format than the
table it shares, and wherever compute is not bf16.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from halfstep.core.averages import check_decay, move_averages
from halfstep.core.errors import SplitMasterError
from halfstep.core.philox import tensor_id
from halfstep.core.policy import Policy
from halfstep.core.roles import Param
from halfstep.mlx.convert.apply import Applied
from halfstep.mlx.convert.places import Place
from halfstep.mlx.layers import Matmul
from halfstep.mlx.numerics.cast import carried, join, quantize, random_bits, split
from halfstep.mlx.numerics.dtypes import dtype_of
from halfstep.mlx.numerics.matmul import with_gradient

# A whole master from its halves: the gradient of the whole, in fp32, is that of the upper half.
_join = with_gradient(join, lambda halves, g, _: (g, mx.zeros_like(halves[1])))


class Masters:
    """The trained parameters of a model, by name, and the way from how they are held to fp32 and back."""

    def __init__(self, converted: Applied, seed: int = 0):
        self.places = converted.places
        self.held = converted.masters
        self.policy = converted.policy
        self.remainders: dict[str, mx.array] = {}  # of split masters: what the bf16 in the model lacks
        self.seed = seed
        self.set({name: place.array.astype(mx.float32) for name, place in self.places.items()})

    def wide(self) -> dict[str, mx.array]:
        """Returns the numbers themselves, in fp32: what an optimizer updates."""
        return {name: self._wide(name, place) for name, place in self.places.items()}

    def part(self, name: str, size: int) -> mx.array:
        """Returns the first elements of a master, in fp32."""
        held = self.places[name].array.reshape(-1)[:size]
        if name in self.remainders:
            return join(held, self.remainders[name].reshape(-1)[:size])
        return held.astype(mx.float32)

    def join_halves(self, tree: Any) -> Any:
        """Returns arrays of the model, halves as split masters in fp32, differentiable like the halves."""
        halves = {id(self.places[name].array): name for name in self.remainders}

        def whole(array: mx.array) -> mx.array:
            is_half = id(array) in halves and array.dtype == mx.bfloat16  # elsewhere the whole is in use
            return _join(array, self.remainders[halves[id(array)]]) if is_half else array

        return tree_map(whole, tree)

    def note_writes(self) -> None:
        """Notes the halves that are in the model now: others have no remainder."""
        self._halves = {name: self.places[name].array for name in self.remainders}

    def check_writes(self) -> None:
        """Refuses a half that other code put into the model: its remainder belongs to the old one."""
        for name, half in self._halves.items():
            if self.places[name].array is not half:
                raise SplitMasterError(
                    f"`{name}` was written by hand, and it is the bf16 half of a split master: what bf16 leaves "
                    "out would be that of the old numbers",
                    hint=f"model.load_weights([('{name}', array)], strict=False) writes a master exactly, and "
                    "model.parameters() reads it; or prepare with `param=fp32`",
                )

    def forward_arrays(self) -> dict[str, mx.array]:
        """Returns what the forward pass uses."""
        used = {}
        for name, place in self.places.items():
            is_operand = isinstance(place.module, Matmul) and place.module.casts.operand == mx.bfloat16
            is_half = name in self.remainders and place.array.dtype == mx.bfloat16  # else the whole is in use
            used[name] = self._wide(name, place) if is_half and not is_operand else place.array
        return used

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Puts what the forward pass uses into the model, and restores what was there."""
        with self.preserve():
            self.put(self.forward_arrays())
            yield

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Restores the masters after the block, exactly."""
        before = {name: place.array for name, place in self.places.items()}
        remainders, halves = {**self.remainders}, self._halves
        try:
            yield
        finally:
            self.remainders.update(remainders)
            self.put(before)
            self._halves = halves  # so that one that was written by hand is still refused

    def put(self, arrays: Mapping[str, mx.array]) -> None:
        """Puts arrays into the model unchanged."""
        for name, array in arrays.items():
            self.places[name].put(array)
        self.note_writes()

    def set(self, wide: Mapping[str, mx.array]) -> None:
        """Stores fp32 numbers, each as its master is held, rounded to nearest."""
        for name, array in wide.items():
            held, remainder = hold(array, self.held[name], self.policy)
            self.places[name].put(held)
            if remainder is not None:
                self.remainders[name] = remainder
        self.note_writes()

    def update(self, wide: Mapping[str, mx.array], finite: mx.array, count: mx.array) -> None:
        """Stores the results of update number `count`; if it is not finite, everything stays unchanged."""
        for name, place in self.places.items():
            held, remainder = self._stored(name, wide[name], count)
            place.put(mx.where(finite, held, place.array))
            if remainder is not None:
                self.remainders[name] = mx.where(finite, remainder, self.remainders[name])
        self.note_writes()

    def _wide(self, name: str, place: Place) -> mx.array:
        if name in self.remainders:
            return join(place.array, self.remainders[name])
        return place.array.astype(mx.float32)

    def _stored(self, name: str, wide: mx.array, count: mx.array) -> tuple[mx.array, mx.array | None]:
        param = self.held[name]
        if not param.stochastic:
            return hold(wide, param, self.policy)
        bits = random_bits(wide.shape, seed=self.seed, step=count, tensor=tensor_id(name))
        rounded = quantize(wide, param.format, overflow="inf", rounding="stochastic", bits=bits)
        return rounded if self.policy.emulate else rounded.astype(dtype_of(param.format)), None


def hold(wide: mx.array, param: Param, policy: Policy) -> tuple[mx.array, mx.array | None]:
    """Returns an fp32 master as it is held, rounded to nearest, and the remainder of a split one."""
    if param.split:
        return split(wide)
    if policy.emulate:
        return carried(wide, param.format), None
    return wide.astype(dtype_of(param.format)), None


class Averages:
    """Exponential moving averages of the masters, in fp32: the rule of core.averages."""

    def __init__(self, masters: Masters, decay: float):
        check_decay(decay)
        self.masters, self.decay = masters, decay
        self.arrays = masters.wide()  # compiled code keeps this dict

    def update(self, applied: mx.array) -> None:
        """Moves the averages towards the masters if `applied`, and not if the update was skipped."""
        share = mx.where(applied, 1.0 - self.decay, 0.0)
        self.arrays.update(move_averages(self.arrays, self.masters.wide(), share))

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Inside, the parameters are the averages, held as masters are; after, the masters are back, exactly."""
        with self.masters.preserve():
            self.masters.set(self.arrays)
            yield
