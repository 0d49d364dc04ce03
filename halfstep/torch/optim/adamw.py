"""Optimizers with explicit formats for masters and moments: what they share, and AdamW. Muon is in muon.py.

**AdamW** (Loshchilov and Hutter), with g the gradient, t the updates applied so far and decay decoupled:

    m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
    w <- w (1 - rate decay) - rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

The arithmetic is fp32, on masters (masters.py); torch's own optimizers would compute in the parameter's dtype.
Nothing is read from the device: `found_inf`, a scalar there, makes an update a no-op if it is 1, `scale` unscales
and clips the gradients, and rate = lr * factor: a torch scheduler sets `lr`, a schedule of ours the factor.

On an NVIDIA GPU AdamW takes one pass, by a kernel of ours (kernels/adamw.py). Elsewhere, and for masters that are
rounded back, torch's fused kernel updates masters that are joined before and split after. Each gives the same bits
for whole and split masters; between the two the last bit may differ: torch's fuses multiplications into additions.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter, is_, itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from halfstep.core.errors import (
    ArgumentError,
    GradientsError,
    OptimizerParametersError,
    SplitMasterError,
    StateError,
)
from halfstep.core.formats import FP32, Format, parse
from halfstep.core.roles import Param, parse_value
from halfstep.torch.kernels import reachable
from halfstep.torch.numerics.dtypes import dtype_of, format_of
from halfstep.torch.numerics.shards import ShardCast, is_shard, local_parts
from halfstep.torch.optim.masters import Masters

# Like torch: tensors, (name, tensor) pairs, or groups with a list of either under "params".
Params = Iterable[Any]
# Asked of hundreds of tensors per update, without a Python call for each.
_DTYPE, _LAYOUT, _LAST_BITS = attrgetter("dtype"), attrgetter("layout"), (15).__and__
# The dtypes of moments that our kernel reads.
MOMENTS = (torch.float32, torch.bfloat16)


class Grads(dict[int, Tensor]):
    """Gradients that were checked, by the id of their parameter: hashing a tensor is a Python call.

    A gradient may be wider than its parameter, which `.grad` may not.
    """

    @cached_property
    def plain(self) -> bool:
        """Whether all are dense and real, as they nearly always are."""
        return is_plain(self.values())


class Optimizer(torch.optim.Optimizer):
    """What both share: named parameters, masters, moments, and rates that live on the device."""

    # Names of the state in the moments format, one tensor of the parameter's shape each.
    slots: tuple[str, ...] = ()
    # Attributes of a copy besides those that torch copies.
    _kept: tuple[str, ...] = ("names", "masters", "moments", "given", "_factor")

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        masters: Mapping[str, Param] | Param | str | None = None,
        moments: Mapping[str, Format] | Format | str | None = None,
        seed: int = 0,
        **unknown: Any,
    ):
        check_settings(type(self).__name__, defaults, unknown)
        self.names: dict[Tensor, str] = {}
        self._factor: Tensor | float = 1.0
        super().__init__(params, defaults)
        held = _by_name(masters, self.names, lambda text: cast(Param, parse_value("param", text)))
        if any(param.split for param in held.values()):
            raise SplitMasterError(
                "split masters need a model that can use them", hint="prepare(model, optimizer, policy) makes them"
            )
        self.masters = Masters(self.names, held, seed=seed)
        self.moments = _by_name(moments, self.names, parse)
        self.given = {p: self.moments[name] for p, name in self.names.items() if name in self.moments}

    # By the id of a group: where a CUDA graph that is being captured reads the rate. None if there is none.
    rates: dict[int, Tensor] | None = None

    def tables(self) -> list[Any]:
        """Returns what holds memory that kernels of a step reach by address, besides parameters and state."""
        return []

    @property
    def note(self) -> str:
        """What a summary says of how updates are computed."""
        return ""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch does. A prepared run takes new parameters only if its model has them."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        labels = group.get("param_names") or [str(len(self.names) + i) for i in range(len(group["params"]))]
        for p, name in zip(group["params"], labels, strict=True):
            if problem := self._problem(p):
                self.param_groups.pop()
                raise OptimizerParametersError(f"`{name}` {problem[0]}", hint=problem[1])
        self.names |= dict(zip(group["params"], labels, strict=True))

    @contextmanager
    def replacing_parameters(self) -> Iterator[None]:
        """Inside, other code may replace each parameter in the groups by another one, as FSDP2 does.

        It is for an optimizer without state, and holds none of the first parameters meanwhile.
        """
        labels, formats = [*self.names.values()], [self.given.get(p) for p in self.names]
        self.names, self.given, self.masters = {}, {}, Masters({})
        yield
        now = [p for group in self.param_groups for p in group["params"]]
        self.names = dict(zip(now, labels, strict=True))
        self.given = {p: fmt for p, fmt in zip(now, formats, strict=True) if fmt is not None}

    def _problem(self, parameter: Tensor) -> tuple[str, str] | None:
        """Returns why a parameter cannot be updated here and what to do instead; None if it can."""
        if parameter.is_floating_point():
            return None
        dtype = str(parameter.dtype).removeprefix("torch.")
        return f"is {dtype}, and {type(self).__name__} is for real numbers", "give it to torch.optim.AdamW"

    def bind(self, masters: Masters, moments: Mapping[str, Format], compute: Format, *, emulate: bool) -> None:
        """Sets the formats of a policy: how masters and moments are held, and what matmuls compute in."""
        self._set_formats(masters, moments)

    def release(self) -> None:
        """Holds everything as before a policy was applied."""
        self._set_formats(Masters(self.names), {self.names[p]: fmt for p, fmt in self.given.items()})

    def _set_formats(self, masters: Masters, moments: Mapping[str, Format]) -> None:
        self.masters, self.moments = masters, dict(moments)
        self.names.update({p: masters.names[p] for p in self.names if p in masters.names})
        for p, state in self.state.items():
            for slot in self.slots:
                state[slot] = state[slot].to(self._dtype(p))

    def start(self) -> None:
        """Creates the state of every trained parameter that has none yet."""
        if len(self.state) == len(self.names):
            return
        for p in self.names:
            if p not in self.state and p.requires_grad:
                count = torch.zeros((), dtype=torch.float32, device=p.device)
                # In the parameter's layout: fused kernels walk through memory, not through indices.
                moments = {k: torch.zeros_like(p.detach(), dtype=self._dtype(p)) for k in self.slots}
                self.state[p] = {"step": count, **moments}

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        grads: Mapping[Tensor, Tensor] | Grads | None = None,
        *,
        found_inf: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        """Updates by gradients, the parameters' own by default, times `scale`; not at all if `found_inf` is 1."""
        if grads is not None and not isinstance(grads, Mapping):
            raise ArgumentError(
                f"step() was given a {type(grads).__name__}; it takes gradients by parameter, or no argument",
                hint="closures are not evaluated here: compute the gradients first, then call step()",
            )
        if not isinstance(grads, Grads):
            given = {p: p.grad for p in self.names} if grads is None else grads
            grads = Grads({id(p): g for p, g in given.items() if g is not None})
            self.check_grads(grads)
        self.update(grads, found_inf, scale)

    def update(self, grads: Grads, found_inf: Tensor | None, scale: Tensor | None) -> None:
        """Does the work of `step`, which hooks and schedulers wrap."""
        raise NotImplementedError

    def set_factor(self, factor: Tensor | float) -> None:
        """Multiplies every group's rate by a number, usually a device scalar."""
        self._factor = factor

    def rate_of(self, group: dict[str, Any]) -> Tensor:
        """Returns the rate of a group on the device: compiled code would recompile for a float that changes."""
        if self.rates is not None:
            return self.rates[id(group)]
        device = group["params"][0].device
        if isinstance(self._factor, Tensor) or isinstance(group["lr"], Tensor):
            return torch.as_tensor(self._factor * group["lr"]).to(device).float()
        return torch.full((), group["lr"] * self._factor, device=device)  # filled there: a copy would wait

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as torch does, but moments keep their format: torch casts them to the parameter's dtype."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        for index, p in zip(saved, ours, strict=True):
            for key, value in state_dict["state"].get(index, {}).items():
                wanted = self._dtype(p) if key in self.slots else value.dtype
                if value.dtype != wanted:
                    raise StateError(
                        f"`{key}` of `{self.names[p]}` is {value.dtype} in the state and {wanted} here",
                        hint=f"write moments={format_of(value.dtype)} in the policy to keep it",
                    )
                self.state[p][key] = value.to(p.device, copy=True)

    def check_grads(self, grads: Grads) -> None:
        """Refuses a gradient that is not dense."""
        for p, name in self.names.items():
            if id(p) in grads and grads[id(p)].is_sparse:
                raise GradientsError(
                    f"the gradient of `{name}` is sparse, and {type(self).__name__} moves every row",
                    hint="give it to torch.optim.SparseAdam, or create its embedding with sparse=False",
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in self._kept}}

    def _dtype(self, parameter: Tensor) -> torch.dtype:
        return dtype_of(self.moments.get(self.names[parameter], FP32))


