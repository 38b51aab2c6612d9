"""Pages that are made from the code while MkDocs builds."""

import json
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from hotloop.core.job import Job, TokensTask
from hotloop.core.job_file import known_keys
from hotloop.doctor.finding import GROUPS, Known, catalogue


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each finding of the doctor."""
    for known in catalogue().values():
        files.append(File.generated(config, f"findings/{known.id}.md", content=finding_page(known)))
    return files


def finding_page(known: Known) -> str:
    """What a finding means and what to type."""
    told = f"*{known.level}, {GROUPS[known.group]}, `hotloop doctor`*"
    return f"# {known.id}\n\n**{known.title}.**\n\n{told}\n\n{known.why}\n\n```console\n{known.fix}\n```\n"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables of job keys and of findings where a page asks for them."""
    return markdown.replace("<!-- job keys -->", job_keys()).replace("<!-- findings -->", findings())


def findings() -> str:
    """Every finding of the doctor, a table for each group."""
    lines: list[str] = []
    for group, name in GROUPS.items():
        lines += ["", f"### {name}", "", "| id | level | |", "|---|---|---|"]
        here = [known for known in catalogue().values() if known.group == group]
        lines += [f"| [`{one.id}`](findings/{one.id}.md) | {one.level} | {one.title} |" for one in here]
    return "\n".join(lines)


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
