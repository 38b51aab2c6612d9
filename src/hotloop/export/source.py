"""A run's trained model as it is in PyTorch: on the CPU, in fp32, with what goes in and what it is held against; or its
weights alone, which need neither its data nor its source.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.job import ImagesTask, Job
from hotloop.core.job_file import load_job
from hotloop.core.run import Run, find_run
from hotloop.data.dataset import Dataset
from hotloop.data.image_arrays import is_image_array
from hotloop.data.loader import Loaders, LoaderSettings
from hotloop.data.random import sample_numbers
from hotloop.export.manifest import ImageInput, Origin
from hotloop.tasks.images import ImageClassification
from hotloop.tasks.task import RANDOM, Task, Tensors, load_task
from hotloop.tasks.tokens import LanguageModelling
from hotloop.train.checkpoint.checkpointer import Loaded, named_checkpoint
from hotloop.train.checkpoint.files import MANIFEST
from hotloop.train.checkpoint.parts import read_whole

Weights = Literal["auto", "model", "averaged"]
Arrays = list[np.ndarray]
Forward = Callable[[Arrays], Arrays]
"""From a model's inputs to its outputs."""

_BATCH, _BATCH_BYTES = 32, 2**28
"""Samples that are looked at together, and their memory at most."""


@dataclass(frozen=True)
class Input:
    """What the model takes.

    Attributes:
        keyword: it is given by name.
        varying: names of the dimensions that may have another size, by number.
    """

    name: str
    keyword: bool
    varying: Mapping[int, str]


@dataclass(frozen=True)
class Trained:
    """Weights to be exported without a program.

    Attributes:
        state: in fp32, by the model's own names.
        classes: empty where the data is not there.
        images: how image files become the model's input.
    """

    state: Mapping[str, Tensor]
    classes: tuple[str, ...]
    images: ImageInput | None
    origin: Origin


