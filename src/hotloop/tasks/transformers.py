"""Decoder-only transformers: the shapes of GPT-2 and Llama.

Shape suffixes: B batch, T tokens, D width, H heads, K width of a head, V vocabulary.
Sources: Radford et al., "Language models are unsupervised multitask learners" (2019); Touvron et al., "LLaMA" (2023);
Grattafiori et al., "The Llama 3 herd of models" (2024).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from hotloop.core.errors import InputError
from hotloop.tasks.cross_entropy import computed_in, linear_cross_entropy
from hotloop.tasks.first_weights import draw_normal, undrawn
from hotloop.tasks.tensor_parallel import Team


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    Attributes:
        kv_heads: heads of keys and values; as many as heads without grouping.
        hidden: width inside a block's feed-forward part.
        llama: rotary positions, RMS norm, gated feed-forward, no biases; otherwise GPT-2's parts.
        tied: the output layer's weights are the embedding's.
        rope_base: of the rotary positions.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    llama: bool
    tied: bool
    rope_base: float = 10_000.0


def _gpt2(layers: int, width: int, heads: int) -> Shape:
    return Shape(layers, width, heads, heads, 4 * width, llama=False, tied=True)


SHAPES = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-3.2-1b": Shape(16, 2048, 32, 8, 8192, llama=True, tied=True, rope_base=500_000.0),
    "llama-3.2-3b": Shape(28, 3072, 24, 8, 8192, llama=True, tied=True, rope_base=500_000.0),
    "llama-3-8b": Shape(32, 4096, 32, 8, 14336, llama=True, tied=False, rope_base=500_000.0),
}


class Attention(nn.Module):
    """Causal self-attention, keys and values shared by groups of heads.

    Rows of `qkv` lie group by group, each with its queries, its key and its value, so that ranks can have groups each.
    """

    def __init__(self, shape: Shape, context: int) -> None:
        super().__init__()
        self.cos: Tensor
        self.sin: Tensor
        self.shape = shape
        self.head_width = shape.width // shape.heads
        key_width = shape.kv_heads * self.head_width
        self.qkv = undrawn(nn.Linear, shape.width, shape.width + 2 * key_width, bias=not shape.llama)
        self.out = undrawn(nn.Linear, shape.width, shape.width, bias=not shape.llama)
        if shape.llama:
            angles = _angles(context, self.head_width, shape.rope_base)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, _ = x_BTD.shape
        shape, queries = self.shape, self.shape.heads // self.shape.kv_heads
        groups = self.qkv(x_BTD).view(batch, tokens, -1, queries + 2, self.head_width)
        q_BHTK = groups[:, :, :, :queries].flatten(2, 3).transpose(1, 2)
        k_BHTK, v_BHTK = (groups[:, :, :, queries + number].transpose(1, 2) for number in (0, 1))
        if shape.llama:
            q_BHTK, k_BHTK = (_rotate(t, self.cos[:tokens], self.sin[:tokens]) for t in (q_BHTK, k_BHTK))
        grouped = shape.kv_heads != shape.heads
        mixed = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True, enable_gqa=grouped)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2, 3))
        return projected


def _angles(context: int, head_width: int, base: float) -> Tensor:
    frequencies = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    return torch.outer(torch.arange(context, dtype=torch.float32), frequencies)


def _rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    first, second = x_BHTK.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos_TK - second * sin_TK, second * cos_TK + first * sin_TK], dim=-1)
    return turned.to(x_BHTK.dtype)


def _smaller_team(common: int, number: int) -> str:
    """What to type instead of so many ranks, for layers of which all sizes can be divided by `common`."""
    team = max(size for size in range(1, number) if common % size == 0)
    if team == 1:
        return "--set parallel=fsdp"
    return f'--set ranks.tensor={team}, and with parallel = "tp" --set ranks.processes={team}'


def _gate_groups(shape: Shape) -> int:
    return math.gcd(shape.hidden, shape.kv_heads)


class FeedForward(nn.Module):
    """Two layers with GELU between them, or Llama's gated three.

    With gates, rows of `up` lie in groups as those of `qkv`, each with its gates and its values.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gated = shape.llama
        self.group_width = shape.hidden // _gate_groups(shape)
        self.up = undrawn(nn.Linear, shape.width, shape.hidden * (2 if shape.llama else 1), bias=not shape.llama)
        self.down = undrawn(nn.Linear, shape.hidden, shape.width, bias=not shape.llama)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.gated:
            gate, value = self.up(x_BTD).unflatten(-1, (-1, 2, self.group_width)).unbind(-2)
            inner = (functional.silu(gate) * value).flatten(-2)
        else:
            inner = functional.gelu(self.up(x_BTD), approximate="tanh")
        result: Tensor = self.down(inner)
        return result


class Block(nn.Module):
    """Attention and feed-forward, each on normalised input and added to it."""

    def __init__(self, shape: Shape, context: int) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape, context)
        self.feed_forward_norm = _norm(shape)
        self.feed_forward = FeedForward(shape)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        result: Tensor = x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))
        return result


