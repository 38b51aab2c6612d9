"""Job files: read, with what is wrong in words of the file, and written for a start."""

import json
import shlex
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from hotloop.core.errors import InputError
from hotloop.core.job import FORMAT, TASKS, Job, Section


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Read and validate a job file, `overrides` ("train.epochs=3") laid over it.

    Raises:
        InputError: the file is absent, is no TOML, or asks for what a job cannot have.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise _absent(path) from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder", "a job is a TOML file", f"hotloop train {path}/job.toml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}", str(error), "name a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML", str(error), "mend that line (https://toml.io)") from None
    for override in overrides:
        _override(raw, override)
    return parse_job(raw, str(path))


def _absent(path: Path) -> InputError:
    """The fix writes over nothing: that name is free."""
    there = [file.name for file in path.parent.glob("*.toml")]
    near = get_close_matches(path.name, there, n=1)
    cause = f"there is no such file; the nearest is {near[0]}" if near else "there is no such file"
    return InputError(f"no job file {path}", cause, f"hotloop job init > {shlex.quote(str(path))}")


def parse_job(raw: dict[str, Any], origin: str) -> Job:
    """Validate a job given as plain data; `origin` names it in errors."""
    version = raw.get("version", FORMAT)
    if isinstance(version, int) and version > FORMAT:
        raise InputError(
            f"{origin} is a job of format {version}; this hotloop reads up to {FORMAT}",
            "it was written for a newer version",
            "pip install --upgrade hotloop",
        )
    try:
        return Job.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, raw, origin) from None


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise InputError(f"--set {override!r}", "it takes KEY=VALUE", "--set train.epochs=3")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, last = (part.strip() for part in key.split("."))
    for depth, table in enumerate(tables, 1):
        raw = raw.setdefault(table, {})
        if not isinstance(raw, dict):
            whole = ".".join(tables[:depth])
            raise InputError(f"--set {override!r}", f"{whole} is a value, not a table", f"--set {whole}={text}")
    raw[last] = value


def known_keys(task: str = "images") -> dict[str, str]:
    """Every dotted key of a job of a ready task with its description."""

    def walk(section: type[Section], prefix: str) -> dict[str, str]:
        keys: dict[str, str] = {}
        for name, field in section.model_fields.items():
            inner = TASKS[task] if name == "task" else field.annotation
            if isinstance(inner, type) and issubclass(inner, Section):
                keys |= walk(inner, f"{prefix}{name}.")
            else:
                keys[f"{prefix}{name}"] = field.description or ""
        return keys

    return walk(Job, "")


_UNSHOWN = "storage.client_key"
"""What a user may have put there in place of where it is."""


def _explain(error: ValidationError, raw: dict[str, Any], origin: str) -> InputError:
    """The first thing that is wrong, in words of the file."""
    found = error.errors()
    unknown = [one for one in found if one["type"] == "extra_forbidden"]
    first = unknown[0] if unknown and found[0]["type"] == "missing" else found[0]  # it may be what is missing, mistyped
    location = [str(part) for part in first["loc"] if part not in ("images", "tokens", "custom")]
    key = ".".join(location)
    task = raw.get("task")
    task_name = "tokens" if isinstance(task, dict) and task.get("name") == "tokens" else "images"
    keys = known_keys(task_name)
    known = next((name for name in keys if key == name or key.startswith(f"{name}.")), key)
    if first["type"] == "extra_forbidden":
        return _unknown(key, "custom" in first["loc"], keys, origin)
    required = next((name for name in STARTER if name == key or name.startswith(f"{key}.")), None)
    if first["type"] == "missing" and required:
        what = f"{origin}: {required} is missing"
        return InputError(what, "it has no default", f"--set {required}=VALUE  ({keys[required]})")
    if key == "task.name":
        what = f'{origin}: unknown task "{first["input"]}"'
        return InputError(what, "tasks are images, tokens, or your own as module:Class", '--set task.name="images"')
    value: Any = raw
    for part in known.split("."):
        value = value.get(part) if isinstance(value, dict) else value
    received = "(not shown)" if known == _UNSHOWN else json.dumps(value, default=str)
    what = f"{origin}: {known} = {received if len(received) < 80 else received[:77] + '...'}"
    reason = first["msg"].removeprefix("Value error, ")
    if names := [name.removeprefix(f"{key}.") for name in keys if name.startswith(f"{key}.")]:
        return InputError(what, f"it is a table, of {', '.join(names)}", f"--set {key}.{names[0]}=VALUE")
    if known not in keys:
        return InputError(what, reason, "hotloop job schema lists all keys")
    setting = shlex.quote(f"{known}={_default(known, task_name)}")
    return InputError(what, reason, f"--set {setting}  ({keys[known]})")


