"""What is wrong with a Dockerfile or an image: rules of our own, and hadolint's."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from hotloop.core.errors import InputError
from hotloop.core.secrets import is_secret
from hotloop.image.instructions import Instruction
from hotloop.versions.table import Table

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
_HADOLINT_LEVELS: dict[str, Level] = {"error": "error", "warning": "warning"}


@dataclass(frozen=True)
class Finding:
    """Something wrong.

    Attributes:
        id: stays the same between versions: "image-root"; hadolint's own begin with DL or SC.
        line: of the Dockerfile; 0 for the whole, or for an image.
        evidence: with the values.
        fix: what to write in its place; "" where hadolint says it with the evidence.
    """

    id: str
    level: Level
    line: int
    evidence: str
    fix: str


@dataclass(frozen=True)
class Subject:
    """What is examined, of a Dockerfile or of an image; lines are 0 for an image.

    Attributes:
        bases: references that stages begin with, other stages left out; the final stage's own is the last.
        final: instructions of the final stage, and of those that it begins with.
        environment: line, name and value of what is kept in the image: ENV, ARG, LABEL.
        torch: version of torch, and of its CUDA; empty where that is not known.
    """

    bases: tuple[tuple[int, str], ...]
    final: tuple[Instruction, ...]
    environment: tuple[tuple[int, str, str, str], ...]
    user: str
    has_health_check: bool
    torch: str = ""
    cuda: str = ""
    everything: tuple[Instruction, ...] = field(default=())


def of_dockerfile(instructions: Sequence[Instruction], table: Table) -> Subject:
    """What rules ask of a Dockerfile."""
    froms = [one for one in instructions if one.name == "FROM"]
    names = {_alias(one).lower(): one.stage for one in froms if _alias(one)}
    chain = _chain(froms, names)
    final = tuple(one for one in instructions if one.stage in chain)
    bases = [(one.line, _reference(one)) for one in froms if _reference(one).lower() not in names]
    own = next(
        (base for base in reversed(froms) if base.stage in chain and _reference(base).lower() not in names), None
    )
    if own:
        last = (own.line, _reference(own))
        bases = [*(base for base in bases if base != last), last]
    environment = tuple(
        (one.line, one.name, name, value)
        for one in instructions
        if one.name in ("ENV", "ARG") or (one.name == "LABEL" and one.stage in chain)
        for name, value in one.pairs.items()
    )
    labels = {name: value for _, kind, name, value in environment if kind == "LABEL"}
    torch, cuda = _torch(instructions, labels, table)
    users = [one.value.strip() for one in final if one.name == "USER"]
    health = any(one.name == "HEALTHCHECK" and one.value.upper() != "NONE" for one in final)
    return Subject(
        tuple(bases), final, environment, users[-1] if users else "", health, torch, cuda, tuple(instructions)
    )


def of_image(config: Mapping[str, Any]) -> Subject:
    """What rules ask of an image, by its configuration."""
    variables = [(0, "ENV", *text.partition("=")[::2]) for text in config.get("Env") or ()]
    labels: dict[str, str] = config.get("Labels") or {}
    environment = [*variables, *((0, "LABEL", name, value) for name, value in labels.items())]
    return Subject(
        bases=(),
        final=(),
        environment=tuple(environment),
        user=config.get("User") or "",
        has_health_check=bool(config.get("Healthcheck")),
        torch=labels.get("hotloop.torch", ""),
        cuda=labels.get("hotloop.cuda", ""),
    )


def check(subject: Subject, table: Table, driver: str = "") -> tuple[Finding, ...]:
    """By our own rules, in the order of lines.

    Args:
        driver: the oldest of the machines that the image is for.
    """
    found = [finding for rule in _RULES for finding in rule(subject)]
    found += _driver(subject, table, driver) if driver else []
    return tuple(sorted(found, key=lambda one: (one.line, LEVELS.index(one.level), one.id)))


_SAME = {
    "image-base-latest": {"DL3006", "DL3007"},
    "image-packages-unpinned": {"DL3013"},
    "image-root": {"DL3002"},
    "image-secret-in-env": {"DL3064"},
    "image-secret-in-arg": {"DL3064"},
}
"""Rules of hadolint's that say the same as one of ours."""


def together(own: Sequence[Finding], others: Sequence[Finding]) -> list[Finding]:
    """Both in the order of lines, once each: where hadolint says the same of a line, ours has a fix."""
    said = {(id, one.line) for one in own for id in _SAME.get(one.id, ())}
    left = [one for one in others if (one.id, one.line) not in said]
    return sorted([*own, *left], key=lambda one: (one.line, LEVELS.index(one.level), one.id))


