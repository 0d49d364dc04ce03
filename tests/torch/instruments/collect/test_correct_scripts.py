"""Scripts that are right, in the shapes in which people write them: no errors and no warnings in any of them."""

import contextlib
import copy
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.core.audit.engine import check
from halfstep.torch.instruments.collect.watch import Watch

BF16, FP16 = torch.bfloat16, torch.float16


def mlp(*sizes, seed=0):
    torch.manual_seed(seed)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def update(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def mnist():
    """A convolutional network with dropout and log-softmax, as torch's first example."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten())
    model = nn.Sequential(net, nn.Linear(8 * 3 * 3, 10), nn.LogSoftmax(1))
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for _ in range(4):
        update(optimizer, F.nll_loss(model(torch.randn(4, 1, 8, 8)), torch.randint(10, (4,))))
        schedule.step()


def resnet():
    """Batch norms, SGD with momentum, and an fp16 scaler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(8, 5)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cpu", FP16):
            loss = F.cross_entropy(
                model(torch.randn(4, 3, 8, 8)).float(), torch.randint(5, (4,)), label_smoothing=0.1
            )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def gan():
    """Two models and two optimizers that take turns, one scaler each."""
    generator, critic = mlp(4, 16, 8), mlp(8, 16, 1)
    optimizers = [torch.optim.Adam(each.parameters(), 2e-4, (0.5, 0.999)) for each in (generator, critic)]
    scalers = [torch.amp.GradScaler("cpu") for _ in optimizers]
    for _ in range(4):
        with torch.autocast("cpu", FP16):
            fake = generator(torch.randn(4, 4))
            scores = critic(torch.randn(4, 8)).float(), critic(fake.detach()).float()
        loss = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
        optimizers[1].zero_grad()
        scalers[1].scale(loss).backward()
        scalers[1].step(optimizers[1])
        scalers[1].update()
        with torch.autocast("cpu", FP16):
            score = critic(fake).float()
        optimizers[0].zero_grad()
        scalers[0].scale(F.softplus(-score).mean()).backward()
        scalers[0].step(optimizers[0])
        scalers[0].update()


def vae():
    encoder, decoder = mlp(8, 16, 4), mlp(2, 16, 8)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
    for _ in range(4):
        x = torch.rand(4, 8)
        mean, log_var = encoder(x).chunk(2, -1)
        out = decoder(mean + torch.randn_like(mean) * torch.exp(0.5 * log_var))
        loss = F.binary_cross_entropy_with_logits(out, x, reduction="sum")
        update(optimizer, loss - 0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp()))


def word_language_model():
    """An LSTM whose state is carried, clipped by norm, stepped by hand as in torch's example."""
    torch.manual_seed(0)
    embed, lstm, head = nn.Embedding(20, 8), nn.LSTM(8, 8, 2), nn.Linear(8, 20)
    params = [p for part in (embed, lstm, head) for p in part.parameters()]
    optimizer, state = torch.optim.SGD(params, lr=1.0), None
    for _ in range(4):
        tokens = torch.randint(20, (6, 2))
        out, state = lstm(embed(tokens[:-1]), state)
        state = tuple(part.detach() for part in state)
        optimizer.zero_grad()
        F.cross_entropy(head(out).flatten(0, 1), tokens[1:].flatten()).backward()
        nn.utils.clip_grad_norm_(params, 0.25)
        optimizer.step()


def nano_gpt(dtype):
    """Accumulation with a divided loss, a context for autocast, a scaler that is off unless fp16, clipping."""
    model = mlp(8, 32, 8)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == FP16)
    context = torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * step / 4))
        for _ in range(3):
            with context:
                loss = F.mse_loss(model(torch.randn(4, 8)).float(), torch.randn(4, 8)) / 3
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def averaged(kind):
    """Averages of weights in fp32: by hand, by torch's AveragedModel, and of a target network."""
    model = mlp(8, 16, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if kind == "swa":
        ema = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
        )
    else:
        ema = copy.deepcopy(model).requires_grad_(False)
    for _ in range(6):
        with torch.autocast("cpu", BF16):
            target = ema(torch.randn(4, 8)).detach() if kind == "target" else torch.randn(4, 8)
            out = model(torch.randn(4, 8))
        update(optimizer, F.mse_loss(out.float(), target.float()))
        if kind == "swa":
            ema.update_parameters(model)
            continue
        with torch.no_grad():
            for e, p in zip(ema.parameters(), model.parameters(), strict=True):
                e.mul_(0.995).add_(p, alpha=0.005)


