"""The ranks of this machine: started by torchrun's own agent, watched, and started again when one is lost."""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import torch
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hotloop.core.environment import environment
from hotloop.core.errors import HotloopError
from hotloop.core.job import RanksSection
from hotloop.core.stopping import STOPPED_EARLY
from hotloop.core.units import format_seconds
from hotloop.train.gpus import Answers
from hotloop.train.hang import Watch
from hotloop.train.interface import interface_towards
from hotloop.train.machines import ONE, End, Machines, Nodes
from hotloop.train.world import FAILED, FOLDER, PARENT, PEER_LOST, RESTARTS, RESUMED, SAVED

_LOOK_SECONDS = 0.2
_ABANDON_SECONDS = 5.0
_REPORTS_SECONDS = 10.0
"""For other machines to say what their ranks are at; it takes them two."""
_GRACE_SECONDS = 10.0
"""For ranks to find out by themselves that others are gone, and say how."""
_FROZEN_SECONDS = 1.0
"""So much later than it was to this process goes on if it was suspended with its ranks, as Slurm or a container may."""
_FRESH_SECONDS = 3600.0
"""Files whose times are all ten days old are removed from /tmp where systemd is asked to (tmpfiles.d(5))."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Lost:
    """Ranks that have ended otherwise than they should.

    Attributes:
        text: which, and how.
        outside: whether what ended the first of them was not itself: a signal, or another machine's ranks.
    """

    text: str
    outside: bool


def train_in_ranks(
    command: Sequence[str],
    number: int,
    settings: RanksSection,
    notify: Callable[[str], None],
    answering: Callable[[], Answers] | None = None,
    team: int = 1,
    nodes: Nodes = ONE,
) -> int:
    """Run a command as so many ranks on this machine until they have ended.

    A signal asks the ranks to save and stop, those of other machines too. If one is lost, all are started again and go
    on from the last checkpoint; not if what failed would fail again: bad input, an error before a single step, or the
    same kind of error after the same step as at the start before. Where GPUs do not answer after an error before a
    step, it is as many ranks as there are others.

    Args:
        command: the module and its arguments that each rank runs by `python -m`.
        answering: asks the GPUs; None on CPUs.
        team: so many ranks compute each layer together: there are always whole teams.
        nodes: this machine among those that train together.

    Returns:
        the exit code: the first rank's, or 1.

    Raises:
        HotloopError: a rank makes no progress, or other machines do not come.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it reports is told here, shorter
    gpus, limit = list[str](), settings.timeout.amount
    with (
        TemporaryDirectory(prefix="hotloop-ranks-") as name, _stopped_by_signals(Path(name) / "stop"),
        Machines(nodes, limit) as machines,
    ):  # fmt: skip
        reached, failed_before = _reached(nodes, notify), ""
        restarts = _Restarts(settings.restarts)
        for restart in machines.restarts():
            machines.begin(restart)
            attempt = _Attempt(Path(name), number, restart, limit, nodes, machines)
            lost = attempt.run(command, {**reached, **_after_a_loss(restart), **_visible(gpus)})
            if lost is None or attempt.said is not None:
                return _ended_with(attempt.said or 0, nodes, machines)
            if end := attempt.end:
                notify(end.text)
                machines.tell(end)
                return end.code
            if attempt.is_behind:
                continue
            may = restarts.may_follow(attempt.resumed_at) and not attempt.stopping
            comes_again = not lost.outside and attempt.failed != "" and attempt.failed == failed_before
            again = may and (lost.outside or attempt.progressed) and not comes_again
            if may and answering and not attempt.progressed and (left := _left(answering(), gpus, number, team)):
                notify(f"not all GPUs answer: going on with {', '.join(left)}")
                number, gpus, again = len(left), left, True
            if not again:
                notify(lost.text + (", as the start before did at that step" if comes_again else ""))
                return _given_up(lost, attempt.stopping, nodes, machines)
            notify(f"{lost.text}; starting all again from {attempt.next_start} ({restarts}){_told(_after_a_loss(1))}")
            failed_before = attempt.failed
    raise AssertionError


