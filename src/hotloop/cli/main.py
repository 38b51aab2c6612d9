"""The `hotloop` command. Commands are imported when they are called, so that help stays quick."""

import difflib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from hotloop import __version__
from hotloop.cli.lazy import LazyGroup
from hotloop.core.errors import FIXES, HotloopError, cannot_access

_COMMANDS = {
    "train": ("hotloop.cli.train:train", "Train what a job file asks for."),
    "profile": ("hotloop.cli.profile:profile", "Say where the time of a training goes, and prove it."),
    "run": ("hotloop.cli.run:run", "Run a training script faster, without changing it."),
    "tune": ("hotloop.cli.tune:tune", "Find faster settings by short trials."),
    "plan": ("hotloop.cli.plan:plan", "Say what a training will need and cost, before it starts."),
    "export": (
        "hotloop.cli.export:export",
        "Write a run's model to a file that serves, checked, with all that it needs.",
    ),
    "predict": ("hotloop.cli.predict:predict", "Say what an exported image classifier sees in files."),
    "launch": ("hotloop.cli.launch:launch", "Start a job on an engine: this machine, or a cluster."),
    "doctor": ("hotloop.cli.doctor:doctor", "Say what is wrong with this machine, and what to type."),
    "explain": ("hotloop.cli.explain:explain", "Say what ended a run, from its log, and what to type."),
    "resolve": ("hotloop.cli.resolve:resolve", "Say which torch runs with a driver, a card and a Python."),
    "image": ("hotloop.cli.image:image", "Render, build and check container images."),
    "watch": ("hotloop.cli.watch:watch", "Show cards and trainings together, live."),
    "serve": ("hotloop.cli.serve:serve", "Show runs and live trainings in a browser."),
    "exporter": ("hotloop.cli.exporter:exporter", "Serve metrics of cards and trainings to Prometheus."),
    "monitor": ("hotloop.cli.monitor:monitor", "Write alert rules and dashboards for Prometheus and Grafana."),
    "job": ("hotloop.cli.job:job", "Write and check job files."),
    "data": ("hotloop.cli.data:data", "Look into data sets, and pack them."),
    "storage": ("hotloop.cli.storage:storage", "Say what a job may do in object storage, try it, and make keys."),
    "runs": ("hotloop.cli.runs:runs", "List and compare runs."),
    "checkpoint": ("hotloop.cli.checkpoint:checkpoint", "List, verify and convert checkpoints."),
}
"""Command -> where it is, and its line in the help; a test holds the lines against the commands."""


class _Commands(LazyGroup):
    named = _COMMANDS

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise click.UsageError(f"no command {args[0]}{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hotloop", message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def cli(debug: bool) -> None:
    """Keep the GPU busy.

    Exit codes: 0 done; 1 the work failed; 2 bad usage or bad input; 75 stopped early but saved, start me again;
    130 Ctrl-C.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal that cannot show a file's name still shows the rest
    if isinstance(sys.stdout, io.TextIOWrapper) and isinstance(sys.stdout.buffer, io.RawIOBase):
        # As PYTHONUNBUFFERED makes it: what a full disk takes only a part of would be cut off without an error.
        encoding, errors = sys.stdout.encoding, sys.stdout.errors
        # Not detached: by what Python opened first the size of the terminal is found.
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(sys.stdout.buffer), encoding, errors, line_buffering=True)
    debug = "--debug" in arguments[:1] or os.environ.get("HOTLOOP_DEBUG") == "1"
    try:
        code = cli.main(arguments, prog_name="hotloop", standalone_mode=False)
        sys.stdout.flush()
    except HotloopError as error:
        _fail(error, debug)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        _fail(_usage(error, arguments), debug)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as in `hotloop runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        name = "standard output" if _cannot_print() else error.filename if error.errno in FIXES else ""
        _fail(cannot_access(Path(name), error, HotloopError) if name else unexpected(error), debug)
    except Exception as error:
        _fail(unexpected(error), debug)
    sys.exit(code if isinstance(code, int) else 0)


def _open_closed() -> None:
    """What was closed by who called us, as in `hotloop runs >&-`, reads and writes nothing.

    Else the next file that is opened would have its number, and what libraries print would go into that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, closefd=False))


def _cannot_print() -> bool:
    """Whether standard output takes nothing any more: the disk below it is full, for example."""
    try:
        click.echo()  # what could not be written before is lost, so that a flush alone would succeed
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return True
    return False


def _fail(error: HotloopError, debug: bool) -> NoReturn:
    if debug:
        import traceback

        traceback.print_exception(error)
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    click.echo((click.style("error: ", fg="red", bold=True) if colour else "error: ") + str(error), err=True)
    sys.exit(error.exit_code)


def _usage(error: click.UsageError, arguments: Sequence[str]) -> HotloopError:
    from hotloop.core.errors import InputError

    context = error.ctx or _context(arguments)
    usage = context.get_usage().removeprefix("Usage: ")
    return InputError(error.format_message(), f"usage: {usage}", f"{context.command_path} --help")


def _context(arguments: Sequence[str]) -> click.Context:
    """Of the command that is called: click tells none where an option lacks its value."""
    context = click.Context(cli, info_name="hotloop")
    for word in arguments:
        command = context.command.get_command(context, word) if isinstance(context.command, click.Group) else None
        if command:
            context = click.Context(command, info_name=word, parent=context)
    return context


def unexpected(error: Exception) -> HotloopError:
    """An error that is not hotloop's own: most often from the user's code, so it says where it was raised."""
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    where = f"{frame.tb_frame.f_code.co_filename}, line {frame.tb_lineno}" if frame else "unknown place"
    text = " ".join(str(error).split()) or "no message"
    wrapped = HotloopError(
        f"{type(error).__name__}: {text}",
        f"raised in {where}",
        "set HOTLOOP_DEBUG=1 and start it again: it shows the way there",
    )
    wrapped.__cause__ = error
    return wrapped
