"""What is answered to which address: pages about runs and live trainings, made anew each time."""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from jinja2 import Environment, PackageLoader

from hotloop import __version__
from hotloop.core.live import Live, Seen
from hotloop.core.run import Run, plain
from hotloop.core.units import format_bytes, format_seconds
from hotloop.monitor.web import reading
from hotloop.monitor.web.reading import Row

_STATIC = {"style.css": "text/css; charset=utf-8", "live.js": "text/javascript; charset=utf-8"}
_PAGE_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'none'"
"""Reports bring their styles with them, and whatever wrote them into a run's directory: nothing in them runs."""
_BYTES = "surrogateescape"
"""How Python holds a file's name that is no UTF-8: in an address it is these bytes again."""
_MOST_COMPARED, _FRESH_SECONDS = 8, 5
_COLUMNS: dict[str, tuple[str, Callable[[Row], Any]]] = {
    "name": ("run", lambda row: row.name),
    "status": ("status", lambda row: row.status),
    "started": ("started", lambda row: row.started),
    "steps": ("steps", lambda row: _figure(row, "steps")),
    "training": ("training", lambda row: _figure(row, "train_seconds")),
    "speed": ("samples/s", lambda row: _figure(row, "samples_per_second")),
    "wait": ("waits for data", lambda row: _figure(row, "data_wait_share")),
}
_LIVE_COLUMNS = ("training", "rank", "phase", "step", "loss", "samples/s", "waits for data", "memory", "last sign")


@dataclass(frozen=True)
class Answer:
    """What goes back to the browser."""

    status: HTTPStatus
    kind: str
    content: bytes
    policy: str = _PAGE_POLICY


