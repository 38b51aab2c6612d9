"""How much of long work is done, on a terminal."""

from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


class Bar:
    """A bar on standard error, if that is a terminal; else nothing.

    Args:
        total: what there is to read.
        in_bytes: whether it is counted in bytes.
    """

    def __init__(self, total: int, in_bytes: bool = False) -> None:
        console = Console(stderr=True)
        done = DownloadColumn(binary_units=True) if in_bytes else TaskProgressColumn()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("reading", total=total)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, more: int) -> None:
        """So much more has been read; any thread may say so."""
        self._progress.advance(self._task, more)

    def say(self, text: str, err: bool = False) -> None:
        """Print a line, which the bar makes way for: click writes past what rich puts in a stream's place."""
        self._progress.stop()
        click.echo(text, err=err)
        self._progress.start()
