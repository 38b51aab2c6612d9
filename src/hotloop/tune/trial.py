"""What the process of a job's trial does. This module imports all that a training needs on its way to the first step,
so that a zygote has it.
"""

import json
import os
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from hotloop.core.tensorboard import without_tensorflow

without_tensorflow()

import torch._inductor.compile_fx  # noqa: E402

import hotloop.tasks.images  # noqa: E402
import hotloop.tasks.tokens  # noqa: E402, F401
from hotloop.core.job_file import parse_job  # noqa: E402
from hotloop.core.machine import read_machine  # noqa: E402
from hotloop.core.tuning import ProcessSettings  # noqa: E402
from hotloop.train.memory import memory_report, memory_trouble  # noqa: E402
from hotloop.train.numa import stay_on_one_node  # noqa: E402
from hotloop.train.observer import Event, Logged, Observer  # noqa: E402
from hotloop.train.progress import Span  # noqa: E402
from hotloop.train.training import train_job  # noqa: E402

with suppress(ImportError):  # only some models need it
    import_module("timm")

_TOLD_SECONDS = 0.25


def train(raw: dict[str, Any], folder: Path, process: ProcessSettings) -> None:
    """Train a job, and tell how fast it is, until there is a file `stop` in the folder."""
    if process.threads:  # as OMP_NUM_THREADS has it, which was read when torch was imported
        torch.set_num_threads(process.threads)
    sys.path.append(str(Path.cwd()))
    job = parse_job(raw, "the trial's job")
    if process.numa:
        stay_on_one_node(job.device)
    with (folder / f"told-{os.getpid()}.jsonl").open("a") as file:
        train_job(job, read_machine(), _Teller(file, folder / "stop"))


class _Teller(Observer):
    def __init__(self, file: IO[str], stop: Path) -> None:
        self._file = file
        self._stop = stop
        self._told = Span()
        self._losses: list[tuple[int, float]] = []
        self._steps = 0

    def on(self, event: Event) -> None:
        if not isinstance(event, Logged):
            return
        whole = event.progress.whole
        self._losses.append((whole.steps - self._steps, event.loss))
        self._steps = whole.steps
        if whole.seconds - self._told.seconds >= _TOLD_SECONDS:
            samples = whole.samples - self._told.samples
            told = {
                "seconds": (whole.seconds - self._told.seconds) / samples,
                "samples": samples,
                "losses": self._losses,
                "trouble": memory_trouble(memory_report()),
            }
            self._file.write(json.dumps(told) + "\n")
            self._file.flush()
            self._told, self._losses = whole, []
        if self._stop.exists():
            os._exit(0)
