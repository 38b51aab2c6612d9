"""Secrets in a job: what looks like one is refused, as a job is written into files that others may read."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hotloop.core.errors import InputError
from hotloop.core.job import Job

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
_TOKENS = (
    r"\bhf_[A-Za-z0-9]{20,}", r"\bgh[pousr]_[A-Za-z0-9]{20,}", r"\bgithub_pat_\w{20,}", r"\bglpat-[\w-]{15,}",
    r"\bnvapi-[\w-]{20,}", r"\bA(KI|SI)A[0-9A-Z]{16}\b", r"\bsk-(proj|ant|or)-[\w-]{16,}", r"\bsk-[A-Za-z0-9]{20,}",
    r"\bsk_live_\w{16,}", r"\bxox[abeprs]-[\w-]{10,}", r"\bnpm_[A-Za-z0-9]{30,}", r"\bpypi-AgE\w{10,}",
    r"\bAIza[\w-]{35}", r"\beyJ[\w-]{10,}\.[\w-]{10,}\.", r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
)  # fmt: skip
"""Of Hugging Face, GitHub, GitLab, NVIDIA, AWS, OpenAI and others, Stripe, Slack, npm, PyPI, Google; signed; keys."""
_PLACES = (
    r"\w://[^/\s:@]*:(?!\$)[^/\s@]+@",  # a password in an address
    r"\bhttps?://(?!\$)[^/\s:@]{16,}@",  # a token in the user's place
    r"[?&;](sig|signature|x-amz-signature|token|access_token|api_key|accountkey)=(?!\$)[^&;\s]{6,}",
    r"\bauthorization:\s*\w+\s+(?!\$)\S{8,}",
    r"\bbearer\s+(?!\$)[\w.~+/=-]{16,}",
    r"\bbasic\s+[a-z0-9+/]{6,}={1,2}",
    r"\blogin\s(.*\s)?[0-9a-f]{40}\b",
)
_SECRET = re.compile("|".join(_TOKENS) + "|(?i:" + "|".join(_PLACES) + ")")


def check_secrets(job: Job) -> None:
    """Raise InputError if a job holds a secret: it would lie in the launch's files, and in the engine's."""
    for key, value in _texts(job.model_dump(mode="json"), ""):
        if key.startswith(_REFERENCES):
            continue
        given = [(key.rpartition(".")[2], value)]
        if key in _COMMANDS:
            given += [(name or option, inner) for name, option, inner in _GIVEN.findall(value)]
        named = any(_NAME.search(name) and not _HARMLESS.fullmatch(inner) for name, inner in given)
        if named or _SECRET.search(value):
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
