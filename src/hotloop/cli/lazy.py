"""A group of commands that are imported when they are called, so that help stays quick."""

import importlib
from collections.abc import Mapping

import click


class LazyGroup(click.Group):
    """Knows its commands by name.

    Attributes:
        named: command -> where it is, and its line in the help; a test holds the lines against the commands.
    """

    named: Mapping[str, tuple[str, str]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.named)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.named:
            return None
        module, _, name = self.named[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.named.items()])