def distillation():
    """A frozen teacher in bf16, a student in fp32 under autocast."""
    teacher, student = mlp(8, 32, 5, seed=1).to(BF16).requires_grad_(False), mlp(8, 16, 5)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for _ in range(4):
        x = torch.randn(4, 8)
        wanted = F.softmax(teacher(x.to(BF16)).float() / 2, -1)
        with torch.autocast("cpu", BF16):
            out = student(x)
        update(optimizer, F.kl_div(F.log_softmax(out.float() / 2, -1), wanted, reduction="batchmean") * 4)


def diffusion():
    """Noise prediction with sinusoidal timesteps in fp32, an EMA, and a frozen encoder in fp16's range."""
    encoder, model = mlp(8, 4, seed=1).requires_grad_(False), mlp(4 + 8, 32, 4)
    ema = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    for _ in range(5):
        latents, noise = encoder(torch.randn(4, 8)) * 0.18215, torch.randn(4, 4)
        steps = torch.randint(1000, (4,))
        a = alphas[steps][:, None]
        angles = steps[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(4) / 4)
        given = torch.cat([a.sqrt() * latents + (1 - a).sqrt() * noise, angles.sin(), angles.cos()], -1)
        with torch.autocast("cpu", BF16):
            out = model(given)
        update(optimizer, F.mse_loss(out.float(), noise))
        with torch.no_grad():
            for e, p in zip(ema, model.parameters(), strict=True):
                e.sub_(0.001 * (e - p))


