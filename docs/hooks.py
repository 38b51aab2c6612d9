"""Pages that are made from the code while MkDocs builds."""

import json
from typing import Any

from hotloop.core.job import Job, known_keys


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table of job keys where a page asks for it."""
    return markdown.replace("<!-- job keys -->", job_keys())


def job_keys() -> str:
    """Every key with its default and what it does, a table for each section."""
    defaults = Job.model_validate({"data": {"train": ""}, "model": {"name": ""}}).model_dump(mode="json")
    lines: list[str] = []
    section = None
    for key, description in known_keys().items():
        *tables, name = key.split(".")
        if tables != section:
            section = tables
            title = ".".join(tables) or "top"
            lines += [
                "",
                f"## {f'`[{title}]`' if tables else 'At the top'} {{ #{title} }}",
                "",
                "| key | default | |",
                "|---|---|---|",
            ]
        value: Any = defaults
        for part in (*tables, name):
            value = value[part]
        required = key in ("data.train", "model.name")
        default = "required" if required else "" if value is None else f"`{json.dumps(value)}`"
        lines.append(f"| `{name}` | {default} | {description.replace('|', '&#124;')} |")
    return "\n".join(lines)
