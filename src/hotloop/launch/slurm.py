"""Slurm: a batch script that is submitted by sbatch, and starts again what was interrupted."""

import math
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.files import write_atomic
from hotloop.core.job import SlurmSection
from hotloop.core.units import count
from hotloop.launch.ending import first_error, read_end, write_end
from hotloop.launch.engine import Document, read_log
from hotloop.launch.files import absent_files, needed_files
from hotloop.launch.finding import LaunchFinding
from hotloop.launch.process import Run, run
from hotloop.launch.record import Launch
from hotloop.launch.render import render_script, this_python
from hotloop.launch.request import Request
from hotloop.launch.status import State, Status

_FRUITLESS = 3
"""So many starts in a row that have saved nothing new are the last."""
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT", "SUSPENDED")
_RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_ENDED: dict[str, tuple[State, str]] = {
    "COMPLETED": ("finished", ""),
    "CANCELLED": ("cancelled", ""),
    "TIMEOUT": ("failed", "it met its time limit before it had saved; raise launch.slurm.notice"),
    "OUT_OF_MEMORY": ("failed", "out of memory; raise launch.memory_gib"),
}
_EARLY_SECONDS, _LONGEST_NOTICE = 90, 65535
_GRES_GPU = re.compile(r"gpu:(?:[^:,()]+:)?(\d+)")


