"""`halfstep export`: what leaves is the model that was trained, in the format that was asked for, or nothing."""

import errno
import json
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from halfstep.cli.main import run
from halfstep.cli.trained import held_out_text
from halfstep.config.load import load
from halfstep.config.model import is_matmul
from halfstep.core.errors import PolicyError
from halfstep.core.policy import Policy
from halfstep.core.rounding import cast
from halfstep.tools.export import targets
from halfstep.tools.export.blocks import round_matrix
from halfstep.tools.export.run import logits_bound
from halfstep.training.run.trained import open_trained
from halfstep.training.weights import layouts
from halfstep.training.weights.artifact import masters
from halfstep.training.weights.pretrained import open_pretrained
from tests.refusals import refuses

SHAPES = {
    "gpt2": ["width=32", "heads=4"],
    "qwen3": ["width=32", "heads=4", "kv_heads=2", "head_width=16", "mlp_width=64"],
    "tiny": ["width=32", "heads=4"],
}
SHORT = ["model.vocabulary=256", "model.context=16", "model.layers=2", "training.batch=2",
         "training.micro_batches=1", "training.steps=3", "training.compile=false", "training.save_every=3",
         "training.validation_tokens=256"]  # fmt: skip
POLICIES = {"gpt2": "fp32", "qwen3": "bf16-mixed,emulate=true,export=bf16", "tiny": "bf16-true"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of each recipe, trained when a test first needs it."""
    made = {}

    def of(recipe):
        if recipe not in made:
            folder = tmp_path_factory.mktemp(recipe)
            (folder / "text.txt").write_text("\n\n".join(f"line {i} of {i * i}, naïve" for i in range(400)))
            chosen = [*SHORT, *(f"model.{size}" for size in SHAPES[recipe]), f"data.source={folder / 'text.txt'}"]
            settings = [word for setting in chosen for word in ("--set", setting)]
            out = folder / "run"
            words = ["train", recipe, "--policy", POLICIES[recipe], "--device", "cpu", "--out", str(out)]
            assert run([*words, *settings]) == 0
            made[recipe] = out
        return made[recipe]

    return of


def export(capsys, *words):
    capsys.readouterr()
    code = run(["export", *map(str, words), "--device", "cpu", "--json"])
    return code, json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    capsys.readouterr()
    assert run(["export", *map(str, words), "--device", "cpu"]) == 2
    return " ".join(capsys.readouterr().err.split())


def numbers_of(place):
    """The model of a run, and its weights in fp32."""
    trained = open_trained(place, "cpu", policy="fp32", backend="torch")
    return trained, dict(masters(trained.state, trained.config.model, averaged=False))


def distance(found, expected):
    return np.linalg.norm(np.float64(found) - np.float64(expected)) / np.linalg.norm(np.float64(expected))


@pytest.mark.prove
@pytest.mark.parametrize(("recipe", "fmt"), [("gpt2", "fp32"), ("gpt2", "fp16"), ("qwen3", "bf16")])
def test_transformers_computes_what_we_compute(runs, tmp_path, capsys, recipe, fmt):
    import torch
    import transformers

    place = tmp_path / "model"
    asked = [] if fmt == str(Policy.parse(POLICIES[recipe]).export) else ["--format", fmt]
    code, result = export(capsys, runs(recipe), "--to", "hf", "--out", place, *asked)
    assert (code, result["kept"], result["format"]) == (0, True, fmt)
    trained, weights = numbers_of(runs(recipe))
    ours = {name: cast(value, fmt, overflow="raise") for name, value in weights.items()}
    # bit for bit what was written, in the dtype that config.json states
    back = dict(open_pretrained(str(place), trained.config.model).weights())
    assert all((back[name] == ours[name]).all() for name in ours)
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype="auto")
    assert {str(p.dtype) for p in model.parameters()} == {f"torch.{targets.DTYPES[fmt][1]}"}
    assert type(model).__name__ == {"gpt2": "GPT2LMHeadModel", "qwen3": "Qwen3ForCausalLM"}[recipe]
    trained.session.model.set_weights(ours.items())
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 256, 16)]
    with torch.no_grad():
        theirs = model.float().eval()(torch.tensor([tokens])).logits[0, -1].numpy()
    bound = logits_bound(trained.config.model, "hf")
    assert distance(theirs, trained.session.logits(tokens)) <= bound
    assert result["logits_error"] <= bound == result["logits_bound"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    text = "naïve lines\n\tof <|endoftext|> 7"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(model.generate(torch.tensor([tokens[:4]]), max_new_tokens=3, do_sample=False)[0]) == 7


def test_safetensors_are_our_own_names_in_the_format_of_the_policy(runs, capsys):
    code, result = export(capsys, runs("tiny"), "--to", "safetensors")
    place = runs("tiny") / "export" / "safetensors-bf16"
    assert (code, result["path"], result["format"]) == (0, str(place), "bf16")  # bf16-true says so
    trained, weights = numbers_of(runs("tiny"))
    back = dict(open_pretrained(str(place), trained.config.model).weights())
    assert all((back[name] == weights[name]).all() for name in weights)  # bf16 weights, so nothing was rounded
    assert result["loss_after"] == result["loss_before"]
    record = json.loads((place / "export.json").read_text())
    assert (record["to"], record["step"], record["score"]["bound"]) == ("safetensors", 3, 2**-8)
    assert sorted(record["files"]) == ["config.json", "model.safetensors"]
    assert result["bytes"] == sum(file["bytes"] for file in record["files"].values())
    wide, narrow = (
        export(capsys, runs("gpt2"), "--to", "safetensors", *more)[1] for more in ([], ["--format", "bf16"])
    )
    assert (wide["format"], wide["error"], narrow["format"]) == ("fp32", 0, "bf16")
    assert 0 < narrow["error"] <= narrow["bound"]
    assert narrow["bytes"] < 0.6 * wide["bytes"]


def test_an_export_that_does_not_score_like_its_source_is_not_kept(runs, tmp_path, capsys, monkeypatch):
    place = tmp_path / "model"
    assert export(capsys, runs("gpt2"), "--to", "hf", "--out", place)[0] == 0
    first = (place / "model.safetensors").read_bytes()

    def not_transposed(model):
        """The names, with one square matrix that is written as it is: its shape fits, the model is another."""
        name = "blocks.0.attn.o.weight"
        sources = layouts.GPT2.sources(model)
        return sources | {name: replace(sources[name], transposed=False)}

    monkeypatch.setattr(targets, "hugging_face", lambda _: replace(layouts.GPT2, sources=not_transposed))
    code, result = export(capsys, runs("gpt2"), "--to", "hf", "--out", place)
    assert (code, result["kept"], result["bytes"]) == (1, False, None)
    assert result["logits_error"] > result["logits_bound"]
    assert (place / "model.safetensors").read_bytes() == first  # the older one is still there
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_rounding_that_costs_too_much_is_not_kept(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("halfstep.tools.export.run.cast", lambda x, *_, **__: cast(x, "e4m3", overflow="saturate"))
    monkeypatch.setattr("halfstep.tools.export.run.SCORE_BOUNDS", {"bf16": 1e-5})
    capsys.readouterr()
    words = ["export", str(runs("gpt2")), "--to", "safetensors", "--format", "bf16", "--out", str(tmp_path / "m")]
    assert run([*words, "--device", "cpu"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "before: held-out loss" in said
    assert "was not kept: it does not score like its source: bits per byte" in said
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_hugging_face_layout_is_refused(runs, capsys):
    said = refused(capsys, runs("tiny"), "--to", "hf")
    assert "the model has no Hugging Face layout: gpt2 has no" in said
    assert "qk_norm = plain" in said
    assert "`--to safetensors`" in said


def test_what_is_not_there_or_not_ours_is_refused(runs, tmp_path, capsys, monkeypatch):
    place = runs("gpt2")
    held = tmp_path / "held"
    held.mkdir()
    (held / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    to = [place, "--to", "safetensors", "--out"]
    assert "holds `mine.txt`, which no export wrote" in refused(capsys, *to, held)
    assert "exists, and is no folder" in refused(capsys, *to, tmp_path / "file")
    assert "is among the run's checkpoints" in refused(capsys, *to, place / "checkpoints" / "x")
    assert "there is no folder" in refused(capsys, *to, tmp_path / "no" / "x")
    assert "which no export wrote" in refused(capsys, *to, place)
    assert "--tokens must be 1 or more" in refused(capsys, *to, tmp_path / "x", "--tokens", "0")
    (held / "mine.txt").unlink()
    assert export(capsys, *to, held)[0] == 0
    assert export(capsys, *to, held)[0] == 0  # an older export is replaced
    shutil.copy(tmp_path / "file", held / "note.txt")
    assert "holds `note.txt`" in refused(capsys, *to, held)


@pytest.mark.parametrize(
    ("missing", "to", "extra"),
    [
        (["transformers", "tokenizers"], "hf", "export"),
        (["torch"], "hf", "torch,export"),
        (["onnx", "onnxscript", "onnxruntime"], "onnx", "export"),
        (["onnxruntime"], "int8", "export"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_read(tmp_path, capsys, monkeypatch, missing, to, extra):
    monkeypatch.setattr(targets, "find_spec", lambda name: None if name in missing else name)
    said = refused(capsys, tmp_path / "no-run", "--to", to)
    assert f"`--to {to}` needs what is not installed: {', '.join(missing)}" in said
    assert f"'.[{extra}]'" in said


def test_a_place_that_cannot_hold_it_is_refused_before_anything_is_computed(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("halfstep.tools.export.run.evaluate", None)
    words = [runs("gpt2"), "--to", "safetensors", "--out", tmp_path / "m"]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9999))
        assert "it takes at least" in (said := refused(capsys, *words))
        assert "and 9,999 are free there" in said

    def read_only(path, **_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(Path, "mkdir", read_only)
    assert "m` cannot be written: Read-only file system" in refused(capsys, *words)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_leaves_nothing(runs, tmp_path, capsys, monkeypatch):
    def full(path, *_):
        path.write_bytes(b"some of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(targets, "write_tensors", full)
    said = refused(capsys, runs("gpt2"), "--to", "safetensors", "--out", tmp_path / "m")
    assert "m` cannot be written: No space left on device" in said
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def exporter():
    """torch's exporter, which takes seconds: it writes the same model once, and then copies."""
    from halfstep.torch import export as module

    written, write = {}, module.write_onnx

    def write_or_copy(config, weights, file):
        weights = list(weights)
        key = (config, *(value.tobytes() for _, value in weights))
        if key not in written:
            write(config, weights, file)
            written[key] = file.read_bytes()
        file.write_bytes(written[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "write_onnx", write_or_copy)
        yield


@pytest.mark.prove
@pytest.mark.parametrize("recipe", ["gpt2", "qwen3"])
def test_onnxruntime_computes_what_we_compute(exporter, runs, tmp_path, capsys, recipe):
    import onnxruntime

    place = tmp_path / "model"
    code, result = export(capsys, runs(recipe), "--to", "onnx", "--format", "fp32", "--out", place)
    assert (code, result["format"], result["kept"]) == (0, "fp32", True)
    assert result["logits_error"] <= result["logits_bound"] < 1e-4
    assert b"halfstep" not in (place / "model.onnx").read_bytes()  # nor where it is installed on this machine
    trained, _ = numbers_of(runs(recipe))
    session = onnxruntime.InferenceSession(place / "model.onnx")
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (2, 5), (3, 16)):  # any number of rows, and of tokens up to the context
        tokens = rng.integers(0, 256, shape)
        theirs = session.run(["logits"], {"tokens": tokens})[0]
        assert theirs.shape == (*shape, 256)
        ours = np.stack([trained.session.logits([int(token) for token in row]) for row in tokens])
        assert np.abs(theirs[:, -1] - ours).max() <= 1e-4 * np.abs(ours).max()


@pytest.mark.prove
@pytest.mark.parametrize("most", [targets.MOST_PROTOBUF, 0], ids=["one file", "weights next to it"])
def test_int8_multiplies_in_int8_and_scores_like_its_source(exporter, runs, tmp_path, capsys, monkeypatch, most):
    import onnx
    import onnxruntime

    monkeypatch.setattr(targets, "MOST_PROTOBUF", most)
    place = tmp_path / "model"
    code, result = export(capsys, runs("tiny"), "--to", "int8", "--out", place)
    assert (code, result["format"], result["kept"]) == (0, "int8", True)
    assert 0 < result["error"] <= 0.01 == result["bound"]
    assert result["logits_bound"] is None
    data = [] if most else ["model.onnx.data"]
    assert sorted(path.name for path in place.iterdir()) == ["export.json", "model.onnx", *data]
    # What runs: after the optimizations of onnxruntime every matrix is a product in int8, and of products in fp32
    # only those of activations with activations are left, two in a layer.
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "ran.onnx")
    onnxruntime.InferenceSession(place / "model.onnx", options)
    ran = [node.op_type for node in onnx.load(tmp_path / "ran.onnx", load_external_data=False).graph.node]
    in_int8 = sum(ran.count(name) for name in ("MatMulInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"))
    assert in_int8 == 2 * 6 + 1
    assert ran.count("MatMul") + ran.count("FusedMatMul") == 2 * 2


