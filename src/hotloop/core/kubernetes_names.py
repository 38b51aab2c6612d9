"""Names and labels as Kubernetes takes them, checked when a job is read.

"Object Names and IDs" and "Labels and Selectors" of its documentation; RFC 1123 for names.
"""

import re
from typing import Annotated

from pydantic import AfterValidator

_DNS_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_DNS_NAME = rf"{_DNS_LABEL}(\.{_DNS_LABEL})*"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = rf"({_DNS_NAME}/)?{_LABEL}"
_TAINT = rf"{_LABEL_KEY}(=({_LABEL})?)?(:(NoSchedule|PreferNoSchedule|NoExecute))?"


def _matching(pattern: str, words: str, longest: int = 317) -> AfterValidator:
    """Refuse other texts in words; patterns say little to people."""

    def check(text: str) -> str:
        if len(text) > longest or not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} is no {words}")
        return text

    return AfterValidator(check)


_NAME = "name that Kubernetes takes: small letters, digits, - and . between them"
_LABEL_WORDS = "label that Kubernetes takes: letters, digits, and -, _ and . between them"
Name = Annotated[str, _matching(_DNS_NAME, _NAME, 253)]
NameOrNone = Annotated[str, _matching(f"({_DNS_NAME})?", _NAME, 253)]
NamespaceOrNone = Annotated[str, _matching(f"({_DNS_LABEL})?", "namespace: small letters, digits, - between them")]
LabelKey = Annotated[str, _matching(_LABEL_KEY, _LABEL_WORDS)]
DeviceName = Annotated[str, _matching(rf"{_DNS_NAME}/{_LABEL}", "resource of a device: VENDOR/NAME")]
LabelValue = Annotated[str, _matching(f"({_LABEL})?", _LABEL_WORDS)]
Taint = Annotated[str, _matching(_TAINT, "taint: KEY, KEY=VALUE or KEY=VALUE:NoSchedule", 500)]
Variable = Annotated[str, _matching("[A-Za-z_][A-Za-z0-9_]*", "variable of a shell")]
SecretKey = Annotated[str, _matching(rf"{_DNS_NAME}/[A-Za-z0-9._-]+", "SECRET/KEY", 507)]
