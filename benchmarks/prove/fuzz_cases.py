"""What fuzz.py tries: commands with random arguments, and one good file of each kind, damaged in every way."""

import base64
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import sentencepiece
from safetensors.numpy import save_file
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from halfstep.config import schema
from halfstep.config.run import RunConfig
from halfstep.training.files import table_digest
from halfstep.training.weights import artifact

Change = Callable[[Path], object]


@dataclasses.dataclass(frozen=True)
class Case:
    """A command, and what happens first to the copy of the material that it runs in."""

    words: list[str]
    file: str = ""  # which file is damaged, and how
    prepare: Change = lambda folder: None


# A run that takes a moment; later words win.
_SMALL = "model.context=16 model.layers=1 model.width=16 model.heads=2 model.vocabulary=256 training.batch=2 "
_SMALL += "training.steps=2 training.validation_tokens=64 training.measure_ceiling=false training.compile=false "
_SMALL += "data.source=text.txt"
_FLAGS = [word for setting in _SMALL.split() for word in ("--set", setting)]


def listed(text: str) -> list[str]:
    """Returns the words of a text."""
    return text.split()


def last_wins(words: list[str]) -> list[str]:
    """Drops an option and its value where the same option follows, which no command allows."""
    names = [word.partition("=")[0] for word in words]
    repeated = [
        place
        for place, word in enumerate(words)
        if word.startswith("--") and word in names[place + 1 :] and word not in ("--", "--set")
    ]
    return [word for place, word in enumerate(words) if place not in repeated and place - 1 not in repeated]


def train(*words: str) -> list[str]:
    """Returns the command of a small run; the words may begin with a recipe."""
    recipe = words[:1] if words and not words[0].startswith("--") else ()
    return ["train", *recipe, "--policy", "fp32", "--device", "cpu", *_FLAGS, *words[len(recipe) :]]


def pack(*words: str, validation: str = "0.2") -> list[str]:
    """Returns the command that packs sources."""
    return last_wins(["data", "pack", "--tokenizer", "bytes", "--validation", validation, *words])


NUMBERS = listed("0 -1 1 2 3.5 -0.0 1e12 1e-320 1e400 nan inf -inf true 1_0 0x10")
NUMBERS += ["0x" + "f" * 6000, "9" * 5000, *(str(number) for number in (2**31, 2**53, 2**63 - 1, 2**63, 10**30))]
TEXTS = listed("x none auto - -- --help . .. / ~ ~nobody/x * ** [ a=b %s%n{0}{x} $(id) `id` 💥 ééé")
TEXTS += ["", " ", "\x1b[31mred\x1b[0m", "\x07\x08\r", "\u202egnp", "a\nerror: b", "\udcff", "A" * 100_000]
TEXTS += ["x y " * 25_000, "[" * 3000, "{" * 3000, "(" * 3000, "a." * 3000 + "a"]
ODD_NAME = "odd\nname\x1b[1m"
PLACES = ["pipe", "zero", "folder", "huge", "empty", "missing", "missing/x", "text.txt", ODD_NAME, "x" * 300]
POLICIES = listed(
    "fp32 bf16-mixed bf16 fp16-mixed fp8-mixed fp16-mixed,scale=dynamic:init=1e300 fp32,norm= e0m0ieee"
)
POLICIES += listed("e999999999999m7fn fp32,compute=e4m3b9999999999fn fp32,param=fp32:split:split")
POLICIES += ["bf16-mixed; ; ;", "fp32;" * 2000, "bf16-mixed; **: compute=fp32", "e" + "9" * 5000 + "m1f"]

# --- commands ---------------------------------------------------------------------------------------------

# Between what a machine can hold and what it cannot lies what takes long: nothing is learned from that here.
SLOW = ("training.steps", "training.micro_batches", "training.batch", "model.context", "model.width")
SLOW_VALUES = ("1e12", str(2**31), str(2**53))


