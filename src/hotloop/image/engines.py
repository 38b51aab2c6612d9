"""Commands of docker, podman and buildah that build, start and look into images."""

import json
import resource
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotloop.core.errors import HotloopError, InputError

Engine = Literal["docker", "podman", "buildah"]
ENGINES: tuple[Engine, ...] = ("docker", "podman", "buildah")
_LIMIT_SECONDS = 300.0
_ANSWER_SECONDS = 20.0
_CACHE = "/home/hotloop/.cache"
_PID_MAX = Path("/proc/sys/kernel/pid_max")


@dataclass(frozen=True)
class BuildSettings:
    """How an image is built.

    Attributes:
        timestamp: seconds since 1970, of all files and of the image; None for the time at which it is built.
        secrets: files by id that the build may read, and that no layer keeps.
        no_cache: every step is done anew.
    """

    tag: str
    timestamp: int | None = None
    secrets: Mapping[str, Path] | None = None
    no_cache: bool = False


@dataclass(frozen=True)
class RunSettings:
    """How a container is started.

    Attributes:
        gpus: "all", "none", or numbers with commas between them.
        mounts: "SOURCE:TARGET", ":ro" after it.
        shared_memory: size of /dev/shm: "8g".
        user: "UID:GID"; empty for the image's own.
        writable: whether the root file system may be written.
    """

    gpus: str = "none"
    mounts: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    shared_memory: str = "8g"
    user: str = ""
    writable: bool = False


def find_engine(asked: Engine | None = None) -> Engine:
    """The one that is asked for, or the first that is there; docker only with a daemon that answers.

    Raises:
        InputError: it is not there, or none is.
    """
    if asked and not shutil.which(asked):
        raise InputError(
            f"there is no {asked} here", "it is not on the path", f"install {asked}, or leave --engine out"
        )
    if asked == "docker" and not _answers():
        fix = "start it: systemctl start docker; or leave --engine out"
        raise InputError("docker's daemon does not answer", "docker itself is here", fix)
    if asked:
        return asked
    for engine in ENGINES:
        if shutil.which(engine) and (engine != "docker" or _answers()):
            return engine
    without = " (docker is there, its daemon does not answer)" if shutil.which("docker") else ""
    fix = "apt-get install buildah, or install podman or docker"
    raise InputError("there is no docker, podman or buildah here", f"one of them is needed{without}", fix)


def build_command(engine: Engine, folder: Path, settings: BuildSettings) -> list[str]:
    """Builds the folder's Dockerfile."""
    timestamp = [] if settings.timestamp is None else ["--build-arg", f"SOURCE_DATE_EPOCH={settings.timestamp}"]
    if settings.timestamp is not None and engine != "docker":
        timestamp += ["--timestamp", str(settings.timestamp)]
    # Only docker's own format has health checks; docker makes no other.
    kind = {"docker": ["docker", "build"], "podman": ["podman", "build", "--format", "docker"],
            "buildah": ["buildah", "bud", "--format", "docker"]}[engine]  # fmt: skip
    secrets = [f"--secret=id={name},src={path}" for name, path in (settings.secrets or {}).items()]
    cache = ["--no-cache"] if settings.no_cache else []
    named = ["--tag", settings.tag, "--file", str(folder / "Dockerfile")]
    return [*kind, *timestamp, *secrets, *cache, *named, str(folder)]


def run_command(engine: Engine, tag: str, command: Sequence[str], settings: RunSettings) -> list[str]:
    """Starts a command in an image: GPUs, mounts, shared memory, limits, user; the root read-only, no privileges.

    Raises:
        InputError: buildah is asked for GPUs.
    """
    if engine == "buildah":
        return _buildah_run(tag, command, settings)
    mounts = [f"--volume={mount}" for mount in settings.mounts]
    # A volume begins with the image's own owner, so it serves its user alone.
    own = settings.user.split(":")[0] in ("", "1000")
    cache = f"--volume=hotloop-cache:{_CACHE}" if own else f"--tmpfs={_CACHE}:exec,mode=1777"
    root = [] if settings.writable else ["--read-only", "--tmpfs=/tmp:exec,mode=1777", cache]
    return [
        engine, "run", "--rm", *_gpu_options(engine, settings.gpus), *mounts,
        *(f"--env={variable}" for variable in settings.variables), f"--shm-size={settings.shared_memory}",
        *_limits(engine), *root,
        *([f"--user={settings.user}"] if settings.user else []), "--cap-drop=ALL", "--security-opt=no-new-privileges",
        tag, *command,
    ]  # fmt: skip


