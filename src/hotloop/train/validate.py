"""Validation: means over all samples, each counted once."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hotloop.core.errors import HotloopError
from hotloop.tasks.task import Example, Task
from hotloop.train.compiler import without_compiler
from hotloop.train.patience import StopRequested
from hotloop.train.pieces import Pieces, cut, memory_errors, no_room, release
from hotloop.train.ranks import evaluated
from hotloop.train.sharded import is_sharded
from hotloop.train.source import DeviceBatch, Source
from hotloop.train.step import Step
from hotloop.train.world import ALONE, World

_EXAMPLES = 24
"""Predictions of each kind, right and wrong, that the report shows."""


def validate(
    task: Task,
    step: Step,
    source: Source,
    stop: Callable[[], bool],
    examples: list[Example] | None,
    notify: Callable[[str], None],
    world: World = ALONE,
) -> dict[str, float]:
    """Means of loss and metrics over the validation data, as "val_loss", "val_accuracy" and so on.

    Args:
        step: its averaged weights are validated if it has them, otherwise the model's.
        stop: asked before each batch, by all ranks before the same ones.
        examples: filled with right and wrong predictions, if it is a list.
        notify: told when a batch does not fit and is looked at in pieces, as all later ones are then.
        world: the ranks whose sources have a part of each batch.

    Raises:
        StopRequested: `stop` said so.
        HotloopError: a single sample is too much for the memory.
    """
    model = evaluated(step.model, step.averaged)
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    sums: dict[str, Tensor] = {}
    samples = 0
    look = _Look(task, model, source, step.autocast, with_examples=examples is not None)
    pieces = Pieces()
    try:
        # Not compiled: what is compiled for training would be compiled a second time for this.
        with torch.no_grad(), without_compiler(), closing(source.batches()) as batches:
            for batch in batches:
                if stop():
                    raise StopRequested
                if not batch.size:
                    if is_sharded(model):
                        raise _all_damaged(source, batch.number)
                    continue
                totals, found = look.at(batch, pieces, notify)
                if not source.settings.counted(batch.number, len(source.dataset)):
                    continue
                for name, total in totals.items():
                    sums[name] = sums.get(name, torch.zeros(())) + total
                samples += batch.size
                if examples is not None:
                    _collect(examples, found, batch.indices, max(1, len(source.dataset) // _EXAMPLES))
    finally:
        for module, mode in training:  # not model.train(): a task may keep some of its layers in evaluation
            module.training = mode
    return _means(world.gathered(({name: float(total) for name, total in sums.items()}, samples)))


def _all_damaged(source: Source, number: int) -> HotloopError:
    """The other ranks wait for this one's weights."""
    return HotloopError(
        f"no sample of this rank's part of validation batch {number} can be read",
        "; ".join(f"{name}: {reason}" for name, reason in list(source.damages.items())[:4]),
        "hotloop data check FOLDER, or a larger data.val_batch_size",
    )


def _means(parts: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Over all samples, from the sums of each rank; one that had none of them has no sums."""
    samples = sum(count for _, count in parts)
    names = next((list(sums) for sums, _ in parts if sums), [])
    return {f"val_{name}": sum(sums.get(name, 0.0) for sums, _ in parts) / samples for name in names}


@dataclass(frozen=True)
class _Look:
    """How a batch is looked at."""

    task: Task
    model: nn.Module
    source: Source
    autocast: Callable[[], AbstractContextManager[object]]
    with_examples: bool

    def at(
        self, batch: DeviceBatch, pieces: Pieces, notify: Callable[[str], None]
    ) -> tuple[dict[str, Tensor], list[Example]]:
        """Sums of loss and metrics over a batch's samples, and its predictions; in smaller pieces if it must be."""
        while True:
            try:
                with memory_errors():
                    return self._in_pieces(batch, pieces.of(batch.tensors))
            except torch.OutOfMemoryError as error:
                message = str(error)
                if is_sharded(self.model):  # other ranks compute the same pieces at the same time
                    raise no_room("validation with divided weights does not", message) from error
                release(error)
            pieces.halve(batch.tensors, message)
            notify(f"out of memory in validation; each batch is now looked at in {pieces.count} pieces")

    def _in_pieces(self, batch: DeviceBatch, count: int) -> tuple[dict[str, Tensor], list[Example]]:
        totals: dict[str, Tensor] = {}
        examples: list[Example] = []
        start = 0
        for raw, share in cut(self.source.expand(batch.tensors), count):
            end = start + round(share * batch.size)
            ready = self.task.prepare(raw, training=False)
            with self.autocast():
                outputs = self.task.forward(self.model, ready)
                means = {"loss": self.task.loss(outputs, ready), **self.task.metrics(outputs, ready)}
            for name, mean in means.items():
                totals[name] = totals.get(name, torch.zeros(())) + torch.as_tensor(mean).double() * (end - start)
            if self.with_examples:
                names = [self.source.dataset.name(index) for index in batch.indices[start:end]]
                examples += self.task.examples(outputs, raw, names)
            start = end
        return totals, examples


def _collect(kept: list[Example], new: Iterable[Example], indices: Iterable[int], stride: int) -> None:
    """Keep wrong predictions as they come and right ones from all over the data, which is often sorted by class."""
    counts = {kind: sum(example.correct == kind for example in kept) for kind in (True, False)}
    for example, index in zip(new, indices, strict=False):
        if counts[example.correct] < _EXAMPLES and not (example.correct and index % stride):
            counts[example.correct] += 1
            pixels = example.pixels.clone() if example.pixels is not None else None
            kept.append(Example(example.name, example.expected, example.predicted, example.correct, pixels))