def commands(rng: random.Random) -> Iterator[Case]:
    """Yields commands without end: settings with values of every kind, and random ones."""
    values = [*NUMBERS, *TEXTS, *PLACES, *(f"[{number}, {number}]" for number in NUMBERS[:6]), "{}", "[[]]"]
    keys = [row.key for row in schema.rows(RunConfig) if row.key != "training.compile"]
    pairs = [(key, value) for key in keys for value in values if key not in SLOW or value not in SLOW_VALUES]
    rng.shuffle(pairs)
    makers = [_formats, _policy, _sample, _eval, _artifact, _export, _pack, _train_tokenizer, _show]
    makers += [_train, _other, _look, _compare]
    for key, value in itertools.cycle(pairs):
        yield Case(train(*rng.choice([(), (), (), ("gpt2",), ("golf",)]), "--set", f"{key}={value}"))
        yield Case(last_wins(rng.choice(makers)(rng)))


def _formats(rng: random.Random) -> list[str]:
    bits, more = listed("0 1 4 8 9 99 999999999999"), listed("0 3 7 24 999999999999")
    ends = listed("f fn fnuz ieee b7fn b0f b999999999999ieee b-1f")
    name = f"e{rng.choice(bits)}m{rng.choice(more)}{rng.choice(['', *ends])}"
    return ["formats", rng.choice([name, name, *TEXTS]), *rng.choice([[], ["--json"]])]


def _policy(rng: random.Random) -> list[str]:
    parts = listed("fp32 bf16-mixed auto compute norm = , ; : e4m3 split scale * 1e9 [")
    spec = rng.choice([*POLICIES, *rng.sample(TEXTS, 3), "".join(rng.choices(parts, k=rng.randrange(1, 12)))])
    return ["policy", spec, *_options(rng, {"--json": [None], "--model": [*TEXTS, "tiny"], "--module": TEXTS})]


def _sample(rng: random.Random) -> list[str]:
    options = {"--length": ["0", "-1", "1", "1e400", "9" * 5000], "--temperature": NUMBERS, "--top-k": NUMBERS}
    options |= {"--seed": NUMBERS, "--prompt": TEXTS, "--weights": ["model", "ema", "x"]}
    options |= {"--data": [*PLACES, *TEXTS], "--device": ["cuda:99", *TEXTS]}
    return ["sample", _run(rng), "--device", "cpu", "--length", "2", *_options(rng, options)]


def _eval(rng: random.Random) -> list[str]:
    options = {"--policy": POLICIES, "--weights": ["model", "ema", ""], "--data": [*PLACES, *TEXTS]}
    options |= {"--device": TEXTS, "--backend": ["torch", *TEXTS]}
    return ["eval", _run(rng), "--device", "cpu", *_options(rng, options)]


def _artifact(rng: random.Random) -> list[str]:
    options = {"--out": [*PLACES, "run/run.toml", "out.int8z"], "--limit": NUMBERS, "--policy": POLICIES}
    return ["artifact", _run(rng), "--device", "cpu", *_options(rng, options)]


def _export(rng: random.Random) -> list[str]:
    to = rng.choice(["safetensors"] * 4 + ["hf", "onnx", "int8", _text(rng)])  # the exporter of ONNX takes seconds
    options = {"--out": [*PLACES, "run/checkpoints", "exported", "out"], "--format": ["bf16", "fp16", *TEXTS]}
    options |= {"--tokens": NUMBERS, "--weights": ["model", "ema", ""], "--data": [*PLACES, *TEXTS]}
    return ["export", _run(rng), "--to", to, "--device", "cpu", *_options(rng, options)]


def _pack(rng: random.Random) -> list[str]:
    options = {
        "--workers": NUMBERS,
        "--shard-tokens": NUMBERS,
        "--field": TEXTS,
        "--validation": [*NUMBERS, *PLACES],
    }
    options |= {
        "--only": TEXTS,
        "--separator": TEXTS,
        "--tokenizer": [*PLACES, *TEXTS, "tokenizer.json", "packed"],
    }
    known = ["lines.jsonl", "table.parquet", "packed", "run", "bomb.jsonl.gz", *PLACES, *TEXTS]
    sources = rng.choices(known, k=rng.randrange(3))
    return [*pack(*sources, "--out", rng.choice(["out", *PLACES])), *_options(rng, options)]


