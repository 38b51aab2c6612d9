"""Text with colours where a terminal takes them."""

import os

import click


def show(text: str) -> None:
    """Print it; without colours where NO_COLOR is set, or where it does not go to a terminal."""
    click.echo(text, color=False if os.environ.get("NO_COLOR") else None)