@dataclass(frozen=True)
class Site:
    """Pages about the runs in a folder, and about what trains now.

    Attributes:
        root: the folder.
        live: looks for live trainings.
    """

    root: Path
    live: Callable[[], Seen]
    now: Callable[[], float] = time.time

    def answer(self, target: str) -> Answer:
        """To a GET of an address without its host. Paths are looked up among what there is, none is put together."""
        try:
            address = urlsplit(target)
            query = parse_qs(address.query, max_num_fields=64)
        except ValueError:
            return self._problem(HTTPStatus.BAD_REQUEST, "That is no address.")
        match [unquote(part, errors=_BYTES) for part in address.path.split("/")[1:]]:
            case [""]:
                return self._page("runs.html", **self._list(query), live=self._live(), columns=_LIVE_COLUMNS)
            case ["runs", name] if row := reading.find_row(self.root, name):
                return self._run(row)
            case ["runs", name, "reports", *parts] if row := reading.find_row(self.root, name):
                return self._report(row.run, "/".join(parts))
            case ["compare"]:
                return self._compare(query.get("run", []))
            case ["api", "runs"]:
                return _json({"runs": [_plain_row(row) for row in reading.read_rows(self.root)]})
            case ["api", "live"]:
                return _json(self._live())
            case ["static", name] if name in _STATIC:
                text = resources.files("hotloop.monitor.web").joinpath("static", name).read_bytes()
                return Answer(HTTPStatus.OK, _STATIC[name], text)
        return self._problem(HTTPStatus.NOT_FOUND, "There is no such page.")

    def refuse(self, status: HTTPStatus, why: str) -> Answer:
        """A page that says why there is no other."""
        return self._problem(status, why)

    def _list(self, query: dict[str, list[str]]) -> dict[str, Any]:
        asked = {key: query.get(key, [""])[0][:200] for key in ("sort", "order", "find", "status")}
        sort = asked["sort"] if asked["sort"] in _COLUMNS else "started"
        down = asked["order"] != "up" if sort == "started" or asked["order"] else False
        rows = reading.read_rows(self.root)
        shown = [
            row for row in rows if asked["find"].lower() in row.name.lower() and asked["status"] in ("", row.status)
        ]
        value = _COLUMNS[sort][1]
        known = sorted((row for row in shown if value(row) is not None), key=value, reverse=down)
        heads = [self._head(key, sort, down, asked) for key in _COLUMNS]
        return {
            "root": self.root, "heads": heads, "rows": known + [row for row in shown if value(row) is None],
            "count": len(rows), "asked": asked, "states": sorted({row.status for row in rows}), "sort": sort,
            "order": "down" if down else "up",
        }  # fmt: skip

    def _head(self, key: str, sort: str, down: bool, asked: dict[str, str]) -> dict[str, str]:
        """A column's title, which sorts by it, the other way round if it is sorted so already."""
        order = "up" if key == sort and down else "down" if key == sort else "up"
        link = urlencode({"sort": key, "order": order, "find": asked["find"], "status": asked["status"]})
        state = ("descending" if down else "ascending") if key == sort else "none"
        return {"title": _COLUMNS[key][0], "link": f"/?{link}", "state": state}

    def _run(self, row: Row) -> Answer:
        records = reading.read_records(row.run.metrics_file)
        epochs = [record for record in records.records if record["event"] == "epoch"]
        return self._page(
            "run.html", row=row, records=records, charts=reading.charts([(row.name, records)]), last=_last(records),
            epochs=len(epochs), job=reading.read_text(row.run.job_file), checkpoints=reading.checkpoints(row.run),
            reports=reading.reports(row.run), live=[one for one in self._processes() if self._is_of(one, row.run)],
        )  # fmt: skip

    def _report(self, run: Run, path: str) -> Answer:
        content = reading.read_report(run, path)
        if content is None:
            return self._problem(HTTPStatus.NOT_FOUND, "There is no such report.")
        return Answer(HTTPStatus.OK, "text/html; charset=utf-8", content, _REPORT_POLICY)

    def _compare(self, names: list[str]) -> Answer:
        found = [reading.find_row(self.root, name) for name in dict.fromkeys(names)]
        chosen = [row for row in found if row]
        if not 2 <= len(chosen) <= _MOST_COMPARED:
            why = f"{len(chosen)} chosen; between 2 and {_MOST_COMPARED} runs can be compared. Choose them in the list."
            return self._problem(HTTPStatus.BAD_REQUEST, why)
        jobs = [reading.settings(row.run) for row in chosen]
        keys = sorted({key for job in jobs for key in job if key != "name" and not key.startswith("run.")})
        differing = {key: [job.get(key) for job in jobs] for key in keys}
        differing = {key: values for key, values in differing.items() if any(value != values[0] for value in values)}
        named = [(row.name, reading.read_records(row.run.metrics_file)) for row in chosen]
        scores = sorted({name for row in chosen if row.result for name in row.result.metrics})
        return self._page(
            "compare.html", rows=chosen, settings=differing, charts=reading.charts(named), scores=scores
        )  # fmt: skip

    def _processes(self) -> list[Live]:
        return list(self.live().processes)

    def _is_of(self, live: Live, run: Run) -> bool:
        return bool(live.run) and Path(live.run).absolute() == run.directory.absolute()

    def _live(self) -> dict[str, Any]:
        """What trains now: as it is, and as rows of words."""
        processes = self._processes()
        runs = {str(row.absolute()): row.name for row in (self.root.iterdir() if self.root.is_dir() else [])}
        names = [runs.get(str(Path(one.run).absolute()), "") if one.run else "" for one in processes]
        rows = [
            {"cells": self._cells(one), "link": f"/runs/{_quoted(name)}" if name else ""}
            for one, name in zip(processes, names, strict=True)
        ]
        return {"processes": [asdict(one) for one in processes], "rows": rows}

    def _cells(self, one: Live) -> list[str]:
        speed = f"{one.samples / one.step_seconds:,.0f}" if one.step_seconds and one.samples else ""
        wait = f"{100 * one.wait_seconds / one.step_seconds:.1f} %" if one.step_seconds else ""
        loss = "" if one.loss is None else f"{one.loss:.4g}"
        silent = self.now() - one.heartbeat
        sign = "just now" if silent < _FRESH_SECONDS else f"{format_seconds(silent)} ago"
        rank = f"{one.rank} of {one.ranks}"
        memory = format_bytes(one.memory_bytes) if one.memory_bytes else ""
        return [one.job or str(one.pid), rank, one.phase, f"{one.step:,}", loss, speed, wait, memory, sign]

    def _page(self, template: str, status: HTTPStatus = HTTPStatus.OK, **values: Any) -> Answer:
        text = _environment().get_template(template).render(version=__version__, **values)
        return Answer(status, "text/html; charset=utf-8", text.encode(errors="replace"))

    def _problem(self, status: HTTPStatus, why: str) -> Answer:
        return self._page("problem.html", status, title=status.phrase, why=why)


def _figure(row: Row, name: str) -> float | None:
    """Of a run's result, which somebody may have changed by hand."""
    value = getattr(row.result, name, None)
    return value if reading.is_number(value) else None


def _json(content: dict[str, Any]) -> Answer:
    return Answer(HTTPStatus.OK, "application/json", json.dumps(plain(content)).encode())


def _plain_row(row: Row) -> dict[str, Any]:
    result = asdict(row.result) if row.result else None
    return {"name": row.name, "directory": str(row.run.directory), "status": row.status, "result": result}


def _last(records: reading.Records) -> dict[str, Any]:
    return next((record for record in reversed(records.records) if record["event"] == "step"), {})


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("hotloop.monitor.web"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    made.filters |= {
        "seconds": lambda value: format_seconds(value) if reading.is_number(value) else "",
        "moment": lambda value: f"{datetime.fromtimestamp(value):%Y-%m-%d %H:%M}",
        "number": _number, "percent": lambda value: f"{100 * value:.1f} %" if reading.is_number(value) else "",
        "segment": _quoted, "path": lambda text: _quoted(text, "/"),
    }  # fmt: skip
    return made


def _quoted(name: str, safe: str = "") -> str:
    return quote(name, safe=safe, errors=_BYTES)


def _number(value: object) -> str:
    """As people write it: whole ones with commas, others with four digits, all else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if isinstance(value, int) or (abs(value) >= 1000 and math.isfinite(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"