class Slurm:
    """The cluster whose sbatch is on the PATH.

    Args:
        run: runs its programs.
    """

    look_seconds = 2.0

    def __init__(self, run: Run = run) -> None:
        self._run = run
        self._cpus = 0  # a machine's share for the GPUs that are asked for, once sinfo has told

    def gpus(self) -> int:
        """Nobody knows on which machines it will run."""
        raise InputError(
            "how many GPUs of each machine are wanted is not said", "machines of a cluster differ", "--gpus 8"
        )

    def check(self, request: Request) -> None:
        """That Slurm is here, its partition is, and its machines are large enough."""
        wanted = request.job.launch.slurm.partition.split(",") if request.job.launch.slurm.partition else []
        answer = self._call(["sinfo", "--noheader", "--exact", "--format=%R|%D|%G|%c"])
        if answer.returncode:
            said = " ".join(answer.stderr.split())
            raise InputError("Slurm does not answer", said, "log in to the cluster's login node; scontrol ping")
        machines = [line.split("|") for line in answer.stdout.splitlines() if line.count("|") == 3]
        partitions = sorted({name for name, *_ in machines})
        absent = [name for name in wanted if name not in partitions]
        if machines and absent:
            raise InputError(
                f'launch.slurm.partition = "{absent[0]}" does not exist',
                f"there are {', '.join(partitions)}",
                f"--set launch.slurm.partition={partitions[0]}",
            )
        mine = [line for line in machines if not wanted or line[0] in wanted]
        where = f"by sinfo{', partition ' + ', '.join(wanted) if wanted else ''}"
        number = max((sum(int(line[1]) for line in mine if line[0] == name) for name in partitions), default=0)
        self._cpus = _share(request, [(_gpus(gres), _number(cpus)) for _, _, gres, cpus in mine], number, where)

    def documents(self, requests: Sequence[Request]) -> list[Document]:
        """The script for sbatch; of a sweep, one for an array of jobs.

        Raises:
            InputError: no script can hold what is asked for.
        """
        request = requests[0]
        launch = request.job.launch
        _check_names(requests)
        _check_alike(requests)
        _check_time(launch.slurm)
        _check_container(launch.slurm, launch.image)
        own_python = launch.slurm.containers == "none"
        needed = [request.directory, *([Path(sys.executable)] if own_python else []), *needed_files(request).values()]
        text = render_script(
            "slurm.sh.jinja", request, requests=requests, options=list(map(_line, _options(requests, self._cpus))),
            command=_command(request), ports=request.job.ranks.restarts + 2,
            step_options=_step_options(request), needed=needed, fruitless=_FRUITLESS,
        )  # fmt: skip
        return [Document("launch.sh", text, tuple(_findings(request, self._cpus)))]

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Hand the script to sbatch; the job's number, of one of an array with its place: 12_0."""
        script = requests[0].folder / "launch.sh"
        write_atomic(script, self.documents(requests)[0].text)
        # Of variables like SBATCH_PARTITION in the shell, which go before a script's lines, but not before words here.
        answer = self._call(["sbatch", "--parsable", *_options(requests, self._cpus), str(script)])
        if answer.returncode:
            said = " ".join(answer.stderr.split()).removeprefix("sbatch: error: ")
            raise InputError("Slurm refuses it", said, _mended(said))
        number = answer.stdout.strip().split(";")[0]
        return [number] if len(requests) == 1 else [f"{number}_{place}" for place in range(len(requests))]

    def status(self, launch: Launch) -> Status:
        """By squeue, what the script has left, and scontrol."""
        end = read_end(launch)
        starts = _starts(launch)
        if end and end.state != "saved":  # what is saved may be started again
            return Status(end.state, end.reason, starts=starts)
        answer = self._call(["squeue", "--noheader", "--states=all", f"--jobs={launch.id}", "--format=%T|%r|%N"])
        if answer.returncode and "Invalid job id" not in answer.stderr:
            raise HotloopError("Slurm does not answer", " ".join(answer.stderr.split()), "ask again later")
        state, reason, hosts = (*answer.stdout.strip().partition("\n")[0].split("|"), "", "", "")[:3]
        if state in _WAITING:
            return Status("waiting", reason.removeprefix("None"), starts=starts)
        if state in _RUNNING:
            return Status("running", hosts=hosts, starts=starts)
        if end := read_end(launch):  # written meanwhile
            return Status(end.state, end.reason, starts=starts)
        found = self._told(launch, state)
        if found.ended and found.state != "lost":
            write_end(launch, found)
        return Status(found.state, found.reason, starts=starts)

    def _told(self, launch: Launch, state: str) -> Status:
        """Of a job that has left no word, by Slurm's."""
        if launch.cancel_file.exists():
            return Status("cancelled")
        if state in _ENDED:
            return Status(*_ENDED[state])
        if state:
            return Status("failed", first_error(launch) or state.lower().replace("_", " "))
        return Status("lost", f"Slurm knows no job {launch.id}, and it has left no word")

    def log(self, launch: Launch, follow: bool) -> Iterator[str]:
        """Of its file, which the machines write on the disk that all share."""
        return read_log(launch.log_file, follow, lambda: self.status(launch).ended, self.look_seconds)

    def cancel(self, launch: Launch) -> None:
        """USR1 to the script, which passes it on; if it has not begun, it never will."""
        state = self._call(["squeue", "--noheader", f"--jobs={launch.id}", "--format=%T"]).stdout.strip()
        how = ["--batch", "--signal=USR1"] if state == "RUNNING" else []  # others begin by looking whether they may
        answer = self._call(["scancel", *how, launch.id])
        if answer.returncode:
            raise HotloopError(f"Slurm does not cancel {launch.id}", " ".join(answer.stderr.split()), "ask again later")

    def _call(self, command: Sequence[str]) -> "CompletedProcess[str]":
        try:
            return self._run(command)
        except FileNotFoundError:
            raise InputError(
                f"there is no {command[0]} here", "jobs are submitted where Slurm's programs are",
                "log in to the cluster's login node; on Debian: apt-get install slurm-client",
            ) from None  # fmt: skip


