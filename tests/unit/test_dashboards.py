"""Rules and dashboards use what the exporter tells and hang together; each alert is in the documentation."""

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus import METRICS

from hotloop.monitor.dashboards import dashboards
from hotloop.monitor.demo import Demo
from hotloop.monitor.families import CARD_METRICS, JOB_METRICS, PREFIX
from hotloop.monitor.metrics import Metrics
from hotloop.monitor.rules import rules

DOCS = Path(__file__).parents[2] / "docs"
RULES = [rule for group in yaml.safe_load(rules())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDS = {rule["record"] for rule in RULES if "record" in rule}
PAGES = {page.uid: page.to_json() for page in dashboards()}


def names_in(expression: str) -> set[str]:
    without_text = re.sub(r'"[^"]*"', "", expression)
    return set(re.findall(r"\bhotloop[_:][a-z0-9_:]+", without_text))


def queries(page: dict[str, Any]) -> list[str]:
    asked = [target["expr"] for panel in page["panels"] for target in panel.get("targets", [])]
    chosen = [one["query"]["query"] for one in page["templating"]["list"] if one["type"] == "query"]
    return asked + chosen


@pytest.mark.parametrize("uid", PAGES)
def test_a_dashboard_asks_for_what_there_is(uid: str) -> None:
    for expression in queries(PAGES[uid]):
        assert names_in(expression) - METRICS - RECORDS == set(), expression


def test_rules_ask_for_what_there_is_and_records_come_before_they_are_used() -> None:
    known = set(METRICS)
    for rule in RULES:
        assert names_in(rule["expr"]) - known == set(), rule
        known |= {rule["record"]} if "record" in rule else set()


@pytest.mark.parametrize("uid", PAGES)
def test_a_dashboard_hangs_together(uid: str) -> None:
    page = PAGES[uid]
    ids = [panel["id"] for panel in page["panels"]]
    assert len(ids) == len(set(ids))
    chosen = {one["name"] for one in page["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(page)))
    assert {name for name in used if not name.startswith("__")} <= chosen
    for panel in page["panels"]:
        assert panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    squares = [
        (x, y)
        for one in page["panels"]
        for x in range(one["gridPos"]["x"], one["gridPos"]["x"] + one["gridPos"]["w"])
        for y in range(one["gridPos"]["y"], one["gridPos"]["y"] + one["gridPos"]["h"])
    ]
    assert len(squares) == len(set(squares)), "panels lie over each other"


def test_links_lead_to_dashboards_and_their_variables() -> None:
    links = re.findall(r"/d/([\w-]+)\?([^\"]*)", json.dumps(list(PAGES.values())))
    assert len(links) == 3
    for uid, values in links:
        chosen = {one["name"] for one in PAGES[uid]["templating"]["list"]}
        assert set(re.findall(r"var-(\w+)=", values)) <= chosen


def test_the_fleet_s_tables_begin_with_what_wastes_most() -> None:
    tables = [panel for panel in PAGES["hotloop-fleet"]["panels"] if panel["type"] == "table"]
    assert [table["options"]["sortBy"][0] for table in tables[:2]] == [
        {"displayName": "wasted GPU hours", "desc": True}
    ] * 2
    assert any("$price" in target["expr"] for target in tables[0]["targets"])


def test_each_alert_says_what_why_and_what_to_type() -> None:
    for name, alert in ALERTS.items():
        assert alert["labels"]["severity"] in ("info", "warning", "critical")
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        assert "{{ $labels.instance }}" in alert["annotations"]["description"] or name == "HotloopCheckpointOverdue"
        assert alert["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}"


def test_each_alert_has_its_section_with_its_severity_and_no_other_has_one() -> None:
    sections = re.findall(r"^## (Hotloop\w+)\n\n\*(\w+)\*", (DOCS / "alerts.md").read_text(), re.MULTILINE)
    assert sections == [(name, alert["labels"]["severity"]) for name, alert in ALERTS.items()]


def test_every_xid_that_an_alert_knows_is_in_the_documentation() -> None:
    text = (DOCS / "alerts.md").read_text()
    listed = {number for cell in re.findall(r"^\| ([\d, to]+) \|", text, re.MULTILINE) for number in numbers(cell)}
    for name in ("HotloopXidHardware", "HotloopXidApplication"):
        (known, *_) = re.findall(r'xid=~"([^"]+)"', ALERTS[name]["expr"])
        for number in known.replace("14[4-9]", "144|145|146|147|148|149").split("|"):
            assert int(number) in listed


def numbers(cell: str) -> list[int]:
    found: list[int] = []
    for part in cell.split(", "):
        first, _, last = part.partition(" to ")
        found += range(int(first), int(last or first) + 1)
    return found


def test_what_dashboards_and_alerts_may_ask_for_is_what_the_exporter_tells() -> None:
    metrics = Metrics(Demo())
    metrics.count_request(200)
    metrics.count_push(True)
    metrics.note_age(0.1)
    told = {one.name for one in (*CARD_METRICS, *JOB_METRICS, *metrics.families())}
    assert {PREFIX + name for name in told} == METRICS


def test_links_go_where_the_documentation_is_served() -> None:
    told = yaml.safe_load(rules("https://docs.example.org/hotloop/"))
    links = [
        rule["annotations"]["runbook_url"] for group in told["groups"] for rule in group["rules"] if "alert" in rule
    ]
    assert links[0] == "https://docs.example.org/hotloop/alerts/#hotloopinputbound"
    assert resources.files("hotloop.monitor").joinpath("rules.yml").read_text() == rules()


def test_parts_of_a_card_are_not_counted_as_gpus() -> None:
    # hotloop_gpu_info names MIG instances as well.
    panel = next(panel for panel in PAGES["hotloop-fleet"]["panels"] if panel["title"] == "GPUs")
    assert panel["targets"][0]["expr"] == "count(hotloop_gpu_reading_ok)"
