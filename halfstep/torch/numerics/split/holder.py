"""A module that holds split masters: its state dict, loading, and copies of it.

A state dict contains the joined fp32 master, and loading splits it again. `copy.deepcopy` of a run works: it drops
the attributes of a parameter, and a `Holder` restores them. Of a model alone it is refused (parameter.py); inside
`run.edit()` it gives a copy with whole masters.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.core.errors import SplitMasterError
from halfstep.torch.numerics.cast import join, split
from halfstep.torch.numerics.record import EMPTY, ModuleRecord, record_of, update_record
from halfstep.torch.numerics.split.operand import SPLIT, is_split
from halfstep.torch.numerics.split.parameter import NAME, check_copy, make_split
from halfstep.torch.numerics.split.writes import check_write, note_write, watch


class Holder(nn.Module):
    """A module that may hold split parameters: `remainders` has the remainder of each, by parameter name."""

    if TYPE_CHECKING:  # the class behind a converted module has attributes that are unknown here
        _parameters: dict[str, Any]

        def __getattr__(self, name: str) -> Any: ...

    halfstep: ModuleRecord = EMPTY

    @property
    def remainders(self) -> dict[str, Tensor]:
        """The remainders. Neither parameters nor buffers: a parameter that is moved takes its own along."""
        return self.halfstep.remainders

    def add_remainder(self, name: str, remainder: Tensor) -> None:
        """Registers the remainder of a parameter of this module."""
        update_record(self, remainders={**record_of(self).remainders, name: remainder})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name, remainder in [*self.remainders.items()]:
            parameter = self._parameters.get(name)
            if parameter is None or parameter.dtype != torch.bfloat16:  # inside run.edit() the copy is whole
                del self.remainders[name]
            elif (half := parameter.__dict__.get(SPLIT)) is None or half.remainder is not remainder:
                # A shallow copy shares both.
                if half is None:  # a parameter of a third-party class was copied
                    check_copy(name)
                make_split(parameter, remainder, getattr(parameter, NAME, name))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            for name in self.remainders:
                parameter = self._parameters.get(name)
                if parameter is None:
                    raise SplitMasterError(
                        f"`{prefix}{name}`, half of a split master, is not a parameter of its layer any more",
                        hint="parametrize, prune or replace it before prepare(), or after run.unprepare()",
                    )
                if is_split(parameter):
                    check_write(parameter, prefix + name)
                    with torch.inference_mode(False), torch.no_grad():  # tensors of inference count no writes
                        joined = destination[prefix + name] = join(parameter, parameter.__dict__[SPLIT].remainder)
                    watch(parameter, joined, joined=True)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        names = [name for name in self.remainders if prefix + name in state_dict]
        if names and local_metadata.get("assign_to_params_buffers", False):
            raise SplitMasterError(
                f"load_state_dict(assign=True) would replace `{prefix}{names[0]}`, the half of a split master",
                hint="leave `assign` out: the numbers are copied, and split",
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        for name in names:
            given, hi = state_dict[prefix + name], self._parameters[name].detach()
            # Inside run.edit() it is the master; torch has reported what does not fit.
            if hi.dtype == torch.bfloat16 and given.shape == hi.shape:
                new_hi, new_lo = split(given.to(hi.device, torch.float32))
                hi.copy_(new_hi)
                self.remainders[name].copy_(new_lo)
                note_write(self._parameters[name])
