"""`hotloop monitor`: what it writes can be loaded."""

import json
from pathlib import Path

import yaml
from command import Command


def test_rules_are_printed_with_links_to_where_the_documentation_is(hotloop: Command) -> None:
    told = yaml.safe_load(hotloop("monitor", "rules", "--docs", "https://docs.example.org", expect=0).out)
    links = [
        rule["annotations"]["runbook_url"] for group in told["groups"] for rule in group["rules"] if "alert" in rule
    ]
    assert len(links) > 15
    assert all(link.startswith("https://docs.example.org/alerts/#hotloop") for link in links)


def test_dashboards_are_written_into_a_new_folder(hotloop: Command, tmp_path: Path) -> None:
    out = hotloop("monitor", "dashboards", "new/folder", expect=0).out
    files = [tmp_path / line for line in out.splitlines()]
    assert [json.loads(file.read_text())["uid"] for file in files] == ["hotloop-fleet", "hotloop-host", "hotloop-job"]


def test_a_folder_that_cannot_be_made_is_three_lines(hotloop: Command, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    finished = hotloop("monitor", "dashboards", "taken/folder", expect=2)
    assert [line.split(":")[0] for line in finished.err.splitlines()] == ["error", "cause", "fix"]
