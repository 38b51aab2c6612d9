"""A step that is really made, of a few samples on this machine's processor: for models that cannot be traced.

What depends on the numbers themselves (`.item()`, masks, numpy in between) runs as it will in training. All else is as
traced: memory is followed by what is made and let go of, and stands for a GPU's.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from hotloop.core.errors import InputError
from hotloop.core.machine import usable_memory_bytes
from hotloop.core.units import format_bytes
from hotloop.data.dataset import read_sample
from hotloop.data.random import sample_numbers
from hotloop.plan.footprint import Footprint
from hotloop.plan.trace import Tracer, Way
from hotloop.tasks.task import RANDOM

SAMPLES = 4
"""Of a step: what moves with the batch and what does not is told apart by shapes, not by a second batch."""
_MOST_MEMORY = 0.5
"""Of this machine's, for weights and their gradients."""


class OneStep(Tracer):
    """As `Tracer`, with real tensors: the weights as the task makes them, the first samples of the data set.

    Nothing is captured for torch.compile, as what cannot be traced is not compiled as a whole either. Takes the time
    of some steps of `SAMPLES` samples on the processor, and memory for weights and gradients.
    """

    _device = "cpu"

    def trace(self, way: Way) -> Footprint:
        """A step.

        Raises:
            InputError: the weights do not fit here, or activations cannot be recomputed.
            Exception: whatever the model raises.
        """
        needed, most = self.state.parameter_bytes + self.state.learnt_bytes, _MOST_MEMORY * usable_memory_bytes()
        if needed > most:
            raise InputError(
                f"weights and gradients take {format_bytes(needed)}, over {format_bytes(most)}, half of the memory",
                "the model cannot be traced, and a step of it cannot be made here",
                "plan on a machine with more memory",
            )
        return super().trace(replace(way, batch=min(way.batch, SAMPLES), compiled=False))

    def _tensors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _put_weights(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        for module in model.modules() if dtype else ():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(dtype)

    def _inputs(self, batch: int) -> dict[str, Tensor]:
        arrays = {name: np.zeros((batch, *field.shape), field.dtype) for name, field in self._fields.items()}
        for place in range(batch):
            sample = read_sample(self._dataset, self._job.seed, 0, place % len(self._dataset)).sample
            for name, array in arrays.items():
                own = np.asarray(sample[name])
                array[place][tuple(slice(size) for size in own.shape)] = own
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self._task.random_numbers:
            inputs[RANDOM] = torch.from_numpy(sample_numbers(self._job.seed, 0, batch, self._task.random_numbers))
        return inputs
