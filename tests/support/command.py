"""What a finished command left, and the type of the fixture that runs one."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


class Command(Protocol):
    def __call__(self, *arguments: str, expect: int | None = None, timeout: float = 120) -> Finished: ...
