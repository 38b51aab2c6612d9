"""hotloop: keep the GPU busy. The public names, loaded on first use, so that `import hotloop` brings no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hotloop.core.errors import DamagedSample as DamagedSample
    from hotloop.core.errors import HotloopError as HotloopError
    from hotloop.core.errors import InputError as InputError
    from hotloop.core.job import Job as Job
    from hotloop.core.job_file import load_job as load_job
    from hotloop.core.live import publish as publish
    from hotloop.core.machine import read_machine as read_machine
    from hotloop.core.run import Result as Result
    from hotloop.core.run import Run as Run
    from hotloop.data.arrays import ArrayDataset as ArrayDataset
    from hotloop.data.dataset import Dataset as Dataset
    from hotloop.data.loader import Batch as Batch
    from hotloop.data.loader import Loaders as Loaders
    from hotloop.data.loader import LoaderSettings as LoaderSettings
    from hotloop.tasks.task import Example as Example
    from hotloop.tasks.task import Task as Task
    from hotloop.train.checkpoint.checkpointer import Checkpointer as Checkpointer
    from hotloop.train.memory import LeakDetector as LeakDetector
    from hotloop.train.memory import MemoryMarks as MemoryMarks
    from hotloop.train.memory import MemoryReport as MemoryReport
    from hotloop.train.memory import memory_report as memory_report
    from hotloop.train.preemption import Preemption as Preemption
    from hotloop.train.prefetch import prefetch as prefetch
    from hotloop.train.step import Step as Step
    from hotloop.train.step_settings import StepSettings as StepSettings
    from hotloop.train.training import train_job as train_job

_HOMES = {
    "DamagedSample": "core.errors",
    "HotloopError": "core.errors",
    "InputError": "core.errors",
    "Job": "core.job",
    "load_job": "core.job_file",
    "publish": "core.live",
    "read_machine": "core.machine",
    "Result": "core.run",
    "Run": "core.run",
    "ArrayDataset": "data.arrays",
    "Dataset": "data.dataset",
    "Batch": "data.loader",
    "Loaders": "data.loader",
    "LoaderSettings": "data.loader",
    "Example": "tasks.task",
    "Task": "tasks.task",
    "Checkpointer": "train.checkpoint.checkpointer",
    "LeakDetector": "train.memory",
    "MemoryMarks": "train.memory",
    "MemoryReport": "train.memory",
    "memory_report": "train.memory",
    "prefetch": "train.prefetch",
    "Preemption": "train.preemption",
    "Step": "train.step",
    "StepSettings": "train.step_settings",
    "train_job": "train.training",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hotloop' has no attribute {name!r}")
    return getattr(import_module(f"hotloop.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
