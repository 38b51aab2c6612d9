"""Secrets in a job: what looks like one is refused, as a job is written into files that others may read."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hotloop.core.errors import InputError
from hotloop.core.job import Job
from hotloop.core.secrets import is_secret

_NAME = re.compile(
    r"((^|[_.-])(token|secret|pass|passphrase|pwd|credentials?|((api|access|secret|private|account|ssh|signing)[_-]?key))"
    r"|passw(or)?d)$",
    re.IGNORECASE,
)
_HARMLESS = re.compile(r"|[\d.]+|true|false|yes|no|on|off|auto|[~./$].*", re.IGNORECASE)
"""Of such a name: numbers, switches, paths, references to other variables."""
_REFERENCES = ("launch.kubernetes.secrets.", "launch.kubernetes.pull_secret")
"""Keys that hold names of secrets."""
_COMMANDS = ("launch.setup", "launch.slurm.options")
_GIVEN = re.compile(r"(?:\b([A-Za-z_][\w-]*)=|--([A-Za-z][\w-]*)\s+)(?=['\"]?([^\s'\",]+))")
"""NAME=VALUE and --NAME VALUE in a line for a shell."""


def check_secrets(job: Job) -> None:
    """Raise InputError if a job holds a secret: it would lie in the launch's files, and in the engine's."""
    for key, value in _texts(job.model_dump(mode="json"), ""):
        if key.startswith(_REFERENCES):
            continue
        given = [(key.rpartition(".")[2], value)]
        if key in _COMMANDS:
            given += [(name or option, inner) for name, option, inner in _GIVEN.findall(value)]
        named = any(_NAME.search(name) and not _HARMLESS.fullmatch(inner) for name, inner in given)
        if named or is_secret(value):
            raise InputError(
                f"{key} looks like a secret",
                "a job is written into files that others may read",
                "export it in your shell, whose variables go along; or name a secret in launch.kubernetes.secrets",
            )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str):
        yield key, value
