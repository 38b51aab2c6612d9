"""The processes that train one model together, and what they say to each other besides gradients."""

import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.distributed_c10d import _abort_process_group

from hotloop.core.errors import HotloopError, InputError
from hotloop.core.job import Job
from hotloop.core.units import count
from hotloop.train.meeting import agents_store

_PR_SET_PDEATHSIG = 1
"""<sys/prctl.h>"""


_PATIENCE = 10
_OPEN_FILES = 1 << 17
_ALL_CONNECTED = 64
"""So many ranks notice at once, each by itself, that another one is gone; of more those do that talk to it."""
FOLDER, PARENT, RESTARTS = "HOTLOOP_RANKS_FOLDER", "HOTLOOP_RANKS_PARENT", "HOTLOOP_RANKS_RESTARTS"
"""Environment variables of ranks that `hotloop train` has started."""
_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Of those that torchrun has started."""

PEER_LOST = "peer-lost"
"""With its number, a word that a rank leaves that has ended because another one was lost."""
RESUMED = "resumed"
SAVED = "saved"
"""What ranks leave with the step that they go on from."""
FAILED = "failed"
"""What a rank leaves that ends with an error of its own: after which step, and of which kind."""


@dataclass(frozen=True)
class World:
    """This process among those that train with it.

    What is said here goes over the hosts' network (gloo), not over the GPUs', and every rank has to say it in the same
    order.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
        local_rank: its number on this host, which is that of its GPU.
        local_size: how many there are on this host.
        restarts: how often all of them have been started again.
        folder: where processes of this host leave what the one that has started them wants to know; empty: nobody does.
        group: over which ranks talk; without one this process has only itself to hear, as in a dry run.
        tensor: so many neighbours compute each layer together, and train on the same samples.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restarts: int = 0
    folder: str = ""
    group: Any = None
    tensor: int = 1

    @property
    def data_rank(self) -> int:
        """Which part of each batch is this rank's."""
        return self.rank // self.tensor

    @property
    def data_size(self) -> int:
        """How many parts a batch has."""
        return self.size // self.tensor

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and tells."""
        return self.rank == 0

    @property
    def where(self) -> str:
        """Added to what has happened on this rank: " on rank N"; nothing where one trains alone."""
        return f" on rank {self.rank}" if self.size > 1 else ""

    def note(self, name: str, text: str) -> None:
        """Leave a word for the process that has started this one, and for ranks that come after."""
        if self.folder:
            unfinished = Path(self.folder) / f"{name}-{self.rank}.part"
            unfinished.write_text(text)
            unfinished.replace(Path(self.folder) / name)

    def claims(self, name: str) -> bool:
        """Whether this rank is the first to ask for that: one is enough to tell what all have met."""
        if not self.folder:
            return True
        try:
            self._claim(name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def claimed(self, *names: str) -> bool:
        """Whether a rank of this host has asked for one of these."""
        return bool(self.folder) and any(self._claim(name).exists() for name in names)

    def _claim(self, name: str) -> Path:
        return Path(self.folder) / f"{name}-{self.restarts}"

    def noted(self, name: str) -> str:
        """What was left; empty if nothing was."""
        file = Path(self.folder) / name
        return file.read_text() if self.folder and file.exists() else ""

    def sum(self, values: list[float]) -> list[float]:
        """The sum of each value over the ranks, in float64."""
        return self._reduced(values, distributed.ReduceOp.SUM)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.any_of([flag])[0]

    def any_of(self, flags: list[bool]) -> list[bool]:
        """Of each, whether it is so on any rank."""
        return [bool(found) for found in self._reduced([float(flag) for flag in flags], distributed.ReduceOp.MAX)]

    def _reduced(self, values: list[float], operation: Any) -> list[float]:
        if self.group is None:
            return values
        numbers = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(numbers, op=operation, group=self.group)
        found: list[float] = numbers.tolist()
        return found

    def largest_later(self, values: Tensor) -> Any:
        """Begin to make each value the largest over the ranks; `wait()` on what comes back ends it."""
        return distributed.all_reduce(values, op=distributed.ReduceOp.MAX, group=self.group, async_op=True)

    def gathered(self, value: Any) -> list[Any]:
        """Each rank's value, by rank; on all ranks."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self.group)
        return found

    def gathered_on_first(self, value: Any) -> list[Any]:
        """Each rank's value, by rank, on the first; nothing on the others."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.size if self.first else []
        distributed.gather_object(value, found if self.first else None, dst=0, group=self.group)
        return found

    def from_first(self, value: Any) -> Any:
        """The first rank's value."""
        if self.group is None:
            return value
        held = [value]
        distributed.broadcast_object_list(held, src=0, group=self.group)
        return held[0]


ALONE = World()


TENSOR = ("tp", "fsdp+tp")
DIVIDED = ("fsdp", *TENSOR)
"""Values of `parallel` with which ranks have parts of weights."""