class AdamW(Optimizer):
    """AdamW; each group may have its own `lr` and `weight_decay`."""

    slots = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **formats: Any,
    ):
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, **formats)

    @torch.no_grad()
    def update(self, grads: Grads, found_inf: Tensor | None, scale: Tensor | None) -> None:
        self.start()
        # What a group's step walks through, made once for as long as it stays the same.
        made: dict[int, _Rows] = self.__dict__.setdefault("_rows", {})
        for index, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if id(p) in grads]
            if not params:
                continue
            rows = made.get(index)
            if rows is None or not rows.same(params, self.masters, self.state):
                rows = made[index] = _Rows(params, self.masters, self.state)
            self._update(group, rows, [grads[id(p)] for p in params], found_inf, scale)

    def tables(self) -> list[Any]:
        return [*self.__dict__.get("_rows", {}).values()]

    def _update(
        self,
        group: dict[str, Any],
        rows: "_Rows",
        grads: list[Tensor],
        found_inf: Tensor | None,
        scale: Tensor | None,
    ) -> None:
        for launch, positions in rows.launches:
            device = rows.params[0].device
            scalars = {
                "rate": self.rate_of(group),
                "factor": torch.ones((), device=device) if scale is None else scale,
                "found_inf": torch.zeros((), device=device) if found_inf is None else found_inf,
            }
            settings = {"betas": group["betas"], "eps": group["eps"], "decay": group["weight_decay"]}
            given = grads if len(positions) == len(grads) else [grads[i] for i in positions]
            launch(make_readable(local_parts(given) if rows.sharded else given), **scalars, **settings)
            for cast_ in [rows.casts[i] for i in positions] if rows.casts else ():
                if cast_ is not None:
                    cast_.note_written()
        if rows.others:
            rest = [grads[i] for i in rows.others]
            if scale is not None:
                torch._foreach_mul_(rest, scale)
            self._by_torch(group, rows, rest, found_inf)

    def _by_torch(
        self, group: dict[str, Any], rows: "_Rows", grads: list[Tensor], found_inf: Tensor | None
    ) -> None:
        wide, (*moments, steps) = self.masters.wide(rows.rest, rows.rest_layout), rows.rest_state
        first, second = [_widen(column) for column in moments] if rows.narrow else moments
        rule: dict[str, Any] = {"lr": self.rate_of(group), **{k: group[k] for k in ("weight_decay", "eps")}}
        rule |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        rule |= {"fused": True, "found_inf": found_inf, "amsgrad": False, "maximize": False}
        adamw(wide, _widen(grads), first, second, [], steps, **rule)
        self.masters.put(rows.rest, wide, steps, rows.rest_layout)
        if rows.narrow:
            for column, wider in zip(moments, (first, second), strict=True):
                torch._foreach_copy_(column, wider)


