"""The migration guide: every block runs, in the order of its section, and every refusal has the page's words."""

import copy
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from halfstep.core.errors import HalfstepError  # noqa: E402
from halfstep.core.policy import Policy  # noqa: E402
from halfstep.torch import prepare  # noqa: E402
from halfstep.torch.numerics.dtypes import describe  # noqa: E402
from tests.docs.test_taught import check, read_blocks  # noqa: E402

PATH = Path(__file__).parents[2] / "docs" / "migration.md"
WHOLE = PATH.read_text(encoding="utf-8")
# Sections on other libraries have a test of their own: their blocks have models and outputs of their own.
OTHERS = WHOLE[WHOLE.index("## From jmp") : WHOLE.index("## What is refused")]
PAGE = WHOLE.replace(OTHERS, "")
SECTIONS = {
    title: re.findall(r"```python\n(.*?)```", text, flags=re.S)
    for title, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.S | re.M)
}
(OPENING,) = re.findall(r"```python\n(.*?)```", PAGE.split("\n## ")[0], flags=re.S)
BLOCKS = [(title, place) for title, blocks in SECTIONS.items() for place in range(len(blocks))]
# Blocks that continue from the block before them.
CONTINUED = {("From torch.amp in fp16, with a GradScaler", 2), ("Several micro-batches, and your own loop", 1)}
CONTINUED |= {("Moving a job that is running", 1), ("From the Lightning Trainer", 2)}
CONTINUED |= {("Several micro-batches, and your own loop", 2)}
CONTINUED |= {("Split masters, and their contract", 1)}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))


def batches(count=8):
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 11, (count, 2, 32), generator=draw)
    return [(inputs, targets) for inputs, targets in tokens]


def scope():
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)
    names = {"model": model(), "batches": batches(), "device": "cpu", "loader": loader}
    exec(OPENING, names)
    return names


def run_blocks(blocks, names):
    for block in blocks:
        if "ckpt_path" in block:  # a new process resumes
            names["model"] = model()
        exec(compile(block, "docs/migration.md", "exec"), names)
    return names


@pytest.mark.parametrize(("title", "place"), BLOCKS, ids=[f"{title}, {place}" for title, place in BLOCKS])
def test_a_block_runs(title, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks, first = SECTIONS[title], place
    while (title, first) in CONTINUED:
        first -= 1
    names = scope()
    if "torch.compile" in "".join(
        blocks[first : place + 1]
    ):  # it takes minutes, and only the order matters here; the race compiles
        names["torch"] = _without_compiling()
    before = copy.deepcopy(names["model"].state_dict())
    run_blocks(blocks[first : place + 1], names)
    assert any(not torch.equal(before[name], value) for name, value in names["model"].state_dict().items())
    result = names.get("result")
    if result is not None:
        assert torch.isfinite(result.loss)
        assert not bool(result.skipped)


@pytest.mark.prove
def test_the_block_that_compiles_runs_compiled():
    (block,) = [block for block in SECTIONS["Split masters, and their contract"] if "torch.compile" in block]
    assert torch.isfinite(run_blocks([block], scope())["result"].loss)


@pytest.mark.prove
def test_the_blocks_on_other_libraries_print_what_is_beneath_them(capsys):
    check(PATH, read_blocks(OTHERS), capsys)


def _without_compiling():
    names = {name: getattr(torch, name) for name in ("optim", "nn", "no_grad", "float32")}
    return SimpleNamespace(**names, compile=lambda model: model)


def test_every_section_before_the_refusals_has_code():
    titles = list(SECTIONS)
    assert titles[-1] == "What is refused, and why"
    assert all(SECTIONS[title] for title in titles[:-1])
    assert sum("halfstep" in block for blocks in SECTIONS.values() for block in blocks) == 12


def test_bf16_true_holds_what_the_page_says():
    (row,) = [line for line in PAGE.splitlines() if line.startswith('| `precision="bf16-true"`')]
    said = dict(re.findall(r'`"(bf16-true[^"]*)"`([^`]*)', row.split(" | ")[2]))
    assert "moments stay fp32" in said["bf16-true"]
    assert "moments" in said["bf16-true,moments=bf16"]
    held = {}
    for policy in said:
        names = scope()
        optimizer = torch.optim.AdamW(names["model"].parameters(), lr=3e-4)
        prepare(names["model"], optimizer, policy).step(names["loss_fn"], names["batches"][:1])
        weight = names["model"][2].weight
        held[policy] = weight.dtype, optimizer.state[weight]["exp_avg_sq"].dtype
    narrow, wide = torch.bfloat16, torch.float32
    assert held["bf16-true"] == held["bf16-true,param=bf16:stochastic"] == (narrow, wide)
    assert held["bf16-true,moments=bf16"] == (narrow, narrow)


def test_what_is_said_of_tensorflow_and_gaudi_holds():
    section = OTHERS.partition("## TensorFlow")[2]
    for theirs, ours in (("mixed_bfloat16", "bf16-mixed"), ("mixed_float16", "fp16-mixed")):
        assert f"`{theirs}`" in section
        assert f"`{ours}`" in section
        assert Policy.parse(theirs) == Policy.parse(ours)
    assert "refuses a model on `hpu`" in section
    with pytest.raises(HalfstepError, match="knows nothing about the torch device `hpu`"):
        describe(torch.device("hpu"))


def test_before_and_after_learn_the_same():
    before, after, *_ = SECTIONS["From torch.amp in bf16"]
    (one_line,) = SECTIONS["One line, to try first"]
    one_line = one_line.replace("total_iters=100", "start_factor=1.0")  # the rate of the others
    losses = []
    for block in (before, after, one_line):
        names = run_blocks([block], scope())
        with torch.no_grad():
            losses.append(float(names["loss_fn"](names["batches"][0])))
    untrained = float(scope()["loss_fn"](batches()[0]).detach())
    # Eight small steps: both have learned the same, to the resolution of bf16 at this loss.
    assert losses[0] < untrained
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=2**-8)


