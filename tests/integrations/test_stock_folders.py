"""Folders that frameworks saved under FSDP2 without a policy, continued under one, and none of their code run."""

import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.tensor import DTensor

from halfstep.core.errors import HalfstepError
from halfstep.integrations import fsdp
from tests.accelerate_state import fresh_accelerate  # noqa: F401
from tests.integrations import sharded, test_transformers
from tests.integrations.test_processes import BOUNDS
from tests.processes import preload_integrations
from tests.refusals import refuses
from tests.torch.nets import same_by_name
from tests.torch.parallel import jobs

SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
NAMES = {None: "DDP", SHARDED: "FSDP2 in shards", FULL: "FSDP2 in one file"}


@pytest.fixture(autouse=True, scope="module")
def preloaded():
    preload_integrations()


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    """Accelerate sets variables, which this process would hand to those it starts."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_and_moments(model, optimizer):
    """By the names of parameters, whatever holds them."""
    return {
        f"{kind}{name}": whole(tensor)
        for name, p in model.named_parameters()
        for kind, tensor in (("", p), *((f"{key}.", value) for key, value in optimizer.state[p].items()))
    }


def saved(folder, kind, dtype=torch.float32):
    """Trains without a policy, saves, and trains on."""
    made = sharded.begin_stock(kind, dtype=dtype)
    accelerator, model, optimizer, _ = made
    sharded.train(made, 2)
    accelerator.save_state(folder)
    at_save = weights_and_moments(accelerator.unwrap_model(model), optimizer.optimizer)
    return at_save, [loss for loss, _ in sharded.train(made, 2, first=2)]


def continued(folder, policy, ema=0.0):
    """Continues under a policy what `saved` saved, with the schedule of the folder."""
    made = sharded.begin(policy, ema=ema)
    accelerator, model, optimizer, scheduler = made
    accelerator.load_state(folder)
    loaded = weights_and_moments(accelerator.unwrap_model(model), optimizer.optimizer)
    averages = {name: p.clone() for name, p in accelerator.run.ema.items()}
    return loaded, [loss for loss, _ in sharded.train(made, 2, first=2)], scheduler.get_last_lr(), averages


@pytest.mark.parametrize(
    "kind", [SHARDED, *(pytest.param(kind, marks=pytest.mark.prove) for kind in (FULL, None))], ids=NAMES.get
)
def test_shards_continue_what_was_saved_without_a_policy(ranks, kind, tmp_path):
    """Weights, moments and counts are the same bits on each rank, and losses go on as they did."""
    stock = ranks(saved, 2, str(tmp_path), kind)
    for (at_save, losses), (loaded, next_losses, rates, _) in zip(
        stock, ranks(continued, 2, str(tmp_path), "fp32"), strict=True
    ):
        assert same_by_name(loaded, at_save)
        assert len(loaded) == 4 * len(list(jobs.net().parameters()))
        assert next_losses == pytest.approx(losses, rel=BOUNDS["fp32"])
        assert rates == [0.025]


@pytest.mark.prove
@pytest.mark.parametrize("kind", [SHARDED, FULL], ids=NAMES.get)
@pytest.mark.parametrize("policy", ["bf16-mixed", "bf16-mixed,param=fp32:split,moments=bf16"])
def test_weights_that_were_bf16_become_masters_and_averages_begin_from_them(ranks, kind, policy, tmp_path):
    (at_save, _), _ = ranks(saved, 2, str(tmp_path), kind, torch.bfloat16)
    for loaded, losses, _, _ in ranks(continued, 2, str(tmp_path), policy):
        assert {loaded[name].dtype for name, _ in jobs.net().named_parameters()} == {torch.float32}
        assert same_by_name({n: t.to(at_save[n].dtype) for n, t in loaded.items()}, at_save)
        assert all(torch.tensor(losses).isfinite())


@pytest.mark.prove
@pytest.mark.parametrize("kind", [SHARDED, FULL], ids=NAMES.get)
def test_one_process_and_four_ranks_continue_what_two_saved(ranks, kind, tmp_path, monkeypatch):
    (at_save, _), _ = ranks(saved, 2, str(tmp_path), kind)
    for loaded, *_ in ranks(continued, 4, str(tmp_path), "fp32"):
        assert same_by_name(loaded, at_save)
    monkeypatch.delenv("RANK", raising=False)
    loaded, _, _, averages = continued(str(tmp_path), "fp32", ema=0.9)
    assert same_by_name(loaded, at_save)
    assert same_by_name(averages, {name: at_save[name] for name in averages})


def given_whole(policy):
    """A sharded run that is given the whole state of an optimizer, by name; returns moments, whole again."""
    made = sharded.begin(policy)
    run, model = made[0].run, jobs.net()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.05)
    sharded.loss_of(model, torch.arange(32).reshape(2, 16)).backward()
    optimizer.step()
    run.load_torch_amp(optimizer.state_dict())
    wanted = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    found = {name: whole(run.optimizers[0].state[p]["exp_avg"]) for p, name in run.masters.names.items()}
    return same_by_name(found, wanted), [loss for loss, _ in sharded.train(made, 1)]


@pytest.mark.prove
def test_the_whole_state_of_an_optimizer_is_spread_over_ranks(ranks):
    for same, losses in ranks(given_whole, 2, "fp32"):
        assert same
        assert torch.tensor(losses).isfinite().all()


# -- Trainer


class Stock(transformers.Trainer):
    """Trainer without a policy, which shards on CPUs, too."""

    def create_accelerator_and_postprocess(self):
        plugin = fsdp.plugin_of({}, self.args.fsdp_plugin_args)
        super().create_accelerator_and_postprocess()
        fsdp.use(self.accelerator, plugin)
        self.is_fsdp_enabled = self.accelerator.is_fsdp2


def trained(folder, kind, state_dict_type, resume=None, policy="fp32"):
    sharded.forget()
    given = {"fsdp": True, "fsdp_config": {"state_dict_type": state_dict_type}, "ddp_backend": "gloo"}
    given = given if state_dict_type else {"max_steps": 4}
    changes = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 1, **given}
    trainer = test_transformers.make(folder, policy, kind, **changes)
    trainer.model.model.layers[0].self_attn.attention_dropout = 0.0
    trainer.train(resume_from_checkpoint=resume)
    return type(trainer.model).__name__, test_transformers.losses(trainer)


@pytest.mark.prove
@pytest.mark.parametrize("kind", [SHARDED, FULL], ids=NAMES.get)
def test_a_checkpoint_of_trainer_is_continued_by_ranks_and_by_one_process(ranks, kind, tmp_path, monkeypatch):
    stock = ranks(trained, 2, str(tmp_path), Stock, kind)
    ours = ranks(trained, 2, str(tmp_path), test_transformers.Trainer, kind, str(tmp_path / "checkpoint-2"))
    for (class_name, losses), (same_class, continued_losses) in zip(stock, ours, strict=True):
        assert class_name == same_class == "FSDPLlamaForCausalLM"
        assert continued_losses == pytest.approx(losses, rel=BOUNDS["fp32"])
    monkeypatch.delenv("RANK", raising=False)
    _, alone = trained(tmp_path, test_transformers.Trainer, None, str(tmp_path / "checkpoint-2"))
    # One process makes an update of half the batch; the first two losses are the checkpoint's own.
    assert alone[:2] == stock[0][1][:2]
    assert alone[2] == pytest.approx(stock[0][1][2], rel=0.1)


# -- what is refused


class Planted:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def plant_in_metadata(folder, planted):
    (folder / "optimizer_0/.metadata").write_bytes(pickle.dumps(planted))


def plant_in_a_rate(folder, planted):
    shutil.rmtree(folder / "optimizer_0")
    state = {
        "optimizer": {"state": {}, "param_groups": [{"params": ["a"], "lr": planted, "betas": torch.ones(1)}]}
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "optimizer_0"), no_dist=True)


def plant_in_weights(folder, planted):
    shutil.rmtree(folder / "pytorch_model_fsdp_0")
    torch.save({"embedding.weight": planted}, folder / "pytorch_model_fsdp.bin")


def plant_in_the_scale(folder, planted):
    torch.save({"scale": planted}, folder / "scaler.pt")


def plant_in_random_states(folder, planted):
    torch.save({"step": planted, "random_state": planted}, folder / "random_states_0.pkl")


PLANTS = [plant_in_metadata, plant_in_a_rate, plant_in_weights, plant_in_the_scale]


@pytest.fixture(scope="module")
def folder_of_one(tmp_path_factory):
    """What one process with FSDP2 saves, written by torch.distributed.checkpoint itself."""
    folder = tmp_path_factory.mktemp("stock")
    model = jobs.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.randint(0, 32, (2, 8))).sum().backward()
    optimizer.step()
    named = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    state = {
        "state": {named[i]: values for i, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [named[i] for i in group["params"]]} for group in state["param_groups"]
        ],
    }
    for name, content in (
        ("pytorch_model_fsdp_0", {"model": model.state_dict()}),
        ("optimizer_0", {"optimizer": state}),
    ):
        dcp.save(content, storage_writer=dcp.FileSystemWriter(folder / name), no_dist=True)
    return folder


def loads(folder, policy="fp16-mixed"):
    """In one process, by an Accelerator of ours; returns the weights before and after."""
    from halfstep.integrations.accelerate import Accelerator

    sharded.forget()
    accelerator = Accelerator(policy=policy, cpu=True)
    model = jobs.net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    with torch.no_grad():
        next(model.parameters()).zero_()
    try:
        accelerator.load_state(str(folder))
    finally:
        changed = bool(next(model.parameters()).any()) or bool(optimizer.state)
    return changed, model


@pytest.mark.parametrize("plant", PLANTS)
def test_a_pickle_that_names_code_is_refused_by_that_name_and_runs_nothing(plant, folder_of_one, tmp_path):
    marker, folder = tmp_path / "ran", tmp_path / "folder"
    shutil.copytree(folder_of_one, folder)
    pickle.loads(pickle.dumps(Planted(marker)))
    assert marker.exists()  # as it would, when it is loaded
    marker.unlink()
    plant(folder, Planted(marker))
    with refuses(HalfstepError, r"without running its code: it names `posix\.system`"):
        loads(folder)
    assert not marker.exists()


def test_random_states_that_accelerate_reads_itself_run_nothing(folder_of_one, tmp_path):
    """It passes over those that it cannot read."""
    marker, folder = tmp_path / "ran", tmp_path / "folder"
    shutil.copytree(folder_of_one, folder)
    plant_in_random_states(folder, Planted(marker))
    loads(folder)
    assert not marker.exists()


def test_the_folder_loads_as_long_as_nothing_is_planted(folder_of_one):
    changed, model = loads(folder_of_one)
    assert changed
    wanted = dcp_weights(folder_of_one)
    assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())


def dcp_weights(folder):
    state = {"model": {name: torch.zeros_like(p) for name, p in jobs.net().state_dict().items()}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "pytorch_model_fsdp_0"), no_dist=True)
    return state["model"]


def test_weights_of_another_model_and_those_of_several_are_refused(folder_of_one, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(folder_of_one, folder)
    torch.save({"embedding.weight": torch.ones(1)}, folder / "pytorch_model_fsdp_1.bin")
    with refuses(HalfstepError, "several models: pytorch_model_fsdp_0, pytorch_model_fsdp_1.bin"):
        loads(folder)
    shutil.rmtree(folder / "pytorch_model_fsdp_0")
    (folder / "pytorch_model_fsdp_1.bin").unlink()
    for weights, said in (
        ({"other.weight": torch.ones(1)}, "`other.weight`, which the model lacks"),
        ({"embedding.weight": torch.ones(50, 16)}, "the state has no `model.blocks.0"),
        ({"embedding.weight": torch.ones(16, 50).T}, "is a tensor of fp32 that cannot be taken over"),
        ({"embedding.weight": torch.float32}, "is a `[a-zA-Z]+` that cannot be taken over"),
    ):
        torch.save(weights, folder / "pytorch_model_fsdp.bin")
        with refuses(HalfstepError, said):
            loads(folder)