class _RMSNorm(nn.RMSNorm):
    """In the weight's type, as autocast has it for layer normalisation; for mixed types torch has no kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def _norm(shape: Shape) -> nn.Module:
    return _RMSNorm(shape.width, eps=1e-5) if shape.llama else nn.LayerNorm(shape.width)


class _Head(nn.Linear):
    """The output layer: logits (B, T, V); with targets, their mean cross entropy."""

    def forward(self, x_BTD: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            return super().forward(x_BTD)
        return linear_cross_entropy(x_BTD.flatten(0, 1), self.weight, targets.flatten())


class Decoder(nn.Module):
    """A language model.

    Args:
        shape: its sizes.
        vocabulary: token numbers.
        context: the most tokens it sees.
    """

    def __init__(self, shape: Shape, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embedding = undrawn(nn.Embedding, vocabulary, shape.width)
        self.positions = None if shape.llama else undrawn(nn.Embedding, context, shape.width)
        self.blocks = nn.ModuleList(Block(shape, context) for _ in range(shape.layers))
        self.norm = _norm(shape)
        self.head = undrawn(_Head, shape.width, vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        self._draw_weights(shape)
        self._shape = shape
        self._context = context
        self._team: Team | None = None

    def check_team(self, number: int) -> None:
        """Refuse to be divided among so many ranks.

        Raises:
            InputError: something cannot be divided by their number.
        """
        shape = self._shape
        hidden = _gate_groups(shape) if shape.llama else shape.hidden
        sizes = {"kv_heads": shape.kv_heads, "width": shape.width, "hidden": hidden, "context": self._context}
        for name, size in sizes.items():
            if size % number:
                raise InputError(
                    f"{name} = {size} cannot be divided among {number} ranks", "each computes its part of every layer",
                    _smaller_team(math.gcd(*sizes.values()), number),
                )  # fmt: skip

    def divide(self, mesh: DeviceMesh) -> None:
        """Let the ranks of a mesh compute each layer together; this one keeps its part.

        Raises:
            InputError: as `check_team`.
        """
        shape = self._shape
        self.check_team(mesh.size())
        team = self._team = Team(mesh)
        team.divide_embedding(self.embedding)
        if self.positions is not None:
            team.copy_table(self.positions)
        for block in self.blocks:
            assert isinstance(block, Block)
            team.copy_norm(block.attention_norm)
            team.copy_norm(block.feed_forward_norm)
            team.divide_layers(block.attention, "qkv", "out")
            team.divide_layers(block.feed_forward, "up", "down")
        team.copy_norm(self.norm)
        if shape.tied:
            self.head.weight = self.embedding.weight
        else:
            team.divide_output(self.head)

    @property
    def gathered_apart(self) -> tuple[nn.Module, ...]:
        """See `hotloop.train.blocks.gathered_apart`."""
        return () if self._shape.tied or self._team else (self.embedding, self.head)

    def forward(self, tokens_BT: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V); with targets, their mean cross entropy, without holding all logits in float32."""
        team, tokens = self._team, tokens_BT.shape[1]
        x_BTD = self.embedding(tokens_BT)
        if self.positions is not None:
            table = self.positions.weight
            x_BTD = x_BTD + (team.own_rows(table, tokens) if team else table[:tokens])
        if computed_in(x_BTD) is torch.bfloat16:  # half the memory traffic around the norms; fp16 has too small a range
            x_BTD = x_BTD.bfloat16()
        for block in self.blocks:
            x_BTD = block(x_BTD)
        x_BTD = self.norm(x_BTD)
        if team:
            return self._ends_in(team, x_BTD, targets)
        result: Tensor = self.head(x_BTD, targets)
        return result

    def _ends_in(self, team: Team, x_BTD: Tensor, targets: Tensor | None) -> Tensor:
        """What `forward` does with this rank's part of the tokens."""
        weight_VD = team.whole(self.head.weight)
        if targets is None:
            return functional.linear(team.all_tokens(x_BTD), weight_VD)
        targets_BT = team.own_tokens(targets)
        loss = linear_cross_entropy(x_BTD.flatten(0, 1), weight_VD, targets_BT.flatten())
        return team.mean(loss, (targets_BT >= 0).sum())

    def _draw_weights(self, shape: Shape) -> None:
        """GPT-2's: normal with 0.02, less for what is added to the stream of `2 * layers` sums; biases zero."""
        weights: dict[Tensor, float] = {}  # those of the embedding may be the output layer's
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                weights[module.weight] = 0.02 / math.sqrt(2 * shape.layers if name.endswith((".out", ".down")) else 1)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        draw_normal(list(weights.items()))


def build_decoder(name: str, vocabulary: int, context: int, arguments: dict[str, Any]) -> Decoder:
    """A new model of a named shape.

    Args:
        name: of `SHAPES`.
        arguments: sizes that differ from the shape's: { layers = 2 }.

    Raises:
        InputError: the sizes are unknown or do not go together.
    """
    try:
        shape = replace(SHAPES[name], **arguments)
    except TypeError as error:
        raise InputError(
            f"model.arguments = {arguments} do not fit {name}", str(error), "--set model.arguments={}"
        ) from None
    sizes = (shape.layers, shape.width, shape.heads, shape.kv_heads, shape.hidden)
    if not all(type(size) is int and size > 0 for size in sizes):
        raise InputError(f"model.arguments = {arguments}", "sizes are whole numbers from 1", "--set model.arguments={}")
    if shape.llama and shape.width // shape.heads % 2:
        raise InputError(
            f"model.arguments: heads are {shape.width // shape.heads} wide",
            "rotary positions turn pairs of numbers",
            "--set model.arguments={}",
        )
    if shape.width % shape.heads or shape.heads % shape.kv_heads:
        raise InputError(
            f"model.arguments: {shape.width} wide with {shape.heads} heads and {shape.kv_heads} of keys and values",
            "heads must divide the width, and be a multiple of kv_heads",
            "--set model.arguments={}",
        )
    return Decoder(shape, vocabulary, context)
