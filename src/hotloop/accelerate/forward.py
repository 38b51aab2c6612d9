"""The script's models computed in another way, between their own inputs and outputs."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from hotloop.accelerate.guard import Guard, in_float32, kept
from hotloop.accelerate.training import Training
from hotloop.attach.patches import Patches


class Forward:
    """Stands between the script and its models' `forward`. It replaces the class's, so that models can be saved whole.

    Args:
        failed: told which acceleration is to go and why: it has raised an error, or the loss has drifted.

    Attributes:
        on: the accelerations at work, in the order in which they were switched on.
    """

    def __init__(self, failed: Callable[[str, str], None]) -> None:
        self.on: list[str] = []
        self.counts: dict[str, int] = {}
        self.guard = Guard(self._drifted)
        self._failed = failed
        self._models: dict[int, nn.Module] = {}
        self._compiled: dict[int, Callable[..., Any]] = {}
        self._device = torch.device("cpu")
        self._patches = Patches()

    def switch(self, name: str, training: Training) -> None:
        """Switch one on."""
        if not self._models:
            self._device = training.device
            self._models = {id(model): model for model in training.models}
            for kind in {type(model) for model in training.models}:
                self._patches.replace(kind, "forward", self._replaced)
        self.on.append(name)
        self.guard.restart()

    def switch_off(self, name: str) -> None:
        """Switch one off."""
        if name in self.on:
            self.on.remove(name)
        if not self.on:
            self._stand_aside()

    def remove(self) -> None:
        """Models compute as they are, for good."""
        self._stand_aside()
        self._compiled.clear()

    def _stand_aside(self) -> None:
        """What is compiled stays: it may be switched on again."""
        self.guard.end_step()
        self._patches.undo()
        self._models.clear()

    def _drifted(self, why: str) -> None:
        for name in list(self.on):
            self._give_up(name, why)

    def _give_up(self, name: str, why: str) -> None:
        self.on.remove(name)
        self._failed(name, why)

    def _replaced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(model) not in self._models or not self.on or torch.compiler.is_compiling():
                return original(model, *args, **kwargs)
            if not model.training:  # no loss has come of what was computed before
                self.guard.end_step()
            elif self.guard.is_due():
                return self.guard.compare(
                    model, lambda: original(model, *args, **kwargs), lambda: self._fast(original, model, args, kwargs)
                )
            return self._fast(original, model, args, kwargs)

        return forward

    def _fast(self, original: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        while self.on:
            try:
                return self._computed(original, model, args, kwargs)
            except Exception as error:  # the last one that was switched on first; the script's own comes again below
                lines = str(error).strip().splitlines()
                self._give_up(self.on[-1], f"{type(error).__name__}: {lines[0] if lines else ''}")
        return original(model, *args, **kwargs)

    def _computed(self, original: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        compute, cast = original, "bf16" in self.on
        if "channels_last" in self.on:
            args, kwargs = tree_map_only(Tensor, _channels_last, (args, kwargs))
        may_compile = model.training and torch.is_grad_enabled() and not self.guard.is_at_work
        if "compile" in self.on and may_compile:
            compute = self._compiled.get(id(model)) or torch.compile(original)
        with torch.autocast(self._device.type, torch.bfloat16) if cast else nullcontext():
            if compute is not original and id(model) not in self._compiled:
                _rehearse(compute, model, args, kwargs)
                self._compiled[id(model)] = compute
            outputs = compute(model, *args, **kwargs)
        if "channels_last" in self.on:  # the script may `view` them
            outputs = tree_map_only(Tensor, Tensor.contiguous, outputs)
        for name in self.on:
            self.counts[name] = self.counts.get(name, 0) + 1
        return in_float32(outputs) if cast else outputs


def _rehearse(compute: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> None:
    """Compile the backward pass as well, here, where an error undoes no more than the compiling: in the script's own
    call of `backward` it would end the script.
    """
    with kept(model):
        outputs = tree_leaves(compute(model, *args, **kwargs))
        wanted = [each.sum() for each in outputs if isinstance(each, Tensor) and each.requires_grad]
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        if wanted:
            torch.autograd.grad(wanted, weights, allow_unused=True)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


class _ModelAcceleration:
    """One of those that change a model's forward."""

    name = ""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    @property
    def count(self) -> int:
        """Forward passes so far."""
        return self._forward.counts.get(self.name, 0)

    def unfit(self, training: Training) -> str:
        if not training.models:
            return "no module with weights was seen at work"
        parts = (type(part).__name__ for model in training.models for part in model.modules())
        found = set(parts)
        if any(name.startswith(("FullySharded", "FSDP")) for name in found):
            return "the model is sharded"
        if "SyncBatchNorm" in found and training.ranks.number > 1:
            return "ranks that share batch normalisation would have to fail together"
        if any("forward" in vars(model) for model in training.models):
            return "something else has replaced the model's forward"
        return ""

    def switch_on(self, training: Training) -> None:
        self._forward.switch(self.name, training)

    def switch_off(self) -> None:
        self._forward.switch_off(self.name)


class Bf16(_ModelAcceleration):
    """The forward pass under autocast to bfloat16; outputs are float32 again."""

    name = "bf16"

    def unfit(self, training: Training) -> str:
        if training.device.type == "cuda" and torch.cuda.get_device_capability(training.device) < (8, 0):
            return "the GPU computes no faster in bfloat16"
        if training.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "the processor has no bfloat16"
        if training.has_autocast:
            return "the script has mixed precision of its own"
        if any(each.dtype != torch.float32 for model in training.models for each in model.parameters()):
            return "the script has other precisions of its own"
        return super().unfit(training)


class ChannelsLast(_ModelAcceleration):
    """Images and the weights of convolutions lie in memory with their channels side by side."""

    name = "channels_last"

    def unfit(self, training: Training) -> str:
        parts = [part for model in training.models for part in model.modules() if isinstance(part, nn.Conv2d)]
        if not parts:
            return "the model has no convolution of images"
        if not all(part.weight.is_contiguous() for part in parts):
            return "the script has a layout of its own"
        if training.ranks.number > 1:
            return "gradients that ranks share lie otherwise"
        return super().unfit(training)

    def switch_on(self, training: Training) -> None:
        self._lay_out(training, torch.channels_last)
        self._training = training
        super().switch_on(training)

    def switch_off(self) -> None:
        if self.name in self._forward.on:  # in the middle of a step, after an error, weights stay as they lie
            self._lay_out(self._training, torch.contiguous_format)
        super().switch_off()

    def _lay_out(self, training: Training, layout: torch.memory_format) -> None:
        for model in training.models:
            model.to(memory_format=layout)
        if training.optimizer:
            for state in training.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() == 4:
                        state[name] = value.contiguous(memory_format=layout)


class Compile(_ModelAcceleration):
    """The training forward and its backward through torch.compile."""

    name = "compile"

    def unfit(self, training: Training) -> str:
        if any(isinstance(part, torch._dynamo.OptimizedModule) for m in training.models for part in m.modules()):
            return "the script compiles its model already"
        return super().unfit(training)
