"""The command line as people meet it: whole outputs, exit codes, and what is loaded."""

import json
import os
import subprocess
import sys
import warnings

import pytest

from halfstep import __version__
from halfstep.cli.main import run
from halfstep.config.load import load
from halfstep.config.model import parameter_shapes
from halfstep.core.policy import Policy
from tests.training.runs import raising

FRAMEWORKS = ("torch", "jax", "mlx", "numpy", "ml_dtypes", "tensorflow")


def loaded_after(*arguments):
    """The modules a fresh interpreter has loaded when the command is done."""
    code = (
        "import sys\nfrom halfstep.cli.main import run\n"
        f"code = run({list(arguments)!r})\n"
        "sys.stderr.write('\\nLOADED ' + ' '.join(sys.modules) + f'\\nCODE {code}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    return set(lines[-2].split()[1:]), int(lines[-1].split()[1]), done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("formats",),
        ("policy", "fp8-mixed"),
        ("policy", "fp32", "--model", "tiny"),
        ("probe", "--help"),
        ("probe", "--backend", "torhc"),
        ("polcy",),
    ],
)
def test_no_framework_and_not_even_numpy_is_loaded(arguments):
    loaded, _, _ = loaded_after(*arguments)
    assert "halfstep.cli.main" in loaded
    assert sorted(loaded & set(FRAMEWORKS)) == []