def test_load_torch_amp_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = SECTIONS["Moving a job that is running"]
    run_blocks(blocks, scope())
    shown = [line.removeprefix("# ") for line in blocks[-1].splitlines() if line.startswith("# ")]
    count = str(len(list(model().parameters())))
    printed = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\d+ parameters", "6 parameters", line) for line in printed] == shown
    assert f"{count} parameters" in printed[0]


def _refusals():
    """What each row of the last table says, and code that must get that message."""

    def adamw(given):
        return torch.optim.AdamW(given.parameters())

    def prepared(policy="bf16-mixed"):
        net = model()
        return net, prepare(net, adamw(net), policy)

    def scaled():
        prepared()[1].load_torch_amp(adamw(model()).state_dict(), torch.amp.GradScaler("cpu").state_dict())

    def narrow_loss():
        net, run = prepared()
        run.backward(net(batches()[0][0]).bfloat16().mean())

    def stock_load():
        net = model()
        optimizer = adamw(net)
        prepare(net, optimizer, "bf16-mixed,param=fp32:split")
        optimizer.load_state_dict(adamw(model()).state_dict())

    def cast_after():
        net, run = prepared()
        run.backward(net(batches()[0][0]).mean())
        net.half()
        run.update()

    def written():
        net, run = prepared("bf16-mixed,param=fp32:split")
        run.backward(net(batches()[0][0]).mean())
        with torch.no_grad():
            net[2].weight.mul_(0.9)
        run.update()

    def clipped():
        net, run = prepared("fp16-mixed")
        run.backward(net(batches()[0][0]).mean())
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        run.update()

    def by_hand():
        net = model()
        optimizer = adamw(net)
        prepare(net, optimizer, "bf16-mixed", clip_norm=1.0)
        net(batches()[0][0]).mean().backward()
        optimizer.step()

    plain, taken = model(), prepared()[0]
    return [
        lambda: prepare(plain, torch.amp.GradScaler("cpu"), "fp16-mixed"),
        scaled,
        lambda: prepare(plain, torch.optim.LBFGS(plain.parameters()), "bf16-mixed"),
        lambda: prepare(torch.compile(plain), adamw(plain), "bf16-mixed"),
        lambda: prepare(taken, adamw(taken), "bf16-mixed"),
        lambda: prepare(plain, adamw(model()), "bf16-mixed"),
        lambda: prepare(plain, [adamw(plain), adamw(plain)], "fp32"),
        lambda: prepared()[1].update(),
        narrow_loss,
        stock_load,
        written,
        lambda: torch.optim.swa_utils.AveragedModel(prepared("bf16-mixed,param=fp32:split")[0]),
        clipped,
        lambda: prepared()[1].load_state_dict(prepared("fp32")[1].state_dict()),
        by_hand,
        cast_after,
    ]


def test_refusals_have_the_words_of_the_page():
    table = PAGE.split("| what you write | what the error says |\n|---|---|\n")[1]
    rows = [line.strip("|").split(" | ")[1].strip() for line in table.strip().splitlines()]
    refusals = _refusals()
    assert len(rows) == len(refusals)
    for message, refused in zip(rows, refusals, strict=True):
        with pytest.raises(HalfstepError) as caught:
            refused()
        assert message in caught.value.message
        assert caught.value.hint, message