def _unknown(key: str, in_custom_task: bool, keys: dict[str, str], origin: str) -> InputError:
    what = f"{origin}: unknown key {key}"
    if in_custom_task:
        fix = f"remove it, or move it into task.arguments: {key.removeprefix('task.')} = ..."
        return InputError(what, "a task of your own has the keys name and arguments only", fix)
    own_table, _, own_name = key.rpartition(".")
    if own_table == "model" and not get_close_matches(key, keys, n=1, cutoff=0.85):
        fix = f"move it into model.arguments: {own_name} = ..."
        return InputError(what, "what a model is made with has a table of its own", fix)
    sections = {name.rpartition(".")[0] for name in keys} - {"", own_table}
    same_name = [known for known in keys if known.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    near = get_close_matches(key, [*keys, *sections], n=1, cutoff=0.6) or same_name
    near = near or get_close_matches(key, [*keys, *sections], n=1, cutoff=0.4)
    if not near:
        return InputError(what, "no key has a name like it", "hotloop job schema lists all keys")
    table, _, name = near[0].rpartition(".")
    if table == own_table and not get_close_matches(own_name, [name]):  # its table is right; what it means is not known
        names = ", ".join(known.rpartition(".")[2] for known in keys if known.rpartition(".")[0] == table)
        return InputError(what, f"keys of [{table}] are {names}", "hotloop job schema says what each is")
    place = ""
    if name == own_name:  # where it stands is wrong, not what it is called
        where = f"in [{table}]" if table else "above all tables"
        place = f"; in a file: {f'[{near[0]}]' if near[0] in sections else f'{name} {where}'}"
    return InputError(what, f"the nearest known key is {near[0]}", f"rename it to {near[0]}{place}")


def _default(key: str, task: str) -> str:
    """The default of a key as one would type it; an example where there is none."""
    value: Any = parse_job(_nest(STARTERS[task]), "starter").model_dump(mode="json")
    for part in key.split("."):
        value = value[part]
    return (
        value if isinstance(value, str) else "VALUE" if value is None else _toml_line("v", value).removeprefix("v = ")
    )


STARTER: dict[str, Any] = {
    "data.train": "data/train",
    "data.val": "data/val",
    "model.name": "resnet18",
    "optimizer.arguments": {"momentum": 0.9},
}
"""What a starter file sets besides the defaults; the keys that have none are among them."""

_TOKENS_STARTER: dict[str, Any] = {
    "task.name": "tokens",
    "data.train": "data/train.npy",
    "data.val": "data/val.npy",
    "data.batch_size": 32,
    "model.name": "gpt2",
    "train.clip_norm": 1.0,
    "optimizer.name": "adamw",
    "optimizer.learning_rate": 6e-4,
    "optimizer.weight_decay": 0.1,
    "optimizer.arguments": {"betas": [0.9, 0.95]},
    "schedule.warmup": "500 steps",
}

STARTERS = {"images": STARTER, "tokens": _TOKENS_STARTER}
"""For each ready task."""


def starter_toml(task: str = "images") -> str:
    """A job file with every key, its default and its description, made from the model itself."""
    defaults = parse_job(_nest(STARTERS[task]), "starter").model_dump(mode="json")
    lines = ["# A hotloop job. Start it: hotloop train job.toml. Any key: --set train.epochs=3"]
    table = ""
    for key, description in known_keys(task).items():
        *tables, name = key.split(".")
        if ".".join(tables) != table:
            table = ".".join(tables)
            lines += ["", f"[{table}]"]
        value: Any = defaults
        for part in (*tables, name):
            value = value[part]
        line = f'# {name} = "..."' if value is None else _toml_line(name, value)
        lines.append(f"{line}  # {description}")
    return "\n".join(lines) + "\n"


def _toml_line(name: str, value: Any) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(_toml_line(key, inner) for key, inner in value.items())
        return f"{name} = {{ {pairs} }}" if pairs else f"{name} = {{}}"
    return " ".join(tomli_w.dumps({name: value}).split()).replace("[ ", "[").replace(", ]", "]")


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        table, name = key.split(".")
        nested.setdefault(table, {})[name] = value
    return nested
