"""A training, made known to whoever watches the machine."""

import torch

from hotloop.attach.live import gpu_uuid
from hotloop.core.live import Publisher, live_folder
from hotloop.core.run import Run
from hotloop.train.observer import Event, Logged, Observer, Saved, Validated
from hotloop.train.world import World


class Published(Observer):
    """Adds what the loop tells to what its heart does."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def on(self, event: Event) -> None:
        match event:
            case Logged():
                self._publisher.set(loss=event.loss, learning_rate=event.learning_rate, memory_bytes=event.memory_bytes)
            case Validated():
                self._publisher.note(event.metrics)
            case Saved():
                self._publisher.saved(event.seconds, event.stalled_seconds)


def publisher_of_rank(name: str, run: Run, device: torch.device, world: World) -> Publisher:
    """What tells of this rank."""
    return Publisher(
        live_folder(), way="train", job=name, run=str(run.directory), rank=world.rank, ranks=world.size,
        gpu=gpu_uuid(torch, device), restarts=world.restarts,
    )  # fmt: skip
