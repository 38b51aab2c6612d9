"""Accelerations that are settings of torch, of its allocator, or of the optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hotloop.accelerate.training import Training
from hotloop.attach.malloc import can_keep, keep_freed
from hotloop.attach.patches import Patches


class Threads:
    """As many threads as processors, where the script has more: they only take processors from each other."""

    name = "threads"

    def __init__(self) -> None:
        self.count = 0
        self._before = torch.get_num_threads()

    def unfit(self, training: Training) -> str:
        if training.plan.threads or torch.get_num_threads() > training.processors:
            return ""
        return f"{torch.get_num_threads()} threads fit {training.processors} processors"

    def switch_on(self, training: Training) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(training.plan.threads or training.processors)
        self.count = 1

    def switch_off(self) -> None:
        torch.set_num_threads(self._before)


class Allocator:
    """Memory of the host that a step frees is kept for the next."""

    name = "allocator"

    def __init__(self) -> None:
        self.count = 0

    def unfit(self, training: Training) -> str:
        if training.device.type != "cpu":
            return "the GPU's allocator keeps its memory by itself"
        return "" if can_keep() else "the C library has no mallopt, or the environment sets it"

    def switch_on(self, training: Training) -> None:
        keep_freed(True)
        self.count = 1

    def switch_off(self) -> None:
        keep_freed(False)


class CudnnAutotune:
    """cuDNN tries its algorithms at the first convolution of each shape, and keeps the fastest."""

    name = "cudnn_autotune"

    def __init__(self) -> None:
        self.count = 0

    def unfit(self, training: Training) -> str:
        if training.device.type != "cuda":
            return "there is no GPU"
        if torch.backends.cudnn.benchmark:
            return "the script has it already"
        if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return "the script asks for deterministic algorithms"
        if not any(isinstance(part, _CONVOLUTIONS) for model in training.models for part in model.modules()):
            return "the model has no convolution"
        return ""

    def switch_on(self, training: Training) -> None:
        torch.backends.cudnn.benchmark = True
        self.count = 1

    def switch_off(self) -> None:
        torch.backends.cudnn.benchmark = False


_CONVOLUTIONS = torch.nn.modules.conv._ConvNd


class ZeroGrad:
    """`zero_grad(set_to_none=False)` drops gradients; those that backward does not bring are zeros, as without."""

    name = "zero_grad"

    def __init__(self) -> None:
        self.count = 0
        self._seen = 0
        self._on = False
        self._dropped: set[torch.nn.Parameter] = set()
        self._patches = Patches()
        self._patches.replace(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        self._patches.replace(torch.Tensor, "backward", self._backward)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def unfit(self, training: Training) -> str:
        return "" if self._seen else "gradients are dropped already, as is torch's default"

    def switch_on(self, training: Training) -> None:
        self._on = True

    def switch_off(self) -> None:
        self._on = False

    def remove(self) -> None:
        """Nothing is replaced any more."""
        self._patches.undo()
        self._hook.remove()

    def _zero_grad(self, original: Callable[..., None]) -> Callable[..., None]:
        def zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            if set_to_none:
                original(optimizer, set_to_none)
                return
            self._seen += 1
            if not self._on:
                original(optimizer, set_to_none)
                return
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if each.grad is None:
                        continue
                    if each.grad._is_view():  # of a buffer of the script's own
                        each.grad.zero_()
                    else:
                        each.grad = None
                        self._dropped.add(each)
            self.count += 1

        return zero_grad

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            original(tensor, *args, **kwargs)
            self._fill()

        return backward

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._fill()

    def _fill(self) -> None:
        """Gradients that have not come are zeros."""
        for each in self._dropped:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        self._dropped.clear()


class Tf32:
    """Matrix products of float32 on tensor cores, with 10 bits of mantissa."""

    name = "tf32"

    def __init__(self) -> None:
        self.count = 0
        self._before = "highest"

    def unfit(self, training: Training) -> str:
        if training.device.type != "cuda" or torch.cuda.get_device_capability(training.device) < (8, 0):
            return "the device has no TF32"
        return "the script has it already" if torch.get_float32_matmul_precision() != "highest" else ""

    def switch_on(self, training: Training) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        self.count = 1

    def switch_off(self) -> None:
        torch.set_float32_matmul_precision(self._before)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class FusedOptimizer:
    """An optimizer's whole step as one kernel. What the script saves of it says what the script asked for."""

    name = "fused_optimizer"

    def __init__(self) -> None:
        self.count = 0
        self._optimizer: torch.optim.Optimizer
        self._before: list[dict[str, Any]] = []
        self._hook: Any = None

    def unfit(self, training: Training) -> str:
        optimizer = training.optimizer
        if optimizer is None:
            return "there is no optimizer of torch's"
        if type(optimizer) not in _FUSED:
            return f"{type(optimizer).__name__} has no fused step"
        for group in optimizer.param_groups:
            if group.get("fused"):
                return "the script has it already"
            if group.get("capturable") or group.get("differentiable"):
                return "the script asks for another kind of step"
            if group.get("foreach") is not None or group.get("fused") is False:
                return "the script asks for another kind of step"
            if any(each.dtype not in _FLOATS or each.device.type not in ("cuda", "cpu") for each in group["params"]):
                return "not all weights are of a precision that has a fused step"
            if any(each.grad is not None and each.grad.is_sparse for each in group["params"]):
                return "gradients are sparse"
        return ""

    def switch_on(self, training: Training) -> None:
        assert training.optimizer
        self._optimizer = training.optimizer
        self._before = [{name: group.get(name) for name in ("fused", "foreach")} for group in self._groups]
        for group in self._groups:
            group.update(fused=True, foreach=False)
        self._counters_on_device(fused=True)
        self._hook = self._optimizer.register_state_dict_post_hook(self._as_asked_for)
        self.count = 1

    def switch_off(self) -> None:
        for group, before in zip(self._groups, self._before, strict=False):
            group.update(before)
        self._counters_on_device(fused=False)
        self._hook.remove()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _counters_on_device(self, fused: bool) -> None:
        """Adam counts its steps on the host, or fused on the device."""
        for weight, state in self._optimizer.state.items():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(weight.device if fused else "cpu", torch.float32)

    def _as_asked_for(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for group, before in zip(state["param_groups"], self._before, strict=False):  # groups may have come
            group.update(before)