def _ended_with(code: int, nodes: Nodes, machines: Machines) -> int:
    if code:
        machines.tell(End(code, f"machine {nodes.rank} ended with {code}"))
    return code


class _Restarts:
    """How often all are started again: so many times from the same checkpoint, as any that is lost once in a while must
    not end a training of weeks.
    """

    def __init__(self, most: int) -> None:
        self._most, self._used, self._resumed_at = most, 0, 0

    def may_follow(self, resumed_at: int) -> bool:
        """Whether another one may, after a start that went on from this step has been lost."""
        if resumed_at > self._resumed_at:
            self._resumed_at, self._used = resumed_at, 0
        self._used += 1
        return self._used <= self._most

    def __str__(self) -> str:
        return f"{self._used} of {self._most}"


def _given_up(lost: Lost, stopping: bool, nodes: Nodes, machines: Machines) -> int:
    """Tell the other machines; the exit code: a stop's where one was asked for, as what was saved last is there."""
    code = STOPPED_EARLY if stopping and lost.outside else 1
    machines.tell(End(code, f"{lost.text}, on machine {nodes.rank}"))
    return code


def _reached(nodes: Nodes, notify: Callable[[str], None]) -> dict[str, str]:
    """Over which interface ranks of several machines talk, where nobody has said it; NCCL finds its own."""
    name = "" if nodes.number == 1 or "GLOO_SOCKET_IFNAME" in os.environ else interface_towards(nodes.host)
    if name:
        notify(f"GLOO_SOCKET_IFNAME={name}: it reaches {nodes.host}")
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def _visible(gpus: Sequence[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}


def _after_a_loss(restart: int) -> dict[str, str]:
    """NCCL tells what it does, thousands of lines of it, only where something has failed before."""
    wanted = restart > 0 and torch.cuda.is_available() and "NCCL_DEBUG" not in os.environ
    return {"NCCL_DEBUG": "INFO"} if wanted else {}


def _told(variables: Mapping[str, str]) -> str:
    return "".join(f", with {name}={value}" for name, value in variables.items())


def _left(answers: Answers, used: Sequence[str], number: int, team: int) -> list[str]:
    """The GPUs to go on with; none if those that ranks have used all answer, or too few are left.

    Args:
        used: by ranks; nothing stands for the first ones.
    """
    if set(used or answers.asked[:number]) <= set(answers.answered):
        return []
    return list(answers.answered[: min(number, len(answers.answered)) // team * team])


class _Attempt:
    """All ranks once."""

    def __init__(
        self, folder: Path, number: int, restart: int, limit_seconds: float, nodes: Nodes, machines: Machines
    ) -> None:
        self._folder = folder
        self._number = number
        self._restart = restart
        self._limit = limit_seconds
        self._nodes = nodes
        self._machines = machines
        self._news_since = 0.0
        self._fresh_until = time.monotonic() + _FRESH_SECONDS
        self._has_reported = False
        self._lost: Lost | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()
        for old in [*folder.glob("heartbeat-*"), *folder.glob("stacks-*"), *folder.glob(f"{PEER_LOST}-*")]:
            old.unlink()
        for name in (FAILED, RESUMED):
            (folder / name).unlink(missing_ok=True)
        self._watch = Watch(folder, limit_seconds, machines.progress if nodes.number > 1 else None)

    @property
    def said(self) -> int | None:
        """The exit code that a rank has left: of an end, or of an error that would come again."""
        file = self._folder / "code"
        return int(file.read_text()) if file.exists() else None

    @property
    def failed(self) -> str:
        """After which step a rank had which kind of error; empty if none had one of its own."""
        file = self._folder / FAILED
        return file.read_text() if file.exists() else ""

    @property
    def resumed_at(self) -> int:
        """The step that ranks went on from; 0 if none has come so far."""
        file = self._folder / RESUMED
        return int(file.read_text()) if file.exists() else 0

    @property
    def next_start(self) -> str:
        """Where it begins, in words; of several machines the first one knows what is saved."""
        known = self.resumed_at or (self._folder / SAVED).exists() or self._nodes.number > 1
        return "the last checkpoint" if known else "the beginning, as nothing is saved yet"

    @property
    def stopping(self) -> bool:
        """Whether the ranks were asked to stop."""
        return (self._folder / "stop").exists()

    @property
    def end(self) -> End | None:
        """Of all machines, if there is nothing left to start."""
        several = self._nodes.number > 1
        if self.stopping and not self.progressed and (several or (self._lost and self._lost.outside)):
            who = f"machine {self._nodes.rank}" if several else "the training"
            return End(STOPPED_EARLY, f"{who} was asked to stop before anything was trained")
        return self._machines.over() if several else None

    @property
    def is_behind(self) -> bool:
        """Whether other machines were at a later start than the one to which this one came, as a replacement does."""
        return self._nodes.number > 1 and not self._watch.beats() and self._machines.is_ahead(self._restart)

    @property
    def progressed(self) -> bool:
        """Whether steps were done."""
        return any(beat.step for beat in self._watch.beats().values())

    def run(self, command: Sequence[str], variables: Mapping[str, str]) -> Lost | None:
        """Until all have ended; those that were lost.

        Args:
            variables: of the ranks, besides this process's.

        Raises:
            HotloopError: a rank makes no progress.
        """
        # In a thread the agent leaves signals to us; it starts and ends the processes, and ends all when one fails.
        # One that waits for other machines cannot be ended.
        agent = threading.Thread(
            target=self._launch, args=(command,), name="hotloop-agent", daemon=self._nodes.number > 1
        )
        with _of_ranks(self._folder, self._number, self._restart, variables):
            agent.start()
            hung, others = "", list[str]()
            try:
                while not self._has_ended():
                    self._report_if_asked()
                    if not hung and not self._machines.has_ended and (hung := self._watch.hung()):
                        self._machines.tell(End(1, hung))  # before another one comes to say what it waits for
                        self._has_reported = True
                        others = self._machines.ask_reports(self._restart, self._watch.report, _REPORTS_SECONDS)
                        _kill_ranks(self._folder)
                    if self._nodes.number > 1 and not hung and self._is_left():
                        return self._abandoned()
            except BaseException:  # a second Ctrl-C
                while not self._ended.wait(_LOOK_SECONDS):
                    _kill_ranks(self._folder)
                raise
        if hung and self.said is None:  # else the training has its end, and a process of it does not come to its own
            report = "\n".join([self._watch.report, *others])
            raise HotloopError(hung, report, "mend what holds it up, and start the same command again")
        if self._error:
            raise self._error
        return self._lost

    def _has_ended(self) -> bool:
        """Look a moment later. An interrupted `join` would take the thread for ended."""
        began = time.monotonic()
        ended = self._ended.wait(_LOOK_SECONDS)
        if (more := time.monotonic() - began - _LOOK_SECONDS) > _FROZEN_SECONDS:
            self._watch.forgive(more)
        if began > self._fresh_until:
            _refresh(self._folder)
            self._fresh_until = began + _FRESH_SECONDS
        return ended

    def _report_if_asked(self) -> None:
        """Another machine's ranks hang, perhaps as they wait for these."""
        if not self._has_reported and self._machines.are_asked(self._restart):
            self._has_reported = True
            self._machines.report(self._restart, self._watch.shown())

    def _is_left(self) -> bool:
        """Whether these ranks have nobody to train with. Those that train find out by themselves, as a rule."""
        begun, end = self._watch.beats(), self._machines.over()
        if not begun and self.stopping:
            return True
        if not (end and (end.told or not begun)) and not self._machines.is_ahead(self._restart):
            return False
        self._news_since = self._news_since or time.monotonic()
        return not begun or time.monotonic() - self._news_since > _GRACE_SECONDS

    def _abandoned(self) -> Lost:
        until = time.monotonic() + _ABANDON_SECONDS
        while _kill_ranks(self._folder) and time.monotonic() < until:
            self._ended.wait(_LOOK_SECONDS)
        return Lost("ranks of another machine are gone", outside=True)

    def _launch(self, command: Sequence[str]) -> None:
        nodes = self._nodes
        config = LaunchConfig(
            min_nodes=nodes.number, max_nodes=nodes.number, nproc_per_node=self._number, max_restarts=0,
            monitor_interval=0.1, logs_specs=DefaultLogsSpecs(log_dir=str(self._folder / "logs")),
            **nodes.meeting(self._restart, self._limit),
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)("-P", "-m", *command)  # the job's folder comes last in the path
        except ChildFailedError as error:
            # A signal comes from outside; others end with an error when they miss that rank, at the same look perhaps.
            killed = {rank: found for rank, found in error.failures.items() if found.exitcode < 0}
            rank, first = ChildFailedError(error.name, killed or error.failures).get_first_failure()
            number = -first.exitcode
            how = f"was ended by {_signal_name(number)}" if number > 0 else f"ended with {first.exitcode}"
            by_others = nodes.number > 1 and (self._folder / f"{PEER_LOST}-{rank}").exists()
            self._lost = Lost(f"rank {rank} {how}", outside=number > 0 or by_others)
        except (DistError, RendezvousError) as error:
            missed = nodes.number > 1
            self._error = _not_met(nodes, self._restart, self._limit, error) if missed else error
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


def _not_met(nodes: Nodes, restart: int, limit_seconds: float, error: Exception) -> HotloopError:
    return HotloopError(
        f"{nodes.number} machines have not met at {nodes.place(restart)} within {format_seconds(limit_seconds)}",
        next(iter(str(error).splitlines()), type(error).__name__),
        "see that each was started and has not ended, and that it reaches that port",
    )


def _kill_ranks(folder: Path) -> int:
    """Those that have not begun to show signs of life too; what hangs hears nothing else. Says how many there were."""
    mark, killed = f"{FOLDER}={folder}".encode(), 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_child = f"PPid:\t{os.getpid()}\n" in (process / "status").read_text()
            if is_child and mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)
                killed += 1
    return killed


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _of_ranks(folder: Path, number: int, restart: int, more: Mapping[str, str]) -> AbstractContextManager[None]:
    """The environment of the ranks; torchrun's agent gives them this process's."""
    added = {**more, FOLDER: str(folder), PARENT: str(os.getpid()), RESTARTS: str(restart)}
    if "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // number))
    return environment(added)


def _refresh(folder: Path) -> None:
    """All of it was read now, as far as its times tell."""
    for place, _, names in os.walk(folder):
        for path in (Path(place), *(Path(place) / name for name in names)):
            with suppress(FileNotFoundError):
                os.utime(path, (time.time(), path.stat().st_mtime))


@contextmanager
def _stopped_by_signals(file: Path) -> Iterator[None]:
    """Signals become a notice to the ranks; a second Ctrl-C interrupts at once, as usual. Afterwards the process only
    ends: signals are ignored, as they would change its exit code.
    """
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's stay so
    notices = {number: file.with_suffix(f".{number.name}") for number in heard}

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(FileNotFoundError):  # a second one of that kind
            notices[signal.Signals(number)].replace(file)
        try:
            os.utime(file)
        except FileNotFoundError:  # somebody has removed the notice
            file.write_text(signal.Signals(number).name)

    for number in heard:  # now: later the disk may be full
        notices[number].write_text(number.name)
    for number in heard:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, signal.SIG_IGN)