def test_the_version_is_ours(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_formats_as_a_table_and_as_json(capsys, data_of):
    assert run(["formats", "bf16", "e4m3"]) == 0
    out, err = capsys.readouterr()
    assert [line.rstrip() for line in out.splitlines() if line.strip()] == [
        " format  bits  layout   largest    normal  smallest  digits  special   overflow",
        " " + "─" * 78,
        " bf16    16    e8m7    3.39e+38  1.18e-38  9.18e-41     2.4  inf, NaN  inf",
        " e4m3    8     e4m3         448    0.0156   0.00195     1.2  NaN       NaN",
    ]
    assert err == ""
    assert data_of("formats", "e4m3") == [
        {"name": "e4m3", "bits": 8, "exponent_bits": 4, "mantissa_bits": 3, "bias": 7, "max": 448.0,
         "smallest_normal": 2.0**-6, "smallest_subnormal": 2.0**-9, "epsilon": 0.125,
         "decimal_digits": pytest.approx(1.204, abs=1e-3), "has_inf": False, "has_nan": True,
         "native_overflow": "nan"}
    ]  # fmt: skip


def test_policy_shows_every_role_and_reads_back(capsys, data_of):
    assert run(["policy", "fp8-mixed"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines() if line.strip()]
    values = {row[0]: row[1] for row in rows if len(row) > 1}
    assert (values["compute"], values["param"], values["scale"]) == ("bf16", "fp32", "none")
    assert (values["**"], err.strip()) == ("compute=e4m3:measured,grad=e5m2", "fp8-mixed")
    spec = "fp16-mixed,norm=bf16,scale=dynamic:init=1024; lm_head: compute=fp32"
    data = data_of("policy", spec)
    assert data["policy"] == spec
    table = {**data["roles"],
             "rules": {g: ",".join(f"{r}={v}" for r, v in c.items()) for g, c in data["rules"].items()}}  # fmt: skip
    assert Policy.from_table(table) == Policy.parse(spec)


def test_policy_has_one_row_per_parameter_or_module(capsys, data_of):
    data = data_of("policy", "fp8-mixed; lm_head: compute=fp32", "--model", "tiny")
    assert list(data)[:-1] == list(parameter_shapes(load("tiny").model))
    assert data["blocks.0.mlp.up.weight"]["values"]["compute"] == "e4m3:measured"
    assert data["blocks.0.attn_norm.weight"]["values"]["compute"] == "bf16"
    assert data["lm_head.weight (tied to embed.weight)"]["values"]["compute"] == "fp32"
    assert data["lm_head.weight (tied to embed.weight)"]["rules"] == {"compute": "lm_head", "grad": "lm_head"}
    assert run(["policy", "bf16-mixed; a.*: compute=fp32", "--module", "a.b", "--module", "c"]) == 0
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines() if line.strip()][2:] == [
        ["a.b", "fp32", "fp32", "fp32", "fp32", "fp32", "a.*"],
        ["c", "fp32", "bf16", "bf16", "fp32", "fp32"],
    ]


def test_policy_shows_those_that_take_over_during_the_run_of_a_recipe(tmp_path, capsys, refused, data_of):
    recipe = tmp_path / "own.toml"
    recipe.write_text('policy = "fp8-mixed"\n[[schedule]]\nfrom = 0.75\npolicy = "bf16-mixed"\n')
    assert run(["policy", "--model", str(recipe)]) == 0
    output = capsys.readouterr()
    first, second = (row.split() for row in output.out.splitlines() if row.startswith(" blocks.0.mlp.up.weight"))
    assert (first[2], second[2]) == ("e4m3:measured", "bf16")
    assert "after step 750: bf16-mixed" in output.err
    data = data_of("policy", "fp16-mixed", "--model", str(recipe))
    assert data["blocks.0.mlp.up.weight"]["values"]["compute"] == "fp16"
    (later,) = data["schedule"]
    assert (later["from"], later["policy"]) == (750, "bf16-mixed")
    assert later["parameters"]["blocks.0.mlp.up.weight"]["values"]["compute"] == "bf16"
    assert "changes nothing: it is the policy before it" in refused("policy", "bf16-mixed", "--model", str(recipe))
    assert "no policy was named" in refused("policy")


@pytest.mark.parametrize(("message", "said"), [("", "no reason is given"), ("a\n\nlast line\n", "last line")])
def test_an_import_that_fails_is_one_line(message, said, monkeypatch, capsys):
    def fail(arguments):
        raise ImportError(message, name="numpy")

    monkeypatch.setattr("halfstep.cli.app.run", fail)
    assert run(["formats"]) == 2
    assert capsys.readouterr().err == f"error: numpy cannot be imported: {said}\n"


def test_the_trace_of_torch_about_a_slow_format_is_not_shown(monkeypatch, recwarn):
    def multiply(*_, **__):
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm:...\nframe #0: ...", stacklevel=1)

    monkeypatch.setattr("halfstep.cli.policy.print_table", multiply)
    assert run(["formats"]) == 0
    assert not recwarn.list


def test_a_module_is_shown_with_and_without_a_model(capsys):
    assert run(["policy", "bf16-mixed; blocks.0: norm=bf16", "--model", "tiny", "--module", "blocks.0"]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines() if row.strip()]
    assert rows[-1] == ["blocks.0", "fp32", "bf16", "bf16", "fp32", "fp32", "blocks.0"]


def test_auto_is_not_offered_where_nothing_is_measured(capsys, refused):
    assert run(["policy", "autoo"]) == 2
    assert "auto" not in capsys.readouterr().err.replace("`autoo`", "")
    assert "`halfstep probe` measures" in refused("policy", "auto")


BAD = {
    "format": (
        ["formats", "bf61"],
        "error: unknown number format `bf61`; named formats are fp32, tf32, bf16, fp16, e5m2, e4m3, e3m2, e2m3, "
        "e2m1, and any ExMy that states its special values, such as e3m4ieee\n\nhint: did you mean `bf16`?\n",
    ),
    "recipe": (
        ["policy", "fp32", "--model", "tinny"],
        "error: unknown recipe `tinny`; recipes are tiny, golf, gpt2, qwen3, speedrun\n\n"
        "hint: did you mean `tiny`?\n",
    ),
    "command": (
        ["polcy"],
        'error: unknown command "polcy". Did you mean "policy"? Available commands: train, eval, sample, export, artifact, data, probe, plan, ...\n\n'
        "hint: see `halfstep --help`\n",
    ),
    "command that moved": (
        ["bench", "--arms", "autocast"],
        "error: `halfstep bench` is no command anymore\n\n"
        "hint: the race is a script of the repository: run `python benchmarks/race/bench.py` in a clone of it\n",
    ),
    "option": (
        ["formats", "--jsn"],
        "error: unknown option: --jsn. Did you mean --json?\n\nhint: see `halfstep formats --help`\n",
    ),
    "value of another option": (
        ["export", "run", "--to", "onnx", "--format", "int4"],
        'error: invalid value "int4" for --format. Choose from: "fp32", "bf16", "fp16".\n\nhint: write `--to int4`\n',
    ),
    "value in capitals": (
        ["sample", "run", "--backend", "JAX"],
        'error: invalid value "JAX" for --backend. Choose from: "torch", "jax", "mlx".\n\nhint: write `--backend jax`\n',
    ),
    "missing argument": (
        ["compare", "fp32"],
        "error: `halfstep compare` needs B\n\nhint: B is the reference: the same; see `halfstep compare --help`\n",
    ),
    "missing option": (
        ["data", "pack", "x", "--out", "y"],
        "error: `halfstep data pack` needs --tokenizer\n\n"
        "hint: --tokenizer is bytes, a tokenizer.json, a sentencepiece *.model, a folder that holds one of them, or "
        "tiktoken:NAME; see `halfstep data pack --help`\n",
    ),
    "missing value": (
        ["data", "pack", "x", "--tokenizer", "bytes", "--out"],
        "error: --out needs a value\n\nhint: --out is the folder to write to; see `halfstep data pack --help`\n",
    ),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_exits_with_2_and_says_what_to_do(arguments, expected, capsys):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", expected)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["formats", "e4m4"], "unknown-format"),
        (["policy", "a=b"], "unknown-role"),
        (["formats", "--all"], "usage"),
    ],
)
def test_with_json_an_error_is_data_with_a_code(arguments, code, capsys):
    assert run(arguments) == 2
    out, words = capsys.readouterr()
    assert out == ""
    assert run([*arguments, "--json"]) == 2
    out, same = capsys.readouterr()
    error = json.loads(out)
    assert error.keys() == {"code", "message", "hint"}
    assert (error["code"], f"error: {error['message']}") == (code, words.splitlines()[0])
    assert same == words


