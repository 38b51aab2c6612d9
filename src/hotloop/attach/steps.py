"""Where the steps of somebody's training end, and when they have become regular."""

import time
from collections.abc import Callable, Generator, Sequence
from importlib import import_module
from statistics import median
from typing import Any, Protocol, TypeVar

from hotloop.attach.inside import tell
from hotloop.attach.patches import Patches

_BACKWARDS = 20
"""After so many without a step of an optimizer they are what steps are told by."""
_MOST_OTHERS = 50
"""Steps of other optimizers in a row, after which the first one is taken to be done with."""
_GROUP = 5
_ALIKE = 1.15
"""Warm-up ends when two groups of steps in a row take the same time, to this factor,"""
_MOST_WARM_UP, _MOST_WARM_UP_SECONDS = 60, 60.0
"""or after so many steps, or seconds."""


class Follower(Protocol):
    """What is told about steps. What it raises reaches the script, but for errors of `began`, which end the telling."""

    def began(self, device: Any, optimizer: Any) -> None:
        """The first step has ended; this is the device of what is trained. `optimizer` is None where there is none."""

    def stepped(self) -> None:
        """A step has ended, the first one too."""

    def changed(self) -> None:
        """From now on another optimizer tells the steps; the present one has no known beginning."""


class StepFinder:
    """Tells a follower of the end of each step: of the optimizer that was first where there are several, else of each
    `backward`, as scripts that update weights by hand have none.
    """

    def __init__(self, torch: Any, follower: Follower) -> None:
        self._follower = follower
        self._optimizer: Any = None
        self._other: Any = None
        self._others = 0
        self._backwards = 0
        self._patches = Patches()
        self._patches.replace(torch.Tensor, "backward", self._watch_backward)
        self._stopped = False
        import_module("torch.optim.optimizer").register_optimizer_step_post_hook(self._optimizer_stepped)

    def stop(self) -> None:
        """Tell no more. The hook stays: torch does not let one remove hooks while it calls them."""
        self._patches.undo()
        self._stopped = True

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._stopped and self._is_marked_by(optimizer):
            self._follower.stepped()

    def _watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            original(tensor, *args, **kwargs)
            if self._optimizer is not None:
                return
            self._backwards += 1
            if self._backwards == _BACKWARDS and not self._begin(tensor.device, None):
                return
            if self._backwards >= _BACKWARDS:
                self._follower.stepped()

        return backward

    def _begin(self, device: Any, optimizer: Any) -> bool:
        """Whether the follower follows; the script goes on if it cannot."""
        try:
            self._follower.began(device, optimizer)
        except Exception as error:
            self.stop()
            tell(f"this training is not followed: {type(error).__name__}: {error}")
            return False
        return True

    def _is_marked_by(self, optimizer: Any) -> bool:
        if self._optimizer is None:
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            if not weights:  # it trains nothing, as that of a model with all its layers frozen
                return False
            self._optimizer = optimizer
            self._patches.undo()
            if not self._begin(weights[0].device, optimizer):
                return False
        if optimizer is self._optimizer:
            self._other, self._others = None, 0
            return True
        self._others = self._others + 1 if optimizer is self._other else 1
        self._other = optimizer
        if self._others > _MOST_OTHERS:  # the first one is not used any more
            self._optimizer = optimizer
            self._follower.changed()
        return optimizer is self._optimizer


class Timed(Protocol):
    """A step whose time was taken."""

    @property
    def seconds(self) -> float:
        """By the host's clock."""


T = TypeVar("T", bound=Timed)


def until_regular(disturbed: Callable[[T], bool] = lambda step: False) -> Generator[int, Sequence[T], Sequence[T]]:
    """Ask for steps until compilation, search and filling of queues are over. Returns the last ones.

    Args:
        disturbed: whether a step is known to be none like others, whatever its time.
    """
    started, seen = time.perf_counter(), 0
    before = yield _GROUP
    while True:
        steps = yield _GROUP
        seen += _GROUP
        old, new = (median(step.seconds for step in group) for group in (before, steps))
        alike = max(old, new) <= _ALIKE * min(old, new) and not any(map(disturbed, steps))
        if alike or seen >= _MOST_WARM_UP or time.perf_counter() - started > _MOST_WARM_UP_SECONDS:
            return steps
        before = steps
