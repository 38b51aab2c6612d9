"""Divided weights that are updated while backward still computes: each block's as soon as its gradients have come.

FSDP2 calls a weight's hooks on the stream on which its gradient arrives, so that the update takes its time beside the
blocks before it. A rank never holds all gradients, and no weight is read before the next forward pass gathers it, which
waits for that stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizers

from hotloop.core.errors import HotloopError
from hotloop.train.gathered import own_weights
from hotloop.train.local_update import LocalUpdate

_WATCHED = 2
"""Windows in which it is only seen whether the gradients of each weight come once; what compiles does it in these."""
_KINDS = (Adam, AdamW, SGD)
"""That change each weight by nothing but its own gradient."""


class EarlyUpdate:
    """The updates of a model's divided weights; of any other model it leaves all to the step.

    Args:
        optimizer: over the model's weights. Hooks of it would be called for each block, and keep it from this. None: it
            has to have all gradients at once.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._left = _WATCHED
        self._ends_window = self._hindered = False
        self._came: set[Tensor] = set()
        self._updated: set[Tensor] = set()
        self._update_of: dict[Tensor, LocalUpdate] = {}
        if optimizer is None or type(optimizer) not in _KINDS:
            return
        self._optimizer = optimizer
        known = {weight for group in optimizer.param_groups for weight in group["params"]}
        for part in model.modules():
            if isinstance(part, FSDPModule):
                weights = [weight for weight in own_weights(part) if weight.requires_grad and weight in known]
                self._update_of |= dict.fromkeys(weights, LocalUpdate(optimizer, weights))
        for weight in self._update_of:
            weight.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    @contextmanager
    def backward(self, last: bool) -> Iterator[None]:
        """Run a backward pass inside; of a window's last one gradients are complete when they come."""
        self._ends_window = last
        self._came.clear()
        self._updated.clear()
        yield
        self._ends_window = False
        if last and self._left:
            self._left -= 1

    def _arrived(self, weight: Tensor) -> None:
        if weight in self._updated:
            raise HotloopError(
                "gradients of a block have come twice in one step",
                "in the steps before they came once, and its weights have changed since",
                "let the loss have one backward pass in each step, or --set parallel=ddp",
            )
        if not self._ends_window or self._hindered:
            return
        self._hindered = weight in self._came or _has_hooks(self._optimizer)
        self._came.add(weight)
        update = self._update_of[weight]
        if self._left or self._hindered or not self._came.issuperset(update.weights) or not update.possible:
            return
        update.step()
        self._updated |= update.weights


def _has_hooks(optimizer: Optimizer) -> bool:
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks)