def hadolint(file: Path) -> tuple[Finding, ...]:
    """What hadolint finds.

    Raises:
        InputError: it is not there.
    """
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.is_file() else shutil.which("hadolint")
    if not program:
        raise InputError("there is no hadolint here", "it is one half of the check", 'pip install "hotloop[image]"')
    done = subprocess.run(  # noqa: S603 - hadolint
        [program, "--no-fail", "--format", "json", str(file)], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise InputError(f"hadolint cannot read {file}", said, f"hadolint {file}")
    return tuple(
        Finding(row["code"], _HADOLINT_LEVELS.get(row["level"], "note"), row["line"], row["message"], "")
        for row in json.loads(done.stdout)
    )


def _alias(instruction: Instruction) -> str:
    named = re.search(r"\sAS\s+(\S+)$", instruction.value, re.IGNORECASE)
    return named[1] if named else ""


def _reference(instruction: Instruction) -> str:
    return next((word for word in instruction.value.split() if not word.startswith("--")), "")


def _chain(froms: Sequence[Instruction], names: Mapping[str, int]) -> set[int]:
    """Numbers of the stages that the final one consists of."""
    chain: set[int] = set()
    stage: int | None = froms[-1].stage if froms else None
    while stage is not None and stage not in chain:
        chain.add(stage)
        stage = names.get(_reference(froms[stage]).lower())
    return chain


def _torch(instructions: Sequence[Instruction], labels: Mapping[str, str], table: Table) -> tuple[str, str]:
    """Torch's version and its CUDA: by our labels, or by what pip is told; an unnamed CUDA is the default build's."""
    if "hotloop.torch" in labels:
        return labels["hotloop.torch"], labels.get("hotloop.cuda", "")
    text = " ".join(one.value for one in instructions if one.name == "RUN")
    version = re.search(r"\btorch==([\d.]+\d)", text)
    named = re.search(r"(?:\+|/|--torch-backend[= ])cu(\d\d\d)\b", text)
    torch = version[1] if version else ""
    default = next((build.cuda for build in table.builds if build.torch == torch and build.default), "")
    return torch, f"{named[1][:2]}.{named[1][2:]}" if named else default


def _base(subject: Subject) -> Iterator[Finding]:
    for line, reference in subject.bases:
        if reference == "scratch" or "$" in reference or "@sha256:" in reference:
            continue
        tag = reference.rsplit("/", 1)[-1].partition(":")[2]
        if tag in ("", "latest"):
            yield Finding("image-base-latest", "error", line, f"FROM {reference} is another image every week",
                          "name a version, and its digest: FROM NAME:VERSION@sha256:...")  # fmt: skip
        else:
            yield Finding("image-base-unpinned", "note", line, f"FROM {reference} has no digest: its tag may move",
                          f"FROM {reference}@sha256:...")  # fmt: skip


def _root(subject: Subject) -> Iterator[Finding]:
    if subject.user.split(":")[0] in ("", "root", "0"):
        who = f"USER {subject.user}" if subject.user else "no USER"
        line = max((one.line for one in subject.final if one.name == "USER"), default=0)
        yield Finding("image-root", "error", line, f"{who}: what runs in it is root", "USER 1000:1000")


def _cuda_twice(subject: Subject) -> Iterator[Finding]:
    line, reference = subject.bases[-1] if subject.bases else (0, "")
    installs = subject.torch or any(re.search(r"install\b.*\btorch\b", one.value) for one in subject.everything)
    if installs and re.search(r"nvidia/cuda:.*-(runtime|devel)", reference):
        evidence = f"{reference} has CUDA's libraries, and torch's wheels bring theirs"
        fix = "begin with ubuntu or debian; have nvcc in a build stage only, if an extension is compiled"
        yield Finding("image-cuda-twice", "warning", line, evidence, fix)


def _cuda_mismatch(subject: Subject) -> Iterator[Finding]:
    for line, reference in subject.bases:
        named = re.search(r"\bcuda:?-?(\d+)\.(\d+)", reference)
        if not named or not subject.cuda:
            continue
        base = f"{named[1]}.{named[2]}"
        other = named[1] != subject.cuda.split(".")[0]
        if base != subject.cuda:
            level: Level = "error" if other else "warning"
            what = (
                "torch refuses to compile extensions with it" if other else "extensions are compiled for another CUDA"
            )
            evidence = f"{reference} has CUDA {base}, torch has {subject.cuda}: {what}"
            fix = f"take the image of CUDA {subject.cuda}, or a torch for {base}"
            yield Finding("image-cuda-mismatch", level, line, evidence, fix)


def _chown(subject: Subject) -> Iterator[Finding]:
    copied = [one.line for one in subject.final if one.name in ("COPY", "ADD")]
    for one in subject.final:
        command = re.search(r"\b(chown|chmod)\s+(-\w*R\w*|--recursive)\b", one.value) if one.name == "RUN" else None
        if command and copied and min(copied) < one.line:
            yield Finding("image-chown-doubles", "warning", one.line,
                          f"{command[1]} -R writes every file that was copied once more, into a layer of its own",
                          f"COPY --{command[1]}=... in place of it")  # fmt: skip


_SECRET_NAME = re.compile(
    r"(?<![A-Z])(PASSWORD|PASSWD|SECRET|TOKEN|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY|CREDENTIALS?)(?![A-Z])", re.IGNORECASE
)
_SECRET_FILE = re.compile(
    r"(^|/)(\.env|\.netrc|\.pypirc|pip\.conf|id_rsa|id_ed25519|credentials|[^/]*\.pem|[^/]*\.key)$"
)


def _secrets(subject: Subject) -> Iterator[Finding]:
    """The value is not repeated: findings are logged, too."""
    fix = "RUN --mount=type=secret,id=NAME while building; a variable of the container while running"
    for line, kind, name, value in subject.environment:
        kept = value and not value.startswith("$")
        if is_secret(value) or (kept and _SECRET_NAME.search(name) and not value.startswith(("/run/", "/var/run/"))):
            yield Finding("image-secret-in-env", "error", line, f"{kind} {name} keeps a secret in the image", fix)
        elif kind == "ARG" and _SECRET_NAME.search(name):
            yield Finding(
                "image-secret-in-arg", "error", line, f"ARG {name}: its value stays in the image's history", fix
            )
    for one in subject.final:
        for word in one.words[:-1] if one.name in ("COPY", "ADD") else ():
            if _SECRET_FILE.search(word):
                yield Finding(
                    "image-secret-copied", "error", one.line, f"{one.name} {word} keeps a secret in a layer", fix
                )


def _unpinned(subject: Subject) -> Iterator[Finding]:
    for one in subject.everything:
        for part in re.split(r"&&|;|\|\|?", one.value) if one.name == "RUN" else ():
            command = re.search(r"\b(?:uv\s+)?(?:pip3?|conda|mamba)\s+install\s+(.*)", part)
            names = _loose(command[1]) if command else []
            if names:
                evidence = f"of no fixed version: {' '.join(names)}"
                fix = "install from a lock file: pip install --require-hashes -r requirements.lock"
                yield Finding("image-packages-unpinned", "warning", one.line, evidence, fix)


_WITH_VALUE = frozenset({
    "-r", "--requirement", "-c", "--constraint", "-i", "--index-url", "--extra-index-url", "-f", "--find-links",
    "--python", "-t", "--target", "--prefix", "--platform", "--no-binary", "--only-binary", "--torch-backend", "-e",
    "--editable", "-n", "--name", "--channel",
})  # fmt: skip
"""Options whose next word is no package."""


def _loose(text: str) -> list[str]:
    """Packages among an installer's words that have no fixed version."""
    names, skip = [], False
    for word in text.split():
        if skip:
            skip = False
        elif word.startswith("-"):
            skip = word in _WITH_VALUE
        elif not re.search(r"==|@|/|\.whl|\.tar|^\.|\$|(?<![<>~!])=\d|<<", word):
            names.append(word.strip("\"'"))
    return names


def _health(subject: Subject) -> Iterator[Finding]:
    if not subject.has_health_check:
        yield Finding("image-no-health-check", "note", 0, "nothing says whether a container of it still works",
                      'HEALTHCHECK CMD ["hotloop", "doctor"]')  # fmt: skip


_RULES: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    _base, _root, _cuda_twice, _cuda_mismatch, _chown, _secrets, _unpinned, _health,
)  # fmt: skip


def _driver(subject: Subject, table: Table, driver: str) -> list[Finding]:
    """Of the fleet: below the least nothing runs, below the one that CUDA came with its PTX does not."""
    cuda = table.cudas.get(subject.cuda)
    if cuda is None:
        evidence = f"which CUDA torch has is not known; whether driver {driver} does for it neither"
        return [Finding("image-driver-unknown", "warning", 0, evidence, "pin torch: torch==VERSION")]
    given, fix = Version(driver).release, f"hotloop image render --driver {driver} --gpu CARD"
    if given < Version(cuda.least_driver).release[: len(given)]:
        needs = f"torch {subject.torch} for CUDA {cuda.version} needs a driver from {cuda.least_driver}"
        return [Finding("image-driver-floor", "error", 0, f"{needs}; the fleet has {driver}", fix)]
    if given < Version(cuda.paired_driver).release[: len(given)]:
        older = f"driver {driver} is older than {cuda.paired_driver}, CUDA {cuda.version}'s own"
        return [Finding("image-driver-limited", "warning", 0, f"{older}: its PTX fails (error 222)", fix)]
    return []
