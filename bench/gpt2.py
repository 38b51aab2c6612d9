"""GPT-2 124M, 1,024 tokens at once, batch 32, on one GPU: tokens a second, and the loss over 200 steps.

The rival is the loop that people write: bf16 autocast, torch.compile, fused AdamW. The goals: at least 1.06 × its
speed, and the same loss curve within noise over 200 steps of the same batches from the same weights. Noise is what
another draw of the first weights changes.

Our model adds its blocks' results up in bf16, the rival's in float32, as autocast leaves it. "compiled, our model" and
"hotloop, the rival's model" tell what comes from the model and what from the step.
"""

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import Train, figures, measure, ratios
from record import add_device, publish
from torch import Tensor, nn
from torch.nn import functional

import hotloop
from hotloop.tasks.transformers import build_decoder

VOCABULARY, CONTEXT = 50304, 1024
RATE, DECAY, BETAS = 6e-4, 0.1, (0.9, 0.95)


class PlainBlock(nn.Module):
    """A block as most tutorials write it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    """GPT-2 as most tutorials write it, loss included."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, VOCABULARY).float(), targets.view(-1))


def same_weights(plain: PlainGPT2, ours: nn.Module, heads: int) -> PlainGPT2:
    """The rival's model with the weights of ours, whose rows of `qkv` lie head by head."""
    names = {"attention_norm": "norm1", "feed_forward_norm": "norm2", "embedding": "tokens"}
    state = {}
    for name, value in ours.state_dict().items():
        parts = [names.get(part, part) for part in name.split(".") if part not in ("attention", "feed_forward")]
        if "qkv" in parts:
            value = value.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        state[".".join(parts)] = value
    plain.load_state_dict(state)
    return plain


def batches(batch: int, context: int, count: int, device: str) -> list[Tensor]:
    """Real text, by bytes, of the Python files that come with torch: (batch, context + 1) each."""
    files = sorted((Path(torch.__file__).parent / "nn").rglob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int64)
    needed = batch * (context + 1)
    random = np.random.default_rng(0)
    starts = random.integers(0, max(1, len(text) - context - 1), (count, batch))
    windows = [[text[start : start + context + 1] for start in row] for row in starts]
    assert needed == sum(len(window) for window in windows[0])
    return [torch.from_numpy(np.stack(row)).to(device) for row in windows]


def by_hand(
    make: Callable[[], nn.Module], data: list[Tensor], device: str, compiled: bool, losses: list[Tensor], seed: int = 0
) -> Train:
    torch.manual_seed(seed)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, betas=BETAS, fused=True)
    network = torch.compile(model) if compiled else model
    position = iter(range(10**9))

    def train() -> object:
        tokens = data[next(position) % len(data)]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = network(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        if len(losses) < 200:
            losses.append(loss.detach())
        return None

    return train


def by_hotloop(make: Callable[[], nn.Module], data: list[Tensor], device: str, losses: list[Tensor]) -> Train:
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, betas=BETAS)
    settings = hotloop.StepSettings("bf16", compile="model" if device == "cuda" else "")
    loss = lambda model, tokens: model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())  # noqa: E731
    step = hotloop.Step(model, loss, optimizer, lambda number: 1.0, settings)
    position = iter(range(10**9))

    def train() -> object:
        tokens = data[next(position) % len(data)]
        if len(losses) < 200:
            losses.append(step(tokens))
        else:
            step.run(tokens)
        return None

    return train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    add_device(parser)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")
    device, tiny = arguments.device, arguments.device == "cpu"
    batch, context, sizes = (2, 32, (2, 64, 2)) if tiny else (32, CONTEXT, (12, 768, 12))
    data = batches(batch, context, 20 if tiny else 200, device)
    shape = {"layers": sizes[0], "width": sizes[1], "heads": sizes[2], "kv_heads": sizes[2], "hidden": 4 * sizes[1]}
    ours = partial(build_decoder, "gpt2", VOCABULARY, context, shape)

    def plain() -> nn.Module:
        weights = ours()  # first, so that its draws are those of ours alone
        return same_weights(PlainGPT2(*sizes, context), weights, sizes[2])

    losses: dict[str, list[Tensor]] = {"hotloop": [], "compiled": [], "compiled, other weights": []}
    contenders = {
        "hotloop": partial(by_hotloop, ours, data, device, losses["hotloop"]),
        "compiled": partial(by_hand, plain, data, device, not tiny, losses["compiled"]),
        "hotloop, the rival's model": partial(by_hotloop, plain, data, device, []),
        "compiled, our model": partial(by_hand, ours, data, device, not tiny, []),
        "compiled, other weights": partial(
            by_hand, plain, data, device, not tiny, losses["compiled, other weights"], seed=1
        ),
    }
    steps = 3 if tiny else 30
    measured = measure(contenders, device, max(arguments.rounds, 1 if tiny else 7), steps)
    content: dict[str, Any] = {
        "figures": figures(measured, batch * context),
        "unit": "tokens/s",
        "ratios": ratios(measured, "hotloop"),
        "goals": {"compiled": 1.06},
        "loss": curves(losses),
    }
    if tiny:
        print(json.dumps(content))
    else:
        publish("gpt2", content, arguments.json)


def curves(losses: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Mean loss of every 20 steps, and the largest differences of these: of ours from the rival's, and of the rival's
    own from other first weights.
    """
    values = {name: [value.item() for value in kept] for name, kept in losses.items()}
    means = {
        name: [statistics.mean(kept[n : n + 20]) for n in range(0, len(kept), 20)] for name, kept in values.items()
    }

    def largest(name: str) -> float:
        return max(abs(one - other) for one, other in zip(means[name], means["compiled"], strict=True))

    noise = largest("compiled, other weights")
    return {"mean_of_20_steps": means, "largest_difference": largest("hotloop"), "noise": noise}


if __name__ == "__main__":
    main()