class _Rows:
    """The parameters of a group that have gradients, with their state and how each is updated."""

    def __init__(self, params: list[Tensor], masters: Masters, state: Mapping[Tensor, dict[str, Any]]):
        self.params, self.masters, self.state = params, masters, state
        self.layout = masters.layout(params)
        self.states = [state[p] for p in params]
        self._held = [[s[k] for s in self.states] for k in (*AdamW.slots, "step")]
        # What this rank has of each.
        self._here, self.columns = local_parts(params), [local_parts(column) for column in self._held]
        self.sharded = any(map(is_shard, params))
        self.casts = self._casts()
        self._addresses = self._where()
        # A launch of our kernel for each dtype of moments.
        alike: dict[torch.dtype, list[int]] = {}
        for i, within_reach in enumerate(reachable(self._here)):
            if within_reach and i not in self.layout.rounded and self._fits_kernel(i):
                alike.setdefault(self.columns[0][i].dtype, []).append(i)
        self.launches = [(self._launch(positions), positions) for positions in alike.values()]
        launched = {i for positions in alike.values() for i in positions}
        # What torch updates instead.
        self.others = [i for i in range(len(params)) if i not in launched]
        self.rest = [params[i] for i in self.others]
        self.rest_layout = masters.layout(self.rest)
        self.rest_state = [[column[i] for i in self.others] for column in self._held]
        self.narrow = any(t.dtype is not torch.float32 for column in self.rest_state for t in column)

    def same(self, params: list[Tensor], masters: Masters, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether parameters, masters and state are still the same tensors, where they were."""
        if masters is not self.masters or state is not self.state or len(params) != len(self.params):
            return False
        for key, column in zip((*AdamW.slots, "step"), self._held, strict=True):
            if not all(map(is_, map(itemgetter(key), self.states), column)):
                return False
        return (
            all(map(is_, params, self.params))
            and masters.layout(params) is self.layout
            and self._casts() == self.casts
            and (not self.launches or self._where() == self._addresses)
        )

    def _where(self) -> list[int]:
        return list(map(Tensor.data_ptr, [t for row in self._table() for t in row if t is not None]))

    def _table(self) -> list[Sequence[Any]]:
        casts = [None if cast is None else cast.values for cast in self.casts]
        return [self._here, self.layout.remainders, *self.columns, *([casts] if casts else [])]

    def _casts(self) -> list[ShardCast | None]:
        """Returns the bf16 casts that an update can write beside shards; empty if there are no casts."""
        found = [*map(self.masters.casts.get, self.params)] if self.masters.casts else []
        return [cast if cast is not None and cast.dtype == torch.bfloat16 else None for cast in found]

    def _launch(self, positions: list[int]) -> Any:
        from halfstep.torch.kernels.adamw import Update  # Triton is installed: these are within reach

        return Update(*([row[i] for i in positions] for row in self._table()))

    def _fits_kernel(self, i: int) -> bool:
        """Whether our kernel can update a parameter: an fp32 master, whole or split, and state within reach."""
        first, second, step = (column[i] for column in self.columns)
        fp32 = self.layout.remainders[i] is not None or self.params[i].dtype == torch.float32
        return fp32 and step.dtype == torch.float32 and first.dtype in MOMENTS and all(reachable([first, second]))


def is_plain(tensors: Collection[Tensor]) -> bool:
    """Whether tensors are dense and real."""
    dense = set(map(_LAYOUT, tensors)) <= {torch.strided}
    return dense and not any(dtype.is_complex for dtype in set(map(_DTYPE, tensors)))


def readable(grads: list[Tensor]) -> bool:
    """Whether gradients are fp32, contiguous and aligned, as they nearly always are."""
    if not is_plain(grads):
        return False
    fp32 = all(map(Tensor.is_contiguous, grads)) and set(map(_DTYPE, grads)) == {torch.float32}
    return fp32 and not any(map(_LAST_BITS, map(Tensor.data_ptr, grads)))


def make_readable(grads: list[Tensor]) -> list[Tensor]:
    """Returns gradients that our kernel can read, copies if they are not."""
    if readable(grads):
        return grads
    return [g.to(torch.float32, copy=True, memory_format=torch.contiguous_format) for g in grads]


def _widen(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t if t.dtype is torch.float32 else t.float() for t in tensors]


def check_settings(kind: str, settings: Mapping[str, Any], unknown: Mapping[str, Any]) -> None:
    """Refuses unknown settings and values that no optimizer can have."""
    if unknown:
        name = next(iter(unknown))
        way = name in ("fused", "foreach", "capturable", "differentiable")
        hint = "omit it: it takes one pass anyway" if way else "use the optimizer of torch.optim that has it"
        raise ArgumentError(f"halfstep's {kind} has no setting `{name}`", hint=hint)
    shares = {"momentum": settings.get("momentum", 0.0)}
    shares |= {f"betas[{i}]": beta for i, beta in enumerate(settings.get("betas", ()))}
    for name, value in shares.items():
        if not 0.0 <= value < 1.0:
            raise ArgumentError(f"{name}={value}: a moving average keeps a share of 0 up to 1", hint="such as 0.9")
    for name in ("lr", "eps", "weight_decay"):
        value = settings.get(name, 0.0)
        if not isinstance(value, Tensor) and not 0.0 <= value < math.inf:
            raise ArgumentError(
                f"{name}={value}: it is neither negative nor infinite", hint=f"such as {name}=1e-3"
            )


def _by_name(given: Any, names: Mapping[Tensor, str], read: Callable[[str], Any]) -> dict[str, Any]:
    if given is None:
        return {}
    table = given if isinstance(given, Mapping) else dict.fromkeys(names.values(), given)
    return {name: read(value) if isinstance(value, str) else value for name, value in table.items()}