def unpacked(model, bits):
    """The matrices of a graph as its bytes say: codes with the first in the lowest bits, times their scales."""
    import onnx

    values = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            said = {each.name: each.i for each in node.attribute}
            assert (said["bits"], said["accuracy_level"], len(node.input)) == (bits, 1, 3)  # no zero points
            packed, scales = (values[name] for name in node.input[1:])
            codes = np.stack([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], axis=-1)
            codes = codes.reshape(said["N"], -1, said["block_size"]).astype(np.float32) - 2 ** (bits - 1)
            yield (codes * scales[..., None]).reshape(said["N"], -1)[:, : said["K"]]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("recipe", "to", "block", "most"),
    [("tiny", "int4", 32, 2**30), ("gpt2", "int4", 64, 0), ("gpt2", "int2", 128, 2**30), ("tiny", "int2", 32, 0)],
)
def test_4_and_2_bits_hold_the_rounded_numbers_and_say_what_that_lost(
    exporter, runs, tmp_path, capsys, monkeypatch, recipe, to, block, most
):
    import onnx
    import onnxruntime
    import torch

    from halfstep.torch.export import Logits

    monkeypatch.setattr(targets, "MOST_PROTOBUF", most)
    place, handlers = tmp_path / "model", logging.root.handlers[:]
    code, result = export(capsys, runs(recipe), "--to", to, "--block", block, "--allow", 9, "--out", place)
    assert (code, result["kept"], result["block"], result["bound"]) == (0, True, block, 9)
    assert logging.root.handlers == handlers  # which onnxruntime's quantizer adds to when it is imported
    trained, weights = numbers_of(runs(recipe))
    model = replace(trained.config.model, tied=False)
    weights.setdefault("lm_head.weight", weights["embed.weight"])
    rounded = {name: round_matrix(x, int(to[3:]), block) if is_matmul(name) else x for name, x in weights.items()}
    # the bits of the file
    held = {(x + 0.0).tobytes() for x in unpacked(onnx.load(place / "model.onnx"), int(to[3:]))}
    assert held == {(rounded[name] + 0.0).tobytes() for name in weights if is_matmul(name)}
    # onnxruntime, and torch with these numbers
    ours = Logits(model, rounded.items()).eval()
    corpus = held_out_text(trained).validation.astype(np.int64)
    windows = np.stack([corpus[start : start + 17] for start in range(0, 256, 16)])
    with torch.no_grad():
        logits = ours(torch.from_numpy(windows[:, :-1]))
    session = onnxruntime.InferenceSession(place / "model.onnx")
    theirs = session.run(["logits"], {"tokens": windows[:, :-1]})[0]
    assert distance(theirs, logits.numpy()) <= logits_bound(trained.config.model, "onnx") == result["logits_bound"]
    # what was measured
    following = torch.from_numpy(windows[:, 1:].ravel())
    loss = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), following)
    assert result["loss_after"] == pytest.approx(float(loss), rel=1e-6)
    assert result["perplexity_after"] == pytest.approx(float(loss.exp()), rel=1e-6)
    assert result["perplexity_before"] == pytest.approx(np.exp(result["loss_before"]))
    assert result["bytes"] > result["parameters_rounded"] * int(to[3:]) // 8
    record = json.loads((place / "export.json").read_text())["matrix_errors"]
    assert record == {name: pytest.approx(distance(rounded[name], weights[name])) for name in record}
    assert len(record) == len(held)
    assert result["worst_matrix_error"] == record[result["worst_matrix"]] == max(record.values())
    assert result["bytes_fp32"] == 4 * sum(x.size for x in numbers_of(runs(recipe))[1].values())


