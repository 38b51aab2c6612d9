"""Our operators beside the plain layers in float64: relative errors. Run alone it prints them as JSON."""

import copy
import json
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional


class Pair(nn.Module):
    """A shortcut block in small: relu(bn(x)), relu(bn(x) + x'), relu(bn(x) + bn(y))."""

    def __init__(self, channels: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        for norm in (self.norm, self.norm2):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias)
            nn.init.normal_(norm.running_mean)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.kind == "relu":
            return self.relu(self.norm(x))
        if self.kind == "shortcut":
            return self.relu(self.norm(x) + y)
        return self.relu(self.norm(x) + self.norm2(y))


class Stem(nn.Module):
    """The beginning of a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm, self.pool = nn.BatchNorm2d(64), nn.MaxPool2d(3, 2, 1)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(functional.relu(self.norm(self.conv(x))))


def error(one: Tensor, other: Tensor) -> float:
    mine, exact = one.detach().double(), other.detach().double()
    return float((mine - exact).norm() / exact.norm().clamp(min=1e-12))


def compare(model: nn.Module, inputs: list[Tensor], dtype: torch.dtype, wants_gradient: bool) -> dict[str, float]:
    """Errors of output, gradients and running values of the fused layers against the plain ones in float64."""
    from hotloop.kernels.fuse import fused

    plain = copy.deepcopy(model).double()
    ours = fused(model, dtype)
    assert ours is not None
    own = [tensor.clone().requires_grad_(wants_gradient) for tensor in inputs]
    exact = [tensor.double().requires_grad_(wants_gradient) for tensor in inputs]
    out, expected = ours(*own), plain(*exact)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected.device).to(dtype)
    out.backward(gradient)
    expected.backward(gradient.double())
    errors = {"out": error(out, expected)}
    for name, (mine, theirs) in {f"input {n}": pair for n, pair in enumerate(zip(own, exact, strict=True))}.items():
        if theirs.grad is not None:
            errors[name] = error(mine.grad, theirs.grad)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            errors[name] = error(mine.grad, theirs.grad)
    for (name, mine), theirs in zip(model.named_buffers(), plain.buffers(), strict=True):
        errors[name] = error(mine, theirs)
    return errors


def cross_entropy(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Errors of losses and gradient, where some targets do not count."""
    from hotloop.kernels.cross_entropy import into_gradient_on_gpu

    torch.manual_seed(0)
    logits = (4 * torch.randn(29, 5003, device=device)).to(dtype)
    targets = torch.randint(0, 5003, (29,), device=device)
    targets[1::7] = -100
    exact = logits.double().requires_grad_()
    expected = functional.cross_entropy(exact, targets, reduction="none")
    expected.sum().backward()
    losses = into_gradient_on_gpu(logits, targets)
    assert exact.grad is not None
    return {"losses": error(losses, expected), "gradient": error(logits, exact.grad)}


def not_finite(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Where NaN and Inf go, in the batch that has them and in the next one: 0 if where they go in the plain layers."""
    from hotloop.kernels.fuse import fused

    torch.manual_seed(0)
    model = Pair(16, "relu").to(device)
    plain = copy.deepcopy(model).double()
    ours = fused(model, dtype)
    assert ours is not None
    found = {}
    for batch in ("spoiled", "next"):
        x = torch.randn(3, 16, 5, 6, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
        if batch == "spoiled":
            x[0, 1, 2, 3], x[1, 4, 0, 0] = torch.nan, torch.inf
        mine, exact = ours(x, x), plain(x.double(), x.double())
        found[batch] = float((mine.isnan() != exact.isnan()).any())
        found[f"{batch}, running"] = float((model.norm.running_var.isnan() != plain.norm.running_var.isnan()).any())
    return found


def all_cases(device: str, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    found = {}
    for kind, channels, size in (("relu", 16, 5), ("relu", 80, 3), ("shortcut", 64, 7), ("both", 128, 4)):
        torch.manual_seed(0)
        model = Pair(channels, kind).to(device)
        inputs = [torch.randn(3, channels, size, size + 1, device=device).to(dtype) for _ in range(2)]
        inputs = [tensor.contiguous(memory_format=torch.channels_last) for tensor in inputs]
        found[f"{kind} {channels}"] = compare(model, inputs, dtype, wants_gradient=True)
    for size in ((18, 21), (33, 16)):
        torch.manual_seed(0)
        images = torch.randn(2, 3, *size, device=device).contiguous(memory_format=torch.channels_last)
        found[f"stem {size[0]} x {size[1]}"] = compare(Stem().to(device), [images], dtype, wants_gradient=False)
    found["not finite"] = not_finite(device, dtype)
    found["cross entropy"] = cross_entropy(device, dtype)
    return found


if __name__ == "__main__":
    print(json.dumps(all_cases(sys.argv[1], getattr(torch, sys.argv[2]))))