def test_the_installed_command_exits_with_the_code():
    done = subprocess.run([sys.executable, "-m", "halfstep", "formats", "bf61"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown number format")
    assert "Traceback" not in done.stderr


WAITING = {
    "eval": ("halfstep.training.checkpoints.checkpoint", "load_newest", ["eval", "."]),
    "sample": ("halfstep.training.checkpoints.checkpoint", "load_newest", ["sample", "."]),
    "artifact": ("halfstep.training.checkpoints.checkpoint", "load_newest", ["artifact", "."]),
    "probe": ("halfstep.tools.probe", "run", ["probe"]),
    "train": ("halfstep.cli.train", "load", ["train", "--out", "x"]),
    "tokenizer": ("halfstep.training.data.pack.sources", "find_sources",
                  ["data", "train-tokenizer", "x", "--out", "y"]),
}  # fmt: skip


@pytest.mark.parametrize(("module", "name", "arguments"), WAITING.values(), ids=WAITING)
def test_an_interrupted_command_prints_one_line(module, name, arguments, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"{module}.{name}", raising(KeyboardInterrupt))
    assert run(arguments) == 130
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1]) == ("", "interrupted")
    assert "Traceback" not in err


IMPORTS = ["halfstep.cli.app", "cyclopts", "halfstep.core.formats"]


@pytest.mark.parametrize(
    ("entry", "module"),
    [("-m", "halfstep.cli.main"), *((entry, name) for entry in ("-m", "-c") for name in IMPORTS)],
)
def test_an_interrupt_during_imports_prints_no_traceback(tmp_path, module, entry):
    """Ctrl-C in the first moment. The script that pip installs does what `-c` does here."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's `&` has it ignored
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    script = "import sys; from halfstep.cli.main import main; sys.argv[1:] = ['formats']; sys.exit(main())"
    words = {"-m": ["-m", "halfstep", "formats"], "-c": ["-c", script]}[entry]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