def build(engine: Engine, folder: Path, settings: BuildSettings) -> None:
    """Build it; what the engine says goes to the error output.

    Raises:
        HotloopError: the engine failed.
    """
    command = build_command(engine, folder, settings)
    code = subprocess.run(command, stdout=2).returncode  # noqa: S603 - an engine
    if code:
        raise HotloopError(f"{engine} did not build {settings.tag}", f"it exited with {code}; what it said is above",
                           "hotloop image build --print shows the command")  # fmt: skip


def run(engine: Engine, tag: str, command: Sequence[str], settings: RunSettings) -> int:
    """Start a command in an image, its input and output ours; its exit code."""
    words = run_command(engine, tag, command, settings)
    return subprocess.run(words).returncode  # noqa: S603 - an engine


def output_of(engine: Engine, tag: str, command: Sequence[str], settings: RunSettings) -> tuple[int, str, str]:
    """Exit code, output and error output of a command in an image.

    Raises:
        HotloopError: it takes longer than five minutes.
    """
    words = run_command(engine, tag, command, settings)
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_SECONDS)  # noqa: S603 - an engine
    except subprocess.TimeoutExpired:
        what = f"{command[0]} in {tag} took longer than {_LIMIT_SECONDS:.0f} s"
        raise HotloopError(what, "the command hangs", f"hotloop image run {tag} -- {' '.join(command)}") from None
    return done.returncode, done.stdout, done.stderr


def inspect(engine: Engine, tag: str) -> dict[str, Any]:
    """An image's configuration, as docker has it: Env, Labels, User, Entrypoint, Healthcheck.

    Raises:
        InputError: there is no such image.
    """
    words = {"docker": ["docker", "image", "inspect"], "podman": ["podman", "image", "inspect"],
             "buildah": ["buildah", "inspect", "--type", "image"]}[engine]  # fmt: skip
    done = subprocess.run([*words, tag], capture_output=True, text=True, timeout=_LIMIT_SECONDS)  # noqa: S603
    if done.returncode:
        said = first_said(done.stderr)
        raise InputError(f"{engine} has no image {tag}", said, f"hotloop image build FOLDER --tag {tag}")
    found = json.loads(done.stdout)
    content: dict[str, Any] = found[0] if isinstance(found, list) else found["Docker"]
    config = content.get("config") or content["Config"]
    beside = {
        "created": content.get("created") or content.get("Created", ""),
        "Healthcheck": content.get("Healthcheck"),
    }
    return {**beside, **config}


def first_said(complaints: str) -> str:
    """The line of an engine's error output that says what is wrong: hints and its log are around it."""
    lines = complaints.strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if line.startswith(("Error", "docker: Error"))), lines[-1])


def _answers() -> bool:
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        return subprocess.run(command, capture_output=True, timeout=_ANSWER_SECONDS).returncode == 0  # noqa: S603
    except subprocess.TimeoutExpired:
        return False


def _limits(engine: Engine) -> list[str]:
    """Pinned memory, stacks, open files, processes. docker's daemon may raise them. podman cannot go beyond the user's
    own, which its defaults do (for root its "host" too, in 4.3): it would start nothing.
    """
    if engine == "docker":
        return ["--ulimit=memlock=-1", "--ulimit=stack=67108864", "--ulimit=nofile=1048576:1048576"]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = int(_PID_MAX.read_text())  # podman begins by lowering its own to this
    return [_files(), "--ulimit=nproc={0}:{0}".format(most if processes < 0 else min(processes, most))]


def _files() -> str:
    return "--ulimit=nofile={0}:{0}".format(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _gpu_options(engine: Engine, gpus: str) -> list[str]:
    if gpus == "none":
        return []
    if engine == "podman":
        return [f"--device=nvidia.com/gpu={number}" for number in gpus.split(",")]
    return ["--gpus=all"] if gpus == "all" else [f'--gpus="device={gpus}"']


def _buildah_run(tag: str, command: Sequence[str], settings: RunSettings) -> list[str]:
    """For buildah, which starts commands in working containers: one is made, used and removed again.

    Its root can be written: buildah knows no other. What is written goes with the container.
    """
    if settings.gpus != "none":
        cause = "buildah builds images, and gives no GPUs to what it starts"
        raise InputError(f"buildah cannot give GPUs {settings.gpus}", cause, "install podman or docker, or --gpus none")
    options = [f"--volume={mount}" for mount in settings.mounts]
    options += [f"--env={variable}" for variable in settings.variables]
    options += [f"--user={settings.user}"] if settings.user else []
    inner = ["/usr/bin/tini", "-s", "-g", "--", *command]
    made = ["--pull-never", f"--shm-size={settings.shared_memory}", _files(), tag]
    text = (
        f"name=$(buildah from {shlex.join(made)}) || exit 125; "
        "trap 'buildah rm \"$name\" > /dev/null' EXIT; "
        f'buildah run {shlex.join(options)} "$name" -- {shlex.join(inner)}'
    )
    return ["sh", "-c", text]
