"""The examples of FSDP2 on two gloo ranks: audited before and after their lines, trained, and resumed."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.examples.test_integrations import ROOT, stock

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
PLAIN, ACCELERATE, TRAINER, SFT, GRPO, LIGHTNING = (
    f"examples/{name}_fsdp.py" for name in ("torchrun", "accelerate", "trainer", "sft", "grpo", "lightning")
)
ON_CPUS = ("--fsdp", "full_shard", "--bf16", "false", "--use_cpu", "--ddp_backend", "gloo", "--report_to", "none")
GENERATES = ["--num_generations", "4", "--per_device_train_batch_size", "4", "--max_completion_length", "8"]


def called(*command, code=0):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout


def audited(script, *arguments, code=0):
    """Rules that an audit of a script on two ranks names, with their messages, and how many updates it watched."""
    halfstep = Path(sys.executable).with_name("halfstep")
    audit = [halfstep, "audit", "--json", "--", *TORCHRUN, script, *arguments]
    printed = called(*audit, code=code)
    told = json.loads(printed[printed.index("{") :])
    return {finding["rule"]: finding["message"] for finding in told["findings"]}, told["updates"]


@pytest.mark.parametrize("path", [PLAIN, ACCELERATE, TRAINER, SFT, GRPO, LIGHTNING])
def test_a_script_without_its_lines_is_the_framework_s_own(path):
    code = re.sub(r'""".*?"""', "", stock(path), flags=re.S)
    compile(code, path, "exec")
    assert "halfstep" not in code
    assert "olicy" not in code.replace("auto_wrap_policy", "")


@pytest.mark.prove
@pytest.mark.parametrize(("path", "more"), [(TRAINER, []), (SFT, []), (GRPO, GENERATES)])
def test_nothing_is_wrong_with_the_scripts_of_trainers(path, more, tmp_path):
    """Each rank writes its rows, and the whole model is saved in fp32; Trainer's script resumes from its rows.

    TRL reads the device for what it logs, which the audit notes.
    """
    arguments = ["--output_dir", tmp_path, "--max_steps", "6", "--save_steps", "3", *ON_CPUS, *more]
    found, updates = audited(ROOT / path, *arguments)
    assert found.keys() == (set() if path == TRAINER else {"HS502"})
    assert all("trl/trainer/" in message for message in found.values())
    assert updates == 6
    assert len([*tmp_path.glob("checkpoint-6/step-*/state-*-of-00002.safetensors")]) == 2
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in [*file.keys()]} == {"F32"}
    if path == TRAINER:
        arguments[3] = "8"
        told = ast.literal_eval(called(*TORCHRUN, ROOT / path, *arguments).splitlines()[-1])
        assert float(told["train_steps_per_second"]) * float(told["train_runtime"]) == pytest.approx(2, rel=0.01)


@pytest.mark.prove
def test_nothing_is_wrong_with_the_script_of_lightning_which_goes_on_where_it_ended(tmp_path):
    found, updates = audited(ROOT / LIGHTNING, tmp_path)
    assert found == {}
    assert updates == 16
    assert len([*tmp_path.glob("last.ckpt/step-*/state-*-of-00002.safetensors")]) == 2
    called(*TORCHRUN, ROOT / LIGHTNING, tmp_path)


@pytest.mark.prove
def test_pure_bf16_is_named_before_and_nothing_is_wrong_after(tmp_path):
    (before := tmp_path / Path(PLAIN).name).write_text(stock(PLAIN))
    found, _ = audited(before, code=1)
    assert "`model.layers.0.input_layernorm.weight` is stepped in bf16 by AdamW" in found["HS101"]
    assert {"HS104", "HS302"} <= found.keys()  # moments, and the sum over ranks
    found, updates = audited(ROOT / PLAIN)
    assert found == {}
    assert updates == 20


@pytest.mark.prove
def test_nothing_is_wrong_with_the_script_of_accelerate_which_goes_on_where_it_ended(tmp_path):
    out = tmp_path / "checkpoint"
    found, updates = audited(ROOT / ACCELERATE, "--cpu", "--out", out)
    assert found == {}
    assert updates == 16
    assert [folder.name for folder in out.iterdir()] == ["step-000016"]
    printed = called(sys.executable, ROOT / ACCELERATE, "--cpu", "--epochs", "1", "--out", out)  # one process
    assert float(printed.split("epoch 0: loss ")[1].split()[0]) < 2.0


@pytest.mark.prove
def test_accelerates_own_launcher_starts_it(tmp_path):
    """On CPUs Accelerate would train by DDP; ours shards, which the files of both ranks show."""
    launch = [
        Path(sys.executable).with_name("accelerate"),
        "launch",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--use_fsdp", "--fsdp_version", "2", "--mixed_precision", "no", "--dynamo_backend", "no"]
    called(*launch, ROOT / ACCELERATE, "--cpu", "--epochs", "1", "--out", tmp_path / "out")
    assert len([*(tmp_path / "out").glob("step-000008/state-*-of-00002.safetensors")]) == 2
