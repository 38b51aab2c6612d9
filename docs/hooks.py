"""Pages that are made from the code while MkDocs builds."""

import json
from typing import Any

from hotloop.core.job import Job, TokensTask
from hotloop.core.job_file import known_keys


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the table of job keys where a page asks for it."""
    return markdown.replace("<!-- job keys -->", job_keys())


def job_keys() -> str:
    """Every key with its default and what it does, a table for each section."""
    defaults = Job.model_validate({"data": {"train": ""}, "model": {"name": ""}}).model_dump(mode="json")
    tokens = TokensTask().model_dump(mode="json")
    lines: list[str] = []
    section = None
    keys = known_keys()
    keys |= {f"tokens:{key}": text for key, text in known_keys("tokens").items() if key.startswith("task.")}
    for key, description in keys.items():
        *tables, name = key.split(".")
        if tables != section:
            section = tables
            of_tokens = ' of `name = "tokens"`' if key.startswith("tokens:") else ""
            title = ".".join(tables).replace(":", "-") or "top"
            table = title.removeprefix("tokens-")
            lines += [
                "",
                f"## {f'`[{table}]`' if tables else 'At the top'}{of_tokens} {{ #{title} }}",
                "",
                "| key | default | |",
                "|---|---|---|",
            ]
        value: Any = tokens[name] if key.startswith("tokens:") else defaults
        for part in (*tables, name) if value is defaults else ():
            value = value[part]
        required = key in ("data.train", "model.name")
        default = "required" if required else "" if value is None else f"`{json.dumps(value)}`"
        lines.append(f"| `{name}` | {default} | {description.replace('|', '&#124;')} |")
    return "\n".join(lines)