def _train_tokenizer(rng: random.Random) -> list[str]:
    options = {"--vocabulary": NUMBERS, "--field": TEXTS, "--validation": NUMBERS, "--only": TEXTS}
    sources = rng.choices(["text.txt", "lines.jsonl", *PLACES, *TEXTS], k=rng.randrange(1, 3))
    out = rng.choice(["t.json", *PLACES])
    return ["data", "train-tokenizer", *sources, "--out", out, *_options(rng, options)]


def _show(rng: random.Random) -> list[str]:
    place = rng.choice([*PLACES, *TEXTS, "packed", "run"])
    return ["data", rng.choice(["show", "verify"]), place, *rng.choice([[], ["--json"]])]


def _train(rng: random.Random) -> list[str]:
    options = {"--out": [*PLACES, "run", "packed", *TEXTS], "--init": [*PLACES, "run", "weights", *TEXTS]}
    options |= {"--resume": [None], "--allow-older": [None], "--deadline": NUMBERS, "--policy": POLICIES}
    options |= {"--backend": ["torch", *TEXTS], "--device": TEXTS, "--set": [*TEXTS, "policy.norm=" + "[" * 3000]}
    recipe = rng.choice([(), (), ("tiny",), ("recipe.toml",), (f"{rng.choice(PLACES)}.toml",), (_text(rng),)])
    return train(*recipe, *_options(rng, options))


def _other(rng: random.Random) -> list[str]:
    options = {"--backend": ["torhc", *TEXTS], "--device": TEXTS}
    options |= {"--budget": [number for number in NUMBERS if number[0] not in "123"]}
    probe = ["probe", "--backend", "torch", "--budget", "0.01", *_options(rng, options)]
    names = ["train", "eval", "sample", "data", "formats"]
    flag = f"--{_text(rng) or 'x'}"  # `train --` is a run of minutes, and right
    return rng.choice([probe, [_text(rng)], ["data", _text(rng)], [rng.choice(names), flag]])


def _look(rng: random.Random) -> list[str]:
    report = ["report", _run(rng), *_options(rng, {"--out": [*PLACES, "page.html", *TEXTS]})]
    runs = ["runs", rng.choice([".", _run(rng)]), *_options(rng, {"--json": [None]})]
    watch = ["watch", "packed", *_options(rng, {"--port": NUMBERS})]  # a run would be served without end
    return rng.choice([report, runs, watch])


def _compare(rng: random.Random) -> list[str]:
    logs = ["losses.csv", "wandb.csv", "tensorboard", _EVENTS, "run", *(f"{place}.csv" for place in PLACES[:5])]
    logs += ["losses", "losses/seed-0.jsonl", "project.db", "project.db:a-*", f"project.db:{_text(rng)}"]
    options = {
        "--column": [*TEXTS, "loss"],
        "--delta": NUMBERS,
        "--page": [*PLACES, "page.html"],
        "--json": [None],
    }
    options |= {"--seeds": NUMBERS, "--steps": NUMBERS}
    return ["compare", rng.choice([*logs, *PLACES]), rng.choice(logs), *_options(rng, options)]


def _run(rng: random.Random) -> str:
    return rng.choice(
        ["run", "run", "run", "model.int8z", "run/checkpoints/step-000002", *PLACES, *rng.sample(TEXTS, 5)]
    )


def _text(rng: random.Random) -> str:
    letters = [chr(rng.choice([rng.randrange(1, 128), rng.randrange(1, 0xD800)])) for _ in range(9)]
    return rng.choice([*TEXTS, *PLACES, "".join(letters)])