def in_teams(world: World, job: Job) -> World:
    """The ranks as a job has them compute layers together.

    Raises:
        InputError: their number cannot be divided so.
    """
    number = team_size(job, world.size)
    if world.size == 1:
        return world
    if world.size % number or (job.parallel == "tp" and number != world.size):
        whole = number if job.parallel == "tp" else world.size // number * number
        fewer = f"--set ranks.processes={whole}" if world.local_size == world.size else "--set parallel=fsdp"
        raise InputError(
            f"{count(world.size, 'process', 'processes')} cannot compute layers together by {number}",
            f'parallel = "{job.parallel}"',
            fewer if 1 < number < world.size else "--set ranks.tensor=auto",
        )
    return replace(world, tensor=number)


def team_size(job: Job, processes: int) -> int:
    """How many of so many ranks a job has compute each layer together."""
    if job.parallel not in TENSOR:
        return 1
    asked = job.ranks.tensor
    return asked if asked != "auto" else (processes if job.parallel == "tp" else 2)


def is_rank() -> bool:
    """Whether this process was started as one of several, by torchrun or as torchrun does; one may be left of them."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 or FOLDER in os.environ or _TORCHRUN in os.environ
    return several and "RANK" in os.environ


def under_torchrun() -> bool:
    """Whether torchrun itself has started this process."""
    return _TORCHRUN in os.environ and FOLDER not in os.environ


def check_share(job: Job, processes: int) -> None:
    """Raise InputError if a batch has not a sample for each process."""
    if job.data.batch_size < processes:
        raise InputError(
            f"data.batch_size = {job.data.batch_size} is less than the {processes} processes that share a batch",
            "each needs a sample of it",
            f"--set data.batch_size={processes}",
        )


_WHOLE_ONLY = ("adafactor", "rprop", "lbfgs", "sparseadam", "muon")
"""Optimizers that do not work on parts of weights."""


def needs_whole(job: Job, layers: bool = False) -> tuple[str, str]:
    """What a job asks for that divided weights do not go with, and what to set instead; nothing if it all does.

    Args:
        layers: whether layers are divided, too.
    """
    # float8's linear layers take whole weights, as FSDP2 gathers them
    obstacles = [
        (f'precision = "{job.precision}"', job.precision == "fp16", "precision=bf16"),
        ('precision = "float8"', job.precision == "float8" and layers, "precision=bf16, or --set parallel=fsdp"),
        (f"train.ema = {job.train.ema}", job.train.ema > 0, "train.ema=0"),
        (f"model.keep_fp32 = {job.model.keep_fp32}", bool(job.model.keep_fp32), "model.keep_fp32=[]"),
        (f'optimizer.name = "{job.optimizer.name}"', job.optimizer.name in _WHOLE_ONLY, "optimizer.name=adamw"),
        ("speed.graph = true", job.speed.graph is True, "speed.graph=auto"),
        ("ranks.static_graph = true", job.ranks.static_graph, "ranks.static_graph=false"),
    ]
    return next(((setting, other) for setting, given, other in obstacles if given), ("", ""))


def check_shardable(job: Job) -> None:
    """Raise InputError if a job asks for what divided weights do not go with."""
    layers = job.parallel in TENSOR
    setting, other = needs_whole(job, layers)
    if setting:
        raise InputError(
            f'{setting} does not go with parallel = "{job.parallel}"',
            "layers are divided among the ranks" if layers else "weights are divided among the ranks",
            f"--set {other}, or --set parallel=ddp",
        )


def processes_for(job: Job, nodes: int = 1) -> int:
    """How many processes of this machine train a job together.

    Args:
        nodes: how many machines do.

    Raises:
        InputError: there are not as many GPUs as it asks for, not as many samples in a batch, or settings do not go
            with each other.
    """
    gpus = torch.cuda.device_count() if job.device != "cpu" else 0
    asked = job.ranks.processes
    check_teams(job)
    if job.parallel == "none" and nodes > 1:
        raise InputError(
            f'parallel = "none" does not go with {nodes} machines', "one process trains alone", "--set parallel=auto"
        )
    if job.parallel == "none":
        return 1
    if job.parallel in DIVIDED:
        check_shardable(job)
    if asked == "auto":
        check_share(job, _parts(job, nodes))
        return max(1, min(gpus, job.data.batch_size // nodes * team_size(job, gpus)))
    check_share(job, _parts(job, asked * nodes))
    if (job.device == "cuda" or (gpus and job.device == "auto")) and asked > gpus:
        raise InputError(
            f"ranks.processes = {asked} is more than the {count(gpus, 'GPU')} here",
            "each process trains on one of its own",
            f"--set ranks.processes={gpus}",
        )
    return asked


def check_teams(job: Job) -> None:
    """Raise InputError for settings of layers that several compute where none does, or the other way round."""
    layers = job.parallel in TENSOR
    if job.ranks.tensor != "auto" and not layers:
        raise InputError(
            f'ranks.tensor = {job.ranks.tensor} does not go with parallel = "{job.parallel}"',
            "each rank computes whole layers",
            "--set parallel=fsdp+tp, or leave ranks.tensor out",
        )
    if job.ranks.gradients == "bf16" and job.parallel == "tp":
        raise InputError(
            f'ranks.gradients = "bf16" does not go with parallel = "{job.parallel}"',
            "what ranks send within layers has the type it is computed in",
            "--set ranks.gradients=fp32, or --set parallel=fsdp",
        )


def _parts(job: Job, processes: int) -> int:
    """In how many parts so many processes share a batch: those that compute layers together have the same samples."""
    return max(1, processes // team_size(job, processes))


def unused_gpus(job: Job, processes: int) -> str:
    """In a line, that a batch has no samples for some of this machine's GPUs; empty if all are used, or as asked for.

    Args:
        processes: of this machine, that are to train.
    """
    gpus = torch.cuda.device_count() if job.device != "cpu" else 0
    if job.parallel == "none" or job.ranks.processes != "auto" or processes >= gpus:
        return ""
    return f"{processes} of {count(gpus, 'GPU')} train: data.batch_size = {job.data.batch_size} has no samples for more"


@contextmanager
def joined_world(device: str, timeout_seconds: float) -> Iterator[World]:
    """Join the processes that the environment tells of; alone if it tells of none.

    Args:
        device: "cuda", or "auto" where there are GPUs, gives each process the GPU of its number.
        timeout_seconds: after which a rank that waits for another one gives up.

    At the end ranks wait for each other; one that an exception ends does not.
    """
    folder = os.environ.get(FOLDER, "")
    if folder:  # nobody else would end a rank whose parent was killed; SIGUSR1 has it save first
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGUSR1))
        if os.getppid() != int(os.environ[PARENT]):
            raise SystemExit("the process that has started this rank is gone")
    if not is_rank() or os.environ.get("WORLD_SIZE", "1") == "1":
        yield replace(ALONE, folder=folder, restarts=int(os.environ.get(RESTARTS, "0")))
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    _allow_open_files()
    _connect_when_needed(int(os.environ["WORLD_SIZE"]))
    # Who has started the ranks looks after them, and can say which one hangs.
    timeout = timedelta(seconds=timeout_seconds * (_PATIENCE if folder else 1))
    group = _joined(device, local, timeout, folder)
    try:
        yield World(
            rank=distributed.get_rank(),
            size=distributed.get_world_size(),
            local_rank=local,
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            restarts=int(os.environ.get(RESTARTS, "0")),
            folder=folder,
            group=group,
        )
    except BaseException:  # NCCL's shutdown would wait for the others, which wait for this rank in a collective
        with suppress(RuntimeError):  # after an error of the GPU each call raises that error again
            _abort_process_group()
        raise
    distributed.destroy_process_group()


def _allow_open_files() -> None:
    """For some 40,000 ranks, if that may be: the first of them is connected with all others; 1,024 are usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _connect_when_needed(ranks: int) -> None:
    """Let gloo connect those of many ranks that talk to each other, when they first do, and not each with all.

    All would have to read of each other in the store: of 1,024 ranks for minutes at every start, of 8,192 for hours;
    and have 3,000 or 25,000 connections each in place of some 60 (bench/scale.py). In torch since 2.7.
    """
    if ranks > _ALL_CONNECTED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def _joined(device: str, local: int, timeout: timedelta, folder: str) -> Any:
    """The group over the hosts' network, of all ranks.

    Raises:
        HotloopError: the others were not met.
    """
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.set_device(local)
    try:
        store = agents_store(timeout) if under_torchrun() else None
        known = {"store": store, "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        place: dict[str, Any] = known if store else {}
        if on_gpu:
            where = torch.device("cuda", local)
            distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=where, **place)
        else:
            distributed.init_process_group("gloo", timeout=timeout, **place)
        return distributed.new_group(backend="gloo", timeout=timeout)
    except (distributed.DistError, RuntimeError) as error:
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        if folder:
            (Path(folder) / f"{PEER_LOST}-{rank}").touch()
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise HotloopError(
            f"rank {rank} has not joined the other {count(int(size) - 1, 'rank')}",
            next(iter(str(error).splitlines()), type(error).__name__),
            f"see that all were started and reach {address}; GLOO_SOCKET_IFNAME chooses the network",
        ) from error


BY_OTHERS = (
    "closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Connection closed", "Socket Timeout",
    "remote process exited", "ncclRemoteError",
)  # fmt: skip
"""In errors that say that another rank has ended; others of NCCL's may be this rank's own."""
_LOST = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "NCCL", "Socket Timeout")


def peer_lost(error: Exception) -> str:
    """What says that another rank is gone, in a line; empty if this is an error of another kind.

    Torch raises none of Python's own: these are of a service that the user's code has asked, say.
    """
    if isinstance(error, OSError | HotloopError):
        return ""
    lines = str(error).strip().splitlines()
    lost = isinstance(error, distributed.DistError) or any(word in str(error) for word in _LOST)
    return lines[0] if lost and lines else ""
