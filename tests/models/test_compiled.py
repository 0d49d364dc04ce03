"""Models of transformers under torch.compile: attention without a mask, fp32 losses, narrow outputs, one graph."""

import pytest
import torch

from benchmarks import zoo
from halfstep.torch.convert.functions.narrow_logits import Output
from halfstep.torch.run import prepare

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


class Graphs:
    """A backend that keeps the graphs it is given, and runs them as they are."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append(graph)
        return graph

    def attention(self):
        """Returns (has a mask, is causal) of each attention."""
        nodes = [node for graph in self.graphs for node in graph.graph.nodes]
        calls = [node.kwargs for node in nodes if node.target is torch.nn.functional.scaled_dot_product_attention]
        return [(call["attn_mask"] is not None, call["is_causal"]) for call in calls]


def compiled(name, attention="sdpa"):
    torch._dynamo.reset()
    model, _ = zoo.FAMILIES[name].make(attention)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    seen = Graphs()
    return run, seen, torch.compile(model, fullgraph=True, backend=seen)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_a_causal_language_model_is_one_graph_of_causal_attention_with_the_loss_of_eager_code(name):
    """With a cache, which is the default; without one, with masks, below. Dynamo takes seconds for each graph."""
    run, seen, model = compiled(name)
    for seed in range(3):
        x = torch.randint(3, 48, (2, 8), generator=torch.Generator().manual_seed(seed))
        expected = run.model(input_ids=x, labels=x, use_cache=True)  # first: Mixtral hooks itself where it runs
        out = model(input_ids=x, labels=x, use_cache=True)
        assert torch.equal(out.loss, expected.loss)
        assert (type(out.logits), out.logits.dtype, out.loss.dtype) == (Output, torch.bfloat16, torch.float32)
        assert torch.equal(out.logits.float(), expected.logits.float())
    assert len(seen.graphs) == 1
    assert seen.attention() == [(False, True)] * 2


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "masks"),
    [
        ("gpt2", ["padding", "packing"]),
        ("llama", ["padding", "packing"]),
        ("qwen3", ["packing"]),
        ("mixtral", ["padding"]),
    ],
)
def test_padding_and_packing_have_their_mask_and_the_loss_of_eager_code(name, masks):
    run, seen, model = compiled(name)
    x = zoo.tokens()
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]).expand(2, -1)
    masked = {"padding": {"attention_mask": zoo.padding()}, "packing": {"position_ids": packed}}
    losses = []
    for given in (*(masked[mask] for mask in masks), {}):
        inputs = {"input_ids": x, "labels": x, "use_cache": False, **given}
        expected = run.model(**inputs)  # first: Mixtral hooks itself where it runs
        out = model(**inputs)
        assert torch.equal(out.loss, expected.loss)
        assert (type(out.logits), out.logits.dtype, out.loss.dtype) == (Output, torch.bfloat16, torch.float32)
        assert torch.equal(out.logits.float(), expected.logits.float())
        losses.append(expected.loss)
    assert len(seen.graphs) == len(losses)
    assert seen.attention() == [(True, False)] * 2 * len(masks) + [(False, True)] * 2
    assert len({float(loss.detach()) for loss in losses}) == len(losses)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["bert", "vit"])
def test_attention_in_both_directions_has_no_mask_and_a_loss_in_fp32(name):
    run, seen, model = compiled(name)
    x = zoo.tokens()
    inputs = {"input_ids": x, "labels": x}
    if name == "vit":
        inputs = {"pixel_values": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 3, 4])}
    out = model(**inputs)
    assert seen.attention() == [(False, False)] * 2
    assert (out.loss.dtype, type(out.logits)) == (torch.float32, Output)
    assert torch.equal(out.loss, run.model(**inputs).loss)
    run.backward(out.loss)
    run.update()


@pytest.mark.prove
def test_a_model_that_names_no_loss_compiles_as_one_graph():
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    x = zoo.tokens()
    loss = torch.compile(model, fullgraph=True, backend="eager")(input_ids=x, labels=x).loss
    assert torch.equal(loss, model(input_ids=x, labels=x).loss)
    run.backward(loss)


@pytest.mark.prove
def test_the_real_compiler_checks_the_models_own_positions_and_trains():
    torch._dynamo.reset()
    model, _ = zoo.FAMILIES["llama"].make()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    compiled = torch.compile(model, fullgraph=True)
    x = zoo.tokens()
    first = run.step(lambda x: compiled(input_ids=x, labels=x, use_cache=False).loss, [x])
    second = run.step(lambda x: compiled(input_ids=x, labels=x, use_cache=False).loss, [x])
    assert float(second.loss) < float(first.loss)


def test_outputs_beside_a_loss_are_narrow_and_evaluation_reads_them():
    model, _ = zoo.FAMILIES["bert"].make()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    x = zoo.tokens()
    with torch.no_grad():
        out = model(input_ids=x, labels=x, output_hidden_states=True)
        alone = model(input_ids=x)
    assert (out.logits.dtype, alone.logits.dtype) == (torch.bfloat16, torch.float32)
    assert out["logits"] is out.logits
    assert {type(state) for state in out.hidden_states} == {Output}
    assert torch.equal(out.logits.softmax(-1), alone.logits.softmax(-1))
    assert (out.logits.numpy() == alone.logits.numpy()).all()
    assert "attention of BertForMaskedLM: without a mask where none is needed" in run.summary()


def saved_bytes(model, *, autocast):
    """Returns what the backward pass of a compiled model keeps beside its parameters."""
    torch._dynamo.reset()
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t

    x = torch.randint(3, 48, (4, 16), generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(model, backend="aot_eager_decomp_partition")  # saves what the real compiler would
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        torch.autograd.graph.saved_tensors_hooks(keep, id),
    ):
        compiled(input_ids=x, labels=x, use_cache=False)
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in held)


@pytest.mark.prove
def test_compiled_it_keeps_less_for_the_backward_pass_than_under_autocast():
    (stock, _), (prepared, _) = zoo.FAMILIES["gpt2"].make(), zoo.FAMILIES["gpt2"].make()
    prepare(prepared, torch.optim.SGD(prepared.parameters(), lr=0.1), "bf16-mixed")
    assert saved_bytes(prepared, autocast=False) < 0.8 * saved_bytes(stock, autocast=True)
