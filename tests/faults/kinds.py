"""What is done to a training: each kind starts it, disturbs it, and says what must have come of that."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from faults.trials import STEPS, Started, Trial, started

STOPPED_EARLY = 75


@dataclass(frozen=True)
class Outcome:
    """Of a start that was disturbed.

    Attributes:
        wrong: what should not have been; empty if all was as it should.
        hung: it did not end, or left processes behind.
        damaged: a checkpoint that must not be continued.
    """

    wrong: str = ""
    hung: bool = False
    damaged: str = ""


Kind = Callable[[Trial, random.Random, float], Outcome]
"""Disturbs a trial; the float is how many seconds an undisturbed one takes."""


def killed(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """SIGKILL to any of its processes, at any moment. Of several ranks all are started again; one ends as it is."""
    with started(trial) as training:
        _wait(trial, training, moments, seconds)
        if training.process.poll() is None:
            _kill(moments.choice(training.processes() or [training.process.pid]))
    expected = (0, -signal.SIGKILL, STOPPED_EARLY)
    return _ended(training, (*expected, 1) if trial.setting == "one" else expected)


def terminated(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """SIGTERM at any moment: saved and 75, or it had ended, or had not begun."""
    with started(trial) as training:
        _wait(trial, training, moments, seconds)
        training.process.send_signal(signal.SIGTERM)
    return _ended(training, (0, STOPPED_EARLY, -signal.SIGTERM))


def notified(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """A notice while it starts, compiles, loads, trains, validates or saves."""
    notice = trial.run.with_suffix(".notice")
    code = trial.run.with_suffix(".code")
    trial = replace(trial, variables={"TORCHINDUCTOR_CACHE_DIR": str(code)})  # what others have compiled is not there
    steps = 22  # an epoch has 23
    phases: dict[str, Callable[[], bool]] = {
        "starting": lambda: True,
        "loading": lambda: bool(trial.records("step")) and bool(training.workers()),
        "training": lambda: bool(trial.records("step")),
        "validating": lambda: len(trial.records("step")) >= steps,
        "saving": lambda: any((trial.run / "checkpoints").glob(".epoch-*")),
    }
    if trial.setting == "compiled":
        phases = {"compiling": lambda: any(code.rglob("*.cpp"))}
    with started(trial, f"preemption.file={notice}", "preemption.every=0.1") as training:
        phase = moments.choice(sorted(phases))
        training.wait_until(phases[phase])
        with _held(training.workers() if phase == "loading" else []):
            notice.touch()
    notice.unlink()
    return _ended(training, (0, STOPPED_EARLY))


def worker_killed(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """SIGKILL to a process that loads data: the training goes on with another."""
    with started(trial) as training:
        training.wait_until(lambda: bool(trial.records("step")) and bool(training.workers()))
        if workers := training.workers():
            _kill(moments.choice(workers))
    return _ended(training, (0,))


def hung(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """A rank stops for good: it is named, and the job ends."""
    with started(trial, "ranks.timeout=6 s") as training:
        if training.wait_until(lambda: bool(trial.records("checkpoint"))):
            _kill(_rank(training, moments.randrange(2)), signal.SIGSTOP)
    named = "makes no progress" in training.err or training.code == 0
    outcome = _ended(training, (1, 0))
    return outcome if named else replace(outcome, wrong=outcome.wrong or "no rank was named")


@contextmanager
def _held(processes: list[int]) -> Iterator[None]:
    """They stand still for a second more than what is done inside takes: a batch is waited for."""
    for process in processes:
        _kill(process, signal.SIGSTOP)
    yield
    if processes:
        time.sleep(1.0)
    for process in processes:
        _kill(process, signal.SIGCONT)


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def _rank(training: Started, number: int) -> int:
    mark = f"RANK={number}".encode()
    for pid in training.processes():
        with suppress(OSError):
            status = Path("/proc", str(pid), "status").read_text()
            variables = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
            if mark in variables and f"PPid:\t{training.process.pid}\n" in status:
                return pid
    return training.process.pid  # the ranks have just ended, and it is about to


def disk_full(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """No room for the third checkpoint: the two before it stand."""
    size = 8_000_000 + moments.randrange(9_000_000)  # a checkpoint has 6 MB, and three are there while one is written
    with _small_disk(trial.run, size), started(trial) as training:
        pass
    full = training.code == 1 and "No space left" in training.err
    return _ended(training, (1,)) if full else Outcome(wrong=f"code {training.code}: {training.err[-300:]}")


@contextmanager
def _small_disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """A disk of that size at a place; afterwards what is on it lies there without."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", folder], check=True)
    aside = folder.with_suffix(".aside")
    try:
        yield
        shutil.copytree(folder, aside, symlinks=True)
    finally:
        subprocess.run(["umount", folder], check=True)
    folder.rmdir()
    aside.rename(folder)


