"""The instructions of a Dockerfile."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from hotloop.core.errors import InputError

_HEREDOC = re.compile(r"<<-?[\"']?(\w+)[\"']?")


@dataclass(frozen=True)
class Instruction:
    """One of them.

    Attributes:
        name: in capitals: "RUN".
        value: all after it, in one line; what a heredoc holds comes after it.
        line: where it begins, from 1.
        stage: number of the FROM that it is under; -1 above the first.
    """

    name: str
    value: str
    line: int
    stage: int

    @property
    def words(self) -> list[str]:
        """As a shell divides them; a JSON array's, if it is one; at blanks, if quotes are not closed."""
        try:
            if self.value.startswith("["):
                return [str(word) for word in json.loads(self.value)]
            return shlex.split(self.value)
        except ValueError:
            return self.value.split()

    @property
    def pairs(self) -> dict[str, str]:
        """Of ENV, LABEL and ARG; `ENV NAME VALUE` is an old way of writing one."""
        words = self.words
        if words and "=" not in words[0]:
            return {words[0]: " ".join(words[1:])}
        return dict(word.partition("=")[::2] for word in words)


def read_instructions(file: Path) -> tuple[Instruction, ...]:
    """Of a file.

    Raises:
        InputError: it cannot be read, or no instruction is in it.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fix = f"hotloop image check {file}/Dockerfile" if file.is_dir() else "hotloop image render --output FOLDER"
        raise InputError(f"cannot read {file}", str(error), fix) from error
    found = parse(text)
    if not any(one.name == "FROM" for one in found):
        raise InputError(f"{file} is no Dockerfile", "it has no FROM", "hotloop image check FOLDER/Dockerfile")
    return found


def parse(text: str) -> tuple[Instruction, ...]:
    """Of a text: lines that are continued are joined, comments are left out, heredocs belong to their instruction."""
    found: list[Instruction] = []
    parts: list[str] = []
    first, stage, awaited = 0, -1, ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if awaited:
            parts.append(stripped)
            if stripped != awaited:
                continue
            awaited = ""
        elif not stripped or stripped.startswith("#"):
            continue
        else:
            first = first if parts else number
            parts.append(stripped.removesuffix("\\").rstrip())
            if stripped.endswith("\\"):
                continue
            heredoc = _HEREDOC.search(stripped) if re.match(r"RUN|COPY|ADD", " ".join(parts), re.IGNORECASE) else None
            if heredoc:
                awaited = heredoc[1]
                continue
        name, _, value = " ".join(parts).partition(" ")
        stage += name.upper() == "FROM"
        found.append(Instruction(name.upper(), value.strip(), first, stage))
        parts = []
    if parts:  # the file ends within an instruction
        name, _, value = " ".join(parts).partition(" ")
        found.append(Instruction(name.upper(), value.strip(), first, stage + (name.upper() == "FROM")))
    return tuple(found)


def rendered_for(file: Path) -> tuple[str, int | None]:
    """The tag and the timestamp that a Dockerfile of ours was rendered with; "" and None for another's.

    Raises:
        InputError: it cannot be read.
    """
    labels: dict[str, str] = {}
    moment = None
    for one in read_instructions(file):
        if one.name == "LABEL":
            labels |= one.pairs
        if one.name == "ARG" and one.pairs.get("SOURCE_DATE_EPOCH", "").isdigit():
            moment = int(one.pairs["SOURCE_DATE_EPOCH"])
    title, version = (labels.get(f"org.opencontainers.image.{name}", "") for name in ("title", "version"))
    return (f"{title}:{version}" if title and version else ""), moment
