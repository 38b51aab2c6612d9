"""The few methods that say what is trained. The loop knows nothing else about it."""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.job import CustomTask, Job, TokensTask
from hotloop.core.objects import load_object
from hotloop.data.dataset import Dataset

Split = Literal["train", "val"]
Tensors = Mapping[str, Tensor]
"""A batch on the device: each (B, ...)."""

RANDOM = "random"
"""Name in a batch of the samples' random numbers, float32 (B, `Task.random_numbers`)."""


IGNORED = -100
"""Label of what does not count in a loss: torch's own number for it."""


@dataclass(frozen=True)
class Example:
    """One prediction for the report.

    Attributes:
        name: the sample's file or number.
        expected: what it is.
        predicted: what the model says.
        correct: whether that is right.
        pixels: its picture, uint8 (H, W, 3), or nothing.
    """

    name: str
    expected: str
    predicted: str
    correct: bool
    pixels: Tensor | None = None


class Task(ABC):
    """What is trained: subclass it, name it in the job (`task.name = "module:Class"`), run `hotloop train`.

    Three methods are needed: `data`, `model`, `loss`. The loop calls, for each batch, `prepare`, `forward`, `loss` and,
    for validation, `metrics`.

    Args:
        job: the job as resolved; `job.task.arguments` come as keyword arguments to the subclass.

    Attributes:
        prepare_is_pure: `prepare` draws nothing on the host and decides nothing there, so that it may be captured into
            a CUDA graph with the rest of the step.
        prepare_is_apart: it is pure, reads nothing but the batch, and makes tensors of a row a sample: ranks may run it
            while the step before ends.
        model_on_meta: under `torch.device("meta")` `model()` makes the same model without numbers, and nothing else
            keeps a part of it: of ranks that divide it the first alone makes it whole, in its host's memory.
        random_numbers: how many random numbers `prepare` needs for each sample, in `batch["random"]`, float32 (B, n), 0
            to 1. They depend on seed, epoch and sample alone; drawing from them is pure.
        tokens_per_sample: for speed in tokens/s; 0 if samples are not made of tokens.
    """

    prepare_is_pure: bool = False
    prepare_is_apart: bool = False
    model_on_meta: bool = False
    random_numbers: int = 0
    tokens_per_sample: int = 0

    def __init__(self, job: Job) -> None:
        self.job = job

    @abstractmethod
    def data(self, split: Split) -> Dataset | None:
        """The data set of a split; None if there is no validation."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model on the CPU, its weights drawn from torch's random numbers, which are seeded before."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Tensors) -> Tensor:
        """The mean loss over the batch, a scalar on the device."""

    def prepare(self, batch: Tensors, training: bool) -> Tensors:
        """Finish a batch on the device: normalise, mix, cast. Random draws through torch depend on the batch alone."""
        return batch

    def forward(self, model: nn.Module, batch: Tensors) -> Any:
        """The model's outputs for a prepared batch; by default of its "inputs"."""
        return model(batch["inputs"])

    def metrics(self, outputs: Any, batch: Tensors) -> dict[str, Tensor]:
        """Figures of a validation batch, each a mean over it, scalars on the device."""
        return {}

    @property
    def padding_obstacle(self) -> str:
        """Why samples that do not count would change what is trained; empty if they would not."""
        return f"{type(self).__name__} has no method ignore" if type(self).ignore is Task.ignore else ""

    def ignore(self, batch: Tensors, valid: Tensor) -> Tensors:
        """The prepared batch, changed so that `loss` is the mean over the samples that are `valid`, bool (B,).

        Needed for `data.last_batch = "pad"` alone. Runs on the device, within the step.
        """
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        """An optimizer of the task's own, learning rates set to their highest; by default the job's."""
        return None

    def examples(self, outputs: Any, batch: Tensors, names: Sequence[str]) -> list[Example]:
        """Predictions of a validation batch for the report; `batch` is as it came from the data set."""
        return []


def load_task(job: Job) -> Task:
    """The task that the job names.

    Raises:
        InputError: there is no such class, or it is no task.
    """
    if isinstance(job.task, TokensTask):
        from hotloop.tasks.tokens import LanguageModelling

        return LanguageModelling(job)
    if not isinstance(job.task, CustomTask):
        from hotloop.tasks.images import ImageClassification

        return ImageClassification(job)
    kind = load_object(job.task.name, "task.name")
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise InputError(
            f'task.name = "{job.task.name}" is no task',
            "it is not a subclass of hotloop.Task",
            "class MyTask(hotloop.Task)",
        )
    try:
        return kind(job, **job.task.arguments)
    except HotloopError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise InputError(
            f'task.name = "{job.task.name}" cannot be made with task.arguments = {job.task.arguments}',
            f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})",
            f"mend {job.task.name.split(':')[0]}, or its arguments: --set task.arguments={{}}",
        ) from error
