"""Where a job's paths are in a container: what the user's machine has, the container has not."""

from dataclasses import dataclass
from pathlib import PurePosixPath

from hotloop.core.errors import InputError
from hotloop.core.job import Job, KubernetesSection
from hotloop.launch.request import Request

HOME = "/home/hotloop"
JOB_FOLDER = "/etc/hotloop"
_SCRATCH = "/workspace"
_OURS = ("/", HOME, JOB_FOLDER, "/tmp", "/dev/shm")  # noqa: S108 - of the container


@dataclass(frozen=True)
class Paths:
    """In the container.

    Attributes:
        directory: where relative paths of the job begin.
        run_dir: of the run.
        claims: name -> where it is mounted.
        scratch: an empty folder in place of a claim; empty if there are claims.
    """

    directory: str
    run_dir: str
    claims: dict[str, str]
    scratch: str = ""

    def kept(self, path: str) -> bool:
        """Whether a path lies where a pod's end leaves it."""
        return any(PurePosixPath(path).is_relative_to(mount) for mount in self.claims.values())


def paths_in_container(request: Request) -> Paths:
    """Where all of a request is.

    Raises:
        InputError: places overlap, or the run's directory lies where nothing can be written.
    """
    own = request.job.launch.kubernetes
    _check_mounts(own)
    scratch = "" if own.claims else own.directory or _SCRATCH
    directory = PurePosixPath(own.directory or next(iter(own.claims.values()), scratch))
    inside = request.run_dir.is_relative_to(request.directory)
    run_dir = directory / request.run_dir.relative_to(request.directory) if inside else request.run_dir
    found = Paths(str(directory), str(run_dir), dict(own.claims), scratch)
    if found.kept(found.run_dir) or (scratch and run_dir.is_relative_to(scratch)):
        return found
    mounts = ", ".join(f"{name} at {mount}" for name, mount in own.claims.items()) or "none"
    raise InputError(
        f"the run's directory {found.run_dir} lies on no claim",
        f"claims: {mounts}; nothing else in a pod can be written, or stays",
        f"--set run.dir={next(iter(own.claims.values()), scratch)}/runs/{request.name}",
    )


def job_in_container(request: Request, paths: Paths) -> Job:
    """The job as the training reads it."""
    return request.job.model_copy(update={"run": request.job.run.model_copy(update={"dir": paths.run_dir})})


def _check_mounts(own: KubernetesSection) -> None:
    key = "launch.kubernetes.claims."
    given = {f"{key}{name}": path for name, path in own.claims.items()}
    taken: dict[str, str] = {}
    for name, path in {**given, "launch.kubernetes.directory": own.directory or "/data"}.items():
        plain = str(PurePosixPath(path))
        if plain != path or not path.startswith("/") or ":" in path or ".." in PurePosixPath(path).parts:
            raise InputError(f'{name} = "{path}" is no place in a container', "it begins with /", f"--set {name}=/data")
        if path in _OURS:
            raise InputError(f'{name} = "{path}" is in use', "a container needs it for itself", f"--set {name}=/data")
        if name.startswith(key) and path in taken:
            raise InputError(
                f'{name} = "{path}" is the place of {taken[path]}', "a place holds one claim", f"--set {name}=/data-2"
            )
        taken[path] = name
