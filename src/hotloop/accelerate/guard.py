"""Is the loss what the script's own arithmetic would have made of it?

Where a model's outputs are computed in both ways, everything the script does with them is done twice as well, up to the
loss on which `backward` is called: so the two losses differ by nothing but the arithmetic.

Meanwhile what the script has compiled runs as it is written. Compiled functions are tied to the modes that they were
compiled under: ours would have each of them compiled anew, which those that are to be one graph answer with an error.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _device
from torch.utils._pytree import tree_flatten, tree_map

from hotloop.attach.patches import Patches

_FIRST = 5
"""Forward passes that are checked one after another; then each whose number is a power of two."""
_RELATIVE = 0.02
_OF_SPREAD = 0.25
_OF_CHANCE = 3.0
"""A loss may differ by so much of itself, of the spread of losses from batch to batch, or of what other random numbers
(dropout) make of it, whichever is most.
"""


class Guard:
    """Compares losses.

    Args:
        drifted: told why, once, if a loss differs by more than it may.

    Attributes:
        checked: losses compared.
        largest: difference of two that was allowed, as a share of the exact one, or of the spread of those so far,
            where that is more.
    """

    def __init__(self, drifted: Callable[[str], None]) -> None:
        self.checked = 0
        self.largest = 0.0
        self._drifted = drifted
        self._calls = 0
        self._losses: list[float] = []
        self._chance = 0.0
        self._again: _Again | None = None

    def restart(self) -> None:
        """Check the next ones again: something has been switched on."""
        self._calls = 0

    @property
    def is_at_work(self) -> bool:
        """Whether what is done now is done twice."""
        return self._again is not None

    def is_due(self) -> bool:
        """Whether this forward pass is to be checked; counts it."""
        self._calls += 1
        if self._again and self._again.is_over:
            self.end_step()
        free = self._again is None and torch.is_grad_enabled()
        return free and (self._calls <= _FIRST or self._calls & (self._calls - 1) == 0)

    def compare(self, model: nn.Module, exact: Callable[[], Any], fast: Callable[[], Any]) -> Any:
        """What `fast` returns; from now on until `backward` all is done with what `exact` returned, too."""
        expected: list[Any] = []
        try:
            with torch.compiler.set_stance("force_eager"), kept(model), torch.no_grad():
                before = _random_state()
                expected = [exact()]
                if not torch.equal(before, _random_state()):  # torch.compile draws others
                    expected.append(exact())
        except Exception:  # it cannot be run twice, or it fails by itself, which comes again now
            return fast()
        outputs = fast()
        self._again = _Again(self._told, len(expected))
        self._again.note(outputs, expected)
        self._again.begin()
        return outputs

    def end_step(self) -> None:
        """A loss that has not come by now will not come."""
        if self._again:
            self._again.leave()
            self._again = None
        _take_off()  # one that ended in another thread

    def _told(self, loss: Tensor, exact: Sequence[Tensor]) -> None:
        self._again = None
        if not exact or loss.numel() != 1:
            return
        found, expected, *others = (float(each.detach()) for each in (loss, *exact))
        if not isfinite(expected):  # the script's own arithmetic has broken down
            return
        self._losses.append(expected)
        self._chance = max([self._chance, *(abs(other - expected) for other in others)])
        self.checked += 1
        difference = abs(found - expected)
        spread = max(self._losses) - min(self._losses)
        allowed = max(_RELATIVE * abs(expected), _OF_SPREAD * spread, _OF_CHANCE * self._chance)
        if not difference <= allowed:  # a loss that is NaN, too
            self._drifted(f"the loss was {found:.6g} and exactly {expected:.6g}")
        else:
            self.largest = max(self.largest, difference / max(abs(expected), spread, 1e-12))


class _Again(TorchFunctionMode):
    """Does once more, with other values, what is done with some tensors, as often as there are other values.

    Args:
        told: the tensor on which `backward` is called, and its other values, once all of this is over.
        times: how many other values there are.

    Attributes:
        is_over: whether an error has passed through: what follows it is another thing than the loss.
    """

    def __init__(self, told: Callable[[Tensor, Sequence[Tensor]], None], times: int) -> None:
        super().__init__()
        self.is_over = False
        self._told = told
        self._times = times
        self._others: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._patches = Patches()
        self._stance: Any = None

    def note(self, outputs: Any, others: Sequence[Any]) -> None:
        """Of each floating-point tensor in `outputs`, the one in the same place of each of the others."""
        for one, *rest in zip(*(tree_flatten(each)[0] for each in (outputs, *others)), strict=True):
            if isinstance(one, Tensor) and one.is_floating_point():
                self._others[id(one)] = (one, rest)

    def begin(self) -> None:
        """Do everything once more from now on, until `backward` or `leave`."""
        self._stance = torch.compiler.set_stance("force_eager")
        # Torch calls a mode without it on the stack, and puts it back afterwards: there it cannot go for good.
        self._patches.replace(Tensor, "backward", self._backward)
        # Under the script's own modes: each of these takes away what is on top when it ends. `set_default_device` alone
        # has its place at the bottom.
        stack = _stack()
        first = int(_device.CURRENT_DEVICE is not None)
        _restack([*stack[:first], self, *stack[first:]])

    def leave(self) -> None:
        """Do everything once from now on."""
        self.is_over = True
        self._others.clear()
        self._patches.undo()
        _take_off()
        if self._stance:
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._stance:  # else somebody has kept it
                found = self._others.get(id(tensor))
                self.leave()
                self._told(tensor, found[1] if found else [])
            return original(tensor, *args, **kwargs)

        return backward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = any(id(leaf) in self._others for leaf in tree_flatten((args, kwargs))[0])
        others = self._done_again(func, args, kwargs) if known else None  # before, as it may write into its arguments
        try:
            outputs = func(*args, **kwargs)
        except BaseException:
            self.is_over = True
            self._others.clear()
            raise
        if others is not None:
            with suppress(ValueError):  # not the same number of outputs
                self.note(outputs, others)
        return outputs

    def _done_again(self, func: Any, args: Any, kwargs: Any) -> list[Any] | None:
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") or name.startswith("__i") or "norm" in name

        def other(number: int, leaf: Any) -> Any:
            found = self._others.get(id(leaf))
            if found:
                return found[1][number]
            return leaf.clone() if writes and isinstance(leaf, Tensor) else leaf

        try:
            with torch.no_grad(), torch.random.fork_rng(devices=_devices()):
                return [func(*tree_map(partial(other, n), args), **tree_map(partial(other, n), kwargs))
                        for n in range(self._times)]  # fmt: skip
        except Exception:  # then this loss is not compared
            return None


def _stack() -> list[TorchFunctionMode]:
    """What torch calls in this thread, the last one first."""
    return overrides._get_current_function_mode_stack()  # type: ignore[no-any-return, no-untyped-call]


def _restack(modes: Sequence[TorchFunctionMode]) -> None:
    for _ in _stack():
        overrides._pop_mode()  # type: ignore[no-untyped-call]
    for mode in modes:
        overrides._push_mode(mode)  # type: ignore[no-untyped-call]


def _take_off() -> None:
    """Torch calls nothing of ours in this thread."""
    stack = _stack()
    others = [mode for mode in stack if not isinstance(mode, _Again)]
    if len(others) < len(stack):
        _restack(others)


def _has_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _random_state() -> Tensor:
    """Of the host's generator and, once it is in use, the GPU's."""
    gpu = [torch.cuda.get_rng_state()] if _has_gpu() else []
    return torch.cat([torch.get_rng_state(), *gpu])


def _devices() -> list[int]:
    return [torch.cuda.current_device()] if _has_gpu() else []


@contextmanager
def kept(model: nn.Module) -> Generator[None]:
    """Random numbers, and what the model notes while it runs, are afterwards as they were."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=_devices()):
        yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in buffers and buffers[name].shape == buffer.shape:  # else it was made just now
                buffer.copy_(buffers[name])


def in_float32(outputs: Any) -> Any:
    """Floating-point tensors of 16 bits as float32, in whatever they are.

    Raises:
        TypeError: they are in something that cannot be looked into.
    """

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf
        if leaf is not None and not isinstance(leaf, bool | int | float | str):
            raise TypeError(f"the model returns a {type(leaf).__name__}")
        return leaf

    return tree_map(cast, outputs)
