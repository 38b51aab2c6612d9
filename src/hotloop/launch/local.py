"""This machine: a process of its own that outlives the terminal."""

import os
from collections.abc import Callable, Iterator, Sequence

from hotloop.core.errors import InputError
from hotloop.core.files import write_atomic
from hotloop.core.installed import require_torch
from hotloop.core.live import live_folder
from hotloop.core.machine import Machine, read_machine
from hotloop.core.units import count
from hotloop.launch.detached import is_alive, start_detached, terminate
from hotloop.launch.ending import first_error, read_end
from hotloop.launch.engine import Document, read_log
from hotloop.launch.files import absent_files
from hotloop.launch.held import VISIBLE, held, usable_gpus
from hotloop.launch.record import Launch
from hotloop.launch.render import render_script, this_python
from hotloop.launch.request import Request
from hotloop.launch.status import Status


class Local:
    """This machine.

    Args:
        machine: reads what it has.
    """

    look_seconds = 0.2

    def __init__(self, machine: Callable[[], Machine] = read_machine) -> None:
        self._machine = machine

    def gpus(self) -> int:
        """All of this machine that may be used."""
        return len(usable_gpus(self._machine(), os.environ))

    def check(self, request: Request) -> None:
        """As many GPUs as are asked for, torch and the data; what comes before it may yet bring these two."""
        if request.job.device != "cpu" and request.gpus > (here := len(self._usable(request))):
            raise InputError(
                f"{count(request.gpus, 'GPU')} are asked for, and this machine has {here}{_chosen(request)}",
                "each process trains on one of its own",
                f"--gpus {here}" if here else "--set device=cpu, or --on a cluster",
            )
        if request.job.launch.setup:
            return
        require_torch()
        for key, path in absent_files(request).items():
            raise InputError(
                f"{key}: there is no {path}", "a job's paths begin where it is launched", f"--set {key}=PATH"
            )

    def documents(self, requests: Sequence[Request]) -> list[Document]:
        """The script that the process runs."""
        if requests[0].nodes > 1:
            raise InputError(
                f"{count(requests[0].nodes, 'machine')} on local",
                "local is this machine alone",
                "--on slurm, or --nodes 1",
            )
        if len(requests) > 1:
            raise InputError(
                f"a sweep of {len(requests)} on local",
                "they would share this machine's GPUs and slow each other",
                "--on slurm; or hotloop tune, which takes one after another",
            )
        return [Document("launch.sh", render_script("local.sh.jinja", requests[0], command=this_python()))]

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Start it; its process number."""
        request = requests[0]
        script = request.folder / "launch.sh"
        write_atomic(script, self.documents(requests)[0].text)
        number = 0 if request.job.device == "cpu" else request.gpus
        with held(self._usable(request), number, request.name, live_folder()) as files:
            return [start_detached(["/bin/bash", str(script)], request, files)]

    def _usable(self, request: Request) -> list[str]:
        return usable_gpus(self._machine(), {**os.environ, **request.environment})

    def status(self, launch: Launch) -> Status:
        """By its process and what that has left."""
        if (end := read_end(launch)) is not None:
            return end
        if launch.host != os.uname().nodename:
            return Status("lost", f"it was started on {launch.host}, and can be asked there")
        if is_alive(launch):
            return Status("running", hosts=launch.host, starts=1)
        return read_end(launch) or Status("lost", first_error(launch) or "its process is gone", starts=1)

    def log(self, launch: Launch, follow: bool) -> Iterator[str]:
        """Of its file."""
        return read_log(launch.log_file, follow, lambda: self.status(launch).ended, self.look_seconds)

    def cancel(self, launch: Launch) -> None:
        """SIGTERM: it saves and stops."""
        terminate(launch)


def _chosen(request: Request) -> str:
    value = {**os.environ, **request.environment}.get(VISIBLE)
    return "" if value is None else f", by {VISIBLE}={value}"
