"""What a training waits for besides its steps, and tells of copies of its checkpoints."""

import time
from collections.abc import Callable

from hotloop.train.checkpoint.copies import Copies
from hotloop.train.heartbeat import PATIENCE_SECONDS, Heart
from hotloop.train.observer import Copied, Observer
from hotloop.train.world import World

_LOOK_SECONDS = 0.02


def wait_together(world: World, heart: Heart, done: Callable[[], bool]) -> None:
    """Until it is so on all ranks: what comes next has a limit, and a disk or a store may take longer than that."""
    until = time.monotonic() + PATIENCE_SECONDS
    while world.any(not done() and time.monotonic() < until):
        heart.beat()
        time.sleep(_LOOK_SECONDS)


def wait_for_copies(copies: Copies | None, world: World, heart: Heart, observer: Observer) -> None:
    """Until those that have been begun are in the store; all ranks call it, the first has them.

    Raises:
        NotEncrypted: the store does not encrypt them as the job asks for.
    """
    wait_together(world, heart, lambda: copies is None or copies.done())
    tell_copies(copies, observer, wait=True)
    heart.enter("ending")


def tell_copies(copies: Copies | None, observer: Observer, wait: bool = False) -> None:
    """Tell of those that have been made, or could not be.

    Args:
        wait: for all that have been begun.

    Raises:
        NotEncrypted: as above.
    """
    for copy in copies.finished(wait) if copies else []:
        if copy.refused:
            raise copy.refused
        if copy.trouble:
            observer.warn(f"no copy at {copy.place}: {copy.trouble}")
        else:
            observer.on(Copied(copy.place, copy.seconds))
