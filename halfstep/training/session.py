"""Opens the session (config/session.py) of a run on its backend, if the backend and its device are there."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

from halfstep.config.policy_schedule import check_later
from halfstep.config.run import ParallelConfig, RunConfig
from halfstep.config.session import Session
from halfstep.config.weights import Weights
from halfstep.core.errors import MissingPackageError, how_to_install
from halfstep.core.policy import Policy
from halfstep.training import memory
from halfstep.training.schedule import build_schedule, momentum


def backend_module(backend: str, name: str) -> Any:
    """Returns a module of a backend; a missing framework says how to install it."""
    try:
        return import_module(f"halfstep.{backend}.{name}")
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"backend `{backend}` is not available: there is no module `{error.name}`",
            hint=how_to_install(backend),
        ) from None
    except (ImportError, OSError) as error:  # a library that memory has no room for, or of another machine
        raise MissingPackageError(
            f"backend `{backend}` cannot be imported: {error}",
            hint=f"free some memory; or {how_to_install(backend, '--force-reinstall ')}",
        ) from None


def check_device(config: RunConfig, policy: Policy, device: str | None, *, train: bool = True) -> int | None:
    """Refuses a device that is absent or cannot hold the model; returns how many bytes it has."""
    module = backend_module(config.backend, "session")
    place = module.as_device(device or module.devices()[0])
    module.describe(place)
    capacity: int | None = module.memory.capacity(place)
    memory.check_fits(config, policy, capacity, train=train, shards=module.num_shards(config))
    return capacity


def open_session(
    config: RunConfig,
    policy: Policy,
    device: str | None = None,
    *,
    train: bool = True,
    weights: Weights | None = None,
) -> Session:
    """Opens a session of the configured backend, with the given initial weights or those of its seed."""
    module = backend_module(config.backend, "session")
    if not train:  # weights that do not move have no average
        policy = policy.evaluation().without_training()
        training = replace(config.training, ema=0.0)
        config = replace(config, training=training, parallel=ParallelConfig(), schedule=())
    optimizer, warming = config.optimizer, None
    if train and optimizer.name == "muon" and optimizer.muon_momentum_warmup > 0:
        ends = {"start": optimizer.muon_momentum_start, "end": optimizer.muon_momentum}
        warming = partial(momentum, **ends, warmup=optimizer.muon_momentum_warmup)
    schedule = build_schedule(config.training) if train else None
    capacity = check_device(config, policy, device, train=train)
    check_later(config.schedule, lambda later: check_device(config, later, device, train=train))
    with memory.convert_oom(module.memory.is_out_of_memory, lambda: memory.oom_while_building(config, capacity)):
        session: Session = module.Session(config, policy, device, schedule, weights, momentum=warming)
    return session


def backend_version(config: RunConfig) -> str:
    """Returns the version of the framework that runs."""
    return str(import_module(f"halfstep.{config.backend}.session").version)