@pytest.mark.prove
def test_a_model_that_2_bits_spoil_is_kept_only_if_asked_for(exporter, runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("halfstep.tools.export.run.SCORE_BOUNDS", {"int2": 1e-9})
    words = ["export", str(runs("gpt2")), "--to", "int2", "--out", str(tmp_path / "m"), "--device", "cpu"]
    capsys.readouterr()
    assert run([*words, "--block", "64"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "was not kept: it does not score like its source: bits per byte" in said
    assert not list(tmp_path.iterdir())
    allow = re.search(r"`(--allow [0-9.]+)` keeps it anyway; `--to int4` and `--to int8` lose less", said)[1]
    assert said.endswith("lose less, and so does `--block 32`")
    assert run([*words, *allow.split()]) == 0
    assert (tmp_path / "m" / "model.onnx").exists()


def test_options_that_a_target_does_not_read_are_refused_before_anything_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: name)
    no_run = tmp_path / "no-run"
    for to in ("hf", "onnx", "int8", "artifact"):
        assert f"--block 64: `--to {to}` takes no --block" in refused(capsys, no_run, "--to", to, "--block", "64")
    for to in ("hf", "safetensors", "onnx", "artifact"):
        assert f"--allow 0.1: `--to {to}` takes" in refused(capsys, no_run, "--to", to, "--allow", "0.1")
    for to in ("int8", "int4", "int2"):
        said = refused(capsys, no_run, "--to", to, "--format", "fp32")
        assert f"--format fp32: `--to {to}` takes no --format" in said
    assert "Choose from: 32, 64, 128." in refused(capsys, no_run, "--to", "int4", "--block", "48")
    said = refused(capsys, no_run, "--to", "int2", "--allow", "20")
    assert "--allow 20: it must be from 0 to 10" in said
    assert "`--allow 0.2` accepts 20 % more" in said


@pytest.mark.prove
@pytest.mark.parametrize(("recipe", "to"), [("gpt2", "onnx"), ("tiny", "int8"), ("gpt2", "int4")])
def test_a_damaged_graph_is_not_kept(exporter, runs, tmp_path, capsys, monkeypatch, recipe, to):
    import onnx

    def damaged(job, folder):
        target.write(job, folder)
        model = onnx.load(folder / "model.onnx")
        narrow = [tensor for tensor in model.graph.initializer if tensor.data_type == onnx.TensorProto.UINT8]
        largest = max(narrow or model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
        largest.raw_data = largest.raw_data[::-1]
        onnx.save(model, folder / "model.onnx")

    target = targets.TARGETS[to]
    monkeypatch.setitem(targets.TARGETS, to, replace(target, write=damaged))
    allow = ["--allow", 9] if to == "int4" else []  # which leaves it to the logits
    code, result = export(capsys, runs(recipe), "--to", to, "--out", tmp_path / "model", *allow)
    assert (code, result["kept"], result["bytes"]) == (1, False, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.prove
@pytest.mark.parametrize(
    ("to", "quantizer", "left", "operator"),
    [
        ("int8", "quantize_dynamic", {"op_types_to_quantize": ["Gather"]}, "MatMulInteger"),
        (
            "int4",
            "matmul_nbits_quantizer.MatMulNBitsQuantizer",
            {"op_types_to_quantize": ("If",)},
            "MatMulNBits",
        ),
    ],
)
def test_a_quantizer_that_leaves_matrices_in_fp32_is_refused(
    exporter, runs, tmp_path, capsys, monkeypatch, to, quantizer, left, operator
):
    from onnxruntime.quantization import matmul_nbits_quantizer, quantize_dynamic

    quantize = {"int8": quantize_dynamic, "int4": matmul_nbits_quantizer.MatMulNBitsQuantizer}[to]
    monkeypatch.setattr(f"onnxruntime.quantization.{quantizer}", lambda *a, **k: quantize(*a, **k | left))
    said = refused(capsys, runs("tiny"), "--to", to, "--out", tmp_path / "m")
    assert f"0 of 13 matrices are {operator}; the quantizer left the others in fp32" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.prove
def test_every_kind_of_source_is_exported(runs, tmp_path, capsys):
    """A run of JAX, its average, a checkpoint of it, and an artifact of it; also where another backend runs it."""
    out, text = tmp_path / "run", runs("gpt2").parent / "text.txt"
    chosen = [*SHORT, "training.ema=0.5", *(f"model.{size}" for size in SHAPES["gpt2"]), f"data.source={text}"]
    settings = [word for setting in chosen for word in ("--set", setting)]
    words = ["train", "gpt2", "--backend", "jax", "--policy", "fp32", "--device", "cpu", "--out", str(out)]
    assert run([*words, *settings]) == 0
    assert run(["artifact", str(out), "--device", "cpu"]) == 0
    sources = {
        "run": [out],
        "checkpoint": [out / "checkpoints" / "step-000003"],
        "model": [out, "--weights", "model"],
        "artifact": [out / "model.int8z"],
    }
    digests = {}
    for name, words in sources.items():
        place = tmp_path / f"{name}-hf"
        code, result = export(capsys, *words, "--to", "hf", "--out", place)
        ran = (result["kept"], result["backend"], result["weights"])
        assert (code, *ran) == (0, True, "torch", "model" if name == "model" else "ema")
        digests[name] = json.loads((place / "export.json").read_text())["files"]["model.safetensors"]["sha256"]
    code, result = export(capsys, out, "--to", "safetensors")
    assert (code, result["kept"], result["backend"]) == (0, True, "jax")
    assert digests["run"] == digests["checkpoint"]
    assert len(set(digests.values())) == 3


@pytest.mark.prove
def test_the_lines_of_the_page_load_each_export(exporter, runs, tmp_path, capsys):
    page = Path(__file__).parents[3] / "docs" / "export.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    for to, block in zip(["hf", "safetensors", "onnx", "int8", "int4"], [*blocks, *blocks[-1:] * 2], strict=True):
        place = tmp_path / to
        assert export(capsys, runs("gpt2"), "--to", to, "--out", place)[0] == 0
        scope = {}
        exec(block.replace("FOLDER", str(place)), scope)
        said = capsys.readouterr().out
        assert set(scope["weights"]) == set(numbers_of(runs("gpt2"))[1]) if to == "safetensors" else "def " in said


@pytest.mark.parametrize("recipe", ["gpt2", "qwen3"])
def test_logits_of_onnx_may_differ_by_less_than_a_ten_thousandth_at_full_size(recipe):
    assert logits_bound(load(recipe).model, "onnx") < 1e-4


def test_onnx_is_refused_formats_that_it_does_not_have(runs, capsys, monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: name)
    assert "the run's policy says export=bf16, and `--to onnx` writes `fp32`" in refused(
        capsys, runs("tiny"), "--to", "onnx"
    )
    assert "--format fp16, and `--to onnx` writes `fp32`" in refused(
        capsys, runs("tiny"), "--to", "onnx", "--format", "fp16"
    )


def test_an_export_is_no_source_and_says_where_to_look(runs, tmp_path, capsys):
    place = tmp_path / "model"
    assert export(capsys, runs("gpt2"), "--to", "safetensors", "--out", place)[0] == 0
    said = refused(capsys, place, "--to", "safetensors", "--out", tmp_path / "again")
    assert f"`{place}` is an export, which other libraries load" in said
    assert "hint: name the run that it is from" in said


def test_your_own_loop_refuses_a_role_that_it_does_not_read():
    import torch

    from halfstep.torch import prepare

    model = torch.nn.Linear(4, 4)
    with refuses(PolicyError, "`export=bf16` changes nothing here", "leave it out"):
        prepare(model, torch.optim.AdamW(model.parameters()), "fp32,export=bf16")


def test_sampling_says_how_fast_it_is(runs, capfd):
    assert run(["sample", str(runs("gpt2")), "--device", "cpu", "--prompt", "x", "--length", "4"]) == 0
    assert "tokens per second" in capfd.readouterr().err
