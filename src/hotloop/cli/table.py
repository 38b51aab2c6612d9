"""Tables in a terminal, and in a pipe."""

from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header; in a pipe each on one line."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, 1000)  # a pipe has no width: keep each row on one line
    console.print(table)