def _share(request: Request, sizes: Sequence[tuple[int, int]], number: int, where: str) -> int:
    """Processors of a machine that go with the GPUs that are asked for, on whichever it runs; 0 without GPUs.

    Args:
        sizes: GPUs and processors of each kind of machine.
        number: of all machines.
        where: they are.

    Raises:
        InputError: more is asked for than there is.
    """
    cpus = request.job.launch.cpus
    most, most_cpus = (max(found, default=0) for found in zip(*sizes, strict=True)) if sizes else (0, 0)
    if sizes and request.gpus > most:
        raise InputError(
            f"{count(request.gpus, 'GPU')} of a machine are asked for; the largest has {most}",
            where,
            f"--gpus {most}, and more --nodes" if most else "another launch.slurm.partition",
        )
    if sizes and cpus != "auto" and cpus > most_cpus:
        raise InputError(
            f"{count(cpus, 'processor')} of a machine are asked for; the largest has {most_cpus}",
            where,
            f"--set launch.cpus={most_cpus}",
        )
    if sizes and request.nodes > number:
        raise InputError(
            f"{count(request.nodes, 'machine')} are asked for, and there are {number}", where, f"--nodes {number}"
        )
    shares = [every * request.gpus // gpus for gpus, every in sizes if gpus >= request.gpus > 0]
    return max(1, min(shares)) if shares else 0


def _gpus(gres: str) -> int:
    return sum(map(int, _GRES_GPU.findall(gres)))


def _number(text: str) -> int:
    """Where machines differ, sinfo writes the least with a + after it."""
    return int(text.rstrip("+"))


def _check_names(requests: Sequence[Request]) -> None:
    for text in (str(requests[0].directory), *(str(request.folder) for request in requests)):
        if odd := {'"', "\n", "\\"} & set(text):
            raise InputError(
                f"Slurm's options cannot hold the folder {text!r}", f"it has {', '.join(map(repr, odd))}", "rename it"
            )


def _check_alike(requests: Sequence[Request]) -> None:
    """Raise InputError if jobs of one array would need different machines or variables."""
    first = requests[0]
    for other in requests:
        if (other.job.launch, other.environment, other.directory) != (
            first.job.launch,
            first.environment,
            first.directory,
        ):
            raise InputError(
                "the runs of this sweep differ in launch.* or ranks.processes",
                "they are one array of jobs, which have the same machines and variables",
                "launch them one by one",
            )


def _options(requests: Sequence[Request], cpus: int) -> list[str]:
    """Of sbatch, a word each.

    Args:
        cpus: of a machine, where the job leaves it open; 0: as Slurm has it.
    """
    request = requests[0]
    launch, own = request.job.launch, request.job.launch.slurm
    cpus = cpus if launch.cpus == "auto" else launch.cpus
    given = {
        "--job-name": request.name, "--nodes": str(request.nodes), "--ntasks-per-node": "1",
        "--gres": f"gpu:{request.gpus}" if request.gpus else "",
        "--cpus-per-task": str(cpus or ""),
        "--mem": "" if launch.memory_gib == "auto" else f"{launch.memory_gib}G",
        "--partition": own.partition, "--account": own.account, "--qos": own.qos, "--time": own.time,
        "--signal": f"B:USR1@{round(own.notice.amount)}",
        "--array": f"0-{len(requests) - 1}" if len(requests) > 1 else "",
        "--output": str(request.folder / "log.txt").replace("%", "%%") if len(requests) == 1 else "/dev/null",
        "--open-mode": "append",
    }  # fmt: skip
    return [*(f"{name}={value}" for name, value in given.items() if value), "--requeue", *own.options]


def _findings(request: Request, cpus: int) -> Iterator[LaunchFinding]:
    if request.gpus and request.job.launch.cpus == "auto" and not cpus:
        yield LaunchFinding(
            "cpus-default",
            "launch.cpus is auto: the GPUs' share of a machine, if sinfo tells it when this is submitted; else many "
            "clusters give one processor to all of a machine's processes",
            f"--set launch.cpus={8 * request.gpus}, or what a machine has",
        )
    for key, path in absent_files(request).items():
        yield LaunchFinding(
            "data-not-here",
            f"{key}: there is no {path} on this machine",
            f"have it on all that train, or --set {key}=PATH",
        )


def _line(option: str) -> str:
    """Of a script, where sbatch takes quotation marks around a value."""
    name, equals, value = option.partition("=")
    return option if re.fullmatch(r"[\w./:@%+=,-]*", value) else f'{name}{equals}"{value}"'


def _step_options(request: Request) -> list[str]:
    """Of srun: one agent a machine, none of which ends the others."""
    launch = request.job.launch
    given = ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]
    if launch.slurm.containers == "pyxis":
        mounts = ",".join(f"{folder}:{folder}" for folder in _folders(request))
        given += [f"--container-image={launch.image}", f"--container-mounts={mounts}"]
        given += [f"--container-workdir={request.directory}"]
    return [shlex.quote(one) for one in given]


