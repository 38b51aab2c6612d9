"""Recording and alert rules for Prometheus, as text."""

from importlib import resources


def rules(docs: str = "") -> str:
    """The rules as YAML.

    Args:
        docs: where this documentation is served; alerts link to its sections there.
    """
    text = resources.files("hotloop.monitor").joinpath("rules.yml").read_text()
    return text.replace("runbook_url: docs/alerts.md", f"runbook_url: {docs.rstrip('/')}/alerts/") if docs else text