def _options(rng: random.Random, known: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name in rng.sample(sorted(known), rng.randrange(min(4, len(known) + 1))):
        value = rng.choice(known[name])
        words += [name] if value is None else [f"{name}={value}"] if rng.random() < 0.5 else [name, value]
    return words


# --- files ------------------------------------------------------------------------------------------------

_RESUME = ["train", "--resume", "--out", "run", "--device", "cpu", "--set", "training.steps=3"]
_INIT = train("--out", "new", "--init")
_PACKED = train("--out", "new", "--set", "data.source=packed", "--set", "model.vocabulary=300")
_VERIFY = ["data", "verify", "packed"]
_SAMPLE = ["sample", "run", "--device", "cpu", "--length", "2"]
_EXPORT = ["export", "run", "--to", "safetensors", "--device", "cpu", "--out", "exported"]
_SAVED = "run/checkpoints/step-000002"
_EVENTS = "tensorboard/events.out.tfevents.1"
# The commands that read each file, tried in turn.
READERS: dict[str, list[list[str]]] = {
    "recipe.toml": [train("recipe.toml"), ["policy", "fp32", "--model", "recipe.toml"]],
    "run/run.toml": [_RESUME],
    "run/events.jsonl": [_RESUME, ["report", "run"], ["runs", "run", "--json"], ["compare", "run", "run"]],
    "run/lock": [_RESUME, ["runs", "run"]],
    f"{_SAVED}/manifest.json": [_RESUME, ["eval", "run", "--device", "cpu"], [*_INIT, "run"], _SAMPLE],
    f"{_SAVED}/state.safetensors": [_RESUME, _SAMPLE],
    "packed/index.json": [["data", "show", "packed"], _PACKED, _VERIFY, pack("text.txt", "--out", "packed")],
    "packed/train_000000.bin": [_PACKED, _VERIFY],
    "packed/train_000000.crc": [_PACKED, _VERIFY],
    "packed/token_bytes.npy": [_PACKED, _VERIFY],
    "packed/tokenizer.json": [_VERIFY, pack("text.txt", "--out", "new", "--tokenizer", "packed")],
    "partly/packing.json": [pack("text.txt", "--out", "partly")],
    "tokenizer.json": [pack("text.txt", "--out", "new", "--tokenizer", "tokenizer.json")],
    "tokenizer.tiktoken.json": [pack("text.txt", "--out", "new", "--tokenizer", "tokenizer.tiktoken.json")],
    "tokenizer.model": [pack("text.txt", "--out", "new", "--tokenizer", "tokenizer.model")],
    "weights/model.safetensors": [[*_INIT, "weights"], [*_INIT, "weights/model.safetensors"]],
    "weights/config.json": [[*_INIT, "weights"]],
    "sharded/model.safetensors.index.json": [[*_INIT, "sharded"]],
    "model.int8z": [
        [*_INIT, "model.int8z"],
        ["artifact", "run", "--device", "cpu", "--out", "model.int8z"],
        ["sample", "model.int8z", "--device", "cpu", "--length", "2"],
        ["eval", "model.int8z", "--device", "cpu"],
    ],
    "exported/export.json": [_EXPORT],
    "text.txt": [train("--out", "new"), pack("text.txt", "--out", "new")],
    "lines.jsonl": [pack("lines.jsonl", "--out", "new")],
    "lines.jsonl.gz": [pack("lines.jsonl.gz", "--out", "new")],
    "table.parquet": [pack("table.parquet", "--out", "new")],
    "table.arrow": [pack("table.arrow", "--out", "new")],
    "dataset/state.json": [pack("dataset", "--out", "new")],
    "losses.csv": [
        ["compare", "losses.csv", "wandb.csv"],
        ["compare", "wandb.csv", "losses.csv", "--column", "loss"],
    ],
    "losses/seed-0.jsonl": [
        ["compare", "losses/seed-0.jsonl", "losses.csv"],
        ["compare", "losses", "losses", "--delta", "1%"],
    ],
    "project.db": [
        ["compare", "project.db:a-*", "project.db:b-*"],
        ["compare", "losses", "project.db", "--unpaired"],
    ],
    "wandb.csv": [
        ["compare", "wandb.csv", "wandb.csv", "--page", "page.html"],
        ["compare", "losses.csv", "wandb.csv"],
    ],
    _EVENTS: [["compare", "tensorboard", "losses.csv"], ["compare", "losses.csv", _EVENTS, "--json"]],
}
VALUES: list[Any] = [None, True, -1, 0, 10**30, 1.5, float("nan"), "", "x", "\x1b[31m", "../../x", "A" * 100_000]
VALUES += [[], {}, [[]], {"x": 1}]
_DEEP = "[" * 2000 + "]" * 2000


def damaged(rng: random.Random, material: Path) -> Iterator[Case]:
    """Yields cases without end, each with one file that is not what it was."""
    turns = {name: itertools.cycle(words) for name, words in READERS.items()}
    kinds = [_replaced, _replaced, _flipped, _cut, _added, _rewritten, _rewritten, _rewritten]
    for name in itertools.cycle(READERS):
        about, change = rng.choice(kinds)(rng, material / name)
        yield Case(next(turns[name]), f"{name}: {about}", lambda folder, n=name, c=change: c(folder / n))  # type: ignore[misc]


def _replaced(rng: random.Random, file: Path) -> tuple[str, Change]:
    brackets = rng.choice(["[", "{", '{"a":', "x = [", "a."]) * 5000
    ways: dict[str, Change] = {
        "a pipe": os.mkfifo,
        "a device that never ends": lambda path: path.symlink_to("/dev/zero"),
        "a folder": Path.mkdir,
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a terabyte": terabyte,
        "empty": Path.touch,
        "missing": lambda path: None,
        "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00x" * 100),
        "brackets": lambda path: path.write_text(brackets),
    }
    about = rng.choice(sorted(ways))
    return about, lambda path: (path.unlink(), ways[about](path))


