"""Files and folders of a job that have to be there before it starts."""

from pathlib import Path

from hotloop.core.job import CustomTask
from hotloop.launch.request import Request


def needed_files(request: Request) -> dict[str, Path]:
    """Key of the job -> path, on the machines that train.

    Of a range of shards its folder. Left out: object storage, and data of a task of one's own, which may be no files.
    """
    job = request.job
    data = {} if isinstance(job.task, CustomTask) else {"data.train": job.data.train, "data.val": job.data.val or ""}
    given = {**data, "launch.topology_file": job.launch.topology_file}
    plain = {key: Path(text) for key, text in given.items() if text and "://" not in text}
    return {key: request.directory / (path.parent if "{" in path.name else path) for key, path in plain.items()}


def absent_files(request: Request) -> dict[str, Path]:
    """Those that are not on this machine."""
    return {key: path for key, path in needed_files(request).items() if not path.exists()}
