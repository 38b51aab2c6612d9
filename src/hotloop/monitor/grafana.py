"""Grafana's JSON from a short description of a dashboard."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

_COLUMNS, _SCHEMA = 24, 39
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """One expression, and how its lines are named.

    Attributes:
        legend: with labels as `{{label}}`; of a table: the column's name.
    """

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A chart, a figure, or a table.

    Attributes:
        unit: in Grafana's words: "percentunit", "bytes", "watt", "s" and so on; of a table: of each query, in order.
        key: labels that name a table's rows; its first query sorts them, the largest on top.
        link: the dashboard that a row leads to.
    """

    title: str
    kind: Literal["timeseries", "stat", "table", "state-timeline"]
    queries: Sequence[Query]
    unit: str | Sequence[str] = "short"
    help: str = ""
    key: Sequence[str] = ()
    link: str = ""


@dataclass(frozen=True)
class Row:
    """Panels side by side, under a heading; more than fit go on below."""

    title: str
    panels: Sequence[Panel]
    each_line: int = 2
    height: int = 8


@dataclass(frozen=True)
class Dashboard:
    """A page.

    Attributes:
        variables: name -> the query of its values.
        texts: name -> default and what it is; for the reader to fill in.
    """

    uid: str
    title: str
    rows: Sequence[Row]
    variables: dict[str, str] = field(default_factory=dict)
    texts: dict[str, tuple[str, str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As Grafana imports it."""
        panels: list[dict[str, Any]] = []
        top = 0
        for row in self.rows:
            head = {"x": 0, "y": top, "w": _COLUMNS, "h": 1}
            panels.append({"id": len(panels) + 1, "type": "row", "title": row.title, "gridPos": head, "panels": []})
            top += 1
            width = _COLUMNS // row.each_line
            for number, panel in enumerate(row.panels):
                line, column = divmod(number, row.each_line)
                place = {"x": column * width, "y": top + line * row.height, "w": width, "h": row.height}
                panels.append({"id": len(panels) + 1, "gridPos": place, **_panel(panel)})
            top += -(-len(row.panels) // row.each_line) * row.height
        links = [{"type": "dashboards", "tags": ["hotloop"], "asDropdown": False, "includeVars": True, "keepTime": True,
                  "title": "hotloop"}]  # fmt: skip
        return {
            "uid": self.uid, "title": self.title, "tags": ["hotloop"], "schemaVersion": _SCHEMA, "version": 1,
            "editable": True, "refresh": "30s", "time": {"from": "now-24h", "to": "now"}, "timezone": "browser",
            "graphTooltip": 1, "links": links, "templating": {"list": _variables(self)}, "panels": panels,
        }  # fmt: skip


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"}
    ]
    for name, query in dashboard.variables.items():
        found.append({
            "name": name, "label": name.replace("_", " "), "type": "query", "datasource": _SOURCE, "refresh": 2,
            "sort": 1, "query": {"query": query, "refId": name},
        })  # fmt: skip
    for name, (default, label) in dashboard.texts.items():
        current = {"text": default, "value": default}
        found.append({"name": name, "label": label, "type": "textbox", "query": default, "current": current})
    return found


def _panel(panel: Panel) -> dict[str, Any]:
    table = panel.kind == "table"
    instant = {"instant": True, "range": False, "format": "table"} if table else {"range": True}
    targets = [
        {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
        | instant
        for number, query in enumerate(panel.queries)
    ]
    unit = panel.unit if isinstance(panel.unit, str) else "short"
    defaults: dict[str, Any] = {"unit": unit}
    if unit == "percentunit" and panel.kind == "timeseries":
        defaults |= {"min": 0, "max": 1}
    if panel.kind == "timeseries":
        defaults["custom"] = {"showPoints": "never", "fillOpacity": 0, "spanNulls": False}
    made = {
        "type": panel.kind, "title": panel.title, "description": panel.help, "datasource": _SOURCE, "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": _overrides(panel) if table else []},
        "options": _options(panel),
    }  # fmt: skip
    return {**made, "transformations": _transformations(panel)} if table else made


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom"},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat":
            return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "area"}
        case "state-timeline":
            return {"showValue": "never", "mergeValues": True, "legend": {"showLegend": False}}
        case "table":
            return {"sortBy": [{"displayName": panel.queries[0].legend, "desc": True}], "footer": {"show": False}}


def _columns(panel: Panel) -> list[str]:
    """What Grafana calls the values of each query, once they are one table."""
    if len(panel.queries) == 1:
        return ["Value"]
    return [f"Value #{chr(ord('A') + number)}" for number in range(len(panel.queries))]


def _transformations(panel: Panel) -> list[dict[str, Any]]:
    columns = _columns(panel)
    names = {column: query.legend for column, query in zip(columns, panel.queries, strict=True)}
    order = {name: number for number, name in enumerate([*panel.key, *columns])}
    arranged = {"excludeByName": {"Time": True}, "indexByName": order, "renameByName": names}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": arranged}]


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    units = panel.unit if not isinstance(panel.unit, str) else [panel.unit] * len(panel.queries)
    found: list[dict[str, Any]] = [
        {"matcher": {"id": "byName", "options": query.legend}, "properties": [{"id": "unit", "value": unit}]}
        for query, unit in zip(panel.queries, units, strict=True)
    ]
    if panel.link:
        values = "&".join(f"var-{key}=${{__data.fields.{key}:percentencode}}" for key in panel.key)
        link = {"title": "look closer", "url": f"/d/{panel.link}?{values}&${{__url_time_range}}"}
        properties = [{"id": "links", "value": [link]}]
        found.append({"matcher": {"id": "byName", "options": panel.key[0]}, "properties": properties})
    return found
