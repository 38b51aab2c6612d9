"""Several ranks on this machine: started by torchrun's own agent, watched, and started again when one is lost."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hotloop.core.errors import HotloopError
from hotloop.core.job import RanksSection
from hotloop.train.gpus import Answers
from hotloop.train.hang import Watch
from hotloop.train.world import FOLDER, PARENT, RESTARTS

_LOOK_SECONDS = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_STOPPED_EARLY = 75


@dataclass(frozen=True)
class Lost:
    """Ranks that have ended otherwise than they should.

    Attributes:
        text: which, and how.
        killed: whether a signal ended the first of them.
    """

    text: str
    killed: bool


def train_in_ranks(
    command: Sequence[str],
    number: int,
    settings: RanksSection,
    notify: Callable[[str], None],
    answering: Callable[[], Answers] | None = None,
    team: int = 1,
) -> int:
    """Run a command as so many ranks on this machine until they have ended.

    A signal asks the ranks to save and stop. If one is lost, all are started again and go on from the last checkpoint;
    not if what failed would fail again: bad input, or an error before a single step. Where GPUs do not answer after
    such an error, it is as many ranks as there are others.

    Args:
        command: the module and its arguments that each rank runs by `python -m`.
        answering: asks the GPUs; None on CPUs.
        team: so many ranks compute each layer together: there are always whole teams.

    Returns:
        the exit code: the first rank's, or 1.

    Raises:
        HotloopError: a rank makes no progress.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what it reports is told here, shorter
    gpus: list[str] = []
    with TemporaryDirectory(prefix="hotloop-ranks-") as name, _stopped_by_signals(Path(name) / "stop"):
        for restart in range(settings.restarts + 1):
            attempt = _Attempt(Path(name), number, restart, settings.timeout.amount)
            lost = attempt.run(command, {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
            if lost is None or attempt.said is not None:
                return attempt.said or 0
            may = restart < settings.restarts and not attempt.stopping
            again = may and (lost.killed or attempt.progressed)
            if may and answering and not attempt.progressed and (left := _left(answering(), gpus, number, team)):
                notify(f"not all GPUs answer: going on with {', '.join(left)}")
                number, gpus, again = len(left), left, True
            then = f"starting all again from the last checkpoint ({restart + 1} of {settings.restarts})"
            notify(f"{lost.text}; {then}" if again else lost.text)
            if not again:
                break
    return 1


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

    def __init__(self, folder: Path, number: int, restart: int, limit_seconds: float) -> None:
        self._folder = folder
        self._number = number
        self._restart = restart
        self._lost: Lost | None = None
        self._error: BaseException | None = None
        for old in [*folder.glob("heartbeat-*"), *folder.glob("stacks-*")]:
            old.unlink()
        self._watch = Watch(folder, number, limit_seconds)

    @property
    def said(self) -> int | None:
        """The exit code that a rank has left: of an end, or of an error that would come again."""
        file = self._folder / "code"
        return int(file.read_text()) if file.exists() else None

    @property
    def stopping(self) -> bool:
        """Whether the ranks were asked to stop."""
        return (self._folder / "stop").exists()

    @property
    def progressed(self) -> bool:
        """Whether steps were done."""
        return any(beat.beats for beat in self._watch.beats().values())

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> Lost | None:
        """Until all have ended; those that were lost.

        Args:
            environment: of the ranks, besides this process's.

        Raises:
            HotloopError: a rank makes no progress.
        """
        # In a thread the agent leaves signals to us; it starts and ends the processes, and ends all when one fails.
        agent = threading.Thread(target=self._launch, args=(command,), name="hotloop-agent")
        with _environment(self._folder, self._number, self._restart, environment):
            agent.start()
            hung = ""
            try:
                while agent.is_alive():
                    agent.join(_LOOK_SECONDS)
                    if not hung and (hung := self._watch.hung()):
                        _kill_ranks(self._folder)
            except BaseException:  # a second Ctrl-C
                while agent.is_alive():
                    _kill_ranks(self._folder)
                    agent.join(_LOOK_SECONDS)
                raise
        if hung:
            raise HotloopError(hung, self._watch.report, "mend what the stacks show, and start the same command again")
        if self._error:
            raise self._error
        return self._lost

    def _launch(self, command: Sequence[str]) -> None:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=self._number, run_id=f"hotloop-{os.getpid()}-{self._restart}",
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(self._folder / "logs")), local_addr="localhost",
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)("-P", "-m", *command)  # the job's folder comes last in the path
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            number = -first.exitcode
            how = f"was ended by {_signal_name(number)}" if number > 0 else f"ended with {first.exitcode}"
            self._lost = Lost(f"rank {rank} {how}", killed=number > 0)
        except BaseException as error:
            self._error = error


def _kill_ranks(folder: Path) -> None:
    """Those that have not begun to show signs of life too; what hangs hears nothing else."""
    mark = f"{FOLDER}={folder}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_child = f"PPid:\t{os.getpid()}\n" in (process / "status").read_text()
            if is_child and mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


@contextmanager
def _environment(folder: Path, number: int, restart: int, more: Mapping[str, str]) -> Iterator[None]:
    """Of the ranks; torchrun's agent gives them this process's."""
    added = {**more, FOLDER: str(folder), PARENT: str(os.getpid()), RESTARTS: str(restart)}
    before = {name: os.environ[name] for name in added if name in os.environ}
    if "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // number))
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _stopped_by_signals(file: Path) -> Iterator[None]:
    """Signals become a notice to the ranks; a second Ctrl-C interrupts at once, as usual."""

    def stop(number: int, frame: FrameType | None) -> None:
        unfinished = file.with_suffix(".part")
        unfinished.write_text(signal.Signals(number).name)
        unfinished.replace(file)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup's stay so
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
