"""Models of transformers: masks and losses under torch.compile.

There is no mask where attention is plainly causal, theirs elsewhere; losses that a forward builds are fp32.
"""

import copy

import pytest
import torch
from torch import nn

from benchmarks import zoo
from halfstep.torch.convert import hugging_face
from halfstep.torch.run import prepare

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
masking_utils = pytest.importorskip("transformers.masking_utils", reason="transformers is not installed")

create_causal_mask = masking_utils.create_causal_mask
create_bidirectional_mask = masking_utils.create_bidirectional_mask
create_sliding_window_causal_mask = masking_utils.create_sliding_window_causal_mask
DynamicCache = transformers.DynamicCache

B, T = 2, 8
X = torch.zeros(B, T, 4)
POSITIONS = torch.arange(T)[None]
PADDED = torch.tensor([[1] * T, [1] * (T - 2) + [0] * 2])
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])


@pytest.fixture(scope="module")
def config():
    assert transformers.PreTrainedModel  # which transformers imports when it is asked for
    hugging_face.register()
    config = transformers.LlamaConfig(sliding_window=4)
    config._attn_implementation_internal = hugging_face.NAME
    return config


@pytest.fixture
def own_positions(monkeypatch):
    """As inside the forward of a prepared model that was given neither positions nor a mask."""
    monkeypatch.setattr(hugging_face._call, "own_positions", True)


def compiled(make, config, *args, **kwargs):
    torch._dynamo.reset()
    return torch.compile(make, fullgraph=True, backend="eager")(config, *args, **kwargs)


def stock(make, config, *args, **kwargs):
    """The same mask, written out by transformers."""
    config = copy.deepcopy(config)
    config._attn_implementation_internal = "eager"
    mask = make(config, *args, **kwargs)
    return None if mask is None else mask == 0


def test_a_plain_mask_is_left_out_of_compiled_code(config, own_positions):
    assert compiled(create_causal_mask, config, X, None, None, POSITIONS) is None
    assert compiled(create_causal_mask, config, X, None, DynamicCache(), POSITIONS) is None
    assert compiled(create_bidirectional_mask, config, X, None) is None
    short = X[:, :3]
    assert compiled(create_sliding_window_causal_mask, config, short, None, DynamicCache(), None) is None


@pytest.mark.prove
def test_without_a_cache_positions_that_were_given_may_be_packed(config):
    for positions in (POSITIONS, PACKED):
        mask = compiled(create_causal_mask, config, X, None, None, positions)
        assert torch.equal(mask, stock(create_causal_mask, config, X, None, None, positions))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("make", "args"),
    [
        (create_causal_mask, (PADDED, None)),
        (create_causal_mask, (torch.ones(B, T, dtype=torch.long), None)),  # what it holds is not known
        (create_sliding_window_causal_mask, (None, None, POSITIONS)),
        (create_bidirectional_mask, (PADDED,)),
    ],
    ids=["padded", "a mask", "a window", "both directions"],
)
def test_any_other_mask_is_that_of_transformers(config, own_positions, make, args):
    mask = compiled(make, config, X, *args)
    assert torch.equal(mask, stock(make, config, X, *args))
    eager = make(config, X, *args)
    expected = stock(make, config, X, *args)
    assert eager is None or torch.equal(eager, expected)


@pytest.mark.prove
def test_a_filled_cache_has_a_mask(config, own_positions):
    cache = DynamicCache()
    cache.update(torch.zeros(B, 1, 3, 4), torch.zeros(B, 1, 3, 4), 0)
    mask = compiled(create_causal_mask, config, X, None, cache, POSITIONS + 3)
    assert (mask.shape[-2:], bool(mask[0, 0, 0, 3]), bool(mask[0, 0, 0, 4])) == ((T, T + 3), True, False)


def test_a_model_that_packs_by_itself_stops_instead_of_training_on_wrong_attention(config, own_positions):
    with pytest.raises(RuntimeError, match="makes positions of its own by which sequences are packed"):
        compiled(create_causal_mask, config, X, None, None, PACKED)


