"""Where gradients are between backward and the update."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hotloop.train.flat import FlatGradients


class Gradients:
    """The gradients of an optimizer's parameters, in one of three ways.

    - Fresh: one backward pass makes them and the update of the same graph uses them up.
    - Kept: tensors that several graphs share; attached to the parameters while a window needs them.
    - Flat: side by side, for ranks that average them between two graphs.

    Attributes:
        attached: whether the kept ones are the parameters' at present.
        flat: once a window has made them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.attached = False
        self.flat: FlatGradients | None = None
        self._optimizer = optimizer
        self._kept: list[Tensor | None] = []

    def parameters(self) -> list[Tensor]:
        """What the optimizer changes; the model may hold more, and the optimizer some that the model does not."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def drop(self) -> None:
        """Forget all of them."""
        self.release()
        self._kept, self.flat = [], None

    def release(self) -> None:
        """Leave the parameters without gradients; what is kept stays."""
        self._optimizer.zero_grad()
        self.attached = False

    def attach(self, kept: bool) -> None:
        """Let the parameters' gradients be the kept tensors, if there are any yet; or none."""
        if kept == self.attached:
            return
        if not kept:
            self.release()
        elif self._kept:
            for parameter, gradient in zip(self.parameters(), self._kept, strict=True):
                parameter.grad = gradient
            self.attached = True

    def zero(self) -> None:
        """Begin a window: with the kept ones, if they are attached, else with none, whoever left some."""
        if self.attached:
            torch._foreach_zero_([gradient for gradient in self._kept if gradient is not None])
        else:
            self.release()

    def keep(self) -> None:
        """Let those that the parameters have be the kept ones."""
        self._kept = [parameter.grad for parameter in self.parameters()]

    def complete(self) -> None:
        """Add up those of which each rank of a team has a part, of norms and positions; all ranks of it call this.

        Torch 2.11 clips and unscales a copy of such a gradient, and the gradient stays as it was.
        """
        for weight in self.parameters():
            gradient = weight.grad
            if not (isinstance(weight, DTensor) and isinstance(gradient, DTensor)):
                continue
            if gradient.placements != weight.placements:
                weight.grad = gradient.redistribute(placements=weight.placements)

    def flat_of(self, model: nn.Module, parameters: list[Tensor]) -> FlatGradients:
        """The flat ones of these parameters of the model, in an order that is the same on all ranks."""
        if self.flat is None:
            self.flat = FlatGradients(model, parameters)
        return self.flat