def _command(request: Request) -> list[str]:
    launch = request.job.launch
    if launch.slurm.containers == "apptainer":
        binds = [word for folder in _folders(request) for word in ("--bind", str(folder))]
        words = ["apptainer", "exec", "--nv", *binds, "--pwd", str(request.directory), launch.image, "hotloop"]
        return [shlex.quote(word) for word in words]
    return ["hotloop"] if launch.slurm.containers == "pyxis" else this_python()


def _folders(request: Request) -> list[Path]:
    """That a container has to see."""
    inner = (request.run_dir.parent, request.folder, *needed_files(request).values())
    return [request.directory, *(folder for folder in inner if not folder.is_relative_to(request.directory))]


def _starts(launch: Launch) -> int:
    """By what the script writes."""
    try:
        return int((Path(launch.folder) / "starts").read_text())
    except (OSError, ValueError):
        return 0


_FIXES = {
    "account": "--set launch.slurm.account=NAME; sacctmgr show associations user=$USER lists yours",
    "partition": "--set launch.slurm.partition=NAME; sinfo lists them",
    "qos": "--set launch.slurm.qos=NAME; sacctmgr show qos lists them",
    "time limit": "--set launch.slurm.time=LIMIT; sinfo shows each partition's",
    "generic resource": "--gpus N; sinfo --format=%G shows what machines have",
    "node configuration": "fewer --gpus, --set launch.cpus or launch.memory_gib; sinfo --long shows what machines have",
    "memory": "--set launch.memory_gib=N",
}


def _mended(said: str) -> str:
    found = [fix for word, fix in _FIXES.items() if word in said.lower()]
    return found[0] if found else "hotloop launch ... --dry-run shows the script"


def _check_time(own: SlurmSection) -> None:
    """A start has to have time before its notice, which Slurm may send a minute early (sbatch's manual, --signal)."""
    if own.notice.unit != "seconds" or own.notice.amount > _LONGEST_NOTICE:
        raise InputError(
            f'launch.slurm.notice = "{own.notice}"',
            f"it is a time, at most {_LONGEST_NOTICE} s for Slurm",
            '--set launch.slurm.notice="2 min"',
        )
    limit = _seconds(own.time)
    if limit and limit < own.notice.amount + _EARLY_SECONDS:
        raise InputError(
            f'launch.slurm.time = "{own.time}" leaves no time to train before a notice of {own.notice}',
            "Slurm may send that a minute early",
            f"--set launch.slurm.time={math.ceil((own.notice.amount + _EARLY_SECONDS) / 60)} or more",
        )


def _seconds(time: str) -> int:
    """Of a limit as Slurm writes it: minutes, minutes:seconds, h:minutes:seconds, days-h[:minutes[:seconds]]."""
    days, _, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":") if part]
    if days:
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:
        parts += [0]
    total = 0
    for part in parts:
        total = 60 * total + part
    return total + 86400 * int(days or 0)


def _check_container(own: SlurmSection, image: str) -> None:
    if own.containers != "none" and not image:
        raise InputError(
            f'launch.slurm.containers = "{own.containers}" without launch.image',
            "a container needs an image",
            "--set launch.image=IMAGE, or --set launch.slurm.containers=none",
        )