def test_the_implementation_is_chosen_and_given_back():
    model, loss = zoo.FAMILIES["llama"].make()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    assert model.config._attn_implementation == hugging_face.NAME
    line = "attention of LlamaForCausalLM: without a mask where none is needed, compiled too"
    assert line in run.summary()
    loss(model)
    run.unprepare()
    assert model.config._attn_implementation == "sdpa"
    assert type(model).forward is transformers.LlamaForCausalLM.forward


def test_what_was_chosen_since_stays_and_what_was_chosen_before_too():
    for before, since, after in (("sdpa", "eager", "eager"), ("eager", None, "eager"), ("eager", "sdpa", "sdpa")):
        model, loss = zoo.FAMILIES["gpt2"].make(before)
        run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
        if since:
            model.set_attn_implementation(since)
        loss(model)
        assert model.config._attn_implementation == (since or before)
        run.unprepare()
        assert model.config._attn_implementation == after


def test_a_model_that_knows_sdpa_by_name_or_adds_to_its_mask_keeps_its_own():
    sizes = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))
    assert hugging_face._why_not(type(falcon)) == "its code does not ask for an implementation"
    assert hugging_face._why_not(transformers.Gemma3ForCausalLM) == "its code adds to the causal mask"
    assert not hugging_face._why_not(transformers.Qwen3ForCausalLM)
    run = prepare(falcon, torch.optim.SGD(falcon.parameters(), lr=0.1), "bf16-mixed")
    assert "attention of FalconForCausalLM: masks are transformers' own" in run.summary()
    assert falcon.config._attn_implementation == "sdpa"


def test_two_models_may_share_a_configuration():
    config = transformers.GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    runs = []
    for model in (transformers.GPT2LMHeadModel(config), transformers.GPT2LMHeadModel(config)):
        runs.append(prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed"))
        assert isinstance(model, hugging_face.CausalRoot)
    for run in runs:
        run.unprepare()
        assert config._attn_implementation == "sdpa"


def test_a_copy_of_a_run_gives_its_own_model_back():
    model, _ = zoo.FAMILIES["gpt2"].make()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    twin = copy.deepcopy(run)
    twin.unprepare()
    assert (twin.model.config._attn_implementation, model.config._attn_implementation) == (
        "sdpa",
        hugging_face.NAME,
    )


# --- the loss


def test_a_subclass_of_torchs_cross_entropy_stands_in_their_modules_and_computes_the_same():
    model, _ = zoo.FAMILIES["bert"].make()
    prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    from transformers.models.bert import modeling_bert

    kind = modeling_bert.CrossEntropyLoss
    assert kind is hugging_face.CrossEntropyLoss
    assert issubclass(kind, nn.CrossEntropyLoss)
    x, y = torch.randn(3, 4), torch.tensor([0, 1, 2])
    assert torch.equal(kind()(x, y), nn.CrossEntropyLoss()(x, y))
    assert nn.CrossEntropyLoss is torch.nn.modules.loss.CrossEntropyLoss


class Head(nn.Module):
    """As a model of transformers does it."""

    kind = hugging_face.CrossEntropyLoss

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x, y):
        return self.kind(ignore_index=-1)(self.layer(x), y)


@pytest.mark.prove
def test_it_is_fp32_in_compiled_code():
    torch.manual_seed(0)
    model = Head()
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    x, y = torch.randn(3, 4), torch.tensor([0, -1, 2])
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(x, y)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, model(x, y))
    run.backward(loss)


def test_a_model_whose_loss_is_not_known_by_its_name_has_the_one_they_would_take_until_it_is_given_back():
    config = transformers.GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    assert model.loss_function is transformers.loss.loss_utils.ForCausalLMLoss
    run.unprepare()
    assert not hasattr(model, "_loss_function")
    model.loss_function = mine = lambda *_, **__: None
    run = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-mixed")
    assert model.loss_function is mine
    run.unprepare()
    assert model.loss_function is mine
    bert, _ = zoo.FAMILIES["bert"].make()
    assert hugging_face.default_loss(bert) is None
