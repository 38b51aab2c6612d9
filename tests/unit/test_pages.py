import json
import os
import xml.etree.ElementTree as ET
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

from hotloop.core.job_file import parse_job
from hotloop.core.machine import read_machine
from hotloop.core.run import Result, Run, open_run
from hotloop.pages.charts import Chart, Series
from hotloop.pages.run import write_report

STEP = {"event": "step", "loss": 1.0, "samples_per_second": 9.0, "learning_rate": 0.1}
EPOCH = {
    "event": "epoch", "step": 20, "epoch": 0, "train_loss": 1.0, "val_loss": 0.5, "val_accuracy": 0.75, "seconds": 2.0,
    "samples_per_second": 9.0, "data_wait_share": 0.125, "validation_seconds": 1.0,
}  # fmt: skip


class Tags(HTMLParser):
    """Collects tags, what is loaded from elsewhere, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = {name: value or "" for name, value in attributes}
        links = [named.get(name, "") for name in ("src", "href", "xlink:href")]
        self.outside += [link for link in links if link and not link.startswith(("data:", "#"))]

    def handle_data(self, data: str) -> None:
        self.text += data


def ended_run(root: Path, **changes: object) -> Run:
    job = parse_job({"data": {"train": "a"}, "model": {"name": "m"}, "run": {"root": str(root)}}, "job")
    run = open_run(job, datetime(2026, 11, 21))
    run.write_start(job, read_machine())
    plain: dict[str, object] = {
        "status": "finished", "name": run.name, "metrics": {"val_accuracy": 0.75}, "epochs": 1, "steps": 20,
        "samples_per_second": 9.0, "data_wait_share": 0.125, "train_seconds": 2.0,
    }  # fmt: skip
    run.write_result(Result(**{**plain, **changes}))  # type: ignore[arg-type]
    return run


def test_a_report_names_damaged_files_whose_names_are_no_text(tmp_path: Path) -> None:
    run = ended_run(tmp_path, corrupt_files=[{"path": os.fsdecode(b"a/caf\xe9.jpg"), "reason": "it is empty"}])
    write_report(run)
    assert r"caf\udce9.jpg" in run.report_file.read_text()


def test_a_report_shows_everything_and_loads_nothing(tmp_path: Path) -> None:
    run = ended_run(tmp_path, corrupt_files=[{"path": "a/<b>.jpg", "reason": "it is empty"}])
    records = [{**STEP, "step": 10, "epoch": 0}, {**STEP, "step": 20, "epoch": 0}, EPOCH]
    run.metrics_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    examples = [{"name": "x/1.png", "expected": "cat", "predicted": "dog", "correct": False, "png": "AAAA"}]
    run.examples_file.write_text(json.dumps(examples))
    write_report(run)
    page = Tags(run.report_file.read_text())
    assert page.outside == []
    assert "script" not in page.tags
    assert page.tags.count("svg") == 5
    for text in ("0.7500", "12.5 %", "dog", ", is cat", "a/<b>.jpg", "it is empty", "batch_size = 64", run.name):
        assert text in page.text, text


def test_a_run_that_failed_at_once_has_a_report_too(tmp_path: Path) -> None:
    run = ended_run(
        tmp_path, status="failed", metrics={}, steps=0, epochs=0, error="the loss of step 1 is nan\ncause: x"
    )
    write_report(run)
    page = Tags(run.report_file.read_text())
    assert "the loss of step 1 is nan" in page.text
    assert "svg" not in page.tags


def test_a_chart_is_well_formed_and_the_same_each_time() -> None:
    chart = Chart('a "loss" & <more>', "step", [Series("x", [1, 2], [0.1, 0.2]), Series("y", [1], [0.3])])
    svg = ET.fromstring(chart.to_svg())
    assert svg.tag.endswith("svg")
    assert svg.attrib["aria-label"] == 'a "loss" & <more>'
    assert chart.to_svg() == chart.to_svg()
