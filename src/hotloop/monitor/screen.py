"""The live page of `hotloop watch`: cards and jobs of a host in a terminal."""

import textwrap
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import accumulate
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static
from textual.worker import get_current_worker

from hotloop.core.errors import HotloopError
from hotloop.core.units import count
from hotloop.monitor.history import LINES, History
from hotloop.monitor.lines import CARD_COLUMNS, JOB_COLUMNS, card_cells, details, drawn, job_cells, verdicts
from hotloop.monitor.profiled import last_profile
from hotloop.monitor.watched import Job, View, Watched

_ORDERS: dict[str, Callable[[Job], object]] = {
    "name": lambda job: _who(job),
    "wait for data": lambda job: -(job.wait_share or 0.0),
    "silence": lambda job: -job.silent_seconds,
    "step time": lambda job: -(job.step_seconds or 0.0),
}

_BUSY = next(line for line in LINES if line.of_card)
"""What is drawn of cards while a job's figure is drawn of jobs."""
_NARROWEST = 8
_LEAST_ROOM = 3
"""Rows of what stands out, however many jobs there are."""


class Watch(App[None]):
    """Looks every `interval` seconds, in a thread: a card that hangs does not stop the page."""

    TITLE = "hotloop watch"
    CSS = """
    #head { height: 1; background: $primary-background; padding: 0 1; }
    #cards { height: auto; max-height: 50%; }
    #jobs { height: 1fr; }
    #verdict { height: auto; padding: 0 1; color: $text-warning; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort", "Sort"),
        Binding("l", "line", "Line"),
        Binding("enter", "details", "Details", priority=True),
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, watched: Watched, place: str, interval: float) -> None:
        super().__init__()
        self._watched, self._place, self._interval = watched, place, interval
        self._jobs: list[Job] = []
        self._recent: Mapping[str, History] = {}
        self._order = "name"
        self._line = LINES[0]
        self._looking = False

    def compose(self) -> ComposeResult:
        yield Static("reading …", id="head")
        yield DataTable(id="cards", cursor_type="none", zebra_stripes=True)
        yield DataTable(id="jobs", cursor_type="row", zebra_stripes=True)
        yield Static(id="verdict")
        yield Footer()

    def on_mount(self) -> None:
        self._table("cards").add_columns(*CARD_COLUMNS)
        self._table("jobs").add_columns(*JOB_COLUMNS)
        for name in ("cards", "jobs"):
            self._table(name).add_column("")
        self._table("jobs").focus()
        self._look()
        self.set_interval(self._interval, self._look)

    def _look(self) -> None:
        if not self._looking:  # a host that answers slowly is not asked twice at once
            self._looking = True
            self.run_worker(self._read, thread=True)

    def _read(self) -> None:
        worker = get_current_worker()
        try:
            found: View | HotloopError = self._watched.look()
        except HotloopError as error:
            found = error
        if not worker.is_cancelled:
            self.call_from_thread(self._show, found)

    def _show(self, found: View | HotloopError) -> None:
        self._looking = False
        head = self.query_one("#head", Static)
        if isinstance(found, HotloopError):
            head.update(Text(f"{found.what}: {found.cause}", style="bold red"))
            return
        driver = f"driver {found.driver}" if found.driver else "no driver"
        there = f"{count(len(found.cards), 'GPU')}, {count(len(found.jobs), 'rank')}"
        # What a narrow terminal cuts is the end.
        head.update(Text(f"{self._place}  {there}  {datetime.now():%H:%M:%S}  by {self._order}  {driver}"))
        self._jobs = sorted(found.jobs, key=_ORDERS[self._order])  # type: ignore[arg-type]
        self._recent = found.recent
        self._table("cards").display = bool(found.cards)
        of_cards = self._line if self._line.of_card else _BUSY
        lines = [drawn(of_cards, self._recent.get(card.uuid, {})) for card in found.cards]
        self._fill("cards", of_cards.name, [card_cells(card) for card in found.cards], lines)
        lines = [drawn(self._line, self._lines_of(job)) for job in self._jobs]
        self._fill("jobs", self._line.name, [job_cells(job) for job in self._jobs], lines)
        self._tell()
        if isinstance(self.screen, Details):
            self.screen.follow(self._jobs)

    def _lines_of(self, job: Job) -> History:
        """Lines of a job and of its card."""
        return {**job.recent, **self._recent.get(job.live.gpu, {})}

    def _fill(self, name: str, title: str, rows: list[tuple[str, ...]], lines: list[str]) -> None:
        """Rows, and a line at the end of each, as wide as what they leave."""
        table = self._table(name)
        row, across = table.cursor_row, table.scroll_offset
        table.clear()
        *others, last = table.ordered_columns
        # Columns never get narrower, so that nothing jumps; but for this one, which takes what is left.
        widest = [max(map(len, cells)) for cells in zip(*rows, strict=True)] or [0] * len(others)
        taken = sum(2 + max(column.content_width, most) for column, most in zip(others, widest, strict=True))
        width = max(_NARROWEST, self.size.width - taken - 2)
        last.label, last.content_width = Text(title[:width]), len(title[:width])
        for cells, line in zip(rows, lines, strict=True):
            table.add_row(*map(Text, cells), Text(line[-width:]))
        table.move_cursor(row=min(row, max(0, len(rows) - 1)), animate=False)
        table.scroll_to(*across, animate=False)

    def _tell(self) -> None:
        """What stands out, beneath the tables: as much as they leave room for."""
        cards, jobs = self._table("cards"), self._table("jobs")
        above = min(1 + cards.row_count, self.size.height // 2) if cards.display else 0
        room = max(_LEAST_ROOM, self.size.height - above - jobs.row_count - 4)  # two heads, a row between, the keys
        lines = [textwrap.fill(line, self.size.width - 2) for line in verdicts(self._jobs)]
        ends = list(accumulate(1 + line.count("\n") for line in lines))
        if len(lines) > 1 and ends[-1] > room:
            shown = max(1, sum(end < room for end in ends))
            lines[shown:] = [f"and {len(lines) - shown} more"]
        self.query_one("#verdict", Static).update(Text("\n".join(lines)))

    def action_sort(self) -> None:
        """By the next order."""
        names = list(_ORDERS)
        self._order = names[(names.index(self._order) + 1) % len(names)]
        self._look()

    def action_line(self) -> None:
        """Draw the next figure over time."""
        self._line = LINES[(LINES.index(self._line) + 1) % len(LINES)]
        self._look()

    def action_details(self) -> None:
        """Of the job under the cursor."""
        row = self._table("jobs").cursor_row
        if isinstance(self.screen, Details):
            self.pop_screen()
        elif row < len(self._jobs):
            self.push_screen(Details(self._jobs[row], self._lines_of))

    def _table(self, name: str) -> DataTable[Text]:
        return self.query_one(f"#{name}", DataTable)


class Details(ModalScreen[None]):
    """All that is known of a job."""

    CSS = """
    Details { align: center middle; }
    #details { width: 90%; height: auto; max-height: 90%; border: round $primary; padding: 0 1; background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.pop_screen", "Back")]

    def __init__(self, job: Job, recent: Callable[[Job], History]) -> None:
        super().__init__()
        self._job, self._recent = job, recent

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="details") as box:
            box.border_title = Text(self._job.live.job)
            yield Static(self._table(), id="pairs")
        yield Footer()

    def follow(self, jobs: list[Job]) -> None:
        """Show the job as it is now; one that is gone as it was last."""
        now = next((job for job in jobs if _who(job) == _who(self._job)), None)
        self.query_one("#details").border_subtitle = "" if now else "ended"
        self._job = now or self._job
        self.query_one("#pairs", Static).update(self._table())

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, value in details(self._job, last_profile(self._job.live), self._recent(self._job)):
            table.add_row(Text(name, style="bold"), Text(value))
        return table


def _who(job: Job) -> tuple[str, str, int]:
    return job.live.job, job.live.run, job.live.rank
