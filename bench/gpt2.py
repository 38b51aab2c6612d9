"""GPT-2 124M, 1,024 tokens at once, batch 32, on one GPU: tokens a second, and the loss over 200 steps.

The rival is the loop that people write: bf16 autocast, torch.compile, fused AdamW. The goals: at least 1.06 × its
speed, and the same loss curve within noise over 200 steps of the same batches from the same weights. Noise is what
numbers rounded otherwise change: both train three times, twice from weights that differ by one rounding to bf16.

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


def rounded_otherwise(model: nn.Module, number: int) -> None:
    """Change all weights by as much as rounding them to bf16 may; 0: not at all."""
    torch.manual_seed(number)
    with torch.no_grad():
        for parameter in model.parameters() if number else ():
            parameter.mul_(1 + 2**-9 * (2 * torch.rand_like(parameter) - 1))


def by_hand(
    make: Callable[[], nn.Module], data: list[Tensor], device: str, compiled: bool, losses: list[Tensor], nudge: int = 0
) -> Train:
    torch.manual_seed(0)
    model = make().to(device)
    rounded_otherwise(model, nudge)
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


def by_hotloop(
    make: Callable[[], nn.Module], data: list[Tensor], device: str, losses: list[Tensor], nudge: int = 0
) -> Train:
    torch.manual_seed(0)
    model = make().to(device)
    rounded_otherwise(model, nudge)
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

    def train_ours(losses: list[Tensor], nudge: int = 0) -> Train:
        return by_hotloop(ours, data, device, losses, nudge)

    def train_rivals(losses: list[Tensor], nudge: int = 0) -> Train:
        return by_hand(plain, data, device, not tiny, losses, nudge)

    contenders = {
        "hotloop": partial(train_ours, []),
        "compiled": partial(train_rivals, []),
        "hotloop, the rival's model": partial(by_hotloop, plain, data, device, []),
        "compiled, our model": partial(by_hand, ours, data, device, not tiny, []),
    }
    steps = 3 if tiny else 30
    measured = measure(contenders, device, max(arguments.rounds, 1 if tiny else 7), steps)
    content: dict[str, Any] = {
        "figures": figures(measured, batch * context),
        "unit": "tokens/s",
        "ratios": ratios(measured, "hotloop"),
        "goals": {"compiled": 1.06},
        "loss": compared({"hotloop": curves(train_ours, len(data)), "compiled": curves(train_rivals, len(data))}),
    }
    if tiny:
        print(json.dumps(content))
    else:
        publish("gpt2", content, arguments.json)


def curves(make: Callable[[list[Tensor], int], Train], steps: int) -> list[list[float]]:
    """Mean loss of every 20 steps, of three trainings whose first weights are rounded otherwise."""
    found = []
    for nudge in range(3):
        losses: list[Tensor] = []
        train = make(losses, nudge)
        for _ in range(steps):
            train()
        values = [value.item() for value in losses]
        found.append([statistics.mean(values[n : n + 20]) for n in range(0, len(values), 20)])
    return found


def compared(found: dict[str, list[list[float]]]) -> dict[str, Any]:
    """The largest difference of ours from the rival's, each the median of its trainings, and the largest of the rival's
    trainings from one another.
    """
    ours, theirs = (
        [statistics.median(at) for at in zip(*found[name], strict=True)] for name in ("hotloop", "compiled")
    )
    largest = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    noise = max(max(at) - min(at) for at in zip(*found["compiled"], strict=True))
    return {"mean_of_20_steps": found, "largest_difference": largest, "noise": noise}


if __name__ == "__main__":
    main()
