"""Observers that write the run down: `metrics.jsonl` and TensorBoard events."""

import json
import time
from collections.abc import Callable
from typing import Any

from hotloop.core.run import Run, plain
from hotloop.core.tensorboard import without_tensorflow
from hotloop.train.observer import Event, Logged, Observer, Saved, Started, Validated


def _record(event: Event) -> dict[str, Any] | None:
    match event:
        case Logged(progress=progress):
            return {
                "event": "step",
                "step": progress.step,
                "epoch": progress.epoch,
                "loss": event.loss,
                "learning_rate": event.learning_rate,
                "samples_per_second": event.samples_per_second,
                "data_wait_share": event.data_wait_share,
                "tokens_per_second": event.tokens_per_second,
                "flops_per_second": event.flops_per_second,
                "mfu": event.mfu,
                "memory_bytes": event.memory_bytes,
                "scale": event.scale,
                "seconds": progress.whole.seconds,
            }
        case Validated(progress=progress):
            return {
                "event": "epoch",
                "step": progress.step,
                "epoch": progress.epoch,
                "train_loss": progress.current.mean_loss,
                "samples_per_second": progress.current.samples_per_second,
                "data_wait_share": progress.current.data_wait_share,
                "seconds": progress.current.seconds,
                "validation_seconds": event.seconds,
                **event.metrics,
            }
        case Saved(progress=progress):
            return {
                "event": "checkpoint",
                "step": progress.step,
                "epoch": progress.epoch,
                "seconds": event.seconds,
                "stalled_seconds": event.stalled_seconds,
            }
        case _:
            return None


class MetricsFile(Observer):
    """One line of JSON an event, "time" in seconds since 1970; continues where the run resumes."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.time) -> None:
        self._run = run
        self._clock = clock

    def on(self, event: Event) -> None:
        if isinstance(event, Started):
            self._run.rewind_metrics(event.progress.step)
        elif record := _record(event):
            with self._run.metrics_file.open("a") as file:
                file.write(json.dumps(plain({"time": self._clock(), **record})) + "\n")


class TensorBoard(Observer):
    """The numbers of `metrics.jsonl` as TensorBoard scalars: `step/...` by step, `epoch/...` by step at its end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._writer: Any = None

    def on(self, event: Event) -> None:
        if isinstance(event, Started):
            without_tensorflow()
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._run.events, purge_step=event.progress.step + 1)
        elif (record := _record(event)) and not isinstance(event, Saved):
            group, step = record.pop("event"), record.pop("step")
            for name, value in record.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        if self._writer:
            self._writer.close()