@dataclass(frozen=True)
class Source:
    """What is exported.

    Attributes:
        model: in evaluation, without gradients.
        dataset: real samples; the validation's if there is one.
        inputs: in the order of the model's own.
        outputs: their names; `by_name`: the model returns them so.
        longest: of dimensions by name, their largest size; those not named have none.
        sample_bytes: of inputs and outputs.
    """

    job: Job
    task: Task
    model: nn.Module
    dataset: Dataset
    inputs: tuple[Input, ...]
    outputs: tuple[str, ...]
    by_name: bool
    longest: Mapping[str, int]
    sample_bytes: int
    origin: Origin

    def batches(self, samples: int) -> Iterator[Tensors]:
        """Prepared batches of so many real samples, from all over the data, the same at each call; damaged ones are
        left out.
        """
        count = min(samples, len(self.dataset))
        indices = np.linspace(0, len(self.dataset) - 1, count).astype(int).tolist()
        size, settings = self.batch_size, LoaderSettings(self.batch_size, self.job.seed, False, False, "drop")
        chunks = [indices[start : start + size] for start in range(0, count, size)]
        numbers = self.task.random_numbers
        with Loaders([(self.dataset, settings)], workers=0) as [loader]:
            for batch in loader.batches_of(chunks):
                if not batch.size:
                    continue
                tensors = {name: torch.from_numpy(array.copy()) for name, array in batch.arrays.items()}
                if numbers:
                    table = sample_numbers(self.job.seed, 0, len(self.dataset), numbers)
                    tensors[RANDOM] = torch.from_numpy(table[np.asarray(batch.indices)])
                yield self.task.prepare(tensors, training=False)

    @property
    def batch_size(self) -> int:
        """Of `batches`. Logits of a language model take 200 MB a sample."""
        return max(1, min(_BATCH, _BATCH_BYTES // max(1, self.sample_bytes)))

    def arguments(self, batch: Tensors) -> list[Tensor]:
        """What the model is called with for a prepared batch, in the order of `inputs`."""
        return [tensor for _, tensor, _ in _called_with(self.task, self.model, batch)]

    def eager(self, arrays: Arrays) -> Arrays:
        """The model's outputs, by PyTorch as it is."""
        tensors = [torch.from_numpy(array) for array in arrays]
        with torch.inference_mode():
            return [tensor.numpy() for tensor in flat(call(self.model, self.inputs, tensors))]

    def measured(self, forward: Forward, samples: int) -> dict[str, float | None]:
        """Mean loss and metrics over real samples with a model in place of this one."""
        stand_in = _StandIn(self, forward)
        sums: dict[str, float] = {}
        total = 0
        for batch in self.batches(samples):
            size = len(next(iter(batch.values())))
            with torch.inference_mode():
                outputs = self.task.forward(stand_in, batch)
                means = {"loss": self.task.loss(outputs, batch), **self.task.metrics(outputs, batch)}
            for name, mean in means.items():
                sums[name] = sums.get(name, 0.0) + float(mean) * size
            total += size
        return {name: value / total for name, value in sums.items()}

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.task.train_images.classes) if isinstance(self.task, ImageClassification) else ()

    @property
    def images(self) -> ImageInput | None:
        """How image files become the model's input."""
        return _image_input(self.job)


def _image_input(job: Job) -> ImageInput | None:
    task = job.task
    if not isinstance(task, ImagesTask):
        return None
    exact = is_image_array(job.data.val or job.data.train)  # arrays of that size are looked at as they are
    return ImageInput(task.image_size, task.center_crop, exact, task.mean, task.std, task.max_pixels)


def named_run(text: str, root: Path) -> tuple[Run, Path]:
    """The run that is meant, and what of it: a checkpoint, or the run's directory for its newest one.

    Args:
        text: a run's name in `root`, "latest", its directory, or one of its checkpoints.

    Raises:
        InputError: there is none.
    """
    path = Path(text).absolute()
    if (path / MANIFEST).is_file():
        return find_run(str(path.parents[1]), root), path
    run = find_run(text, root)
    return run, run.directory


def open_source(
    run: Run, path: Path, overrides: Sequence[str], weights: Weights, warn: Callable[[str], None]
) -> Source:  # fmt: skip
    """The model of a run.

    Args:
        path: as `named_run` gives it.
        overrides: laid over the run's job, "data.train=FOLDER" for data that has moved.
        weights: "auto": those that the run validates: their moving average, if it keeps one.
        warn: told, in a line, of damaged checkpoints that are passed over and of data that has changed.

    Raises:
        InputError: it has no checkpoint, or its job, data and weights do not go together.
        CheckpointError: it cannot be read.
    """
    job = _job(run, overrides)
    loaded = named_checkpoint(path, warn, lazily=True)
    state, kind = _weights(loaded, weights)
    task = load_task(job)
    model = _restored(task, state, loaded)
    train, val = task.data("train"), task.data("val")
    dataset = val or train
    if dataset is None or train is None or not len(dataset):
        raise InputError("the task has no data", "what is exported is tried on it", "--set data.train=FOLDER")
    _tell_changes(job, train, loaded, warn)
    return _described(job, task, model, dataset, _origin(run, job, loaded, kind))


def open_weights(
    run: Run, path: Path, overrides: Sequence[str], weights: Weights, warn: Callable[[str], None]
) -> Trained:  # fmt: skip
    """The weights of a run; of its data only the classes' names are read, and left out where it is not there.

    Args:
        path: as `named_run` gives it.
        overrides, weights: as in `open_source`.
        warn: told, in a line, of damaged checkpoints that are passed over, and of data that has changed or is missing.

    Raises:
        InputError: it has no checkpoint.
        CheckpointError: it cannot be read.
    """
    job = _job(run, overrides)
    loaded = named_checkpoint(path, warn, lazily=True)
    state, kind = _weights(loaded, weights)
    state = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    return Trained(state, _classes(job, loaded, warn), _image_input(job), _origin(run, job, loaded, kind))


def _job(run: Run, overrides: Sequence[str]) -> Job:
    """As it was trained, but for the CPU."""
    job = load_job(run.job_file, overrides)
    speed = job.speed.model_copy(update={"channels_last": False})
    return job.model_copy(update={"device": "cpu", "precision": "fp32", "speed": speed})


def _classes(job: Job, loaded: Loaded, warn: Callable[[str], None]) -> tuple[str, ...]:
    if not isinstance(job.task, ImagesTask):
        return ()
    task = ImageClassification(job)
    try:
        train = task.data("train")
    except HotloopError as error:
        warn(f"{error.what}: names of classes are left out")
        return ()
    assert train
    _tell_changes(job, train, loaded, warn)
    return tuple(task.train_images.classes)


def _tell_changes(job: Job, train: Dataset, loaded: Loaded, warn: Callable[[str], None]) -> None:
    if loaded.state["identity"]["data"] != train.fingerprint():
        warn(f"{job.data.train} has changed since the run: names of classes, and what is compared, are of now")


def _origin(run: Run, job: Job, loaded: Loaded, weights: Literal["model", "averaged"]) -> Origin:
    fingerprint = loaded.state["identity"]["data"]
    return Origin(
        job.name, run.name, job.model.name, *loaded.position, weights, fingerprint, _metrics(run, loaded.position[1])
    )


def _weights(loaded: Loaded, weights: Weights) -> tuple[Mapping[str, Tensor], Literal["model", "averaged"]]:
    state = loaded.state.get("step")
    if not isinstance(state, Mapping) or "identity" not in loaded.state:
        cause = "it was saved by another loop than that of a job"
        raise InputError(
            f"{loaded.path} has no model of a job", cause, "hotloop checkpoint convert takes its weights out"
        )
    averaged = state.get("averaged") or {}
    if weights == "averaged" and not averaged:
        raise InputError(
            f"{loaded.path} has no averaged weights", "the run kept none (train.ema = 0)", "--weights model"
        )
    if averaged and weights != "model":
        return read_whole(averaged)["module"], "averaged"
    return read_whole(state["model"]), "model"


def _restored(task: Task, state: Mapping[str, Tensor], loaded: Loaded) -> nn.Module:
    model = task.model()
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        cause = lines[1] if len(lines) > 1 else lines[0]
        fix = "give the data and model that it was trained with: --set data.train=FOLDER"
        raise InputError(f"{loaded.path} does not fit the job's model", cause[:300], fix) from error
    model.to(dtype=torch.float32, memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return model.eval().requires_grad_(False)


def _metrics(run: Run, step: int) -> dict[str, float | None]:
    """Of the last validation at that step."""
    known = [record for record in run.metrics() if record.get("event") == "epoch" and record.get("step") == step]
    return {name: value for name, value in (known[-1].items() if known else ()) if name.startswith("val_")}


def _described(job: Job, task: Task, model: nn.Module, dataset: Dataset, origin: Origin) -> Source:
    """With the names of what goes in and comes out, from one call."""
    blank = Source(job, task, model, dataset, (), (), False, {}, 0, origin)
    batch = next(blank.batches(2), None)
    if batch is None:
        raise InputError("the task's data cannot be read", "its samples are damaged", "hotloop data check FOLDER")
    called = _called_with(task, model, batch)
    inputs = tuple(
        Input(name, keyword, {0: "batch", **({1: "tokens"} if isinstance(task, LanguageModelling) else {})})
        for name, _, keyword in called
    )
    with torch.inference_mode():
        outputs = call(model, inputs, [tensor for _, tensor, _ in called])
    known = isinstance(task, ImageClassification | LanguageModelling) and isinstance(outputs, Tensor)
    names = ("logits",) if known else _output_names(outputs)
    longest = {"tokens": task.tokens_per_sample} if isinstance(task, LanguageModelling) else {}
    tensors = [*(tensor for _, tensor, _ in called), *flat(outputs)]
    each = sum(tensor.nbytes for tensor in tensors) // len(called[0][1])
    return Source(job, task, model, dataset, inputs, names, isinstance(outputs, Mapping), longest, each, origin)


def call(model: nn.Module, inputs: Sequence[Input], tensors: Sequence[Tensor]) -> Any:
    """The model's own outputs."""
    pairs = list(zip(inputs, tensors, strict=True))
    named = {one.name: tensor for one, tensor in pairs if one.keyword}
    return model(*(tensor for one, tensor in pairs if not one.keyword), **named)


def flat(outputs: Any) -> list[Tensor]:
    """The tensors of a model's outputs: one, several, or several by name.

    Raises:
        InputError: they are something else.
    """
    values = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    values = list(values) if isinstance(values, list | tuple) else [values]
    if values and all(isinstance(value, Tensor) for value in values):
        return values
    kinds = ", ".join(type(value).__name__ for value in values) or "nothing"
    raise InputError("the model cannot be exported", f"it returns {kinds}", "return a tensor, or several")


def _output_names(outputs: Any) -> tuple[str, ...]:
    found = flat(outputs)
    if isinstance(outputs, Mapping):
        return tuple(str(name) for name in outputs)
    return ("outputs",) if len(found) == 1 else tuple(f"outputs_{number}" for number in range(len(found)))


def _called_with(task: Task, model: nn.Module, batch: Tensors) -> list[tuple[str, Tensor, bool]]:
    """Name and value of what the task calls its model with, and whether that is by name.

    Raises:
        InputError: it is more than tensors.
    """
    if isinstance(task, ImageClassification):
        return [("images", batch["images"], False)]
    if isinstance(task, LanguageModelling):
        return [("tokens", batch["inputs"].contiguous(), False)]
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = model.register_forward_pre_hook(
        lambda _, arguments, named: seen.append((arguments, named)), with_kwargs=True
    )
    try:
        with torch.inference_mode():
            task.forward(model, batch)
    finally:
        hook.remove()
    if len(seen) != 1:
        cause = f"the task calls its model {len(seen)} times a batch"
        raise InputError("the model cannot be exported", cause, "export its parts by torch.onnx.export")
    arguments, named = seen[0]
    names = [name for name in inspect.signature(model.forward).parameters if name not in named]
    found = [*zip(names, arguments, [False] * len(arguments), strict=False), *((*one, True) for one in named.items())]
    if len(found) != len(arguments) + len(named) or not all(isinstance(value, Tensor) for _, value, _ in found):
        kinds = ", ".join(type(value).__name__ for value in (*arguments, *named.values()))
        raise InputError("the model cannot be exported", f"it is called with {kinds}", "call it with tensors alone")
    return found


class _StandIn(nn.Module):
    """A task calls it as its model, and gets what another program computes."""

    def __init__(self, source: Source, forward: Forward) -> None:
        super().__init__()
        self._source, self._forward = source, forward

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if isinstance(self._source.task, LanguageModelling):
            return self._language(*arguments)
        values = [*arguments, *(named[one.name] for one in self._source.inputs if one.keyword)]
        tensors = [torch.from_numpy(array) for array in self._forward([value.numpy() for value in values])]
        if self._source.by_name:
            return dict(zip(self._source.outputs, tensors, strict=True))
        return tensors[0] if len(tensors) == 1 else tensors

    def _language(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """With targets, their mean loss, as a language model gives it."""
        logits = torch.from_numpy(self._forward([tokens.contiguous().numpy()])[0])
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