def sharpness_aware():
    """Two backward passes an update, weights moved by hand in between."""
    model = mlp(8, 16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        x, y = torch.randn(4, 8), torch.randint(2, (4,))
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


def closure():
    model = mlp(4, 8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    def loss():
        optimizer.zero_grad()
        value = F.mse_loss(model(x), y)
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(loss)


def actor_critic():
    """Several losses of one graph, an advantage that is normalized, a loss times the size of its batch."""
    actor, critic = mlp(4, 16, 3), mlp(4, 16, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3, eps=1e-5)
    for _ in range(4):
        states, rewards = torch.randn(64, 4), torch.randn(64)
        values = critic(states).squeeze(-1)
        chosen = torch.distributions.Categorical(logits=actor(states))
        actions = chosen.sample()
        gain = rewards - values.detach()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        loss = -(chosen.log_prob(actions) * gain).mean() + 0.5 * F.mse_loss(values, rewards)
        optimizer.zero_grad()
        ((loss - 0.01 * chosen.entropy().mean()) * 64).backward()
        nn.utils.clip_grad_value_(actor.parameters(), 1.0)
        optimizer.step()


def contrastive():
    """Two views, normalized embeddings, a learned temperature, under bf16 autocast with the loss in fp32."""
    model, scale = mlp(8, 16, 8), nn.Parameter(torch.tensor(2.6))
    optimizer = torch.optim.AdamW([*model.parameters(), scale], lr=1e-3)
    for _ in range(4):
        with torch.autocast("cpu", BF16):
            views = [model(torch.randn(6, 8)) for _ in range(2)]
        a, b = (F.normalize(view.float(), dim=-1) for view in views)
        logits, target = scale.exp() * a @ b.T, torch.arange(6)
        update(optimizer, (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2)


def skips_bad_batches():
    """Losses that are not finite are skipped before the backward pass, without a trace in the gradients."""
    model = mlp(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(5):
        loss = model(torch.randn(4, 4) * (math.inf if step == 2 else 1)).square().mean()
        if not torch.isfinite(loss):
            continue
        update(optimizer, loss)


def hand_made_masters(passes):
    """A bf16 model with fp32 masters; gradients of several passes are summed in fp32."""
    model = mlp(8, 32, 8).to(BF16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    for _ in range(5):
        for _ in range(passes):
            model(torch.randn(4, 8, dtype=BF16)).float().square().mean().backward()
            for master, p in zip(masters, model.parameters(), strict=True):
                grad = p.grad.float() / passes
                master.grad = grad if master.grad is None else master.grad + grad
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)


def peft_lora():
    peft = pytest.importorskip("peft")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8)
    base = GPT2LMHeadModel(config).to(BF16)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(4):
        tokens = torch.randint(32, (2, 8))
        with torch.autocast("cpu", BF16):
            logits = model(input_ids=tokens).logits
        update(optimizer, F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()))


def diffusers_unet():
    """As the script of diffusers: noise is predicted under bf16 autocast, from whole timesteps, with EMA."""
    diffusers = pytest.importorskip("diffusers")
    from diffusers.training_utils import EMAModel

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "block_out_channels": (8,)}
    model = diffusers.UNet2DModel(sample_size=8, layers_per_block=1, norm_num_groups=4, **blocks)
    schedule, ema = diffusers.DDPMScheduler(1000), EMAModel(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        clean, noise, at = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8), torch.randint(1000, (2,))
        with torch.autocast("cpu", BF16):
            predicted = model(schedule.add_noise(clean, noise, at), at).sample
        update(optimizer, F.mse_loss(predicted.float(), noise))
        ema.step(model.parameters())


def llama():
    """Rotary positions of transformers, beyond what bf16 counts, under bf16 autocast."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        tokens = torch.randint(32, (1, 600))
        with torch.autocast("cpu", BF16):
            logits = model(input_ids=tokens).logits
        update(optimizer, F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten()))


SCRIPTS = {
    **{each.__name__: each for each in (mnist, resnet, gan, vae, word_language_model, distillation, diffusion)},
    **{each.__name__: each for each in (sharpness_aware, closure, actor_critic, contrastive, peft_lora)},
    **{each.__name__: each for each in (diffusers_unet, llama)},
    "skips bad batches": skips_bad_batches,
    **{f"nano_gpt {dtype}": lambda dtype=dtype: nano_gpt(dtype) for dtype in (None, BF16, FP16)},
    **{f"averaged {kind}": lambda kind=kind: averaged(kind) for kind in ("ema", "swa", "target")},
    **{f"masters, {passes} passes": lambda passes=passes: hand_made_masters(passes) for passes in (1, 4)},
}
FAST = ("mnist", "gan", "diffusion", "averaged ema", "masters, 4 passes", "nano_gpt torch.float16")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.prove]) for name in SCRIPTS]
)
def test_no_error_and_no_warning(name):
    with Watch() as watch:
        SCRIPTS[name]()
    record = watch.record()
    assert record.updates >= 3
    assert [(f.rule, f.message) for f in check(record) if f.severity != "note"] == []


def test_there_are_enough_of_them():
    """With the loops of test_correct_loops.py and the examples of test_script.py."""
    from tests.torch.instruments.collect.test_correct_loops import LOOPS

    assert len(SCRIPTS) + len(LOOPS) + 6 >= 45


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore")
def test_timesteps_that_a_library_rounds_are_a_warning():
    """Flux of diffusers casts shares of time to the format of its activations before it scales them by 1000."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    sizes = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "joint_attention_dim": 16,
        "pooled_projection_dim": 16,
    }
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, axes_dims_rope=(4, 4, 8), **sizes
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    places = torch.zeros(16, 3)
    places[:, 1] = 500 + torch.arange(16)
    with Watch() as watch:
        for _ in range(4):
            x, text = torch.randn(2, 16, 4), torch.randn(2, 3, 16)
            with torch.autocast("cpu", BF16):
                flow = model(
                    x, text, torch.randn(2, 16), torch.rand(2), img_ids=places, txt_ids=torch.zeros(3, 3)
                ).sample
            update(optimizer, F.mse_loss(flow.float(), torch.randn_like(x)))
    (found,) = check(watch.record())
    assert (found.rule, found.severity, found.where) == ("HS412", "warning", ["time_text_embed.time_proj"])
