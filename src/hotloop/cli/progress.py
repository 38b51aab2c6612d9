"""What a training shows while it runs: a bar in a terminal, plain lines elsewhere. All of it on standard error."""

import os

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from hotloop.core.units import count, format_amount, format_bytes, format_seconds
from hotloop.train.observer import Copied, Ended, Event, Logged, Observer, Saved, Started, Validated, Warned


def terminal_observer() -> Observer:
    """The observer that suits standard error."""
    console = _Console(stderr=True, highlight=False)
    return BarObserver(console) if console.is_terminal else LinesObserver(console)


def rank_observer(rank: int) -> Observer:
    """The observer of a rank other than the first: it tells what is wrong there."""
    return _RankObserver(_Console(stderr=True, highlight=False), rank)


class _Console(Console):
    """Goes quiet when its reader has gone; rich's own would end the training."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class _RankObserver(Observer):
    """Warnings, and whose they are."""

    def __init__(self, console: Console, rank: int) -> None:
        self._console = console
        self._rank = rank

    def on(self, event: Event) -> None:
        if isinstance(event, Warned):
            text = f"warning, rank {self._rank}: {event.text}"
            self._console.print(text, style="yellow", soft_wrap=True, markup=False)


class LinesObserver(Observer):
    """A line an event."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._epochs = 0

    def on(self, event: Event) -> None:
        match event:
            case Started(job=job):
                self._epochs = job.train.epochs
                self.print(f"run {event.run.directory}")
                model = f"{job.model.name}, {event.parameters:,} parameters, {job.precision} on {job.device}"
                self.print(f"{model}; {count(event.samples, 'sample')}, {count(event.steps, 'step')}")
                for choice in event.choices:
                    if choice.key in _TOLD and choice.value != "none":
                        self.print(f"{choice.key} = {choice.value}: {choice.why}", style="dim")
                if event.resumed_from:
                    self.print(f"continuing at step {event.progress.step:,} from {event.resumed_from}")
                for change in event.changed:
                    self.print(f"changed since: {change}", style="yellow")
            case Logged():
                self.logged(event)
            case Validated(progress=progress):
                scores = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
                epoch = progress.current
                self.print(
                    f"epoch {progress.epoch + 1}/{self._epochs}  loss {epoch.mean_loss:.4f}  {scores}  "
                    f"{epoch.samples_per_second:,.0f} samples/s  wait {100 * epoch.data_wait_share:.1f} %  "
                    f"{format_seconds(epoch.seconds)}"
                )
            case Saved():
                self.saved(event)
            case Copied():
                self.print(f"copied to {event.place} in {format_seconds(event.seconds)}")
            case Warned():
                self.print(f"warning: {event.text}", style="yellow")
            case Ended():
                pass

    def logged(self, event: Logged) -> None:
        """Show figures in the middle of an epoch."""
        self.print(f"step {event.progress.step:,}  {_figures(event)}")

    def saved(self, event: Saved) -> None:
        """Show that a checkpoint was written."""
        self.print(f"saved {event.path} in {format_seconds(event.seconds)}")

    def print(self, text: str, style: str | None = None) -> None:
        """Write one line, whatever its length."""
        self.console.print(text, style=style, soft_wrap=True, markup=False)


class BarObserver(LinesObserver):
    """A bar with the latest figures, and a line an epoch above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
        )
        self._task: TaskID | None = None

    def on(self, event: Event) -> None:
        super().on(event)
        if isinstance(event, Started):
            epoch = f"{event.progress.epoch + 1}/{event.job.train.epochs}"
            self._task = self._bar.add_task(
                "", total=event.steps, completed=event.progress.step, epoch=epoch, figures="starting"
            )
            self._bar.start()

    def logged(self, event: Logged) -> None:
        assert self._task is not None
        epoch = f"{event.progress.epoch + 1}/{self._epochs}"
        self._bar.update(self._task, completed=event.progress.step, epoch=epoch, figures=_figures(event))

    def saved(self, event: Saved) -> None:
        """Nothing: the bar goes on."""

    def close(self) -> None:
        self._bar.stop()


_TOLD = ("parallel", "precision", "speed.compile")
"""Choices that are worth a line at the start; --dry-run tells all."""


def _figures(event: Logged) -> str:
    scale = f"  scale {event.scale:g}" if event.scale != 1 else ""
    speed = (
        (event.tokens_per_second, "tokens/s") if event.tokens_per_second else (event.samples_per_second, "samples/s")
    )
    mfu = f"  MFU {100 * event.mfu:.1f} %" if event.mfu else ""
    return (
        f"loss {event.loss:.4f}  {format_amount(*speed)}{mfu}  wait {100 * event.data_wait_share:.1f} %  "
        f"{format_bytes(event.memory_bytes)}{scale}"
    )
