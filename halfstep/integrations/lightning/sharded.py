"""Lightning's ModelParallelStrategy for FSDP2 under a policy.

    def configure_model(self):
        self.trainer.precision_plugin.prepare(self)     # the policy comes first: fully_shard replaces parameters
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

The mesh is one of data alone. A checkpoint is a folder as parts.py writes it, with Lightning's own entries as its
facts; Lightning would write the metadata of its folder, and what is not a tensor, as pickles.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy as PlainStrategy
from lightning.pytorch.trainer.states import TrainerFn

from halfstep.core.errors import ArgumentError, ParallelError, StateError
from halfstep.integrations import parts
from halfstep.integrations.lightning.shared import warn_between_micro_batches
from halfstep.torch.run import Run

# Entries of Lightning's checkpoint that the run's own state replaces.
_IN_THE_RUN = ("state_dict", "optimizer_states")


class ModelParallelStrategy(PlainStrategy):
    """Lightning's ModelParallelStrategy, to shard by FSDP2 over all ranks beside `HalfstepPrecision`.

    `configure_model` calls `self.trainer.precision_plugin.prepare(self)`, then `fully_shard`.
    """

    def __init__(
        self,
        data_parallel_size: int | str = "auto",
        tensor_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
        **options: Any,
    ):
        if tensor_parallel_size != 1:
            raise ParallelError(
                f"tensor_parallel_size={tensor_parallel_size!r} beside a policy is not implemented",
                hint="omit it: all ranks shard by FSDP2",
            )
        if not save_distributed_checkpoint:
            raise ArgumentError(
                "save_distributed_checkpoint=False beside a policy is not implemented: a checkpoint has the rows "
                "of each rank",
                hint="omit it; any number of ranks loads such a checkpoint, and one",
            )
        super().__init__(data_parallel_size, 1, **options)  # type: ignore[arg-type]
        self.is_last_micro_batch = True

    def setup_environment(self) -> None:
        """Connects the processes, whose mesh has all of them unless a number was given."""
        if not hasattr(self.precision_plugin, "prepare"):
            raise ArgumentError(
                "this ModelParallelStrategy shards under a policy, and there is none",
                hint='plugins=HalfstepPrecision("bf16-mixed") beside it; without a policy, use Lightning\'s own',
            )
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def model_to_device(self) -> None:
        """Moves the model. One that the run has in shards is there, and keeps them: only what is gathered goes."""
        if (sharded := self._run.sharded) is None:
            super().model_to_device()
        else:
            sharded.reshard()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, ranks keep the gradients of a micro-batch: they reduce them once for an update."""
        self.is_last_micro_batch = False
        try:
            yield
        finally:
            self.is_last_micro_batch = True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns nothing: `save_checkpoint` writes the run's state."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns nothing: `save_checkpoint` writes the run's state."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the rows of each rank to a folder, with what Lightning and callbacks add."""
        if storage_options is not None:
            raise ArgumentError(
                "storage_options= is for a checkpoint of one file, and this one is a folder of shards",
                hint="omit it",
            )
        if "optimizer_states" not in checkpoint:
            raise ArgumentError(
                "save_weights_only=True: a checkpoint of shards has a run's whole state",
                hint="save it whole: evaluation loads its weights alone",
            )
        warn_between_micro_batches(self._run)
        facts = {name: value for name, value in checkpoint.items() if name not in _IN_THE_RUN}
        parts.save(self._run, Path(self.broadcast(filepath)), facts)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Restores a run from its folder, on any number of ranks; to evaluate, its weights alone."""
        path = Path(self.broadcast(checkpoint_path))
        if (saved := parts.newest(path)) is None:
            raise StateError(
                f"`{path}` has no whole checkpoint of a sharded run",
                hint="resume from what ModelParallelStrategy of halfstep.integrations.lightning saved; load other "
                "weights in configure_model, before prepare",
            )
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            return dict(parts.load(self._run, saved)[0])
        return dict(parts.load_weights(self._run, saved))

    @property
    def _run(self) -> Run:
        return self.precision_plugin.run  # type: ignore[attr-defined,no-any-return]
