"""Pages that are made from the code while MkDocs builds."""

import json
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from hotloop.core.job import Job, TokensTask
from hotloop.core.job_file import known_keys
from hotloop.doctor.finding import GROUPS, Known, catalogue
from hotloop.explain.causes import Cause, causes


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each finding of the doctor, and for each cause of failures."""
    for known in catalogue().values():
        files.append(File.generated(config, f"findings/{known.id}.md", content=finding_page(known)))
    for cause in causes().values():
        files.append(File.generated(config, f"causes/{cause.id}.md", content=cause_page(cause)))
    return files


def cause_page(cause: Cause) -> str:
    """What a cause means and what to type."""
    told = f"*{cause.area or 'any'}, `hotloop explain`*"
    seen = ", ".join(f"[`{id_}`](../findings/{id_}.md)" for id_ in cause.findings)
    machine = f"\n`hotloop doctor` tells whether a machine has it: {seen}\n" if seen else ""
    behind = ", ".join(f"[`{id_}`]({id_}.md)" for id_ in cause.leads_to)
    machine += f"\nWhat may come of it, later in the log: {behind}\n" if behind else ""
    page = f"# {cause.id}\n\n**{cause.title}.**\n\n{told}\n\n{cause.why}\n\n**Fix:** {plain(cause.fix)}\n"
    return page + machine


def plain(text: str) -> str:
    """Text of which Markdown makes nothing: a fix is half words, half commands."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", text)


def cause_table() -> str:
    """Every cause of failures."""
    lines = ["| id | area | |", "|---|---|---|"]
    lines += [f"| [`{one.id}`](causes/{one.id}.md) | {one.area} | {one.title} |" for one in causes().values()]
    return "\n".join(lines)


def finding_page(known: Known) -> str:
    """What a finding means and what to type."""
    told = f"*{known.level}, {GROUPS[known.group]}, `hotloop doctor`*"
    return f"# {known.id}\n\n**{known.title}.**\n\n{told}\n\n{known.why}\n\n**Fix:** {plain(known.fix)}\n"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables of job keys, findings and causes where a page asks for them."""
    for mark, table in {"job keys": job_keys, "findings": findings, "causes": cause_table}.items():
        if f"<!-- {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- {mark} -->", table())
    return markdown


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