def _flipped(rng: random.Random, file: Path) -> tuple[str, Change]:
    content = bytearray(file.read_bytes())
    places = [rng.randrange(min(len(content), rng.choice([64, 1 << 30]))) for _ in range(rng.choice([1, 1, 8]))]
    for place in places:
        content[place] ^= 1 << rng.randrange(8)
    return f"bits flipped at {places}", lambda path: _write(path, bytes(content))


def _cut(rng: random.Random, file: Path) -> tuple[str, Change]:
    content = file.read_bytes()
    size = rng.randrange(len(content))
    return f"cut to {size} bytes", lambda path: _write(path, content[:size])


def _added(rng: random.Random, file: Path) -> tuple[str, Change]:
    more = rng.choice([b"\0" * 9, b"{}\n", b"\x1b[2J", b"\xff", b"[" * 5000, b"x" * 100_000 + b"\n"])
    content = file.read_bytes()
    place = rng.choice([0, len(content) // 2, len(content)])
    return f"{more[:4]!r} added at {place}", lambda path: _write(path, content[:place] + more + content[place:])


def _rewritten(rng: random.Random, file: Path) -> tuple[str, Change]:
    """Changes one value of JSON, TOML, an event or a header, and makes the digests right, as an attacker would."""
    content = file.read_bytes()
    if file.name == "events.jsonl":
        lines = content.splitlines()
        place = rng.randrange(len(lines))
        about, lines[place] = _other_value(rng, lines[place])
        return about, lambda path: _write(path, b"\n".join(lines) + b"\n")
    if file.suffix == ".safetensors":
        size = int.from_bytes(content[:8], "little")
        about, header = _other_value(rng, content[8 : 8 + size])
        changed = len(header).to_bytes(8, "little") + header + content[8 + size :]
        return about, lambda path: _seal_state(path, changed)
    if file.suffix == ".json":
        about, text = _other_value(rng, content)
        return about, lambda path: _write(path, text)
    if file.suffix == ".toml":
        value = rng.choice([*NUMBERS, *(json.dumps(text) for text in [*TEXTS, "\0", "\ud800"]), _DEEP])
        key = rng.choice(listed("steps layers source title policy batch rate init x a.b"))
        text = content + f"\n{key} = {value}\n".encode()
        return f"{key} = {value[:20]}", lambda path: _write(path, text)
    if file.suffix == ".csv":
        rows = [line.split(b",") for line in content.splitlines()]
        row, cell = rng.choice([0, 1, len(rows) - 1]), rng.randrange(len(rows[0]))
        other = rng.choice([*NUMBERS, *TEXTS, "1e18", "1e30", "\0", '"', "x" * 200_000])
        rows[row][cell] = other.encode(errors="surrogateescape")
        text = b"\n".join(b",".join(cells) for cells in rows)
        return f"row {row}, column {cell} = {other[:20]!r}", lambda path: _write(path, text)
    if file.suffix == ".jsonl":
        lines = [b"[]", b"{}", b'{"text": 1}', b'{"text": "\\ud800"}', b"9" * 5000, _DEEP.encode(), b'{"text": "x']
        line = rng.choice(lines)
        return f"the line {line[:20]!r}", lambda path: _write(path, content + line + b"\n")
    return _flipped(rng, file)


def _other_value(rng: random.Random, text: bytes) -> tuple[str, bytes]:
    """Returns JSON with another value in one place, or without it."""
    table = here = parent = json.loads(text)
    keys: list[Any] = []
    while isinstance(here, dict | list) and here and (not keys or rng.random() < 0.8):
        keys.append(rng.choice(list(here) if isinstance(here, dict) else range(len(here))))
        parent, here = here, here[keys[-1]]
    value = rng.choice([*VALUES, "remove", "deep", "more"])
    if value == "remove":
        del parent[keys[-1]]
    elif value == "more" and isinstance(parent, dict):
        parent["\x1b[7mmore"] = 1
    else:
        parent[keys[-1]] = value
    if isinstance(table, dict) and "digest" in table and keys[0] != "digest":
        table["digest"] = table_digest(table)
    written = json.dumps(table)
    written = written.replace('"deep"', _DEEP) if value == "deep" else written  # Python could not have sealed it
    return f"{'.'.join(map(str, keys))} = {str(value)[:20]!r}", written.encode()


def _seal_state(path: Path, content: bytes) -> None:
    """Writes a file of tensors, and its digest into the manifest next to it, if there is one."""
    _write(path, content)
    manifest = path.with_name("manifest.json")
    if manifest.exists():
        table = json.loads(manifest.read_bytes())
        table["files"][path.name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        _write(manifest, json.dumps({**table, "digest": table_digest(table)}).encode())


def _write(path: Path, content: bytes) -> None:
    path.unlink()  # it may be a link to the material
    path.write_bytes(content)


def terabyte(path: Path) -> None:
    """Makes a file that says it has a terabyte, and takes no room."""
    path.touch()
    os.truncate(path, 1 << 40)


# --- material ---------------------------------------------------------------------------------------------

# Commands that make the rest, in this order.
MADE = [
    ["data", "train-tokenizer", "text.txt", "--vocabulary", "300", "--out", "tokenizer.json"],
    pack("text.txt", "--out", "packed", "--tokenizer", "tokenizer.json"),
    train("--set", "training.save_every=1", "--out", "run"),
    ["artifact", "run", "--device", "cpu", "--out", "model.int8z"],
    _EXPORT,
]
PARTLY = pack("text.txt", "--out", "partly")


def make_sources(folder: Path) -> None:
    """Writes what commands do not make: recipes, text, records, tables, two tokenizers, and hostile places."""
    text = "\n\n".join(f"def f{n}(x):\n    return x * {n} + {n * n}  # {'é' * (n % 3)}" for n in range(150))
    parts = [part for part in text.split("\n\n") if part]
    (folder / "text.txt").write_text(text)
    (folder / "recipe.toml").write_text('title = "odd"\n[data]\nsource = "text.txt"\n[training]\nsteps = 2\n')
    lines = "".join(json.dumps({"text": part}) + "\n" for part in parts)
    (folder / "lines.jsonl").write_text(lines)
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    table = pyarrow.table({"text": parts})
    pyarrow.parquet.write_table(table, folder / "table.parquet")
    (folder / "dataset").mkdir()
    for place in (folder / "table.arrow", folder / "dataset" / "data.arrow"):
        with pyarrow.OSFile(str(place), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    (folder / "dataset" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    (folder / "dataset" / "dataset_info.json").write_text("{}")
    ranks = [[base64.b64encode(bytes([value])).decode(), value] for value in range(256)]
    encoding = {"name": "own", "pattern": r"\S+|\s+", "special": {"<|endoftext|>": 256}, "ranks": ranks}
    (folder / "tokenizer.tiktoken.json").write_text(json.dumps(encoding))
    model, given = io.BytesIO(), {"vocab_size": 150, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()), model_writer=model, **given
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / ODD_NAME).write_text(text)
    _make_logs(folder)
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    terabyte(folder / "huge")
    for name in PLACES[:5]:
        for ending in ("toml", "csv"):
            (folder / f"{name}.{ending}").symlink_to(name)
    with gzip.open(folder / "bomb.jsonl.gz", "wb", compresslevel=1) as bomb:  # a line of 300 MB
        bomb.write(b'{"text": "')
        for _ in range(300):
            bomb.write(b"x" * 1_000_000)


def _make_logs(folder: Path) -> None:
    """Writes the losses of a run as people log them."""
    losses = [(step, 4 + 1 / step, 4.5 + 1 / step) for step in range(1, 31)]
    lines = ["step,loss,val_loss", *(",".join(map(str, row)) for row in losses)]
    (folder / "losses.csv").write_text("\n".join(lines))
    head = ["Step", *(f"run {n} - {name}" for n in range(2) for name in ("_step", "loss", "loss__MIN"))]
    rows = [[step, *(x for n in range(2) for x in (step, loss + n / 9, loss))] for step, loss, _ in losses]
    (folder / "wandb.csv").write_text("\n".join(",".join(map(str, row)) for row in [head, *rows]))
    (folder / "losses").mkdir()
    lines = [json.dumps({"step": step, "train": {"loss": loss}, "val_loss": held}) for step, loss, held in losses]
    for seed in range(2):
        (folder / "losses" / f"seed-{seed}.jsonl").write_text("\n".join(lines))
    with closing(sqlite3.connect(folder / "project.db")) as database:
        database.execute(
            "CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)"
        )
        rows = [(f"{arm}-seed-{seed}", i, line) for arm in "ab" for seed in (0, 1) for i, line in enumerate(lines)]
        database.executemany("INSERT INTO metrics VALUES (NULL, ?, ?, ?)", rows)
        database.commit()
    writer = EventFileWriter(str(folder / "tensorboard"))
    for step, loss, _ in losses:
        numbers = [summary_pb2.Summary.Value(tag="train/loss", simple_value=loss)]
        tensor = make_tensor_proto(loss)
        numbers.append(summary_pb2.Summary.Value(tag="val_loss", tensor=tensor))
        writer.add_event(event_pb2.Event(step=step, wall_time=step, summary=summary_pb2.Summary(value=numbers)))
    writer.close()
    (written,) = (folder / "tensorboard").iterdir()
    written.rename(folder / _EVENTS)


def make_weights(folder: Path) -> None:
    """Writes the weights of the artifact as one file and as a file with an index."""
    model, weights, _ = artifact.read_artifact(folder / "model.int8z")
    for name in ("weights", "sharded"):
        (folder / name).mkdir()
    save_file(weights, folder / "weights" / "model.safetensors")
    config = {"model_type": "halfstep", **dataclasses.asdict(model)}
    (folder / "weights" / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "weights" / "model.safetensors", folder / "sharded" / "a.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "a.safetensors")}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))


def copy(material: Path, folder: Path) -> None:
    """Copies the material: files that a command appends to or cuts as copies, all others as links, for speed."""
    folder.mkdir()
    for here, folders, files in os.walk(material):
        there = folder / os.path.relpath(here, material)
        for name in folders:
            os.mkdir(there / name)
        for name in files:
            source = os.path.join(here, name)
            if name in ("events.jsonl", "lock") or there.name == "partly":
                shutil.copy2(source, there / name)
            elif name == "pipe":
                os.mkfifo(there / name)
            else:
                os.link(source, there / name, follow_symlinks=False)