def slow_disk(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """Each fsync takes a tenth of a second, and any process is killed meanwhile."""
    library = trial.run.with_suffix(".so")
    text = (
        "#include <unistd.h>\n#include <sys/syscall.h>\n"
        "int fsync(int f) { usleep(100000); return syscall(SYS_fsync, f); }\n"
    )
    command = ["gcc", "-shared", "-fPIC", "-xc", "-", "-o", library]
    subprocess.run(command, input=text, text=True, check=True)
    return killed(replace(trial, variables={"LD_PRELOAD": str(library)}), moments, seconds)


def damaged(trial: Trial, moments: random.Random, seconds: float) -> Outcome:
    """A file of the newest checkpoint is cut, changed by a bit, or gone: the one before is continued."""
    with started(trial) as training:
        training.wait_until(lambda: len(trial.checkpoints) >= 2)
        training.process.send_signal(signal.SIGTERM)
    newest = trial.checkpoints[-1]
    file = moments.choice(sorted(newest.iterdir()))
    content = bytearray(file.read_bytes())
    match moments.choice(["cut", "flipped", "gone"]):
        case "cut":
            file.write_bytes(content[: moments.randrange(len(content))])
        case "flipped":
            content[moments.randrange(len(content))] ^= 1 << moments.randrange(8)
            file.write_bytes(content)
        case "gone":
            file.unlink()
    return replace(_ended(training, (0, STOPPED_EARLY)), damaged=newest.name)


def _wait(trial: Trial, training: Started, moments: random.Random, seconds: float) -> None:
    """Until a moment between first breath and last; half of the times while it trains, as that is a part of it only."""
    if moments.random() < 0.5:
        step = moments.randrange(STEPS)
        training.wait_until(lambda: len(trial.records("step")) >= step)
        seconds = 0.05
    until = time.monotonic() + moments.uniform(0, seconds)
    training.wait_until(lambda: time.monotonic() >= until)


def _ended(training: Started, codes: tuple[int, ...]) -> Outcome:
    if training.hung:
        return Outcome(hung=True)
    return Outcome() if training.code in codes else Outcome(wrong=f"code {training.code}: {training.err[-300:]}")


KINDS: dict[str, tuple[Kind, tuple[str, ...], float]] = {
    "killed": (killed, ("one", "ddp", "fsdp", "ddp of 3", "fsdp of 4"), 1.0),
    "terminated": (terminated, ("one", "ddp", "fsdp", "ddp of 3", "fsdp of 4"), 0.5),
    "notified": (notified, ("one", "ddp", "fsdp", "compiled"), 0.2),
    "worker killed": (worker_killed, ("one", "ddp"), 0.1),
    "hung": (hung, ("ddp", "fsdp"), 0.1),
    "disk full": (disk_full, ("one", "ddp", "fsdp"), 0.1),
    "slow disk": (slow_disk, ("one", "fsdp"), 0.1),
    "damaged": (damaged, ("one", "fsdp"), 0.2),
}
"""Each with the settings that take turns, and its trials as a share of the kills."""
