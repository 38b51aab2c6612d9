"""Validation: means over all samples, each counted once."""

from collections.abc import Callable, Iterable
from contextlib import closing

import torch
from torch import Tensor, nn

from hotloop.tasks.task import Example, Task
from hotloop.train.compiler import without_compiler
from hotloop.train.source import Source
from hotloop.train.step import Step

_EXAMPLES = 24
"""Predictions of each kind, right and wrong, that the report shows."""


class StopRequested(Exception):
    """The run is to be saved and stopped here."""


def validate(
    task: Task,
    step: Step,
    source: Source,
    stop: Callable[[], bool],
    examples: list[Example] | None,
) -> dict[str, float]:
    """Means of loss and metrics over the validation data, as "val_loss", "val_accuracy" and so on.

    Args:
        step: its averaged weights are validated if it has them, otherwise the model's.
        stop: asked before each batch.
        examples: filled with right and wrong predictions, if it is a list.

    Raises:
        StopRequested: `stop` said so.
    """
    model: nn.Module = step.averaged or step.model
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    sums: dict[str, Tensor] = {}
    samples = 0
    stride = max(1, len(source.dataset) // _EXAMPLES)
    try:
        # Not compiled: what is compiled for training would be compiled a second time for this.
        with torch.no_grad(), step.autocast(), without_compiler(), closing(source.batches()) as batches:
            for batch in batches:
                if stop():
                    raise StopRequested
                if not batch.size:
                    continue
                raw = source.expand(batch.tensors)
                ready = task.prepare(raw, training=False)
                outputs = task.forward(model, ready)
                means = {"loss": task.loss(outputs, ready), **task.metrics(outputs, ready)}
                for name, mean in means.items():
                    sums[name] = sums.get(name, torch.zeros(())) + torch.as_tensor(mean).double() * batch.size
                samples += batch.size
                if examples is not None:
                    names = [source.dataset.name(index) for index in batch.indices]
                    _collect(examples, task.examples(outputs, raw, names), batch.indices, stride)
    finally:
        for module, mode in training:  # not model.train(): a task may keep some of its layers in evaluation
            module.training = mode
    return {f"val_{name}": float(total) / samples for name, total in sums.items()}


def _collect(kept: list[Example], new: Iterable[Example], indices: Iterable[int], stride: int) -> None:
    """Keep wrong predictions as they come and right ones from all over the data, which is often sorted by class."""
    counts = {kind: sum(example.correct == kind for example in kept) for kind in (True, False)}
    for example, index in zip(new, indices, strict=False):
        if counts[example.correct] < _EXAMPLES and not (example.correct and index % stride):
            counts[example.correct] += 1
            pixels = example.pixels.clone() if example.pixels is not None else None
            kept.append(Example(example.name, example.expected, example.predicted, example.correct, pixels))
