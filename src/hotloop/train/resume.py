"""What a checkpoint must agree with to be continued, and how it is."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from hotloop.core.compare import flat
from hotloop.core.errors import InputError, cannot_write
from hotloop.core.job import Job
from hotloop.core.run import Run
from hotloop.data.dataset import Dataset
from hotloop.train.checkpoint.checkpointer import Loaded
from hotloop.train.progress import Progress
from hotloop.train.resolve import Choice
from hotloop.train.step import Step

Identity = dict[str, str]


def identity(job: Job, model: nn.Module, train: Dataset) -> Identity:
    """What decides which step comes next: the model's tensors, the data, and the settings that cut it into steps."""
    tensors = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in model.state_dict().items()]
    settings = {
        "seed": job.seed,
        "data.batch_size": job.data.batch_size,
        "data.last_batch": job.data.last_batch,
        "train.accumulate": job.train.accumulate,
        "optimizer.name": job.optimizer.name,
        "optimizer.decay_vectors": job.optimizer.decay_vectors,
        "task": job.task.model_dump(mode="json"),
    }
    return {
        "model": hashlib.sha256("\n".join(tensors).encode()).hexdigest(),
        "model_name": job.model.name,
        "data": train.fingerprint(),
        "data_name": f"{job.data.train} ({len(train):,} samples)",
        **{key: json.dumps(value) for key, value in settings.items()},
    }


def check_identity(loaded: Loaded, now: Identity) -> None:
    """Refuse a checkpoint of something else.

    Raises:
        InputError: it says which of model, data or settings differs, or that no job saved it.
    """
    fix = "start it elsewhere (--set run.dir=NEW), or anew (--resume never)"
    missing = [key for key in ("identity", "job", "step", "random_states", "progress") if key not in loaded.state]
    if missing:
        raise InputError(
            f"{loaded.path} has no {', '.join(missing)}",
            "it was saved by another loop than that of a job, or by an older hotloop",
            fix,
        )
    then: Identity = loaded.state["identity"]
    for kind in ("model", "data"):
        if then[kind] != now[kind]:
            raise InputError(
                f"{loaded.path} is of another {kind}: {then[f'{kind}_name']}",
                f"the job's is {now[f'{kind}_name']}, and their {'tensors' if kind == 'model' else 'files'} differ",
                fix,
            )
    for key in now:
        known = key in then and key not in ("model_name", "data_name")  # an older hotloop compared less
        if known and then[key] != now[key]:
            raise InputError(f"{loaded.path} was trained with {key} = {then[key]}", f"the job says {now[key]}", fix)


def check_device(loaded: Loaded, choices: Sequence[Choice]) -> None:
    """Refuse to go on with a GPU's training on the CPU where nobody has asked for the CPU: a GPU may have been lost.

    Raises:
        InputError: that is so.
    """
    chosen = {choice.key: choice.value for choice in choices}
    if loaded.state["job"]["device"] == "cuda" and chosen.get("device") == "cpu":
        raise InputError(
            f"{loaded.path} was trained on a GPU",
            'device = "auto", and torch sees no GPU now',
            "nvidia-smi says whether the card is there; --set device=cpu goes on without",
        )


def restore(loaded: Loaded, step: Step) -> Progress:
    """Load weights and optimizer, and return the position; the random state comes last, just before the loop."""
    step.load_state_dict(loaded.state.pop("step"))  # and its files are let go
    return Progress.from_state(loaded.state["progress"])


def set_aside(directory: Path) -> Path | None:
    """Rename an earlier run's directory, so that a new one can take its name; its new name.

    Raises:
        InputError: a process trains in it.
    """
    if not Run(directory).exists:
        return None
    number = 1
    while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
        number += 1
    with Run(directory).locked():
        try:
            directory.rename(aside)
        except OSError as error:
            raise cannot_write(aside, error, InputError) from None
    return aside


def changed_settings(loaded: Loaded, job: Job) -> list[str]:
    """The settings that differ from those that the checkpoint was trained with, as "key: then -> now"."""
    then, now = (flat(settings) for settings in (loaded.state["job"], job.model_dump(mode="json")))
    silent = ("run", "log", "name", "data", "preemption", "storage", "launch")
    differ = [key for key in now if then.get(key) != now[key]]
    keys = [key for key in differ if key.split(".")[0] not in silent or (key == "data.decode" and key in then)]
    return [f"{key}: {json.dumps(then.get(key))} -> {json.dumps(now[key])}" for key in keys]
